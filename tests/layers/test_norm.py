"""Layer norm equals plain NumPy."""

import jax.numpy as jnp
import numpy as np

from t5x_lite import layers


def _random(*shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_layer_norm_divides_by_the_root_mean_square():
  # Rows of usual size, next to epsilon's, and of zeros.
  x = np.concatenate(
    [_random(3, 8) * 5 + 2, _random(1, 8, seed=2) * 1e-3, np.zeros((1, 8))]
  ).astype(np.float32)
  module = layers.LayerNorm()
  scale = _random(8, seed=1)
  expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-6) * scale
  np.testing.assert_allclose(module.apply({'params': {'scale': scale}}, x), expected, rtol=1e-5)


def test_layer_norm_statistics_are_float32():
  # The squares sum to more than float16 holds.
  x = jnp.full((1, 64), 60000.0, jnp.float16)
  module = layers.LayerNorm(dtype=jnp.float16)
  y = module.apply({'params': {'scale': jnp.ones(64)}}, x)
  assert y.dtype == jnp.float16
  np.testing.assert_allclose(np.asarray(y, np.float32), 1.0, rtol=1e-3)
