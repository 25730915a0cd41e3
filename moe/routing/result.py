"""Interface of routings, the results of routers, with default metrics for routings without drops.

Dims: G groups, T tokens of a group, E experts, C slots of an expert's buffer for a group, D width.
"""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Number of bins of `drops_by_position`.
NUM_POSITION_BINS = 16
# Experts: (buffers <float>[E, G, C, D], ids of their choices int32 [E, G, C]) -> outputs of the same shape.
ExpertsFn = Callable[[jax.Array, jax.Array], jax.Array]


class Routing(abc.ABC):
  """Abstract result of a router: a pytree (`flax.struct.dataclass`) of arrays whose first dim is over groups.

  It lists the supported forms of dispatch, and fills and empties buffers. Every routing with a capacity supports
  'einsum', by its `masks`, which may combine any number of tokens in a slot. `TokenChoice` and `ExpertChoice` support
  more forms. The default metrics are those of a routing without drops.

  Every routing has the fields `probs` float32 [G, T, E], the weight of each expert for a token; `auxiliary_loss` and
  `router_z_loss`, float32 []; `num_experts`; `token_mask` bool [G, T], False for ignored padding, or None; and
  `padding_in_losses`, True if the means of losses include ignored padding.
  """

  probs: jax.Array
  auxiliary_loss: jax.Array
  router_z_loss: jax.Array
  num_experts: int
  token_mask: jax.Array | None
  padding_in_losses: bool

  @property
  @abc.abstractmethod
  def forms(self) -> tuple[str, ...]:
    """Supported forms of dispatch, of `dispatch.METHODS`; 'auto' is the first."""

  @property
  @abc.abstractmethod
  def num_slots(self) -> int:
    """Number of slots of an expert's buffer for a group, C."""

  @abc.abstractmethod
  def masks(self) -> tuple[jax.Array, jax.Array]:
    """Return (dispatch weights of tokens in slots, combine weights of slots in tokens), float32 [G, T, E, C] each."""

  @property
  @abc.abstractmethod
  def num_choices(self) -> int:
    """Number of different choices of `choice_ids`."""

  @abc.abstractmethod
  def choice_ids(self) -> jax.Array:
    """Return int32 [E, G, C], the choice of each slot, for draws of dropout; `num_choices` or more for empty slots."""

  def for_dispatch(self) -> 'Routing':
    """Return the routing without fields that dispatch does not read; only arrays with a dim over groups remain."""
    # Every routing is a dataclass.
    routing: Any = self
    return dataclasses.replace(
      routing, probs=None, auxiliary_loss=None, router_z_loss=None, token_mask=None
    )

  def record(self) -> dict[str, jax.Array]:
    """Return the choices by name, with which a later pass can repeat this routing; {} if not supported."""
    return {}

  def router_confidence(self) -> jax.Array:
    """Return float32 [], the mean over tokens of their largest weight."""
    largest = jnp.max(self.probs, axis=-1)
    return _mean_over_tokens(largest, self.token_mask)

  def expert_load(self) -> jax.Array:
    """Return float32 [E], each expert's share of all tokens, with sum 1."""
    load = jnp.sum(self.probs, axis=(0, 1))
    return load / jnp.maximum(jnp.sum(load), 1e-9)

  def dropped_fraction(self) -> jax.Array:
    """Return the share of dropped choices, float32 []; here 0."""
    return jnp.zeros([], jnp.float32)

  def fraction_tokens_left_behind(self) -> jax.Array:
    """Return the share of tokens without an expert, float32 []; here 0."""
    return jnp.zeros([], jnp.float32)

  def expert_usage(self) -> jax.Array:
    """Return the share of filled slots, float32 []; here 1."""
    return jnp.ones([], jnp.float32)

  def drops_by_position(
    self, batch: int, length: int, num_bins: int = NUM_POSITION_BINS
  ) -> jax.Array:
    """Return the share of dropped choices by position, float32 [num_bins]; here 0. See `TokenChoice`."""
    del batch, length
    return jnp.zeros([num_bins], jnp.float32)

  def router_entropy(self) -> jax.Array:
    """Return float32 [], the mean entropy of a token's distribution over experts, in nats; at most log(E)."""
    return _entropy(self.probs, self.token_mask)

  def without_padding_rows(self, num_real: jax.Array) -> 'Routing':
    """Return the routing with losses whose means exclude rows that fill up a batch; by default, unchanged.

    Only for routings with a `token_mask` whose losses include ignored padding, see `padding_in_losses`.

    Args:
      num_real: float32 [], number of positions of the other rows.
    """
    del num_real
    return self

  def weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Return the weight of each loss or metric in means over batches and micro-batches.

    The value of a batch is the mean of the values of its micro-batches with these weights. Losses and metrics without
    an entry have equal weights in micro-batches of equal size.

    Args:
      batch: see `drops_by_position`.
      length: see `drops_by_position`.

    Returns:
      float32 [] by name of the loss or metric; [num_bins] for `drops_by_position`.
    """
    if self.token_mask is None:
      tokens = self.probs.shape[0] * self.probs.shape[1]
    else:
      tokens = jnp.sum(self.token_mask)
    counts = {
      'fraction_tokens_left_behind': tokens,
      'router_entropy': tokens,
      'router_confidence': tokens,
      **self._choice_weights(batch, length),
    }
    if not self.padding_in_losses and self.token_mask is not None:
      counts |= {'auxiliary_loss': tokens, 'router_z_loss': tokens}
    return {name: jnp.asarray(count, jnp.float32) for name, count in counts.items()}

  def _choice_weights(self, batch: int, length: int) -> dict[str, jax.Array]:
    """Return the `weights` of metrics that depend on choices."""
    del batch, length
    return {}


def ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
  """Return `part` / `whole` in float32; 0 if `whole` is 0."""
  return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)


def _entropy(probs: jax.Array, token_mask: jax.Array | None) -> jax.Array:
  # Scores such as sigmoids are normalized to a distribution; padding of probability 0 has entropy 0.
  total = jnp.sum(probs, axis=-1, keepdims=True)
  probs = probs / jnp.where(total > 1e-18, total, 1.0)
  # [groups, tokens, experts]: terms p log(p), 0 at p = 0, where the logarithm and its gradient are infinite.
  is_positive = probs > 0
  log_probs = jnp.log(jnp.where(is_positive, probs, 1.0))
  terms = jnp.where(is_positive, probs * log_probs, 0.0)
  entropy = -jnp.sum(terms, axis=-1)
  return _mean_over_tokens(entropy, token_mask)


def _mean_over_tokens(values: jax.Array, token_mask: jax.Array | None) -> jax.Array:
  """Return float32 [], the mean of `values` [G, T] over the tokens that are not ignored."""
  if token_mask is None:
    return jnp.mean(values)
  total = jnp.sum(jnp.where(token_mask, values, 0.0))
  return ratio(total, jnp.sum(token_mask))
