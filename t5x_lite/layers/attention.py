"""Multi-head attention with T5's parameters, and caches for decoding."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import flax.linen as nn
from flax.linen.spmd import with_logical_constraint
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from t5x_lite.errors import ConfigError
from t5x_lite.layers import beam_cache
from t5x_lite.layers.attention_kernels import dot_product_attention
from t5x_lite.layers.attention_kernels import largest_scores
from t5x_lite.layers.dense import DenseGeneral
from t5x_lite.layers.dense import Initializer
from t5x_lite.layers.masks import AttentionBias
from t5x_lite.layers.masks import causal_bias
from t5x_lite.layers.masks import mask_to_bias
from t5x_lite.layers.masks import rows_at

# (queries or keys <dtype>[batch, length, heads, head_dim], positions int32 [batch or 1, length]) -> queries or keys of
# the same shape with encoded positions.
EncodePositionsFn = Callable[[jax.Array, jax.Array], jax.Array]
# Logical axes of queries, keys and values after their projections.
_PROJECTED_AXES = ('batch', 'length', 'heads', 'kv')

# Collection of the largest scores of a pass.
ATTENTION_SCORES = 'attention_scores'

default_attention_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


class MultiHeadDotProductAttention(nn.Module):
  """Multi-head attention without biases in its projections.

  Scores are not divided by sqrt(head_dim); the query's initializer includes the factor. Parameters are
  `query`, `key`, `value`, `out`.

  Collections for decoding:
    - `cache`, of self-attention: `cached_key`, `cached_value` <dtype>[rows, heads, max length, head_dim] and
      `cache_index`, the number of filled positions: int32 [], or [rows] after a prefill with lengths per row. Each
      `decode=True` call updates it in place. Decoding algorithms copy it for several decodes of an example and reorder
      it; in the form of `beam_cache.share_beams` they reorder only a small table.
    - `cross_cache`, of attention to the encoder's output: `cached_key`, `cached_value` <dtype>[batch, heads, k,
      head_dim], computed once by `cache_keys_values`. It has one row per example, shared by the decodes of an example.

  A pass over full sequences sows `largest` into the collection `attention_scores` if it is mutable: float32 [heads],
  see `attention_kernels.largest_scores`.

  Attributes:
    num_heads: number of heads.
    head_dim: size of a head.
    dtype: compute dtype.
    dropout_rate: dropout of the attention weights.
    kernel_init: initializer of the kernels.
    float32_logits: True to compute the scores in float32.
    flat_kernels: True to store kernels as matrices (`t5` layout), False to store them with separate dims for heads and
      head_dim (`scalable_t5`).
    attention_kernel: kernel for attention over full sequences, one of `ATTENTION_KERNELS`; steps with a cache always
      use 'dot'.
    encode_positions_fn: encoding of positions in queries and keys of self-attention (rotary positions); cached keys are
      encoded. None for no encoding.

  Subclasses may override `project_query` and `project_key_value`; caches contain the results of the latter.
  """

  num_heads: int
  head_dim: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.0
  kernel_init: Initializer = default_attention_init
  float32_logits: bool = False
  flat_kernels: bool = dataclasses.field(default=True, kw_only=True)
  attention_kernel: str = dataclasses.field(default='dot', kw_only=True)
  encode_positions_fn: EncodePositionsFn | None = dataclasses.field(default=None, kw_only=True)

  def setup(self):
    if self.flat_kernels:
      heads_axes = ('joined_kv',)
    else:
      heads_axes = ('heads', 'kv')
    project = functools.partial(
      DenseGeneral,
      (self.num_heads, self.head_dim),
      dtype=self.dtype,
      kernel_axes=('embed', *heads_axes),
      flat_kernel=self.flat_kernels,
    )

    @functools.wraps(self.kernel_init)
    def query_init(*args):
      return self.kernel_init(*args) / jnp.sqrt(self.head_dim).astype(jnp.float32)

    self.query = project(kernel_init=query_init)
    self.key = project(kernel_init=self.kernel_init)
    self.value = project(kernel_init=self.kernel_init)
    self._out_axes = (*heads_axes, 'embed')

  @nn.compact
  def _project_out(self, x: jax.Array, features: int) -> jax.Array:
    """Project <dtype>[batch, q, heads, head_dim] to [batch, q, features]."""
    out = DenseGeneral(
      features,
      axis=(-2, -1),
      dtype=self.dtype,
      kernel_init=self.kernel_init,
      kernel_axes=self._out_axes,
      flat_kernel=self.flat_kernels,
      name='out',
    )(x)
    return checkpoint_name(out, 'attention_output')

  def project_query(self, inputs_q: jax.Array) -> jax.Array:
    """Project <float>[batch, q, embed] to <dtype>[batch, q, heads, head_dim]."""
    return with_logical_constraint(self.query(inputs_q), _PROJECTED_AXES)

  def project_key_value(self, inputs_kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Project <float>[batch, k, embed] to keys and values, <dtype>[batch, k, heads, head_dim] each."""
    key = with_logical_constraint(self.key(inputs_kv), _PROJECTED_AXES)
    value = with_logical_constraint(self.value(inputs_kv), _PROJECTED_AXES)
    return key, value

  def _attend(self, query, key, value, bias, deterministic, heads_first=False):
    """Attend, without the output projection; see `dot_product_attention`."""
    dropout_rng = None
    if not deterministic and self.dropout_rate > 0.0:
      dropout_rng = self.make_rng('dropout')
    # The result is not used in initialization, and its choice of a kernel must not be logged.
    if self.attention_kernel == 'auto' and self.is_initializing():
      kernel = 'dot'
    else:
      kernel = self.attention_kernel
    return dot_product_attention(
      query,
      key,
      value,
      bias,
      dropout_rng,
      self.dropout_rate,
      deterministic,
      self.dtype,
      self.float32_logits,
      kernel=kernel,
      heads_first=heads_first,
    )

  def __call__(
    self,
    inputs_q: jax.Array,
    inputs_kv: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | AttentionBias | None = None,
    *,
    decode: bool = False,
    deterministic: bool = False,
    prefill: bool = False,
    prefill_lengths: jax.Array | None = None,
    cache_length: int | None = None,
  ) -> jax.Array:
    """Attend from `inputs_q` to `inputs_kv`.

    With `decode`, self-attention uses the cache. The first call makes an empty cache and attends as without `decode`. A
    later call appends the keys and values of the next positions, usually one, and attends to all positions so far;
    `bias` then has a row per new position and a column per position of the cache. Of an array with a row per position
    of the cache, as in T5X, the rows of the new positions are used.

    With `prefill`, the call attends as without a cache, with the given mask and bias, and makes a cache of the keys and
    values of the first `prefill_lengths` positions of `inputs_kv`. Later steps overwrite the positions after these and
    do not attend to them.

    Args:
      inputs_q: <float>[batch, q, embed].
      inputs_kv: <float>[batch, k, embed].
      mask: <float>[batch or 1, 1, q, k], positive where attention is allowed.
      bias: `AttentionBias` or <float>[batch or 1, heads or 1, q, k], added to the scores.
      decode: True to use the cache.
      deterministic: True for no dropout.
      prefill: True to make a cache of `inputs_kv`.
      prefill_lengths: int32 [batch]; None for the full length of all rows.
      cache_length: number of positions of a new cache; None for the length of `inputs_kv`.

    Returns:
      <dtype>[batch, q, embed].

    Raises:
      ConfigError: the number of rows differs from the cache's, or the prompt is longer than `cache_length`.
    """
    query = checkpoint_name(self.project_query(inputs_q), 'query')
    key, value = map(checkpoint_name, self.project_key_value(inputs_kv), ('key', 'value'))
    if self.encode_positions_fn is not None:
      first = 0
      if decode and not prefill:
        # A step's positions follow those in the cache.
        first = self.get_variable('cache', 'cache_index', 0)
      query = _encode_positions(self.encode_positions_fn, query, first)
      key = _encode_positions(self.encode_positions_fn, key, first)
    batch, length = inputs_kv.shape[:2]
    if (
      decode
      and isinstance(bias, jax.Array)
      and bias.shape[-2] > length
      and self.has_variable('cache', 'cached_key')
    ):
      bias = rows_at(bias, self.get_variable('cache', 'cache_index'), length)
    bias = _merge(mask, bias)
    if self.is_mutable_collection(ATTENTION_SCORES) and not self.is_initializing():
      dtype = jnp.float32 if self.float32_logits else self.dtype
      largest = largest_scores(query, key, bias, dtype, self.attention_kernel)
      self.sow(ATTENTION_SCORES, 'largest', largest)
    shape = query.shape
    is_step = False
    if prefill:
      self._prefill_cache(key, value, prefill_lengths, cache_length or length)
    elif decode and self.has_variable('cache', 'cached_key'):
      is_step = True
      key, value, bias = self._append_to_cache(key, value, bias)
    elif decode and self.has_variable('cache', 'slot_key'):
      is_step = True
      query, key, value, bias = self._append_to_slots(query, key, value, bias)
    elif decode:
      self.init_cache(batch, cache_length or length)
    x = self._attend(query, key, value, bias, deterministic, heads_first=is_step)
    return self._project_out(x.reshape(shape), inputs_q.shape[-1])

  def attend_to_cache(
    self,
    inputs_q: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | AttentionBias | None = None,
    *,
    deterministic: bool = False,
  ) -> jax.Array:
    """Attend to the keys and values that `cache_keys_values` stored.

    Args:
      inputs_q: <float>[rows, q, embed], with one or several adjacent rows (decodes) per example.
      mask: see `__call__`, for the examples; its dim of queries is 1 if an example has several rows.
      bias: see `__call__`, like `mask`.
      deterministic: True for no dropout.

    Returns:
      <dtype>[rows, q, embed].

    Raises:
      ConfigError: the rows are not a multiple of the examples.
    """
    key = self.get_variable('cross_cache', 'cached_key')
    value = self.get_variable('cross_cache', 'cached_value')
    query = self.project_query(inputs_q)
    rows, q_len, *head_dims = query.shape
    if rows % key.shape[0]:
      raise ConfigError(
        f'The number of rows must be a multiple of the {key.shape[0]} examples of the cache, got '
        f'{rows}. Make the cache from inputs of the same batch.'
      )
    # Queries are independent of each other, so the decodes of an example can be queries of one row.
    query = query.reshape(key.shape[0], -1, *head_dims)
    x = self._attend(query, key, value, _merge(mask, bias), deterministic, heads_first=True)
    return self._project_out(x.reshape(rows, q_len, *head_dims), inputs_q.shape[-1])

  def init_cache(self, batch_size: int, max_length: int) -> None:
    """Make an empty self-attention cache.

    Args:
      batch_size: number of sequences.
      max_length: number of positions.
    """
    shape = (batch_size, self.num_heads, max_length, self.head_dim)
    self._put_keys_values('cache', jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))
    self.put_variable('cache', 'cache_index', jnp.zeros((), jnp.int32))

  def cache_keys_values(self, inputs_kv: jax.Array) -> None:
    """Store the keys and values of `inputs_kv` <float>[batch, k, embed] for `attend_to_cache`."""
    key, value = self.project_key_value(inputs_kv)
    self._put_keys_values('cross_cache', jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))

  def _put_keys_values(
    self, collection: str, key: jax.Array, value: jax.Array, prefix: str = 'cached'
  ) -> None:
    for kind, array in (('key', key), ('value', value)):
      # [batch, heads, length, head_dim]: heads first, so that a step reads the positions of a head in order.
      array = with_logical_constraint(array, ('batch', 'heads', 'length', 'kv'))
      self.put_variable(collection, f'{prefix}_{kind}', array)

  def _prefill_cache(self, key, value, lengths, cache_length):
    """Make a cache of `cache_length` positions that starts with keys and values [batch, length, heads, head_dim]."""
    length = key.shape[1]
    if length > cache_length:
      raise ConfigError(
        f'A prompt must have at most {cache_length} positions, the length of the cache, got {length}. '
        'Increase max_decode_length, or shorten the prompt.'
      )
    padding = ((0, 0), (0, 0), (0, cache_length - length), (0, 0))
    key = jnp.pad(jnp.swapaxes(key, 1, 2), padding)
    value = jnp.pad(jnp.swapaxes(value, 1, 2), padding)
    self._put_keys_values('cache', key, value)
    if lengths is None:
      lengths = length
    self.put_variable('cache', 'cache_index', jnp.asarray(lengths, jnp.int32))

  def _append_to_cache(self, key, value, bias):
    """Append keys and values [batch, new, heads, head_dim] to the cache; return its keys, values and their bias."""
    cached_key = self.get_variable('cache', 'cached_key')
    cached_value = self.get_variable('cache', 'cached_value')
    index = self.get_variable('cache', 'cache_index')
    batch, num_new = key.shape[:2]
    _check_rows(batch, cached_key.shape[0])
    # [batch, heads, length, head_dim] each: all positions of the cache, with the new ones from `index` on.
    key = _append(cached_key, jnp.swapaxes(key, 1, 2), index)
    value = _append(cached_value, jnp.swapaxes(value, 1, 2), index)
    self._put_keys_values('cache', key, value)
    self.put_variable('cache', 'cache_index', index + num_new)
    # [1 or batch, 1, new, length]: masks also the positions of the cache that are not filled.
    visible = causal_bias(num_new, cached_key.shape[2], query_offset=index)
    if bias is None:
      bias = AttentionBias()
    return key, value, bias.plus(visible)

  def _append_to_slots(self, query, key, value, bias):
    """Like `_append_to_cache`, for a cache with slots for beams; also return queries [batch, beam * new, ...]."""
    slot_key = self.get_variable('cache', 'slot_key')
    slot_value = self.get_variable('cache', 'slot_value')
    index = self.get_variable('cache', 'cache_index')
    table = self.get_variable('cache', 'slot_table')
    (rows, num_new, *head_dims) = key.shape
    (batch, _, num_slots, _) = slot_key.shape
    length = table.shape[1]
    num_beams = num_slots // length
    _check_rows(rows, batch * num_beams)
    # [] or [batch]: all beams of an example are at the same position, and a position has a slot for each beam.
    position = index
    if index.ndim:
      position = index.reshape(batch, num_beams)[:, 0]
    first = num_beams * position
    # [batch, heads, length * beam, head_dim] each
    slot_key = _append(slot_key, beam_cache.to_slots(key, num_beams), first)
    slot_value = _append(slot_value, beam_cache.to_slots(value, num_beams), first)
    self._put_keys_values('cache', slot_key, slot_value, prefix='slot')
    self.put_variable('cache', 'cache_index', index + num_new)
    table = beam_cache.mark_slots(table, index, num_new, num_beams)
    self.put_variable('cache', 'slot_table', table)
    if bias is None:
      bias = AttentionBias()
    bias = bias.plus(causal_bias(num_new, length, query_offset=index))
    bias = beam_cache.slot_bias(bias, table, num_new, num_beams)
    # Queries are independent of each other, so the beams of an example are queries of one row.
    query = query.reshape(batch, num_beams * num_new, *head_dims)
    return query, slot_key, slot_value, bias


def _encode_positions(
  encode_fn: EncodePositionsFn, x: jax.Array, first: jax.Array | int
) -> jax.Array:
  """Return queries or keys [batch, length, heads, head_dim] with the encoding of positions from `first` on."""
  positions = jnp.arange(x.shape[1], dtype=jnp.int32)
  # [1 or batch, length]: rows are at different positions after prompts of different lengths.
  positions = jnp.reshape(first, (-1, 1)) + positions
  encoded = encode_fn(x, positions)
  if jnp.shape(encoded) != x.shape:
    raise ConfigError(
      f'`PositionEncoding.encode_positions_fn` must return an array of the shape of its input '
      f'{x.shape}, got shape {jnp.shape(encoded)}.'
    )
  return encoded


def _check_rows(rows: int, expected: int) -> None:
  if rows != expected:
    raise ConfigError(
      f'The number of sequences must be {expected}, that of the cache, got {rows}. Make the cache from '
      'inputs of the same batch and number of decodes.'
    )


def _append(cached: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
  """Return `cached` [batch, heads, length, ...] with `new` [batch, heads, new, ...] at `index`, int32 [] or [batch]."""
  new = new.astype(cached.dtype)
  if index.ndim == 0:
    return lax.dynamic_update_slice_in_dim(cached, new, index, axis=2)
  offsets = jnp.arange(new.shape[2])

  def append_row(row, new_row, start):
    # Full rows (those with long prompts are full first) drop new entries, so that they keep their old ones.
    return row.at[:, start + offsets].set(new_row, mode='drop', unique_indices=True)

  return jax.vmap(append_row)(cached, new, index)


def _merge(mask: jax.Array | None, bias: jax.Array | AttentionBias | None) -> AttentionBias | None:
  """Return the sum of a T5X-style mask, as a bias, and a bias of either form."""
  if bias is not None and not isinstance(bias, AttentionBias):
    bias = AttentionBias.from_array(bias)
  if mask is None:
    return bias
  if bias is None:
    bias = AttentionBias()
  return bias.plus(mask_to_bias(mask))
