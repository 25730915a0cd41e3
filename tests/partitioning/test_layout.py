"""Layouts of global batches over processes."""

import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.partitioning import mesh as mesh_lib
from tests.partitioning import partitioner_cases as cases


def test_unequal_processes():
  with pytest.raises(errors.ConfigError, match=r'equal numbers of devices, got \[4, 3\]'):
    mesh_lib.mesh_by_topology(cases.fake_devices(2, 4)[:-1], 2)


def test_process_without_a_block():
  devices = np.array(cases.fake_devices(2, 4), dtype=object)
  by_column = mesh_lib.make_mesh(devices[[0, 4, 1, 5, 2, 6, 3, 7]].reshape(4, 2), ('data', 'model'))
  assert partitioning.LocalChunker(by_column, process_index=1).chunk_ids == {'data': 0, 'model': 1}
  scattered = mesh_lib.make_mesh(devices[[0, 4, 1, 5, 2, 6, 7, 3]].reshape(4, 2), ('data', 'model'))
  misaligned = mesh_lib.make_mesh(
    devices[[0, 4, 5, 1]], ('data',)
  )  # contiguous, but half of two chunks
  uneven = mesh_lib.make_mesh(devices[[4, 5, 0]], ('data',))
  for mesh in (scattered, misaligned, uneven):
    with pytest.raises(errors.ConfigError, match='must form a block'):
      partitioning.LocalChunker(mesh, process_index=1)


# Data layouts, with mesh and data axes as values.


@pytest.mark.parametrize('num_partitions,batch_size', [(1, None), (1, 16), (2, 12), (8, 3)])
def test_data_layout(num_partitions, batch_size):
  partitioner = partitioning.PjitPartitioner(num_partitions=num_partitions)
  assert partitioner.get_data_layout(batch_size) == partitioning.DataLayout(
    batch_size=batch_size or 8 // num_partitions,
    shard_id=0,
    num_shards=1,
    is_first_host_in_replica_set=True,
  )


@pytest.mark.parametrize(
  'batch_size,nearest', [(12, '8 or 16'), (3, 'Use 8'), (0, 'Use 8'), (-8, 'Use 8')]
)
def test_batch_that_does_not_divide(batch_size, nearest):
  with pytest.raises(
    errors.ConfigError, match=f'Batch size {batch_size} must be divisible by 8.*{nearest}'
  ):
    partitioning.PjitPartitioner(num_partitions=1).get_data_layout(batch_size)


def test_processes_that_share_some_rows():
  devices = np.array(cases.fake_devices(3, 2), dtype=object)
  # Each process shares one row with each neighbour; or one process has a row alone and two share two rows.
  for order in ([0, 2, 3, 4, 5, 1], [0, 1, 2, 4, 3, 5]):
    mesh = mesh_lib.make_mesh(devices[order].reshape(3, 2), ('data', 'model'))
    partitioner = partitioning.PjitPartitioner(mesh=mesh)
    with pytest.raises(
      errors.ConfigError, match="sharded over mesh axes .'data'.*same shards or disjoint ones"
    ):
      partitioner.get_data_layout(host_index=0)
  with pytest.raises(errors.ConfigError, match='Process 3 has no device'):
    partitioner.get_data_layout(host_index=3)


def test_unknown_data_axis():
  partitioner = partitioning.PjitPartitioner(num_partitions=1, data_axes='date')
  with pytest.raises(errors.ConfigError, match="Did you mean 'data'"):
    partitioner.get_data_layout(8)
