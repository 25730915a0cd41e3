"""Layouts of rows and beams in caches."""

import flax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite.errors import ConfigError
from tests.decoding.decoding_cases import jit

_X = np.arange(2 * 3 * 4).reshape(2, 3, 4)


@pytest.mark.parametrize('offset', [0, 1])
def test_rows_are_repeated_side_by_side(offset):
  expanded = decoding.flat_batch_beam_expand(_X, 3, offset)
  np.testing.assert_array_equal(expanded, np.repeat(_X, 3, axis=offset))
  np.testing.assert_array_equal(decoding.flat_batch_beam_expand(_X, 1, offset), _X)
  beams = decoding.add_beam_dim(_X, 3, offset)
  assert beams.shape[offset + 1] == 3
  flat = decoding.flatten_beam_dim(beams, offset)
  np.testing.assert_array_equal(flat, expanded)
  np.testing.assert_array_equal(
    decoding.unflatten_beam_dim(flat, _X.shape[offset], 3, offset), beams
  )


def test_cache_map_does_not_change_values_without_rows():
  cache = {
    'a': {'cached_key': 1, 'cache_index': 2, 'cached_bias': 3},
    'position_embedder_index': 4,
    'other': 5,
  }

  def add(x):
    return x + 10

  expected = {
    'a': {'cached_key': 11, 'cache_index': 2, 'cached_bias': 3},
    'position_embedder_index': 4,
    'other': 15,
  }
  assert decoding.cache_map(add, cache) == expected
  expected['a']['cache_index'] = 12
  mapped = decoding.cache_map(add, flax.core.freeze(cache), apply_to_index=True)
  assert isinstance(mapped, flax.core.FrozenDict) and mapped == flax.core.freeze(expected)
  assert cache['other'] == 5


@pytest.mark.parametrize('one_hot', [True, False])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.int32, bool])
def test_beams_are_taken_row_by_row(one_hot, dtype):
  x = jnp.asarray(np.random.default_rng(0).integers(0, 99, (2, 3, 5)), dtype)
  indices = jnp.asarray([[2, 0, 2, 1], [1, 1, 0, 0]])
  expected = np.stack([np.asarray(x)[row, np.asarray(indices)[row]] for row in range(2)])
  taken = jit(lambda: decoding.gather_beams({'x': x, 'scalar': 3}, indices, 2, 3, 4, one_hot))()
  np.testing.assert_array_equal(taken['x'], expected)
  assert taken['x'].dtype == dtype and taken['scalar'] == 3
  stacked = {'cached_key': np.stack([x, x]), 'cache_index': np.int32(7)}
  taken = jit(lambda: decoding.cache_gather_beams(stacked, indices, 2, 3, 4, one_hot, offset=1))()
  np.testing.assert_array_equal(taken['cached_key'], np.stack([expected, expected]))
  assert taken['cache_index'] == 7


def test_the_best_beams_come_last():
  scores = jnp.asarray([[1.0, 3.0, 2.0], [5.0, 5.0, 4.0]])
  best, index = decoding.gather_topk_beams((scores, jnp.asarray([[0, 1, 2]] * 2)), scores, 2, 2)
  assert best.tolist() == [[2.0, 3.0], [5.0, 5.0]]
  # Of equal beams the first is the better one.
  assert index.tolist() == [[2, 1], [1, 0]]


def test_the_first_state_of_a_beam_search():
  cache = {'cached_key': np.arange(6).reshape(2, 3), 'cache_index': np.int32(0)}
  state = jit(lambda: decoding.beam_init(2, 3, 5, cache))()
  assert state.live_logprobs.tolist() == [[0.0, -1e7, -1e7]] * 2
  assert state.finished_scores.tolist() == [[-1e7] * 3] * 2
  assert not state.finished_flags.any() and state.live_seqs.shape == state.finished_seqs.shape == (
    2,
    3,
    5,
  )
  assert state.cache['cached_key'].shape == (2, 3, 3) and state.cache['cache_index'].shape == ()
  assert state.cur_index == 0 and state.initial_index is None
  prefilled = decoding.beam_init(
    2,
    3,
    5,
    {**cache, 'cache_index': jnp.asarray([4, 2])},
    live_seqs=jnp.ones((2, 3, 5), jnp.int32),
    initial_index=jnp.asarray([4, 2]),
  )
  assert (
    prefilled.cache['cache_index'].tolist() == [[4] * 3, [2] * 3] and prefilled.live_seqs.min() == 1
  )


def test_wrong_shapes():
  with pytest.raises(TypeError, match=r'cannot reshape array of shape \(5, 2\)'):
    decoding.unflatten_beam_dim(jnp.zeros((5, 2)), 2, 3)
  with pytest.raises(
    ConfigError, match=r'must be \(\(2, 4\), \(2, 3\)\), got \(\(2, 2\), \(2, 3\)\)'
  ):
    decoding.gather_beams(jnp.zeros((2, 3)), jnp.zeros((2, 2), jnp.int32), 2, 3, 4)
  with pytest.raises(ConfigError, match=r'dims 0 and 1 .*must be \(\(2, 2\), \(2, 4\)\)'):
    decoding.gather_beams(jnp.zeros((2, 3)), jnp.zeros((2, 2), jnp.int32), 2, 4, 2)
