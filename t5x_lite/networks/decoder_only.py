"""The decoder-only Transformer, in T5X's parameter tree: causal, or with prefixes that are read both ways.

Its layers are those of T5's decoder without the attention to an encoder. `param_layout` and `scan_layers` mean what
they mean for T5; see `T5Config`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks.stacks import DecoderStack, prompt_positions
from t5x_lite.networks.t5_blocks import (
    RELATIVE_POSITIONS,
    AttentionFn,
    FeedForwardFn,
    PositionEncoding,
    Residual,
    Tokens,
    dense_everywhere,
    t5_attention_everywhere,
)
from t5x_lite.networks.t5_config import StackConfig

__all__ = ['Decoder', 'DecoderLayer', 'DecoderWrapper', 'TransformerConfig']


@dataclasses.dataclass(frozen=True)
class TransformerConfig(StackConfig):
  """What a decoder-only network is built from: T5X's fields in T5X's order, then keyword-only additions.

  Attributes:
    vocab_size: rows of the embedding table.
    dtype: compute dtype, 'float32', 'bfloat16' or 'float16'; parameters, norms, softmax and logits are float32 always.
    emb_dim: width of the residual stream.
    num_heads: attention heads.
    num_layers: layers.
    head_dim: size of a head.
    mlp_dim: hidden width of the feed-forward block.
    mlp_activations: activations of its gated projections, by name.
    dropout_rate: of embeddings, sub-layer outputs, hidden units and attention weights.
    logits_via_embedding: score with the embedding table instead of a `logits_dense` kernel.
    float32_attention_logits: see `T5Config`, as all that follow.
    remat_policy: what the backward pass keeps of a layer.
    scan_layers: compile the layers as one loop.
    param_layout: form of the parameter tree; T5X has 't5' alone for this network.
    relpos_bias_tables: one table of relative position biases for all layers, or one per layer.
    attention_kernel: kernel of attention over full sequences; prefixes that are read both ways need 'dot' ('auto'
      takes it).
    num_relpos_buckets: buckets of distances in a table.
    max_relpos_distance: distances from here on share a bucket.
    scale_tied_logits: divide the logits of `logits_via_embedding` by sqrt(emb_dim).
  """

  LAYER_COUNTS: ClassVar[Mapping[str, str]] = {'decoder': 'num_layers'}

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8
  num_layers: int = 6
  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str] = ('relu',)
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  _: dataclasses.KW_ONLY
  float32_attention_logits: bool = False
  remat_policy: str = 'none'
  scan_layers: bool = False
  param_layout: str = 't5'
  relpos_bias_tables: str | None = None
  attention_kernel: str = 'auto'
  num_relpos_buckets: int = 32
  max_relpos_distance: int = 128
  scale_tied_logits: bool = True


class DecoderLayer(Residual):
  """Self-attention and feed-forward, each behind a norm and with a residual connection.

  Attributes:
    config: hyper-parameters.
    feed_forward: builds the feed-forward block, or two.
    attention: builds the attention block.
    position_encoding: how it is told of positions.
  """

  @nn.compact
  def __call__(
      self, inputs: jax.Array, bias: layers.AttentionBias | None = None, decode_index: jax.Array | None = None,
      prefill_lengths: jax.Array | None = None, tokens: Tokens | None = None, *, deterministic: bool = False,
      decode: bool = False, max_decode_length: int | None = None, prefill: bool = False) -> jax.Array:
    """Transforms <dtype>[batch, length, embed] to the same shape.

    Args:
      inputs: the residual stream.
      bias: bias of self-attention; without positions if each layer has its own table.
      decode_index: int32 [] or [batch], position of `inputs` in the cache when there is one.
      prefill_lengths: int32 [batch], see `layers.MultiHeadDotProductAttention`.
      tokens: for feed-forward blocks that ask for them.
      deterministic: no dropout.
      decode: use the cache.
      max_decode_length: length of the cache.
      prefill: run a whole prompt and make the cache of it.
    """
    x = self._decoder_self_attention(
        inputs, bias, decode_index, deterministic, decode, max_decode_length, prefill, prefill_lengths)
    return self._feed_forward(x, tokens, deterministic, decode or prefill)


class Decoder(DecoderStack):
  """Embedding, layers, norm, logits.

  Attributes:
    config: hyper-parameters.
    shared_embedding: None; the network has an embedding of its own, called `token_embedder`.
    feed_forward_fn: says which feed-forward block, or two, each layer has.
    attention_fn: says which attention block each layer has.
    position_encoding: how it is told of positions.
  """

  @nn.compact
  def __call__(
      self, decoder_input_tokens: jax.Array, decoder_target_tokens: jax.Array,
      decoder_segment_ids: jax.Array | None = None, decoder_positions: jax.Array | None = None,
      decoder_causal_attention: jax.Array | None = None, *, enable_dropout: bool = True, decode: bool = False,
      max_decode_length: int | None = None, prefill: bool | None = None,
      prefill_lengths: jax.Array | None = None) -> jax.Array:
    """Computes logits; see `DecoderWrapper`."""
    del decoder_positions
    cfg = self.config
    deterministic, prefill = not enable_dropout, bool(prefill)
    if (decode or prefill) and decoder_segment_ids is not None:
      raise ConfigError('got segment ids in cached decoding; expected rows that are not packed. Set pack=False.')
    length = decoder_input_tokens.shape[1]
    index = None
    if decode or prefill:
      max_decode_length = self._cache_length(max_decode_length)
      index = None if prefill else self._cached('cache_index')
      # Nothing needs to be told from padding here: a prompt's positions see no later ones, and steps overwrite those.
      valid = prompt_positions(decoder_input_tokens, None)
    else:
      valid = decoder_target_tokens > 0
    if index is None:
      prefix = None if decoder_causal_attention is None else decoder_causal_attention > 0
      bias = layers.make_attention_bias(
          valid, valid, query_segment_ids=decoder_segment_ids, key_segment_ids=decoder_segment_ids, causal=True,
          prefix=prefix, position=self._position(length, length, bidirectional=False))
    elif decoder_causal_attention is not None:
      raise ConfigError('got decoder_causal_attention in a step of decoding, where a token sees all that is cached; '
                        'pass it with prefill=True, when the prompt is read.')
    else:
      bias = self._step_bias(length, max_decode_length, index)
    y = self._embed(decoder_input_tokens, deterministic)
    real = prompt_positions(decoder_input_tokens, prefill_lengths) if prefill else valid
    tokens = self._tokens('decoder', decoder_input_tokens, real)
    y = self._run_layers(
        DecoderLayer, 'decoder', cfg.num_layers, y, bias, index, prefill_lengths, tokens, deterministic=deterministic,
        decode=decode, max_decode_length=max_decode_length, prefill=prefill, fresh=('cache',) if prefill else ())
    return self._logits(y, deterministic)


class DecoderWrapper(nn.Module):
  """The decoder-only network: a `Decoder` called `decoder`, so that its names are those of T5's decoder.

  Attributes:
    config: hyper-parameters.
    feed_forward_fn: says which feed-forward block, or two, each layer has; T5's own everywhere by default.
    attention_fn: says which attention block each layer has; T5's own everywhere by default.
    position_encoding: how it is told of positions; by T5's relative position biases by default.
  """

  config: TransformerConfig
  feed_forward_fn: FeedForwardFn = dense_everywhere
  attention_fn: AttentionFn = t5_attention_everywhere
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def setup(self):
    self.decoder = Decoder(
        self.config, feed_forward_fn=self.feed_forward_fn, attention_fn=self.attention_fn,
        position_encoding=self.position_encoding)

  @staticmethod
  def share_beams(cache: Mapping[str, Any], num_beams: int) -> dict[str, Any]:
    """Returns `cache` in a form that beam search does not have to move; see `layers.share_beams`."""
    return layers.share_beams(cache, num_beams)

  def __call__(
      self, decoder_input_tokens: jax.Array, decoder_target_tokens: jax.Array,
      decoder_segment_ids: jax.Array | None = None, decoder_positions: jax.Array | None = None,
      decoder_causal_attention: jax.Array | None = None, *, enable_dropout: bool = True, decode: bool = False,
      max_decode_length: int | None = None, prefill: bool | None = None,
      prefill_lengths: jax.Array | None = None) -> jax.Array:
    """Computes logits: of all positions, or of the next ones by means of the cache.

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
    return self.decoder(
        decoder_input_tokens, decoder_target_tokens, decoder_segment_ids, decoder_positions, decoder_causal_attention,
        enable_dropout=enable_dropout, decode=decode, max_decode_length=max_decode_length, prefill=prefill,
        prefill_lengths=prefill_lengths)
