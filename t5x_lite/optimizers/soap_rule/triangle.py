"""Symmetric matrices stored as their upper triangle, without tables of indices.

Row i of the triangle, i < n / 2, shares a row of n + 1 elements with row n - 1 - i, reversed:

    [[a b c d],
     [. e f g],    ->    [[j a b c d],
     [. . h i],           [i h e f g]]
     [. . . j]]

The middle row of an odd n is stored twice: the size is ceil(n / 2) (n + 1).
"""

import jax.numpy as jnp
import numpy as np

from t5x_lite.types import Array


def pack(matrices: Array) -> Array:
  """Return the upper triangles [..., ceil(n / 2), n + 1] of symmetric matrices <float>[..., n, n]."""
  size = matrices.shape[-1]
  num_rows = -(-size // 2)
  widths = [(0, 0)] * (matrices.ndim - 1)
  upper = jnp.pad(matrices[..., :num_rows, :], [*widths, (1, 0)])
  reversed_lower = jnp.flip(matrices, (-2, -1))[..., :num_rows, :]
  return jnp.where(_is_upper(num_rows, size), upper, jnp.pad(reversed_lower, [*widths, (0, 1)]))


def unpack(packed: Array) -> Array:
  """Return the symmetric matrices [..., n, n]: the inverse of `pack`."""
  size = packed.shape[-1] - 1
  lower = jnp.flip(packed[..., : size // 2, :-1], (-2, -1))
  return symmetric(jnp.concatenate([packed[..., 1:], lower], axis=-2))


def symmetric(matrices: Array) -> Array:
  """Return matrices [..., n, n] with the elements below the diagonal replaced by those above it."""
  size = matrices.shape[-1]
  is_upper = np.arange(size)[:, None] <= np.arange(size)
  return jnp.where(is_upper, matrices, jnp.swapaxes(matrices, -2, -1))


def _is_upper(num_rows: int, size: int) -> np.ndarray:
  """Return bool [num_rows, size + 1], True for elements of the row with this index."""
  return np.arange(num_rows)[:, None] < np.arange(size + 1)
