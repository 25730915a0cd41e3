"""Random numbers of the data: known answers, permutations, derived keys."""

import numpy as np
import pytest

from t5x_lite.data.batches import philox

# --- Random numbers ------------------------------------------------------------------------


def test_philox_known_answers():
  """The vectors that the authors of Philox published with Random123 (kat_vectors, philox4x32 10)."""
  ones = np.uint64(2**64 - 1)
  words = philox.philox_words(np.uint64(0), np.uint64(0), np.uint64(0))
  assert [hex(int(w)) for w in words] == ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
  words = philox.philox_words(ones, ones, ones)
  assert [hex(int(w)) for w in words] == ['0x408f276d', '0x41c83b0e', '0xa20bc7c6', '0x6d5451fd']


@pytest.mark.parametrize('size', [1, 2, 3, 7, 16, 1021, 65537])
def test_permuted_is_a_permutation(size):
  order = philox.permuted(philox.fold(3, size), size, np.arange(size))
  assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(size))


@pytest.mark.parametrize('size', [10**6, 2**32 + 5, 2**62 - 1])
def test_permuted_positions_are_independent(size):
  """No drift, and no memory of the places before: neighbours correlate no more than those of independent draws."""
  first = philox.permuted(philox.fold(3, 'order', 0), size, np.arange(20_000)) / size
  second = philox.permuted(philox.fold(3, 'order', 1), size, np.arange(20_000)) / size
  assert len(set(first)) > 19_500 and first.min() >= 0 and first.max() < 1
  np.testing.assert_allclose(np.histogram(first, bins=10, range=(0, 1))[0], 2000, atol=200)
  for lag in (1, 2, 3, 4, 8):
    assert abs(np.corrcoef(first[:-lag], first[lag:])[0, 1]) < 0.03
  assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_philox_derived():
  order = philox.permutation(philox.fold(3, 'order', 0), 1000)
  assert sorted(order.tolist()) == list(range(1000)) and (order != np.arange(1000)).any()
  values = philox.uniform(philox.as_seeds(np.arange(4), 7), 5000)
  assert values.shape == (4, 5000) and values.dtype == np.float32
  assert values.min() >= 0 and values.max() < 1
  np.testing.assert_allclose(values.mean(axis=1), 0.5, atol=0.02)
  assert (
    len(
      {
        tuple(philox.fold(*parts).tolist())
        for parts in [(0, 1), (1, 0), ('01',), (0, 1, 0), ('0', '1')]
      }
    )
    == 5
  )
