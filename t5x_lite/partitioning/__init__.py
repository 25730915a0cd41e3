"""Partitioning: meshes, logical axis rules, data layouts, and functions compiled over all devices.

>>> from t5x_lite import partitioning
>>> partitioner = partitioning.PjitPartitioner(num_partitions=1)
>>> partitioner.data_partition_spec
P('data',)
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    'jax.sharding': ('Mesh', 'PartitionSpec'),
    't5x_lite.partitioning.explain': ('ShardingReport', 'ShardingRow'),
    't5x_lite.partitioning.layout': ('DataLayout', 'LocalChunkInfo', 'LocalChunker'),
    't5x_lite.partitioning.mesh': ('default_mesh', 'get_cpu_mesh', 'get_gpu_mesh', 'get_mesh'),
    't5x_lite.partitioning.model_info': ('log_model_info', 'write_model_info', 'write_state_tree'),
    't5x_lite.partitioning.nan_search': ('searches_nan',),
    't5x_lite.partitioning.param_axes': ('override_params_axes_names',),
    't5x_lite.partitioning.partitioner': (
      'BasePartitioner',
      'BasePjitPartitioner',
      'PjitPartitioner',
      'PjittedFnWithContext',
      'host_local_array_to_global_array',
    ),
    't5x_lite.partitioning.rules': (
      'AxisNames',
      'global_mesh_defined',
      'logical_to_mesh_axes',
      'register_axis_remedy',
      'standard_logical_axis_rules',
      'with_sharding_constraint',
    ),
    't5x_lite.partitioning.tiles': ('HardwareMesh', 'bounds_from_last_device', 'get_coords'),
    't5x_lite.types': ('LogicalAxisRules',),
  },
)
