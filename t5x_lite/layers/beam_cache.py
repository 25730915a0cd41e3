"""Cache of self-attention whose keys and values beam search does not reorder.

In every step beam search replaces the sequences of an example's beams by others of that example, and an ordinary cache
reorders all keys and values. Here an example has one *slot* per beam at each position: a beam writes its keys and
values into its slot, and a small table contains, for each beam and position, the slot of the beam's past. Beam search
reorders only the table. All beams of an example attend to all of its slots, as queries of one row, and a mask made from
the table excludes the slots of other sequences.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite.layers.masks import AttentionBias
from t5x_lite.layers.masks import mask_to_bias


def share_beams(cache: Mapping[str, Any], num_beams: int) -> dict[str, Any]:
  """Return a cache of self-attention, empty or prefilled, with slots for beams.

  Args:
    cache: collection `cache` of a network, with `cached_key` and `cached_value` <dtype>[batch, heads, length, head_dim]
      for each `layers.MultiHeadDotProductAttention`.
    num_beams: number of slots.

  Returns:
    The collection with `slot_key` and `slot_value` <dtype>[batch, heads, length * num_beams, head_dim] instead, the
    slots of a position adjacent, and the table `slot_table` int32 [batch, length]. Decoding algorithms must repeat the
    table per beam, but not the slots.

  >>> cache = {'cached_key': jnp.ones((1, 1, 2, 4)), 'cached_value': jnp.ones((1, 1, 2, 4)), 'cache_index': 2}
  >>> {name: jnp.shape(leaf) for name, leaf in share_beams(cache, 3).items()}
  {'cache_index': (), 'slot_key': (1, 1, 6, 4), 'slot_value': (1, 1, 6, 4), 'slot_table': (1, 2)}
  """
  shared: dict[str, Any] = {}
  for name, node in cache.items():
    if isinstance(node, Mapping):
      node = share_beams(node, num_beams)
    shared[name] = node
  if 'cached_key' not in shared:
    return shared
  batch, heads, length, head_dim = shared['cached_key'].shape
  for kind in ('key', 'value'):
    cached = shared.pop(f'cached_{kind}')
    # [batch, heads, length, beam, head_dim]: the cached positions are the past of all beams, in the first slot, to
    # which the table points.
    padding = [(0, 0)] * 3 + [(0, num_beams - 1), (0, 0)]
    slots = jnp.pad(cached[:, :, :, None], padding)
    shared[f'slot_{kind}'] = slots.reshape(batch, heads, length * num_beams, head_dim)
  shared['slot_table'] = jnp.zeros((batch, length), jnp.int32)
  return shared


def to_slots(new: jax.Array, num_beams: int) -> jax.Array:
  """Return keys or values <dtype>[batch * beam, new, heads, head_dim] as [batch, heads, new * beam, head_dim]."""
  rows, num_new, heads, head_dim = new.shape
  new = new.reshape(rows // num_beams, num_beams, num_new, heads, head_dim)
  return jnp.transpose(new, (0, 3, 2, 1, 4)).reshape(-1, heads, num_new * num_beams, head_dim)


def mark_slots(table: jax.Array, index: jax.Array, num_new: int, num_beams: int) -> jax.Array:
  """Return the table with each row's slot at the new positions.

  Args:
    table: `slot_table`, int32 [rows, length].
    index: first new position, int32 [] or [rows].
    num_new: number of new positions.
    num_beams: number of slots.
  """
  rows, length = table.shape
  positions = jnp.arange(length, dtype=jnp.int32) - jnp.reshape(index, (-1, 1))
  own = jnp.arange(rows, dtype=jnp.int32)[:, None] % num_beams
  return jnp.where((positions >= 0) & (positions < num_new), own, table)


def slot_bias(
  bias: AttentionBias, table: jax.Array, num_queries: int, num_beams: int
) -> AttentionBias:
  """Return a bias over slots that masks, for each beam, the slots that are not its past.

  Args:
    bias: bias of rows [batch * beam], `num_queries` queries and `length` keys.
    table: int32 [batch * beam, length].
    num_queries: number of queries of a row.
    num_beams: number of slots.

  Returns:
    The bias of rows [batch], num_beams * num_queries queries and length * num_beams keys.
  """
  rows, length = table.shape
  # [rows, 1, 1, length, beam]: 0 for the slot of each position that is the row's past.
  is_past = table[:, :, None] == jnp.arange(num_beams, dtype=jnp.int32)
  past = mask_to_bias(is_past)[:, None, None]
  total = (
    sum(part[..., None] for part in (bias.shared, bias.per_example) if part is not None) + past
  )
  num_heads = total.shape[1]
  total = jnp.broadcast_to(total, (rows, num_heads, num_queries, length, num_beams))
  # [batch, heads, beam * queries, length * beam]: beams are queries of one row, slots are keys.
  batch = rows // num_beams
  num_slots = length * num_beams
  total = total.reshape(batch, num_beams, num_heads, num_queries, num_slots)
  total = jnp.swapaxes(total, 1, 2)
  total = total.reshape(batch, num_heads, num_beams * num_queries, num_slots)
  return AttentionBias.from_array(total)
