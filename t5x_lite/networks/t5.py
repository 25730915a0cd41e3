"""T5 encoder-decoder in T5X's parameter trees.

`param_layout` is the form of the parameter tree, `scan_layers` the form of the compiled stacks; see `T5Config`.
"""

from typing import ClassVar

import jax

from t5x_lite import layers
from t5x_lite.networks import stacks
from t5x_lite.networks.masked import Decoder
from t5x_lite.networks.masked import DecoderLayer
from t5x_lite.networks.masked import EncoderLayer
from t5x_lite.networks.stacks import Encoder
from t5x_lite.networks.stacks import EncoderOutput
from t5x_lite.networks.stacks import StackNetwork
from t5x_lite.networks.stacks import layer_tree
from t5x_lite.networks.t5_blocks import RELATIVE_POSITIONS
from t5x_lite.networks.t5_blocks import AttentionFactory
from t5x_lite.networks.t5_blocks import AttentionFn
from t5x_lite.networks.t5_blocks import CacheUse
from t5x_lite.networks.t5_blocks import FeedForward
from t5x_lite.networks.t5_blocks import FeedForwardFactory
from t5x_lite.networks.t5_blocks import FeedForwardFn
from t5x_lite.networks.t5_blocks import PositionEncoding
from t5x_lite.networks.t5_blocks import TokenFeedForwardFactory
from t5x_lite.networks.t5_blocks import Tokens
from t5x_lite.networks.t5_blocks import dense_everywhere
from t5x_lite.networks.t5_blocks import dense_feed_forward
from t5x_lite.networks.t5_blocks import t5_attention
from t5x_lite.networks.t5_blocks import t5_attention_everywhere
from t5x_lite.networks.t5_blocks import token_embedding
from t5x_lite.networks.t5_config import PARAM_LAYOUTS
from t5x_lite.networks.t5_config import RELPOS_BIAS_TABLES
from t5x_lite.networks.t5_config import T5Config

__all__ = [
  'AttentionFactory',
  'AttentionFn',
  'Decoder',
  'DecoderLayer',
  'Encoder',
  'EncoderLayer',
  'FeedForward',
  'FeedForwardFactory',
  'FeedForwardFn',
  'PARAM_LAYOUTS',
  'PositionEncoding',
  'RELATIVE_POSITIONS',
  'RELPOS_BIAS_TABLES',
  'T5Config',
  'TokenFeedForwardFactory',
  'Tokens',
  'Transformer',
  'dense_everywhere',
  'dense_feed_forward',
  'layer_tree',
  't5_attention',
  't5_attention_everywhere',
]


class Transformer(StackNetwork):
  """T5 encoder-decoder; for its attributes see `StackNetwork`."""

  ACCEPTS_STACKED_LAYERS: ClassVar[bool] = True
  SUPPORTS_CHUNKED_LOSS: ClassVar[bool] = True
  config: T5Config

  def setup(self):
    self.shared_embedding = token_embedding(self.config, name='token_embedder')
    self.encoder = self._stack(Encoder, self.shared_embedding)
    self.decoder = self._stack(stacks.Decoder, self.shared_embedding)

  def encode(
    self,
    encoder_input_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    enable_dropout: bool = True,
  ) -> jax.Array:
    """Encode tokens.

    Args:
      encoder_input_tokens: int32 [batch, encoder length]; 0 is padding.
      encoder_segment_ids: int32 [batch, encoder length], number of the packed example of each position.
      enable_dropout: True for dropout, which needs an rng named 'dropout' if the rate is not 0.

    Returns:
      <dtype>[batch, encoder length, embed].
    """
    return self.encoder(
      encoder_input_tokens,
      deterministic=not enable_dropout,
      encoder_segment_ids=encoder_segment_ids,
    )

  def decode(
    self,
    encoded: jax.Array,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
    decoder_positions: jax.Array | None = None,
    enable_dropout: bool = True,
    decode: bool = False,
    max_decode_length: int | None = None,
    *,
    prefill: bool = False,
    prefill_lengths: jax.Array | None = None,
    return_logits: bool = True,
  ) -> jax.Array | layers.OutputProjection:
    """Compute logits from the encoder's output: of all positions, or of the next positions with a cache.

    Cached decoding: `init_cache` makes the collections `cache` and `cross_cache`; then each call with `decode=True` and
    `cache` mutable reads the next token of each sequence and returns its logits. These calls do not read `encoded`, and
    a row of `encoder_input_tokens` may have several adjacent rows of tokens, the decodes of an example. A cache made as
    in T5X, by `__call__` with `decode=True` on dummy inputs of full length, has no keys and values of `encoded`, which
    are then computed in each call.

    Prompts: a call with `prefill=True` and `cache` mutable reads all positions at once, as in training, and makes a
    `cache` of the first `prefill_lengths` positions of each row; steps continue after these.

    Args:
      encoded: <dtype>[batch, encoder length, embed].
      encoder_input_tokens: int32 [batch, encoder length]; 0 is padding.
      decoder_input_tokens: int32 [batch, length].
      decoder_target_tokens: int32 [batch, length]; 0 is padding. Only its padding is used.
      encoder_segment_ids: int32 [batch, encoder length], number of the packed example of each position.
      decoder_segment_ids: int32 [batch, length], see `encoder_segment_ids`.
      decoder_positions: int32 [batch, length], not used with relative positions.
      enable_dropout: True for dropout.
      decode: True to use the cache.
      max_decode_length: length of the cache; None for the length of the prompt in a prefill without cache.
      prefill: True to read entire prompts and make a cache of them.
      prefill_lengths: int32 [batch], lengths of the prompts; None for `length`.
      return_logits: False to return the operands of the product that gives the logits.

    Returns:
      float32 [batch, length, vocab].

    Raises:
      ConfigError: packed rows in decoding, a cache of another length, or a prompt longer than the cache.
    """
    del decoder_positions
    return self.decoder(
      decoder_input_tokens,
      decoder_target_tokens,
      decoder_segment_ids,
      encoder=EncoderOutput(encoded, encoder_input_tokens, encoder_segment_ids),
      deterministic=not enable_dropout,
      cache=CacheUse(
        decode=decode,
        prefill=prefill,
        prefill_lengths=prefill_lengths,
        max_decode_length=max_decode_length,
      ),
      return_logits=return_logits,
    )

  def init_cache(
    self, encoded: jax.Array, encoder_input_tokens: jax.Array, max_decode_length: int
  ) -> None:
    """Make the collections `cache`, empty, and `cross_cache` for decoding up to `max_decode_length` positions.

    Args:
      encoded: <dtype>[batch, encoder length, embed].
      encoder_input_tokens: int32 [batch, encoder length].
      max_decode_length: number of positions of the self-attention cache.
    """
    self.decoder(
      None,
      None,
      encoder=EncoderOutput(encoded, encoder_input_tokens),
      deterministic=True,
      cache=CacheUse(fill=True, max_decode_length=max_decode_length),
    )

  def __call__(
    self,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
    encoder_positions: jax.Array | None = None,
    decoder_positions: jax.Array | None = None,
    *,
    enable_dropout: bool = True,
    decode: bool = False,
    return_logits: bool = True,
  ) -> jax.Array | layers.OutputProjection:
    """Compute the logits of teacher-forced decoding.

    Args:
      encoder_input_tokens: int32 [batch, encoder length]; 0 is padding.
      decoder_input_tokens: int32 [batch, length], the targets shifted right.
      decoder_target_tokens: int32 [batch, length]; 0 is padding.
      encoder_segment_ids: int32 [batch, encoder length], number of the packed example of each position.
      decoder_segment_ids: int32 [batch, length], see `encoder_segment_ids`.
      encoder_positions: int32 [batch, encoder length], not used with relative positions.
      decoder_positions: int32 [batch, length], not used with relative positions.
      enable_dropout: True for dropout, which needs an rng named 'dropout' if the rate is not 0.
      decode: True to make an empty self-attention cache of `length` positions, as in T5X.
      return_logits: see `decode`.

    Returns:
      float32 [batch, length, vocab].
    """
    del encoder_positions
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout=enable_dropout)
    return self.decode(
      encoded,
      encoder_input_tokens,
      decoder_input_tokens,
      decoder_target_tokens,
      encoder_segment_ids,
      decoder_segment_ids,
      decoder_positions,
      enable_dropout=enable_dropout,
      decode=decode,
      return_logits=return_logits,
    )
