"""Pieces of global arrays that the devices of one process hold."""

from collections.abc import Sequence, Set
import dataclasses
import math

import jax
from jax.sharding import Mesh
import numpy as np

from t5x_lite import errors
from t5x_lite.partitioning import layout
from t5x_lite.partitioning import rules as rules_lib


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
    owner = layout.process_of_devices(global_mesh, process)
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
