"""Pieces of global arrays on the devices of a process."""

from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.partitioning import mesh as mesh_lib
from tests.partitioning import partitioner_cases as cases


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
