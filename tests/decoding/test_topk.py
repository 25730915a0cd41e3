"""First maximum, top k and masks equal those of sorting, including equal entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite.decoding import topk
from t5x_lite.errors import ConfigError
from tests.decoding.decoding_cases import jit


@pytest.mark.parametrize('n, k', [(5000, 3), (2048, 2), (40, 7), (1024, 1)])
def test_two_stages_equal_top_k(n, k):
  rng = np.random.default_rng(n)
  # Few different values: many ties, within and across pieces; one row has only one finite entry.
  x = rng.integers(0, 40, (5, n)).astype(np.float32)
  x[3] = -np.inf
  x[3, n // 2] = 0.0
  x[4] = rng.normal(size=n)
  values, indices = jit(lambda x: decoding.top_k_two_stage(x, k))(x)
  expected_values, expected_indices = jax.lax.top_k(x, k)
  np.testing.assert_array_equal(values, expected_values)
  np.testing.assert_array_equal(indices, expected_indices)


@pytest.mark.parametrize('n, k', [(5000, 3), (300, 4)])
def test_two_stages_rank_by_a_score(n, k):
  x = np.random.default_rng(n).normal(size=(5, n)).astype(np.float32)
  before = np.float32([[-3.0], [-1e3], [-1e5], [-1e7], [0.0]])

  # Rounding makes ties of entries that differ.
  def score_fn(x):
    return x - np.float32(0.3) + before

  scores, indices = jit(lambda x: decoding.top_k_two_stage(x, k, score_fn))(x)
  expected_scores, expected_indices = jax.lax.top_k(score_fn(x), k)
  assert len(np.unique(score_fn(x)[3])) < 10
  np.testing.assert_array_equal(scores, expected_scores)
  np.testing.assert_array_equal(indices, expected_indices)


@pytest.mark.parametrize('n', [300, 2048, 5000])
def test_first_argmax_takes_the_first_of_equal_entries_and_survives_nan(n):
  x = np.random.default_rng(0).integers(0, 5, (2, 6, n)).astype(np.float32)
  x[0, :2] = -np.inf
  x[0, 1, n - 1] = x[0, 2, n // 2] = 7.0
  x[0, 3] = np.where(np.arange(n) % 2, 0.0, -0.0)
  largest, first = jit(topk.first_argmax)(x)
  np.testing.assert_array_equal(first, np.argmax(x, axis=-1))
  np.testing.assert_array_equal(largest, np.max(x, axis=-1))
  x[1, 0, n - 1] = x[1, 1] = np.nan
  _, first = jit(topk.first_argmax)(x)
  assert np.all((first >= 0) & (first < n))


def _expected_topk_mask(x, k):
  return np.where(x >= np.sort(x, axis=-1)[..., [-min(k, x.shape[-1])]], x, -1.0)


def test_topk_mask_equals_sorting_for_known_and_traced_k():
  rng = np.random.default_rng(0)
  x = np.concatenate(
    [rng.normal(size=(3, 2, 1500)), rng.integers(-9, 9, (3, 2, 1500))], axis=1
  ).astype(np.float32)
  traced = jit(lambda x, k: decoding.topk_mask(x, k, -1.0))
  for k in (1, 2, 37, 1200, 1500, 4000):
    np.testing.assert_array_equal(traced(x, k), _expected_topk_mask(x, k))
  for k in (37, 1200):
    np.testing.assert_array_equal(
      jit(lambda x: decoding.topk_mask(x, k, -1.0))(x), _expected_topk_mask(x, k)
    )


def test_topp_mask_keeps_the_fewest_entries_that_reach_p():
  rng = np.random.default_rng(0)
  # Row 0 is so flat that the cutoff is far from the top, row 1 peaked, row 2 has ties; then all rows are peaked.
  flat = rng.normal(size=(3, 700)).astype(np.float32) * np.float32([[0.1], [9.0], [1.0]])
  flat[2] = np.round(flat[2])
  masked_fn = jit(lambda x, p: decoding.topp_mask(x, p, -100.0))
  with jax.disable_jit():  # as users do to look for errors
    np.testing.assert_array_equal(
      decoding.topp_mask(jnp.log(jnp.float32([[0.1, 0.6, 0.3]])), 0.7, -100.0) > -100,
      [[False, True, True]],
    )
  for x in (flat, 9 * flat[[2, 1, 2]]):
    for p in (0.05, 0.5, 0.97):
      probs = np.asarray(jax.nn.softmax(x), np.float64)
      masked = np.asarray(masked_fn(x, p))
      kept = masked > -100
      np.testing.assert_array_equal(masked[kept], x[kept])
      for row_probs, row_kept in zip(probs, kept, strict=True):
        least = row_probs[row_kept].min()
        assert row_probs[row_kept].sum() >= p - 1e-6
        assert row_probs[row_probs > least].sum() < p + 1e-6
        np.testing.assert_array_equal(row_kept, row_probs >= least)


@pytest.mark.parametrize(
  'mask_fn, limit',
  [
    (decoding.topk_mask, 0),
    (decoding.topp_mask, 0.0),
    (decoding.topp_mask, 1.5),
    (decoding.topp_mask, float('nan')),
  ],
)
def test_masks_raise_for_limits_out_of_range(mask_fn, limit):
  with pytest.raises(ConfigError, match=f'mask.[kp]` must be .* got {limit}'):
    mask_fn(jnp.zeros((1, 4)), limit, -1.0)


def test_searches_find_the_largest_number_of_which_the_predicate_is_false():
  ints = np.array([[0, -1, 7], [2**31 - 1, -(2**31), -12345]], np.int32)
  np.testing.assert_array_equal(
    jit(lambda: decoding.int32_bsearch((2, 3), lambda x: x > ints))(), ints
  )
  always = jit(lambda: decoding.int32_bsearch((2,), lambda x: jnp.ones((2,), bool)))()
  np.testing.assert_array_equal(always, [-(2**31)] * 2)
  greatest = np.finfo(np.float32).max
  floats = np.array([1e-30, 1.5, -2.25, greatest, -greatest, 1e-3], np.float32)
  np.testing.assert_array_equal(
    jit(lambda: decoding.float32_bsearch((6,), lambda x: x > floats))(), floats
  )
  nowhere, everywhere = (
    jit(lambda value=value: decoding.float32_bsearch((), lambda x: jnp.full((), value)))()
    for value in (False, True)
  )
  assert nowhere == greatest and everywhere == -np.inf
