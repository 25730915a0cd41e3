"""Keys of beams in slots: attention equals that of a reordered cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.errors import ConfigError

_KEY = jax.random.key(0)


def _random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _attention(**fields):
  return layers.MultiHeadDotProductAttention(num_heads=2, head_dim=8, **fields)


@pytest.mark.parametrize(
  'per_row, chunk', [pytest.param(False, 1, marks=pytest.mark.full), (False, 2), (True, 1)]
)
def test_beams_with_slots_attend_as_those_whose_cache_is_reordered(per_row, chunk):
  """Only the table is reordered; keys and values are unchanged."""
  num_beams, length, batch = 3, 9, 2
  module = _attention()
  x = _random(batch, 4, 16)
  params = module.init(_KEY, x, x)['params']
  lengths = jnp.asarray([3, 1]) if per_row else None
  _, variables = module.apply(
    {'params': params},
    x,
    x,
    prefill=True,
    prefill_lengths=lengths,
    cache_length=length,
    mutable=['cache'],
  )
  slotted = layers.share_beams(variables['cache'], num_beams)

  def rows(leaf):
    return jnp.repeat(leaf, num_beams, axis=0) if leaf.ndim else leaf

  ordinary = jax.tree.map(rows, variables['cache'])
  slotted.update({name: rows(slotted[name]) for name in ('slot_table', 'cache_index')})

  @jax.jit
  def step(cache, x, bias):
    out, variables = module.apply(
      {'params': params, 'cache': cache}, x, x, bias=bias, decode=True, mutable=['cache']
    )
    return out, variables['cache']

  rng = np.random.default_rng(0)
  for i in range(2 if chunk == 2 else 4):
    x = _random(batch * num_beams, chunk, 16, seed=i)
    # Biases by position: of rows at one position, or each at its own.
    bias = _random(batch * num_beams if per_row else 1, 2, chunk, length, seed=9 + i)
    want, ordinary = step(ordinary, x, bias)
    got, slotted = step(slotted, x, bias)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    parents = (
      rng.integers(0, num_beams, (batch, num_beams)) + num_beams * np.arange(batch)[:, None]
    ).reshape(-1)
    ordinary = {name: leaf if leaf.ndim == 0 else leaf[parents] for name, leaf in ordinary.items()}
    slotted['slot_table'] = slotted['slot_table'][parents]
  np.testing.assert_array_equal(slotted['cache_index'], ordinary['cache_index'])
  with pytest.raises(ConfigError, match='number of sequences must be 6, that of the cache, got 4'):
    step(slotted, _random(4, 1, 16), None)
