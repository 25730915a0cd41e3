"""Parameters in blocks, and small dims merged."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.optimizers.shampoo import blocks
from tests.optimizers.shampoo import shampoo_reference

# Blocks.


@pytest.mark.parametrize(
  'shape,block_size',
  [
    ((7,), 3),
    ((6, 9), 3),
    ((5, 7), 4),
    ((4, 4), 9),
    pytest.param((2, 3, 2, 5), 2, marks=pytest.mark.full),
  ],
)
def test_blocks_are_those_of_slicing(shape, block_size):
  layout = blocks.make_layout(shape, block_size=block_size, merge_dims=False, largest_dim=4096)
  grad = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  np.testing.assert_array_equal(layout.join(layout.cut(jnp.asarray(grad))), grad)

  cuts = [
    [slice(start, start + block_size) for start in range(0, dim, block_size)] for dim in shape
  ]
  want = []
  for block in itertools.product(*cuts):
    part = grad[block]
    for dim in range(part.ndim):
      unfolded = np.moveaxis(part, dim, 0).reshape(part.shape[dim], -1)
      want.append(unfolded @ unfolded.T)
  stacks = layout.statistics(jnp.asarray(grad), jax.lax.Precision.HIGHEST)
  assert tuple(stack.shape for stack in stacks) == tuple((k, n, n) for k, n in layout.stack_shapes)
  assert layout.num_statistics == len(want) and layout.sizes == tuple(
    len(matrix) for matrix in want
  )
  flat = [matrix for stack in stacks for matrix in stack]
  for (stack, row), place, matrix in zip(layout.order, layout.flat_order, want, strict=True):
    np.testing.assert_allclose(stacks[stack][row], matrix, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(flat[place], stacks[stack][row])


@pytest.mark.parametrize(
  'shape,largest,want',
  [
    ([1, 2, 768, 1, 2048], 1024, [2, 768, 2048]),
    ([6, 1, 2], 4, [6, 2]),
    ([1], 4, [1]),
    ([5], 4, [5]),
    ([3, 3, 3], 9, [9, 3]),
    ([2, 2, 2], 8, [8]),
  ],
)
def test_small_dims_are_merged(shape, largest, want):
  assert (
    blocks.merge_small_dims(shape, largest)
    == want
    == list(shampoo_reference.merged(shape, largest))
  )
