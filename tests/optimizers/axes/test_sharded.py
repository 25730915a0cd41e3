"""Optax states on meshes: divisibility, memory per device, and equal results with and without sharding."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from optax import contrib
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.partitioning import rules as rules_lib
from tests.optimizers.axes import partition_samples as samples

_RULES = (
  ('vocab', 'model'),
  ('mlp', 'model'),
  ('expert_mlp', 'model'),
  ('heads', 'model'),
  ('embed', 'data'),
  ('expert', 'expert'),
  ('kv', None),
  ('layers', None),
  ('length', None),
)
_MESHES = [
  {'data': 2, 'expert': 2, 'model': 2},
  {'data': 8, 'expert': 1, 'model': 1},
  {'data': 1, 'expert': 1, 'model': 8},
  {'data': 1, 'expert': 4, 'model': 2},
]

# Parameters whose statistics are counted by hand below, and those that numbers are compared for.
_AXES = {
  'mlp': {'kernel': P('embed', 'mlp')},
  'attention': {'kernel': P('embed', 'heads', 'kv')},
  'experts': {'wi': P('expert', 'embed', 'expert_mlp')},
  'norm': {'scale': P('embed')},
  'temperature': P(),
}

_derive = optimizers.OptaxStatePartitionRules.derive_optax_logical_axes


def _random_params(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda axes: np.asarray(
      rng.normal(size=[samples.SIZES[name] for name in axes]) * 0.3, np.float32
    ),
    _AXES,
  )


def _num_pieces(tree, axes, mesh_shape):
  """Yield (name, array, into how many pieces it is cut) after checking that it divides."""
  for (name, leaf), logical in zip(
    tree_utils.named_leaves(tree), jax.tree.leaves(axes), strict=True
  ):
    spec = rules_lib.logical_to_mesh_axes(logical, _RULES, name)
    rules_lib.check_divisible(name, leaf.shape, spec, mesh_shape, logical)
    yield (
      name,
      leaf,
      int(np.prod([rules_lib.num_shards(entry, mesh_shape) for entry in spec], dtype=int)),
    )


@pytest.mark.parametrize('name', samples.SAMPLES)
def test_states_as_large_as_a_parameter_are_sharded_like_it(name):
  state = jax.eval_shape(samples.SAMPLES[name].init, samples.SHAPES)
  axes = _derive(state, samples.AXES, samples.SHAPES)
  for mesh_shape in _MESHES:
    pieces_by_shape = {}
    for _, leaf, num_pieces in _num_pieces(samples.SHAPES, samples.AXES, mesh_shape):
      pieces_by_shape.setdefault(leaf.shape, set()).add(num_pieces)
    for path, leaf, num_pieces in _num_pieces(state, axes, mesh_shape):
      shape = leaf.shape if leaf.shape in pieces_by_shape else leaf.shape[1:]
      if len(shape) >= 2 and shape in pieces_by_shape:
        assert num_pieces in pieces_by_shape[shape], path


# By hand, for one device of (data 2, expert 2, model 2), arrays of rank 1 and more; embed 16, mlp and expert_mlp 24,
# heads 8, kv 4, expert 4. A copy of the parameters is 16*24/4 + 16*8*4/4 + 4*16*24/8 + 16/2 = 96 + 128 + 192 + 8.
_COPY = 424
_COUNTED = {
  'adam': (optax.scale_by_adam(), 2 * _COPY),
  # The largest dim is summed away, then the second largest: kept are embed | heads, kv | expert, embed and then
  # mlp | embed, kv | expert, expert_mlp. The vector is not factored; seven placeholders.
  'adafactor': (
    optax.scale_by_factored_rms(min_dim_size_to_factor=8),
    (8 + 4 * 4 + 2 * 8) + (12 + 8 * 4 + 2 * 12) + 8 + 7,
  ),
  'sm3': (optax.scale_by_sm3(), (8 + 12) + (8 + 4 + 4) + (2 + 8 + 12) + 8 + _COPY),
  'novograd': (optax.scale_by_novograd(), _COPY),
  # Parameters, updates and three differences of each, those of the scalar too; three weights.
  'lbfgs': (optax.scale_by_lbfgs(3), 8 * _COPY + 2 * 3 + 3),
  # Only the mlp kernel is a matrix: projector [24, 2] and two moments of [16, 2]; the others have two moments.
  'galore': (contrib.scale_by_galore(rank=2), 24 + 2 * 16 + 2 * (_COPY - 96)),
  # Momentum of the matrix, two moments of the rest, three coefficients.
  'muon': (contrib.muon(0.1), 96 + 2 * (_COPY - 96) + 3),
}


@pytest.mark.parametrize('name', _COUNTED)
def test_elements_on_one_device(name):
  tx, expected = _COUNTED[name]
  params = _random_params(0)
  state = jax.eval_shape(tx.init, params)
  pieces = _num_pieces(state, _derive(state, _AXES, params), _MESHES[0])
  assert sum(leaf.size // num_pieces for _, leaf, num_pieces in pieces if leaf.ndim) == expected


# --- Numbers --------------------------------------------------------------------------------------------------------


def _mesh(mesh_shape):
  return Mesh(
    np.reshape(jax.devices()[:8], tuple(mesh_shape.values())),
    tuple(mesh_shape),
    axis_types=(AxisType.Auto,) * 3,
  )


def _shardings(axes, mesh, *leading):
  return jax.tree.map(
    lambda logical: NamedSharding(
      mesh, P(*leading, *rules_lib.logical_to_mesh_axes(logical, _RULES))
    ),
    axes,
  )


def _train(tx, params, state, grads):
  """Update by recorded gradients, stacked along dim 0 of `grads`."""

  def step(carry, grads):
    params, state = carry
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  return jax.lax.scan(step, (params, state), grads)[0]


def _check_sharded_updates(tx, mesh_shape, tolerance=1e-6):
  """20 updates by the same gradients, on one device and sharded, give the same parameters and statistics."""
  params = jax.tree.map(jnp.asarray, _random_params(0))
  grads = jax.tree.map(
    lambda *leaves: np.stack(leaves), *[_random_params(seed) for seed in range(1, 21)]
  )
  train = functools.partial(_train, tx)
  expected, expected_state = jax.jit(train)(params, tx.init(params), grads)
  state = tx.init(params)
  mesh = _mesh(mesh_shape)
  axes = _derive(state, _AXES, params)
  params_shardings, state_shardings = _shardings(_AXES, mesh), _shardings(axes, mesh)
  with jax.set_mesh(mesh):
    got, got_state = jax.jit(train, out_shardings=(params_shardings, state_shardings))(
      jax.device_put(params, params_shardings),
      jax.device_put(state, state_shardings),
      jax.device_put(grads, _shardings(_AXES, mesh, None)),
    )
  expected_leaves = jax.tree.leaves((expected, expected_state))
  for (name, left), right in zip(
    tree_utils.named_leaves((got, got_state)), expected_leaves, strict=True
  ):
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    assert np.linalg.norm(left - right) <= tolerance * max(np.linalg.norm(right), 1e-3), name
  # The statistics did stay where the axes say.
  for leaf, sharding in zip(
    jax.tree.leaves(got_state), jax.tree.leaves(state_shardings), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  return got_state


def test_sharded_updates_of_a_mix_equal_those_of_one_device():
  labels = {
    'mlp': 'adafactor',
    'attention': 'sm3',
    'experts': 'adafactor',
    'norm': 'sm3',
    'temperature': 'novograd',
  }
  tx = optax.partition(
    {
      'adafactor': optax.adafactor(0.05, min_dim_size_to_factor=4, momentum=0.9),
      'sm3': optax.sm3(0.05),
      'novograd': optax.novograd(0.05),
    },
    labels,
  )
  state = _check_sharded_updates(tx, _MESHES[0])
  v_row = state.inner_states['adafactor'].inner_state[0].v_row
  assert v_row['experts']['wi'].shape == (4, 16) and v_row['experts']['wi'].addressable_shards[
    0
  ].data.shape == (2, 8)


_NUMERIC = {
  'adafactor': optax.adafactor(0.05, min_dim_size_to_factor=4),
  # Optax's SM3 fails at scalars.
  'sm3': optax.partition(
    {True: optax.sm3(0.05), False: optax.sgd(0.05)},
    lambda params: jax.tree.map(lambda p: p.ndim > 0, params),
  ),
  'lbfgs': optax.chain(optax.scale_by_lbfgs(3), optax.scale(-0.02)),
  'muon': contrib.muon(0.02),
  'galore': contrib.galore(0.02, rank=4, update_proj_gap=5),
  'galore_of_attention': contrib.galore(
    0.02,
    rank=4,
    update_proj_gap=5,
    weight_dimension_numbers=lambda params: jax.tree.map(
      lambda p: (
        contrib.GaLoreDimensionNumbers((0,), tuple(range(1, p.ndim))) if p.ndim > 1 else None
      ),
      params,
    ),
  ),
  'schedule_free': contrib.schedule_free_adamw(0.02),
  'masked_mechanic': optax.masked(
    contrib.mechanize(optax.adam(0.02)), {**dict.fromkeys(_AXES, True), 'norm': False}
  ),
}


@pytest.mark.full
@pytest.mark.parametrize('mesh_shape', _MESHES[:2], ids=str)
@pytest.mark.parametrize('name', _NUMERIC)
def test_sharded_updates_equal_those_of_one_device(name, mesh_shape):
  _check_sharded_updates(_NUMERIC[name], mesh_shape)
