"""The T5 encoder-decoder, in T5X's parameter trees.

`param_layout` decides the parameter tree, `scan_layers` how the stacks are compiled; see `T5Config`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks.stacks import DecoderStack, Stack, layer_tree, prompt_positions
from t5x_lite.networks.t5_blocks import (
    RELATIVE_POSITIONS,
    AttentionFactory,
    AttentionFn,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    FeedForwardFactory,
    FeedForwardFn,
    PositionEncoding,
    TokenFeedForwardFactory,
    Tokens,
    constrain_activations,
    dense_everywhere,
    dense_feed_forward,
    t5_attention,
    t5_attention_everywhere,
    token_embedding,
)
from t5x_lite.networks.t5_config import PARAM_LAYOUTS, RELPOS_BIAS_TABLES, T5Config

__all__ = [
    'AttentionFactory', 'AttentionFn', 'Decoder', 'DecoderLayer', 'Encoder', 'EncoderLayer', 'FeedForward',
    'FeedForwardFactory', 'FeedForwardFn', 'PARAM_LAYOUTS', 'PositionEncoding', 'RELATIVE_POSITIONS',
    'RELPOS_BIAS_TABLES', 'T5Config', 'TokenFeedForwardFactory', 'Tokens', 'Transformer', 'dense_everywhere',
    'dense_feed_forward', 'layer_tree', 't5_attention', 't5_attention_everywhere',
]


class Encoder(Stack):
  """Embedding, encoder layers, norm."""

  @nn.compact
  def __call__(
      self, encoder_input_tokens: jax.Array, encoder_segment_ids: jax.Array | None = None, *,
      deterministic: bool = False) -> jax.Array:
    """Encodes tokens.

    Args:
      encoder_input_tokens: int32 [batch, length]; 0 is padding.
      encoder_segment_ids: int32 [batch, length], numbers the examples packed into one row.
      deterministic: no dropout.

    Returns:
      <dtype>[batch, length, embed].
    """
    cfg = self.config
    length = encoder_input_tokens.shape[1]
    position = self._position(length, length, bidirectional=True)
    valid = encoder_input_tokens > 0
    bias = layers.make_attention_bias(
        valid, valid, query_segment_ids=encoder_segment_ids, key_segment_ids=encoder_segment_ids, position=position)
    x = self._embed(encoder_input_tokens, deterministic)
    tokens = self._tokens('encoder', encoder_input_tokens, valid)
    x = self._run_layers(EncoderLayer, 'encoder', cfg.num_encoder_layers, x, bias, tokens, deterministic=deterministic)
    x = layers.LayerNorm(dtype=cfg.dtype, name='encoder_norm')(x)
    return constrain_activations(nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic))


class Decoder(DecoderStack):
  """Embedding, decoder layers, norm, logits."""

  @nn.compact
  def __call__(
      self, encoded: jax.Array | None, encoder_input_tokens: jax.Array, decoder_input_tokens: jax.Array | None,
      decoder_target_tokens: jax.Array | None, encoder_segment_ids: jax.Array | None = None,
      decoder_segment_ids: jax.Array | None = None, *, deterministic: bool = False, decode: bool = False,
      max_decode_length: int | None = None, prefill: bool = False, prefill_lengths: jax.Array | None = None,
      fill_cache: bool = False) -> jax.Array | None:
    """Computes logits, or makes the cache for doing so step by step.

    Args:
      encoded: <dtype>[batch, encoder length, embed].
      encoder_input_tokens: int32 [batch, encoder length]; 0 is padding.
      decoder_input_tokens: int32 [batch, length].
      decoder_target_tokens: int32 [batch, length]; 0 is padding. Ignored in decoding, where nothing is padding.
      encoder_segment_ids: int32 [batch, encoder length], numbers the examples packed into one row.
      decoder_segment_ids: int32 [batch, length], likewise.
      deterministic: no dropout.
      decode: use the cache.
      max_decode_length: length of the cache.
      prefill: run a whole prompt and make the self-attention cache of it.
      prefill_lengths: int32 [batch], lengths of the prompts.
      fill_cache: only make the cache.

    Returns:
      float32 [batch, length, vocab], or None with `fill_cache`.
    """
    cfg = self.config
    run = functools.partial(self._run_layers, DecoderLayer, 'decoder', cfg.num_decoder_layers)
    if fill_cache:
      return run(None, encoded, deterministic=True, max_decode_length=max_decode_length, fill_cache=True)

    length = decoder_input_tokens.shape[1]
    index = None
    if decode or prefill:
      max_decode_length = self._cache_length(max_decode_length)
      index = None if prefill else self._cached('cache_index')
      valid = prompt_positions(decoder_input_tokens, prefill_lengths)
    else:
      valid = decoder_target_tokens > 0
    if index is None:
      # Teacher forcing; a prompt; and with `decode`, where T5X's way of making a cache is a pass over dummies.
      bias = layers.make_attention_bias(
          valid, valid, query_segment_ids=decoder_segment_ids, key_segment_ids=decoder_segment_ids, causal=True,
          position=self._position(length, length, bidirectional=False))
    else:
      bias = self._step_bias(length, max_decode_length, index)
    cross_bias = layers.make_attention_bias(
        valid, encoder_input_tokens > 0, query_segment_ids=decoder_segment_ids, key_segment_ids=encoder_segment_ids)

    y = self._embed(decoder_input_tokens, deterministic)
    y = run(y, encoded, bias, cross_bias, index, prefill_lengths, self._tokens('decoder', decoder_input_tokens, valid),
            deterministic=deterministic, decode=decode, max_decode_length=max_decode_length, prefill=prefill,
            fresh=('cache',) if prefill else ())
    return self._logits(y, deterministic)


class Transformer(nn.Module):
  """The T5 encoder-decoder.

  Attributes:
    config: hyper-parameters.
    feed_forward_fn: says which feed-forward block, or two, each layer has; T5's own everywhere by default.
    attention_fn: says which attention blocks each layer has; T5's own everywhere by default.
    position_encoding: how self-attention is told of positions; by T5's relative position biases by default.
  """

  config: T5Config
  feed_forward_fn: FeedForwardFn = dense_everywhere
  attention_fn: AttentionFn = t5_attention_everywhere
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def setup(self):
    cfg = self.config
    self.shared_embedding = token_embedding(cfg, name='token_embedder')
    blocks = (self.feed_forward_fn, self.attention_fn, self.position_encoding)
    self.encoder = Encoder(cfg, self.shared_embedding, *blocks)
    self.decoder = Decoder(cfg, self.shared_embedding, *blocks)

  def encode(
      self, encoder_input_tokens: jax.Array, encoder_segment_ids: jax.Array | None = None,
      enable_dropout: bool = True) -> jax.Array:
    """Encodes tokens.

    Args:
      encoder_input_tokens: int32 [batch, encoder length]; 0 is padding.
      encoder_segment_ids: int32 [batch, encoder length], numbers the examples packed into one row.
      enable_dropout: drop out; needs an rng named 'dropout' if the rate is not 0.

    Returns:
      <dtype>[batch, encoder length, embed].
    """
    return self.encoder(encoder_input_tokens, encoder_segment_ids, deterministic=not enable_dropout)

  def decode(
      self, encoded: jax.Array, encoder_input_tokens: jax.Array, decoder_input_tokens: jax.Array,
      decoder_target_tokens: jax.Array, encoder_segment_ids: jax.Array | None = None,
      decoder_segment_ids: jax.Array | None = None, decoder_positions: jax.Array | None = None,
      enable_dropout: bool = True, decode: bool = False, max_decode_length: int | None = None, *,
      prefill: bool = False, prefill_lengths: jax.Array | None = None) -> jax.Array:
    """Computes logits from the encoder's output: of all positions, or of the next ones by means of the cache.

    Cached decoding: `init_cache` makes the collections `cache` and `cross_cache`; then each call with `decode=True` and
    `cache` mutable takes the next token of each sequence and returns its logits. `encoded` is not read in these calls,
    and there may be several rows of tokens side by side for each row of `encoder_input_tokens`: the decodes of an
    example. A cache that was made in T5X's way, by running `__call__` with `decode=True` on dummies of full length,
    comes without keys and values of `encoded`, which are then computed in each call.

    Prompts: a call with `prefill=True` and `cache` mutable runs all positions at once, as in training, and makes a
    `cache` of the first `prefill_lengths` of each row, behind which steps go on.

    Args:
      encoded: <dtype>[batch, encoder length, embed].
      encoder_input_tokens: int32 [batch, encoder length]; 0 is padding.
      decoder_input_tokens: int32 [batch, length].
      decoder_target_tokens: int32 [batch, length]; 0 is padding. Only its padding matters.
      encoder_segment_ids: int32 [batch, encoder length], numbers the examples packed into one row.
      decoder_segment_ids: int32 [batch, length], likewise.
      decoder_positions: int32 [batch, length], a feature of packed batches that relative positions have no use for.
      enable_dropout: drop out.
      decode: use the cache.
      max_decode_length: length of the cache; for a prefill without a cache to replace, that of the prompt when None.
      prefill: run whole prompts and make the cache of them.
      prefill_lengths: int32 [batch], lengths of the prompts; all of `length` when None.

    Returns:
      float32 [batch, length, vocab].

    Raises:
      ConfigError: packed rows in decoding, a cache of another length, or a prompt that is longer than the cache.
    """
    del decoder_positions
    if (decode or prefill) and not (encoder_segment_ids is None and decoder_segment_ids is None):
      raise ConfigError('got segment ids in cached decoding; expected rows that are not packed. Set pack=False.')
    return self.decoder(
        encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids,
        decoder_segment_ids, deterministic=not enable_dropout, decode=decode, max_decode_length=max_decode_length,
        prefill=prefill, prefill_lengths=prefill_lengths)

  @staticmethod
  def share_beams(cache: Mapping[str, Any], num_beams: int) -> dict[str, Any]:
    """Returns `cache` in a form that beam search does not have to move; see `layers.share_beams`."""
    return layers.share_beams(cache, num_beams)

  def init_cache(self, encoded: jax.Array, encoder_input_tokens: jax.Array, max_decode_length: int) -> None:
    """Makes the collections `cache`, empty, and `cross_cache` for decoding up to `max_decode_length` positions.

    Args:
      encoded: <dtype>[batch, encoder length, embed].
      encoder_input_tokens: int32 [batch, encoder length].
      max_decode_length: positions of the self-attention cache.
    """
    self.decoder(encoded, encoder_input_tokens, None, None, deterministic=True, max_decode_length=max_decode_length,
                 fill_cache=True)

  def __call__(
      self, encoder_input_tokens: jax.Array, decoder_input_tokens: jax.Array, decoder_target_tokens: jax.Array,
      encoder_segment_ids: jax.Array | None = None, decoder_segment_ids: jax.Array | None = None,
      encoder_positions: jax.Array | None = None, decoder_positions: jax.Array | None = None, *,
      enable_dropout: bool = True, decode: bool = False) -> jax.Array:
    """Computes the logits of teacher-forced decoding.

    Args:
      encoder_input_tokens: int32 [batch, encoder length]; 0 is padding.
      decoder_input_tokens: int32 [batch, length], the targets shifted right.
      decoder_target_tokens: int32 [batch, length]; 0 is padding.
      encoder_segment_ids: int32 [batch, encoder length], numbers the examples packed into one row.
      decoder_segment_ids: int32 [batch, length], likewise.
      encoder_positions: int32 [batch, encoder length], a feature of packed batches that relative positions have no use
        for.
      decoder_positions: int32 [batch, length], likewise.
      enable_dropout: drop out; needs an rng named 'dropout' if the rate is not 0.
      decode: make an empty self-attention cache of `length` positions, as T5X does.

    Returns:
      float32 [batch, length, vocab].
    """
    del encoder_positions
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout=enable_dropout)
    return self.decode(
        encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids,
        decoder_segment_ids, decoder_positions, enable_dropout=enable_dropout, decode=decode)
