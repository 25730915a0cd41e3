"""Arrays stored as small integers with one scale per column, to save memory in Shampoo.

A column runs along dim 0. Its scale, the `bucket_size`, is its largest magnitude divided by the largest
integer, 127 or 32767, so that the error of an element is at most half a bucket. The diagonal of a matrix may be stored
separately in float32: in a second-moment matrix it is much larger than the other elements and would set all scales.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import reductions

_LARGEST_INTEGER = {np.dtype(np.int8): 127, np.dtype(np.int16): 32767}
_FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


@struct.dataclass
class QuantizedValue:
  """An array as integers or in a float dtype.

  Attributes:
    quantized: <dtype>[shape], the integers, or the array in a float dtype.
    diagonal: float32 [n], the separate diagonal, or None.
    bucket_size: float32 [shape without dim 0], scale of each column; None for a float dtype.
    dtype: int8, int16, float32 or bfloat16; static.
    extract_diagonal: True if the diagonal is separate; static.
    shape: shape of the array; static.
  """

  quantized: jax.Array
  diagonal: jax.Array | None
  bucket_size: jax.Array | None
  dtype: Any = struct.field(pytree_node=False)
  extract_diagonal: bool = struct.field(pytree_node=False)
  shape: tuple[int, ...] = struct.field(pytree_node=False)

  @classmethod
  def from_float(
    cls, value: jax.Array, dtype: Any, extract_diagonal: bool = False
  ) -> 'QuantizedValue':
    """Quantize an array, rounding half to even.

    Args:
      value: float32, of any shape; a 0-d array has one column.
      dtype: int8, int16, float32 or bfloat16.
      extract_diagonal: store the diagonal separately in float32; no effect for a float dtype.

    Raises:
      KeyError: another dtype.
    """
    dtype = np.dtype(dtype)
    if dtype in _FLOAT_DTYPES:
      return cls(value.astype(dtype), None, None, dtype, extract_diagonal, value.shape)
    value = value.astype(jnp.float32)
    diagonal = None
    if extract_diagonal:
      diagonal = jnp.diagonal(value)
      value = value - jnp.diag(diagonal)
    # [shape without dim 0]: the scale of a column is that of its largest element; 0 for a column without elements.
    if value.ndim:
      largest = reductions.largest_magnitude(value, axis=0)
    else:
      largest = jnp.abs(value)
    bucket_size = largest / _LARGEST_INTEGER[dtype]
    integers = jnp.round(value / jnp.where(bucket_size > 0, bucket_size, 1))
    return cls(integers.astype(dtype), diagonal, bucket_size, dtype, extract_diagonal, value.shape)

  def to_float(self) -> jax.Array:
    """Return the array as float32, exact up to half a bucket."""
    value = self.quantized.astype(jnp.float32)
    if self.dtype in _FLOAT_DTYPES:
      return value
    assert self.bucket_size is not None  # Integers have scales.
    value = value * self.bucket_size
    if self.diagonal is not None:
      return value + jnp.diag(self.diagonal)
    return value
