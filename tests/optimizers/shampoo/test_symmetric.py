"""Padding, and symmetric matrices stored as blocks, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.errors import ConfigError
from t5x_lite.optimizers import shampoo


def _symmetric(size):
  matrix = np.random.default_rng(size).normal(size=(size, size)).astype(np.float32)
  return matrix + matrix.T


def _concat(matrix, size):
  """The blocks on and below the diagonal, row by row, by slices."""
  blocks = []
  for i in range(len(matrix) // size):
    for j in range(i + 1):
      blocks.append(matrix[i * size : (i + 1) * size, j * size : (j + 1) * size])
  return np.concatenate(blocks, axis=1)


@pytest.mark.parametrize('size, num_blocks', [(2, 1), (3, 2), (2, 4)])
def test_blocks_give_the_symmetric_matrix(size, num_blocks):
  matrix = _symmetric(size * num_blocks)
  found = shampoo.materialize_matrix_from_concat(jnp.asarray(_concat(matrix, size)))
  np.testing.assert_array_equal(found, matrix)
  total = num_blocks * (num_blocks + 1) // 2
  assert shampoo.num_blocks_from_total_blocks(total) == num_blocks


def test_padding_is_an_identity():
  matrix = _symmetric(4)
  padded = np.block([[matrix, np.zeros((4, 4))], [np.zeros((4, 4)), np.eye(4)]])
  np.testing.assert_array_equal(shampoo.pad_square_matrix(jnp.asarray(matrix), 8), padded)
  assert shampoo.pad_square_matrix(jnp.asarray(matrix), 4).shape == (4, 4)
  # [[A, B^T], [B, C]] in blocks of 2, padded to 4 x 4 blocks.
  blocks = shampoo.pad_block_symmetric_matrix(jnp.asarray(_concat(matrix, 2)), 2, 10)
  np.testing.assert_array_equal(blocks, _concat(padded, 2))
  # A small matrix is padded to a block first.
  small = shampoo.pad_block_symmetric_matrix(jnp.asarray(matrix[:3, :3]), 4, 3)
  want = np.eye(8, dtype=np.float32)
  want[:3, :3] = matrix[:3, :3]
  np.testing.assert_array_equal(small, _concat(want, 4))
  zero, one = np.zeros((2, 2)), np.eye(2)
  np.testing.assert_array_equal(
    shampoo.make_sliced_padding(2, 4, 2, jnp.float32),
    np.concatenate([zero, zero, one, zero, zero, zero, one], axis=1),
  )
  assert shampoo.make_sliced_padding(2, 3, 3, jnp.bfloat16).shape == (2, 0)
  np.testing.assert_array_equal(shampoo.pad_vector(jnp.arange(2.0), 4), [0, 1, 0, 0])


@pytest.mark.parametrize(
  'call, fragment',
  [
    (lambda: shampoo.pad_square_matrix(jnp.zeros([2, 3]), 4), r'rows == cols.*got \(2, 3\)'),
    (lambda: shampoo.pad_square_matrix(jnp.zeros([3, 3]), 2), 'at most max_size = 2'),
    (lambda: shampoo.pad_vector(jnp.zeros([3]), 2), 'at most max_size = 2'),
    (lambda: shampoo.num_blocks_from_total_blocks(4), r'n \* \(n \+ 1\) / 2 .*got 4'),
    (lambda: shampoo.pad_block_symmetric_matrix(jnp.zeros([3, 3]), 2, 3), 'at most 2 rows'),
    (lambda: shampoo.pad_block_symmetric_matrix(jnp.zeros([2, 8]), 2, 3), 'to 6 cols'),
    (lambda: shampoo.materialize_matrix_from_concat(jnp.zeros([2, 3])), 'as wide as'),
  ],
)
def test_invalid_shapes(call, fragment):
  with pytest.raises(ConfigError, match=fragment):
    call()
