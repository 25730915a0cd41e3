"""Attention masks, as in T5X, and the biases that attention adds to its scores.

T5X makes a mask [batch, 1, q, k] and converts it to a bias in every layer. Here a stack makes one `AttentionBias` for
all of its layers, with parts of the smallest shapes that broadcast: [batch, 1, 1, k] for padding, [1, 1, q, k] for
causality.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.errors import ConfigError

# Bias of masked keys. It is finite, so that the difference of two masked scores is a number.
MASKED_BIAS = -1e10
# Least score of a visible key, between real scores and the biases of masks, which are -1e9 or less by convention.
LEAST_VISIBLE_SCORE = -5e8
# Segments of padding: queries that attend to no key, and keys that no query attends to.
NO_KEY = -2
NO_QUERY = -1


def make_attention_mask(
  query_input: jax.Array,
  key_input: jax.Array,
  pairwise_fn: Callable[[Any, Any], Any] = jnp.multiply,
  extra_batch_dims: int = 0,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Return the mask of a function of every query and key position.

  Args:
    query_input: [batch, q].
    key_input: [batch, k].
    pairwise_fn: elementwise function of (query value, key value); nonzero or True where attention is allowed.
    extra_batch_dims: number of leading dims of size 1.
    dtype: dtype of the mask.

  Returns:
    <dtype>[1, ..., batch, 1, q, k].
  """
  mask = pairwise_fn(query_input[..., :, None], key_input[..., None, :])[..., None, :, :]
  return jnp.expand_dims(mask, tuple(range(extra_batch_dims))).astype(dtype)


def make_causal_mask(
  x: jax.Array, extra_batch_dims: int = 0, dtype: Any = jnp.float32
) -> jax.Array:
  """Return the causal mask: each position attends to itself and to earlier positions.

  Args:
    x: [batch, length]; only its shape is used.
    extra_batch_dims: number of leading dims of size 1.
    dtype: dtype of the mask.

  Returns:
    <dtype>[1, ..., batch, 1, length, length].
  """
  positions = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
  return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def _same_rank(kind: str, arrays: list[jax.Array]) -> None:
  ranks = [array.ndim for array in arrays]
  if len(set(ranks)) > 1:
    raise ConfigError(f'All {kind} must have the same rank, got ranks {ranks}. Add dims of size 1.')


def combine_masks(*masks: jax.Array | None, dtype: Any = jnp.float32) -> jax.Array | None:
  """Return the logical and of `masks`, in `dtype`; None if all are None.

  Args:
    *masks: <any>[...], nonzero where attention is allowed, of one rank and shapes that broadcast; or None.
    dtype: dtype of the result.
  """
  present = [mask for mask in masks if mask is not None]
  if not present:
    return None
  _same_rank('masks', present)
  combined = present[0]
  for mask in present[1:]:
    combined = jnp.logical_and(combined, mask)
  return combined.astype(dtype)


def combine_biases(*masks: jax.Array | None) -> jax.Array | None:
  """Return the sum of the biases `masks`; None if all are None.

  Args:
    *masks: <float>[...], of one rank and shapes that broadcast; or None.
  """
  present = [bias for bias in masks if bias is not None]
  if not present:
    return None
  _same_rank('biases', present)
  return sum(present[1:], start=present[0])


def make_decoder_mask(
  decoder_target_tokens: jax.Array,
  dtype: Any,
  decoder_causal_attention: jax.Array | None = None,
  decoder_segment_ids: jax.Array | None = None,
) -> jax.Array:
  """Return the mask of decoder self-attention: causal, without padding, within segments.

  Args:
    decoder_target_tokens: int32 [batch, length]; 0 is padding.
    dtype: dtype of the mask.
    decoder_causal_attention: int32 [batch, length], nonzero on a prefix with bidirectional attention (prefix
      language model).
    decoder_segment_ids: int32 [batch, length], number of the packed example of each position.

  Returns:
    <dtype>[batch, 1, length, length].
  """
  visible = make_causal_mask(decoder_target_tokens, dtype=jnp.bool_)
  if decoder_causal_attention is not None:
    prefix = make_attention_mask(
      decoder_causal_attention, decoder_causal_attention, jnp.logical_and, dtype=jnp.bool_
    )
    visible = jnp.logical_or(visible, prefix)
  valid = decoder_target_tokens > 0
  same_segment = None
  if decoder_segment_ids is not None:
    same_segment = make_attention_mask(
      decoder_segment_ids, decoder_segment_ids, jnp.equal, dtype=jnp.bool_
    )
  both_valid = make_attention_mask(valid, valid, jnp.logical_and, dtype=jnp.bool_)
  mask = combine_masks(visible, both_valid, same_segment, dtype=dtype)
  assert mask is not None  # `visible` is not.
  return mask


def mask_to_bias(mask: jax.Array) -> jax.Array:
  """Return float32 of `mask`'s shape: 0 where `mask` is positive or True, `MASKED_BIAS` elsewhere."""
  allowed = mask
  if mask.dtype != jnp.bool_:
    allowed = mask > 0
  return jnp.where(allowed, 0.0, MASKED_BIAS).astype(jnp.float32)


def causal_bias(q_len: int, k_len: int, query_offset: jax.Array | int = 0) -> jax.Array:
  """Return float32 [1 or batch, 1, q_len, k_len]: 0 for keys up to the query's position, `MASKED_BIAS` after it.

  Args:
    q_len: number of queries, at positions query_offset, query_offset + 1, ...
    k_len: number of keys, at positions 0 to k_len - 1.
    query_offset: position of the first query, int32 [] or [batch].
  """
  first = jnp.reshape(jnp.asarray(query_offset, jnp.int32), (-1, 1, 1))
  queries = first + jnp.arange(q_len, dtype=jnp.int32)[:, None]
  return mask_to_bias(queries >= jnp.arange(k_len, dtype=jnp.int32))[:, None]


def rows_at(bias: jax.Array, first: jax.Array, num: int) -> jax.Array:
  """Return the biases of consecutive queries, <float>[1 or batch, heads or 1, num, k].

  Args:
    bias: <float>[1 or batch, heads or 1, q, k], the biases of all queries.
    first: position of the first query, int32 [] or [batch].
    num: number of queries.
  """
  if first.ndim == 0:
    return lax.dynamic_slice_in_dim(bias, first, num, axis=2)
  bias = jnp.broadcast_to(bias, (first.shape[0], *bias.shape[1:]))
  return jax.vmap(lambda rows, start: lax.dynamic_slice_in_dim(rows, start, num, axis=1))(
    bias, first
  )


def _lengths(valid: jax.Array) -> jax.Array:
  """Return int32 [batch], the position after the last True of each row; at least 1, as fused kernels need one key."""
  ends = jnp.where(valid, jnp.arange(1, valid.shape[-1] + 1, dtype=jnp.int32), 1)
  return jnp.max(ends, axis=-1)


@flax.struct.dataclass
class DistanceBias:
  """Biases of scores that depend on head and distance only, such as those of `RelativePositionBiases`.

  Attributes:
    values: float32 [heads, q + k - 1], the bias of the distance `key position - query position` at index
      `distance + q - 1`.
    q_len: number of queries.
  """

  values: jax.Array
  q_len: int = flax.struct.field(pytree_node=False)

  @property
  def k_len(self) -> int:
    """Number of keys."""
    return self.values.shape[1] - self.q_len + 1

  def to_array(self) -> jax.Array:
    """Return float32 [1, heads, q, k]."""
    return expand_diagonals(self.values, self.q_len, self.k_len)[None]


def expand_diagonals(values: jax.Array, q_len: int, k_len: int) -> jax.Array:
  """Return [..., q_len, k_len] with entries (i, j) = `values[..., j - i + q_len - 1]`.

  Rows are slices of a repeated copy of `values` whose period is one longer than the row stride, so that each row starts
  one entry earlier. The derivative is a plain sum; that of a gather would be a scatter with many collisions.

  Args:
    values: [..., q_len + k_len - 1].
    q_len: number of rows.
    k_len: number of columns.
  """
  period = q_len + k_len
  lead = values.shape[:-1]
  no_pad = [(0, 0, 0)] * len(lead)
  padded = lax.pad(values, jnp.zeros((), values.dtype), [*no_pad, (0, 1, 0)])
  repeated = jnp.broadcast_to(padded[..., None, :], (*lead, q_len, period)).reshape(
    *lead, q_len * period
  )
  start = q_len - 1
  skewed = lax.slice_in_dim(repeated, start, start + q_len * (period - 1), axis=-1)
  return skewed.reshape(*lead, q_len, period - 1)[..., :k_len]


def sum_over_batch(scores: jax.Array) -> jax.Array:
  """Return [heads, q, k], the sum of float32 scores [batch, heads, q, k] over the batch.

  It is a product with ones: the CPU compiler's reduction over the leading dim is about forty times slower, nearly as
  slow as the rest of the derivative of an attention.
  """
  ones = jnp.ones(scores.shape[:1], scores.dtype)
  return jnp.einsum('b,bhqk->hqk', ones, scores, precision=lax.Precision.HIGHEST)


@flax.struct.dataclass
class AttentionBias:
  """Bias of attention scores [batch, heads, q, k], as a description of linear size and as arrays.

  The plain kernel adds `shared + per_example`. The other fields describe the same bias for kernels that never have all
  scores.

  Attributes:
    shared: float32 [1, heads or 1, q or 1, k] or None.
    per_example: float32 [batch, heads or 1, q or 1, k] or None.
    position: float32 [1, heads or 1, q or 1, k], biases of positions, or None.
    distances: biases of positions by distance, or None.
    extra: float32 [batch or 1, heads or 1, q or 1, k], a plain bias in addition to the described one, or None.
    query_segments: int32 [batch, q] or None. A query attends to the keys with its number.
    key_segments: int32 [batch, k] or None, negative at padding.
    query_lengths: int32 [batch], positions up to the last token of each row; None in packed rows.
    key_lengths: int32 [batch], like `query_lengths`.
    prefix: bool [batch, length], True at positions that attend to each other in spite of causality; or None.
    causal: True if queries do not attend to later keys.
    is_packed: True if rows have several segments.
    has_arrays: False before `with_arrays`.
  """

  shared: jax.Array | None = None
  per_example: jax.Array | None = None
  position: jax.Array | None = None
  distances: DistanceBias | None = None
  extra: jax.Array | None = None
  query_segments: jax.Array | None = None
  key_segments: jax.Array | None = None
  query_lengths: jax.Array | None = None
  key_lengths: jax.Array | None = None
  prefix: jax.Array | None = None
  causal: bool = flax.struct.field(pytree_node=False, default=False)
  is_packed: bool = flax.struct.field(pytree_node=False, default=False)
  has_arrays: bool = flax.struct.field(pytree_node=False, default=True)

  @classmethod
  def from_array(cls, bias: jax.Array) -> 'AttentionBias':
    """Wrap a plain bias <float>[batch or 1, heads or 1, q or 1, k]."""
    return cls().plus(bias)

  @property
  def has_position(self) -> bool:
    """True with biases of positions."""
    return self.position is not None or self.distances is not None

  def position_array(self) -> jax.Array | None:
    """Return float32 [1, heads or 1, q or 1, k], the biases of positions, or None."""
    if self.distances is None:
      return self.position
    return self.distances.to_array()

  def with_arrays(self) -> 'AttentionBias':
    """Return this bias with `shared` and `per_example`."""
    if self.has_arrays:
      return self
    return dataclasses.replace(self, has_arrays=True)._with_new_arrays()

  def segments(self) -> tuple[jax.Array, jax.Array]:
    """Return `query_segments` and `key_segments` of a bias that has them, such as those of `make_attention_bias`."""
    assert self.query_segments is not None
    assert self.key_segments is not None
    return self.query_segments, self.key_segments

  def _with_new_arrays(self) -> 'AttentionBias':
    """Return this bias with the arrays of its description, if it has arrays."""
    if not self.has_arrays:
      return self
    shared = [self.position_array()]
    per_example = []
    if self.causal and self.prefix is None:
      queries, keys = self.segments()
      # [1, 1, q, k]: the same for all examples and heads.
      shared.append(causal_bias(queries.shape[1], keys.shape[1]))
    if self.key_segments is not None:
      queries, keys = self.segments()
      # [batch, 1, k] for padding, [batch, q, k] for packed rows or a prefix.
      visible = keys[:, None, :] >= 0
      if self.is_packed:
        visible &= queries[:, :, None] == keys[:, None, :]
      if self.prefix is not None:
        length = self.prefix.shape[1]
        causally = causal_bias(length, length)[:, 0] == 0
        visible &= causally | (self.prefix[:, :, None] & self.prefix[:, None, :])
      per_example.append(mask_to_bias(visible)[:, None])
    if self.extra is not None:
      if self.extra.shape[0] == 1:
        shared.append(self.extra)
      else:
        per_example.append(self.extra)
    return dataclasses.replace(
      self, shared=combine_biases(*shared), per_example=combine_biases(*per_example)
    )

  def plus(self, bias: jax.Array) -> 'AttentionBias':
    """Return the sum of this bias and a plain one <float>[batch or 1, heads or 1, q or 1, k]."""
    extra = combine_biases(self.extra, bias.astype(jnp.float32))
    return dataclasses.replace(self, extra=extra)._with_new_arrays()

  def with_position(self, position: jax.Array | DistanceBias) -> 'AttentionBias':
    """Return this bias with other position biases, <float>[1, heads, q, k] or by distance.

    Biases [batch, heads, q, k], for rows at different positions, are added as a plain bias.
    """
    if isinstance(position, DistanceBias):
      return dataclasses.replace(self, position=None, distances=position)._with_new_arrays()
    if position.shape[0] != 1:
      return self.plus(position)
    position = position.astype(jnp.float32)
    return dataclasses.replace(self, position=position, distances=None)._with_new_arrays()


def make_attention_bias(
  query_valid: jax.Array,
  key_valid: jax.Array,
  *,
  query_segment_ids: jax.Array | None = None,
  key_segment_ids: jax.Array | None = None,
  causal: bool = False,
  prefix: jax.Array | None = None,
  position: jax.Array | DistanceBias | None = None,
  arrays: bool = True,
) -> AttentionBias:
  """Return the bias of one kind of attention, for all layers of a stack.

  Only padding keys are masked: no loss depends on padding *queries*, whose mask would need the shape [batch, q, k].
  (T5X masks them, so that they attend uniformly.)

  Args:
    query_valid: bool [batch, q], False at padding.
    key_valid: bool [batch, k], False at padding.
    query_segment_ids: int32 [batch, q], number of the packed example of each position; None for unpacked rows.
    key_segment_ids: int32 [batch, k], see `query_segment_ids`; both or neither.
    causal: True if queries do not attend to later keys.
    prefix: bool [batch, length], for causal self-attention: True at positions with bidirectional attention within their
      segment.
    position: position biases, <float>[1, heads, q, k] or by distance.
    arrays: True to make the arrays of the plain kernel here, once for all layers, False to let each layer make them
      that needs them. See `uses_arrays`.

  Returns:
    The bias.

  Raises:
    ConfigError: only one of the two segment ids is given, or a prefix without causality.
  """
  if (query_segment_ids is None) != (key_segment_ids is None):
    raise ConfigError(
      'An attention must have segment ids of both sides or neither, got one. Pass encoder_segment_ids '
      'and decoder_segment_ids together.'
    )
  if prefix is not None and not causal:
    raise checks.invalid(
      'make_attention_bias', 'prefix', 'None without causal=True', 'an array', 'Pass causal=True.'
    )
  is_packed = False
  if query_segment_ids is not None and key_segment_ids is not None:
    is_packed = True
    # Padding attends to nothing, so that blocks of it can be skipped.
    query_segments = jnp.where(query_valid, query_segment_ids, NO_KEY).astype(jnp.int32)
    key_segments = key_segment_ids.astype(jnp.int32)
  else:
    query_segments = jnp.zeros(query_valid.shape, jnp.int32)
    key_segments = jnp.zeros(key_valid.shape, jnp.int32)
  bias = AttentionBias(
    query_segments=query_segments,
    key_segments=jnp.where(key_valid, key_segments, NO_QUERY),
    prefix=prefix,
    causal=causal,
    is_packed=is_packed,
    has_arrays=False,
  )
  if not is_packed:
    bias = dataclasses.replace(
      bias, query_lengths=_lengths(query_valid), key_lengths=_lengths(key_valid)
    )
  if position is not None:
    bias = bias.with_position(position)
  if arrays:
    return bias.with_arrays()
  return bias
