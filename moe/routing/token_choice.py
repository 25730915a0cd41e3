"""Routing in which every token chooses its experts: pure functions. `token_routers` has the modules."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe.routing import losses
from moe.routing.positions import buffer_positions
from moe.routing.types import RecordedChoice, TokenChoice
from t5x_lite.errors import ConfigError, did_you_mean

# From logits [..., E] to the scores that gates are taken from.
SCORE_FNS: dict[str, Callable[[jax.Array], jax.Array]] = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
  """How the choices of tokens become a `TokenChoice`.

  Attributes:
    capacity: places that an expert has for a group; None: dropless.
    score: gates are the softmax of the logits over experts ('softmax'), or the 'sigmoid' of each.
    normalize_gates: divide the gates of a token by their sum over its K choices (before drops).
    batch_prioritized: places are given in the order of the tokens' first gates, as they are before they are normalised.
    shared_capacity: the places of an expert for all groups are one buffer, of `G * capacity`. The result has one group
      of all tokens; its losses are still those of the groups.
    padding_takes_places: ignored padding has probability 0, but is routed to the first K experts (T5X's scatter form).
    padding_in_losses: means of losses are over ignored padding too.
  """

  capacity: int | None
  score: str = 'softmax'
  normalize_gates: bool = False
  batch_prioritized: bool = False
  shared_capacity: bool = False
  padding_takes_places: bool = False
  padding_in_losses: bool = True

  def __post_init__(self):
    if self.score not in SCORE_FNS:
      raise ConfigError(f'unknown score function {self.score!r}.{did_you_mean(str(self.score), SCORE_FNS)}')


def check_num_selected(owner: str, num_selected: int, num_experts: int) -> None:
  """Refuses a number of choices that `num_experts` cannot serve.

  Raises:
    ConfigError: `num_selected` is not in 1..num_experts.
  """
  if not 1 <= num_selected <= num_experts:
    raise ConfigError(f'{owner}: got {num_selected} choices of a token among {num_experts} experts; expected 1 to '
                      f'{num_experts}. Change num_selected, or num_experts.')


def tokens_choose(
    logits: jax.Array, num_selected: int, options: ChoiceOptions, *, token_mask: jax.Array | None = None,
    selection_bias: jax.Array | None = None, selection_scores: jax.Array | None = None,
    recorded: RecordedChoice | None = None) -> TokenChoice:
  """Route every token to the K experts of its highest scores; of equal ones, to that of the lower index.

  https://arxiv.org/abs/2101.03961 (K = 1), https://arxiv.org/abs/2202.08906 (K = 2).

  Args:
    logits: float32 [G, T, E].
    num_selected: K.
    options: see there.
    token_mask: bool [G, T], False for padding, which is ignored; None: nothing is.
    selection_bias: float32 [E], added to the scores for the choice only, not for the gates.
    selection_scores: float32 [G, T, E], what the choice goes by in the place of the scores that make the gates.
    recorded: choices to repeat instead of choosing.

  Returns:
    The routing.

  Raises:
    ConfigError: more choices than experts; a record that does not fit.
  """
  groups, tokens, num_experts = logits.shape
  check_num_selected('tokens_choose', num_selected, num_experts)
  if recorded is not None:
    recorded.check(record_shape(groups, tokens, num_selected, options))
    return make_token_choice(
        recorded.index.astype(jnp.int32).reshape(groups, tokens, num_selected), logits, options,
        token_mask=token_mask, gates=recorded.gates)
  scores = SCORE_FNS[options.score](logits) if selection_scores is None else selection_scores
  scores = lax.stop_gradient(scores)
  if selection_bias is not None:
    scores += selection_bias
  return make_token_choice(top_k_index(scores, num_selected), logits, options, token_mask=token_mask)


def top_k_index(scores: jax.Array, num_selected: int) -> jax.Array:
  """Return the indices of the largest scores.

  One maximum after the other: as fast as `lax.top_k` on CPU, and unlike it (a call that is opaque to the partitioner)
  without gathering the scores of all devices.

  Args:
    scores: float32 [..., E], finite.
    num_selected: K, at most E.

  Returns:
    int32 [..., K], scores falling; of equal ones, the lower index comes first.
  """
  num_experts = scores.shape[-1]
  experts = jnp.arange(num_experts, dtype=jnp.int32)
  chosen = []
  for _ in range(num_selected):
    largest = jnp.max(scores, axis=-1, keepdims=True)
    # A score that is not a number equals nothing: then the last expert, so that indices stay in range.
    index = jnp.min(jnp.where(scores == largest, experts, num_experts - 1), axis=-1)
    chosen.append(index)
    scores = jnp.where(experts == index[..., None], -jnp.inf, scores)
  return jnp.stack(chosen, axis=-1)


def record_shape(groups: int, tokens: int, num_selected: int, options: ChoiceOptions) -> tuple[int, int, int]:
  """Return the shape of the routing's `expert_index`, and so of its record."""
  if options.shared_capacity and options.capacity is not None:
    return (1, groups * tokens, num_selected)
  return (groups, tokens, num_selected)


def make_token_choice(
    expert_index: jax.Array, logits: jax.Array, options: ChoiceOptions, *, token_mask: jax.Array | None = None,
    gates: jax.Array | None = None) -> TokenChoice:
  """Turn chosen experts into a `TokenChoice`: gates from the logits, places in buffers, drops and losses.

  Args:
    expert_index: int32 [G, T, K]; `num_experts` for choices that count for nothing.
    logits: float32 [G, T, E].
    options: see there.
    token_mask: bool [G, T], False for padding, which is ignored; None: nothing is.
    gates: float32 [G, T, K] instead of those from the logits; still 0 for what is dropped.

  Returns:
    The routing. Its `probs` are 0 for ignored padding.
  """
  probs = SCORE_FNS[options.score](logits)
  if token_mask is not None:
    expert_index = jnp.where(token_mask[..., None], expert_index, _experts_of_padding(expert_index, logits, options))
    probs = jnp.where(token_mask[..., None], probs, 0.0)
    logits = jnp.where(token_mask[..., None], logits, 0.0)
  loss_mask = None if options.padding_in_losses else token_mask
  distribution = probs if options.score == 'softmax' else _normalized(probs)
  return assign_places(
      expert_index, probs, options, token_mask=token_mask, gates=gates,
      auxiliary_loss=losses.load_balancing_loss(distribution, expert_index, loss_mask),
      router_z_loss=losses.router_z_loss(logits, loss_mask))


def assign_places(
    expert_index: jax.Array, probs: jax.Array, options: ChoiceOptions, *, token_mask: jax.Array | None,
    gates: jax.Array | None, auxiliary_loss: jax.Array, router_z_loss: jax.Array) -> TokenChoice:
  """Give choices their places and gates.

  Args:
    expert_index: int32 [G, T, K]; `num_experts` for choices that count for nothing.
    probs: float32 [G, T, E], which gates are taken from.
    options: see there.
    token_mask: bool [G, T] or None, kept for metrics.
    gates: float32 [G, T, K] instead of those from `probs`.
    auxiliary_loss: float32 [].
    router_z_loss: float32 [].

  Returns:
    The routing.
  """
  groups, num_experts, capacity = probs.shape[0], probs.shape[-1], options.capacity
  if capacity is not None and options.shared_capacity:
    expert_index, probs = _one_group(expert_index), _one_group(probs)
    token_mask = None if token_mask is None else token_mask.reshape(1, -1)
    capacity *= groups
  raw_gates = gates_of(probs, expert_index)
  if gates is None:
    gates = _normalized(raw_gates) if options.normalize_gates else raw_gates
  kept, position = expert_index < num_experts, None
  if capacity is not None:
    priority = lax.stop_gradient(raw_gates[..., 0]) if options.batch_prioritized else None
    position = jnp.where(kept, buffer_positions(expert_index, num_experts, priority), capacity)
    kept = position < capacity
  return TokenChoice(
      expert_index=expert_index, gates=jnp.where(kept, gates.reshape(kept.shape), 0.0), position=position, probs=probs,
      auxiliary_loss=auxiliary_loss, router_z_loss=router_z_loss, num_experts=num_experts, capacity=capacity,
      token_mask=token_mask, padding_in_losses=options.padding_in_losses)


def gates_of(probs: jax.Array, expert_index: jax.Array) -> jax.Array:
  """Return float32 [G, T, K]: `probs` [G, T, E] of `expert_index` [G, T, K], 0 for indices of no expert."""
  safe = jnp.minimum(expert_index, probs.shape[-1] - 1)
  return jnp.where(expert_index < probs.shape[-1], jnp.take_along_axis(probs, safe, axis=-1), 0.0)


def _experts_of_padding(expert_index, logits, options):
  """Return what ignored padding chooses, for broadcasting: no expert, or what equal probabilities choose."""
  if options.padding_takes_places:
    return jnp.arange(expert_index.shape[-1], dtype=jnp.int32)
  return jnp.int32(logits.shape[-1])


def _normalized(x: jax.Array) -> jax.Array:
  """Divide by the sum over the last dim. Rows of zeros, or next to it, stay: also gradients have to be finite."""
  total = jnp.sum(x, axis=-1, keepdims=True)
  return x / jnp.where(total > 1e-18, total, 1.0)


def _one_group(x: jax.Array) -> jax.Array:
  return x.reshape(1, -1, x.shape[-1])
