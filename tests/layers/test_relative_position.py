"""Relative positions: T5X's recorded buckets, and biases from rows of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from tests import golden_data


def _random(*shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_buckets_are_those_of_t5x():
  description, arrays = golden_data.load('t5x/relpos_buckets')
  for i, setting in enumerate(description['settings']):
    got = layers.relative_position_bucket(arrays['relative_position'], **setting)
    np.testing.assert_array_equal(got, arrays[f'bucket/{i}'])


@pytest.mark.parametrize('qlen, klen, bidirectional', [(3, 7, True), (7, 3, False), (1, 5, True)])
def test_biases_are_the_table_at_the_buckets(qlen, klen, bidirectional):
  module = layers.RelativePositionBiases(
    num_buckets=8, max_distance=6, num_heads=2, dtype=jnp.float32
  )
  table = _random(2, 8)
  variables = {'params': {'rel_embedding': table}}

  def expected(table, offset):
    relative = np.arange(klen)[None, :] - (np.arange(qlen)[:, None] + offset)
    return table[:, layers.relative_position_bucket(relative, bidirectional, 8, 6)][None]

  # Few programs in place of one for each operation.
  expected = jax.jit(expected, static_argnums=1)
  apply = jax.jit(lambda: module.apply(variables, qlen, klen, bidirectional))
  np.testing.assert_array_equal(apply(), expected(table, 0))
  rows = jax.jit(
    lambda offset: module.apply(variables, qlen, klen, bidirectional, query_offset=offset)
  )
  offsets = list(range(klen - qlen + 1))  # a step's queries are at positions of the cache
  for offset in offsets:
    np.testing.assert_array_equal(rows(jnp.int32(offset)), expected(table, offset))
  if offsets:
    np.testing.assert_array_equal(
      rows(jnp.array(offsets, jnp.int32)),
      np.concatenate([expected(table, offset) for offset in offsets]),
    )
  # The derivative sums over all pairs of a bucket.
  cotangent = _random(1, 2, qlen, klen, seed=1)
  got = jax.jit(
    jax.grad(lambda v: jnp.sum(module.apply(v, qlen, klen, bidirectional) * cotangent))
  )(variables)
  want = jax.jit(jax.grad(lambda t: jnp.sum(expected(t, 0) * cotangent)))(table)
  np.testing.assert_allclose(got['params']['rel_embedding'], want, rtol=1e-5, atol=1e-6)


def test_biases_need_no_one_hot():
  """Lookup and expansion need no matrix product."""
  module = layers.RelativePositionBiases(
    num_buckets=32, max_distance=128, num_heads=2, dtype=jnp.float32
  )
  variables = {'params': {'rel_embedding': _random(2, 32)}}
  fn = jax.value_and_grad(lambda v: jnp.sum(module.apply(v, 16, 16) ** 2))
  assert 'dot_general' not in jax.jit(fn).lower(variables).as_text()


def test_cached_biases_are_those_of_the_first_call():
  arguments = dict(num_buckets=8, max_distance=6, num_heads=2, dtype=jnp.float32)
  variables = {'params': {'rel_embedding': _random(2, 8)}}
  expected = layers.RelativePositionBiases(**arguments).apply(variables, 5, 5, False)
  module = layers.CachedRelativePositionBiases(**arguments)
  np.testing.assert_array_equal(module.apply(variables, 5, 5, False), expected)
  first, cache = module.apply(variables, 5, 5, False, True, mutable=['cache'])
  later = module.apply({**variables, **cache}, 1, 1, False, decode=True)
  np.testing.assert_array_equal(first, expected)
  np.testing.assert_array_equal(later, expected)
