"""Blocks and statistics of one parameter as lists, against slices and NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.errors import ConfigError
from t5x_lite.optimizers import shampoo


def _slices(shape, block_size):
  """The slices of each block, the first dim slowest."""
  starts = [range(0, dim, block_size if block_size > 0 else max(dim, 1)) for dim in shape]
  steps = [block_size if block_size > 0 else dim for dim in shape]
  for start in itertools.product(*starts):
    yield tuple(slice(a, a + step) for a, step in zip(start, steps, strict=True))


def _grad(shape):
  return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
  'shape, block_size',
  [((7,), 3), ((6, 9), 3), ((5, 7), 4), ((4, 4), 9), ((5, 3), 0), ((2, 3, 5), 2)],
)
def test_partitions_are_slices(shape, block_size):
  array = jnp.asarray(_grad(shape))
  partitioner = shampoo.BlockPartitioner(array, block_size)
  partitions = partitioner.partition(array)
  want = [np.asarray(array)[block] for block in _slices(shape, block_size)]
  for found, block in zip(partitions, want, strict=True):
    np.testing.assert_array_equal(found, block)
  np.testing.assert_array_equal(partitioner.merge_partitions(partitions), array)
  sizes = [[size, size] for block in want for size in block.shape]
  assert partitioner.shapes_for_preconditioners() == sizes
  assert partitioner.num_splits() == len(shape)
  with pytest.raises(ConfigError, match='BlockPartitioner.partition.*of shape'):
    partitioner.partition(jnp.zeros([*shape, 2]))


def test_a_scalar_is_its_own_block():
  scalar = jnp.float32(3)
  partitioner = shampoo.BlockPartitioner(scalar, 4)
  assert partitioner.merge_partitions(partitioner.partition(scalar)) == 3
  preconditioner = shampoo.Preconditioner(scalar, 4, True)
  assert preconditioner.statistics_from_grad(scalar) == []
  assert preconditioner.exponent_for_preconditioner() == 0
  assert preconditioner.preconditioned_grad(scalar, []) == 3


@pytest.mark.parametrize(
  'shape, merges, merged, exponent',
  [
    ((5, 7), True, (5, 7), 4),
    ((2, 3, 8), True, (6, 8), 4),
    ((2, 3, 8), False, (2, 3, 8), 6),
    ((3,), True, (3,), 2),
    ((1, 1), True, (1,), 2),
  ],
)
def test_statistics_and_preconditioned_gradients(shape, merges, merged, exponent):
  block_size = 6
  grad = _grad(shape)
  preconditioner = shampoo.Preconditioner(jnp.asarray(grad), block_size, merges)
  assert preconditioner.exponent_for_preconditioner() == exponent
  statistics = preconditioner.statistics_from_grad(jnp.asarray(grad))
  want_statistics = []
  want = np.zeros(merged, np.float32)
  matrices = []
  for block in _slices(merged, block_size):
    part = grad.reshape(merged)[block]
    product = part
    for dim, size in enumerate(part.shape):
      unfolded = np.moveaxis(part, dim, 0).reshape(size, -1)
      want_statistics.append(unfolded @ unfolded.T)
      matrix = _grad((size, size))
      matrices.append(matrix + matrix.T)
      product = np.moveaxis(np.tensordot(matrices[-1], product, axes=[[0], [dim]]), 0, dim)
    want[block] = product
  for found, statistic in zip(statistics, want_statistics, strict=True):
    np.testing.assert_allclose(found, statistic, rtol=1e-5, atol=1e-5)
  shapes = [list(statistic.shape) for statistic in statistics]
  assert preconditioner.shapes_for_preconditioners() == shapes
  found = preconditioner.preconditioned_grad(jnp.asarray(grad), list(map(jnp.asarray, matrices)))
  np.testing.assert_allclose(found, want.reshape(shape), rtol=1e-4, atol=1e-5)
