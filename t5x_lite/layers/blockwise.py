"""Exact attention by blocks of queries and keys, in memory that grows linearly with the length.

The softmax is accumulated over blocks of keys: a larger maximum rescales the sums so far (Milakov and
Gimelshein, https://arxiv.org/abs/1805.02867; Rabe and Staats, https://arxiv.org/abs/2112.05682). The backward pass
computes the scores of each block again from the output and two numbers per query (Dao et al.,
https://arxiv.org/abs/2205.14135, section 3.1 and appendix B.2). Scores, sums and gradients of biases are float32.

Bias and mask of a block are made from the description in `AttentionBias`. Blocks without a visible key are skipped.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from t5x_lite.layers import platforms
from t5x_lite.layers.masks import LEAST_VISIBLE_SCORE
from t5x_lite.layers.masks import NO_KEY
from t5x_lite.layers.masks import NO_QUERY
from t5x_lite.layers.masks import AttentionBias
from t5x_lite.layers.masks import expand_diagonals
from t5x_lite.layers.masks import sum_over_batch
from t5x_lite.layers.shards import on_each_device
from t5x_lite.types import PyTree

# Largest numbers of queries and keys of a block. On a CPU the scores of a block and a head then fit into its caches.
_CPU_BLOCK = 256
_ACCELERATOR_BLOCK = 512
# Block sizes are multiples of these numbers.
_CPU_MULTIPLE = 8
_ACCELERATOR_MULTIPLE = 128
# Scores of masked keys.
_MASKED = -1e30
_NO_SEGMENT = np.iinfo(np.int32).max


class _Bias(NamedTuple):
  """Bias of padded scores [batch, heads, q, k].

  Attributes:
    distances: float32 [heads, q + k - 1], see `DistanceBias`; or None.
    arrays: float32 [batch or 1, heads or 1, q or 1, k or 1] each.
    query_segments: int32 [batch, q] or None, see `AttentionBias`.
    key_segments: int32 [batch, k] or None.
    prefix: bool [batch, length] or None.
  """

  distances: jax.Array | None
  arrays: tuple[jax.Array, ...]
  query_segments: jax.Array | None
  key_segments: jax.Array | None
  prefix: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """Division of an attention into blocks.

  Attributes:
    q_block: number of queries of a block.
    k_block: number of keys of a block.
    num_q: number of blocks of queries.
    num_k: number of blocks of keys.
    causal: True if queries do not attend to later keys.
    by_row: True to compute the rows of a batch one after the other, so that each skips its own blocks.
  """

  q_block: int
  k_block: int
  num_q: int
  num_k: int
  causal: bool
  by_row: bool

  def pairs(self, bias: _Bias) -> tuple[np.ndarray, jax.Array | None]:
    """Return int32 [pairs, 2], the blocks that are not empty by causality, and bool [pairs], those with a visible key.

    The second is None if all have one.
    """
    below = self._is_below()
    if self.causal and bias.prefix is None:
      static = below
    else:
      static = np.ones_like(below)
    pairs = np.argwhere(static).astype(np.int32)
    if bias.key_segments is None:
      return pairs, None
    assert bias.query_segments is not None  # Both or neither.
    # [batch, blocks] each: blocks of queries and keys can see each other if their ranges of segments overlap.
    q_low, q_high = _range(bias.query_segments, self.num_q)
    k_low, k_high = _range(bias.key_segments, self.num_k)
    # [batch, num_q, num_k]
    visible = q_high[:, :, None] >= k_low[:, None]
    visible &= k_high[:, None] >= q_low[:, :, None]
    visible &= (k_high >= 0)[:, None]
    if self.causal and bias.prefix is not None:
      # A block above the diagonal is visible if queries and keys of it are in the prefix.
      batch = bias.prefix.shape[0]
      any_q = jnp.any(bias.prefix.reshape(batch, self.num_q, -1), 2)
      any_k = jnp.any(bias.prefix.reshape(batch, self.num_k, -1), 2)
      visible &= jnp.asarray(below) | (any_q[:, :, None] & any_k[:, None])
    return pairs, jnp.any(visible, axis=0)[pairs[:, 0], pairs[:, 1]]

  def _is_below(self) -> np.ndarray:
    """Return bool [num_q, num_k], True for blocks with a key that is not later than a query."""
    last_query = (np.arange(self.num_q) + 1) * self.q_block - 1
    return last_query[:, None] >= np.arange(self.num_k) * self.k_block

  def scores(
    self, query: jax.Array, key: jax.Array, bias: _Bias, i: jax.Array, j: jax.Array
  ) -> jax.Array:
    """Return float32 [batch, heads, q_block, k_block], the scores of block (i, j) with its bias and mask."""
    scores = _product('bhqd,bhkd->bhqk', _cut(query, i, self.q_block), _cut(key, j, self.k_block))
    if bias.distances is not None:
      scores += expand_diagonals(self.distances(bias.distances, i, j), self.q_block, self.k_block)
    for array in bias.arrays:
      scores += self.cut_array(array, i, j)
    visible = self._visible(bias, i, j)
    if visible is None:
      return scores
    return jnp.where(visible[:, None], scores, _MASKED)

  def _visible(self, bias: _Bias, i: jax.Array, j: jax.Array) -> jax.Array | None:
    """Return bool [batch or 1, q_block or 1, k_block], or None if all keys are visible."""
    parts = []
    if self.causal:
      # [1, q_block, k_block]: positions in the row, not in the block.
      shape = (1, self.q_block, self.k_block)
      queries = lax.broadcasted_iota(jnp.int32, shape, 1) + i * self.q_block
      keys = lax.broadcasted_iota(jnp.int32, shape, 2) + j * self.k_block
      causally = queries >= keys
      if bias.prefix is not None:
        queries_in_prefix = _cut(bias.prefix, i, self.q_block, 1)
        keys_in_prefix = _cut(bias.prefix, j, self.k_block, 1)
        causally |= queries_in_prefix[:, :, None] & keys_in_prefix[:, None]
      parts.append(causally)
    if bias.key_segments is not None:
      assert bias.query_segments is not None  # Both or neither.
      query_segments = _cut(bias.query_segments, i, self.q_block, 1)
      key_segments = _cut(bias.key_segments, j, self.k_block, 1)
      parts.append(query_segments[:, :, None] == key_segments[:, None])
    if parts:
      return functools.reduce(jnp.logical_and, parts)
    return None

  def distances(self, values: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Return float32 [heads, q_block + k_block - 1], the biases of the distances in block (i, j)."""
    return lax.dynamic_slice_in_dim(
      values, self.first_distance(i, j), self.q_block + self.k_block - 1, axis=1
    )

  def first_distance(self, i: jax.Array, j: jax.Array) -> jax.Array:
    """Return the index of the least distance of block (i, j) among all distances."""
    return j * self.k_block + (self.num_q - 1 - i) * self.q_block

  def cut_array(self, array: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Return block (i, j) of a bias [batch or 1, heads or 1, q or 1, k or 1]."""
    # A dim of size 1 is the same for all blocks.
    q_size = min(array.shape[2], self.q_block)
    k_size = min(array.shape[3], self.k_block)
    sizes = (*array.shape[:2], q_size, k_size)
    return lax.dynamic_slice(array, self.start(array, i, j), sizes)

  def start(self, array: jax.Array, i: jax.Array, j: jax.Array) -> tuple[Any, ...]:
    """Return the indices of the first element of block (i, j) of such a bias."""
    first_query = 0 if array.shape[2] == 1 else i * self.q_block
    first_key = 0 if array.shape[3] == 1 else j * self.k_block
    return (0, 0, first_query, first_key)


def _range(segments: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
  """Return the least and largest segment of each block that is not padding, int32 [batch, blocks] each."""
  blocks = segments.reshape(segments.shape[0], num_blocks, -1)
  return jnp.min(jnp.where(blocks < 0, _NO_SEGMENT, blocks), axis=2), jnp.max(blocks, axis=2)


def _cut(array: jax.Array, block: jax.Array, size: int, axis: int = 2) -> jax.Array:
  return lax.dynamic_slice_in_dim(array, block * size, size, axis)


def _put(array: jax.Array, part: jax.Array, block: jax.Array) -> jax.Array:
  return lax.dynamic_update_slice_in_dim(array, part, block * part.shape[2], 2)


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)


def _over_pairs(
  pairs: np.ndarray,
  visible: jax.Array | None,
  carry: PyTree,
  read: Callable,
  update: Callable,
  write: Callable,
) -> PyTree:
  """Return `carry` after `carry = write(carry, update(read(carry, i, j), i, j), i, j)` for all pairs (i, j).

  Where `visible` is False, nothing is updated. The condition gets the parts that are read, since XLA may copy arrays
  that pass through one.
  """

  def step(carry, scanned):
    (i, j), is_visible = scanned
    part = read(carry, i, j)
    if is_visible is None:
      part = update(part, i, j)
    else:
      part = lax.cond(is_visible, lambda part: update(part, i, j), lambda part: part, part)
    return write(carry, part, i, j), None

  carry, _ = lax.scan(step, carry, (jnp.asarray(pairs), visible))
  return carry


def _forward(
  blocks: _Blocks, query: jax.Array, key: jax.Array, value: jax.Array, bias: _Bias
) -> tuple[jax.Array, jax.Array]:
  """Return the output float32 [batch, heads, q, head_dim] and the statistics [batch, heads, q, 2] of each query.

  The statistics are the largest score and the sum of exp(score - largest). They are separate, because the log of a sum
  is rounded away if it is added to a score like -1e10. The output of a query without a visible key is 0.
  """

  def read(carry, i, j):
    del j
    return [_cut(array, i, blocks.q_block) for array in carry]

  def update(part, i, j):
    # [batch, heads, q_block] twice, and [batch, heads, q_block, head_dim]: sums over the keys of earlier blocks.
    largest, total, output = part
    # [batch, heads, q_block, k_block]
    scores = blocks.scores(query, key, bias, i, j)
    new_largest = jnp.maximum(largest, jnp.max(scores, axis=3))
    # In [0, 1], since each score is at most the largest so far: exp cannot overflow.
    weights = jnp.exp(scores - new_largest[..., None])
    # Earlier sums are relative to the earlier largest score.
    rescale = jnp.exp(largest - new_largest)
    total = total * rescale + jnp.sum(weights, axis=3)
    values = _product(
      'bhqk,bhkd->bhqd', weights.astype(value.dtype), _cut(value, j, blocks.k_block)
    )
    output = output * rescale[..., None] + values
    return [new_largest, total, output]

  def write(carry, part, i, j):
    del j
    return [_put(array, new, i) for array, new in zip(carry, part, strict=True)]

  per_query = query.shape[:3]
  # The difference of a masked score and this number has exp = 0.
  largest = jnp.full(per_query, LEAST_VISIBLE_SCORE, jnp.float32)
  total = jnp.zeros(per_query, jnp.float32)
  output = jnp.zeros((*per_query, value.shape[3]), jnp.float32)
  largest, total, output = _over_pairs(
    *blocks.pairs(bias), [largest, total, output], read, update, write
  )
  # A query without a visible key has sums of 0.
  total = jnp.where(total == 0, 1.0, total)
  return output / total[..., None], jnp.stack([largest, total], axis=3)


def _backward(
  blocks: _Blocks,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: _Bias,
  output: jax.Array,
  statistics: jax.Array,
  output_bar: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, ...]]:
  """Return the derivatives of query, key, value, `bias.distances` and `bias.arrays`, in float32."""
  # The derivative of the softmax, summed over keys: the same for all keys of a query.
  mean = jnp.sum(output * output_bar, axis=3)
  output_bar = output_bar.astype(value.dtype)

  def read(carry, i, j):
    query_bar, key_bar, value_bar, distances_bar, array_bars = carry
    if distances_bar is not None:
      distances_bar = blocks.distances(distances_bar, i, j)
    return [
      _cut(query_bar, i, blocks.q_block),
      _cut(key_bar, j, blocks.k_block),
      _cut(value_bar, j, blocks.k_block),
      distances_bar,
      [blocks.cut_array(array, i, j) for array in array_bars],
    ]

  def update(part, i, j):
    query_bar, key_bar, value_bar, distances_bar, array_bars = part
    # [batch, heads, q_block, 1] each
    largest, total = jnp.unstack(_cut(statistics, i, blocks.q_block)[..., None], axis=3)
    means = _cut(mean, i, blocks.q_block)
    out_bar = _cut(output_bar, i, blocks.q_block)
    # [batch, heads, q_block, k_block]: the softmax of the forward pass, computed again instead of stored.
    scores = blocks.scores(query, key, bias, i, j)
    weights = jnp.exp(scores - largest) / total
    value_bar += _product('bhqk,bhqd->bhkd', weights.astype(value.dtype), out_bar)
    weights_bar = _product('bhqd,bhkd->bhqk', out_bar, _cut(value, j, blocks.k_block))
    # Derivative of the softmax; float32, because it is a difference of similar numbers and biases sum it over rows.
    scores_bar = weights * (weights_bar - means[..., None])
    if distances_bar is not None:
      if scores_bar.shape[0] == 1:
        per_head = scores_bar[0]
      else:
        per_head = sum_over_batch(scores_bar)
      distances_bar += _sum_diagonals(per_head)
    array_bars = [bar + _sum_like(scores_bar, bar) for bar in array_bars]
    scores_bar = scores_bar.astype(query.dtype)
    query_bar += _product('bhqk,bhkd->bhqd', scores_bar, _cut(key, j, blocks.k_block))
    key_bar += _product('bhqk,bhqd->bhkd', scores_bar, _cut(query, i, blocks.q_block))
    return [query_bar, key_bar, value_bar, distances_bar, array_bars]

  def write(carry, part, i, j):
    query_bar, key_bar, value_bar, distances_bar, array_bars = carry
    new_query_bar, new_key_bar, new_value_bar, new_distances_bar, new_array_bars = part
    if distances_bar is not None:
      distances_bar = lax.dynamic_update_slice_in_dim(
        distances_bar, new_distances_bar, blocks.first_distance(i, j), 1
      )
    array_bars = [
      lax.dynamic_update_slice(bar, new, blocks.start(bar, i, j))
      for bar, new in zip(array_bars, new_array_bars, strict=True)
    ]
    return [
      _put(query_bar, new_query_bar, i),
      _put(key_bar, new_key_bar, j),
      _put(value_bar, new_value_bar, j),
      distances_bar,
      array_bars,
    ]

  zeros = functools.partial(jax.tree.map, lambda array: jnp.zeros(array.shape, jnp.float32))
  return _over_pairs(
    *blocks.pairs(bias),
    zeros([query, key, value, bias.distances, list(bias.arrays)]),
    read,
    update,
    write,
  )


def _sum_like(scores: jax.Array, bar: jax.Array) -> jax.Array:
  """Return the sum of scores [batch, heads, q, k] over the dims in which `bar` has size 1."""
  dims = [dim for dim in range(4) if bar.shape[dim] == 1]
  return jnp.sum(scores, axis=dims, keepdims=True)


def _sum_diagonals(scores: jax.Array) -> jax.Array:
  """Return the sums [heads, q + k - 1] of the diagonals of [heads, q, k], the transpose of `expand_diagonals`."""
  heads, q_len, k_len = scores.shape
  values = jax.ShapeDtypeStruct((heads, q_len + k_len - 1), scores.dtype)
  return jax.linear_transpose(lambda x: expand_diagonals(x, q_len, k_len), values)(scores)[0]


def _row(bias: _Bias, row: jax.Array) -> _Bias:
  """Return the bias of one row of the batch."""

  def cut(array):
    if array.shape[0] == 1:
      return array
    return lax.dynamic_slice_in_dim(array, row, 1, 0)

  # `distances` has no dim of the batch.
  return jax.tree.map(cut, bias._replace(distances=None))._replace(distances=bias.distances)


def _forward_by_row(blocks, query, key, value, bias):
  """Like `_forward`, one row of the batch after the other."""

  def run(scanned):
    row, query, key, value = scanned
    output, statistics = _forward(blocks, query[None], key[None], value[None], _row(bias, row))
    return output[0], statistics[0]

  return lax.map(run, (jnp.arange(query.shape[0]), query, key, value))


def _backward_by_row(blocks, query, key, value, bias, output, statistics, output_bar):
  """Like `_backward`, one row of the batch after the other."""

  def add(total, part, row):
    if total.shape[0] == part.shape[0]:
      return total + part
    return lax.dynamic_update_slice_in_dim(total, part, row, 0)

  def step(totals, scanned):
    row, *arrays = scanned
    query, key, value, *others = [array[None] for array in arrays]
    query_bar, key_bar, value_bar, distances_bar, array_bars = _backward(
      blocks, query, key, value, _row(bias, row), *others
    )
    total_distances, total_arrays = totals
    if distances_bar is not None:
      total_distances = total_distances + distances_bar
    total_arrays = [
      add(total, part, row) for total, part in zip(total_arrays, array_bars, strict=True)
    ]
    return (total_distances, total_arrays), [query_bar[0], key_bar[0], value_bar[0]]

  zeros = jax.tree.map(
    lambda array: jnp.zeros(array.shape, jnp.float32), (bias.distances, list(bias.arrays))
  )
  totals, bars = lax.scan(
    step, zeros, (jnp.arange(query.shape[0]), query, key, value, output, statistics, output_bar)
  )
  return [*bars, *totals]


_HEADS_FIRST = 'bh..'


def _bias_dims(bias: _Bias) -> _Bias:
  """Return the dims of the arrays of a bias for `on_each_device`."""

  def of_array(array):
    batch = '.' if array.shape[0] == 1 else 'b'
    heads = '.' if array.shape[1] == 1 else 'h'
    return f'{batch}{heads}..'

  def if_given(dims, array):
    if array is None:
      return None
    return dims

  return bias._replace(
    distances=if_given('h.', bias.distances),
    arrays=tuple(map(of_array, bias.arrays)),
    query_segments=if_given('b.', bias.query_segments),
    key_segments=if_given('b.', bias.key_segments),
    prefix=if_given('b.', bias.prefix),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  blocks: _Blocks, query: jax.Array, key: jax.Array, value: jax.Array, bias: _Bias
) -> jax.Array:
  """Return <dtype>[batch, heads, q, head_dim] of queries, keys and values in this order of dims, padded to blocks."""
  return _attend_forward(blocks, query, key, value, bias)[0]


def _attend_forward(blocks, query, key, value, bias):
  # In a loop over layers, what depends on the bias alone is the same in all layers, and JAX would compute it before the
  # loop, for all blocks at once. Together with the query it is not the same.
  query, bias = lax.optimization_barrier((query, bias))
  if blocks.by_row and query.shape[0] > 1:
    forward = _forward_by_row
  else:
    forward = _forward
  output, statistics = on_each_device(
    lambda *args: tuple(forward(blocks, *args)),
    (query, key, value, bias),
    (*[_HEADS_FIRST] * 3, _bias_dims(bias)),
    (_HEADS_FIRST, _HEADS_FIRST),
  )
  output, statistics = checkpoint_name(
    (output.astype(value.dtype), statistics), 'attention_context'
  )
  # A policy that stores what operations return does not know results of loops; it has this name.
  output, statistics = checkpoint_name((output, statistics), 'blockwise_context')
  return output, (query, key, value, bias, output, statistics)


def _attend_backward(blocks, residuals, output_bar):
  query, key, value, bias, output, statistics = residuals
  output_bar, bias = lax.optimization_barrier((output_bar, bias))
  if blocks.by_row and query.shape[0] > 1:
    backward = _backward_by_row
  else:
    backward = _backward
  dims = _bias_dims(bias)
  query_bar, key_bar, value_bar, distances_bar, array_bars = on_each_device(
    lambda *args: tuple(backward(blocks, *args)),
    (query, key, value, bias, output, statistics, output_bar),
    (*[_HEADS_FIRST] * 3, dims, _HEADS_FIRST, _HEADS_FIRST, _HEADS_FIRST),
    (*[_HEADS_FIRST] * 3, dims.distances, list(dims.arrays)),
  )
  return (
    query_bar.astype(query.dtype),
    key_bar.astype(key.dtype),
    value_bar.astype(value.dtype),
    _Bias(distances_bar, tuple(array_bars), None, None, None),
  )


_attend.defvjp(_attend_forward, _attend_backward)


def _block_size(length: int, largest: int, multiple: int) -> tuple[int, int]:
  """Return (size, number) of the blocks of a dim, with as little padding as blocks of at most `largest` need."""
  num_blocks = math.ceil(length / largest)
  return math.ceil(length / num_blocks / multiple) * multiple, num_blocks


def _pad(array: jax.Array, dim: int, length: int, value: float = 0) -> jax.Array:
  widths = [(0, 0)] * array.ndim
  widths[dim] = (0, length - array.shape[dim])
  return jnp.pad(array, widths, constant_values=value)


def blockwise_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: AttentionBias | None = None,
  *,
  max_block: int | None = None,
) -> jax.Array:
  """Attend as `dot_product_attention`, block by block: softmax(query . key + bias) . value.

  A query of packed rows that is padding, and any query without a visible key, gets zeros. There are no forward-mode
  derivatives.

  Args:
    query: <float>[batch, q, heads, head_dim].
    key: <float>[batch, k, heads, head_dim].
    value: like `key`.
    bias: bias of the scores; its derivatives are computed too.
    max_block: largest number of queries and of keys of a block, before it is rounded up to a multiple of 8 on a CPU and
      of 128 elsewhere; None for that of the platform.

  Returns:
    <dtype of value>[batch, q, heads, head_dim].
  """
  q_len = query.shape[1]
  blocks, query, key, padded_bias = _divide(query, key, bias, max_block)
  value = jnp.swapaxes(_pad(value, 1, key.shape[2]), 1, 2)
  output: Any = _attend(blocks, query, key, value, padded_bias)
  return jnp.swapaxes(output, 1, 2)[:, :q_len]


def blockwise_largest_scores(
  query: jax.Array, key: jax.Array, bias: AttentionBias | None, max_block: int | None = None
) -> jax.Array:
  """Return float32 [batch, heads, q], the largest query . key of visible keys before biases, or 0 if all are negative.

  Args:
    query: <float>[batch, q, heads, head_dim].
    key: <float>[batch, k, heads, head_dim].
    bias: bias of the scores, for its mask.
    max_block: see `blockwise_attention`.
  """
  q_len = query.shape[1]
  blocks, query, key, padded_bias = _divide(query, key, bias, max_block)
  # For the reason in `_attend_forward`.
  query, padded_bias = lax.optimization_barrier((query, padded_bias))

  def run(query, key, bias):
    def update(part, i, j):
      # Those that `blocks.scores` computes; the compiler sees that they are the same.
      queries = _cut(query, i, blocks.q_block)
      scores = _product('bhqd,bhkd->bhqk', queries, _cut(key, j, blocks.k_block))
      is_visible = blocks.scores(query, key, bias, i, j) >= LEAST_VISIBLE_SCORE
      largest = jnp.max(scores, axis=3, initial=0.0, where=is_visible)
      return jnp.maximum(part, largest)

    return _over_pairs(
      *blocks.pairs(bias),
      jnp.zeros(query.shape[:3], jnp.float32),
      lambda largest, i, j: _cut(largest, i, blocks.q_block),
      update,
      lambda largest, part, i, j: _put(largest, part, i),
    )

  dims = (_HEADS_FIRST, _HEADS_FIRST, _bias_dims(padded_bias))
  largest = on_each_device(run, (query, key, padded_bias), dims, 'bh.')
  return largest[:, :, :q_len]


def _divide(query, key, bias, max_block):
  """Return (blocks, queries and keys [batch, heads, length, head_dim], bias), padded to entire blocks."""
  is_cpu = platforms.traced_platform() == 'cpu'
  if is_cpu:
    largest = max_block or _CPU_BLOCK
    multiple = min(largest, _CPU_MULTIPLE)
  else:
    largest = max_block or _ACCELERATOR_BLOCK
    multiple = min(largest, _ACCELERATOR_MULTIPLE)
  (batch, q_len) = query.shape[:2]
  k_len = key.shape[1]
  q_block, num_q = _block_size(q_len, largest, multiple)
  k_block, num_k = _block_size(k_len, largest, multiple)
  padded_q = q_block * num_q
  padded_k = k_block * num_k

  bias = bias or AttentionBias()
  if bias.distances is None:
    distances = None
  else:
    distances = jnp.pad(bias.distances.values, ((0, 0), (padded_q - q_len, padded_k - k_len)))
  query_segments = bias.query_segments
  key_segments = bias.key_segments
  prefix = bias.prefix
  if padded_k > k_len and key_segments is None:
    # Keys of the padding must not be seen.
    query_segments = jnp.zeros((batch, q_len), jnp.int32)
    key_segments = jnp.zeros((batch, k_len), jnp.int32)
  if query_segments is not None and key_segments is not None:
    query_segments = _pad(query_segments, 1, padded_q, NO_KEY)
    key_segments = _pad(key_segments, 1, padded_k, NO_QUERY)
  if prefix is not None:
    prefix = _pad(prefix, 1, max(padded_q, padded_k), False)
  arrays = []
  for array in (bias.position, bias.extra):
    if array is None:
      continue
    array = array.astype(jnp.float32)
    if array.shape[2] > 1:
      array = _pad(array, 2, padded_q)
    if array.shape[3] > 1:
      array = _pad(array, 3, padded_k)
    arrays.append(array)
  # [batch, heads, length, head_dim] each: a block of a head is a matrix.
  query = jnp.swapaxes(_pad(query, 1, padded_q), 1, 2)
  key = jnp.swapaxes(_pad(key, 1, padded_k), 1, 2)
  blocks = _Blocks(q_block, k_block, num_q, num_k, bias.causal, by_row=is_cpu)
  padded_bias = _Bias(distances, tuple(arrays), query_segments, key_segments, prefix)
  return blocks, query, key, padded_bias
