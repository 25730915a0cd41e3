"""Merged kernels against a sum over ranks in float64, one layer and expert at a time."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from t5x_lite.adapters import merging

_SIZES = {'i': 5, 'o': 7, 's': 3}
_RANK = 2


def _arrays(dims, dtype=np.float32):
  rng = np.random.default_rng(len(dims))
  shape = [_SIZES[dim] + i for i, dim in enumerate(dims)]
  shape_a = [size for size, dim in zip(shape, dims, strict=True) if dim != 'o']
  shape_b = [size for size, dim in zip(shape, dims, strict=True) if dim != 'i']
  shape_b.insert(dims.index('i'), _RANK)
  shapes = (shape, [*shape_a, _RANK], shape_b)
  return [rng.standard_normal(each).astype(dtype) for each in shapes]


@pytest.mark.parametrize(
  'dims',
  [
    pytest.param('io', id='matrix'),
    pytest.param('ioo', id='query with heads'),
    pytest.param('iio', id='out with heads'),
    pytest.param('isoo', id='stacked queries'),
    pytest.param('isio', id='stacked outs'),
    pytest.param('iso', id='stacked matrices'),
    pytest.param('sio', id='experts'),
    pytest.param('ssio', id='stacked experts'),
  ],
)
def test_merged_kernels(dims):
  kernel, a, b = _arrays(dims)
  got = merging.merge(kernel, a, b, dims, 0.5)
  assert got.dtype == np.float32 and got.shape == kernel.shape
  want = kernel.astype(np.float64)
  for index in itertools.product(*map(range, kernel.shape)):
    index_a = tuple(i for i, dim in zip(index, dims, strict=True) if dim != 'o')
    index_b = [i for i, dim in zip(index, dims, strict=True) if dim != 'i']
    for rank in range(_RANK):
      # Expert dims come before the rank, layers and outputs after it.
      where = (*index_b[: dims.index('i')], rank, *index_b[dims.index('i') :])
      want[index] += 0.5 * float(a[(*index_a, rank)]) * float(b[where])
  np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_the_sum_is_computed_in_float32():
  """In bfloat16 a small adapter would be rounded away before it is added, and twice."""
  kernel, a, b = _arrays('io', ml_dtypes.bfloat16)
  got = merging.merge(kernel, a, b, 'io', 1e-3)
  product = a.astype(np.float64) @ b.astype(np.float64)
  np.testing.assert_allclose(got - kernel.astype(np.float32), 1e-3 * product, rtol=1e-3, atol=3e-7)


@pytest.mark.parametrize(
  'rank_stabilized, want', [(False, 2.0), (True, 4.0)], ids=['by rank', 'rank-stabilized']
)
def test_scale(rank_stabilized, want):
  assert merging.scale_of(4, 8.0, rank_stabilized) == want
