"""Padding of matrices and vectors, and symmetric matrices as their blocks on and below the diagonal.

A symmetric matrix of n x n blocks of size b is stored as an array [b, b * n * (n + 1) / 2]: row 0 of the blocks up to
the diagonal, then row 1, and so on. [[A, B^T], [B, C]] is [A, B, C]. The layout is that of the original implementation
of Distributed Shampoo, see the package.
"""

import math

import jax
import jax.numpy as jnp

from t5x_lite import checks


def num_blocks_from_total_blocks(total_blocks: int) -> int:
  """Return the number n of block rows of a symmetric matrix that is stored as `total_blocks` blocks.

  Args:
    total_blocks: n * (n + 1) / 2.

  Raises:
    ConfigError: there is no such n.

  >>> num_blocks_from_total_blocks(6)
  3
  """
  num_blocks = (math.isqrt(8 * max(total_blocks, 0) + 1) - 1) // 2
  if total_blocks < 0 or num_blocks * (num_blocks + 1) // 2 != total_blocks:
    raise checks.invalid('', 'total_blocks', 'n * (n + 1) / 2 for an integer n', total_blocks)
  return num_blocks


def materialize_matrix_from_concat(
  block_rows_concat: jax.Array, num_blocks: int | None = None
) -> jax.Array:
  """Return the symmetric matrix of its blocks on and below the diagonal.

  Args:
    block_rows_concat: <float>[b, b * n * (n + 1) / 2], see the module.
    num_blocks: n; None computes it from the shape.

  Returns:
    <float>[b * n, b * n].

  Raises:
    ConfigError: the shape is not that of such blocks.
  """
  size, width = block_rows_concat.shape
  if width % size:
    raise checks.invalid(
      '', 'block_rows_concat', 'blocks as wide as they are high', block_rows_concat.shape
    )
  if num_blocks is None:
    num_blocks = num_blocks_from_total_blocks(width // size)
  rows = []
  for i in range(num_blocks):
    blocks = []
    for j in range(num_blocks):
      low, high = sorted((i, j))
      start = size * (high * (high + 1) // 2 + low)
      block = block_rows_concat[:, start : start + size]
      blocks.append(block if i >= j else block.T)
    rows.append(blocks)
  return jnp.block(rows)


def pad_square_matrix(mat: jax.Array, max_size: int) -> jax.Array:
  """Return [[mat, 0], [0, I]] of size `max_size`.

  Args:
    mat: <float>[n, n].
    max_size: size of the result, at least n.

  Raises:
    ConfigError: the matrix is not square or is larger.
  """
  num_rows, num_columns = mat.shape
  if num_rows != num_columns:
    raise checks.invalid('', 'mat', 'a square matrix, with rows == cols', mat.shape)
  if num_rows > max_size:
    raise checks.invalid('', 'mat', f'of at most max_size = {max_size} rows', mat.shape)
  return jnp.eye(max_size, dtype=mat.dtype).at[:num_rows, :num_rows].set(mat)


def pad_vector(vec: jax.Array, max_size: int) -> jax.Array:
  """Return the vector with zeros up to `max_size`.

  Args:
    vec: <float>[n].
    max_size: length of the result, at least n.

  Raises:
    ConfigError: the vector is longer.
  """
  if vec.shape[0] > max_size:
    raise checks.invalid('', 'vec', f'of at most max_size = {max_size} elements', vec.shape)
  return jnp.pad(vec, (0, max_size - vec.shape[0]))


def make_sliced_padding(
  symmetric_block_size: int, num_blocks: int, starting_block: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Return the block rows that pad a symmetric matrix with an identity: [0, ..., 0, I] for each row.

  Args:
    symmetric_block_size: size b of a block.
    num_blocks: number of block rows after padding.
    starting_block: index of the first block row of the padding.
    dtype: dtype of the result.

  Returns:
    <dtype>[b, b * k] with the k blocks of these rows up to the diagonal.
  """
  size = symmetric_block_size
  rows = [jnp.zeros([size, 0], dtype)]
  for i in range(starting_block, num_blocks):
    rows.append(jnp.eye(size, size * (i + 1), k=size * i, dtype=dtype))
  return jnp.concatenate(rows, axis=1)


def pad_block_symmetric_matrix(
  mat: jax.Array, symmetric_block_size: int, max_num_blocks: int
) -> jax.Array:
  """Return the blocks of a symmetric matrix, padded with an identity.

  Args:
    mat: <float>[n, n] with n <= b, or the blocks [b, b * k] of a larger symmetric matrix, see the module.
    symmetric_block_size: size b of a block.
    max_num_blocks: number of blocks on and below the diagonal after padding, m * (m + 1) / 2 for m block rows.

  Returns:
    <float>[b, b * max_num_blocks].

  Raises:
    ConfigError: the matrix does not fit, or a number of blocks is not that of a symmetric matrix.
  """
  num_rows, num_columns = mat.shape
  size = symmetric_block_size
  if num_rows > size or num_rows > num_columns or num_columns > size * max_num_blocks:
    raise checks.invalid(
      '', 'mat', f'of at most {size} rows and from rows to {size * max_num_blocks} cols', mat.shape
    )
  if num_rows < size:
    mat = pad_square_matrix(mat, size)
  padding = make_sliced_padding(
    size,
    num_blocks_from_total_blocks(max_num_blocks),
    num_blocks_from_total_blocks(mat.shape[1] // size),
    mat.dtype,
  )
  return jnp.concatenate([mat, padding], axis=1)
