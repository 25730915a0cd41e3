"""Shapes of what decoding carries per row: one row of the batch becomes `num_decodes` rows side by side."""

import jax.numpy as jnp
from t5x_lite.types import Array


def flat_batch_beam_expand(x: Array, beam_size: int, offset: int = 0) -> Array:
  """Repeats every row of the batch `beam_size` times.

  Args:
    x: [..., batch, ...] with the batch dim at `offset`.
    beam_size: number of copies of each row.
    offset: number of dims before the batch dim.

  Returns:
    [..., batch * beam_size, ...], the copies of a row side by side.

  >>> import numpy as np
  >>> flat_batch_beam_expand(np.array([[1, 2], [3, 4]]), 2).tolist()
  [[1, 2], [1, 2], [3, 4], [3, 4]]
  """
  return jnp.repeat(x, beam_size, axis=offset) if beam_size > 1 else jnp.asarray(x)
