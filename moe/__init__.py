"""Mixture of Experts on top of t5x_lite: partitioning, routing, dispatch, layers and models arrive with their issue."""

from moe.experts import ExpertFactory, ExpertMlp
from moe.layers import MoeLayer
from moe.mesh import compute_num_model_partitions, default_moe_mesh
from moe.networks import SparseBlock, SparseFeedForward, sparse_decoder_only, sparse_layers, sparse_transformer
from moe.partitioner import MoePjitPartitioner
from moe.routing import (
    ExpertChoice,
    ExpertsChooseRouter,
    HashRouter,
    RecordedChoice,
    Router,
    RouterWeights,
    SinkhornRouter,
    TokenChoice,
    TokensChooseRouter,
    expert_capacity,
    load_balancing_loss,
    router_z_loss,
)
from moe.rules import (
    data_partition_spec,
    head_logical_axis_rules,
    logical_factor_rules,
    override_partition_specs,
    standard_logical_axis_rules,
)
from moe.state_axes import match_fn

__all__ = [
    'MoePjitPartitioner',
    'compute_num_model_partitions',
    'data_partition_spec',
    'default_moe_mesh',
    'head_logical_axis_rules',
    'logical_factor_rules',
    'match_fn',
    'override_partition_specs',
    'standard_logical_axis_rules',
    'ExpertChoice',
    'ExpertFactory',
    'ExpertMlp',
    'ExpertsChooseRouter',
    'HashRouter',
    'MoeLayer',
    'RecordedChoice',
    'Router',
    'RouterWeights',
    'SinkhornRouter',
    'SparseBlock',
    'SparseFeedForward',
    'TokenChoice',
    'TokensChooseRouter',
    'expert_capacity',
    'load_balancing_loss',
    'router_z_loss',
    'sparse_decoder_only',
    'sparse_layers',
    'sparse_transformer',
]
