"""How a global batch is divided over the processes that load it."""

import dataclasses

from jax.sharding import Mesh, PartitionSpec
import numpy as np

from t5x_lite import errors
from t5x_lite.partitioning import rules as rules_lib


@dataclasses.dataclass(frozen=True)
class DataLayout:
  """What one process loads of each global batch.

  Attributes:
    batch_size: rows of the global batch.
    shard_id: which of the `num_shards` equal pieces of the batch this process loads.
    num_shards: number of pieces.
    is_first_host_in_replica_set: whether this process is the first of those that load the same piece.
  """

  batch_size: int
  shard_id: int
  num_shards: int
  is_first_host_in_replica_set: bool


def batch_axes(data_partition_spec: PartitionSpec) -> tuple[str, ...]:
  """Returns the mesh axes that the batch dim is sharded over.

  >>> batch_axes(PartitionSpec('data')), batch_axes(PartitionSpec(('expert', 'data')))
  (('data',), ('expert', 'data'))
  """
  return rules_lib.axes_of(data_partition_spec[0]) if len(data_partition_spec) else ()


def rows_of_process(mesh: Mesh, data_partition_spec: PartitionSpec, process_index: int, batch_size: int) -> np.ndarray:
  """Returns which rows of a global batch the devices of one process hold, in ascending order; int [rows].

  They are consecutive, and those of its `DataLayout`, unless the process has places along the data axes that are no
  neighbours: on several data axes, or on a torus. There the layout says how many rows a process loads and which
  processes load the same ones; a process that has the whole batch picks these.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array.
    process_index: the process.
    batch_size: rows of the global batch, a multiple of the number of devices along the data axes.
  """
  axes = batch_axes(data_partition_spec)
  owner = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
  places = dict(zip(mesh.axis_names, np.nonzero(owner == process_index), strict=True))
  blocks = np.zeros([1], np.int64)
  for axis in axes:  # the first varies slowest
    blocks = blocks * mesh.shape[axis] + places[axis]
  length = batch_size // rules_lib.num_shards(axes, mesh.shape)
  return (np.unique(blocks)[:, None] * length + np.arange(length)).ravel()


def shard_of_process(mesh: Mesh, data_partition_spec: PartitionSpec, process_index: int) -> tuple[int, int, bool]:
  """Returns the piece of a batch that a process loads.

  Processes with the same places along the data axes load the same piece; a place is in one piece only. Pieces are
  numbered by their first places. The places of a piece need not be neighbours, since a mesh of TPUs follows the torus.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array; its first entry names the axes of the batch dim.
    process_index: the process.

  Returns:
    (index of the piece, number of pieces, whether the process is the first of those that load the piece).

  Raises:
    ConfigError: the process has no device in the mesh, or has a part of another process's places.
  """
  axes = batch_axes(data_partition_spec)
  owner = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
  order = [mesh.axis_names.index(axis) for axis in axes]
  order += [axis for axis in range(owner.ndim) if axis not in order]
  owner = owner.transpose(order).reshape(rules_lib.num_shards(axes, mesh.shape), -1)
  places: dict[int, list[int]] = {}
  for place, processes in enumerate(owner.tolist()):
    for process in set(processes):
      places.setdefault(process, []).append(place)
  if process_index not in places:
    raise errors.ConfigError(
        f'Process {process_index} has no device in the mesh {dict(mesh.shape)}; expected one of the processes '
        f'{sorted(places)}. Make the mesh of all devices.')
  pieces = sorted(set(map(tuple, places.values())))
  if sum(map(len, pieces)) != len(owner) or len(set(map(len, pieces))) > 1:
    raise errors.ConfigError(
        f'Processes have parts of each other\'s places along mesh axes {axes} of {dict(mesh.shape)}; expected the same '
        'places or none in common. Choose another num_partitions, or model_parallel_submesh.')
  own = tuple(places[process_index])
  return pieces.index(own), len(pieces), bool(owner[own[0], 0] == process_index)


def make_data_layout(mesh: Mesh, data_partition_spec: PartitionSpec, process_index: int,
                     batch_size: int | None = None) -> DataLayout:
  """Returns the layout of a batch for a process.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array; its first entry names the axes of the batch dim.
    process_index: the process.
    batch_size: rows of the global batch; by default one per device along the data axes.

  Raises:
    ConfigError: the batch does not divide over the devices, or see `shard_of_process`.
  """
  axes = batch_axes(data_partition_spec)
  num_devices = rules_lib.num_shards(axes, mesh.shape)
  batch_size = num_devices if batch_size is None else batch_size
  if batch_size < 1 or batch_size % num_devices:
    lower = batch_size // num_devices * num_devices
    nearest = f'{lower} or {lower + num_devices}' if lower > 0 else str(num_devices)
    raise errors.ConfigError(
        f'Batch size {batch_size} must be divisible by {num_devices}, the number of devices along mesh axes {axes} of '
        f'{dict(mesh.shape)}. Use {nearest}, or more model partitions.')
  shard_id, num_shards, is_first = shard_of_process(mesh, data_partition_spec, process_index)
  return DataLayout(batch_size=batch_size, shard_id=shard_id, num_shards=num_shards,
                    is_first_host_in_replica_set=is_first)
