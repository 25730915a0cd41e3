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
# Scores of masked keys, and the least maximum of a query: the difference of a query without a visible key has exp = 0.
_MASKED = -1e30
_LEAST_MAX = -1e20
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
    q_low, q_high = _range(bias.query_segments, self.num_q)
    k_low, k_high = _range(bias.key_segments, self.num_k)
    visible = (
      (q_high[:, :, None] >= k_low[:, None])
      & (k_high[:, None] >= q_low[:, :, None])
      & (k_high >= 0)[:, None]
    )
    if self.causal and bias.prefix is not None:
      any_q, any_k = (
        jnp.any(bias.prefix.reshape(bias.prefix.shape[0], n, -1), 2)
        for n in (self.num_q, self.num_k)
      )
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
      first_query = i * self.q_block
      first_key = j * self.k_block
      queries, keys = (
        lax.broadcasted_iota(jnp.int32, (1, self.q_block, self.k_block), dim) for dim in (1, 2)
      )
      causally = queries + first_query >= keys + first_key
      if bias.prefix is not None:
        in_prefix = (
          _cut(bias.prefix, i, self.q_block, 1)[:, :, None]
          & _cut(bias.prefix, j, self.k_block, 1)[:, None]
        )
        causally |= in_prefix
      parts.append(causally)
    if bias.key_segments is not None:
      parts.append(
        _cut(bias.query_segments, i, self.q_block, 1)[:, :, None]
        == _cut(bias.key_segments, j, self.k_block, 1)[:, None]
      )
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
    sizes = [
      *array.shape[:2],
      *(
        1 if array.shape[dim] == 1 else size for dim, size in ((2, self.q_block), (3, self.k_block))
      ),
    ]
    return lax.dynamic_slice(array, self.start(array, i, j), sizes)

  def start(self, array: jax.Array, i: jax.Array, j: jax.Array) -> tuple[Any, ...]:
    """Return the indices of the first element of block (i, j) of such a bias."""
    return (
      0,
      0,
      *(
        0 if array.shape[dim] == 1 else first
        for dim, first in ((2, i * self.q_block), (3, j * self.k_block))
      ),
    )


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

  return lax.scan(step, carry, (jnp.asarray(pairs), visible))[0]


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
    largest, total, output = part
    scores = blocks.scores(query, key, bias, i, j)
    new_largest = jnp.maximum(largest, jnp.max(scores, axis=3))
    weights = jnp.exp(scores - new_largest[..., None])
    rescale = jnp.exp(largest - new_largest)
    values = _product(
      'bhqk,bhkd->bhqd', weights.astype(value.dtype), _cut(value, j, blocks.k_block)
    )
    return [
      new_largest,
      total * rescale + jnp.sum(weights, axis=3),
      output * rescale[..., None] + values,
    ]

  def write(carry, part, i, j):
    del j
    return [_put(array, new, i) for array, new in zip(carry, part, strict=True)]

  per_query = query.shape[:3]
  largest, total, output = _over_pairs(
    *blocks.pairs(bias),
    [
      jnp.full(per_query, _LEAST_MAX, jnp.float32),
      jnp.zeros(per_query, jnp.float32),
      jnp.zeros((*per_query, value.shape[3]), jnp.float32),
    ],
    read,
    update,
    write,
  )
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
    return [
      _cut(query_bar, i, blocks.q_block),
      _cut(key_bar, j, blocks.k_block),
      _cut(value_bar, j, blocks.k_block),
      None if distances_bar is None else blocks.distances(distances_bar, i, j),
      [blocks.cut_array(array, i, j) for array in array_bars],
    ]

  def update(part, i, j):
    query_bar, key_bar, value_bar, distances_bar, array_bars = part
    largest, total = jnp.unstack(_cut(statistics, i, blocks.q_block)[..., None], axis=3)
    means = _cut(mean, i, blocks.q_block)
    out_bar = _cut(output_bar, i, blocks.q_block)
    weights = jnp.exp(blocks.scores(query, key, bias, i, j) - largest) / total
    value_bar += _product('bhqk,bhqd->bhkd', weights.astype(value.dtype), out_bar)
    weights_bar = _product('bhqd,bhkd->bhqk', out_bar, _cut(value, j, blocks.k_block))
    scores_bar = weights * (weights_bar - means[..., None])
    if distances_bar is not None:
      if scores_bar.shape[0] == 1:
        per_head = scores_bar[0]
      else:
        per_head = sum_over_batch(scores_bar)
      distances_bar += _sum_diagonals(per_head)
    array_bars = [
      bar
      + jnp.sum(scores_bar, axis=[dim for dim in range(4) if bar.shape[dim] == 1], keepdims=True)
      for bar in array_bars
    ]
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


def _sum_diagonals(scores: jax.Array) -> jax.Array:
  """Return the sums [heads, q + k - 1] of the diagonals of [heads, q, k], the transpose of `expand_diagonals`."""
  heads, q_len, k_len = scores.shape
  values = jax.ShapeDtypeStruct((heads, q_len + k_len - 1), scores.dtype)
  return jax.linear_transpose(lambda x: expand_diagonals(x, q_len, k_len), values)(scores)[0]


def _row(bias: _Bias, row: jax.Array) -> _Bias:
  """Return the bias of one row of the batch."""

  def cut(array):
    return (
      array if array is None or array.shape[0] == 1 else lax.dynamic_slice_in_dim(array, row, 1, 0)
    )

  return _Bias(bias.distances, *(jax.tree.map(cut, part) for part in bias[1:]))


def _forward_by_row(blocks, query, key, value, bias):
  """Like `_forward`, one row of the batch after the other."""

  def run(scanned):
    row, *arrays = scanned
    return [
      array[0] for array in _forward(blocks, *(array[None] for array in arrays), _row(bias, row))
    ]

  return lax.map(run, (jnp.arange(query.shape[0]), query, key, value))


def _backward_by_row(blocks, query, key, value, bias, output, statistics, output_bar):
  """Like `_backward`, one row of the batch after the other."""

  def add(total, part, row):
    if total.shape[0] == part.shape[0]:
      return total + part
    return lax.dynamic_update_slice_in_dim(total, part, row, 0)

  def step(totals, scanned):
    row, query, key, value, *others = scanned
    query, key, value, *others = (array[None] for array in (query, key, value, *others))
    *bars, distances_bar, array_bars = _backward(
      blocks, query, key, value, _row(bias, row), *others
    )
    totals = (
      None if distances_bar is None else totals[0] + distances_bar,
      [add(total, part, row) for total, part in zip(totals[1], array_bars, strict=True)],
    )
    return totals, [bar[0] for bar in bars]

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
    return (
      ''.join('.' if size == 1 else name for name, size in zip('bh', array.shape, strict=False))
      + '..'
    )

  return _Bias(
    None if bias.distances is None else 'h.',
    tuple(map(of_array, bias.arrays)),
    *(None if part is None else 'b.' for part in bias[2:]),
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
  fn = functools.partial(
    _forward_by_row if blocks.by_row and query.shape[0] > 1 else _forward, blocks
  )
  output, statistics = on_each_device(
    lambda *args: tuple(fn(*args)),
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
  fn = functools.partial(
    _backward_by_row if blocks.by_row and query.shape[0] > 1 else _backward, blocks
  )
  dims = _bias_dims(bias)
  query_bar, key_bar, value_bar, distances_bar, array_bars = on_each_device(
    lambda *args: tuple(fn(*args)),
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

  A query of packed rows that is padding, and any query without a visible key, gets zeros. Plain biases down to -1e20
  are values and lower ones are masks. There are no forward-mode derivatives.

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
  is_cpu = platforms.traced_platform() == 'cpu'
  largest = max_block or (_CPU_BLOCK if is_cpu else _ACCELERATOR_BLOCK)
  multiple = min(largest, _CPU_MULTIPLE if is_cpu else _ACCELERATOR_MULTIPLE)
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
  arrays = [array for array in (bias.position, bias.extra) if array is not None]
  query_segments = bias.query_segments
  key_segments = bias.key_segments
  prefix = bias.prefix
  if padded_k > k_len and key_segments is None:
    query_segments, key_segments = (
      jnp.zeros((batch, length), jnp.int32) for length in (q_len, k_len)
    )
  if key_segments is not None:
    query_segments = _pad(query_segments, 1, padded_q, NO_KEY)
    key_segments = _pad(key_segments, 1, padded_k, NO_QUERY)
  if prefix is not None:
    prefix = _pad(prefix, 1, max(padded_q, padded_k), False)
  arrays = [array.astype(jnp.float32) for array in arrays]
  for dim, padded in ((2, padded_q), (3, padded_k)):
    arrays = [array if array.shape[dim] == 1 else _pad(array, dim, padded) for array in arrays]
  query, key, value = (
    jnp.swapaxes(_pad(array, 1, padded), 1, 2)
    for array, padded in ((query, padded_q), (key, padded_k), (value, padded_k))
  )
  blocks = _Blocks(q_block, k_block, num_q, num_k, bias.causal, by_row=is_cpu)
  output = _attend(
    blocks, query, key, value, _Bias(distances, tuple(arrays), query_segments, key_segments, prefix)
  )
  return jnp.swapaxes(output, 1, 2)[:, :q_len]
