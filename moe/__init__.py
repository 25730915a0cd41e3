"""Mixture of Experts on top of t5x_lite: partitioning, routing, dispatch, layers and models arrive with their issue."""

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

__all__ = [
    'ExpertChoice',
    'ExpertsChooseRouter',
    'HashRouter',
    'RecordedChoice',
    'Router',
    'RouterWeights',
    'SinkhornRouter',
    'TokenChoice',
    'TokensChooseRouter',
    'expert_capacity',
    'load_balancing_loss',
    'router_z_loss',
]
