"""Slots of choices in the buffers of experts."""

import jax
import jax.numpy as jnp

# Number of entries that are compared with each other; counts are summed over blocks. Measured on CPU, this is 2 to 8
# times faster than a sort and, for 64 experts or more, 10 to 25 times faster than a cumulative sum of one-hot rows.
_BLOCK = 32


def rank_within_expert(expert_index: jax.Array, num_experts: int) -> jax.Array:
  """Return the number of earlier entries of a row with the same expert.

  In a stable counting sort, row `start[e] + rank` is the row of an entry of expert e.

  Args:
    expert_index: int32 [G, N], 0 to E; E is no expert.
    num_experts: number of experts, E.

  Returns:
    int32 [G, N]; undefined for entries without an expert.

  >>> rank_within_expert(jnp.array([[1, 0, 1, 1]]), num_experts=2).tolist()
  [[0, 0, 1, 2]]
  """
  groups, num_entries = expert_index.shape
  padding = -num_entries % _BLOCK
  padded = jnp.pad(expert_index, ((0, 0), (0, padding)), constant_values=num_experts)
  blocks = padded.reshape(groups, -1, _BLOCK)
  # [groups, blocks, entries, entries]: True for earlier entries of the block with the same expert.
  earlier = jnp.tri(_BLOCK, k=-1, dtype=bool)
  same = blocks[..., :, None] == blocks[..., None, :]
  within_block = jnp.sum(jnp.logical_and(same, earlier), axis=-1, dtype=jnp.int32)
  # [groups, blocks, experts]: entries of each expert in a block, then in all earlier blocks.
  experts = jnp.arange(num_experts, dtype=blocks.dtype)
  counts = jnp.sum(blocks[..., None] == experts, axis=2, dtype=jnp.int32)
  in_earlier_blocks = jnp.cumsum(counts, axis=1) - counts
  # [groups, blocks, entries]: that number for the expert of each entry.
  safe = jnp.minimum(blocks, num_experts - 1)
  in_earlier_blocks = jnp.take_along_axis(in_earlier_blocks, safe, axis=2)
  ranks = (within_block + in_earlier_blocks).reshape(groups, -1)
  return ranks[:, :num_entries]


def buffer_positions(
  expert_index: jax.Array, num_experts: int, priority: jax.Array | None = None
) -> jax.Array:
  """Return the slot of every choice in its expert's buffer.

  All first choices of a group precede all second choices, and so on; equal choices are in the order of tokens.

  Args:
    expert_index: int32 [G, T, K]; `num_experts` for ignored choices.
    num_experts: number of experts, E.
    priority: float32 [G, T]; tokens of higher priority come first, those of equal priority in order (batch-prioritized
      routing, https://arxiv.org/abs/2106.05974, section 4.1). None for the order of tokens.

  Returns:
    int32 [G, T, K], from 0, without limit; undefined for ignored choices.
  """
  groups, tokens, choices = expert_index.shape
  order = None
  if priority is not None:
    # [groups, tokens]: tokens of high priority get the first slots; the sort is stable for equal priorities.
    order = jnp.argsort(-priority, axis=-1, stable=True)
    expert_index = jnp.take_along_axis(expert_index, order[..., None], axis=1)
  # [groups, choices * tokens]: all first choices come before all second choices, so that these are dropped first.
  by_choice = jnp.swapaxes(expert_index, 1, 2).reshape(groups, choices * tokens)
  ranks = rank_within_expert(by_choice, num_experts)
  positions = jnp.swapaxes(ranks.reshape(groups, choices, tokens), 1, 2)
  if order is None:
    return positions

  def in_token_order(position, token):
    return jnp.zeros_like(position).at[token].set(position, unique_indices=True)

  return jax.vmap(in_token_order)(positions, order)
