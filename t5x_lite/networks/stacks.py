"""Encoders and decoders: embedding, layers, norm; cache and logits. The base of networks that are made of them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks import scan
from t5x_lite.networks.network import Network
from t5x_lite.networks.t5_blocks import (
    NO_CACHE,
    RELATIVE_POSITIONS,
    AttentionFn,
    CacheUse,
    DecoderLayer,
    EncoderLayer,
    FeedForwardFn,
    PositionEncoding,
    TokenFeedForwardFactory,
    Tokens,
    constrain_activations,
    dense_everywhere,
    feed_forward_factories,
    t5_attention,
    t5_attention_everywhere,
    token_embedding,
)
from t5x_lite.networks.t5_config import RELPOS_FIELDS, StackConfig


def layer_tree(config: StackConfig, stack: str) -> scan.LayerTree:
  """Return where the variables of the layers of `stack` ('encoder' or 'decoder') are within that stack's."""
  return scan.LayerTree(name=stack, stacked=config.stacked_params)


class Stack(nn.Module):
  """What encoders and decoders share.

  Attributes:
    config: hyper-parameters.
    shared_embedding: the token embedding; None for one of the stack's own, called `token_embedder`.
    feed_forward_fn: says which feed-forward block, or two, each layer has.
    attention_fn: says which attention blocks each layer has.
    position_encoding: how self-attention is told of positions.
  """

  config: StackConfig
  shared_embedding: nn.Module | None = None
  feed_forward_fn: FeedForwardFn = dense_everywhere
  attention_fn: AttentionFn = t5_attention_everywhere
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def setup(self):
    own = self.shared_embedding is None
    self.embedding = token_embedding(self.config, name='token_embedder') if own else self.shared_embedding

  def _run_layers(self, layer_cls: Callable[..., nn.Module], stack: str, x: Any, *operands: Any, **options: Any):
    """Run the layers of `stack` on `x`; see `scan.run_layers`."""
    modules = [
        layer_cls(self.config, self.feed_forward_fn(stack, i), self.attention_fn(stack, i), self.position_encoding,
                  parent=None) for i in range(self.config.num_layers_of(stack))]
    return scan.run_layers(
        self, modules, x, *operands, tree=layer_tree(self.config, stack), scan=self.config.scan_layers,
        remat_policy=self.config.remat_policy, **options)

  def _position(
      self, q_len: int, k_len: int, bidirectional: bool, offset: jax.Array | None = None) -> jax.Array | None:
    """Return the position biases that all layers share, or None; arguments as those of `PositionEncoding.biases`."""
    if self.config.relpos_per_layer:
      return None
    return self.position_encoding.biases(self.config, q_len, k_len, bidirectional, offset)

  def _tokens(self, stack: str, ids: jax.Array, mask: jax.Array) -> Tokens | None:
    """Return what the layers of `stack` get to know of int32 [batch, length] tokens; None if no block asks for it."""
    for i in range(self.config.num_layers_of(stack)):
      factories = feed_forward_factories(self.feed_forward_fn(stack, i))
      if any(isinstance(factory, TokenFeedForwardFactory) for factory in factories):
        return Tokens(mask, ids)
    return None

  def _embed(self, tokens: jax.Array, deterministic: bool) -> jax.Array:
    """Embed int32 [batch, length] to <dtype>[batch, length, embed], dropped out."""
    x = self.embedding(tokens.astype(jnp.int32))
    x = nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))(x, deterministic=deterministic)
    return constrain_activations(x.astype(self.config.dtype))


class Encoder(Stack):
  """Embedding, encoder layers, norm."""

  @nn.compact
  def __call__(
      self, encoder_input_tokens: jax.Array, encoder_segment_ids: jax.Array | None = None, *,
      deterministic: bool = False) -> jax.Array:
    """Encode tokens.

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
    x = self._run_layers(EncoderLayer, 'encoder', x, bias, tokens, deterministic=deterministic)
    x = layers.LayerNorm(dtype=cfg.dtype, name='encoder_norm')(x)
    return constrain_activations(nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic))


class EncoderOutput(NamedTuple):
  """What a decoder gets of an encoder.

  Attributes:
    encoded: <dtype>[batch, encoder length, embed]; not read where its keys and values are cached.
    tokens: int32 [batch, encoder length], what was encoded; 0 is padding.
    segment_ids: int32 [batch, encoder length], numbers the examples packed into one row; None when rows are not packed.
  """

  encoded: jax.Array | None
  tokens: jax.Array
  segment_ids: jax.Array | None = None


class Decoder(Stack):
  """Embedding, decoder layers, norm, logits; with and without an encoder."""

  @nn.compact
  def __call__(
      self, decoder_input_tokens: jax.Array | None, decoder_target_tokens: jax.Array | None,
      decoder_segment_ids: jax.Array | None = None, decoder_causal_attention: jax.Array | None = None,
      encoder: EncoderOutput | None = None, *, deterministic: bool = False, cache: CacheUse = NO_CACHE
  ) -> jax.Array | None:
    """Compute logits, or makes the cache for doing so step by step.

    Args:
      decoder_input_tokens: int32 [batch, length].
      decoder_target_tokens: int32 [batch, length]; 0 is padding. Ignored in decoding, where nothing is padding.
      decoder_segment_ids: int32 [batch, length], numbers the examples packed into one row.
      decoder_causal_attention: int32 [batch, length], nonzero at positions that see each other both ways (within their
        segment); None if all is causal.
      encoder: what the encoder made; None for a network without.
      deterministic: no dropout.
      cache: how the cache is used; `index`, and the length of a cache that exists, are read from that cache.

    Returns:
      float32 [batch, length, vocab], or None with `cache.fill`.

    Raises:
      ConfigError: packed rows in decoding, a prefix in a step of decoding, a cache of another length, or a prompt that
        is longer than the cache.
    """
    run = functools.partial(self._run_layers, DecoderLayer, 'decoder')
    if cache.fill:
      return run(None, encoder.encoded, None, None, None, cache, deterministic=True)

    length = decoder_input_tokens.shape[1]
    if cache.is_used:
      if decoder_segment_ids is not None or (encoder is not None and encoder.segment_ids is not None):
        raise ConfigError('got segment ids in cached decoding; expected rows that are not packed. Set pack=False.')
      cache = cache.replace(max_decode_length=self._cache_length(cache.max_decode_length),
                            index=None if cache.prefill else self._cached('cache_index'))
      # Nothing needs a mask here: a prompt's positions see no later ones, and steps overwrite those.
      valid = prompt_positions(decoder_input_tokens, None)
      real = prompt_positions(decoder_input_tokens, cache.prefill_lengths) if cache.prefill else valid
    else:
      valid = real = decoder_target_tokens > 0
    if cache.index is None:
      # Teacher forcing; a prompt; and with `decode`, where T5X's way of making a cache is a pass over dummies.
      prefix = None if decoder_causal_attention is None else decoder_causal_attention > 0
      bias = layers.make_attention_bias(
          valid, valid, query_segment_ids=decoder_segment_ids, key_segment_ids=decoder_segment_ids, causal=True,
          prefix=prefix, position=self._position(length, length, bidirectional=False))
    elif decoder_causal_attention is not None:
      raise ConfigError('got decoder_causal_attention in a step of decoding, where a token sees all that is cached; '
                        'pass it with prefill=True, when the prompt is read.')
    else:
      bias = self._step_bias(length, cache.max_decode_length, cache.index)
    encoded = cross_bias = None
    if encoder is not None:
      encoded = encoder.encoded
      cross_bias = layers.make_attention_bias(
          real, encoder.tokens > 0, query_segment_ids=decoder_segment_ids, key_segment_ids=encoder.segment_ids)

    y = self._embed(decoder_input_tokens, deterministic)
    y = run(y, encoded, bias, cross_bias, self._tokens('decoder', decoder_input_tokens, real), cache,
            deterministic=deterministic, fresh=('cache',) if cache.prefill else ())
    return self._logits(y, deterministic)

  def _cached(self, name: str) -> jax.Array | None:
    """Return an array of the first layer's self-attention cache, None if there is none."""
    return scan.read_first_layer(self, layer_tree(self.config, 'decoder'), 'cache', ('self_attention', name))

  def _cache_length(self, max_decode_length: int | None) -> int | None:
    """Return the length of the cache that there is, else `max_decode_length`.

    Raises:
      ConfigError: both are given and differ.
    """
    cached_key, slot_table = self._cached('cached_key'), self._cached('slot_table')
    if cached_key is None and slot_table is None:
      return max_decode_length
    length = cached_key.shape[2] if slot_table is None else slot_table.shape[1]
    if max_decode_length not in (None, length):
      raise ConfigError(f'got max_decode_length={max_decode_length} and a cache of length {length}; expected equal '
                        'lengths. Make the cache by init_cache with this max_decode_length.')
    return length

  def _step_bias(self, q_len: int, cache_length: int, index: jax.Array) -> layers.AttentionBias:
    """Return the bias of self-attention for `q_len` queries from cache position `index` ([] or [batch]) on.

    It has no mask: the cache itself masks what comes later and what is not filled yet.
    """
    position = self._position(q_len, cache_length, False, index)
    return layers.AttentionBias() if position is None else layers.AttentionBias().with_position(position)

  def _logits(self, y: jax.Array, deterministic: bool) -> jax.Array:
    """Norms <dtype>[batch, length, embed] and scores the vocabulary: float32 [batch, length, vocab]."""
    cfg = self.config
    y = layers.LayerNorm(dtype=cfg.dtype, name='decoder_norm')(y)
    y = nn.Dropout(rate=cfg.dropout_rate, broadcast_dims=(-2,))(y, deterministic=deterministic)
    y = constrain_activations(y)
    if cfg.logits_via_embedding:
      logits = self.embedding.attend(y)
      if cfg.scale_tied_logits:
        # As the table's vectors have unit variance per dim, their products with y have variance emb_dim.
        logits = logits / jnp.sqrt(cfg.emb_dim).astype(jnp.float32)
    else:
      logits = layers.DenseGeneral(
          cfg.vocab_size, dtype=jnp.float32, kernel_axes=('embed', 'vocab'), name='logits_dense')(y)
    return nn_partitioning.with_sharding_constraint(logits, ('batch', 'length', 'vocab'))


def prompt_positions(tokens: jax.Array, lengths: jax.Array | None) -> jax.Array:
  """Return bool of the shape of `tokens` [batch, length]: True at the first `lengths` [batch] positions of each row.

  In prompts the start token is 0 as padding is, so what is a prompt is known by length alone; all of it when None.
  """
  if lengths is None:
    return jnp.ones(tokens.shape, jnp.bool_)
  return jnp.arange(tokens.shape[1], dtype=jnp.int32) < lengths[:, None]


class StackNetwork(Network):
  """Base of networks that are made of these stacks.

  Attributes:
    config: hyper-parameters.
    feed_forward_fn: says which feed-forward block, or two, each layer has; T5's own everywhere by default.
    attention_fn: says which attention blocks each layer has; T5's own everywhere by default.
    position_encoding: how self-attention is told of positions; by T5's relative position biases by default.
  """

  config: StackConfig
  feed_forward_fn: FeedForwardFn = dense_everywhere
  attention_fn: AttentionFn = t5_attention_everywhere
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def __post_init__(self):
    if not isinstance(self.position_encoding, PositionEncoding):
      raise ConfigError(f'`{type(self).__name__}.position_encoding` must be a `PositionEncoding`, got '
                        f'{self.position_encoding!r}. In gin, call the function that returns one: @name().')
    if not self.has_position_biases:
      for field in dataclasses.fields(self.config):
        value = getattr(self.config, field.name)
        if field.name in RELPOS_FIELDS and value != field.default:
          owner = type(self.config).__name__
          raise ConfigError(f'`{owner}.{field.name}`={value!r} has no effect with a `{type(self).__name__}.'
                            f'position_encoding` that adds no biases. Leave it at {field.default!r}, or give the '
                            'position encoding a biases_fn.')
    super().__post_init__()

  @property
  def has_position_biases(self) -> bool:
    """True if the position encoding adds biases, of which there may be tables."""
    return self.position_encoding.biases_fn is not None

  @property
  def custom_blocks(self) -> tuple[str, ...]:
    """Names of those of `attention_fn` and `position_encoding` that are not T5's own."""
    layers_of = [(stack, i) for stack in self.config.LAYER_COUNTS for i in range(self.config.num_layers_of(stack))]
    own = {'attention_fn': all(self.attention_fn(stack, i) is t5_attention for stack, i in layers_of),
           'position_encoding': self.position_encoding == RELATIVE_POSITIONS}
    return tuple(name for name, is_own in own.items() if not is_own)

  def _stack(self, stack_cls: type[Stack], shared_embedding: nn.Module | None = None) -> Stack:
    """Return an encoder or decoder of this network's layers."""
    return stack_cls(
        self.config, shared_embedding, self.feed_forward_fn, self.attention_fn, self.position_encoding)

  @property
  def vocab_size(self) -> int:
    """See `Network`."""
    return self.config.vocab_size

  @staticmethod
  def share_beams(cache: Mapping[str, Any], num_beams: int) -> dict[str, Any]:
    """Return `cache` in a form that beam search does not have to move; see `layers.share_beams`."""
    return layers.share_beams(cache, num_beams)
