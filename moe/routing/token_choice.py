"""Token choice, where every token chooses its experts: pure functions. `token_routers` has the modules."""

from collections.abc import Callable
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from moe.routing import losses
from moe.routing.positions import buffer_positions
from moe.routing.types import RecordedChoice
from moe.routing.types import TokenChoice
from t5x_lite import checks

# Functions from logits [..., E] to scores, from which gates are selected.
SCORE_FNS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'softmax': jax.nn.softmax,
  'sigmoid': jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
  """Options of token choice.

  Attributes:
    capacity: number of slots of an expert for a group; None for dropless routing.
    score: function from logits to gates, 'softmax' over experts or 'sigmoid'.
    normalize_gates: True to divide the gates of a token by their sum over its K choices (before drops).
    batch_prioritized: True to assign slots in the order of the tokens' first gates, before normalization.
    shared_capacity: True if an expert has one buffer of `G * capacity` slots for all groups. The result has one group
      of all tokens; its losses are still means over the groups.
    padding_uses_capacity: True to route ignored padding, with probability 0, to the first K experts (T5X's scatter
      form).
    padding_in_losses: True if means of losses include ignored padding.
  """

  capacity: int | None
  score: str = 'softmax'
  normalize_gates: bool = False
  batch_prioritized: bool = False
  shared_capacity: bool = False
  padding_uses_capacity: bool = False
  padding_in_losses: bool = True

  def __post_init__(self):
    checks.check('ChoiceOptions', vars(self), score=checks.one_of(SCORE_FNS))


def num_selected_expectation(num_experts: int) -> checks.Expectation:
  """Return the expectation on the number of choices of a token among `num_experts` experts."""
  return checks.number(
    at_least=1, at_most=num_experts, integer=True, remedy=f'num_experts is {num_experts}.'
  )


def tokens_choose(
  logits: jax.Array,
  num_selected: int,
  options: ChoiceOptions,
  *,
  token_mask: jax.Array | None = None,
  selection_bias: jax.Array | None = None,
  selection_scores: jax.Array | None = None,
  recorded: RecordedChoice | None = None,
) -> TokenChoice:
  """Route every token to the K experts with its highest scores; of equal scores, to the lower index.

  https://arxiv.org/abs/2101.03961 (K = 1), https://arxiv.org/abs/2202.08906 (K = 2).

  Args:
    logits: float32 [G, T, E].
    num_selected: number of choices of a token, K.
    options: options of the routing.
    token_mask: bool [G, T], False for ignored padding; None for no padding.
    selection_bias: float32 [E], added to the scores for the choice, not for the gates.
    selection_scores: float32 [G, T, E], scores for the choice, if they differ from those of the gates.
    recorded: choices to repeat.

  Returns:
    The routing.

  Raises:
    ConfigError: more choices than experts, or recorded choices of another shape.
  """
  groups, tokens, num_experts = logits.shape
  checks.check('tokens_choose', locals(), num_selected=num_selected_expectation(num_experts))
  if recorded is not None:
    recorded.check(record_shape(groups, tokens, num_selected, options))
    return make_token_choice(
      recorded.index.astype(jnp.int32).reshape(groups, tokens, num_selected),
      logits,
      options,
      token_mask=token_mask,
      gates=recorded.gates,
    )
  # [groups, tokens, experts]: scores for the choice, which may differ from those of the gates.
  if selection_scores is None:
    scores = SCORE_FNS[options.score](logits)
  else:
    scores = selection_scores
  scores = lax.stop_gradient(scores)
  if selection_bias is not None:
    scores += selection_bias
  # [groups, tokens, choices]: the choice has no gradient; the router learns by the gates and its losses.
  expert_index = top_k_index(scores, num_selected)
  return make_token_choice(expert_index, logits, options, token_mask=token_mask)


def top_k_index(scores: jax.Array, num_selected: int) -> jax.Array:
  """Return the indices of the largest scores.

  The maxima are computed one after the other, as fast as by `lax.top_k` on CPU, but without gathering the scores of all
  devices: the partitioner cannot divide `lax.top_k`.

  Args:
    scores: float32 [..., E], finite.
    num_selected: number of indices, K, at most E.

  Returns:
    int32 [..., K] in the order of descending scores; of equal scores, the lower index comes first.
  """
  num_experts = scores.shape[-1]
  experts = jnp.arange(num_experts, dtype=jnp.int32)
  chosen = []
  for _ in range(num_selected):
    largest = jnp.max(scores, axis=-1, keepdims=True)
    # NaN equals nothing; the last expert then keeps indices in range.
    candidates = jnp.where(scores == largest, experts, num_experts - 1)
    # [..., 1 choice]: of equal scores the lower index, as in `lax.top_k`.
    index = jnp.min(candidates, axis=-1)
    chosen.append(index)
    scores = jnp.where(experts == index[..., None], -jnp.inf, scores)
  return jnp.stack(chosen, axis=-1)


def record_shape(
  groups: int, tokens: int, num_selected: int, options: ChoiceOptions
) -> tuple[int, int, int]:
  """Return the shape of the `expert_index` of a routing and of its recorded choices.

  Args:
    groups: number of groups.
    tokens: number of tokens of a group.
    num_selected: number of choices of a token.
    options: options of the routing.
  """
  if options.shared_capacity and options.capacity is not None:
    return (1, groups * tokens, num_selected)
  return (groups, tokens, num_selected)


def make_token_choice(
  expert_index: jax.Array,
  logits: jax.Array,
  options: ChoiceOptions,
  *,
  token_mask: jax.Array | None = None,
  gates: jax.Array | None = None,
) -> TokenChoice:
  """Return the routing of chosen experts: gates from the logits, slots in buffers, drops and losses.

  Args:
    expert_index: int32 [G, T, K]; `num_experts` for ignored choices.
    logits: float32 [G, T, E].
    options: options of the routing.
    token_mask: bool [G, T], False for ignored padding; None for no padding.
    gates: float32 [G, T, K], used instead of gates from the logits, except for dropped choices.

  Returns:
    The routing; its `probs` are 0 for ignored padding.
  """
  # [groups, tokens, experts]: weight of each expert, float32 because gates and losses depend on small differences.
  probs = SCORE_FNS[options.score](logits)
  if token_mask is not None:
    is_routed = token_mask[..., None]
    of_padding = _experts_of_padding(expert_index, logits, options)
    expert_index = jnp.where(is_routed, expert_index, of_padding)
    # Zeros, as in T5X: padding adds nothing to the load-balancing loss, and log(experts)^2 to the z-loss.
    probs = jnp.where(is_routed, probs, 0.0)
    logits = jnp.where(is_routed, logits, 0.0)
  if options.padding_in_losses:
    loss_mask = None
  else:
    loss_mask = token_mask
  if options.score == 'softmax':
    distribution = probs
  else:
    distribution = _normalized(probs)
  return assign_slots(
    expert_index,
    probs,
    options,
    token_mask=token_mask,
    gates=gates,
    auxiliary_loss=losses.load_balancing_loss(distribution, expert_index, loss_mask),
    router_z_loss=losses.router_z_loss(logits, loss_mask),
  )


def assign_slots(
  expert_index: jax.Array,
  probs: jax.Array,
  options: ChoiceOptions,
  *,
  token_mask: jax.Array | None,
  gates: jax.Array | None,
  auxiliary_loss: jax.Array,
  router_z_loss: jax.Array,
) -> TokenChoice:
  """Return the routing of chosen experts: gates and slots in buffers.

  Args:
    expert_index: int32 [G, T, K]; `num_experts` for ignored choices.
    probs: float32 [G, T, E], from which gates are selected.
    options: options of the routing.
    token_mask: bool [G, T] or None, for metrics.
    gates: float32 [G, T, K], used instead of gates from `probs`.
    auxiliary_loss: float32 [].
    router_z_loss: float32 [].

  Returns:
    The routing.
  """
  groups = probs.shape[0]
  num_experts = probs.shape[-1]
  capacity = options.capacity
  if capacity is not None and options.shared_capacity:
    expert_index = _one_group(expert_index)
    probs = _one_group(probs)
    if token_mask is not None:
      token_mask = token_mask.reshape(1, -1)
    capacity *= groups
  # [groups, tokens, choices]: weights of the chosen experts, of which the gates are made.
  raw_gates = gates_of(probs, expert_index)
  if gates is None:
    if options.normalize_gates:
      gates = _normalized(raw_gates)
    else:
      gates = raw_gates
  kept = expert_index < num_experts
  position = None
  if capacity is not None:
    priority = None
    if options.batch_prioritized:
      priority = lax.stop_gradient(raw_gates[..., 0])
    # [groups, tokens, choices]: slot in the buffer of the chosen expert; slots past the capacity do not exist.
    position = buffer_positions(expert_index, num_experts, priority)
    position = jnp.where(kept, position, capacity)
    kept = position < capacity
  # Dropped choices have a gate of 0, so that they add nothing to the output and get no gradient.
  gates = jnp.where(kept, gates.reshape(kept.shape), 0.0)
  return TokenChoice(
    expert_index=expert_index,
    gates=gates,
    position=position,
    probs=probs,
    auxiliary_loss=auxiliary_loss,
    router_z_loss=router_z_loss,
    num_experts=num_experts,
    capacity=capacity,
    token_mask=token_mask,
    padding_in_losses=options.padding_in_losses,
  )


def gates_of(probs: jax.Array, expert_index: jax.Array) -> jax.Array:
  """Return float32 [G, T, K], the `probs` [G, T, E] of `expert_index` [G, T, K]; 0 for ignored choices."""
  num_experts = probs.shape[-1]
  safe = jnp.minimum(expert_index, num_experts - 1)
  gates = jnp.take_along_axis(probs, safe, axis=-1)
  return jnp.where(expert_index < num_experts, gates, 0.0)


def _experts_of_padding(expert_index, logits, options):
  """Return the choices of ignored padding, for broadcasting: no expert, or the first K experts."""
  if options.padding_uses_capacity:
    return jnp.arange(expert_index.shape[-1], dtype=jnp.int32)
  return jnp.int32(logits.shape[-1])


def _normalized(x: jax.Array) -> jax.Array:
  """Divide by the sum over the last dim, except rows of (nearly) zeros, so that gradients are finite."""
  total = jnp.sum(x, axis=-1, keepdims=True)
  return x / jnp.where(total > 1e-18, total, 1.0)


def _one_group(x: jax.Array) -> jax.Array:
  return x.reshape(1, -1, x.shape[-1])
