"""The contract of routings, which routers return, with default metrics for those that drop no token.

Letters of dims: G groups, T tokens of a group, E experts, C places of an expert's buffer for a group, D width.
"""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Number of bins of `drops_by_position`.
NUM_POSITION_BINS = 16
# Experts on buffers <float>[E, G, C, D] of choices with these ids, int32 [E, G, C]: the same shape again.
ExpertsFn = Callable[[jax.Array, jax.Array], jax.Array]


class Routing(abc.ABC):
  """Abstract result of a router: a pytree (`flax.struct.dataclass`) of arrays with a dim over groups first.

  It says which forms of dispatch it takes, and knows how to fill and empty buffers. Every routing takes 'einsum', by
  its `masks`, unless it is dropless; these may weigh any number of tokens for a place. `TokenChoice` and `ExpertChoice`
  take further forms. What is computed here for metrics is that of a routing that drops nothing.

  Every routing has the fields `probs` float32 [G, T, E], how much of a token goes to each expert; `auxiliary_loss` and
  `router_z_loss`, float32 []; `num_experts`; `token_mask` bool [G, T], False for ignored padding, or None; and
  `padding_in_losses`, whether the means of the losses are over that too.
  """

  @property
  @abc.abstractmethod
  def forms(self) -> tuple[str, ...]:
    """The forms of dispatch that the routing takes, of `dispatch.METHODS`; 'auto' is the first."""

  @property
  @abc.abstractmethod
  def num_places(self) -> int:
    """C, the places of an expert's buffer for a group."""

  @abc.abstractmethod
  def masks(self) -> tuple[jax.Array, jax.Array]:
    """Return float32 [G, T, E, C] twice: what of a token a place has, and what of a place's output a token gets."""

  @property
  @abc.abstractmethod
  def num_choices(self) -> int:
    """The number of choices that `choice_ids` tells apart."""

  @abc.abstractmethod
  def choice_ids(self) -> jax.Array:
    """Return int32 [E, G, C]: the choice that a place holds, by which dropout draws; `num_choices` or more: none."""

  def for_dispatch(self) -> 'Routing':
    """Return the routing without what dispatch does not read: arrays with a dim over groups are left."""
    return self.replace(probs=None, auxiliary_loss=None, router_z_loss=None, token_mask=None)

  def record(self) -> dict[str, jax.Array]:
    """Return the decisions with which a later pass can repeat this routing; {} if it has none."""
    return {}

  def router_confidence(self) -> jax.Array:
    """Return float32 []: mean over the tokens of the largest share that an expert has of one."""
    largest = jnp.max(self.probs, axis=-1)
    if self.token_mask is None:
      return jnp.mean(largest)
    return ratio(jnp.sum(jnp.where(self.token_mask, largest, 0.0)), jnp.sum(self.token_mask))

  def expert_load(self) -> jax.Array:
    """Return float32 [E]: each expert's share of all tokens. They sum to 1."""
    load = jnp.sum(self.probs, axis=(0, 1))
    return load / jnp.maximum(jnp.sum(load), 1e-9)

  def dropped_fraction(self) -> jax.Array:
    """Return float32 []: 0."""
    return jnp.zeros([], jnp.float32)

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Return float32 []: 0."""
    return jnp.zeros([], jnp.float32)

  def expert_usage(self) -> jax.Array:
    """Return float32 []: 1, all places are filled."""
    return jnp.ones([], jnp.float32)

  def drops_by_position(self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS) -> jax.Array:
    """Return float32 [num_bins]: 0; see `TokenChoice`."""
    del batch, length
    return jnp.zeros([num_bins], jnp.float32)

  def router_entropy(self) -> jax.Array:
    """Return float32 []: mean entropy of a token's distribution over experts, in nats; at most log(E)."""
    return _entropy(self.probs, self.token_mask)

  def weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Return what each loss or metric is divided by, so that those of several micro-batches can be combined.

    The value of a batch is the mean of the values of its micro-batches with these weights. A name that is absent has
    the same weight in micro-batches of the same size.

    Args:
      batch: see `drops_by_position`.
      length: likewise.

    Returns:
      Name of the loss or metric to float32 []; [num_bins] for `drops_by_position`.
    """
    tokens = self.probs.shape[0] * self.probs.shape[1] if self.token_mask is None else jnp.sum(self.token_mask)
    counts = {'fraction_tokens_left_behind': tokens, 'router_entropy': tokens, 'router_confidence': tokens,
              **self._choice_weights(batch, length)}
    if not self.padding_in_losses and self.token_mask is not None:
      counts |= {'auxiliary_loss': tokens, 'router_z_loss': tokens}
    return {name: jnp.asarray(count, jnp.float32) for name, count in counts.items()}

  def _choice_weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Return the `weights` of what hangs on choices."""
    del batch, length
    return {}


def ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
  """Return part / whole in float32; 0 where `whole` is 0."""
  return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)


def _entropy(probs: jax.Array, token_mask: jax.Array | None) -> jax.Array:
  # Scores that are no distribution (sigmoids) are made one; padding of zero probability has no entropy.
  total = jnp.sum(probs, axis=-1, keepdims=True)
  probs = probs / jnp.where(total > 1e-18, total, 1.0)
  entropy = -jnp.sum(jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), 0.0), axis=-1)
  if token_mask is None:
    return jnp.mean(entropy)
  return ratio(jnp.sum(jnp.where(token_mask, entropy, 0.0)), jnp.sum(token_mask))
