"""Loss, gradients and routing are the same on every mesh: whole models, with noise and dropout, by the partitioner."""

import functools

import jax
import numpy as np
import pytest

from moe import models
from moe import networks
from moe import routing
from moe import rules
from moe import training
from moe.partitioner import MoePjitPartitioner
from t5x_lite import optimizers
from t5x_lite import schedules
from t5x_lite import train_state as train_state_lib
from t5x_lite import trainer as trainer_lib
from t5x_lite import tree_utils
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError
from tests.networks import network_cases as cases

_CAPACITIES = dict(train_capacity_factor=1.0, eval_capacity_factor=2.0, min_expert_capacity=2)


@functools.cache
def _model(kind, num_experts):
  """Return a model whose encoder and decoder have one sparse layer each."""
  block = functools.partial(
    networks.SparseBlock, num_experts=num_experts, expert_dim=16, group_size=16
  )
  tokens = functools.partial(routing.TokensChooseRouter, num_experts, jitter_noise=0.1)
  dropless = block(router=tokens(num_selected=2, normalize_gates=True))
  if kind == 'tokens choose':
    blocks = dict(block=dropless, decoder_block=block(router=tokens(num_selected=1), **_CAPACITIES))
  else:
    router = routing.ExpertsChooseRouter(num_experts, jitter_noise=0.1)
    blocks = dict(
      block=block(router=router, **_CAPACITIES),
      decoder_block=block(
        router=tokens(num_selected=2, batch_prioritized_routing=True, capacity_scope='global'),
        **_CAPACITIES,
      ),
    )
  config = cases.tiny_config(
    num_heads=4, num_encoder_layers=1, num_decoder_layers=1, dropout_rate=0.1
  )
  sparse = networks.SparseFeedForward(
    num_encoder_layers=1,
    num_decoder_layers=1,
    encoder_layout='every_1',
    decoder_layout='every_1',
    **blocks,
  )
  vocabulary = vocabularies.PassThroughVocabulary(40)
  return models.MoeEncoderDecoderModel(
    cases.t5.Transformer(config, sparse),
    vocabulary,
    vocabulary,
    optimizers.sgd(0.1),
    z_loss=1e-4,
    aux_loss_factor=0.01,
    router_z_loss_factor=0.001,
  )


@functools.cache
def _batch():
  return jax.device_get(cases.tiny_batch(batch=16, encoder_length=8, decoder_length=8))


@functools.cache
def _state(kind, num_experts):
  """Return a train state of random parameters."""
  model = _model(kind, num_experts)
  shapes = {name: x.shape for name, x in _batch().items()}
  variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (0.3 * rng.standard_normal(x.shape)).astype(np.float32), variables['params']
  )
  return jax.device_get(
    train_state_lib.FlaxOptimTrainState.create(model.optimizer_def, {**variables, 'params': params})
  )


def _step(model, params, batch):
  """Return loss, gradients and who went where."""

  def loss_fn(params):
    loss, (_, collections) = model.loss_fn(params, batch, jax.random.key(7), {'routing': {}})
    return loss, collections['routing']

  (loss, routed), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
  return loss, grads, routed


@functools.cache
def _expected(kind, num_experts):
  step = jax.jit(functools.partial(_step, _model(kind, num_experts)))
  return jax.device_get(step(_state(kind, num_experts).params, _batch()))


def _check(kind, num_experts, partitioner):
  axes = partitioner.get_mesh_axes(_state(kind, num_experts)).params
  step = partitioner.partition(
    functools.partial(_step, _model(kind, num_experts)),
    (axes, partitioner.data_partition_spec),
    (None, axes, None),
  )
  loss, grads, routed = step(_state(kind, num_experts).params, _batch())
  expected_loss, expected_grads, expected_routed = _expected(kind, num_experts)
  for (name, got), expected in zip(
    tree_utils.named_leaves(routed), jax.tree.leaves(expected_routed), strict=True
  ):
    if np.issubdtype(got.dtype, np.integer):
      np.testing.assert_array_equal(got, expected, err_msg=name)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
  for (name, got), expected in zip(
    tree_utils.named_leaves(grads), jax.tree.leaves(expected_grads), strict=True
  ):
    error = np.linalg.norm(np.asarray(got) - expected)
    assert error <= 1e-5 * np.linalg.norm(expected), (name, error, np.linalg.norm(expected))
    if '/expert/' in name:
      assert np.linalg.norm(expected) > 1e-3, name


# (expert partitions, model partitions): meshes (data, expert, model) of 8 devices.
_HEAD = [(2, 2), (1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (1, 2), (2, 4)]


@pytest.mark.full  # by default, test_microbatches.py has a model on a mesh, routing/test_mesh.py the routers
@pytest.mark.parametrize(
  'kind', ['tokens choose', pytest.param('experts choose', marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
  'partitions', [_HEAD[0], *(pytest.param(p, marks=pytest.mark.full) for p in _HEAD[1:])]
)
def test_second_form(kind, partitions):
  num_expert_partitions, num_partitions = partitions
  partitioner = MoePjitPartitioner(
    num_expert_partitions=num_expert_partitions, num_partitions=num_partitions
  )
  assert partitioner.mesh.shape['expert'] == num_expert_partitions
  _check(kind, 8, partitioner)


@pytest.mark.full
@pytest.mark.parametrize('dims', [(1, 1), (1, 2), (2, 2)])
def test_second_form_with_sharded_parameters(dims):
  axis_rules = rules.head_logical_axis_rules(*dims)
  _check(
    'tokens choose',
    8,
    MoePjitPartitioner(num_expert_partitions=2, num_partitions=2, logical_axis_rules=axis_rules),
  )


# Two slices of 4 devices: (mesh within a slice, over slices, expert partitions, dims of the rules).
_SLICES = [
  ((1, 2, 2), (2, 1, 1), 2, (2, 2)),
  ((1, 4, 1), (2, 1, 1), 4, (1, 1)),
  ((1, 4, 1), (2, 1, 1), 2, (1, 2)),
  ((1, 4, 1), (1, 2, 1), 2, (1, 1)),
  ((2, 2, 1), (2, 1, 1), 2, (1, 1)),
  ((1, 2, 2), (2, 1, 1), 1, (1, 2)),
  ((1, 4, 1), (1, 1, 2), 4, (1, 2)),
]


@pytest.mark.parametrize(
  'kind', ['tokens choose', pytest.param('experts choose', marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
  'case', [_SLICES[0], *(pytest.param(case, marks=pytest.mark.full) for case in _SLICES[1:])]
)
def test_slices(kind, case):
  ici_mesh_shape, dcn_mesh_shape, num_expert_partitions, dims = case
  partitioner = MoePjitPartitioner(
    num_expert_partitions=num_expert_partitions,
    ici_mesh_shape=ici_mesh_shape,
    dcn_mesh_shape=dcn_mesh_shape,
    logical_axis_rules=rules.head_logical_axis_rules(*dims),
  )
  assert partitioner.mesh.shape['expert'] == num_expert_partitions
  _check(kind, 8, partitioner)


@pytest.mark.full
@pytest.mark.parametrize('kind', ['tokens choose', 'experts choose'])
@pytest.mark.parametrize('ici_mesh_shape,num_experts', [((1, 4, 1), 4), ((1, 2, 2), 8)])
def test_slices_in_the_first_form(kind, ici_mesh_shape, num_experts):
  _check(
    kind,
    num_experts,
    MoePjitPartitioner(num_experts, ici_mesh_shape=ici_mesh_shape, dcn_mesh_shape=(2, 1, 1)),
  )


_FIRST = [(4, 1), (2, 1), (8, 1), (16, 1), (8, 2), (8, 4), (16, 4)]


@pytest.mark.full
@pytest.mark.parametrize('kind', ['tokens choose', 'experts choose'])
@pytest.mark.parametrize('num_experts,num_partitions', _FIRST)
def test_first_form(kind, num_experts, num_partitions):
  _check(
    kind, num_experts, MoePjitPartitioner(num_experts=num_experts, num_partitions=num_partitions)
  )


# ---- Training --------------------------------------------------------------------------------------------------------


def _after_one_step(partitioner, **options):
  """Return the parameters after a step of SGD, and the loss."""
  model, state = _model('tokens choose', 8), _state('tokens choose', 8)
  with trainer_lib.Trainer(
    model,
    partitioner.move_params_to_devices(state, partitioner.get_mesh_axes(state)),
    partitioner,
    (),
    None,
    partitioner.get_mesh_axes(state),
    jax.random.key(0),
    schedules.create_learning_rate_scheduler('constant', base_learning_rate=0.1),
    **options,
  ) as trainer:
    loss = trainer.train(iter([_batch()]), 1).result()['loss'].value
    return jax.device_get(trainer.train_state.params), loss


@pytest.mark.full
def test_a_step_of_the_trainer_on_two_meshes_one_with_scaled_gradients():
  params, loss = _after_one_step(MoePjitPartitioner(num_expert_partitions=4, num_partitions=2))
  others, other_loss = _after_one_step(
    MoePjitPartitioner(num_experts=8, num_partitions=2),
    gradient_transform=training.scale_expert_gradients(4),
  )
  np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
  before = _state('tokens choose', 8).params
  for (name, old), new, other in zip(
    tree_utils.named_leaves(before), jax.tree.leaves(params), jax.tree.leaves(others), strict=True
  ):
    step, other_step = new - old, other - old
    assert np.linalg.norm(step) > 0, name
    factor = 4 if '/expert/' in name else 1
    rounding = 1e-7 * np.linalg.norm(old)
    assert (
      np.linalg.norm(other_step - factor * step)
      <= 1e-5 * np.linalg.norm(other_step) + rounding * factor
    ), name


def test_scaled_gradients():
  grads = {
    'mlp': {'expert': {'wi': {'kernel': np.ones(3)}}, 'router': {'w': np.ones(2)}},
    'scale': np.ones(1),
  }
  scaled = training.scale_expert_gradients(4)(grads)
  assert (
    scaled['mlp']['expert']['wi']['kernel'][0] == 4
    and scaled['mlp']['router']['w'][0] == scaled['scale'][0] == 1
  )
  scaled = training.scale_expert_gradients(2, match='scale')(grads)
  assert scaled['mlp']['expert']['wi']['kernel'][0] == 1 and scaled['scale'][0] == 2
  with pytest.raises(
    ConfigError, match="matches the full name of at least one parameter, such as 'mlp/expert/wi"
  ):
    training.scale_expert_gradients(2, match='expert')(grads)
  with pytest.raises(ConfigError, match='num_expert_partitions. must be .*got 0'):
    training.scale_expert_gradients(0)
  with pytest.raises(ConfigError, match='must be a regular expression'):
    training.scale_expert_gradients(2, match='(')
