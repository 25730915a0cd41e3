"""Decoder-only Transformer in T5X's parameter tree: causal, or with bidirectional attention among prefixes.

Its layers are those of T5's decoder without the attention to an encoder. See `StackConfig` for `param_layout` and
`scan_layers`.
"""

from typing import ClassVar

import jax

from t5x_lite import layers
from t5x_lite.networks import stacks
from t5x_lite.networks.masked import DecoderOnlyLayer as DecoderLayer
from t5x_lite.networks.t5_blocks import CacheUse
from t5x_lite.networks.t5_config import TransformerConfig

__all__ = ['Decoder', 'DecoderLayer', 'DecoderWrapper', 'TransformerConfig']


class Decoder(stacks.Decoder):
  """Decoder without an encoder: embedding, layers, norm, logits."""

  def __call__(
    self,
    decoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    decoder_segment_ids: jax.Array | None = None,
    decoder_positions: jax.Array | None = None,
    decoder_causal_attention: jax.Array | None = None,
    *,
    enable_dropout: bool = True,
    decode: bool = False,
    max_decode_length: int | None = None,
    prefill: bool | None = None,
    prefill_lengths: jax.Array | None = None,
    return_logits: bool = True,
  ) -> jax.Array | layers.OutputProjection:
    """Compute logits of all positions, or of the next positions with a cache.

    Cached decoding: a call with `prefill=True` and `cache` mutable reads entire prompts at once, as in training, and
    makes a `cache` of the first `prefill_lengths` positions of each row. Then each call with `decode=True` reads the
    next token of each row. Without a prompt, as in T5X, a call with `decode=True` and no cache makes an empty cache of
    `length` positions.

    Args:
      decoder_input_tokens: int32 [batch, length], the targets shifted right.
      decoder_target_tokens: int32 [batch, length]; 0 is padding. Only its padding is used, and not in decoding.
      decoder_segment_ids: int32 [batch, length], number of the packed example of each position.
      decoder_positions: int32 [batch, length], not used with relative positions.
      decoder_causal_attention: int32 [batch, length], nonzero at positions with bidirectional attention (within their
        segment), the prefix of a prefix language model; None for causal attention.
      enable_dropout: True for dropout, which needs an rng named 'dropout' if the rate is not 0.
      decode: True to use the cache.
      max_decode_length: length of the cache; None for `length` in a call that makes one.
      prefill: True to read entire prompts and make a cache of them.
      prefill_lengths: int32 [batch], number of cached positions of each row; None for `length`.
      return_logits: False to return the operands of the product that gives the logits.

    Returns:
      float32 [batch, length, vocab].

    Raises:
      ConfigError: packed rows in decoding, a prefix in a step of decoding, or a cache of another length.
    """
    del decoder_positions
    return super().__call__(
      decoder_input_tokens,
      decoder_target_tokens,
      decoder_segment_ids,
      decoder_causal_attention,
      deterministic=not enable_dropout,
      cache=CacheUse(
        decode=decode,
        prefill=bool(prefill),
        prefill_lengths=prefill_lengths,
        max_decode_length=max_decode_length,
      ),
      return_logits=return_logits,
    )


class DecoderWrapper(stacks.StackNetwork):
  """Decoder-only network: a `Decoder` named `decoder`, with the parameter names of T5's decoder.

  Attributes: see `StackNetwork`.
  """

  ACCEPTS_STACKED_LAYERS: ClassVar[bool] = True
  SUPPORTS_CHUNKED_LOSS: ClassVar[bool] = True
  config: TransformerConfig

  def setup(self):
    self.decoder = self._stack(Decoder)

  def __call__(self, *args, **kwargs) -> jax.Array | layers.OutputProjection:
    """Compute logits; see `Decoder.__call__`."""
    return self.decoder(*args, **kwargs)
