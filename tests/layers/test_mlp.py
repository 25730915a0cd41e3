"""The feed-forward block equals plain NumPy: activations, kernels, dropout."""

import jax
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.errors import ConfigError

_KEY = jax.random.key(0)


def _random(*shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_mlp_multiplies_activated_projections():
  x = _random(2, 3, 4)
  module = layers.MlpBlock(
    intermediate_dim=6, activations=('gelu', 'linear'), intermediate_dropout_rate=0.0
  )
  variables = module.init(_KEY, x)
  wi_0, wi_1, wo = (
    np.asarray(variables['params'][name]['kernel'], np.float64) for name in ('wi_0', 'wi_1', 'wo')
  )
  gate = x @ wi_0
  gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
  np.testing.assert_allclose(
    module.apply(variables, x), (gate * (x @ wi_1)) @ wo, rtol=1e-4, atol=1e-5
  )


def test_mlp_with_one_activation_has_one_input_kernel():
  x = _random(2, 3, 4)
  module = layers.MlpBlock(intermediate_dim=6, activations=('relu',), intermediate_dropout_rate=0.0)
  variables = module.init(_KEY, x)
  assert set(variables['params']) == {'wi', 'wo'}
  wi, wo = (np.asarray(variables['params'][name]['kernel']) for name in ('wi', 'wo'))
  np.testing.assert_allclose(
    module.apply(variables, x), np.maximum(x @ wi, 0) @ wo, rtol=1e-4, atol=1e-5
  )


def test_mlp_drops_hidden_units_of_a_sequence_at_all_positions():
  x = np.broadcast_to(_random(2, 1, 4), (2, 5, 4))
  module = layers.MlpBlock(
    intermediate_dim=64, activations=('linear',), intermediate_dropout_rate=0.5
  )
  variables = module.init(_KEY, x, deterministic=True)
  y = np.asarray(module.apply(variables, x, rngs={'dropout': _KEY}))
  np.testing.assert_allclose(y, np.broadcast_to(y[:, :1], y.shape), rtol=1e-5, atol=1e-6)
  assert not np.allclose(y[0] / x[0], y[1] / x[1])
  assert not np.allclose(y, module.apply(variables, x, deterministic=True))


def test_unknown_activation_gets_a_proposal():
  with pytest.raises(ConfigError, match="Did you mean 'gelu'"):
    layers.activation_fn('gellu')
  assert layers.activation_fn(np.sin) is np.sin
