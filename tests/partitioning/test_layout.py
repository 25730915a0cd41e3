"""Layouts of global batches and other arrays over processes."""

from jax.sharding import PartitionSpec as P
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


def test_chunks_of_tuple_axes():
  mesh = mesh_lib.make_mesh(
    np.array(cases.fake_devices(4, 2), dtype=object).reshape(2, 2, 2), ('data', 'expert', 'model')
  )
  chunker = partitioning.LocalChunker(mesh, process_index=1)
  info = chunker.get_local_chunk_info((8, 6), (('expert', 'data'), None))
  assert info == partitioning.LocalChunkInfo(slice=(slice(4, 6), slice(None)), replica_id=0)
  assert (
    chunker.get_shard_id(('expert', 'data')) == 2
    and chunker.get_shard_id({'expert', 'data', None}) == 1
  )
  assert chunker.get_replica_id({'data', None}) == 1
  with pytest.raises(
    errors.ConfigError, match="must be a multiple of 4, the size of mesh axis .'expert', .*got 6"
  ):
    chunker.get_local_chunk_info((6,), (('expert', 'data'),))
  with pytest.raises(ValueError, match='argument 2 is shorter than argument 1'):
    chunker.get_local_chunk_info((6, 6), ('data',))
  with pytest.raises(
    errors.ConfigError, match="`mesh_axes` must be one of .*got 'dta'. Did you mean 'data'"
  ):
    chunker.get_shard_id('dta')


def test_host_local_array_to_global_array():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  tree = partitioning.host_local_array_to_global_array(
    {'x': np.arange(8), 'y': np.arange(3)}, partitioner.mesh, {'x': P('data'), 'y': None}
  )
  assert tree['x'].sharding.spec == P('data') and tree['y'].sharding.is_fully_replicated
  np.testing.assert_array_equal(tree['x'], np.arange(8))
