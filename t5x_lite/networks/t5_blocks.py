"""The layers of T5 stacks. Each takes its attention, position encoding and feed-forward block(s) as arguments."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks.t5_config import StackConfig

relpos_bias_init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')


class FeedForwardFactory(Protocol):
  """Builds the feed-forward block of a layer inside that layer.

  The block is called as `block(x, decode=..., deterministic=...)` on <float>[batch, length, embed] and returns the same
  shape; `decode` where a decoder uses or makes a cache: in steps, and for whole prompts. It may sow into
  `intermediates` and keep variables in collections of its own.
  """

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """Return a module called `name`, a child of the layer that is being built."""
    ...


@flax.struct.dataclass
class CacheUse:
  """What a call of a decoder does with its cache; by default there is none.

  Attributes:
    index: int32 [] or [batch], position of the inputs in the cache when there is one.
    prefill_lengths: int32 [batch], lengths of prompts; see `layers.MultiHeadDotProductAttention`.
    decode: use the cache.
    prefill: run a whole prompt and make the self-attention cache of it.
    fill: only make an empty self-attention cache and cache the keys and values of the encoder's output.
    max_decode_length: length of the cache.
  """

  index: jax.Array | None = None
  prefill_lengths: jax.Array | None = None
  decode: bool = flax.struct.field(pytree_node=False, default=False)
  prefill: bool = flax.struct.field(pytree_node=False, default=False)
  fill: bool = flax.struct.field(pytree_node=False, default=False)
  max_decode_length: int | None = flax.struct.field(pytree_node=False, default=None)

  @property
  def is_used(self) -> bool:
    """True if the call reads or makes a cache as it computes."""
    return self.decode or self.prefill


NO_CACHE = CacheUse()


class Tokens(NamedTuple):
  """What a layer's positions stand for.

  Attributes:
    mask: bool [batch, length], False at padding.
    ids: int32 [batch, length], the stack's input tokens.
  """

  mask: jax.Array
  ids: jax.Array


class TokenFeedForwardFactory(abc.ABC):
  """A `FeedForwardFactory` whose blocks are told what stands where; a factory declares it by deriving from this class.

  Its blocks are called as `block(x, token_mask=..., token_ids=..., decode=..., deterministic=...)`: see `Tokens`. In
  programs without such a factory nothing is computed for it.
  """

  @abc.abstractmethod
  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """Return a module called `name`, a child of the layer that is being built."""


# The feed-forward part of a layer: one block, called `mlp`, or two sub-layers `mlp` and `extra_mlp`.
FeedForward = FeedForwardFactory | tuple[FeedForwardFactory, FeedForwardFactory]
_FEED_FORWARD_NAMES = ('mlp', 'extra_mlp')


def feed_forward_factories(feed_forward: FeedForward) -> tuple[FeedForwardFactory, ...]:
  """Return the factories of a layer's feed-forward part.

  Raises:
    ConfigError: a tuple of neither one nor two.
  """
  factories = feed_forward if isinstance(feed_forward, tuple) else (feed_forward,)
  if not 1 <= len(factories) <= len(_FEED_FORWARD_NAMES):
    raise ConfigError(f'got {len(factories)} feed-forward blocks for a layer; expected one, or a tuple of at most '
                      f'{len(_FEED_FORWARD_NAMES)}. Let feed_forward_fn return a factory or two of them.')
  return factories


def dense_feed_forward(config: StackConfig, name: str) -> nn.Module:
  """Build T5's own feed-forward block."""
  return layers.MlpBlock(
      intermediate_dim=config.mlp_dim, activations=config.mlp_activations,
      intermediate_dropout_rate=config.dropout_rate, dtype=config.dtype, name=name)


def token_embedding(config: StackConfig, **kwargs: Any) -> layers.Embed:
  """Build a token embedding; `kwargs` go to the module (its name)."""
  return layers.Embed(
      num_embeddings=config.vocab_size, features=config.emb_dim, dtype=config.dtype, attend_dtype=jnp.float32,
      embedding_init=nn.initializers.normal(stddev=1.0), **kwargs)


def relative_position_biases(config: StackConfig, **kwargs: Any) -> layers.RelativePositionBiases:
  """Build a table of relative position biases; `kwargs` go to the module (its name)."""
  return layers.RelativePositionBiases(
      num_buckets=config.num_relpos_buckets, max_distance=config.max_relpos_distance, num_heads=config.num_heads,
      # Added to float32 scores: rounding it to the compute dtype would gain nothing.
      dtype='float32', embedding_init=relpos_bias_init, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionEncoding:
  """How self-attention is told of positions: by biases on its scores, in its queries and keys, or both.

  Attributes:
    biases_fn: builds (config, name=) a module called as `module(num queries, num keys, bidirectional, query_offset)`
      that returns biases <float>[1 or batch, heads, q, k], see `layers.RelativePositionBiases`; there is one for each
      stack or each layer, as the configuration's `relpos_bias_tables` says. None adds no biases.
    encode_positions_fn: see `layers.MultiHeadDotProductAttention`. In packed rows it is told places in the row, so only
      distances may matter to what it does.
  """

  biases_fn: Callable[..., nn.Module] | None = None
  encode_positions_fn: layers.EncodePositionsFn | None = None

  def biases(
      self, config: StackConfig, q_len: int, k_len: int, bidirectional: bool, offset: jax.Array | None = None
  ) -> jax.Array | None:
    """Return the biases, by a module called `relpos_bias` of the module that is being built; None without."""
    if self.biases_fn is None:
      return None
    return self.biases_fn(config, name='relpos_bias')(q_len, k_len, bidirectional, offset)


# T5's own.
RELATIVE_POSITIONS = PositionEncoding(biases_fn=relative_position_biases)


class AttentionFactory(Protocol):
  """Builds the attention blocks of a layer inside that layer.

  A block is a `layers.MultiHeadDotProductAttention`, or has its methods and caches: networks call `__call__`,
  `init_cache`, `cache_keys_values` and `attend_to_cache`, and read `cache_index` and the length of `cached_key`.
  """

  def __call__(
      self, config: StackConfig, name: str, encode_positions_fn: layers.EncodePositionsFn | None) -> nn.Module:
    """Return a module called `name`.

    Args:
      config: the network's.
      name: 'attention' in encoders, 'self_attention' or 'encoder_decoder_attention' in decoders.
      encode_positions_fn: the position encoding's; None for attention to an encoder's output.
    """
    ...


def t5_attention(
    config: StackConfig, name: str, encode_positions_fn: layers.EncodePositionsFn | None,
    block: Callable[..., nn.Module] = layers.MultiHeadDotProductAttention) -> nn.Module:
  """Build T5's own attention block, or a `block` with the same arguments, such as a subclass of it."""
  return block(
      num_heads=config.num_heads, head_dim=config.head_dim, dtype=config.dtype, dropout_rate=config.dropout_rate,
      float32_logits=config.float32_attention_logits, flat_kernels=not config.stacked_params,
      attention_kernel=config.attention_kernel, encode_positions_fn=encode_positions_fn, name=name)


def constrain_activations(x: jax.Array) -> jax.Array:
  """Names the dims of activations [batch, length, embed] for the partitioner."""
  return nn_partitioning.with_sharding_constraint(x, ('batch', 'length', 'embed'))


class Residual(nn.Module):
  """What all layers share: pre-norm sub-layers with residual connections.

  Attributes:
    config: hyper-parameters.
    feed_forward: builds the feed-forward block, or two.
    attention: builds the attention blocks.
    position_encoding: how self-attention is told of positions.
  """

  config: StackConfig
  feed_forward: FeedForward = dense_feed_forward
  attention: AttentionFactory = t5_attention
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def _self_attention(self, name: str) -> nn.Module:
    return self.attention(self.config, name, self.position_encoding.encode_positions_fn)

  def _with_own_positions(
      self, bias: layers.AttentionBias | None, q_len: int, k_len: int, bidirectional: bool,
      offset: jax.Array | None = None) -> layers.AttentionBias | None:
    """Return `bias` with those of this layer's own table, if each layer has one."""
    if not self.config.relpos_per_layer:
      return bias
    position = self.position_encoding.biases(self.config, q_len, k_len, bidirectional, offset)
    return bias if position is None else (bias or layers.AttentionBias()).with_position(position)

  def _norm(self, x: jax.Array, name: str) -> jax.Array:
    return constrain_activations(layers.LayerNorm(dtype=self.config.dtype, name=name)(x))

  def _add(self, x: jax.Array, update: jax.Array, deterministic: bool) -> jax.Array:
    """Add a sub-layer's output to the residual stream, dropped out with one mask for all positions."""
    dropout = nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))
    return constrain_activations(x + dropout(update, deterministic=deterministic))

  def _feed_forward(
      self, x: jax.Array, tokens: Tokens | None, deterministic: bool, decode: bool = False) -> jax.Array:
    """Run the feed-forward sub-layer, or two, residual connections included."""
    factories = feed_forward_factories(self.feed_forward)
    for name, factory in zip(_FEED_FORWARD_NAMES[:len(factories)], factories, strict=True):
      told = {}
      if isinstance(factory, TokenFeedForwardFactory) and tokens is not None:
        told = dict(token_mask=tokens.mask, token_ids=tokens.ids)
      update = factory(self.config, name)(
          self._norm(x, f'pre_{name}_layer_norm'), decode=decode, deterministic=deterministic, **told)
      x = self._add(x, update, deterministic)
    return x


class EncoderLayer(Residual):
  """Self-attention and feed-forward, each behind a norm and with a residual connection.

  Attributes:
    config: hyper-parameters.
    feed_forward: builds the feed-forward block, or two.
    attention: builds the attention blocks.
    position_encoding: how self-attention is told of positions.
  """

  @nn.compact
  def __call__(
      self, inputs: jax.Array, bias: layers.AttentionBias | None = None, tokens: Tokens | None = None, *,
      deterministic: bool = False) -> jax.Array:
    """Transform <dtype>[batch, length, embed] to the same shape.

    Args:
      inputs: the residual stream.
      bias: bias of self-attention; without positions if each layer has its own table.
      tokens: for feed-forward blocks that ask for them.
      deterministic: no dropout.
    """
    bias = self._with_own_positions(bias, inputs.shape[1], inputs.shape[1], True)
    x = self._norm(inputs, 'pre_attention_layer_norm')
    x = self._self_attention('attention')(x, x, bias=bias, deterministic=deterministic)
    return self._feed_forward(self._add(inputs, x, deterministic), tokens, deterministic)


class DecoderLayer(Residual):
  """Self-attention, attention to the encoder's output where there is one, feed-forward; each behind a norm, and added.

  Attributes:
    config: hyper-parameters.
    feed_forward: builds the feed-forward block, or two.
    attention: builds the attention blocks.
    position_encoding: how self-attention is told of positions.
  """

  @nn.compact
  def __call__(
      self, inputs: jax.Array, encoded: jax.Array | None = None, bias: layers.AttentionBias | None = None,
      encoder_decoder_bias: layers.AttentionBias | None = None, tokens: Tokens | None = None,
      cache: CacheUse = NO_CACHE, *, deterministic: bool = False) -> jax.Array | None:
    """Transform the residual stream, or makes the cache for it.

    Args:
      inputs: <dtype>[batch, length, embed] the residual stream; ignored with `cache.fill`.
      encoded: <dtype>[batch, encoder length, embed]; not read where its keys and values are cached, nor by a network
        without an encoder.
      bias: bias of self-attention; without positions if each layer has its own table.
      encoder_decoder_bias: bias of the attention to the encoder's output.
      tokens: for feed-forward blocks that ask for them.
      cache: how the cache is used.
      deterministic: no dropout.

    Returns:
      <dtype>[batch, length, embed], or None with `cache.fill`.
    """
    cross_attention = None
    if self.config.has_encoder:
      cross_attention = self.attention(self.config, 'encoder_decoder_attention', None)
    if cache.fill:
      self._self_attention('self_attention').init_cache(encoded.shape[0], cache.max_decode_length)
      cross_attention.cache_keys_values(encoded)
      return None

    q_len = inputs.shape[1]
    k_len = q_len if cache.index is None else cache.max_decode_length
    bias = self._with_own_positions(bias, q_len, k_len, False, cache.index)
    x = self._norm(inputs, 'pre_self_attention_layer_norm')
    x = self._self_attention('self_attention')(
        x, x, bias=bias, decode=cache.decode, deterministic=deterministic, prefill=cache.prefill,
        prefill_lengths=cache.prefill_lengths, cache_length=cache.max_decode_length)
    x = self._add(inputs, x, deterministic)
    if cross_attention is not None:
      y = self._norm(x, 'pre_cross_attention_layer_norm')
      if cache.is_used and cross_attention.has_variable('cross_cache', 'cached_key'):
        y = cross_attention.attend_to_cache(y, bias=encoder_decoder_bias, deterministic=deterministic)
      else:
        y = cross_attention(y, encoded, bias=encoder_decoder_bias, deterministic=deterministic)
      x = self._add(x, y, deterministic)
    return self._feed_forward(x, tokens, deterministic, cache.is_used)


# Says which feed-forward block, or two, layer `layer` of the stack 'encoder' or 'decoder' has.
FeedForwardFn = Callable[[str, int], FeedForward]


def dense_everywhere(stack: str, layer: int) -> FeedForwardFactory:
  """Give every layer of both stacks T5's own feed-forward block."""
  del stack, layer
  return dense_feed_forward


# Says which attention blocks layer `layer` of the stack 'encoder' or 'decoder' has.
AttentionFn = Callable[[str, int], AttentionFactory]


def t5_attention_everywhere(stack: str, layer: int) -> AttentionFactory:
  """Give every layer of both stacks T5's own attention."""
  del stack, layer
  return t5_attention
