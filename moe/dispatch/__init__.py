"""Dispatch of tokens to their experts, the experts' MLPs, and the combination of their outputs.

`apply_experts` does all of it in one call. The MLPs are `batched_mlp`, on buffers of equal size, and `grouped_mlp`, on
rows sorted by expert.
"""

from moe.dispatch.apply import METHODS
from moe.dispatch.apply import apply_experts
from moe.dispatch.apply import select_method
from moe.dispatch.grouped import grouped_mlp
from moe.dispatch.mlp import batched_mlp
from moe.dispatch.mlp import dropout_keep
from moe.dispatch.types import DispatchStats
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec

__all__ = [
  'METHODS',
  'DispatchStats',
  'MlpParams',
  'MlpSpec',
  'apply_experts',
  'batched_mlp',
  'dropout_keep',
  'grouped_mlp',
  'select_method',
]
