"""Placement of blocks in the sharded mode: each device computes with the blocks whose matrices it stores.

The global stack [N, n, n] has the matrices of all parameters, block after block, and is divided among D devices, with
R = N / D rows each. Matrices never leave their device, except for the halo below. A step moves blocks of gradients,
which are half as large for parameters of two dims:

1. `Placement.collect`: a device gets the blocks of its rows, one parameter after the other;
2. it multiplies them by its preconditioners and adds their products to its statistics, all blocks of one shape at once;
3. `Placement.spread`: all devices get the results, one parameter after the other.

A block whose matrices are on two devices is collected by both, and multiplied by the first, which gets copies of the
other matrices, the *halo*.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite.optimizers.shampoo import root_plan
from t5x_lite.optimizers.shampoo import update as update_lib
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.types import PyTree

# Indices of rows: NumPy if they are the same in all runs of a program, as on one device, so that slices can be used.
Indices = np.ndarray | jax.Array
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Devices:
  """Devices among which the rows of stacks are divided.

  Attributes:
    axis_names: mesh axes; () for one device.
    count: number of devices D.
  """

  axis_names: tuple[str, ...] = ()
  count: int = 1

  @classmethod
  def in_context(cls) -> 'Devices':
    """Return the devices of the mesh in context if it has several and all its axes are of type Auto, else one."""
    mesh = root_plan.mesh_to_spread_over()
    if mesh:
      return cls(mesh.axis_names, mesh.size)
    return cls()

  @property
  def rows(self) -> PartitionSpec:
    """Spec of arrays whose dim 0 is divided."""
    return PartitionSpec(self.axis_names)

  def on_each(
    self, fn: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
  ) -> Callable[..., Any]:
    """Return a function of global arrays, given a function of (number of the device, its parts of the arrays).

    The function that is returned has another first argument: False as bool scalar, after which the number of the
    device, and all rows that are taken by this number, are computed (`update.never`).
    """
    if not self.axis_names:
      return lambda never, *args: fn(0, *args)

    def of_device(never, *args):
      return fn(lax.axis_index(self.axis_names) + never.astype(jnp.int32), *args)

    return jax.shard_map(
      of_device, in_specs=(REPLICATED, *in_specs), out_specs=out_specs, check_vma=False
    )


def take_rows(array: jax.Array, rows: Indices) -> jax.Array:
  """Return rows of an array; indices out of range, which are allowed if they are traced, give any row."""
  if not isinstance(rows, np.ndarray):
    return array.at[rows].get(mode='clip')
  if not _is_range(rows):
    return array[rows]
  if len(rows) == len(array):
    return array
  return lax.slice_in_dim(array, rows[0], rows[-1] + 1)


def set_rows(array: jax.Array, rows: Indices, values: jax.Array) -> jax.Array:
  """Return an array with other values in some rows, which are all different; indices beyond the end are ignored."""
  if not isinstance(rows, np.ndarray):
    return array.at[rows].set(values, mode='drop')
  if not _is_range(rows):
    return array.at[rows].set(values, unique_indices=True)
  if len(rows) == len(array):
    return values
  return lax.dynamic_update_slice_in_dim(array, values, int(rows[0]), 0)


def _is_range(rows: np.ndarray) -> bool:
  """Return whether the indices are adjacent and ascending."""
  return len(rows) > 0 and np.array_equal(rows, rows[0] + np.arange(len(rows)))


def rows_of_device(table: Indices, device: int | jax.Array) -> Indices:
  """Return the entry of a table [D, ...] for a device."""
  if isinstance(device, int):
    return table[device]
  return jnp.asarray(table)[device]


def local_rows(
  indices: np.ndarray, num_devices: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
  """Return tables int32 [D, K] of the rows at ascending `indices` of a stack that is divided among D devices.

  Args:
    indices: int [k], rows of the entire stack.
    num_devices: D.
    num_rows: rows of a device, R.

  Returns:
    (number of the row on its device, `num_rows` where a device has fewer than K of the rows; its position in
    `indices`, -1 there).
  """
  bounds = np.searchsorted(indices, np.arange(num_devices + 1) * num_rows)
  positions = bounds[:-1, None] + np.arange(max(np.diff(bounds)))
  is_present = positions < bounds[1:, None]
  first_rows = np.arange(num_devices)[:, None] * num_rows
  rows = indices[np.minimum(positions, len(indices) - 1)] - first_rows
  local = np.where(is_present, rows, num_rows)
  found = np.where(is_present, positions, -1)
  return local.astype(np.int32), found.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class BlockClass:
  """All blocks of one shape.

  Attributes:
    sizes: shape of a block.
    rows: int32 [D, K, rank]: rows of the matrices of the K blocks of each device, relative to the device's first row:
      negative on previous devices and for missing blocks, at least R on the next devices.
  """

  sizes: tuple[int, ...]
  rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Place:
  """Blocks of one group of a parameter on the devices.

  Attributes:
    block_class: index of the `BlockClass`.
    length: largest number of blocks of the group, in one layer, on one device.
    table: int32 [num_layers, D, 4], in each layer and for each device: the first block in the group, the first whose
      first matrix is on the device, the end, and the position of the first among the blocks of the class.
  """

  block_class: int
  length: int
  table: np.ndarray

  def rows(
    self, table: Indices, device: int | jax.Array, *, is_first: bool = False
  ) -> tuple[Indices, Indices]:
    """Return the device's blocks in one layer: (indices in the group, positions among those of the class).

    Args:
      table: entry [D, 4] of `table` for the layer.
      device: number of the device.
      is_first: leave out blocks whose first matrix is on another device.

    Returns:
      Int [length] each; the first is negative for blocks that do not count.
    """
    entry = rows_of_device(table, device)
    xp = np if isinstance(entry, np.ndarray) else jnp
    first, first_own, end, position = entry
    if is_first:
      first_counted = first_own
    else:
      first_counted = first
    offsets = np.arange(self.length)
    index = first + offsets
    counts = (index >= first_counted) & (index < end)
    return xp.where(counts, index, -1), position + offsets


class Placement:
  """Blocks of parameters on devices.

  Attributes:
    classes: a `BlockClass` for each shape of blocks.
    devices: the devices.
    num_rows: rows R of the global stack on each device.
  """

  def __init__(
    self, parameters: Sequence[tuple[BlockLayout, Sequence[int]]], devices: Devices, num_rows: int
  ):
    """Place the blocks.

    Args:
      parameters: for each its layout, and the index of the first matrix in the global stack of each layer.
      devices: the devices.
      num_rows: rows R of the global stack on each device.
    """
    self.devices = devices
    self.num_rows = num_rows
    first_rows: dict[tuple[int, ...], dict[Any, np.ndarray]] = {}
    for i, (layout, starts) in enumerate(parameters):
      rank = len(layout.merged_shape)
      if rank:
        groups = layout.order[::rank, 0] // rank
      else:
        groups = np.zeros(0)
      for g, group in enumerate(layout.groups):
        offsets = rank * np.flatnonzero(groups == g)
        for layer, start in enumerate(starts):
          first_rows.setdefault(group.sizes, {})[i, g, layer] = start + offsets
    self.classes: list[BlockClass] = []
    self._places_by_group: dict[tuple[int, int], _Place] = {}
    num_layers = [len(starts) for _, starts in parameters]
    for sizes, entries in first_rows.items():
      self._place_class(sizes, entries, num_layers)
    self._places: list[list[_Place]] = []
    for i, (layout, _) in enumerate(parameters):
      self._places.append([self._places_by_group[i, g] for g in range(len(layout.groups))])

  def _place_class(self, sizes, entries, num_layers):
    """Add a class of blocks, given the first rows of the blocks for each (parameter, group, layer)."""
    # A parameter has one group of this shape, so that blocks in this order have ascending rows.
    entries = dict(sorted(entries.items(), key=lambda entry: entry[1][0]))
    rows = np.concatenate(list(entries.values()))
    rank = len(sizes)
    starts = np.arange(self.devices.count) * self.num_rows
    first = np.searchsorted(rows + rank - 1, starts)
    first_own = np.searchsorted(rows, starts)
    end = np.searchsorted(rows, starts + self.num_rows)
    numbers = first[:, None] + np.arange(max(end - first))
    # [devices, blocks]: first row of each block on the device, then [devices, blocks, rank] the rows of its matrices.
    local = rows[np.minimum(numbers, len(rows) - 1)] - starts[:, None]
    local = np.where(numbers < end[:, None], local, -rank)
    local = np.add.outer(local, np.arange(rank))
    tables: dict[tuple[int, int], np.ndarray] = {}
    offset = 0
    limits = np.stack([first, first_own, end], axis=1)
    for (i, g, layer), own_rows in entries.items():
      bounds = np.clip(limits - offset, 0, len(own_rows))
      position = bounds[:, :1] + offset - first[:, None]
      if (i, g) not in tables:
        tables[i, g] = np.zeros([num_layers[i], self.devices.count, 4], np.int32)
      tables[i, g][layer] = np.concatenate([bounds, position], axis=1)
      offset += len(own_rows)
    for key, table in tables.items():
      num_blocks = table[..., 2] - table[..., 0]
      length = max(int(num_blocks.max()), 1)
      self._places_by_group[key] = _Place(len(self.classes), length, table)
    self.classes.append(BlockClass(sizes, local.astype(np.int32)))

  @property
  def halo(self) -> int:
    """Number of rows of the next devices that a device needs."""
    ends = [int(each.rows.max()) + 1 for each in self.classes]
    return max([self.num_rows, *ends]) - self.num_rows

  def tables(self, parameter: int) -> list[np.ndarray]:
    """Return, per group of a parameter, the int32 [num_layers, D, 4] with which `collect` and `spread` find blocks."""
    return [place.table for place in self._places[parameter]]

  def empty_blocks(self) -> list[jax.Array]:
    """Return zeros float32 [D * K, *sizes] for each class."""
    blocks = []
    for each in self.classes:
      num_blocks = self.devices.count * each.rows.shape[1]
      blocks.append(jnp.zeros([num_blocks, *each.sizes], jnp.float32))
    return blocks

  def collect(
    self,
    parameter: int,
    layout: BlockLayout,
    grad: jax.Array,
    tables: Sequence[Indices],
    blocks: Sequence[jax.Array],
    never: jax.Array,
    count: jax.Array,
  ) -> tuple[list[jax.Array], jax.Array]:
    """Return the blocks of the classes with those of one parameter, or layer, and a value for `update.after`.

    Args:
      parameter: number of the parameter.
      layout: its layout.
      grad: float32 gradient; if it is sharded, all devices get it.
      tables: entries [D, 4] of `tables` for the layer.
      blocks: float32 [D * K, *sizes] for each class, sharded over the devices.
      never: False as bool scalar, computed after all that comes first.
      count: int32 scalar, number of previous updates.

    Returns:
      (new blocks, False as bool scalar, computed after them).
    """
    places = self._places[parameter]
    grad = update_lib.after(never, grad)
    if self.devices.axis_names:
      # Without this, the partitioner gathers the arguments of the computation of `grad`, before their time has come.
      unconstrained = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * grad.ndim)
      grad = lax.with_sharding_constraint(grad, unconstrained)

    def collect(device, grad, tables, blocks, count):
      blocks = list(blocks)
      for place, table, own in zip(places, tables, layout.cut(grad), strict=True):
        index, positions = place.rows(table, device)
        all_blocks = blocks[place.block_class]
        if not isinstance(index, np.ndarray):
          positions = jnp.where(index < 0, len(all_blocks), positions)
        blocks[place.block_class] = set_rows(all_blocks, positions, take_rows(own, index))
      return blocks, update_lib.never([blocks[places[-1].block_class]], count)

    rows = self.devices.rows
    collect_on_each = self.devices.on_each(
      collect, (REPLICATED, REPLICATED, rows, REPLICATED), (rows, REPLICATED)
    )
    return collect_on_each(never, grad, tables, list(blocks), count)

  def spread(
    self,
    parameter: int,
    layout: BlockLayout,
    blocks: Sequence[jax.Array],
    tables: Sequence[Indices],
    never: jax.Array,
    count: jax.Array,
  ) -> tuple[list[jax.Array], jax.Array]:
    """Return the blocks of one parameter, or layer, on all devices, and a value for `update.after`.

    Args:
      parameter: number of the parameter.
      layout: its layout.
      blocks: as in `collect`.
      tables: as in `collect`.
      never: False as bool scalar, computed after all that comes first.
      count: int32 scalar, number of previous updates.

    Returns:
      (float32 [k, *sizes] for each group, False as bool scalar, computed after them).
    """
    places = self._places[parameter]

    def spread(device, blocks, tables, never, count):
      results = []
      for place, table, group in zip(places, tables, layout.groups, strict=True):
        index, positions = place.rows(table, device, is_first=True)
        if not isinstance(index, np.ndarray):
          index = jnp.where(index < 0, group.num_blocks, index)
        # [blocks of the group, *sizes]: zeros for the blocks of other devices, so that the sum over devices has all.
        zeros = jnp.full([group.num_blocks, *group.sizes], never.astype(jnp.float32))
        own = take_rows(blocks[place.block_class], positions)
        results.append(set_rows(zeros, index, own))
      if self.devices.axis_names:
        results = lax.psum(results, self.devices.axis_names)
      return results, update_lib.never(results, count)

    in_specs = (self.devices.rows, REPLICATED, REPLICATED, REPLICATED)
    spread_on_each = self.devices.on_each(spread, in_specs, REPLICATED)
    return spread_on_each(never, list(blocks), tables, never, count)

  def with_halo(self, matrices: jax.Array) -> jax.Array:
    """Return a device's matrices [R, n, n], followed by the first of the next devices; called on each device."""
    parts = [matrices]
    missing = self.halo
    distance = 1
    while missing > 0:
      width = min(missing, self.num_rows)
      count = self.devices.count
      steps = [(source, (source - distance) % count) for source in range(count)]
      parts.append(lax.ppermute(matrices[:width], self.devices.axis_names, steps))
      missing = missing - width
      distance = distance + 1
    if len(parts) > 1:
      return jnp.concatenate(parts)
    return matrices
