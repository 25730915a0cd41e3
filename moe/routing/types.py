"""Routings by choice: which expert computes which token, at which place of its buffer, and with which weight.

Letters of dims: G groups, T tokens of a group, E experts, C capacity, K choices of a token.
"""

import abc
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from moe.routing import plan as plans
from moe.routing.result import NUM_POSITION_BINS, ExpertsFn, Routing, ratio
from t5x_lite.errors import ConfigError

class _Choice(Routing):
  """What does not hang on who chooses."""

  @abc.abstractmethod
  def kept(self) -> jax.Array:
    """Return bool, of the shape of the gates: which choices are computed."""

  @abc.abstractmethod
  def placed(self) -> tuple[jax.Array, jax.Array]:
    """Return what each place holds: one of all G * T tokens, int32 [E, G, C], past the last: none; and its gate."""

  @abc.abstractmethod
  def through_buffers(self, tokens: jax.Array, experts_fn: ExpertsFn) -> jax.Array:
    """Return what the experts make of <float>[G * T, D], the same shape; their buffers are filled by gathers."""

  def router_confidence(self) -> jax.Array:
    """Return float32 []: mean gate of the choices that are computed (0 if there are none). T5X's metric."""
    return ratio(jnp.sum(self.gates), jnp.sum(self.kept()))

  def _choice_weights(self, batch, length):
    kept = jnp.sum(self.kept())
    return {'router_confidence': kept, 'receive_drops': kept, **self._drop_weights(batch, length)}

  @abc.abstractmethod
  def _drop_weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Return the `weights` of load and drops."""


@flax.struct.dataclass
class TokenChoice(_Choice):
  """Experts chosen for every token.

  Attributes:
    expert_index: int32 [G, T, K], the k-th choice of a token; `num_experts` (one past the end) where the choice counts
      for nothing: padding that is ignored. A token's choices are distinct.
    gates: float32 [G, T, K], weights of the experts' outputs; 0 where a choice is dropped or counts for nothing.
    position: int32 [G, T, K], place in the buffer that an expert has for the group; at or above `capacity` for what is
      dropped or counts for nothing. None: dropless.
    probs: float32 [G, T, E], what the gates were taken from.
    auxiliary_loss: float32 [], load-balancing loss.
    router_z_loss: float32 [].
    num_experts: E.
    capacity: C, places of a buffer; None: dropless. A group fills no more than T of them.
    token_mask: bool [G, T], False for padding that is ignored; None: no token is. For metrics.
    padding_in_losses: the means of the losses are over ignored padding too.
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
    """K, the number of choices of a token."""
    return self.expert_index.shape[-1]

  @property
  def forms(self) -> tuple[str, ...]:
    """See base class."""
    return ('grouped',) if self.position is None else ('capacity', 'einsum', 'grouped')

  @property
  def num_places(self) -> int:
    """C, or the group's tokens where they are fewer: a token chooses an expert once at most."""
    return min(self.capacity, self.expert_index.shape[1])

  @property
  def num_choices(self) -> int:
    """G * T * K: a token's choice k has the id token * K + k."""
    return self.gates.size

  def _buffers(self) -> tuple[plans.RowPlan, tuple[int, int, int]]:
    """Return the plan of the buffers, and their (E, G, C)."""
    plan = plans.plan_buffers(self.expert_index, self.position, self.num_experts, self.num_places)
    return plan, (self.num_experts, self.expert_index.shape[0], self.num_places)

  def masks(self) -> tuple[jax.Array, jax.Array]:
    """See base class."""
    experts = jax.nn.one_hot(self.expert_index, self.num_experts, dtype=jnp.float32)
    places = jax.nn.one_hot(self.position, self.num_places, dtype=jnp.float32)
    return (jnp.einsum('gtke,gtkc->gtec', experts, places),
            jnp.einsum('gtke,gtkc,gtk->gtec', experts, places, self.gates))

  def choice_ids(self) -> jax.Array:
    """See base class."""
    plan, shape = self._buffers()
    return plan.row_choice.reshape(shape)

  def placed(self) -> tuple[jax.Array, jax.Array]:
    """See base class."""
    choice = self.choice_ids()
    return choice // self.num_selected, jnp.take(self.gates.reshape(-1), choice, mode='fill', fill_value=0)

  def through_buffers(self, tokens: jax.Array, experts_fn: ExpertsFn) -> jax.Array:
    """See base class."""
    plan, shape = self._buffers()
    rows = experts_fn(plans.dispatch(tokens, plan).reshape(*shape, -1), plan.row_choice.reshape(shape))
    return plans.combine(rows.reshape(-1, tokens.shape[-1]), self.gates.reshape(tokens.shape[0], -1), plan)

  def record(self) -> dict[str, jax.Array]:
    """See base class."""
    return {'expert_index': self.expert_index, 'gates': self.gates}

  def chosen(self) -> jax.Array:
    """Return bool [G, T, K]: which choices count, those that are dropped for want of a place included."""
    return self.expert_index < self.num_experts

  def kept(self) -> jax.Array:
    """Return bool [G, T, K]: which choices are computed."""
    if self.position is None:
      return self.chosen()
    return jnp.logical_and(self.chosen(), self.position < self.capacity)

  def choice_counts(self) -> jax.Array:
    """Return int32 [G, E]: how many tokens of a group chose an expert, before drops."""
    return choice_counts(self.expert_index, self.num_experts)

  def expert_load(self) -> jax.Array:
    """Return float32 [E]: each expert's share of all choices, before drops. They sum to 1 (to 0 without choices)."""
    counts = jnp.sum(self.choice_counts(), axis=0)
    return ratio(counts, jnp.sum(counts))

  def dropped_fraction(self) -> jax.Array:
    """Return float32 []: share of the choices that found no place. Those of ignored padding do not count."""
    part, whole = self._drops()
    return ratio(jnp.sum(part), jnp.sum(whole))

  def _drops(self) -> tuple[jax.Array, jax.Array]:
    """Return int32 [G, T]: the choices of a token that found no place, and all of them; 0 for ignored padding."""
    counted = self.chosen()
    if self.token_mask is not None:
      counted = jnp.logical_and(counted, self.token_mask[..., None])
    lost = jnp.logical_and(counted, jnp.logical_not(self.kept()))
    return jnp.sum(lost, axis=-1), jnp.sum(counted, axis=-1)

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Return float32 []: share of the tokens that no expert computes. Ignored padding is no token.

    T5X's metric, except where padding takes places: T5X counts such padding as computed, but not as tokens, so that its
    number is lower, and may be below 0.
    """
    return _left_behind(jnp.any(self.kept(), axis=-1), self.token_mask)

  def expert_usage(self) -> jax.Array:
    """Return float32 []: share of the places of all buffers that are filled (1 if dropless). T5X's metric."""
    if self.capacity is None:
      return jnp.ones([], jnp.float32)
    num_places = self.expert_index.shape[0] * self.num_experts * self.capacity
    return jnp.sum(self.kept()).astype(jnp.float32) / num_places

  def drops_by_position(self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS) -> jax.Array:
    """Return float32 [num_bins]: share of the choices dropped, by place in the sequence.

    Args:
      batch: sequences. Tokens of the groups beyond `batch * length` are taken for filling and left out.
      length: tokens of a sequence; sequences follow each other in the tokens of the groups.
      num_bins: parts of equal length into which a sequence is cut. A part without choices has 0.
    """
    return _share_by_position(*self._drops(), batch, length, num_bins)

  def _drop_weights(self, batch, length):
    counted = self._drops()[1]
    return {'expert_load': jnp.sum(self.chosen()), 'choices_dropped': jnp.sum(counted),
            'drops_by_position': _sum_by_position(counted, batch, length, NUM_POSITION_BINS)}


@flax.struct.dataclass
class ExpertChoice(_Choice):
  """Tokens chosen by every expert.

  Attributes:
    token_index: int32 [G, E, C], the c-th token of an expert; `num_tokens` (one past the end) where there is none. An
      expert's tokens are distinct.
    gates: float32 [G, E, C], weights of the experts' outputs; 0 where there is no token.
    probs: float32 [G, T, E], what the gates were taken from.
    auxiliary_loss: float32 [], always 0: every expert has the same load.
    router_z_loss: float32 [].
    num_tokens: T.
    token_mask: bool [G, T], False for padding that is ignored; None: no token is. For metrics.
    padding_in_losses: the mean of the z-loss is over ignored padding too.
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
    """E, the number of experts."""
    return self.token_index.shape[1]

  @property
  def capacity(self) -> int:
    """C, the tokens of an expert."""
    return self.token_index.shape[2]

  @property
  def forms(self) -> tuple[str, ...]:
    """See base class."""
    return ('capacity', 'einsum')

  @property
  def num_places(self) -> int:
    """C."""
    return self.capacity

  @property
  def num_choices(self) -> int:
    """G * T * E: the choice of a token by an expert has the id token * E + expert."""
    return self.token_index.shape[0] * self.num_tokens * self.num_experts

  def masks(self) -> tuple[jax.Array, jax.Array]:
    """See base class."""
    chosen = jax.nn.one_hot(self.token_index, self.num_tokens, dtype=jnp.float32)  # [G, E, C, T]
    return jnp.moveaxis(chosen, 3, 1), jnp.einsum('gect,gec->gtec', chosen, self.gates)

  def choice_ids(self) -> jax.Array:
    """See base class."""
    num_groups, num_experts, _ = self.token_index.shape
    if num_experts * (num_groups * self.num_tokens + 1) >= 2**31:
      raise ConfigError(f'{num_experts} experts that choose among {num_groups} x {self.num_tokens} tokens have more '
                        'choices than int32 numbers. Use a smaller batch, or micro-batches.')
    return self.placed()[0] * num_experts + jnp.arange(num_experts, dtype=jnp.int32)[:, None, None]

  def placed(self) -> tuple[jax.Array, jax.Array]:
    """See base class."""
    num_groups, num_tokens = self.token_index.shape[0], self.num_tokens
    group = jnp.arange(num_groups, dtype=jnp.int32)[:, None, None]
    token = jnp.where(self.kept(), group * num_tokens + self.token_index, num_groups * num_tokens).astype(jnp.int32)
    return jnp.moveaxis(token, 1, 0), jnp.moveaxis(self.gates, 1, 0)

  def through_buffers(self, tokens: jax.Array, experts_fn: ExpertsFn) -> jax.Array:
    """See base class; a token has any number of choices, so their sum is a scatter."""
    token, gates = self.placed()
    rows = jnp.take(tokens, token, axis=0, mode='fill', fill_value=0)
    weighted = experts_fn(rows, self.choice_ids()).astype(jnp.float32) * gates[..., None]
    return jnp.zeros(tokens.shape, jnp.float32).at[token].add(weighted, mode='drop').astype(tokens.dtype)

  def record(self) -> dict[str, jax.Array]:
    """See base class."""
    return {'token_index': self.token_index, 'gates': self.gates}

  def kept(self) -> jax.Array:
    """Return bool [G, E, C]: which places have a token."""
    return self.token_index < self.num_tokens

  def times_chosen(self) -> jax.Array:
    """Return int32 [G, T]: by how many experts a token is computed."""
    groups = self.token_index.shape[0]
    flat = self.token_index.reshape(groups, -1)
    zeros = jnp.zeros((groups, self.num_tokens), jnp.int32)
    # Places without a token point past the end: such additions are dropped.
    return jax.vmap(lambda count, index: count.at[index].add(1, mode='drop'))(zeros, flat)

  def expert_load(self) -> jax.Array:
    """Return float32 [E]: each expert's share of all choices. They sum to 1 (to 0 without choices)."""
    counts = jnp.sum(self.kept(), axis=(0, 2))
    return ratio(counts, jnp.sum(counts))

  def dropped_fraction(self) -> jax.Array:
    """Return float32 []: share of the tokens that no expert chose; no choice of an expert is dropped."""
    return self.fraction_tokens_left_behind()

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Return float32 []: share of the tokens that no expert chose. Ignored padding is no token.

    T5X's metric, except where padding takes places; see `TokenChoice`.
    """
    return _left_behind(self.times_chosen() > 0, self.token_mask)

  def expert_usage(self) -> jax.Array:
    """Return float32 []: share of the places that have a token: 1 unless a group has too few. T5X's metric."""
    return jnp.sum(self.kept()).astype(jnp.float32) / self.token_index.size

  def drops_by_position(self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS) -> jax.Array:
    """Return float32 [num_bins]: share of the tokens that no expert chose, by place in the sequence.

    Args:
      batch: sequences. Tokens of the groups beyond `batch * length` are taken for filling and left out.
      length: tokens of a sequence; sequences follow each other in the tokens of the groups.
      num_bins: parts of equal length into which a sequence is cut. A part without tokens has 0.
    """
    tokens = self._counted_tokens()
    return _share_by_position(jnp.where(self.times_chosen() > 0, 0, tokens), tokens, batch, length, num_bins)

  def _counted_tokens(self) -> jax.Array:
    """Return int32 [G, T]: 1, and 0 for ignored padding."""
    if self.token_mask is None:
      return jnp.ones(self.probs.shape[:2], jnp.int32)
    return self.token_mask.astype(jnp.int32)

  def _drop_weights(self, batch, length):
    tokens = self._counted_tokens()
    return {'expert_load': jnp.sum(self.kept()), 'choices_dropped': jnp.sum(tokens),
            'drops_by_position': _sum_by_position(tokens, batch, length, NUM_POSITION_BINS)}


@flax.struct.dataclass
class RecordedChoice:
  """Choices of an earlier pass, for a router to repeat.

  Attributes:
    index: int32, `TokenChoice.expert_index` [G, T, K] or `ExpertChoice.token_index` [G, E, C] of that pass.
    gates: float32 of the same shape, to be used as they are, or None: computed from the present probabilities of the
      recorded choices, so that gradients reach the router.
  """

  index: jax.Array
  gates: jax.Array | None = None

  def check(self, shape: tuple[int, ...]) -> None:
    """Refuses records that are not of `shape`.

    Raises:
      ConfigError: another shape, or an index that is not of integers.
    """
    shapes = [self.index.shape] + ([] if self.gates is None else [self.gates.shape])
    if any(tuple(got) != tuple(shape) for got in shapes):
      raise ConfigError(f'got recorded choices of shapes {shapes}; this router makes choices of {tuple(shape)}. Replay '
                        'with the batch, group size, number of choices and capacity of the recorded run.')
    if not jnp.issubdtype(self.index.dtype, jnp.integer):
      raise ConfigError(f'got recorded choices of dtype {self.index.dtype}; expected integers. Give the indices that '
                        'were recorded, not the gates.')


def choice_counts(expert_index: jax.Array, num_experts: int) -> jax.Array:
  """Return int32 [G, E]: how often each expert occurs in `expert_index` int32 [G, ...]; others than 0..E-1 nowhere."""
  experts = jnp.arange(num_experts, dtype=expert_index.dtype)
  flat = expert_index.reshape(expert_index.shape[0], -1, 1)
  return jnp.sum(flat == experts, axis=1, dtype=jnp.int32)


def _left_behind(computed: jax.Array, token_mask: jax.Array | None) -> jax.Array:
  if token_mask is None:
    return 1.0 - jnp.sum(computed).astype(jnp.float32) / computed.size
  num_tokens = jnp.sum(token_mask)
  return ratio(num_tokens - jnp.sum(jnp.logical_and(computed, token_mask)), num_tokens)


def _share_by_position(part: jax.Array, whole: jax.Array, batch: int, length: int, num_bins: int) -> jax.Array:
  """Return sums of int32 [G, T] `part` over sums of `whole`, in `num_bins` parts of the sequence."""
  return ratio(*(_sum_by_position(counts, batch, length, num_bins) for counts in (part, whole)))


def _sum_by_position(counts: jax.Array, batch: int, length: int, num_bins: int) -> jax.Array:
  """Return int32 [num_bins]: sums of int32 [G, T] `counts` over the parts of the sequence."""
  if batch * length > counts.size:
    raise ConfigError(f'got {batch} sequences of {length} tokens for routing of {counts.size} tokens; expected at most '
                      'as many. Give the batch and length of the tokens that were routed.')
  bins = jnp.arange(length) * num_bins // length
  by_place = jnp.sum(counts.reshape(-1)[:batch * length].reshape(batch, length), axis=0)
  return jnp.zeros([num_bins], jnp.int32).at[bins].add(by_place.astype(jnp.int32))
