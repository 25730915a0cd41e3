"""Upcycling: the sparse model computes the dense one's function; the optimizer's state; errors."""

import dataclasses
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import rules
from moe import upcycling
from t5x_lite import adafactor
from t5x_lite import gin_utils
from t5x_lite import optimizers
from t5x_lite import train_state
from t5x_lite import tree_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks import decoder_only
from tests.examples import soft_router
from tests.moe import upcycling_cases as up
from tests.networks import network_cases as cases
from tests.optimizers.contract_rows import ROWS

_FULL = pytest.mark.full
_LAYERS = ('encoder/layers_1/mlp', 'decoder/layers_1/mlp')


def _cases():
  """(kind of network, options, choices of a copy, granularity); a few in every run."""
  quick = {('t5_1_1', 't5', 1, 1), ('decoder_only', 'scalable_t5', 2, 2)}
  for kind in ('t5_1_0', 't5_1_1', 'decoder_only'):
    for layout in ('t5', 'scalable_t5'):
      for choices in (1, 2):
        for granularity in (1, 2, 4):
          case = (kind, layout, choices, granularity)
          yield pytest.param(*case, marks=() if case in quick else _FULL)


@pytest.mark.parametrize('kind, layout, choices, granularity', list(_cases()))
def test_the_function_is_the_dense_ones(tmp_path, kind, layout, choices, granularity):
  options = dict(param_layout=layout)
  dense = up.dense_network(kind, **options)
  sparse = up.sparse_network(
    kind,
    num_experts=2 * choices * granularity,
    num_selected=choices * granularity,
    granularity=granularity,
    every=2 if layout == 't5' else 1,
    **options,
  )
  state = up.state_of(dense)
  restored = up.restore(
    up.save(state, tmp_path), up.state_shapes(sparse), upcycling.upcycle(granularity)
  )
  np.testing.assert_allclose(
    up.logits(sparse, restored), up.logits(dense, state), rtol=1e-5, atol=1e-5
  )
  assert int(restored.step) == 7


def test_other_new_parameters_contribute_nothing(tmp_path):
  """Biases of experts, a block for all tokens, a second block, the bias that balances loads."""
  dense = up.dense_network('decoder_only', mlp_activations=('gelu', 'linear'))
  block = dict(expert_bias=True, shared_expert_dim=32)
  fn = up.sparse_network(
    'decoder_only', block=block, router=dict(bias_update_rate=0.1)
  ).feed_forward_fn
  sparse = decoder_only.DecoderWrapper(dense.config, dataclasses.replace(fn, extra_mlp=True))
  state = up.state_of(dense)
  restored = up.restore(up.save(state, tmp_path), up.state_shapes(sparse), upcycling.upcycle())
  np.testing.assert_allclose(
    up.logits(sparse, restored), up.logits(dense, state), rtol=1e-5, atol=1e-5
  )
  assert (
    all(not np.any(leaf) for leaf in jax.tree.leaves(restored.flax_mutables))
    and restored.flax_mutables
  )
  block = restored.params['decoder']['layers_1']['mlp']
  wi = state.params['decoder']['layers_1']['mlp']['wi_0']['kernel']
  np.testing.assert_array_equal(
    block['shared_mlp']['wi_0']['kernel'], np.concatenate([wi, wi[:, :8]], axis=1)
  )


def test_noise_spares_the_first_copy(tmp_path):
  state, sparse = up.state_of(up.dense_network()), up.sparse_network(num_experts=4, granularity=2)
  shapes, path = up.state_shapes(sparse), up.save(state, tmp_path)
  restored = {
    seed: up.flat(up.restore(path, shapes, upcycling.upcycle(2, noise_stddev=0.1, seed=seed)))
    for seed in (0, 0, 1)
  }
  exact = up.flat(up.restore(path, shapes, upcycling.upcycle(2, router_init_stddev=0)))
  name = f'target/{_LAYERS[0]}/expert/wi_0/kernel'
  np.testing.assert_array_equal(restored[0][name][:2], exact[name][:2])
  ratio = np.std(restored[0][name][2:] - exact[name][2:]) / np.std(exact[name])
  assert 0.05 < ratio < 0.2
  assert np.any(restored[0][name][2:] != restored[1][name][2:])
  router = f'target/{_LAYERS[0]}/router/router_weights/w/kernel'
  assert not np.any(exact[router])
  np.testing.assert_array_equal(restored[0][router][:, 0], restored[0][router][:, 1])
  assert np.any(restored[0][router][:, 0] != restored[0][router][:, 2])


# ---- Optimizers -----------------------------------------------------------------------------------------------------


def _adafactor():
  return adafactor.Adafactor(
    0.01, min_dim_size_to_factor=8, logical_factor_rules=rules.logical_factor_rules()
  )


_OPTIMIZERS = {
  'adafactor': _adafactor,
  'adamw': lambda: optimizers.adamw(),
  'multi': lambda: optimizers.MultiOptimizer(
    [
      (optimizers.ModelParamTraversal(lambda path, _: 'mlp' in path), _adafactor()),
      (optimizers.ModelParamTraversal(lambda path, _: 'mlp' not in path), optimizers.adamw()),
    ]
  ),
}


@pytest.mark.parametrize('optimizer', _OPTIMIZERS)
def test_state_of_the_optimizer(tmp_path, optimizer):
  make, sparse = _OPTIMIZERS[optimizer], up.sparse_network('decoder_only')
  dense_state = up.state_of(up.dense_network('decoder_only'), make())
  dense = up.flat(dense_state)
  restored = up.restore(
    up.save(dense_state, tmp_path), up.state_shapes(sparse, make()), upcycling.upcycle()
  )
  new = up.flat(restored)
  assert new['state/step'] == 7
  num_experts = 0
  for name, value in new.items():
    if name in dense:
      np.testing.assert_array_equal(value, dense[name], err_msg=name)
    elif '/expert/' in name:
      source = dense[name.replace('/expert/', '/')]
      np.testing.assert_array_equal(
        value, source if source.size == 1 else np.stack([source] * 4), err_msg=name
      )
      num_experts += name.startswith('state')
    elif not name.startswith('target'):
      assert '/router/' in name and not np.any(value), name
  assert num_experts >= 4


def _loss_fn(module, batch):
  def loss(params):
    log_probs = jax.nn.log_softmax(module.apply({'params': params}, **batch, enable_dropout=False))
    targets = batch['decoder_target_tokens']
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0] * (targets > 0))

  return loss


@pytest.mark.full  # by default, the function and the state of the optimizer are compared
@pytest.mark.parametrize(
  'optimizer', ['adamw', *(pytest.param(name, marks=_FULL) for name in ('adafactor', 'multi'))]
)
def test_training_continues(tmp_path, optimizer):
  make, sparse = _OPTIMIZERS[optimizer], up.sparse_network('decoder_only', num_layers=1, every=1)
  dense = up.dense_network('decoder_only', num_layers=1)
  state = up.state_of(dense, make())
  restored = up.restore(
    up.save(state, tmp_path), up.state_shapes(sparse, make()), upcycling.upcycle()
  )
  batch, losses = up.batch_of(sparse), []
  step = cases.jit(jax.value_and_grad(_loss_fn(sparse, batch)))
  update = cases.jit(lambda state, grads: state.apply_gradient(grads, 0.01))
  for _ in range(24):
    loss, grads = step(restored.params)
    losses.append(float(loss))
    restored = update(restored, grads)
  assert np.all(np.diff(losses) < 0) and losses[-1] < losses[0] - 0.005 and int(restored.step) == 31
  np.testing.assert_allclose(losses[0], _loss_fn(dense, batch)(state.params), rtol=1e-5)
  router = restored.params['decoder']['layers_0']['mlp']['router']['router_weights']['w']['kernel']
  assert np.all(np.isfinite(router))


# Optimizer state of routers, or of all parameters together, without a counterpart in the dense state and without a
# known initial value: fallback_to_scratch initialises it.
_LEFT = {
  'cocob': r'2/(scale|subgradients|grad_sum|reward|.*)/.*router',
  'adagrad': 'sum_of_squares/.*router',
  'rprop': 'step_sizes/.*router',
  'lbfgs': '.*',
  'galore': '0/(mu|nu|projector)/.*',
  'mechanize': '.*',
  'madgrad': '.*router',
  'dog': '.*',
  'dowg': '.*',
  'sm3': '0/mu/.*',
  'adafactor_of_optax': '.*/v.*',
  'prodigy': '.*router',
}


@pytest.mark.parametrize(
  'row', [row if i % 6 == 0 else pytest.param(row, marks=_FULL) for i, row in enumerate(ROWS)]
)
def test_every_optimizer(row):
  """Parameters and step are kept, so is the state of kept parameters, or it is left to fallback_to_scratch."""
  axes = {
    'decoder/layers_0/mlp/wi/kernel': ('embed', 'mlp'),
    'decoder/norm/scale': ('embed',),
    'token_embedder/embedding': ('vocab', 'embed'),
  }
  dense_axes = axes | {
    'encoder/layers_0/mlp/wi/kernel': ('embed', 'mlp'),
    'encoder/layers_0/mlp/wo/kernel': ('mlp', 'embed'),
  }
  sparse_axes = axes | {
    'encoder/layers_0/mlp/expert/wi/kernel': ('expert', 'embed', 'expert_mlp'),
    'encoder/layers_0/mlp/expert/wo/kernel': ('expert', 'expert_mlp', 'embed'),
    'encoder/layers_0/mlp/router/router_weights/w/kernel': ('embed', None),
  }
  dense, wanted = (_shapes(row, a) for a in (dense_axes, sparse_axes))
  rng = np.random.default_rng(0)
  stored = {name: _random(rng, leaf) for name, leaf in dense.items()}
  result = tree_utils.flatten_dict(
    upcycling.upcycle()(tree_utils.unflatten_dict(stored), tree_utils.unflatten_dict(wanted))
  )
  left = [name for name in wanted if name not in result]
  for name in left:
    assert name.startswith('state/param_states/'), name
  for name, value in result.items():
    assert name in wanted and value.shape == wanted[name].shape, name
    if name in stored:
      assert value is stored[name], name
  is_mixed = any(name in row for name in ('shampoo', 'soap', 'scaled_adam'))
  pattern = next((_LEFT[key] for key in _LEFT if key == row), None)
  for name in left:
    assert is_mixed or (pattern and re.search(pattern, name)), (row, name)


def _shapes(row, axes):
  from flax.linen import partitioning as flax_partitioning

  sizes = {'embed': 24, 'mlp': 32, 'expert_mlp': 32, 'vocab': 48, 'expert': 4, None: 4}
  params = {
    path: jax.ShapeDtypeStruct([sizes[name] for name in names], jnp.float32)
    for path, names in axes.items()
  }
  names = tree_utils.unflatten_dict(
    {f'{path}_axes': flax_partitioning.AxisMetadata(names) for path, names in axes.items()}
  )
  state = jax.eval_shape(
    lambda params: train_state.FlaxOptimTrainState.create(
      ROWS[row].factory(), {'params': params, 'params_axes': names}
    ),
    tree_utils.unflatten_dict(params),
  )
  return tree_utils.flatten_dict(state.state_dict())


def _random(rng, leaf):
  return np.asarray(rng.uniform(1, 5, leaf.shape)).astype(leaf.dtype)


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'dense, sparse, granularity, message',
  [
    (
      dict(num_encoder_layers=3),
      {},
      1,
      'differ not only in their experts; in the checkpoint only: encoder/layers_2',
    ),
    (dict(num_encoder_layers=1), {}, 1, 'missing from the checkpoint: encoder/layers_1/'),
    (dict(mlp_dim=32), {}, 1, r'of shape \(16, 32\) to .*\(4, 16, 24\)|of another shape'),
    (dict(mlp_activations=('relu',)), {}, 1, 'the same layers, sizes and activations'),
    (dict(emb_dim=32), {}, 1, 'of another shape: .*stored'),
    ({}, dict(num_experts=5), 2, 'granularity=2'),
    ({}, dict(granularity=2), 1, 'Cannot upcycle .* to .*expert_dim'),
  ],
)
def test_checkpoints_of_other_networks_raise(dense, sparse, granularity, message):
  stored = up.state_of(up.dense_network(**dense)).state_dict()
  wanted = up.state_shapes(up.sparse_network(**sparse)).state_dict()
  with pytest.raises(CheckpointError, match=message):
    upcycling.upcycle(granularity)(stored, wanted)


def test_soft_routers_are_new_and_cannot_be_sliced():
  stored, router = (
    up.state_of(up.dense_network()).state_dict(),
    soft_router.SoftRouter(4, num_slots=2),
  )

  def wanted(**block):
    return up.state_shapes(up.sparse_network(block=dict(router=router, **block))).state_dict()

  made = tree_utils.flatten_dict(upcycling.upcycle()(stored, wanted()))
  kernels = [
    leaf for name, leaf in made.items() if name.startswith('target/') and 'router_weights' in name
  ]
  assert kernels and all(len(np.unique(kernel)) == kernel.size == 16 * 8 for kernel in kernels)
  with pytest.raises(
    CheckpointError, match='upcycle with granularity=2: .*4 experts .* Soft routing'
  ):
    upcycling.upcycle(2)(stored, wanted(expert_dim=12))


def test_a_model_with_an_adapter_raises():
  stored = up.state_of(up.dense_network()).state_dict()
  wanted = up.state_shapes(up.sparse_network()).state_dict()
  wanted['target']['decoder']['layers_0']['self_attention']['query']['lora_a'] = (
    jax.ShapeDtypeStruct((16, 2), jnp.float32)
  )
  with pytest.raises(
    ConfigError,
    match=r'\(decoder/.*/query/lora_a\)\. Upcycle without adapters/lora\.gin first',
  ):
    upcycling.upcycle()(stored, wanted)


def test_sparse_checkpoints_and_dense_networks_raise():
  dense, sparse = (
    up.state_of(up.dense_network()).state_dict(),
    up.state_of(up.sparse_network()).state_dict(),
  )
  with pytest.raises(CheckpointError, match='already has experts .*moe surgery'):
    upcycling.upcycle()(sparse, sparse)
  with pytest.raises(CheckpointError, match='the network has no experts'):
    upcycling.upcycle()(dense, dense)
  assert upcycling.upcycle()(sparse, sparse, is_resuming=True) == sparse


def test_models_with_adapters_raise():
  """The remedy is two runs: the second has the sparse checkpoint of the first as its base."""
  stored = up.state_of(up.dense_network()).state_dict()
  wanted = up.state_shapes(up.sparse_network()).state_dict()
  block = wanted['target']['encoder']['layers_1']['mlp']['expert']['wo']
  block['lora_a'] = jax.ShapeDtypeStruct((4, 24, 2), 'float32')
  block['lora_b'] = jax.ShapeDtypeStruct((4, 2, 16), 'float32')
  with pytest.raises(
    ConfigError, match=r'with an adapter .*lora_a.* Upcycle without adapters/lora.gin first'
  ):
    upcycling.upcycle()(stored, wanted)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(granularity=0), 'granularity` must be an integer >= 1, got 0'),
    (dict(granularity=True), 'granularity'),
    (dict(noise_stddev=-1), 'noise_stddev` must be .*, got -1'),
    (dict(router_init_stddev=float('nan')), 'router_init_stddev'),
    (dict(seed=-1), 'seed` must be .*, got -1'),
  ],
)
def test_invalid_options(options, message):
  with pytest.raises(ConfigError, match=message):
    upcycling.upcycle(**options)


def test_the_run_file_binds_it():
  names = (
    'models/tokens_choose_tiny.gin',
    'runs/sparse_upcycle.gin',
    'partitioning/moe_expert_partitions.gin',
  )
  macros = dict(
    MODEL_DIR="'x'",
    MIXTURE_OR_TASK_NAME="'x'",
    TRAIN_STEPS='3',
    INITIAL_CHECKPOINT_PATH="'y/checkpoint_1'",
    DROPOUT_RATE='0.1',
    GRANULARITY='3',
    TASK_FEATURE_LENGTHS="{'inputs': 64, 'targets': 12}",
  )
  flags = [
    gin_syntax.read_flag(name, value, f'--gin.{name}={value}') for name, value in macros.items()
  ]
  try:
    configured = gin_utils.load('t5x_lite.apps.train.train', gin_utils.read(names, flags)).argument(
      'checkpoint_cfg'
    )
  finally:
    gin.clear_config()
  (transform,) = configured.restore.builders
  wanted = up.state_shapes(up.sparse_network('decoder_only')).state_dict()
  with pytest.raises(CheckpointError, match='granularity=3'):
    transform(up.state_of(up.dense_network('decoder_only')).state_dict(), wanted)
