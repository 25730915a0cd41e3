"""Units of parameters: the arrays of single layers and experts that one array holds, with the same dims in each layout.

An attention kernel is [embed, heads * kv] in the parameter layout 't5', [embed, layers, heads, kv] in 'scalable_t5',
and [layers, embed, heads * kv] in a step over stacked layers (see `layer_stacks`); the kernel of experts is
[expert, embed, mlp]. An optimizer whose update of an element depends on its array, on the number of dims, a norm or a
factorisation, treats all of them alike if it works on the units: [embed, heads * kv] or [embed, mlp] each.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.layer_stacks import BATCH_AXES
from t5x_lite.types import Array, LogicalAxes

# Logical axes of adjacent dims that are one dim in the layout 't5', with the name of that dim.
_JOINED_AXES: Mapping[tuple[str | None, str | None], str] = {('heads', 'kv'): 'joined_kv'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
  """Units of one parameter array.

  Attributes:
    shape: shape of the array.
    axes: logical axis name of each dim, or None.
    batch_dims: dims whose indices number units, in ascending order.
    groups: for each dim of a unit the adjacent dims of the array, without `batch_dims`, that it consists of.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  batch_dims: tuple[int, ...]
  groups: tuple[tuple[int, ...], ...]

  @property
  def is_single(self) -> bool:
    """True if the array is its only unit, in the shape of the unit."""
    return not self.batch_dims and len(self.groups) == len(self.shape)

  @property
  def batch_shape(self) -> tuple[int, ...]:
    """Sizes of the batch dims."""
    return tuple(self.shape[dim] for dim in self.batch_dims)

  @property
  def num_units(self) -> int:
    """Number of units."""
    return math.prod(self.batch_shape)

  @property
  def unit_shape(self) -> tuple[int, ...]:
    """Shape of a unit."""
    return tuple(math.prod(self.shape[dim] for dim in group) for group in self.groups)

  @property
  def batch_axes(self) -> tuple[str | None, ...]:
    """Logical axis names of the batch dims."""
    return tuple(self.axes[dim] for dim in self.batch_dims)

  @property
  def unit_axes(self) -> tuple[str | None, ...]:
    """Logical axis name of each dim of a unit."""
    return tuple(_name_of([self.axes[dim] for dim in group]) for group in self.groups)

  @property
  def split_axes(self) -> PartitionSpec:
    """Logical axis names of the result of `split`."""
    return PartitionSpec(*self.batch_axes, *self.unit_axes)

  def with_single_dims(self) -> 'Units':
    """Return the units whose dims are those of the array, without joined ones."""
    dims = [dim for group in self.groups for dim in group]
    return dataclasses.replace(self, groups=tuple((dim,) for dim in dims))

  def split(self, array: Array) -> Array:
    """Return [*batch_shape, *unit_shape], given an array of the shape `shape`."""
    return jnp.transpose(array, self._order).reshape(*self.batch_shape, *self.unit_shape)

  def join(self, units: Array) -> Array:
    """Return the inverse of `split`."""
    in_order = units.reshape([self.shape[dim] for dim in self._order])
    return jnp.transpose(in_order, np.argsort(self._order).tolist())

  @property
  def _order(self) -> tuple[int, ...]:
    """The dims of the array in the order of `split`."""
    return (*self.batch_dims, *(dim for group in self.groups for dim in group))


def units_of(shape: Sequence[int], axes: Sequence[str | None]) -> Units:
  """Return the units of an array of a shape whose dims have these logical axes.

  >>> units = units_of((16, 2, 4, 8), ('embed', 'layers', 'heads', 'kv'))
  >>> units.batch_shape, units.unit_shape, units.unit_axes
  ((2,), (16, 32), ('embed', 'joined_kv'))
  """
  batch_dims = tuple(dim for dim, name in enumerate(axes) if name in BATCH_AXES)
  groups: list[tuple[int, ...]] = []
  for dim, name in enumerate(axes):
    if dim in batch_dims:
      continue
    if groups and (axes[groups[-1][0]], name) in _JOINED_AXES:
      groups[-1] = (*groups[-1], dim)
    else:
      groups.append((dim,))
  return Units(shape=tuple(shape), axes=tuple(axes), batch_dims=batch_dims, groups=tuple(groups))


class UnitsByPath:
  """Units of the parameters of a tree, also of one whose layers are stacked; without axes each array is its unit."""

  def __init__(self, param_logical_axes: LogicalAxes | None = None, *, joins_dims: bool = True):
    """Read the axes.

    Args:
      param_logical_axes: `PartitionSpec` of logical names for each parameter of the tree with a subtree per layer; None
        if they are unknown.
      joins_dims: whether dims that are one dim in the layout 't5' are joined.
    """
    self._joins_dims = joins_dims
    self._axes = {}
    if param_logical_axes is not None:
      self._axes = dict(tree_utils.named_leaves(param_logical_axes))

  def of(self, path: str, array: Any) -> Units:
    """Return the units of the array, or object with a shape, at a '/'-joined path.

    Args:
      path: path in the tree with a subtree per layer, or of an array of stacked layers.
      array: the array, <any>[...]; in a stacked one the first dim numbers layers.
    """
    shape = tuple(array.shape)
    first = layer_stacks.paths_of(path)[0]
    is_stacked = layer_stacks.is_stacked(path)
    axes = self._axes.get(first)
    if axes is None:
      axes = ()
    # As in JAX, dims after the last name have none.
    axes = (*axes, *(None,) * (len(shape) - is_stacked - len(axes)))
    if is_stacked:
      axes = ('layers', *axes)
    units = units_of(shape, axes)
    if self._joins_dims:
      return units
    return units.with_single_dims()

  def without_joined_dims(self) -> 'UnitsByPath':
    """Return the units with the dims of the arrays, for which joining and dividing need no copies."""
    units = UnitsByPath(joins_dims=False)
    units._axes = self._axes
    return units


def _name_of(names: Sequence[str | None]) -> str | None:
  """Return the name of a dim of units that consists of dims with these names."""
  if len(names) == 1:
    return names[0]
  return _JOINED_AXES[names[0], names[1]]
