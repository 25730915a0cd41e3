"""First maximum, top k, and the masks of top-k and top-p sampling, without sorting the vocabulary.

Of equal entries the one of the lowest index is chosen; masks keep all entries that equal the cutoff.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.decoding import options
from t5x_lite.types import Array, ArrayLike

_INT32_MAX = np.int32(np.iinfo(np.int32).max)
# Width of the pieces whose maxima are computed first.
_CHUNK = 128
# Up to this k `topk_mask` ranks the entries; for larger k a search for the cutoff is faster.
_MOST_RANKED = 1024
# `topp_mask` searches its cutoff among this many most probable entries before it searches all entries.
_TOPP_CANDIDATES = 128


def first_argmax(x: Array) -> tuple[Array, Array]:
  """Return (maxima <dtype>[...], index of each maximum's first occurrence <int32>[...]) over the last dim."""
  if x.shape[-1] < 8 * _CHUNK:
    return _first_argmax(x)
  # [..., chunks, _CHUNK]
  chunks = _chunks(x)
  largest, best_chunk = _first_argmax(jnp.max(chunks, axis=-1))
  # [..., _CHUNK]: the chunk with the maximum.
  entries = jnp.take_along_axis(chunks, best_chunk[..., None, None], axis=-2)[..., 0, :]
  _, position = _first_argmax(entries)
  return largest, best_chunk * _CHUNK + position


def _first_argmax(x: Array) -> tuple[Array, Array]:
  """Compute `first_argmax` by two plain reductions; one reduction over pairs is ten times slower on CPU."""
  largest = jnp.max(x, axis=-1, keepdims=True)
  positions = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  # "Not below" instead of "equal" gives a valid index even if `x` contains NaN.
  candidates = jnp.where(x < largest, x.shape[-1], positions)
  return largest[..., 0], jnp.min(candidates, axis=-1)


def top_k_two_stage(
  x: Array, k: int, score_fn: Callable[[Array], Array] = lambda x: x
) -> tuple[Array, Array]:
  """Return `jax.lax.top_k(score_fn(x), k)`, computed faster: rank maxima of pieces, then entries of the best k pieces.

  The result is exact: a piece with one of the k largest entries has one of the k largest maxima.

  Args:
    x: [batch, n].
    k: number of entries.
    score_fn: scores to rank by, [batch, m] -> [batch, m] for any m; elementwise and non-decreasing within a row. By
      default the entries themselves.

  Returns:
    (scores [batch, k] in descending order, indices <int32>[batch, k]); equal scores in order of index.
  """
  batch, n = x.shape
  if n < 8 * k * _CHUNK:
    return jax.lax.top_k(score_fn(x), k)
  # [batch, chunks, _CHUNK]
  chunks = _chunks(x)
  # [batch, k]: numbers of the chunks with the largest maxima.
  maxima = score_fn(jnp.max(chunks, axis=-1))
  _, best_chunks = jax.lax.top_k(maxima, k)
  # In order of position, so that of equal entries the first is ranked first.
  best_chunks = jnp.sort(best_chunks, axis=-1)
  # [batch, k * _CHUNK]: the entries of these chunks.
  entries = jnp.take_along_axis(chunks, best_chunks[:, :, None], axis=1)
  entries = entries.reshape(batch, k * _CHUNK)
  values, positions = jax.lax.top_k(score_fn(entries), k)
  chunk_numbers = jnp.take_along_axis(best_chunks, positions // _CHUNK, axis=1)
  return values, chunk_numbers * _CHUNK + positions % _CHUNK


def _chunks(x: Array) -> Array:
  """Divide [..., n] into pieces [..., pieces, _CHUNK], the last one padded with minus infinity."""
  *dims, length = x.shape
  widths = [(0, 0)] * len(dims) + [(0, -length % _CHUNK)]
  padded = jnp.pad(x, widths, constant_values=-jnp.inf)
  return padded.reshape(*dims, -1, _CHUNK)


def topk_mask(x: Array, k: ArrayLike, replace_val: ArrayLike) -> Array:
  """Keep the k largest entries of the last dim, and all entries equal to the smallest of these.

  Args:
    x: <float32>[..., vocab].
    k: number of entries to keep, at least 1; may be traced.
    replace_val: value of all other entries.

  Returns:
    <float32>[..., vocab].

  Raises:
    ConfigError: `k` is below 1.

  >>> import numpy as np
  >>> topk_mask(np.float32([1, 4, 3, 4, 3]), 3, 0.0).tolist()
  [0.0, 4.0, 3.0, 4.0, 3.0]
  """
  checks.check('topk_mask', locals(), k=options.numbers('at least 1', lambda known: known >= 1))
  known = options.concrete(k)
  if known is not None and known <= _MOST_RANKED:
    cutoff = jnp.min(_largest(x, min(int(known), x.shape[-1])), axis=-1)
  else:

    def exceeded_by_k(negative: Array) -> Array:
      return jnp.sum(x > -negative[..., None], axis=-1) >= k

    # [...]: the smallest threshold that fewer than k entries exceed, as the negative of a largest number.
    cutoff = -float32_bsearch(x.shape[:-1], exceeded_by_k)
  cutoff = jnp.maximum(cutoff, np.finfo(np.float32).min)[..., None]
  return jnp.where(x >= cutoff, x, jnp.asarray(replace_val, x.dtype))


def topp_mask(logits: Array, p: ArrayLike, replace_val: ArrayLike) -> Array:
  """Keep the fewest most probable entries whose probabilities sum up to p, and all equal to the least of these.

  Args:
    logits: <float32>[..., vocab].
    p: probability to keep, from 0 (exclusive) to 1; may be traced.
    replace_val: value of all other logits.

  Returns:
    <float32>[..., vocab].

  Raises:
    ConfigError: `p` is not in (0, 1].

  >>> import numpy as np
  >>> topp_mask(np.log(np.float32([0.5, 0.125, 0.25, 0.125])), 0.7, -1.0).round(3).tolist()
  [-0.6930000185966492, -1.0, -1.3860000371932983, -1.0]
  """
  checks.check(
    'topp_mask',
    locals(),
    p=options.numbers('a probability in (0, 1]', lambda p: (p > 0) & (p <= 1)),
  )
  # [..., vocab]: float32, because a rounded sum of many small probabilities would move the cutoff.
  probs = jax.nn.softmax(logits, axis=-1)

  def keeps_too_little(threshold: Array) -> Array:
    kept = jnp.where(probs >= threshold[..., None], probs, 0.0)
    return jnp.sum(kept, axis=-1) < p

  def search_all():
    return float32_bsearch(probs.shape[:-1], keeps_too_little)[..., None]

  if probs.shape[-1] <= _TOPP_CANDIDATES:
    cutoff = search_all()
  else:
    # The cutoff is usually among a few most probable entries, where the search is cheap.
    candidates = _largest(probs, _TOPP_CANDIDATES)
    mass = jnp.cumsum(candidates, axis=-1)
    reached = mass >= p
    # [..., 1]: the first candidate with which the sum reaches p.
    at = jnp.argmax(reached, axis=-1, keepdims=True)

    def take_candidate():
      return jnp.take_along_axis(candidates, at, axis=-1)

    cutoff = jax.lax.cond(jnp.all(reached[..., -1]), take_candidate, search_all)
  return jnp.where(probs >= cutoff, logits, jnp.asarray(replace_val, logits.dtype))


def int32_bsearch(batch_shape: Sequence[int], predicate: Callable[[Array], Array]) -> Array:
  """Find, for each element, the largest int32 for which a predicate is False, with 32 evaluations.

  Args:
    batch_shape: shape of the array of searches.
    predicate: <int32>batch_shape -> <bool>batch_shape; for each element False up to some number and True above it.

  Returns:
    <int32>batch_shape; the smallest int32 if the predicate is True for every number tried.
  """

  def try_bit(i, found):
    # `found` counts from the smallest int32: as unsigned bits, these are set one by one from the top.
    candidate = found | jax.lax.shift_left(jnp.uint32(1), jnp.uint32(31 - i))
    return jnp.where(predicate(_as_int32(candidate)), found, candidate)

  smallest = jnp.zeros(tuple(batch_shape), jnp.uint32)
  found = jax.lax.fori_loop(0, 32, try_bit, smallest)
  return _as_int32(found)


def float32_bsearch(batch_shape: Sequence[int], predicate: Callable[[Array], Array]) -> Array:
  """Find, for each element, the largest finite float32 for which a predicate is False, with 32 evaluations.

  Args:
    batch_shape: shape of the array of searches.
    predicate: <float32>batch_shape -> <bool>batch_shape; for each element False up to some number and True above it.

  Returns:
    <float32>batch_shape; minus infinity if the predicate is True for every finite number.
  """

  def of_rank(rank):
    value = _float_of_rank(rank)
    # Ranks outside the finite numbers follow the order.
    return jnp.where(jnp.isfinite(value), predicate(value), rank >= 0)

  return _float_of_rank(int32_bsearch(batch_shape, of_rank))


def _as_int32(unsigned: Array) -> Array:
  """Map 0 .. 2^32 - 1 to the int32 numbers in order."""
  return jax.lax.bitcast_convert_type(unsigned ^ jnp.uint32(1 << 31), jnp.int32)


def _float_of_rank(rank: Array) -> Array:
  """Map int32 to float32 in order: the bits of floats are ordered like integers, negative floats in reverse."""
  bits = jnp.where(rank < 0, rank ^ _INT32_MAX, rank)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest(x: Array, k: int) -> Array:
  """Return [..., k], the k largest entries in descending order. Slicing the result may make XLA sort all entries."""
  values, _ = top_k_two_stage(x.reshape(-1, x.shape[-1]), k)
  return values.reshape(*x.shape[:-1], k)
