"""Routers: the assignment of tokens to experts and their buffers, gates, losses and metrics."""

from moe.routing.base import Router
from moe.routing.base import RouterWeights
from moe.routing.capacity import expert_capacity
from moe.routing.expert_choice import ExpertsChooseRouter
from moe.routing.expert_choice import experts_choose
from moe.routing.hashing import HashRouter
from moe.routing.losses import load_balancing_loss
from moe.routing.losses import router_z_loss
from moe.routing.positions import buffer_positions
from moe.routing.positions import rank_within_expert
from moe.routing.result import Routing
from moe.routing.sinkhorn import SinkhornRouter
from moe.routing.sinkhorn import sinkhorn_scores
from moe.routing.token_choice import ChoiceOptions
from moe.routing.token_choice import make_token_choice
from moe.routing.token_choice import record_shape
from moe.routing.token_choice import tokens_choose
from moe.routing.token_routers import TokensChooseRouter
from moe.routing.token_routers import balancing_step
from moe.routing.types import ExpertChoice
from moe.routing.types import RecordedChoice
from moe.routing.types import TokenChoice
from moe.routing.types import choice_counts

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
