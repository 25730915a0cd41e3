"""Division of a global batch over the processes that load it, and of arrays over those whose devices hold them."""

from collections.abc import Sequence, Set
import dataclasses
import math

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import errors
from t5x_lite.partitioning import rules as rules_lib


@dataclasses.dataclass(frozen=True)
class DataLayout:
  """Piece of each global batch that one process loads.

  Attributes:
    batch_size: rows of the global batch.
    shard_id: index of the piece that this process loads.
    num_shards: number of pieces.
    is_first_host_in_replica_set: True if this process is the first of those that load the same piece.
  """

  batch_size: int
  shard_id: int
  num_shards: int
  is_first_host_in_replica_set: bool


def batch_axes(data_partition_spec: PartitionSpec) -> tuple[str, ...]:
  """Return the mesh axes that the batch dim is sharded over.

  >>> batch_axes(PartitionSpec('data')), batch_axes(PartitionSpec(('expert', 'data')))
  (('data',), ('expert', 'data'))
  """
  if len(data_partition_spec):
    return rules_lib.axes_of(data_partition_spec[0])
  return ()


def process_of_devices(mesh: Mesh, process_index: int) -> np.ndarray:
  """Return the process of each device of a mesh, an int array of the mesh's shape.

  Args:
    mesh: the mesh of all devices.
    process_index: a process that must have a device in the mesh.

  Raises:
    ConfigError: the process has no device in the mesh.
  """
  owner = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
  if not (owner == process_index).any():
    raise errors.ConfigError(
      f'Process {process_index} has no device in the mesh {dict(mesh.shape)}, only the processes '
      f'{sorted(set(owner.ravel().tolist()))} have. Make the mesh of all devices.'
    )
  return owner


def rows_of_process(
  mesh: Mesh, data_partition_spec: PartitionSpec, process_index: int, batch_size: int
) -> np.ndarray:
  """Return the rows of a global batch that the devices of one process hold, in ascending order; int [rows].

  The rows are consecutive and equal those of the process's `DataLayout`, unless its devices are not neighbours along
  the data axes, as with several data axes or on a torus. In that case the layout still gives the number of rows that
  the process loads, and a process that has the entire batch selects these rows.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array.
    process_index: the process.
    batch_size: rows of the global batch, a multiple of the number of devices along the data axes.
  """
  axes = batch_axes(data_partition_spec)
  owner = process_of_devices(mesh, process_index)
  coordinates = dict(zip(mesh.axis_names, np.nonzero(owner == process_index), strict=True))
  blocks = np.zeros([1], np.int64)
  for axis in axes:  # the first varies slowest
    blocks = blocks * mesh.shape[axis] + coordinates[axis]
  length = batch_size // rules_lib.num_shards(axes, mesh.shape)
  return (np.unique(blocks)[:, None] * length + np.arange(length)).ravel()


def shard_of_process(
  mesh: Mesh, data_partition_spec: PartitionSpec, process_index: int
) -> tuple[int, int, bool]:
  """Return the piece of a batch that a process loads.

  Processes with the same positions along the data axes load the same piece; each position belongs to one piece. Pieces
  are numbered by their first positions. The positions of a piece need not be neighbours, since a mesh of TPUs follows
  the torus.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array; its first entry names the axes of the batch dim.
    process_index: the process.

  Returns:
    (index of the piece, number of pieces, whether the process is the first of those that load the piece).

  Raises:
    ConfigError: the process has no device in the mesh, or shares only some positions with another process.
  """
  axes = batch_axes(data_partition_spec)
  owner = process_of_devices(mesh, process_index)
  order = [mesh.axis_names.index(axis) for axis in axes]
  order += [axis for axis in range(owner.ndim) if axis not in order]
  owner = owner.transpose(order).reshape(rules_lib.num_shards(axes, mesh.shape), -1)
  positions: dict[int, list[int]] = {}
  for position, processes in enumerate(owner.tolist()):
    for process in set(processes):
      positions.setdefault(process, []).append(position)
  pieces = sorted(set(map(tuple, positions.values())))
  if sum(map(len, pieces)) != len(owner) or len(set(map(len, pieces))) > 1:
    raise errors.ConfigError(
      f'Batches are sharded over mesh axes {axes} of {dict(mesh.shape)}, and the batch shards of two processes '
      'overlap only partially. Two processes must hold the same shards or disjoint ones. Choose another '
      'num_partitions or model_parallel_submesh.'
    )
  own = tuple(positions[process_index])
  return pieces.index(own), len(pieces), bool(owner[own[0], 0] == process_index)


def make_data_layout(
  mesh: Mesh, data_partition_spec: PartitionSpec, process_index: int, batch_size: int | None = None
) -> DataLayout:
  """Return the layout of a batch for a process.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array; its first entry names the axes of the batch dim.
    process_index: the process.
    batch_size: rows of the global batch; by default one per device along the data axes.

  Raises:
    ConfigError: the batch size is not divisible by the number of devices, or see `shard_of_process`.
  """
  axes = batch_axes(data_partition_spec)
  num_devices = rules_lib.num_shards(axes, mesh.shape)
  if batch_size is None:
    batch_size = num_devices
  if batch_size < 1 or batch_size % num_devices:
    lower = batch_size // num_devices * num_devices
    if lower > 0:
      nearest = f'{lower} or {lower + num_devices}'
    else:
      nearest = str(num_devices)
    raise errors.ConfigError(
      f'Batch size {batch_size} must be divisible by {num_devices}, the number of devices along mesh axes {axes} of '
      f'{dict(mesh.shape)}. Use {nearest}, or more model partitions.'
    )
  shard_id, num_shards, is_first = shard_of_process(mesh, data_partition_spec, process_index)
  return DataLayout(
    batch_size=batch_size,
    shard_id=shard_id,
    num_shards=num_shards,
    is_first_host_in_replica_set=is_first,
  )


@dataclasses.dataclass(frozen=True)
class LocalChunkInfo:
  """Piece of an array on one process.

  Attributes:
    slice: one slice per dim of the global array; `slice(None)` for a dim that is not sharded.
    replica_id: index of this process among those that hold the same piece.
  """

  slice: tuple[slice, ...]
  replica_id: int


class LocalChunker:
  """Blocks of a mesh by process: each process holds one block, hence one chunk along each mesh axis.

  Attributes:
    global_mesh: the mesh of all devices.
    num_chunks: mesh axis name to the number of blocks along it.
    chunk_ids: mesh axis name to the index of this process's block along it.
  """

  def __init__(self, global_mesh: Mesh, *, process_index: int | None = None):
    """Locate the block of one process.

    Args:
      global_mesh: the mesh of all devices.
      process_index: the process; by default the current one.

    Raises:
      ConfigError: the devices of the process are not a block of the mesh.
    """
    process = process_index
    if process is None:
      process = jax.process_index()
    owner = process_of_devices(global_mesh, process)
    coordinates = np.argwhere(owner == process)
    start = coordinates.min(axis=0)
    extent = coordinates.max(axis=0) - start + 1
    is_full = math.prod(extent.tolist()) == len(coordinates)
    is_aligned = not (start % extent).any() and not (owner.shape % extent).any()
    if not is_full or not is_aligned:
      raise errors.ConfigError(
        f'The {len(coordinates)} devices of process {process} must form a block of the mesh '
        f'{dict(global_mesh.shape)}. Choose another model_parallel_submesh or num_partitions.'
      )
    self.global_mesh = global_mesh
    num_chunks = (owner.shape // extent).tolist()
    chunk_ids = (start // extent).tolist()
    self.num_chunks = dict(zip(global_mesh.axis_names, num_chunks, strict=True))
    self.chunk_ids = dict(zip(global_mesh.axis_names, chunk_ids, strict=True))

  def get_local_chunk_info(
    self, global_shape: Sequence[int], mesh_axes: Sequence[rules_lib.MeshAxis]
  ) -> LocalChunkInfo:
    """Return the piece of an array that this process holds.

    Args:
      global_shape: shape of the global array.
      mesh_axes: one entry per dim: a mesh axis, a tuple of mesh axes (the first varies slowest), or None.

    Returns:
      The slice and the index among the processes with the same slice.

    Raises:
      ConfigError: more entries than dims, an unknown mesh axis, or a dim that is not divisible by its chunks.
    """
    rules_lib.check_divisible('The array', global_shape, mesh_axes, self.num_chunks)
    slices = []
    for size, entry in zip(global_shape, mesh_axes, strict=True):
      axes = rules_lib.axes_of(entry)
      if not axes:
        slices.append(slice(None))
        continue
      length = size // self.get_num_shards(axes)
      start = self.get_shard_id(axes) * length
      slices.append(slice(start, start + length))
    used = {axis for entry in mesh_axes for axis in rules_lib.axes_of(entry)}
    return LocalChunkInfo(slice=tuple(slices), replica_id=self.get_replica_id(used))

  def get_num_shards(self, sharded_mesh_axes: str | Sequence[str] | Set[str | None]) -> int:
    """Return the number of chunks, over all processes, along the product of the given mesh axes."""
    return math.prod(self.num_chunks[axis] for axis in self._ordered(sharded_mesh_axes))

  def get_shard_id(self, sharded_mesh_axes: str | Sequence[str] | Set[str | None]) -> int:
    """Return the row-major index of this process's chunk along the given mesh axes.

    Args:
      sharded_mesh_axes: an axis, a sequence of axes (the first varies slowest), or a set (order of the mesh).
    """
    shard_id = 0
    for axis in self._ordered(sharded_mesh_axes):
      shard_id = shard_id * self.num_chunks[axis] + self.chunk_ids[axis]
    return shard_id

  def get_replica_id(self, sharded_mesh_axes: str | Sequence[str] | Set[str | None]) -> int:
    """Return the row-major index of this process's chunk along all mesh axes but the given ones."""
    sharded = self._ordered(sharded_mesh_axes)
    others = [axis for axis in self.global_mesh.axis_names if axis not in sharded]
    return self.get_shard_id(others)

  def _ordered(self, mesh_axes: str | Sequence[str] | Set[str | None]) -> tuple[str, ...]:
    if isinstance(mesh_axes, str):
      mesh_axes = (mesh_axes,)
    rules_lib.check_mesh_axes('mesh_axes', mesh_axes, self.global_mesh.axis_names)
    if isinstance(mesh_axes, Set):
      return tuple(axis for axis in self.global_mesh.axis_names if axis in mesh_axes)
    return tuple(axis for axis in mesh_axes if axis is not None)
