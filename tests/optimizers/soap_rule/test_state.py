"""State of SOAP: logical axes, bytes, masked parameters, dtypes."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils

_SHAPES = {
  'kernel': jax.ShapeDtypeStruct((64, 32), jnp.bfloat16),
  'scale': jax.ShapeDtypeStruct((8,), jnp.float32),
}
_AXES = {'kernel': P('embed', 'mlp'), 'scale': P('embed')}


def _state(**options):
  """Return (definition, shapes of the state)."""
  definition = optimizers.soap(0.1, **options).with_param_axes(_AXES)
  return definition, jax.eval_shape(lambda params: definition.create(params), _SHAPES)


@pytest.mark.parametrize(
  'options,num_bytes',
  [
    # Moments of 2048 + 8 elements, statistics and bases of 64 and 32.
    ({}, 8 * 2056 + 8 * (64**2 + 32**2)),
    ({'b1': 0.0}, 4 * 2056 + 8 * (64**2 + 32**2)),
    ({'momentum_dtype': 'bfloat16'}, 6 * 2056 + 8 * (64**2 + 32**2)),
    # A scale per column, one for the vector.
    ({'momentum_dtype': 'int8'}, 5 * 2056 + 4 * (32 + 1) + 8 * (64**2 + 32**2)),
    ({'second_moment_dtype': 'bfloat16'}, 6 * 2056 + 8 * (64**2 + 32**2)),
    ({'symmetric_storage': True}, 8 * 2056 + 4 * (64**2 + 32**2) + 4 * (32 * 65 + 16 * 33)),
    # 2 bytes an element, a diagonal and a scale per column.
    ({'matrix_dtype': 'int16'}, 8 * 2056 + 4 * (64**2 + 32**2) + 2 * 8 * (64 + 32)),
    ({'max_precond_dim': 32}, 8 * 2056 + 8 * 32**2),
    ({'block_size': 32}, 8 * 2056 + 8 * 4 * 32**2),
  ],
)
def test_a_state_takes_the_bytes_it_should(options, num_bytes):
  _, optimizer = _state(**options)
  assert tree_utils.num_bytes(optimizer.state.param_states.params) == num_bytes


def test_axes_are_those_of_the_parameters_and_stacks_are_divided():
  definition, optimizer = _state(momentum_dtype='int8', matrix_dtype='int16', block_size=16)
  axes = definition.derive_logical_axes(optimizer, _AXES).state.param_states
  assert axes.count == P()
  own = axes.params['kernel']
  assert own.second_moment == own.momentum.quantized == P('embed', 'mlp')
  assert own.momentum.bucket_size == P('mlp')
  assert [basis.quantized for basis in own.bases] == [
    P('optimizer_stack', 'optimizer_rows', None)
  ] * 2
  assert (
    own.bases[0].diagonal == own.statistics[0].bucket_size == P('optimizer_stack', 'optimizer_rows')
  )
  assert axes.params['scale'].bases == ()
  packed = _state(symmetric_storage=True)
  axes = packed[0].derive_logical_axes(packed[1], _AXES).state.param_states.params['kernel']
  assert axes.statistics[0] == P('optimizer_stack', 'optimizer_rows', None)


def test_masked_parameters_have_no_state():
  tx = optax.masked(optimizers.soap(0.1).optax_optimizer, {'kernel': True, 'scale': False})
  params = {'kernel': jnp.ones([4, 4]), 'scale': jnp.ones([3])}
  state = tx.init(params)
  assert isinstance(state.inner_state.params['scale'], optax.MaskedNode)
  updates, _ = tx.update(params, state, params)
  assert updates['kernel'].shape == (4, 4)
  axes = optimizers.OptaxStatePartitionRules.derive_optax_logical_axes(
    state, {'kernel': P('embed', 'mlp'), 'scale': P('embed')}
  )
  assert isinstance(axes.inner_state.params['scale'], optax.MaskedNode)


def test_bare_updates_have_the_dtype_of_the_parameters():
  params = {'w': jnp.ones([4, 4], jnp.bfloat16)}
  tx = optimizers.soap(0.1).optax_optimizer
  updates, state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
  assert updates['w'].dtype == jnp.bfloat16
  assert state.params['w'].second_moment.dtype == jnp.float32
