"""Routings by choice: expert, slot in its buffer, and gate of each choice.

Dims: G groups, T tokens of a group, E experts, C capacity, K choices of a token.
"""

import abc
import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from moe.routing import plan as plans
from moe.routing.result import NUM_POSITION_BINS
from moe.routing.result import ExpertsFn
from moe.routing.result import Routing
from moe.routing.result import ratio
from t5x_lite import checks
from t5x_lite.errors import ConfigError


class ChoiceRouting(Routing):
  """Base class of token choice and expert choice."""

  gates: jax.Array

  @abc.abstractmethod
  def kept(self) -> jax.Array:
    """Return bool of the shape of the gates, True for computed choices."""

  @abc.abstractmethod
  def slots(self) -> tuple[jax.Array, jax.Array]:
    """Return the token of each slot, int32 [E, G, C], G * T or more for empty slots; and its gate, float32."""

  @abc.abstractmethod
  def through_buffers(self, tokens: jax.Array, experts_fn: ExpertsFn) -> jax.Array:
    """Return the experts' weighted outputs for `tokens` <float>[G * T, D], of the same shape."""

  def router_confidence(self) -> jax.Array:
    """Return float32 [], the mean gate of computed choices (0 without choices). T5X's metric."""
    return ratio(jnp.sum(self.gates), jnp.sum(self.kept()))

  def without_padding_rows(self, num_real: jax.Array) -> 'ChoiceRouting':
    """Return the routing with losses whose means exclude rows that fill up a batch; see base class."""
    assert self.token_mask is not None  # Without a mask, no row is known to be padding.
    num_positions = self.token_mask.size
    # Ignored padding adds 0 to the balancing loss and log(experts)^2 to the z-loss.
    z_of_padding = (num_positions - num_real) * math.log(self.num_experts) ** 2
    divisor = jnp.maximum(num_real, 1.0)
    router_z_loss = (self.router_z_loss * num_positions - z_of_padding) / divisor
    # Every choice is a dataclass.
    routing: Any = self
    return dataclasses.replace(
      routing,
      auxiliary_loss=self.auxiliary_loss * num_positions / divisor,
      router_z_loss=jnp.where(num_real == 0.0, 0.0, router_z_loss),
    )

  def _choice_weights(self, batch, length):
    kept = jnp.sum(self.kept())
    return {'router_confidence': kept, 'receive_drops': kept, **self._drop_weights(batch, length)}

  @abc.abstractmethod
  def _drop_weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Return the `weights` of load and drops."""


@flax.struct.dataclass
class TokenChoice(ChoiceRouting):
  """Result of token choice: the experts of every token.

  Attributes:
    expert_index: int32 [G, T, K], the k-th choice of a token; `num_experts` (one past the end) for ignored choices,
      those of ignored padding. A token's choices are distinct.
    gates: float32 [G, T, K], weights of the experts' outputs; 0 for dropped and ignored choices.
    position: int32 [G, T, K], slot in the buffer of an expert for the group; `capacity` or more for dropped and ignored
      choices. None for dropless routing.
    probs: float32 [G, T, E], from which the gates were selected.
    auxiliary_loss: float32 [], load-balancing loss.
    router_z_loss: float32 [].
    num_experts: number of experts, E.
    capacity: number of slots of a buffer, C; None for dropless routing. A group fills at most T of them.
    token_mask: bool [G, T], False for ignored padding; None for no padding. For metrics.
    padding_in_losses: True if the means of losses include ignored padding.
  """

  expert_index: jax.Array
  gates: jax.Array
  position: jax.Array | None
  probs: jax.Array
  auxiliary_loss: jax.Array
  router_z_loss: jax.Array
  num_experts: int = flax.struct.field(pytree_node=False)
  capacity: int | None = flax.struct.field(pytree_node=False)
  token_mask: jax.Array | None = dataclasses.field(default=None)
  padding_in_losses: bool = flax.struct.field(pytree_node=False, default=True)

  @property
  def num_selected(self) -> int:
    """Number of choices of a token, K."""
    return self.expert_index.shape[-1]

  @property
  def forms(self) -> tuple[str, ...]:
    """Supported forms of dispatch."""
    if self.position is None:
      return ('grouped',)
    return ('capacity', 'einsum', 'grouped')

  @property
  def num_slots(self) -> int:
    """Number of slots: C, or T if smaller, since a token chooses an expert at most once."""
    assert self.capacity is not None  # A dropless routing has no buffers.
    return min(self.capacity, self.expert_index.shape[1])

  @property
  def num_choices(self) -> int:
    """G * T * K; choice k of a token has the id token * K + k."""
    return self.gates.size

  def _buffers(self) -> tuple[plans.RowPlan, tuple[int, int, int]]:
    """Return the plan of the buffers, and their shape (E, G, C)."""
    assert self.position is not None  # A dropless routing has no buffers.
    plan = plans.plan_buffers(self.expert_index, self.position, self.num_experts, self.num_slots)
    num_groups = self.expert_index.shape[0]
    return plan, (self.num_experts, num_groups, self.num_slots)

  def masks(self) -> tuple[jax.Array, jax.Array]:
    """Return (dispatch weights, combine weights), float32 [G, T, E, C] each."""
    # [groups, tokens, choices, experts] and [..., slots]: rows of zeros for ignored choices, whose expert is out of
    # range, and for dropped ones, whose slot is.
    experts = jax.nn.one_hot(self.expert_index, self.num_experts, dtype=jnp.float32)
    slots = jax.nn.one_hot(self.position, self.num_slots, dtype=jnp.float32)
    # [groups, tokens, experts, slots]: 1 where a token is, and its gate there. Choices of a token are distinct, so that
    # the sum over choices adds zeros only.
    dispatch = jnp.einsum('gtke,gtkc->gtec', experts, slots)
    combine = jnp.einsum('gtke,gtkc,gtk->gtec', experts, slots, self.gates)
    return dispatch, combine

  def choice_ids(self) -> jax.Array:
    """Return int32 [E, G, C], the choice of each slot."""
    plan, shape = self._buffers()
    return plan.row_choice.reshape(shape)

  def slots(self) -> tuple[jax.Array, jax.Array]:
    """Return the token of each slot, int32 [E, G, C], and its gate."""
    choice = self.choice_ids()
    token = choice // self.num_selected
    # Empty slots have ids past the end of the choices, and a gate of 0.
    gates = jnp.take(self.gates.reshape(-1), choice, mode='fill', fill_value=0)
    return token, gates

  def through_buffers(self, tokens: jax.Array, experts_fn: ExpertsFn) -> jax.Array:
    """Return the experts' weighted outputs, with buffers filled by gathers.

    Args:
      tokens: [G, T, D].
      experts_fn: function from the slots of all experts to their outputs.
    """
    plan, shape = self._buffers()
    num_tokens, width = tokens.shape
    # [experts, groups, slots, width]: equal buffers, so that experts are one batched product.
    buffers = plans.dispatch(tokens, plan).reshape(*shape, -1)
    rows = experts_fn(buffers, plan.row_choice.reshape(shape))
    gates = self.gates.reshape(num_tokens, -1)
    return plans.combine(rows.reshape(-1, width), gates, plan)

  def record(self) -> dict[str, jax.Array]:
    """Return `expert_index`, int32 [G, T, K], and `gates`, float32 [G, T, K], by name."""
    return {'expert_index': self.expert_index, 'gates': self.gates}

  def chosen(self) -> jax.Array:
    """Return bool [G, T, K], True for choices of an expert, including dropped ones."""
    return self.expert_index < self.num_experts

  def kept(self) -> jax.Array:
    """Return bool [G, T, K], True for computed choices."""
    if self.position is None or self.capacity is None:
      return self.chosen()
    return jnp.logical_and(self.chosen(), self.position < self.capacity)

  def choice_counts(self) -> jax.Array:
    """Return int32 [G, E], the number of tokens of a group that chose an expert, before drops."""
    return choice_counts(self.expert_index, self.num_experts)

  def expert_load(self) -> jax.Array:
    """Return float32 [E], each expert's share of all choices, before drops; their sum is 1 (0 without choices)."""
    counts = jnp.sum(self.choice_counts(), axis=0)
    return ratio(counts, jnp.sum(counts))

  def dropped_fraction(self) -> jax.Array:
    """Return float32 [], the share of dropped choices, without those of ignored padding."""
    part, whole = self._drops()
    return ratio(jnp.sum(part), jnp.sum(whole))

  def _drops(self) -> tuple[jax.Array, jax.Array]:
    """Return int32 [G, T] twice: dropped choices of a token, and all choices; 0 for ignored padding."""
    counted = self.chosen()
    if self.token_mask is not None:
      counted = jnp.logical_and(counted, self.token_mask[..., None])
    lost = jnp.logical_and(counted, jnp.logical_not(self.kept()))
    return jnp.sum(lost, axis=-1), jnp.sum(counted, axis=-1)

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Return float32 [], the share of tokens that no expert computes, without ignored padding.

    It is T5X's metric, except if padding is routed: T5X counts such padding as computed, but not as tokens, so that its
    value is lower and may be negative.
    """
    return _left_behind(jnp.any(self.kept(), axis=-1), self.token_mask)

  def expert_usage(self) -> jax.Array:
    """Return float32 [], the share of filled slots of all buffers (1 if dropless). T5X's metric."""
    if self.capacity is None:
      return jnp.ones([], jnp.float32)
    num_slots = self.expert_index.shape[0] * self.num_experts * self.capacity
    return jnp.sum(self.kept()).astype(jnp.float32) / num_slots

  def drops_by_position(
    self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS
  ) -> jax.Array:
    """Return float32 [num_bins], the share of dropped choices by position in the sequence.

    Args:
      batch: number of sequences. Tokens of groups beyond `batch * length` are padding and excluded.
      length: number of tokens of a sequence; sequences are consecutive in the tokens of the groups.
      num_bins: number of equal parts of a sequence. A part without choices has 0.
    """
    return _share_by_position(*self._drops(), batch, length, num_bins)

  def _drop_weights(self, batch, length):
    counted = self._drops()[1]
    return {
      'expert_load': jnp.sum(self.chosen()),
      'choices_dropped': jnp.sum(counted),
      'drops_by_position': _sum_by_position(counted, batch, length, NUM_POSITION_BINS),
    }


@flax.struct.dataclass
class ExpertChoice(ChoiceRouting):
  """Result of expert choice: the tokens of every expert.

  Attributes:
    token_index: int32 [G, E, C], the c-th token of an expert; `num_tokens` (one past the end) for empty slots. An
      expert's tokens are distinct.
    gates: float32 [G, E, C], weights of the experts' outputs; 0 for empty slots.
    probs: float32 [G, T, E], from which the gates were selected.
    auxiliary_loss: float32 [], always 0, since all experts have the same load.
    router_z_loss: float32 [].
    num_tokens: number of tokens of a group, T.
    token_mask: bool [G, T], False for ignored padding; None for no padding. For metrics.
    padding_in_losses: True if the mean of the z-loss includes ignored padding.
  """

  token_index: jax.Array
  gates: jax.Array
  probs: jax.Array
  auxiliary_loss: jax.Array
  router_z_loss: jax.Array
  num_tokens: int = flax.struct.field(pytree_node=False)
  token_mask: jax.Array | None = dataclasses.field(default=None)
  padding_in_losses: bool = flax.struct.field(pytree_node=False, default=True)

  @property
  def num_experts(self) -> int:
    """Number of experts, E."""
    return self.token_index.shape[1]

  @property
  def capacity(self) -> int:
    """Number of tokens of an expert, C."""
    return self.token_index.shape[2]

  @property
  def forms(self) -> tuple[str, ...]:
    """Supported forms of dispatch."""
    return ('capacity', 'einsum')

  @property
  def num_slots(self) -> int:
    """Number of slots, C."""
    return self.capacity

  @property
  def num_choices(self) -> int:
    """G * T * E; the choice of a token by an expert has the id token * E + expert."""
    return self.token_index.shape[0] * self.num_tokens * self.num_experts

  def masks(self) -> tuple[jax.Array, jax.Array]:
    """Return (dispatch weights, combine weights), float32 [G, T, E, C] each."""
    # [groups, experts, slots, tokens]: zeros for empty slots, whose token is out of range.
    chosen = jax.nn.one_hot(self.token_index, self.num_tokens, dtype=jnp.float32)
    dispatch = jnp.moveaxis(chosen, 3, 1)
    combine = jnp.einsum('gect,gec->gtec', chosen, self.gates)
    return dispatch, combine

  def choice_ids(self) -> jax.Array:
    """Return int32 [E, G, C], the choice of each slot."""
    num_groups, num_experts, _ = self.token_index.shape
    if num_experts * (num_groups * self.num_tokens + 1) >= 2**31:
      raise ConfigError(
        f'The number of choices of {num_experts} experts among {num_groups} x {self.num_tokens} tokens '
        'must be below 2**31. Use a smaller batch, or micro-batches.'
      )
    token, _ = self.slots()
    expert = jnp.arange(num_experts, dtype=jnp.int32)[:, None, None]
    return token * num_experts + expert

  def slots(self) -> tuple[jax.Array, jax.Array]:
    """Return the token of each slot, int32 [E, G, C], and its gate."""
    num_groups = self.token_index.shape[0]
    group = jnp.arange(num_groups, dtype=jnp.int32)[:, None, None]
    # [groups, experts, slots]: tokens numbered over all groups; one past the end for empty slots.
    in_batch = group * self.num_tokens + self.token_index
    token = jnp.where(self.kept(), in_batch, num_groups * self.num_tokens).astype(jnp.int32)
    return jnp.moveaxis(token, 1, 0), jnp.moveaxis(self.gates, 1, 0)

  def through_buffers(self, tokens: jax.Array, experts_fn: ExpertsFn) -> jax.Array:
    """Return the experts' weighted outputs, added by a scatter because a token may have any number of choices.

    Args:
      tokens: [G, T, D].
      experts_fn: function from the slots of all experts to their outputs.
    """
    token, gates = self.slots()
    # [experts, groups, slots, width]: zeros in empty slots.
    buffers = jnp.take(tokens, token, axis=0, mode='fill', fill_value=0)
    outputs = experts_fn(buffers, self.choice_ids()).astype(jnp.float32)
    weighted = outputs * gates[..., None]
    # [groups * tokens, width]: float32, since a token sums outputs of any number of experts.
    total = jnp.zeros(tokens.shape, jnp.float32).at[token].add(weighted, mode='drop')
    return total.astype(tokens.dtype)

  def record(self) -> dict[str, jax.Array]:
    """Return `token_index`, int32 [G, E, C], and `gates`, float32 [G, E, C], by name."""
    return {'token_index': self.token_index, 'gates': self.gates}

  def kept(self) -> jax.Array:
    """Return bool [G, E, C], True for filled slots."""
    return self.token_index < self.num_tokens

  def times_chosen(self) -> jax.Array:
    """Return int32 [G, T], the number of experts of each token."""
    groups = self.token_index.shape[0]
    flat = self.token_index.reshape(groups, -1)
    zeros = jnp.zeros((groups, self.num_tokens), jnp.int32)
    # Empty slots point past the end, and additions there are dropped.
    return jax.vmap(lambda count, index: count.at[index].add(1, mode='drop'))(zeros, flat)

  def expert_load(self) -> jax.Array:
    """Return float32 [E], each expert's share of all choices; their sum is 1 (0 without choices)."""
    counts = jnp.sum(self.kept(), axis=(0, 2))
    return ratio(counts, jnp.sum(counts))

  def dropped_fraction(self) -> jax.Array:
    """Return float32 [], the share of tokens that no expert chose; experts drop no choice."""
    return self.fraction_tokens_left_behind()

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Return float32 [], the share of tokens that no expert chose, without ignored padding.

    It is T5X's metric, except if padding is routed; see `TokenChoice`.
    """
    return _left_behind(self.times_chosen() > 0, self.token_mask)

  def expert_usage(self) -> jax.Array:
    """Return float32 [], the share of filled slots: 1 unless a group has too few tokens. T5X's metric."""
    return jnp.sum(self.kept()).astype(jnp.float32) / self.token_index.size

  def drops_by_position(
    self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS
  ) -> jax.Array:
    """Return float32 [num_bins], the share of tokens that no expert chose, by position in the sequence.

    Args:
      batch: number of sequences. Tokens of groups beyond `batch * length` are padding and excluded.
      length: number of tokens of a sequence; sequences are consecutive in the tokens of the groups.
      num_bins: number of equal parts of a sequence. A part without tokens has 0.
    """
    tokens = self._counted_tokens()
    left_behind = jnp.where(self.times_chosen() > 0, 0, tokens)
    return _share_by_position(left_behind, tokens, batch, length, num_bins)

  def _counted_tokens(self) -> jax.Array:
    """Return int32 [G, T], 1 for tokens and 0 for ignored padding."""
    if self.token_mask is None:
      return jnp.ones(self.probs.shape[:2], jnp.int32)
    return self.token_mask.astype(jnp.int32)

  def _drop_weights(self, batch, length):
    tokens = self._counted_tokens()
    return {
      'expert_load': jnp.sum(self.kept()),
      'choices_dropped': jnp.sum(tokens),
      'drops_by_position': _sum_by_position(tokens, batch, length, NUM_POSITION_BINS),
    }


@flax.struct.dataclass
class RecordedChoice:
  """Recorded choices of an earlier pass, which a router can repeat.

  Attributes:
    index: int32, `TokenChoice.expert_index` [G, T, K] or `ExpertChoice.token_index` [G, E, C] of that pass.
    gates: recorded gates, float32 of the same shape; None to compute them from the current probabilities of the
      recorded choices, so that the router gets gradients.
  """

  index: jax.Array
  gates: jax.Array | None = None

  def check(self, shape: tuple[int, ...]) -> None:
    """Raise ConfigError unless `index` are integers of `shape`, and `gates` have the same shape."""
    shapes = [tuple(self.index.shape)]
    if self.gates is not None:
      shapes.append(tuple(self.gates.shape))
    is_integer = jnp.issubdtype(self.index.dtype, jnp.integer)
    if set(shapes) != {tuple(shape)} or not is_integer:
      raise checks.invalid(
        '',
        'recorded',
        f'integers of shape {tuple(shape)}',
        f'{self.index.dtype} of {shapes}',
        'Use the batch, group size, number of choices and capacity of the recorded run.',
      )


def choice_counts(expert_index: jax.Array, num_experts: int) -> jax.Array:
  """Return int32 [G, E], the occurrences of each of `num_experts` experts in `expert_index` int32 [G, ...]."""
  experts = jnp.arange(num_experts, dtype=expert_index.dtype)
  flat = expert_index.reshape(expert_index.shape[0], -1, 1)
  return jnp.sum(flat == experts, axis=1, dtype=jnp.int32)


def _left_behind(computed: jax.Array, token_mask: jax.Array | None) -> jax.Array:
  if token_mask is None:
    return 1.0 - jnp.sum(computed).astype(jnp.float32) / computed.size
  num_tokens = jnp.sum(token_mask)
  num_computed = jnp.sum(jnp.logical_and(computed, token_mask))
  return ratio(num_tokens - num_computed, num_tokens)


def _share_by_position(
  part: jax.Array, whole: jax.Array, batch: int, length: int, num_bins: int
) -> jax.Array:
  """Return float32 [num_bins], sums of `part` over sums of `whole`, int32 [G, T] each, by part of the sequence."""
  part_by_bin = _sum_by_position(part, batch, length, num_bins)
  whole_by_bin = _sum_by_position(whole, batch, length, num_bins)
  return ratio(part_by_bin, whole_by_bin)


def _sum_by_position(counts: jax.Array, batch: int, length: int, num_bins: int) -> jax.Array:
  """Return int32 [num_bins], sums of `counts` int32 [G, T] by part of the sequence."""
  if batch * length > counts.size:
    raise ConfigError(
      f'The batch must have at most as many tokens as were routed, {counts.size}, got {batch} '
      f'sequences of {length} tokens.'
    )
  # [length]: the part of the sequence that a position belongs to.
  bins = jnp.arange(length) * num_bins // length
  # Groups are consecutive tokens of the batch, and padded to equal sizes at the end.
  of_batch = counts.reshape(-1)[: batch * length]
  by_position = jnp.sum(of_batch.reshape(batch, length), axis=0)
  return jnp.zeros([num_bins], jnp.int32).at[bins].add(by_position.astype(jnp.int32))
