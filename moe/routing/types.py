"""What routers return: which expert computes which token, at which place of its buffer, and with which weight.

Letters of dims: G groups, T tokens of a group, E experts, C capacity, K choices of a token.
"""

import abc
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from t5x_lite.errors import ConfigError

# Number of bins of `drops_by_position`.
NUM_POSITION_BINS = 16


class _Choice(abc.ABC):
  """Metrics that do not hang on who chooses."""

  @abc.abstractmethod
  def kept(self) -> jax.Array:
    """Returns bool, of the shape of the gates: which choices are computed."""

  def router_confidence(self) -> jax.Array:
    """Returns float32 []: mean gate of the choices that are computed (0 if there are none). T5X's metric."""
    return _ratio(jnp.sum(self.gates), jnp.sum(self.kept()))

  def router_entropy(self) -> jax.Array:
    """Returns float32 []: mean entropy of a token's distribution over experts, in nats; at most log(E)."""
    return _entropy(self.probs, self.token_mask)

  def weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Returns what each loss or metric is divided by, so that those of several micro-batches can be combined.

    The value of a batch is the mean of the values of its micro-batches with these weights. A name that is absent has
    the same weight in micro-batches of the same size.

    Args:
      batch: see `drops_by_position`.
      length: likewise.

    Returns:
      Name of the loss or metric to float32 []; [num_bins] for `drops_by_position`.
    """
    kept = jnp.sum(self.kept())
    tokens = self.probs.shape[0] * self.probs.shape[1] if self.token_mask is None else jnp.sum(self.token_mask)
    counts = {'fraction_tokens_left_behind': tokens, 'router_entropy': tokens, 'router_confidence': kept,
              'receive_drops': kept, **self._drop_weights(batch, length)}
    if not self.padding_in_losses and self.token_mask is not None:
      counts |= {'auxiliary_loss': tokens, 'router_z_loss': tokens}
    return {name: jnp.asarray(count, jnp.float32) for name, count in counts.items()}

  @abc.abstractmethod
  def _drop_weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Returns the `weights` of load and drops."""


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

  def chosen(self) -> jax.Array:
    """Returns bool [G, T, K]: which choices count, those that are dropped for want of a place included."""
    return self.expert_index < self.num_experts

  def kept(self) -> jax.Array:
    """Returns bool [G, T, K]: which choices are computed."""
    if self.position is None:
      return self.chosen()
    return jnp.logical_and(self.chosen(), self.position < self.capacity)

  def choice_counts(self) -> jax.Array:
    """Returns int32 [G, E]: how many tokens of a group chose an expert, before drops."""
    return choice_counts(self.expert_index, self.num_experts)

  def expert_load(self) -> jax.Array:
    """Returns float32 [E]: each expert's share of all choices, before drops. They sum to 1 (to 0 without choices)."""
    counts = jnp.sum(self.choice_counts(), axis=0)
    return _ratio(counts, jnp.sum(counts))

  def dropped_fraction(self) -> jax.Array:
    """Returns float32 []: share of the choices that found no place. Those of ignored padding do not count."""
    part, whole = self._drops()
    return _ratio(jnp.sum(part), jnp.sum(whole))

  def _drops(self) -> tuple[jax.Array, jax.Array]:
    """Returns int32 [G, T]: the choices of a token that found no place, and all of them; 0 for ignored padding."""
    counted = self.chosen()
    if self.token_mask is not None:
      counted = jnp.logical_and(counted, self.token_mask[..., None])
    lost = jnp.logical_and(counted, jnp.logical_not(self.kept()))
    return jnp.sum(lost, axis=-1), jnp.sum(counted, axis=-1)

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Returns float32 []: share of the tokens that no expert computes. Ignored padding is no token.

    T5X's metric, except where padding takes places: T5X counts such padding as computed, but not as tokens, so that its
    number is lower, and may be below 0.
    """
    return _left_behind(jnp.any(self.kept(), axis=-1), self.token_mask)

  def expert_usage(self) -> jax.Array:
    """Returns float32 []: share of the places of all buffers that are filled (1 if dropless). T5X's metric."""
    if self.capacity is None:
      return jnp.ones([], jnp.float32)
    num_places = self.expert_index.shape[0] * self.num_experts * self.capacity
    return jnp.sum(self.kept()).astype(jnp.float32) / num_places

  def drops_by_position(self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS) -> jax.Array:
    """Returns float32 [num_bins]: share of the choices dropped, by place in the sequence.

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

  def kept(self) -> jax.Array:
    """Returns bool [G, E, C]: which places have a token."""
    return self.token_index < self.num_tokens

  def times_chosen(self) -> jax.Array:
    """Returns int32 [G, T]: by how many experts a token is computed."""
    groups = self.token_index.shape[0]
    flat = self.token_index.reshape(groups, -1)
    zeros = jnp.zeros((groups, self.num_tokens), jnp.int32)
    # Places without a token point past the end: such additions are dropped.
    return jax.vmap(lambda count, index: count.at[index].add(1, mode='drop'))(zeros, flat)

  def expert_load(self) -> jax.Array:
    """Returns float32 [E]: each expert's share of all choices. They sum to 1 (to 0 without choices)."""
    counts = jnp.sum(self.kept(), axis=(0, 2))
    return _ratio(counts, jnp.sum(counts))

  def dropped_fraction(self) -> jax.Array:
    """Returns float32 []: share of the tokens that no expert chose; no choice of an expert is dropped."""
    return self.fraction_tokens_left_behind()

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Returns float32 []: share of the tokens that no expert chose. Ignored padding is no token.

    T5X's metric, except where padding takes places; see `TokenChoice`.
    """
    return _left_behind(self.times_chosen() > 0, self.token_mask)

  def expert_usage(self) -> jax.Array:
    """Returns float32 []: share of the places that have a token: 1 unless a group has too few. T5X's metric."""
    return jnp.sum(self.kept()).astype(jnp.float32) / self.token_index.size

  def drops_by_position(self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS) -> jax.Array:
    """Returns float32 [num_bins]: share of the tokens that no expert chose, by place in the sequence.

    Args:
      batch: sequences. Tokens of the groups beyond `batch * length` are taken for filling and left out.
      length: tokens of a sequence; sequences follow each other in the tokens of the groups.
      num_bins: parts of equal length into which a sequence is cut. A part without tokens has 0.
    """
    tokens = self._counted_tokens()
    return _share_by_position(jnp.where(self.times_chosen() > 0, 0, tokens), tokens, batch, length, num_bins)

  def _counted_tokens(self) -> jax.Array:
    """Returns int32 [G, T]: 1, and 0 for ignored padding."""
    if self.token_mask is None:
      return jnp.ones(self.probs.shape[:2], jnp.int32)
    return self.token_mask.astype(jnp.int32)

  def _drop_weights(self, batch, length):
    tokens = self._counted_tokens()
    return {'expert_load': jnp.sum(self.kept()), 'choices_dropped': jnp.sum(tokens),
            'drops_by_position': _sum_by_position(tokens, batch, length, NUM_POSITION_BINS)}


# What a router returns.
Routing = TokenChoice | ExpertChoice


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
  """Returns int32 [G, E]: how often each expert occurs in `expert_index` int32 [G, ...]; others than 0..E-1 nowhere."""
  experts = jnp.arange(num_experts, dtype=expert_index.dtype)
  flat = expert_index.reshape(expert_index.shape[0], -1, 1)
  return jnp.sum(flat == experts, axis=1, dtype=jnp.int32)


def _ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns part / whole in float32; 0 where `whole` is 0."""
  return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)


def _left_behind(computed: jax.Array, token_mask: jax.Array | None) -> jax.Array:
  if token_mask is None:
    return 1.0 - jnp.sum(computed).astype(jnp.float32) / computed.size
  num_tokens = jnp.sum(token_mask)
  return _ratio(num_tokens - jnp.sum(jnp.logical_and(computed, token_mask)), num_tokens)


def _entropy(probs: jax.Array, token_mask: jax.Array | None) -> jax.Array:
  # Scores that are no distribution (sigmoids) are made one; padding of zero probability has no entropy.
  total = jnp.sum(probs, axis=-1, keepdims=True)
  probs = probs / jnp.where(total > 1e-18, total, 1.0)
  entropy = -jnp.sum(jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), 0.0), axis=-1)
  if token_mask is None:
    return jnp.mean(entropy)
  return _ratio(jnp.sum(jnp.where(token_mask, entropy, 0.0)), jnp.sum(token_mask))


def _share_by_position(part: jax.Array, whole: jax.Array, batch: int, length: int, num_bins: int) -> jax.Array:
  """Returns sums of int32 [G, T] `part` over sums of `whole`, in `num_bins` parts of the sequence."""
  return _ratio(*(_sum_by_position(counts, batch, length, num_bins) for counts in (part, whole)))


def _sum_by_position(counts: jax.Array, batch: int, length: int, num_bins: int) -> jax.Array:
  """Returns int32 [num_bins]: sums of int32 [G, T] `counts` over the parts of the sequence."""
  if batch * length > counts.size:
    raise ConfigError(f'got {batch} sequences of {length} tokens for routing of {counts.size} tokens; expected at most '
                      'as many. Give the batch and length of the tokens that were routed.')
  bins = jnp.arange(length) * num_bins // length
  by_place = jnp.sum(counts.reshape(-1)[:batch * length].reshape(batch, length), axis=0)
  return jnp.zeros([num_bins], jnp.int32).at[bins].add(by_place.astype(jnp.int32))
