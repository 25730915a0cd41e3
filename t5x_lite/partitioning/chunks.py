"""Which piece of a global array the devices of one process hold."""

from collections.abc import Sequence, Set
import dataclasses
import math

import jax
from jax.sharding import Mesh
import numpy as np

from t5x_lite import errors
from t5x_lite.partitioning import rules as rules_lib


@dataclasses.dataclass(frozen=True)
class LocalChunkInfo:
  """The piece of an array on one process.

  Attributes:
    slice: one slice per dim of the global array; `slice(None)` for a dim that is not sharded.
    replica_id: index of this process among those that hold the same piece.
  """

  slice: tuple[slice, ...]
  replica_id: int


class LocalChunker:
  """Arithmetic of processes over a mesh: each holds one block of it, hence one chunk along each axis.

  Attributes:
    global_mesh: the mesh of all devices.
    num_chunks: mesh axis name to the number of blocks along it.
    chunk_ids: mesh axis name to the index of this process's block along it.
  """

  def __init__(self, global_mesh: Mesh, *, process_index: int | None = None):
    """Locates one process's block.

    Args:
      global_mesh: the mesh of all devices.
      process_index: the process, this one by default.

    Raises:
      ConfigError: the process's devices are not a block of the mesh.
    """
    process = jax.process_index() if process_index is None else process_index
    owner = np.vectorize(lambda device: device.process_index, otypes=[int])(global_mesh.devices)
    places = np.argwhere(owner == process)
    if not len(places):
      raise errors.ConfigError(
          f'Process {process} has no device in the mesh {dict(global_mesh.shape)}; expected one of the processes '
          f'{sorted(set(owner.ravel().tolist()))}. Make the mesh of all devices.')
    start = places.min(axis=0)
    extent = places.max(axis=0) - start + 1
    if math.prod(extent.tolist()) != len(places) or (start % extent).any() or (owner.shape % extent).any():
      raise errors.ConfigError(
          f'The {len(places)} devices of process {process} do not form a block of the mesh {dict(global_mesh.shape)}; '
          'expected one, so that the process holds one chunk of an array. Choose another model_parallel_submesh or '
          'num_partitions.')
    self.global_mesh = global_mesh
    self.num_chunks = {
        axis: int(size) for axis, size in zip(global_mesh.axis_names, owner.shape // extent, strict=True)}
    self.chunk_ids = {axis: int(index) for axis, index in zip(global_mesh.axis_names, start // extent, strict=True)}

  def get_local_chunk_info(self, global_shape: Sequence[int],
                           mesh_axes: Sequence[rules_lib.MeshAxis]) -> LocalChunkInfo:
    """Returns the piece of an array that this process holds.

    Args:
      global_shape: shape of the global array.
      mesh_axes: one entry per dim: a mesh axis, a tuple of them (the first varies slowest), or None.

    Returns:
      The slice and the index among the processes with the same slice.

    Raises:
      ConfigError: unequal ranks, or a dim that the processes cannot share evenly.
    """
    if len(global_shape) != len(mesh_axes):
      raise errors.ConfigError(f'Shape {tuple(global_shape)} and mesh axes {tuple(mesh_axes)} differ in length; '
                               'expected one mesh axis (or None) per dim.')
    slices = []
    for dim, (size, entry) in enumerate(zip(global_shape, mesh_axes)):
      axes = rules_lib.axes_of(entry)
      if not axes:
        slices.append(slice(None))
        continue
      num_chunks = self.get_num_shards(axes)
      if size % num_chunks:
        raise errors.ConfigError(f'Dim {dim} of shape {tuple(global_shape)} does not divide by the {num_chunks} chunks '
                                 f'of mesh axis {entry!r}. Choose a multiple of {num_chunks}.')
      length = size // num_chunks
      start = self.get_shard_id(axes) * length
      slices.append(slice(start, start + length))
    used = {axis for entry in mesh_axes for axis in rules_lib.axes_of(entry)}
    return LocalChunkInfo(slice=tuple(slices), replica_id=self.get_replica_id(used))

  def get_num_shards(self, sharded_mesh_axes: str | Sequence[str] | Set[str | None]) -> int:
    """Returns the number of chunks, over all processes, along the product of the given mesh axes."""
    return math.prod(self.num_chunks[axis] for axis in self._ordered(sharded_mesh_axes))

  def get_shard_id(self, sharded_mesh_axes: str | Sequence[str] | Set[str | None]) -> int:
    """Returns the row-major index of this process's chunk along the given mesh axes.

    Args:
      sharded_mesh_axes: an axis, a sequence of axes (the first varies slowest), or a set (order of the mesh).
    """
    shard_id = 0
    for axis in self._ordered(sharded_mesh_axes):
      shard_id = shard_id * self.num_chunks[axis] + self.chunk_ids[axis]
    return shard_id

  def get_replica_id(self, sharded_mesh_axes: str | Sequence[str] | Set[str | None]) -> int:
    """Returns the row-major index of this process's chunk along all mesh axes but the given ones."""
    sharded = self._ordered(sharded_mesh_axes)
    return self.get_shard_id([axis for axis in self.global_mesh.axis_names if axis not in sharded])

  def _ordered(self, mesh_axes: str | Sequence[str] | Set[str | None]) -> tuple[str, ...]:
    if isinstance(mesh_axes, str):
      mesh_axes = (mesh_axes,)
    unknown = set(mesh_axes) - {None, *self.global_mesh.axis_names}
    if unknown:
      raise errors.ConfigError(f'No mesh axis {sorted(unknown)}; the mesh has {self.global_mesh.axis_names}.')
    if isinstance(mesh_axes, Set):
      return tuple(axis for axis in self.global_mesh.axis_names if axis in mesh_axes)
    return tuple(axis for axis in mesh_axes if axis is not None)
