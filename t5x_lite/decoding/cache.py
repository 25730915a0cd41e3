"""Layouts of caches in decoding: one row of the batch becomes `num_decodes` adjacent rows.

The layouts are [batch, ...] before decoding, [batch, beam, ...] where beams are chosen and reordered, and
[batch * beam, ...] for the network. `offset` is the number of dims before the batch dim.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import core
import jax
import jax.numpy as jnp

from t5x_lite.errors import ConfigError
from t5x_lite.types import Array, PyTree

# Names of cache leaves that are the same for all rows, or shared by the beams of a row. Whether `cache_index` is one of
# them depends on the cache.
_NOT_PER_ROW = ('cached_bias', 'position_embedder_index', 'slot_key', 'slot_value')


def cache_map(
  fn: Callable[[Array], Array], cache: Mapping[str, Any], apply_to_index: bool = False
) -> Mapping[str, Any]:
  """Apply a function to the leaves of a cache that have one entry per row.

  Args:
    fn: function from an array [..., batch, ...] to an array of any shape and dtype.
    cache: nested mapping of arrays.
    apply_to_index: True to change leaves named `cache_index` too, which have one entry per row in a prefilled cache.
      Leaves named `cached_bias`, `position_embedder_index`, `slot_key` and `slot_value` never change.

  Returns:
    The cache with the results as leaves; a FrozenDict if `cache` is one.

  >>> cache_map(lambda x: x + 1, {'layer': {'cached_key': 1, 'cache_index': 1}})
  {'layer': {'cached_key': 2, 'cache_index': 1}}
  """
  if apply_to_index:
    skipped = _NOT_PER_ROW
  else:
    skipped = (*_NOT_PER_ROW, 'cache_index')

  def visit(node, name):
    if isinstance(node, Mapping):
      return {key: visit(value, key) for key, value in node.items()}
    if name in skipped:
      return node
    return jax.tree.map(fn, node)

  return like_cache(visit(cache, ''), cache)


def like_cache(new_cache: Mapping[str, Any], cache: Mapping[str, Any]) -> Mapping[str, Any]:
  """Return `new_cache` as a FrozenDict if `cache` is one, else as a dict; the state of a loop must not change type."""
  if isinstance(cache, core.FrozenDict):
    return core.freeze(new_cache)
  if isinstance(new_cache, core.FrozenDict):
    return core.unfreeze(new_cache)
  return new_cache


def add_beam_dim(x: Array, beam_size: int, offset: int = 0) -> Array:
  """Repeat each row `beam_size` times along a new dim after the batch dim.

  Args:
    x: <any>[..., batch, ...] with the batch dim at `offset`.
    beam_size: size of the new dim.
    offset: number of dims before the batch dim.

  >>> import numpy as np
  >>> add_beam_dim(np.array([1, 2]), 3).tolist()
  [[1, 1, 1], [2, 2, 2]]
  """
  at = offset + 1
  shape = (*x.shape[:at], beam_size, *x.shape[at:])
  return jnp.broadcast_to(jnp.expand_dims(x, at), shape)


def flatten_beam_dim(x: Array, offset: int = 0) -> Array:
  """Merge `x` [..., batch, beam, ...] into [..., batch * beam, ...], with the batch dim at `offset`."""
  before = x.shape[:offset]
  batch_size, beam_size, *after = x.shape[offset:]
  return x.reshape(*before, batch_size * beam_size, *after)


def unflatten_beam_dim(x: Array, batch_size: int, beam_size: int, offset: int = 0) -> Array:
  """Split the dim of rows into batch and beam; the inverse of `flatten_beam_dim`.

  Args:
    x: [..., batch * beam, ...] with the dim of rows at `offset`.
    batch_size: number of sequences.
    beam_size: number of beams of each sequence.
    offset: index of the dim of rows.

  Returns:
    [..., batch, beam, ...].
  """
  return x.reshape(*x.shape[:offset], batch_size, beam_size, *x.shape[offset + 1 :])


def flat_batch_beam_expand(x: Array, beam_size: int, offset: int = 0) -> Array:
  """Repeat every row of the batch `beam_size` times.

  Args:
    x: <any>[..., batch, ...] with the batch dim at `offset`.
    beam_size: number of copies of each row.
    offset: number of dims before the batch dim.

  Returns:
    [..., batch * beam_size, ...], the copies of a row adjacent.

  >>> import numpy as np
  >>> flat_batch_beam_expand(np.array([[1, 2], [3, 4]]), 2).tolist()
  [[1, 2], [1, 2], [3, 4], [3, 4]]
  """
  if beam_size > 1:
    return jnp.repeat(x, beam_size, axis=offset)
  return jnp.asarray(x)


def cache_gather_beams(
  nested: Mapping[str, Any],
  beam_indices: Array,
  batch_size: int,
  old_beam_size: int,
  new_beam_size: int,
  one_hot: bool = True,
  offset: int = 0,
) -> Mapping[str, Any]:
  """Select beams of each row, in the leaves of a cache that `cache_map` changes.

  Args:
    nested: a cache with leaves [..., batch, old beam, ...], the batch dim at `offset`.
    beam_indices: <int>[batch, new beam], old beam of each new beam.
    batch_size: number of rows.
    old_beam_size: number of beams in the cache.
    new_beam_size: number of beams to select.
    one_hot: True to multiply by one-hot matrices; False to index, with the same result and less memory traffic.
    offset: number of dims before the batch dim.

  Returns:
    The cache with leaves [..., batch, new beam, ...].
  """
  gather = _gather_fn(beam_indices, batch_size, old_beam_size, new_beam_size, one_hot, offset)
  return cache_map(gather, nested)


def gather_beams(
  nested: PyTree,
  beam_indices: Array,
  batch_size: int,
  old_beam_size: int,
  new_beam_size: int,
  one_hot: bool = True,
) -> PyTree:
  """Select beams of each row, in each array of a tree.

  Args:
    nested: tree of arrays [batch, old beam, ...]; scalars stay unchanged.
    beam_indices: <int>[batch, new beam], old beam of each new beam.
    batch_size: number of rows.
    old_beam_size: number of beams in the arrays.
    new_beam_size: number of beams to select.
    one_hot: True to multiply by one-hot matrices; False to index, with the same result and less memory traffic.

  Returns:
    The tree with arrays [batch, new beam, ...].
  """
  gather = _gather_fn(beam_indices, batch_size, old_beam_size, new_beam_size, one_hot, offset=0)
  return jax.tree.map(lambda x: gather(x) if jnp.ndim(x) else x, nested)


def gather_topk_beams(
  nested: PyTree, score_or_log_prob: Array, batch_size: int, new_beam_size: int
) -> PyTree:
  """Select the best beams of each row, in ascending order, in each array of a tree.

  Args:
    nested: tree of arrays [batch, old beam, ...]; scalars stay unchanged.
    score_or_log_prob: <float>[batch, old beam], scores to rank by; of equal beams the first is better.
    batch_size: number of rows.
    new_beam_size: number of beams to select.

  Returns:
    The tree with arrays [batch, new beam, ...], the best beam last.
  """
  _, best_first = jax.lax.top_k(score_or_log_prob, new_beam_size)
  return gather_beams(
    nested,
    jnp.flip(best_first, axis=1),
    batch_size,
    score_or_log_prob.shape[1],
    new_beam_size,
    one_hot=False,
  )


def _gather_fn(beam_indices, batch_size, old_beam_size, new_beam_size, one_hot, offset):
  """Return fn([..., batch, old beam, ...]) -> [..., batch, new beam, ...]."""

  def check(x):
    # `take` clips indices, so wrong sizes would give wrong beams silently.
    shapes = (beam_indices.shape, x.shape[offset : offset + 2])
    expected = ((batch_size, new_beam_size), (batch_size, old_beam_size))
    if shapes != expected:
      raise ConfigError(
        f'The shape of beam_indices and dims {offset} and {offset + 1} of arrays of beams must be '
        f'{expected}, got {shapes}.'
      )

  def by_contraction(x):
    check(x)
    dtype = x.dtype
    if dtype == jnp.bool_:
      dtype = jnp.int32
    # [batch, new beam, old beam]
    chosen = jax.nn.one_hot(beam_indices, old_beam_size, dtype=dtype)
    dims = (offset, offset + 1)
    rows = jnp.moveaxis(x, dims, (0, 1)).astype(chosen.dtype)
    selected = jnp.einsum('beo,bo...->be...', chosen, rows)
    return jnp.moveaxis(selected.astype(x.dtype), (0, 1), dims)

  def by_index(x):
    check(x)

    # A map over the batch dim, instead of one gather from [batch, beam], keeps a sharded batch on its devices.
    def take(beams, indices):
      return jnp.take(beams, indices, axis=offset, mode='clip')

    return jax.vmap(take, in_axes=(offset, 0), out_axes=offset)(x, beam_indices)

  if one_hot:
    return by_contraction
  return by_index
