"""Partitioning: meshes, logical axis rules, data layouts, and functions compiled over all devices.

>>> from t5x_lite import partitioning
>>> partitioner = partitioning.PjitPartitioner(num_partitions=1)
>>> partitioner.data_partition_spec
P('data',)
"""

from jax.sharding import Mesh, PartitionSpec

from t5x_lite.partitioning.chunks import LocalChunker, LocalChunkInfo
from t5x_lite.partitioning.explain import ShardingReport, ShardingRow
from t5x_lite.partitioning.layout import DataLayout
from t5x_lite.partitioning.mesh import default_mesh, get_cpu_mesh, get_gpu_mesh, get_mesh
from t5x_lite.partitioning.model_info import log_model_info, write_model_info
from t5x_lite.partitioning.partitioner import (
    BasePartitioner, BasePjitPartitioner, host_local_array_to_global_array, PjitPartitioner, PjittedFnWithContext)
from t5x_lite.partitioning.rules import (
    AxisNames, global_mesh_defined, logical_to_mesh_axes, register_axis_remedy, standard_logical_axis_rules,
    with_sharding_constraint)
from t5x_lite.partitioning.tiles import bounds_from_last_device, get_coords, HardwareMesh
from t5x_lite.types import LogicalAxisRules

__all__ = [
    'AxisNames', 'BasePartitioner', 'BasePjitPartitioner', 'DataLayout', 'HardwareMesh', 'LocalChunkInfo',
    'LocalChunker', 'LogicalAxisRules', 'Mesh', 'PartitionSpec', 'PjitPartitioner', 'PjittedFnWithContext',
    'ShardingReport', 'ShardingRow', 'bounds_from_last_device', 'default_mesh', 'get_coords', 'get_cpu_mesh',
    'get_gpu_mesh', 'get_mesh', 'global_mesh_defined', 'host_local_array_to_global_array', 'log_model_info',
    'logical_to_mesh_axes', 'register_axis_remedy', 'standard_logical_axis_rules', 'with_sharding_constraint',
    'write_model_info',
]
