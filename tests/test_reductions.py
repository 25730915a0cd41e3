"""Reductions of arrays that keep NaN."""

import jax
import numpy as np
import pytest

from t5x_lite import reductions


@pytest.mark.parametrize('axis', [None, 0, (0, 1)])
@pytest.mark.parametrize('shape', [(3, 5), (512, 512)])
def test_the_largest_magnitude_is_that_of_numpy(shape, axis):
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  x[1, 2] = -9
  fn = jax.jit(lambda x: reductions.largest_magnitude(x, axis))
  np.testing.assert_array_equal(fn(x), np.max(np.abs(x), axis=axis))
  x[0, 1] = np.nan
  np.testing.assert_array_equal(fn(x), np.max(np.abs(x), axis=axis))
  assert fn(x).dtype == np.float32


def test_no_elements_have_the_largest_magnitude_zero():
  assert reductions.largest_magnitude(np.zeros((0, 2), np.float32)) == 0
