"""Division of a global batch over the processes that load it."""

import dataclasses

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
