"""The T5 encoder-decoder, in T5X's parameter trees.

`param_layout` decides the parameter tree, `scan_layers` how the stacks are compiled; see `T5Config`.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks import scan
from t5x_lite.networks.t5_blocks import (
    DecoderLayer,
    EncoderLayer,
    FeedForwardFactory,
    FeedForwardFn,
    constrain_activations,
    dense_everywhere,
    dense_feed_forward,
    relative_position_biases,
)
from t5x_lite.networks.t5_config import PARAM_LAYOUTS, RELPOS_BIAS_TABLES, T5Config

__all__ = [
    'Decoder', 'DecoderLayer', 'Encoder', 'EncoderLayer', 'FeedForwardFactory', 'FeedForwardFn', 'PARAM_LAYOUTS',
    'RELPOS_BIAS_TABLES', 'T5Config', 'Transformer', 'dense_everywhere', 'dense_feed_forward', 'layer_tree',
]


def layer_tree(config: T5Config, stack: str) -> scan.LayerTree:
  """Returns where the variables of the layers of `stack` ('encoder' or 'decoder') are within that stack's."""
  return scan.LayerTree(name=stack if config.stacked_params else 'layers', stacked=config.stacked_params)


class _Stack(nn.Module):
  """What encoder and decoder share.

  Attributes:
    config: hyper-parameters.
    shared_embedding: the token embedding of both stacks.
    feed_forward_fn: says which feed-forward block each layer has.
  """

  config: T5Config
  shared_embedding: nn.Module
  feed_forward_fn: FeedForwardFn = dense_everywhere

  def _run_layers(self, layer_cls, stack: str, num_layers: int, x, *operands, **options):
    """Runs the stack's layers on `x`."""
    modules = [layer_cls(self.config, self.feed_forward_fn(stack, i), parent=None) for i in range(num_layers)]
    return scan.run_layers(
        self, modules, x, *operands, tree=layer_tree(self.config, stack), scan=self.config.scan_layers,
        remat_policy=self.config.remat_policy, **options)

  def _embed(self, tokens: jax.Array, deterministic: bool) -> jax.Array:
    """Embeds int32 [batch, length] to <dtype>[batch, length, embed], dropped out."""
    x = self.shared_embedding(tokens.astype(jnp.int32))
    x = nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))(x, deterministic=deterministic)
    return constrain_activations(x.astype(self.config.dtype))


class Encoder(_Stack):
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
    position = None if cfg.relpos_per_layer else relative_position_biases(cfg, name='relpos_bias')(length, length, True)
    valid = encoder_input_tokens > 0
    bias = layers.make_attention_bias(
        valid, valid, query_segment_ids=encoder_segment_ids, key_segment_ids=encoder_segment_ids, position=position)
    x = self._embed(encoder_input_tokens, deterministic)
    x = self._run_layers(EncoderLayer, 'encoder', cfg.num_encoder_layers, x, bias, deterministic=deterministic)
    x = layers.LayerNorm(dtype=cfg.dtype, name='encoder_norm')(x)
    return constrain_activations(nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic))


class Decoder(_Stack):
  """Embedding, decoder layers, norm, logits."""

  def _position(self, q_len: int, k_len: int, offset: jax.Array | None) -> jax.Array | None:
    if self.config.relpos_per_layer:
      return None
    return relative_position_biases(self.config, name='relpos_bias')(q_len, k_len, False, offset)

  @nn.compact
  def __call__(
      self, encoded: jax.Array | None, encoder_input_tokens: jax.Array, decoder_input_tokens: jax.Array | None,
      decoder_target_tokens: jax.Array | None, encoder_segment_ids: jax.Array | None = None,
      decoder_segment_ids: jax.Array | None = None, *, deterministic: bool = False, decode: bool = False,
      max_decode_length: int | None = None, fill_cache: bool = False) -> jax.Array | None:
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
      fill_cache: only make the cache.

    Returns:
      float32 [batch, length, vocab], or None with `fill_cache`.
    """
    cfg = self.config
    run = functools.partial(self._run_layers, DecoderLayer, 'decoder', cfg.num_decoder_layers)
    if fill_cache:
      return run(None, encoded, deterministic=True, max_decode_length=max_decode_length, fill_cache=True)

    tree = layer_tree(cfg, 'decoder')
    length = decoder_input_tokens.shape[1]
    index = scan.read_first_layer(self, tree, 'cache', ('self_attention', 'cache_index')) if decode else None
    if index is None:
      # Teacher forcing; and with `decode`, where T5X's way of making a cache is a pass over full-length dummies.
      valid = jnp.ones(decoder_input_tokens.shape, jnp.bool_) if decode else decoder_target_tokens > 0
      bias = layers.make_attention_bias(
          valid, valid, query_segment_ids=decoder_segment_ids, key_segment_ids=decoder_segment_ids, causal=True,
          position=self._position(length, length, None))
    else:
      valid = jnp.ones(decoder_input_tokens.shape, jnp.bool_)
      cached_key = scan.read_first_layer(self, tree, 'cache', ('self_attention', 'cached_key'))
      max_decode_length = self._check_cache_length(cached_key.shape[2], max_decode_length)
      position = self._position(length, max_decode_length, index)
      # The cache itself masks what comes later and what is not filled yet.
      bias = layers.AttentionBias() if position is None else layers.AttentionBias().with_position(position)
    cross_bias = layers.make_attention_bias(
        valid, encoder_input_tokens > 0, query_segment_ids=decoder_segment_ids, key_segment_ids=encoder_segment_ids)

    y = self._embed(decoder_input_tokens, deterministic)
    y = run(y, encoded, bias, cross_bias, index, deterministic=deterministic, decode=decode,
            max_decode_length=max_decode_length)
    y = layers.LayerNorm(dtype=cfg.dtype, name='decoder_norm')(y)
    y = nn.Dropout(rate=cfg.dropout_rate, broadcast_dims=(-2,))(y, deterministic=deterministic)
    return self._logits(constrain_activations(y))

  def _check_cache_length(self, cache_length: int, max_decode_length: int | None) -> int:
    if max_decode_length not in (None, cache_length):
      raise ConfigError(f'got max_decode_length={max_decode_length} and a cache of length {cache_length}; expected '
                        'equal lengths. Make the cache by init_cache with this max_decode_length.')
    return cache_length

  def _logits(self, y: jax.Array) -> jax.Array:
    """Scores the vocabulary for <dtype>[batch, length, embed] in float32."""
    cfg = self.config
    if cfg.logits_via_embedding:
      # As the table's vectors have unit variance per dim, their products with y have variance emb_dim.
      logits = self.shared_embedding.attend(y) / jnp.sqrt(cfg.emb_dim).astype(jnp.float32)
    else:
      logits = layers.DenseGeneral(
          cfg.vocab_size, dtype=jnp.float32, kernel_axes=('embed', 'vocab'), name='logits_dense')(y)
    return nn_partitioning.with_sharding_constraint(logits, ('batch', 'length', 'vocab'))


class Transformer(nn.Module):
  """The T5 encoder-decoder.

  Attributes:
    config: hyper-parameters.
    feed_forward_fn: says which feed-forward block each layer has; T5's own everywhere by default.
  """

  config: T5Config
  feed_forward_fn: FeedForwardFn = dense_everywhere

  def setup(self):
    cfg = self.config
    self.shared_embedding = layers.Embed(
        num_embeddings=cfg.vocab_size, features=cfg.emb_dim, dtype=cfg.dtype, attend_dtype=jnp.float32,
        embedding_init=nn.initializers.normal(stddev=1.0), name='token_embedder')
    self.encoder = Encoder(cfg, self.shared_embedding, self.feed_forward_fn)
    self.decoder = Decoder(cfg, self.shared_embedding, self.feed_forward_fn)

  @property
  def cache_offset(self) -> int:
    """Position of the batch dim in the arrays of collection `cache`: 1 where they have a dim over layers in front."""
    return int(self.config.stacked_params)

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
      enable_dropout: bool = True, decode: bool = False, max_decode_length: int | None = None) -> jax.Array:
    """Computes logits from the encoder's output: of all positions, or of the next ones by means of the cache.

    Cached decoding: `init_cache` makes the collection `cache`; then each call with `decode=True` and `cache` mutable
    takes the next token of each sequence and returns its logits. `encoded` is not read in these calls. A cache that was
    made in T5X's way, by running `__call__` with `decode=True` on dummies of full length, has no keys and values of
    `encoded`, which are then computed in each call.

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
      max_decode_length: length of the cache.

    Returns:
      float32 [batch, length, vocab].

    Raises:
      ConfigError: packed rows in decoding, or a cache of another length.
    """
    del decoder_positions
    if decode and not (encoder_segment_ids is None and decoder_segment_ids is None):
      raise ConfigError('got segment ids in cached decoding; expected rows that are not packed. Set pack=False.')
    return self.decoder(
        encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids,
        decoder_segment_ids, deterministic=not enable_dropout, decode=decode, max_decode_length=max_decode_length)

  def init_cache(self, encoded: jax.Array, encoder_input_tokens: jax.Array, max_decode_length: int) -> None:
    """Makes the collection `cache` for decoding up to `max_decode_length` positions after `encoded`.

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
