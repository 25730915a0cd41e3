"""Places in the buffers of experts."""

import jax
import jax.numpy as jnp


def rank_within_expert(expert_index: jax.Array, num_experts: int) -> jax.Array:
  """Returns how many earlier entries of a row name the same expert.

  Args:
    expert_index: int32 [G, N], 0 to `num_experts`, that one included.
    num_experts: E.

  Returns:
    int32 [G, N].
  """
  del num_experts
  order = jnp.argsort(expert_index, axis=-1, stable=True)
  ordered = jnp.take_along_axis(expert_index, order, axis=-1)
  places = jnp.arange(expert_index.shape[-1], dtype=jnp.int32)
  starts = jax.vmap(lambda row: jnp.searchsorted(row, row, side='left'))(ordered)
  ranks = places - starts.astype(jnp.int32)
  return jax.vmap(lambda rank, index: jnp.zeros_like(rank).at[index].set(rank, unique_indices=True))(ranks, order)


def buffer_positions(
    expert_index: jax.Array, num_experts: int, priority: jax.Array | None = None) -> jax.Array:
  """Returns the place of every choice in its expert's buffer.

  All first choices of a group come before all second choices, and so on; among equals, tokens come in their order.

  Args:
    expert_index: int32 [G, T, K]; `num_experts` for what counts for nothing.
    num_experts: E.
    priority: float32 [G, T]; tokens of higher priority come first (batch-prioritized routing,
      https://arxiv.org/abs/2106.05974, section 3.3). None: tokens in their order.

  Returns:
    int32 [G, T, K], from 0; unlimited. Of no meaning for what counts for nothing.
  """
  groups, tokens, choices = expert_index.shape
  if priority is not None:
    order = jnp.argsort(-priority, axis=-1, stable=True)
    expert_index = jnp.take_along_axis(expert_index, order[..., None], axis=1)
  by_choice = jnp.swapaxes(expert_index, 1, 2).reshape(groups, choices * tokens)
  positions = jnp.swapaxes(rank_within_expert(by_choice, num_experts).reshape(groups, choices, tokens), 1, 2)
  if priority is None:
    return positions
  return jax.vmap(lambda position, index: jnp.zeros_like(position).at[index].set(position, unique_indices=True))(
      positions, order)
