"""Dense layers equal plain NumPy: contracted dims, forms of the kernel, dtypes."""

from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers

_KEY = jax.random.key(0)


def _random(*shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize('flat', [True, False])
@pytest.mark.parametrize(
  'features, axis, shape, equation',
  [
    (5, -1, (2, 3, 4), 'abc,cd->abd'),
    ((2, 5), -1, (2, 3, 4), 'abc,cde->abde'),
    (5, (-2, -1), (2, 3, 4, 6), 'abcd,cde->abe'),
    (5, 1, (2, 3, 4), 'abc,bd->acd'),
  ],
)
def test_dense_contracts_the_named_dims(features, axis, shape, equation, flat):
  x = _random(*shape)
  module = layers.DenseGeneral(features, axis=axis, flat_kernel=flat)
  variables = module.init(_KEY, x)
  kernel = np.asarray(variables['params']['kernel'])
  axes = (axis,) if isinstance(axis, int) else axis
  sizes = tuple(shape[a] for a in axes)
  sizes += (features,) if isinstance(features, int) else features
  if flat:
    assert kernel.ndim == 2
  np.testing.assert_allclose(
    module.apply(variables, x), np.einsum(equation, x, kernel.reshape(sizes)), rtol=1e-5, atol=1e-5
  )


def test_dense_kernel_forms_hold_the_same_numbers_and_name_their_axes():
  x = _random(2, 3, 4)
  flat = layers.DenseGeneral((2, 5), kernel_axes=('embed', 'joined_kv')).init(_KEY, x)
  full = layers.DenseGeneral((2, 5), kernel_axes=('embed', 'heads', 'kv'), flat_kernel=False).init(
    _KEY, x
  )
  np.testing.assert_array_equal(flat['params']['kernel'].reshape(4, 2, 5), full['params']['kernel'])
  names = nn_partitioning.get_axis_names(full['params_axes'])
  assert tuple(names['kernel']) == ('embed', 'heads', 'kv')


def test_dense_computes_in_its_dtype_with_float32_parameters():
  module = layers.DenseGeneral(5, dtype=jnp.bfloat16)
  variables = module.init(_KEY, _random(2, 4))
  assert variables['params']['kernel'].dtype == jnp.float32
  assert module.apply(variables, _random(2, 4)).dtype == jnp.bfloat16


# Weights, compute dtype, and the dtype to which the inputs are rounded before they are multiplied.
@pytest.mark.parametrize(
  'stored, dtype, rounded',
  [
    (jnp.bfloat16, jnp.float32, jnp.bfloat16),
    (jnp.bfloat16, 'float32', jnp.bfloat16),
    (jnp.float16, jnp.float32, jnp.float32),
    (jnp.float32, jnp.float32, jnp.float32),
    (jnp.float32, jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float16, jnp.float16),
  ],
)
@pytest.mark.parametrize('axis', [-1, 1])
def test_dense_multiplies_bfloat16_weights_with_bfloat16_inputs_and_sums_in_float32(
  axis, stored, dtype, rounded
):
  x, kernel = _random(2, 64, 64), jnp.asarray(_random(64, 5, seed=1), stored)
  assert layers.operand_dtype(kernel, dtype) == rounded
  got = layers.DenseGeneral(5, axis=axis, dtype=dtype).apply({'params': {'kernel': kernel}}, x)
  x, kernel = (np.asarray(jnp.asarray(a).astype(rounded), np.float64) for a in (x, kernel))
  assert got.dtype == jnp.dtype(dtype)
  tolerance = 1e-5 if got.dtype == jnp.float32 else 0.05
  np.testing.assert_allclose(
    got,
    np.einsum('abc,cd->abd' if axis == -1 else 'acb,cd->abd', x, kernel),
    rtol=tolerance,
    atol=tolerance,
  )


def test_dense_has_gradients_for_bfloat16_weights():
  module, x, kernel = (
    layers.DenseGeneral(5),
    _random(8, 64),
    jnp.asarray(_random(64, 5, seed=1), jnp.bfloat16),
  )

  def loss(kernel, x):
    return jnp.sum(module.apply({'params': {'kernel': kernel}}, x) ** 2)

  got = jax.grad(loss, argnums=(0, 1))(kernel, x)
  assert [leaf.dtype for leaf in got] == [jnp.bfloat16, jnp.float32]
  for a, b in zip(got, jax.grad(loss, argnums=(0, 1))(kernel.astype(jnp.float32), x), strict=True):
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.02, atol=0.02 * np.abs(b).max())
