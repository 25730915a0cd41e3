"""Routers: the assignment of tokens to experts and their buffers, gates, losses and metrics."""

from t5x_lite.configuration import configurable_names
from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  configurable_names.called_in('moe.routing'),
  {
    'moe.routing.base': ('Router',),
    'moe.routing.capacity': ('expert_capacity',),
    'moe.routing.expert_choice': ('experts_choose',),
    'moe.routing.losses': ('load_balancing_loss', 'router_z_loss'),
    'moe.routing.positions': ('buffer_positions', 'rank_within_expert'),
    'moe.routing.result': ('Routing',),
    'moe.routing.sinkhorn': ('sinkhorn_scores',),
    'moe.routing.token_choice': (
      'ChoiceOptions',
      'make_token_choice',
      'record_shape',
      'tokens_choose',
    ),
    'moe.routing.token_routers': ('balancing_step',),
    'moe.routing.types': ('ExpertChoice', 'RecordedChoice', 'TokenChoice', 'choice_counts'),
  },
)
