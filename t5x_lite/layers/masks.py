"""Attention masks, as in T5X, and the biases that attention adds to its scores.

T5X makes a mask [batch, 1, q, k] and converts it to a bias in every layer. Here a stack makes one `AttentionBias` for
all of its layers, with parts of the smallest shapes that broadcast: [batch, 1, 1, k] for padding, [1, 1, q, k] for
causality.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_lite.errors import ConfigError

# Bias of masked keys. It is finite, so that a row with only masked keys stays finite.
MASKED_BIAS = -1e10


def make_attention_mask(
    query_input: jax.Array, key_input: jax.Array, pairwise_fn: Callable[[Any, Any], Any] = jnp.multiply,
    extra_batch_dims: int = 0, dtype: Any = jnp.float32) -> jax.Array:
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


def make_causal_mask(x: jax.Array, extra_batch_dims: int = 0, dtype: Any = jnp.float32) -> jax.Array:
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
    decoder_target_tokens: jax.Array, dtype: Any, decoder_causal_attention: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None) -> jax.Array:
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
    prefix = make_attention_mask(decoder_causal_attention, decoder_causal_attention, jnp.logical_and, dtype=jnp.bool_)
    visible = jnp.logical_or(visible, prefix)
  valid = decoder_target_tokens > 0
  same_segment = None
  if decoder_segment_ids is not None:
    same_segment = make_attention_mask(decoder_segment_ids, decoder_segment_ids, jnp.equal, dtype=jnp.bool_)
  return combine_masks(visible, make_attention_mask(valid, valid, jnp.logical_and, dtype=jnp.bool_), same_segment,
                       dtype=dtype)


def mask_to_bias(mask: jax.Array) -> jax.Array:
  """Return float32 of `mask`'s shape: 0 where `mask` is positive or True, `MASKED_BIAS` elsewhere."""
  allowed = mask if mask.dtype == jnp.bool_ else mask > 0
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


def _lengths(valid: jax.Array) -> jax.Array:
  """Return int32 [batch], the position after the last True of each row; at least 1, as fused kernels need one key."""
  ends = jnp.where(valid, jnp.arange(1, valid.shape[-1] + 1, dtype=jnp.int32), 1)
  return jnp.max(ends, axis=-1)


@flax.struct.dataclass
class AttentionBias:
  """Bias of attention scores [batch, heads, q, k], in float32 parts.

  The bias is `shared + per_example`. The other fields describe it for a fused kernel: `position` is `shared` without
  causality, `causal` is True if `shared` includes it, and the lengths are set if only padding is masked per example.

  Attributes:
    shared: [1, heads or 1, q or 1, k] or None.
    per_example: [batch, 1, q or 1, k] or None; [batch, heads, q, k] if positions differ between rows.
    position: [1, heads or 1, q, k] or None.
    query_lengths: int32 [batch] or None.
    key_lengths: int32 [batch] or None.
    causal: True if queries do not attend to later keys.
  """

  shared: jax.Array | None = None
  per_example: jax.Array | None = None
  position: jax.Array | None = None
  query_lengths: jax.Array | None = None
  key_lengths: jax.Array | None = None
  causal: bool = flax.struct.field(pytree_node=False, default=False)

  @classmethod
  def from_array(cls, bias: jax.Array) -> 'AttentionBias':
    """Wrap a plain bias <float>[batch or 1, heads or 1, q or 1, k]."""
    bias = bias.astype(jnp.float32)
    return cls(shared=bias, position=bias) if bias.shape[0] == 1 else cls(per_example=bias)

  def plus(self, bias: jax.Array) -> 'AttentionBias':
    """Return the sum of this bias and a plain one <float>[batch or 1, heads or 1, q or 1, k].

    The lengths become None, since the plain bias may mask more than padding.
    """
    other = AttentionBias.from_array(bias)
    return self.replace(
        shared=combine_biases(self.shared, other.shared), position=combine_biases(self.position, other.position),
        per_example=combine_biases(self.per_example, other.per_example), query_lengths=None, key_lengths=None)

  def with_position(self, position: jax.Array) -> 'AttentionBias':
    """Return this bias with other position biases <float>[1, heads, q, k].

    Biases [batch, heads, q, k], for rows at different positions, are added to `per_example`.
    """
    if position.shape[0] != 1:
      return self.plus(position)
    position = position.astype(jnp.float32)
    shared = position + causal_bias(*position.shape[-2:]) if self.causal else position
    return self.replace(position=position, shared=shared)


def make_attention_bias(
    query_valid: jax.Array, key_valid: jax.Array, *, query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None, causal: bool = False, prefix: jax.Array | None = None,
    position: jax.Array | None = None) -> AttentionBias:
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
    position: <float>[1, heads, q, k], position biases.

  Returns:
    The bias.

  Raises:
    ConfigError: only one of the two segment ids is given.
  """
  if (query_segment_ids is None) != (key_segment_ids is None):
    raise ConfigError('An attention must have segment ids of both sides or neither, got one. Pass encoder_segment_ids '
                      'and decoder_segment_ids together.')
  if causal and prefix is not None:
    visible = causal_bias(*(prefix.shape[1],) * 2) == 0
    visible = (visible[:, 0] | (prefix[:, :, None] & prefix[:, None, :])) & key_valid[:, None, :]
    if query_segment_ids is not None:
      visible &= query_segment_ids[:, :, None] == key_segment_ids[:, None, :]
    bias = AttentionBias(per_example=mask_to_bias(visible)[:, None])
    return bias if position is None else bias.with_position(position)
  bias = AttentionBias(causal=causal)
  if query_segment_ids is None:
    bias = bias.replace(per_example=mask_to_bias(key_valid)[:, None, None, :],
                        query_lengths=_lengths(query_valid), key_lengths=_lengths(key_valid))
  else:
    same_segment = query_segment_ids[:, :, None] == key_segment_ids[:, None, :]
    bias = bias.replace(per_example=mask_to_bias(same_segment & key_valid[:, None, :])[:, None])
  if position is not None:
    return bias.with_position(position)
  return bias.replace(shared=causal_bias(query_valid.shape[1], key_valid.shape[1])) if causal else bias
