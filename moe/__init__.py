"""Mixture of Experts on top of t5x_lite: partitioning, routing, dispatch, layers and models.

Names are imported from their modules at first use, so that `python -m moe --help` does not import JAX. Routers are
those that a configuration may call, which `configurable_names` lists.
"""

from t5x_lite.configuration import configurable_names
from t5x_lite.lazy_names import lazy_names

# Names of this package by their modules.
_MODULES = {
  'moe.checkpoints': ('UpcycleCheckpointer',),
  'moe.experts': ('ExpertFactory', 'ExpertMlp'),
  'moe.layers': ('MoeLayer',),
  'moe.mesh': ('compute_num_model_partitions', 'default_moe_mesh'),
  'moe.networks': (
    'SparseBlock',
    'SparseFeedForward',
    'sparse_decoder_only',
    'sparse_layers',
    'sparse_transformer',
  ),
  'moe.partitioner': ('MoePjitPartitioner',),
  'moe.routing': (
    'ExpertChoice',
    'RecordedChoice',
    'Router',
    'Routing',
    'TokenChoice',
    'expert_capacity',
    'load_balancing_loss',
    'router_z_loss',
  ),
  'moe.rules': (
    'data_partition_spec',
    'head_logical_axis_rules',
    'logical_factor_rules',
    'override_partition_specs',
    'standard_logical_axis_rules',
  ),
  'moe.state_axes': ('match_fn',),
  'moe.training': (
    'MoeTrainer',
    'scale_expert_gradients',
    'scale_sharded_grads',
    'tree_map_with_names',
  ),
  'moe.upcycling': ('upcycle',),
}
__getattr__, __dir__, __all__ = lazy_names(
  globals(), configurable_names.called_in('moe.routing'), _MODULES
)
