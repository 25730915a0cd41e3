"""Routers in which every token chooses its experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moe.routing import token_choice as functions
from moe.routing.base import Router
from moe.routing.types import TokenChoice
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite import checks
from t5x_lite.types import PyTree

# Whose places the buffer of an expert has.
CAPACITY_SCOPES = ('group', 'global')
# Collections of loss-free balancing: what it keeps, and what it is told of the step; and what both have.
STATE, STEP, NUM_PASSES = 'router_state', 'router_step', 'num_passes'


class TokensChooseRouter(Router):
  """Every token chooses the `num_selected` experts of its highest scores.

  With 1 choice that is Switch Transformer (https://arxiv.org/abs/2101.03961), with 2 ST-MoE
  (https://arxiv.org/abs/2202.08906).

  Loss-free balancing (https://arxiv.org/abs/2408.15664, algorithm 1): with `bias_update_rate` u > 0, scores are
  compared after a bias is added for each expert. Gates do not contain it. After a training step it moves by u up for
  experts that got fewer choices (before drops) than the mean, and by u down for those that got more. It stands in the
  collection `router_state`: `bias` float32 [E], and of the passes of the step so far the choices `counts` float32 [E]
  and number `num_passes` int32 []. They change in calls that are not deterministic and have the collection mutable,
  but not when they are made. A call is a step, unless the collection `router_step` says of how many `num_passes` int32
  [] (micro-batches) the step is: then the bias moves after the last of them, by the choices of all, and all are routed
  with one bias. Models with experts give it.

  Attributes:
    num_selected: K, choices of a token.
    normalize_gates: gates of a token sum to 1 over its choices; otherwise they are probabilities (T5X). With one choice
      the gate is then always 1, and the router learns from its losses only.
    batch_prioritized_routing: places go to the tokens with the highest first gate first, rather than in the order of
      tokens. https://arxiv.org/abs/2106.05974, section 4.1. Of effect only under a capacity.
    capacity_scope: 'group': an expert has `capacity` places for each group. 'global': it has `G * capacity` that all
      groups share; the routing is then of one group of all tokens. Of effect only under a capacity.
    score: what gates are: 'softmax' of the logits over experts, or 'sigmoid' of each.
    padding_takes_places: with `ignore_padding_tokens`, padding has probability 0, but is routed and takes places, as in
      T5X's scatter router. T5X's masked router and the default here do not route it.
    bias_update_rate: u; 0: no loss-free balancing. 0.001 in the paper.
  """

  num_selected: int = 1
  normalize_gates: bool = False
  batch_prioritized_routing: bool = False
  capacity_scope: str = 'group'
  score: str = 'softmax'
  padding_takes_places: bool = False
  bias_update_rate: float = 0.0

  def _check(self) -> None:
    super()._check()
    owner = type(self).__name__
    functions.check_num_selected(owner, self.num_selected, self.num_experts)
    self._options(None)  # Refuses an unknown score.
    if self.capacity_scope not in CAPACITY_SCOPES:
      raise ConfigError(f'{owner}: unknown capacity_scope {self.capacity_scope!r}.'
                        f'{did_you_mean(str(self.capacity_scope), CAPACITY_SCOPES)}')
    if self.padding_takes_places and not self.ignore_padding_tokens:
      raise ConfigError(f'{owner}: padding_takes_places is set, but ignore_padding_tokens is False, so that padding is '
                        'routed as any token. Set ignore_padding_tokens=True, or leave padding_takes_places alone.')
    checks.check_number(owner, 'bias_update_rate', self.bias_update_rate, at_least=0)

  @property
  def capacity_options(self) -> tuple[str, ...]:
    """Names of the options set that act only under a capacity: without one in any mode they have no effect."""
    return ((('batch_prioritized_routing',) if self.batch_prioritized_routing else ())
            + (('capacity_scope',) if self.capacity_scope == 'global' else ()))

  @property
  def shares_capacity(self) -> bool:
    """See base class."""
    return self.capacity_scope == 'global'

  def _options(self, capacity: int | None) -> functions.ChoiceOptions:
    return functions.ChoiceOptions(
        capacity=capacity, score=self.score, normalize_gates=self.normalize_gates,
        batch_prioritized=self.batch_prioritized_routing, shared_capacity=self.capacity_scope == 'global',
        padding_takes_places=self.padding_takes_places, padding_in_losses=self.padding_in_losses)

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded) -> TokenChoice:
    del token_ids
    logits = self.logits(x, deterministic)
    bias = self.variable(STATE, 'bias', jnp.zeros, (self.num_experts,), jnp.float32) \
        if self.bias_update_rate else None
    choice = functions.tokens_choose(
        logits, self.num_selected, self._options(capacity), token_mask=token_mask,
        selection_bias=None if bias is None else bias.value, recorded=recorded)
    if bias is not None:
      self._update_bias(bias, choice, deterministic)
    return choice

  def _update_bias(self, bias: nn.Variable, choice: TokenChoice, deterministic: bool) -> None:
    """Count the choices of a training pass, and moves the bias at the end of a step."""
    counts = self.variable(STATE, 'counts', jnp.zeros, (self.num_experts,), jnp.float32)
    num_passes = self.variable(STATE, NUM_PASSES, jnp.zeros, (), jnp.int32)
    if deterministic or self.is_initializing() or not self.is_mutable_collection(STATE):
      return
    passes_of_step = self.get_variable(STEP, NUM_PASSES) if self.has_variable(STEP, NUM_PASSES) else 1
    chosen = jnp.sum(choice.choice_counts(), axis=0).astype(jnp.float32)
    bias.value, counts.value, num_passes.value = balancing_step(
        bias.value, counts.value + chosen, num_passes.value + 1, self.bias_update_rate, passes_of_step)


def balancing_step(
    bias: jax.Array, counts: jax.Array, num_passes: jax.Array, rate: float, passes_of_step: jax.Array | int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Update the bias of loss-free balancing if a step is complete. https://arxiv.org/abs/2408.15664, algorithm 1.

  Args:
    bias: float32 [E].
    counts: float32 [E], choices of each expert in the passes of the step so far.
    num_passes: int32 [], number of those passes.
    rate: how far an expert's bias moves.
    passes_of_step: int32 [], passes of the whole step.

  Returns:
    (bias, counts, num_passes) to go on with: counted from zero after an update.
  """
  complete = num_passes >= passes_of_step
  moved = bias + rate * jnp.sign(jnp.mean(counts) - counts)
  return (jnp.where(complete, moved, bias), jnp.where(complete, 0.0, counts),
          jnp.where(complete, 0, num_passes))


def step_of(state: PyTree, num_passes: int) -> PyTree:
  """Return the collection `router_step` for a step of `num_passes` micro-batches, given the collection `router_state`.

  It has the form of the state, so that layers that run in loops find their own.
  """
  flat = tree_utils.flatten_dict(tree_utils.to_dict(state))
  return tree_utils.unflatten_dict({
      name: jnp.full_like(value, num_passes) for name, value in flat.items() if name.rsplit('/', 1)[-1] == NUM_PASSES})
