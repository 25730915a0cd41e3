"""Meshes, layouts and functions over the devices of two processes, with gloo on CPU."""

import pytest

from tests import processes

PROGRAM = """
    import jax
    from t5x_lite import runtime
    process = runtime.join(runtime.ClusterConfig()).process

    from flax.linen import partitioning as flax_partitioning
    import numpy as np
    from t5x_lite import errors, partitioning, state_init

    def init_fn(rng, input_shapes, input_types=None):
      return {'params': {'kernel': jax.random.normal(rng, [16, 32])},
              'params_axes': {'kernel_axes': flax_partitioning.AxisMetadata(('embed', 'mlp'))}}

    rng = np.array([0, 3], np.uint32)
    expected = np.asarray(jax.jit(lambda rng: jax.random.normal(rng, [16, 32]))(rng))
    batch = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    # Processes with every other pair of places along the data axis, as on a ring through a torus.
    ring = partitioning.Mesh(
        np.array(jax.devices())[[0, 1, 4, 5, 2, 3, 6, 7]].reshape(8, 1), ('data', 'model'),
        axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layouts = []
    for options in ({'num_partitions': 1}, {'num_partitions': 2}, {'num_partitions': 8},
                    {'model_parallel_submesh': (2, 2)},
                    {'ici_mesh_shape': (1, 2, 2), 'dcn_mesh_shape': (2, 1, 1)}, {'mesh': ring}):
      partitioner = partitioning.PjitPartitioner(
          **options, logical_axis_rules=partitioning.standard_logical_axis_rules(1, 2))
      layout = partitioner.get_data_layout(16)
      layouts.append((layout.shard_id, layout.num_shards, layout.is_first_host_in_replica_set))

      # What the layout says this process loads is what its devices hold.
      rows = batch.reshape(layout.num_shards, -1, 3)[layout.shard_id]
      spec = partitioner.data_partition_spec
      x = jax.make_array_from_process_local_data(partitioner.get_shardings(spec), rows, batch.shape)
      total = partitioner.partition(lambda x, y: (x * y).sum(0), (spec, None), None)(x, np.float32(2))
      np.testing.assert_array_equal(np.asarray(total), 2 * batch.sum(0))
      if 'mesh' in options:
        np.testing.assert_array_equal(partitioner.get_rows(16), np.arange(16).reshape(2, 2, 4)[:, process].ravel())
      else:
        y = partitioning.host_local_array_to_global_array(rows, partitioner.mesh, spec)
        assert y.sharding.is_equivalent_to(x.sharding, 2)

      initializer = state_init.TrainStateInitializer(None, init_fn, {}, partitioner)
      kernel = initializer.from_scratch(rng).params['kernel']
      for shard in kernel.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])

    # The model axis of 8 and the submesh of both processes span them: both load the whole batch.
    whole = (0, 1, process == 0)
    half = (process, 2, True)
    assert layouts == [half, half, whole, whole, half, half], layouts

    # The search for the first NaN names the operation on both, also for a NaN in the rows of one.
    partitioner = partitioning.PjitPartitioner(num_partitions=2)
    spec = partitioner.data_partition_spec
    rows = np.ones([8, 3], np.float32)
    rows[0, 0] = 1 - 2 * process
    x = jax.make_array_from_process_local_data(partitioner.get_shardings(spec), rows, (16, 3))
    jax.config.update('jax_debug_nans', True)

    def layers(x):
      def layer(x, _):
        return jax.numpy.log(x) + 1, x.sum(1)
      return jax.lax.scan(layer, x, None, length=2)

    step = partitioner.partition(layers, (spec,), (spec, None))
    try:
      partitioner.compile(step, x)(x)
      raise AssertionError('no error')
    except errors.NonFiniteMetricError as e:
      assert "is a result of the operation 'log'" in str(e), e
    jax.config.update('jax_debug_nans', False)

    partitioner = partitioning.PjitPartitioner(num_partitions=8, params_on_devices=False)
    try:
      state_init.TrainStateInitializer(None, init_fn, {}, partitioner).from_scratch(rng)
      raise AssertionError('no error')
    except errors.ConfigError as e:
      assert 'params_on_devices=True' in str(e)
"""


@pytest.mark.full  # by default, tests/apps/train/test_two_processes.py trains and evaluates
def test_two_processes(tmp_path):
  processes.run(PROGRAM, num_devices=4)
