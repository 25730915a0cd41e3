"""How a global batch is divided over the processes that load it."""

import dataclasses

from jax.sharding import Mesh, PartitionSpec
import numpy as np

from t5x_lite import errors
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.partitioning.chunks import LocalChunker


@dataclasses.dataclass(frozen=True)
class DataLayout:
  """What one process loads of each global batch.

  Attributes:
    batch_size: rows of the global batch.
    shard_id: which of the `num_shards` equal, consecutive pieces of the batch this process loads.
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

  They are consecutive, and those of its `DataLayout`, unless a batch is sharded over several mesh axes of which the
  process has pieces. There the layout says how many rows a process loads and which processes load the same ones; a
  process that has the whole batch picks these.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array.
    process_index: the process.
    batch_size: rows of the global batch, a multiple of the number of devices along the data axes.
  """
  axes = batch_axes(data_partition_spec)
  owner = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
  places = dict(zip(mesh.axis_names, np.nonzero(owner == process_index)))
  blocks = np.zeros([1], np.int64)
  for axis in axes:  # the first varies slowest
    blocks = blocks * mesh.shape[axis] + places[axis]
  length = batch_size // rules_lib.num_shards(axes, mesh.shape)
  return (np.unique(blocks)[:, None] * length + np.arange(length)).ravel()


def make_data_layout(mesh: Mesh, data_partition_spec: PartitionSpec, chunker: LocalChunker,
                     batch_size: int | None = None) -> DataLayout:
  """Returns the layout of a batch for the process that `chunker` stands for.

  Args:
    mesh: the mesh of all devices.
    data_partition_spec: spec of a batch array; its first entry names the axes of the batch dim.
    chunker: the process's place in the mesh.
    batch_size: rows of the global batch; by default one per device along the data axes.

  Raises:
    ConfigError: the batch does not divide over the devices or over the loading processes.
  """
  axes = batch_axes(data_partition_spec)
  num_devices = rules_lib.num_shards(axes, mesh.shape)
  # Processes hold blocks of the mesh, so what divides over the devices also divides over the processes.
  num_shards = chunker.get_num_shards(axes)
  batch_size = num_devices if batch_size is None else batch_size
  if batch_size < 1 or batch_size % num_devices:
    lower = batch_size // num_devices * num_devices
    nearest = f'{lower} or {lower + num_devices}' if lower > 0 else str(num_devices)
    raise errors.ConfigError(
        f'Batch size {batch_size} must be divisible by {num_devices}, the number of devices along mesh axes {axes} of '
        f'{dict(mesh.shape)}. Use {nearest}, or more model partitions.')
  return DataLayout(batch_size=batch_size, shard_id=chunker.get_shard_id(axes), num_shards=num_shards,
                    is_first_host_in_replica_set=chunker.get_replica_id(axes) == 0)
