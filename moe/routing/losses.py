"""Losses of routers, in float32."""

import jax
import jax.numpy as jnp

from moe.routing.types import choice_counts


def load_balancing_loss(
  probs: jax.Array, expert_index: jax.Array, token_mask: jax.Array | None = None
) -> jax.Array:
  """Return the load-balancing loss, which is smallest for an even distribution of tokens over experts.

  `E^2 * mean over groups and experts of (share of the group's tokens that chose the expert) * (its mean probability)`:
  1 for even top-1 routing, K for even top-k. Only the probabilities have a gradient.
  https://arxiv.org/abs/2101.03961, equations (4) to (6).

  Args:
    probs: float32 [G, T, E]; 0 for ignored tokens.
    expert_index: int32 [G, T, K], distinct for a token; other indices than 0 to E - 1 are ignored.
    token_mask: bool [G, T], True for the tokens of shares and means, with weights of groups by their number; None for
      all tokens.

  Returns:
    float32 [].
  """
  num_experts = probs.shape[-1]
  # [groups, experts]: f of equation (5) times the number of tokens, without gradient.
  counts = choice_counts(expert_index, num_experts).astype(jnp.float32)
  # [groups, experts]: P of equation (6) times the number of tokens, in float32, as it sums over a group.
  sums = jnp.sum(probs.astype(jnp.float32), axis=1)
  if token_mask is None:
    num_tokens = probs.shape[1]
    share_of_choices = counts / num_tokens
    mean_probs = sums / num_tokens
    return jnp.mean(share_of_choices * mean_probs) * num_experts**2
  # [groups, 1]: groups have different numbers of tokens, which are their weights in the mean.
  num_tokens = jnp.sum(token_mask, axis=1, keepdims=True).astype(jnp.float32)
  per_group = jnp.sum(counts * sums / jnp.maximum(num_tokens, 1.0), axis=-1)
  return jnp.sum(per_group) / jnp.maximum(jnp.sum(num_tokens), 1.0) * num_experts


def router_z_loss(logits: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
  """Return the router z-loss, the mean squared log of the softmax's normalizer, which keeps logits small.

  https://arxiv.org/abs/2202.08906, equation (5).

  Args:
    logits: float32 [G, T, E].
    token_mask: bool [G, T], True for the tokens of the mean; None for all tokens.

  Returns:
    float32 [].
  """
  # [groups, tokens]: float32, since rounding of large logits would dominate the logarithm.
  log_normalizer = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
  squares = jnp.square(log_normalizer)
  if token_mask is None:
    return jnp.mean(squares)
  total = jnp.sum(jnp.where(token_mask, squares, 0.0))
  num_tokens = jnp.maximum(jnp.sum(token_mask), 1)
  return total / num_tokens.astype(jnp.float32)
