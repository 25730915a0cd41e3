"""Each expert has its own adapter, in every form of dispatch and on meshes with experts."""

import functools

import jax
import numpy as np
import pytest

from moe import models
from moe import networks
from moe import routing
from moe.partitioner import MoePjitPartitioner
from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import train_state as train_state_lib
from t5x_lite import tree_utils
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError
from t5x_lite.trainer import state_init
from t5x_lite.trainer import train_step
from t5x_lite.trainer import trainer as trainer_lib
from tests.adapters import adapter_cases
from tests.networks import network_cases as cases

_ADAPTER = adapters.Lora(rank=2, targets='all')
_CAPACITIES = dict(train_capacity_factor=1.5, eval_capacity_factor=2.0, min_expert_capacity=2)


@functools.cache
def _batch():
  return jax.device_get(cases.tiny_batch(batch=16, encoder_length=8, decoder_length=8))


def _model(adapter, capacities=None, num_layers=1, use_bias=False, **fields):
  block = networks.SparseBlock(
    num_experts=4,
    expert_dim=16,
    group_size=16,
    router=routing.TokensChooseRouter(4, num_selected=2, use_bias=use_bias),
    **(capacities or {}),
  )
  sparse = networks.SparseFeedForward(
    num_encoder_layers=num_layers,
    num_decoder_layers=num_layers,
    encoder_layout='every_1',
    decoder_layout='every_1',
    block=block,
  )
  config = cases.tiny_config(num_encoder_layers=num_layers, num_decoder_layers=num_layers, **fields)
  return models.MoeEncoderDecoderModel(
    cases.t5.Transformer(config, sparse),
    adapter_cases.VOCABULARY,
    adapter_cases.VOCABULARY,
    optimizers.sgd(0.1),
    aux_loss_factor=0.01,
    adapter=adapter,
  )


def _variables(model):
  shapes = {name: x.shape for name, x in _batch().items()}
  return jax.jit(lambda rng: model.get_initial_variables(rng, shapes))(jax.random.key(0))


@pytest.mark.parametrize('capacities', [None, _CAPACITIES], ids=['dropless', 'capacity'])
def test_loss_and_gradients_on_every_mesh_are_those_of_merged_experts(capacities):
  model = _model(_ADAPTER, capacities)
  variables = _variables(model)
  params = adapter_cases.random_b(variables['params'])
  experts = params['encoder']['layers_0']['mlp']['expert']
  assert experts['wi_0']['lora_a'].shape == (4, 16, 2)
  assert experts['wi_0']['lora_b'].shape == (4, 2, 16)
  assert not any('router' in path and '/lora_' in path for path in tree_utils.flatten_dict(params))
  plain = _model(None, capacities)
  merged = adapter_cases.merged(params, lambda path: 8.0)
  expected = plain.loss_fn(merged, _batch(), None)[0]
  state = train_state_lib.FlaxOptimTrainState.create(
    model.optimizer_def, {**variables, 'params': params}
  )
  state = jax.device_get(state)

  def step(state, batch, partitioner=None):
    options = {}
    if partitioner is not None:
      options['data_partition_spec'] = partitioner.data_partition_spec
    return train_step.train_with_lr(state, batch, None, None, model, None, **options)

  one, metrics = jax.jit(step)(state, _batch())
  np.testing.assert_allclose(metrics['loss'].compute(), expected, rtol=2e-5)
  assert metrics['adapter/without_gradient'].compute() == 0
  for name in ('lora_a', 'lora_b'):
    moved = one.params['encoder']['layers_0']['mlp']['expert']['wo'][name]
    before = experts['wo'][name]
    assert all((moved[i] != before[i]).any() for i in range(4)), name
  for num_expert_partitions, num_partitions in ((4, 1), (4, 2), (1, 1)):
    partitioner = MoePjitPartitioner(
      num_expert_partitions=num_expert_partitions, num_partitions=num_partitions
    )
    axes = partitioner.get_mesh_axes(state)
    sharded = partitioner.partition(
      functools.partial(step, partitioner=partitioner),
      (axes, partitioner.data_partition_spec),
      (axes, None),
    )
    found, _ = sharded(state, _batch())
    for (path, a), b in zip(
      tree_utils.named_leaves(found.params), jax.tree.leaves(one.params), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1, np.abs(b).max()), err_msg=path)


@pytest.mark.parametrize('scan_layers', [False, True], ids=['layers', 'scan'])
@pytest.mark.parametrize('capacities', [None, _CAPACITIES], ids=['dropless', 'capacity'])
def test_each_expert_is_trained_or_counted(capacities, scan_layers):
  """A bias of one router keeps all tokens from two of its experts; the adapters of all others move."""
  model = _model(_ADAPTER, capacities, 2, use_bias=True, scan_layers=scan_layers)
  partitioner = MoePjitPartitioner(num_expert_partitions=4, num_partitions=1)
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {name: x.shape for name, x in _batch().items()},
    partitioner,
  )
  router = 'encoder/layers_1/mlp/router/router_weights/w/bias'
  state = initializer.from_scratch(jax.random.key(0))

  def without_tokens(path, leaf):
    if path == router:
      return leaf.at[2:].set(-1e9)
    return leaf

  state = state.replace_params(tree_utils.map_with_names(without_tokens, state.params))
  with trainer_lib.Trainer(
    model,
    state,
    partitioner,
    (),
    None,
    initializer.train_state_axes,
    jax.random.key(1),
    None,
  ) as trainer:
    metrics = trainer.train(iter([_batch()] * 3), 3).result()
    params = tree_utils.flatten_dict(jax.device_get(trainer.train_state.params))
  # {(kernel, expert)}
  unmoved = set()
  num_adapters = 0
  for path, b in params.items():
    if path.endswith('/lora_b') and '/expert/' in path:
      num_adapters += len(b)
      unmoved |= {(path, i) for i in range(len(b)) if not b[i].any()}
  assert num_adapters == 2 * 2 * 3 * 4
  block = 'encoder/layers_1/mlp/expert'
  expected = {(f'{block}/{name}/lora_b', i) for name in ('wi_0', 'wi_1', 'wo') for i in (2, 3)}
  assert unmoved == expected
  assert metrics['adapter/without_gradient'].value == len(expected)


def test_dropout_and_routers_raise():
  model = _model(adapters.Lora(rank=2, targets='all', dropout_rate=0.1))
  params = _variables(model)['params']
  with pytest.raises(ConfigError, match="`Lora.dropout_rate` must be 0 with experts' kernels"):
    model.loss_fn(params, _batch(), jax.random.key(0))
  with pytest.raises(ConfigError, match='router_weights/w/kernel, which is neither'):
    _variables(_model(adapters.Lora(rank=2, targets='router')))


_SMALL = (
  '--gin.DATA_SOURCE=builtin',
  '--gin.BATCH_SIZE=32',
  '--gin.train_script.train.train_eval_dataset_cfg=None',
  '--gin.train_script.train.infer_eval_dataset_cfg=None',
)


@pytest.mark.full
def test_the_recipe_moves_the_adapter_of_each_expert(tmp_path, monkeypatch, capsys):
  """The norms of B, which begins with zeros, say how far the adapter of each expert has moved."""
  monkeypatch.chdir(tmp_path)
  for recipe, name, last_step in (
    ('keyword_cloze_moe', 'moe', 60),
    ('keyword_cloze_moe_lora', 'moe_lora', 90),
  ):
    command = [f'--gin_file=recipes/{recipe}.gin', f'--gin.MODEL_DIR=runs/{name}']
    assert cli.main(['train', *command, f'--gin.TRAIN_STEPS={last_step}', *_SMALL]) == 0
  assert 'adapter/without_gradient 0' in capsys.readouterr().out
  params = checkpoints.load('runs/moe_lora/checkpoint_90')['target']
  moved = {
    path: np.linalg.norm(b, axis=(1, 2))
    for path, b in tree_utils.named_leaves(params)
    if path.endswith('expert/wo/lora_b')
  }
  assert len(moved) == 2
  for path, norms in moved.items():
    assert len(norms) == 8 and min(norms) > 0, path
