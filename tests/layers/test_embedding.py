"""Embeddings: gathered rows, scores of rows, ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.errors import ConfigError

_KEY = jax.random.key(0)


def _random(*shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_embedding_gathers_and_scores_its_rows():
  module = layers.Embed(num_embeddings=7, features=4, attend_dtype=jnp.float32, dtype=jnp.bfloat16)
  ids = np.array([[0, 6, 3]], np.int32)
  variables = module.init(_KEY, ids)
  table = np.asarray(variables['params']['embedding'])
  looked_up = module.apply(variables, ids)
  assert looked_up.dtype == jnp.bfloat16
  np.testing.assert_array_equal(looked_up, table[ids].astype(jnp.bfloat16))
  query = _random(2, 3, 4)
  scores = module.apply(variables, query, method='attend')
  assert scores.dtype == jnp.float32
  np.testing.assert_allclose(scores, query @ table.T, rtol=1e-5, atol=1e-5)


def test_bfloat16_rows_score_a_bfloat16_query_in_float32():
  table, query = jnp.asarray(_random(7, 64), jnp.bfloat16), _random(3, 64, seed=1)
  scores = layers.Embed(7, 64).apply({'params': {'embedding': table}}, query, method='attend')
  assert scores.dtype == jnp.float32
  rounded = np.asarray(jnp.asarray(query, jnp.bfloat16), np.float64)
  np.testing.assert_allclose(
    scores, rounded @ np.asarray(table, np.float64).T, rtol=1e-5, atol=1e-5
  )


def test_bfloat16_rows_are_gathered_without_a_copy_of_the_table():
  ids, table = (
    np.array([[0, 6, 3, 3, 2000]], np.int32),
    jnp.asarray(_random(2000, 64), jnp.bfloat16),
  )

  def look_up(table, ids=ids):
    return layers.Embed(2000, 64).apply({'params': {'embedding': table}}, ids)

  got = look_up(table)
  assert got.dtype == jnp.float32 and np.all(np.isnan(got[0, 4]))
  np.testing.assert_array_equal(got[0, :4], table[ids[0, :4]].astype(jnp.float32))
  program = jax.jit(look_up).lower(table).compile()
  assert program.memory_analysis().temp_size_in_bytes < table.nbytes
  # Rows that are looked up twice have the sum of the gradients.
  grad = jax.grad(lambda table: jnp.sum(look_up(table, ids[:, :4])))(table)
  assert grad.dtype == jnp.bfloat16
  np.testing.assert_array_equal(grad[jnp.array([0, 3, 6, 7]), 0].astype(jnp.float32), [1, 2, 1, 0])


def test_embedding_by_one_hot_is_the_same_function():
  ids = np.array([[0, 6, 3, 3]], np.int32)
  table = {'params': {'embedding': _random(7, 4)}}

  def loss(variables, one_hot):
    return jnp.sum(layers.Embed(7, 4, one_hot=one_hot).apply(variables, ids) ** 3)

  gather, one_hot = (jax.value_and_grad(loss)(table, flag) for flag in (False, True))
  np.testing.assert_allclose(gather[0], one_hot[0], rtol=1e-6)
  np.testing.assert_allclose(
    gather[1]['params']['embedding'], one_hot[1]['params']['embedding'], rtol=1e-6, atol=1e-6
  )


def test_embedding_raises_for_ids_that_are_not_integers():
  table = {'params': {'embedding': _random(7, 4)}}
  with pytest.raises(ConfigError, match='cast_input_dtype'):
    layers.Embed(7, 4).apply(table, np.array([1.0]))
  np.testing.assert_array_equal(
    layers.Embed(7, 4, cast_input_dtype=jnp.int32).apply(table, np.array([1.0])),
    table['params']['embedding'][[1]],
  )
