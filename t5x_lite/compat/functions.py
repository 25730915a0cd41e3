"""Small functions and classes of T5X that only code written for T5X uses; `names` has their names."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer

from t5x_lite.errors import ConfigError


class LazyArray:
  """Class without instances, with which code for T5X asks whether an array of a checkpoint is yet to be read.

  Arrays of checkpoints are arrays of NumPy or JAX here, which are read when they are needed.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    raise ConfigError(
      'checkpoints.LazyArray of T5X cannot be created in t5x_lite. To read arrays one at a time, use '
      'checkpoints.open_source(path).read_array(name).'
    )


def is_traced(value: Any) -> bool:
  """Return whether a value is known only when a compiled function runs."""
  return isinstance(value, Tracer)


def as_tuple(values: Any) -> tuple[Any, ...]:
  """Return the values of an iterable, or one value, as a tuple.

  >>> as_tuple([2, 3]), as_tuple(2)
  ((2, 3), (2,))
  """
  if isinstance(values, Iterable):
    return tuple(values)
  return (values,)


def normalize_axes(axes: Iterable[int], ndim: int) -> tuple[int, ...]:
  """Return indices of dims as numbers from 0 to `ndim - 1`; negative ones count from the end.

  >>> normalize_axes([0, -1], 3)
  (0, 2)
  """
  return tuple(axis + ndim if axis < 0 else axis for axis in axes)


def slice_vectors(operand: jax.Array, starts: jax.Array, slice_size: int, axis: int) -> jax.Array:
  """Return one slice of an array for each start.

  Args:
    operand: array of any shape.
    starts: <int>[num] first indices of the slices in `axis`, clipped so that each slice is inside.
    slice_size: number of indices of a slice.
    axis: dim of `operand` that is sliced.

  Returns:
    [num, ...]: the shape of `operand` with `slice_size` in `axis`.
  """
  return jax.vmap(lax.dynamic_slice_in_dim, in_axes=(None, 0, None, None))(
    operand, starts, slice_size, axis
  )


def update_vector_slices(
  operand: jax.Array, update: jax.Array, starts: jax.Array, axis: int
) -> jax.Array:
  """Return a batch of arrays, each with a slice replaced.

  Args:
    operand: [batch, ...].
    update: [batch, ...] new slices, of any size in `axis`.
    starts: <int>[batch] first indices of the slices, clipped so that each slice is inside.
    axis: dim of one array of the batch.
  """
  return jax.vmap(lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
    operand, update, starts, axis
  )
