"""Logits as a product: dtypes of operands and gradients, and the parameter of the output kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.layers import logits as products


def _operands(vocab_dim, hidden_dtype='float32', kernel_dtype='float32'):
  rng = np.random.default_rng(0)
  shape = (23, 8) if vocab_dim == 0 else (8, 23)
  return (
    jnp.asarray(rng.normal(size=(2, 3, 8)), hidden_dtype),
    jnp.asarray(rng.normal(size=shape), kernel_dtype),
  )


@pytest.mark.parametrize('vocab_dim', [0, 1])
@pytest.mark.parametrize(
  'hidden_dtype, kernel_dtype, operands',
  [
    ('float32', 'float32', 'float32'),
    ('float16', 'float32', 'float32'),
    ('bfloat16', 'float32', 'bfloat16'),
    ('float32', 'bfloat16', 'bfloat16'),
    ('bfloat16', 'bfloat16', 'bfloat16'),
  ],
)
def test_operands_and_gradients_are_bfloat16_if_one_array_is_and_sums_float32(
  vocab_dim, hidden_dtype, kernel_dtype, operands
):
  hidden, kernel = _operands(vocab_dim, hidden_dtype, kernel_dtype)
  cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 23)), jnp.float32)

  def compute(hidden, kernel):
    return layers.OutputProjection(hidden, kernel, vocab_dim=vocab_dim, divisor=4.0).logits()

  logits, pull_back = jax.vjp(compute, hidden, kernel)
  hidden_bar, kernel_bar = pull_back(cotangent)

  def rounded(x):
    return np.asarray(x.astype(operands), np.float64)

  matrix = rounded(kernel) if vocab_dim == 1 else rounded(kernel).T
  assert logits.dtype == jnp.float32 and (hidden_bar.dtype, kernel_bar.dtype) == (
    hidden.dtype,
    kernel.dtype,
  )
  np.testing.assert_allclose(logits, rounded(hidden) @ matrix / 4, rtol=1e-5, atol=1e-6)
  gradient = rounded(cotangent / 4)

  def tolerance(x):
    return dict(rtol={'float32': 1e-5, 'bfloat16': 1e-2, 'float16': 1e-3}[x.dtype.name], atol=1e-5)

  np.testing.assert_allclose(
    hidden_bar.astype(jnp.float32), gradient @ matrix.T, **tolerance(hidden_bar)
  )
  expected = np.einsum('ble,blv->ev', rounded(hidden), gradient)
  np.testing.assert_allclose(
    kernel_bar.astype(jnp.float32),
    expected if vocab_dim == 1 else expected.T,
    **tolerance(kernel_bar),
  )


def test_float32_logits_have_forward_derivatives():
  hidden, kernel = _operands(1)
  tangent = jax.jvp(lambda x: layers.OutputProjection(x, kernel).logits(), (hidden,), (hidden,))[1]
  np.testing.assert_allclose(tangent, hidden @ kernel, rtol=1e-5)


@pytest.mark.parametrize('vocab_dim', [0, 1])
def test_gradients_of_parts_of_the_rows_are_separate(vocab_dim):
  hidden, kernel = _operands(vocab_dim)
  rows, gradient = (
    hidden.reshape(6, 8),
    jnp.asarray(np.random.default_rng(2).normal(size=(6, 23)), jnp.float32),
  )
  parts = products.kernel_gradient(rows, gradient, vocab_dim, jnp.float32, 3)
  assert parts.shape == (3, *kernel.shape)
  np.testing.assert_allclose(
    parts.sum(axis=0),
    products.kernel_gradient(rows, gradient, vocab_dim, jnp.float32),
    rtol=1e-5,
    atol=1e-6,
  )


def test_the_output_kernel_is_the_parameter_of_a_dense_layer():
  hidden = jnp.ones((2, 3, 8))
  ours = layers.LogitsDense(23).init(jax.random.key(0), hidden)
  dense = layers.DenseGeneral(23, kernel_axes=('embed', 'vocab')).init(jax.random.key(0), hidden)
  assert ours['params_axes'] == dense['params_axes']
  np.testing.assert_array_equal(ours['params']['kernel'], dense['params']['kernel'])
  projection = layers.LogitsDense(23).apply(ours, hidden, chunk_size=5)
  assert (projection.vocab_size, projection.chunk_size) == (23, 5)
