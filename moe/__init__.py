"""Mixture of Experts on top of t5x_lite: partitioning, routing, dispatch, layers and models.

Names are imported from their modules when they are first asked for, so that `python -m moe --help` need not wait for
JAX.
"""

import importlib
from typing import Any

# Module to the names that this facade takes from it.
_HOMES = {
    'moe.experts': ('ExpertFactory', 'ExpertMlp'),
    'moe.layers': ('MoeLayer',),
    'moe.mesh': ('compute_num_model_partitions', 'default_moe_mesh'),
    'moe.networks': ('SparseBlock', 'SparseFeedForward', 'sparse_decoder_only', 'sparse_layers', 'sparse_transformer'),
    'moe.partitioner': ('MoePjitPartitioner',),
    'moe.routing': (
        'ExpertChoice', 'ExpertsChooseRouter', 'HashRouter', 'RecordedChoice', 'Router', 'RouterWeights',
        'SinkhornRouter', 'TokenChoice', 'TokensChooseRouter', 'expert_capacity', 'load_balancing_loss',
        'router_z_loss'),
    'moe.rules': (
        'data_partition_spec', 'head_logical_axis_rules', 'logical_factor_rules', 'override_partition_specs',
        'standard_logical_axis_rules'),
    'moe.state_axes': ('match_fn',),
    'moe.training': ('scale_expert_gradients',),
    'moe.upcycling': ('upcycle',),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
  if name not in _HOME_OF:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  value = getattr(importlib.import_module(_HOME_OF[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
