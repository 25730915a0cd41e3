"""Arrays kept as small integers with one scale per column: Shampoo's memory saving.

A column is what varies along dim 0. Its scale, the `bucket_size`, is its largest magnitude divided by the largest
integer, 127 or 32767, so that the error of an element is at most half a bucket. Matrices may keep their diagonal apart
in float32: it is much larger than the rest of a second-moment matrix and would set all scales.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.errors import ConfigError

_LARGEST_INTEGER = {np.dtype(np.int8): 127, np.dtype(np.int16): 32767}
_FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


@struct.dataclass
class QuantizedValue:
  """An array as integers, or in a narrower float dtype, or, for float32, as it is.

  Attributes:
    quantized: <dtype>[shape], the integers, or the array itself in a float dtype.
    diagonal: float32 [n], the diagonal kept apart, or None.
    bucket_size: float32 [shape without dim 0], the scale of each column; None for a float dtype.
    dtype: int8, int16, float32 or bfloat16; static.
    extract_diagonal: whether the diagonal is kept apart; static.
    shape: of the array; static.
  """

  quantized: jax.Array
  diagonal: jax.Array | None
  bucket_size: jax.Array | None
  dtype: Any = struct.field(pytree_node=False)
  extract_diagonal: bool = struct.field(pytree_node=False)
  shape: tuple[int, ...] = struct.field(pytree_node=False)

  @classmethod
  def from_float(cls, value: jax.Array, dtype: Any, extract_diagonal: bool = False) -> 'QuantizedValue':
    """Quantizes an array, rounding half to even.

    Args:
      value: float32, of any shape; a 0-d array has one column.
      dtype: int8, int16, float32 or bfloat16.
      extract_diagonal: whether to keep the diagonal apart, in float32; no effect on a float dtype.

    Raises:
      ConfigError: another dtype, or a diagonal wanted of an array that is no square matrix.
    """
    dtype = np.dtype(dtype)
    if dtype in _FLOAT_DTYPES:
      return cls(value.astype(dtype), None, None, dtype, extract_diagonal, value.shape)
    if dtype not in _LARGEST_INTEGER:
      raise ConfigError(f'Cannot quantize to {dtype}; expected int8, int16, float32 or bfloat16.')
    if extract_diagonal and (value.ndim != 2 or value.shape[0] != value.shape[1]):
      raise ConfigError(f'extract_diagonal=True takes a square matrix, got an array of shape {value.shape}.')
    value = value.astype(jnp.float32)
    diagonal = None
    if extract_diagonal:
      diagonal = jnp.diagonal(value)
      value = value - jnp.diag(diagonal)
    # `initial` gives a column without elements the scale 0.
    largest = jnp.max(jnp.abs(value), axis=0, initial=0) if value.ndim else jnp.abs(value)
    bucket_size = largest / _LARGEST_INTEGER[dtype]
    integers = jnp.round(value / jnp.where(bucket_size > 0, bucket_size, 1))
    return cls(integers.astype(dtype), diagonal, bucket_size, dtype, extract_diagonal, value.shape)

  def to_float(self) -> jax.Array:
    """Returns the array as float32, exact up to half a bucket."""
    value = self.quantized.astype(jnp.float32)
    if self.dtype in _FLOAT_DTYPES:
      return value
    value = value * self.bucket_size
    return value + jnp.diag(self.diagonal) if self.extract_diagonal else value
