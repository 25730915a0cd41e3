"""Routers: the assignment of tokens to experts and their buffers, gates, losses and metrics."""

from moe.routing.base import Router, RouterWeights
from moe.routing.capacity import expert_capacity
from moe.routing.expert_choice import ExpertsChooseRouter, experts_choose
from moe.routing.hashing import HashRouter
from moe.routing.losses import load_balancing_loss, router_z_loss
from moe.routing.positions import buffer_positions, rank_within_expert
from moe.routing.result import Routing
from moe.routing.sinkhorn import SinkhornRouter, sinkhorn_scores
from moe.routing.token_choice import ChoiceOptions, make_token_choice, record_shape, tokens_choose
from moe.routing.token_routers import TokensChooseRouter, balancing_step
from moe.routing.types import ExpertChoice, RecordedChoice, TokenChoice, choice_counts

__all__ = [
  'ChoiceOptions',
  'ExpertChoice',
  'ExpertsChooseRouter',
  'HashRouter',
  'RecordedChoice',
  'Router',
  'RouterWeights',
  'Routing',
  'SinkhornRouter',
  'TokenChoice',
  'TokensChooseRouter',
  'balancing_step',
  'buffer_positions',
  'choice_counts',
  'expert_capacity',
  'experts_choose',
  'load_balancing_loss',
  'make_token_choice',
  'rank_within_expert',
  'record_shape',
  'router_z_loss',
  'sinkhorn_scores',
  'tokens_choose',
]
