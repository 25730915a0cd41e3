"""Layers with kernels by head: the same values as with matrices, and the shapes and logical axes of T5X."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.layers import nd


@pytest.mark.parametrize(
  'cls, arguments', [(nd.MultiHeadDotProductAttention, (2, 8)), (nd.DenseGeneral, ((2, 8),))]
)
def test_values_are_those_of_matrices(cls, arguments):
  x = jnp.ones((1, 3, 16))
  inputs = (x, x) if len(arguments) == 2 else (x,)
  flat_cls = getattr(layers, cls.__name__)
  own, flat = (
    each(*arguments).init_with_output(jax.random.key(0), *inputs) for each in (cls, flat_cls)
  )
  np.testing.assert_array_equal(own[0], flat[0])
  for leaf, other in zip(
    jax.tree.leaves(own[1]['params']), jax.tree.leaves(flat[1]['params']), strict=True
  ):
    assert leaf.ndim == 3 and other.ndim == 2
    np.testing.assert_array_equal(leaf.reshape(other.shape), other)


def test_nd_dense_init_takes_the_dims_of_the_call():
  init = layers.nd_dense_init(1.0, 'fan_in', 'normal')
  values = init(jax.random.key(0), (64, 4, 16), jnp.float32, (0,), (1, 2))
  assert np.std(values) == pytest.approx(64**-0.5, rel=0.05)
  kernel = nd.DenseGeneral((4, 16), kernel_init=init).init(jax.random.key(0), jnp.ones((1, 64)))[
    'params'
  ]['kernel']
  assert kernel.shape == (64, 4, 16) and np.std(kernel) == pytest.approx(64**-0.5, rel=0.05)


@pytest.mark.parametrize(
  'cls, arguments',
  [
    (nd.MultiHeadDotProductAttention, (2, 8)),
    (nd.DenseGeneral, ((2, 8),)),
    (layers.DenseGeneral, ((2, 8),)),
  ],
)
def test_initializers_that_require_the_dims_get_them(cls, arguments):
  calls = []

  def init(key, shape, dtype, in_axis, out_axis):
    calls.append((shape, in_axis, out_axis))
    return jax.random.normal(key, shape, dtype)

  x = jnp.ones((1, 3, 16))
  cls(*arguments, kernel_init=init).init(
    jax.random.key(0), *((x, x) if len(arguments) == 2 else (x,))
  )
  assert calls[0] == ((16, 2, 8), (0,), (1, 2))
  assert calls[3:] == ([((2, 8, 16), (0, 1), (2,))] if len(arguments) == 2 else [])
