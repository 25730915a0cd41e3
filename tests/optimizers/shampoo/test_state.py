"""Shampoo's state: its form on odd trees, its dtypes and its bytes."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest

from t5x_lite import optimizers

# Used bare, without OptaxWrapper.


def test_bare_updates_have_the_dtype_of_the_parameters_and_statistics_are_float32():
  params = {
    'w': jnp.ones([6, 4], jnp.bfloat16),
    'b': jnp.ones([3], jnp.float16),
    's': jnp.float32(1.0),
  }
  tx = optimizers.distributed_shampoo(
    0.1, 4, graft_type='adagrad', weight_decay=0.1
  ).optax_optimizer
  updates, state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
  assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(lambda p: p.dtype, params)
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {'int32', 'float32'}


@pytest.mark.parametrize(
  'options',
  [
    {'graft_type': 'SGD'},
    {'graft_type': 'SQRT_N', 'best_effort_memory_usage_reduction': True},
    {
      'shard_optimizer_states': True,
      'best_effort_memory_usage_reduction': True,
      'graft_type': 'RMSPROP',
    },
    {
      'preconditioning_compute_steps': 2,
      'statistics_compute_steps': 2,
      'quantize_statistics': True,
    },
  ],
)
@pytest.mark.parametrize(
  'shapes', [[], [(0, 3)], [(1, 1), (1,)], [(5000,), (3, 0, 4), ()]], ids=str
)
def test_state_keeps_its_form_on_odd_trees(options, shapes):
  params = {str(i): jnp.ones(shape) for i, shape in enumerate(shapes)}
  tx = optimizers.distributed_shampoo(0.1, 4, **options).optax_optimizer
  state = tx.init(params)
  form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
  updates, new_state = jax.eval_shape(tx.update, params, state, params)
  assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), new_state) == form
  assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_masked_parameters_have_no_state():
  params = {'a': jnp.ones([4, 4]), 'b': {'c': jnp.ones([3])}}
  inner = optimizers.distributed_shampoo(0.1, 4).optax_optimizer
  optimizer = optimizers.OptaxWrapper(optax.masked(inner, {'a': True, 'b': False})).create(params)
  axes = optimizer.optimizer_def.derive_logical_axes(
    optimizer, {'a': P('embed', 'mlp'), 'b': {'c': P('mlp')}}
  )
  assert jax.tree.structure(axes) == jax.tree.structure(optimizer)
  assert axes.state.param_states.inner_state.stats['a'].momentum.quantized == P('embed', 'mlp')


# Memory, metrics.


def _state_bytes(params, **options):
  state = jax.eval_shape(
    optimizers.distributed_shampoo(0.1, 64, **options).optax_optimizer.init, params
  )
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def test_quantized_state_takes_the_bytes_it_should():
  params = {'w': jax.ShapeDtypeStruct([256, 128], jnp.float32)}
  num_matrices, elements = 8 * 2, 256 * 128
  matrices = 2 * num_matrices * 64 * 64
  small = 4 + 4 * num_matrices  # count and errors
  assert _state_bytes(params) == 4 * (matrices + 2 * elements) + small
  # Integers, and float32 scales of columns and diagonals.
  int16 = 2 * matrices + 2 * num_matrices * (64 + 64) * 4
  int8 = 2 * (elements + 4 * 128)
  assert _state_bytes(params, quantize_statistics=True) == int16 + 4 * 2 * elements + small
  # As in the original, matrices are integers by default only with a mapped axis.
  assert (
    _state_bytes(params, best_effort_memory_usage_reduction=True) == 4 * matrices + int8 + small
  )
  quantized = _state_bytes(
    params, best_effort_memory_usage_reduction=True, quantize_statistics=True
  )
  assert quantized == int16 + int8 + small
  assert quantized == _state_bytes(
    params, best_effort_memory_usage_reduction=True, batch_axis_name='batch'
  )
  assert quantized < 0.47 * _state_bytes(params)
