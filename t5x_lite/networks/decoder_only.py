"""The decoder-only Transformer, in T5X's parameter tree: causal, or with prefixes that are read both ways.

Its layers are those of T5's decoder without the attention to an encoder. `param_layout` and `scan_layers` mean what
they mean for T5; see `StackConfig`.
"""

import jax

from t5x_lite.networks.stacks import Decoder, StackNetwork
from t5x_lite.networks.t5_blocks import CacheUse, DecoderLayer
from t5x_lite.networks.t5_config import TransformerConfig

__all__ = ['Decoder', 'DecoderLayer', 'DecoderWrapper', 'TransformerConfig']


class DecoderWrapper(StackNetwork):
  """The decoder-only network: a `Decoder` called `decoder`, so that its names are those of T5's decoder.

  Its attributes are those of `StackNetwork`.
  """

  config: TransformerConfig

  def setup(self):
    self.decoder = self._stack(Decoder)

  def __call__(
      self, decoder_input_tokens: jax.Array, decoder_target_tokens: jax.Array,
      decoder_segment_ids: jax.Array | None = None, decoder_positions: jax.Array | None = None,
      decoder_causal_attention: jax.Array | None = None, *, enable_dropout: bool = True, decode: bool = False,
      max_decode_length: int | None = None, prefill: bool | None = None,
      prefill_lengths: jax.Array | None = None) -> jax.Array:
    """Compute logits: of all positions, or of the next ones by means of the cache.

    Cached decoding: a call with `prefill=True` and `cache` mutable reads whole prompts at once, as in training, and
    makes a `cache` of the first `prefill_lengths` positions of each row. Then each call with `decode=True` takes the
    next token of each row. Without a prompt, T5X's way to an empty cache of `length` positions is a call with
    `decode=True` and no cache.

    Args:
      decoder_input_tokens: int32 [batch, length], the targets shifted right.
      decoder_target_tokens: int32 [batch, length]; 0 is padding. Only its padding matters, in decoding nothing of it.
      decoder_segment_ids: int32 [batch, length], numbers the examples packed into one row.
      decoder_positions: int32 [batch, length], a feature of packed batches that relative positions have no use for.
      decoder_causal_attention: int32 [batch, length], nonzero at positions that see each other both ways (within their
        segment): the prefix of a prefix language model. None for a causal one.
      enable_dropout: drop out; needs an rng named 'dropout' if the rate is not 0.
      decode: use the cache.
      max_decode_length: length of the cache; for a call that makes one, `length` when None.
      prefill: read whole prompts and make the cache of them.
      prefill_lengths: int32 [batch], how many positions of each row the cache is to hold; all of `length` when None.

    Returns:
      float32 [batch, length, vocab].

    Raises:
      ConfigError: packed rows in decoding, a prefix in a step of decoding, or a cache of another length.
    """
    del decoder_positions
    return self.decoder(
        decoder_input_tokens, decoder_target_tokens, decoder_segment_ids, decoder_causal_attention,
        deterministic=not enable_dropout,
        cache=CacheUse(decode=decode, prefill=bool(prefill), prefill_lengths=prefill_lengths,
                       max_decode_length=max_decode_length))
