"""Rows of batches over the devices of two processes, where a process holds pieces of both data axes."""

from tests import processes

_PROGRAM = """
    import jax
    from t5x_lite import runtime
    process = runtime.join(runtime.ClusterConfig()).process

    import numpy as np
    from moe import partitioner as moe_partitioner
    from t5x_lite import data

    batch = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    spec = {'x': jax.ShapeDtypeStruct(batch.shape, batch.dtype)}
    scattered = []
    slices = {'ici_mesh_shape': (1, 4, 1), 'dcn_mesh_shape': (2, 1, 1)}  # a process is a slice
    for options in ({'num_experts': 2}, {'num_experts': 4}, {'num_expert_partitions': 2}, {'num_expert_partitions': 8},
                    {'num_expert_partitions': 2, **slices}, {'num_experts': 4, **slices}):
      partitioner = moe_partitioner.MoePjitPartitioner(**options, num_partitions=1)
      layout = partitioner.get_data_layout(16)
      rows = partitioner.get_rows(16)
      scattered.append(bool((np.diff(rows) > 1).any()))

      def whole(local):  # the global array, as every process sees it
        x = data.to_global_arrays({'x': local}, partitioner, spec)['x']
        assert x.sharding.spec == partitioner.data_partition_spec
        return np.asarray(partitioner.partition(lambda x: x * 1, partitioner.data_partition_spec, None)(x))

      # Rows picked by place come in the order of the batch.
      np.testing.assert_array_equal(whole(batch[rows]), batch)
      # Rows loaded by layout all come, once; in another order only where processes hold scattered rows.
      loaded = whole(batch.reshape(layout.num_shards, -1, 3)[layout.shard_id])
      np.testing.assert_array_equal(loaded[np.argsort(loaded[:, 0])], batch)
      assert scattered[-1] == (loaded != batch).any()
    assert scattered == [False, False, True, False, False, False], scattered
"""


def test_rows_of_two_processes(tmp_path):
  processes.run(_PROGRAM, num_devices=4)
