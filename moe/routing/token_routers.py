"""Routers with token choice."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moe.routing import token_choice as functions
from moe.routing.base import Router
from moe.routing.types import TokenChoice
from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.types import PyTree

# Scopes of the buffer of an expert.
CAPACITY_SCOPES = ('group', 'global')
# Collections of loss-free balancing, its state and its input; and the name of a variable of both.
STATE = 'router_state'
STEP = 'router_step'
NUM_PASSES = 'num_passes'


class TokensChooseRouter(Router):
  """Router in which every token chooses the `num_selected` experts with its highest scores.

  With 1 choice it is the router of Switch Transformer (https://arxiv.org/abs/2101.03961), with 2 choices that of ST-MoE
  (https://arxiv.org/abs/2202.08906).

  Loss-free balancing (https://arxiv.org/abs/2408.15664, algorithm 1): with `bias_update_rate` u > 0, a bias per expert
  is added to the scores for the choice, but not to the gates. After a training step the bias of an expert increases by
  u if the expert got fewer choices (before drops) than the mean, and decreases by u if it got more. The collection
  `router_state` has `bias` float32 [E] and, for the passes of the current step, the choices `counts` float32 [E] and
  the number `num_passes` int32 []. Calls with `deterministic=False` update the collection if it is mutable, except in
  initialization. By default each call counts as a training step. With gradient accumulation, the collection
  `router_step` has `num_passes` int32 [], the number of micro-batches of a step, which models with experts set. Then
  all passes use the same bias, and the last pass updates the bias by the choices of all passes.

  Attributes:
    num_selected: number of choices of a token, K.
    normalize_gates: True if the gates of a token sum to 1 over its choices, False for probabilities (T5X). With one
      choice the normalized gate is always 1, and the router learns only from its losses.
    batch_prioritized_routing: True to assign slots in the order of the tokens' first gates, False for the order of
      tokens. Only with a capacity. https://arxiv.org/abs/2106.05974, section 4.1.
    capacity_scope: 'group' for `capacity` slots per expert and group, 'global' for `G * capacity` slots per expert that
      all groups share; the routing then has one group of all tokens. Only with a capacity.
    score: function from logits to gates, 'softmax' over experts or 'sigmoid'.
    padding_uses_capacity: True, as in T5X's scatter router, to route ignored padding, with probability 0. T5X's masked
      router does not route it.
    bias_update_rate: update u of loss-free balancing, 0.001 in the paper; 0 for no loss-free balancing.
  """

  num_selected: int = 1
  normalize_gates: bool = False
  batch_prioritized_routing: bool = False
  capacity_scope: str = 'group'
  score: str = 'softmax'
  padding_uses_capacity: bool = False
  bias_update_rate: float = 0.0

  def _expectations(self) -> dict[str, checks.Expectation]:
    return super()._expectations() | {
      'num_selected': functions.num_selected_expectation(self.num_experts),
      'score': checks.one_of(functions.SCORE_FNS),
      'capacity_scope': checks.one_of(CAPACITY_SCOPES),
      'padding_uses_capacity': checks.Expectation(
        'False with ignore_padding_tokens=False',
        lambda value: not value or self.ignore_padding_tokens,
      ),
      'bias_update_rate': checks.number(at_least=0),
    }

  @property
  def capacity_options(self) -> tuple[str, ...]:
    """Names of options with other than default values that have an effect only with a capacity."""
    names = []
    if self.batch_prioritized_routing:
      names.append('batch_prioritized_routing')
    if self.capacity_scope == 'global':
      names.append('capacity_scope')
    return tuple(names)

  @property
  def shares_capacity(self) -> bool:
    """True if all groups share one buffer per expert."""
    return self.capacity_scope == 'global'

  def _options(self, capacity: int | None) -> functions.ChoiceOptions:
    return functions.ChoiceOptions(
      capacity=capacity,
      score=self.score,
      normalize_gates=self.normalize_gates,
      batch_prioritized=self.batch_prioritized_routing,
      shared_capacity=self.capacity_scope == 'global',
      padding_uses_capacity=self.padding_uses_capacity,
      padding_in_losses=self.padding_in_losses,
    )

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded) -> TokenChoice:
    del token_ids
    logits = self.logits(x, deterministic)
    bias = None
    selection_bias = None
    if self.bias_update_rate:
      # [experts]: float32, since updates are much smaller than the bias.
      bias = self.variable(STATE, 'bias', jnp.zeros, (self.num_experts,), jnp.float32)
      selection_bias = bias.value
    choice = functions.tokens_choose(
      logits,
      self.num_selected,
      self._options(capacity),
      token_mask=token_mask,
      selection_bias=selection_bias,
      recorded=recorded,
    )
    if bias is not None:
      self._update_bias(bias, choice, deterministic)
    return choice

  def _update_bias(self, bias: nn.Variable, choice: TokenChoice, deterministic: bool) -> None:
    """Count the choices of a training pass, and update the bias at the end of a step."""
    counts = self.variable(STATE, 'counts', jnp.zeros, (self.num_experts,), jnp.float32)
    num_passes = self.variable(STATE, NUM_PASSES, jnp.zeros, (), jnp.int32)
    if deterministic or self.is_initializing() or not self.is_mutable_collection(STATE):
      return
    if self.has_variable(STEP, NUM_PASSES):
      passes_of_step = self.get_variable(STEP, NUM_PASSES)
    else:
      passes_of_step = 1
    # [experts]: choices before drops, so that the bias follows what tokens want.
    chosen = jnp.sum(choice.choice_counts(), axis=0).astype(jnp.float32)
    bias.value, counts.value, num_passes.value = balancing_step(
      bias.value, counts.value + chosen, num_passes.value + 1, self.bias_update_rate, passes_of_step
    )


def balancing_step(
  bias: jax.Array,
  counts: jax.Array,
  num_passes: jax.Array,
  rate: float,
  passes_of_step: jax.Array | int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Update the bias of loss-free balancing if a step is complete. https://arxiv.org/abs/2408.15664, algorithm 1.

  Args:
    bias: float32 [E].
    counts: float32 [E], choices of each expert in the passes of the step so far.
    num_passes: int32 [], number of these passes.
    rate: update of an expert's bias, u.
    passes_of_step: int32 [], number of passes of a step.

  Returns:
    New (bias, counts, num_passes); counts and num_passes are 0 after an update.
  """
  complete = num_passes >= passes_of_step
  # [experts]: only the sign of an expert's deviation from the mean load counts, as in the paper.
  updated = bias + rate * jnp.sign(jnp.mean(counts) - counts)
  return (
    jnp.where(complete, updated, bias),
    jnp.where(complete, 0.0, counts),
    jnp.where(complete, 0, num_passes),
  )


def step_of(state: PyTree, num_passes: int) -> PyTree:
  """Return the collection `router_step` for a step of `num_passes` micro-batches.

  It has the structure of the state, so that layers in loops read their part.

  Args:
    state: collection `router_state`.
    num_passes: number of passes of a step.
  """
  step = {}
  for name, value in tree_utils.flatten_dict(tree_utils.to_dict(state)).items():
    if name.rsplit('/', 1)[-1] == NUM_PASSES:
      step[name] = jnp.full_like(value, num_passes)
  return tree_utils.unflatten_dict(step)
