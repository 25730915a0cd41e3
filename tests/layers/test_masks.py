"""Masks and biases of attention equal brute force."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.errors import ConfigError


def _random(*shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_decoder_mask_by_brute_force():
  targets = np.array([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
  segments = np.array([[1, 1, 2, 2, 0, 0], [1, 1, 1, 2, 2, 2]])
  prefix = np.array([[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
  for use_prefix, use_segments in itertools.product((False, True), repeat=2):
    mask = layers.make_decoder_mask(
      jnp.asarray(targets),
      jnp.float32,
      jnp.asarray(prefix) if use_prefix else None,
      jnp.asarray(segments) if use_segments else None,
    )
    assert mask.shape == (2, 1, 6, 6) and mask.dtype == jnp.float32
    for b, q, k in itertools.product(range(2), range(6), range(6)):
      seen = k <= q or (use_prefix and prefix[b, q] and prefix[b, k])
      seen = seen and targets[b, q] > 0 and targets[b, k] > 0
      seen = seen and (not use_segments or segments[b, q] == segments[b, k])
      assert mask[b, 0, q, k] == seen, (b, q, k)


def test_masks_combine_by_and_biases_by_sum():
  a, b = jnp.array([[1.0, 0.0, 1.0]]), jnp.array([[1.0, 1.0, 0.0]])
  np.testing.assert_array_equal(layers.combine_masks(a, None, b), [[1.0, 0.0, 0.0]])
  np.testing.assert_array_equal(layers.combine_biases(a, None, b), [[2.0, 1.0, 1.0]])
  assert layers.combine_masks(None) is None and layers.combine_biases(None, None) is None
  with pytest.raises(ConfigError, match='rank'):
    layers.combine_masks(a, b[0])
  assert layers.make_attention_mask(a, b, extra_batch_dims=2).shape == (1, 1, 1, 1, 3, 3)
  np.testing.assert_array_equal(layers.make_causal_mask(a)[0, 0], np.tril(np.ones((3, 3))))


def test_attention_bias_equals_the_masks():
  """The sum of the parts of a bias equals T5X's mask, except in the rows of padding queries."""
  targets = jnp.array([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
  segments = jnp.array([[1, 1, 2, 2, 0, 0], [1, 1, 1, 2, 2, 2]])
  valid = targets > 0
  position = jnp.asarray(_random(1, 3, 6, 6))
  for packed in (False, True):
    ids = segments if packed else None
    mask = layers.make_decoder_mask(targets, jnp.float32, decoder_segment_ids=ids)
    expected = np.broadcast_to(layers.mask_to_bias(mask) + position, (2, 3, 6, 6))
    bias = layers.make_attention_bias(
      valid, valid, query_segment_ids=ids, key_segment_ids=ids, causal=True, position=position
    )
    got = np.broadcast_to(bias.shared + bias.per_example, expected.shape)
    rows = np.broadcast_to(np.asarray(valid)[:, None, :], (2, 3, 6))
    # Masked twice is as masked as once.
    np.testing.assert_allclose(np.maximum(got[rows], -1e9), np.maximum(expected[rows], -1e9))
    assert bias.causal
    if packed:
      assert bias.key_lengths is None
    else:
      assert bias.per_example.shape == (2, 1, 1, 6)
      np.testing.assert_array_equal(bias.key_lengths, [4, 6])
  with pytest.raises(ConfigError, match='both sides or neither'):
    layers.make_attention_bias(valid, valid, query_segment_ids=segments)


@pytest.mark.parametrize('arrays', [True, False])
def test_plain_biases_and_positions_add_up_in_any_order(arrays):
  valid = jnp.array([[True, True, True, False]])
  position, shared, per_example = (
    _random(1, 2, 4, 4),
    _random(1, 1, 4, 4, seed=1),
    _random(3, 2, 1, 4, seed=2),
  )
  base = layers.make_attention_bias(valid, valid, causal=True, arrays=arrays)
  parts = {'position': position, 'shared': shared, 'per_example': per_example}
  for order in itertools.permutations(parts):
    bias = base
    for name in order:
      bias = bias.with_position(position) if name == 'position' else bias.plus(parts[name])
    bias = bias.with_arrays()
    expected = np.asarray(base.with_arrays().shared + base.with_arrays().per_example) + sum(
      parts.values()
    )
    np.testing.assert_allclose(
      np.broadcast_to(
        (bias.shared if bias.shared is not None else 0) + bias.per_example, expected.shape
      ),
      expected,
      rtol=1e-5,
    )


def test_lengths_of_rows_without_tokens_leave_one_key():
  valid = jnp.array([[False, False, False], [True, False, True]])
  np.testing.assert_array_equal(layers.make_attention_bias(valid, valid).key_lengths, [1, 3])
