"""Layers and decoder of T5 with T5X's arguments: masks as arrays, and one table of position biases for several layers.

They are for networks written for T5X. Those of this package describe masks by tokens and segments instead, so that
attention needs no array of all pairs; see `stacks`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks import stacks
from t5x_lite.networks import t5_blocks
from t5x_lite.networks.t5_blocks import CacheUse
from t5x_lite.networks.t5_config import StackConfig


class _SharedPositions(nn.Module):
  """Attributes of a layer, in T5X's order, that precede those of `t5_blocks.Residual`.

  Attributes:
    config: hyper-parameters.
    relative_embedding: module of position biases, such as `layers.RelativePositionBiases`, which several layers share;
      None if each layer has its own table (`config.relpos_per_layer`).
  """

  config: StackConfig
  relative_embedding: nn.Module | None = None

  def _bias(
    self,
    mask: jax.Array | None,
    q_len: int,
    k_len: int,
    bidirectional: bool,
    offset: jax.Array | None = None,
  ) -> layers.AttentionBias:
    """Return the bias of self-attention, without positions if each layer has its own table."""
    if (self.relative_embedding is None) != self.config.relpos_per_layer:
      if self.config.relpos_per_layer:
        expected = 'None with relpos_bias_tables of each layer'
      else:
        expected = 'a module with relpos_bias_tables of each stack'
      raise ConfigError(
        f'`{type(self).__name__}.relative_embedding` must be {expected}, got {self.relative_embedding}.'
      )
    position = None
    if self.relative_embedding is not None:
      # [1, heads, k_len, k_len]; of a step only the rows of its queries.
      position = self.relative_embedding(k_len, k_len, bidirectional)
      if offset is not None:
        position = layers.rows_at(position, offset, q_len)
    return stacks.masked_bias(mask, position)

  def _cache_use(self, use: CacheUse) -> CacheUse:
    """Return the use of the layer's self-attention cache, with its length and, for a step, its index."""
    cache = self.variables.get('cache', {}).get('self_attention', {})
    if not use.is_used or 'cached_key' not in cache:
      return use
    index = None
    if not use.prefill:
      index = cache['cache_index']
    length = cache['cached_key'].shape[2]
    return dataclasses.replace(use, index=index, max_decode_length=length)


class EncoderLayer(t5_blocks.EncoderLayer, _SharedPositions):
  """Encoder layer, see `t5_blocks.EncoderLayer`, with the mask of its attention as an array.

  Attributes:
    config: hyper-parameters.
    relative_embedding: module of position biases; None if each layer has its own table.
    feed_forward: factory of the feed-forward block, or a tuple of two.
    attention: factory of the attention blocks.
    position_encoding: position encoding of self-attention if each layer has its own table.
  """

  def __call__(
    self, inputs: jax.Array, encoder_mask: jax.Array | None = None, deterministic: bool = False
  ) -> jax.Array:
    """Apply the layer.

    Args:
      inputs: residual stream, <dtype>[batch, length, embed].
      encoder_mask: <any>[batch, 1, length, length], positive where attention is allowed; None for everywhere.
      deterministic: True for no dropout.

    Returns:
      <dtype>[batch, length, embed].
    """
    length = inputs.shape[1]
    return super().__call__(
      inputs, self._bias(encoder_mask, length, length, True), deterministic=deterministic
    )


class DecoderLayer(t5_blocks.DecoderLayer, _SharedPositions):
  """Decoder layer, see `t5_blocks.DecoderLayer`, with masks as arrays.

  Attributes:
    config, relative_embedding, feed_forward, attention, position_encoding: see `EncoderLayer`.
  """

  def __call__(
    self,
    inputs: jax.Array,
    encoded: jax.Array,
    decoder_mask: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> jax.Array:
    """Apply the layer.

    Args:
      inputs: residual stream, <dtype>[batch, length, embed].
      encoded: <dtype>[batch, encoder length, embed].
      decoder_mask: see `stacks.DecoderMasks`.
      encoder_decoder_mask: see `stacks.DecoderMasks`.
      deterministic: True for no dropout.
      decode: True to use the cache; the first call makes it.
      max_decode_length: length of the cache; None for `length` in the call that makes it.

    Returns:
      <dtype>[batch, length, embed].
    """
    return self._apply(
      super().__call__,
      inputs,
      encoded,
      stacks.DecoderMasks(decoder_mask, encoder_decoder_mask),
      deterministic,
      CacheUse(decode=decode, max_decode_length=max_decode_length),
    )

  def _apply(
    self, layer_fn: Callable[..., Any], inputs, encoded, masks, deterministic, cache: CacheUse
  ) -> Any:
    cache = self._cache_use(cache)
    length = inputs.shape[1]
    bias = self._bias(masks.decoder, length, cache.num_keys(length), False, cache.index)
    return layer_fn(
      inputs,
      encoded,
      bias,
      stacks.masked_bias(masks.encoder_decoder),
      None,
      cache,
      deterministic=deterministic,
    )


class DecoderOnlyLayer(DecoderLayer):
  """Layer of a decoder without an encoder, with its mask as an array.

  Attributes:
    config, relative_embedding, feed_forward, attention, position_encoding: see `EncoderLayer`.
  """

  def __call__(
    self,
    inputs: jax.Array,
    decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    prefill: bool = False,
    prefill_lengths: jax.Array | None = None,
  ) -> jax.Array:
    """Apply the layer.

    Args:
      inputs: residual stream, <dtype>[batch, length, embed].
      decoder_mask: see `stacks.DecoderMasks`.
      deterministic: True for no dropout.
      decode: True to use the cache; the first call makes it.
      max_decode_length: length of the cache; None for `length` in the call that makes it.
      prefill: True to read entire prompts and make a cache of them.
      prefill_lengths: int32 [batch], number of cached positions of each row; None for the number of positions that the
        first query attends to by `decoder_mask`, or without a mask for `length`.

    Returns:
      <dtype>[batch, length, embed].

    Raises:
      ConfigError: both `decode` and `prefill`.
    """
    if prefill and decode:
      raise ConfigError(
        '`DecoderOnlyLayer.decode` must be False with prefill=True, got True. Read the prompt first, '
        'then decode step by step.'
      )
    if prefill and prefill_lengths is None and decoder_mask is not None:
      prefill_lengths = jnp.sum(decoder_mask[:, 0, 0] > 0, axis=-1, dtype=jnp.int32)
    cache = CacheUse(
      decode=decode,
      prefill=prefill,
      prefill_lengths=prefill_lengths,
      max_decode_length=max_decode_length,
    )
    return self._apply(
      super(DecoderLayer, self).__call__,
      inputs,
      None,
      stacks.DecoderMasks(decoder_mask, None),
      deterministic,
      cache,
    )


class Decoder(stacks.Decoder):
  """Decoder of an encoder-decoder, see `stacks.Decoder`, with masks as arrays."""

  def __call__(
    self,
    encoded: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_positions: jax.Array | None = None,
    decoder_mask: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> jax.Array:
    """Compute logits of all positions, or of the next positions with a cache.

    Args:
      encoded: <dtype>[batch, encoder length, embed].
      decoder_input_tokens: int32 [batch, length].
      decoder_positions: int32 [batch, length], not used with relative positions.
      decoder_mask: see `stacks.DecoderMasks`.
      encoder_decoder_mask: see `stacks.DecoderMasks`.
      deterministic: True for no dropout.
      decode: True to use the cache; the first call makes it.
      max_decode_length: length of the cache; None for `length` in the call that makes it.

    Returns:
      float32 [batch, length, vocab].
    """
    del decoder_positions
    logits: Any = super().__call__(
      decoder_input_tokens,
      None,
      encoder=stacks.EncoderOutput(encoded, None),
      deterministic=deterministic,
      cache=CacheUse(decode=decode, max_decode_length=max_decode_length),
      masks=stacks.DecoderMasks(decoder_mask, encoder_decoder_mask),
    )
    return logits
