"""Layers of T5 stacks, with attention, position encoding and feed-forward blocks as arguments."""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, Protocol

from flax import struct
import flax.linen as nn
from flax.linen.spmd import with_logical_constraint
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks.t5_config import StackConfig

relpos_bias_init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')


class FeedForwardFactory(Protocol):
  """Factory of the feed-forward block of a layer.

  The block is called as `block(x, decode=..., deterministic=...)` on <float>[batch, length, embed] and returns the same
  shape; `decode` is True if a decoder uses or makes a cache, in steps and for entire prompts. It may sow into
  `intermediates` and have variables in other collections.
  """

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """Return a module named `name`, a child of the current layer."""
    ...


@struct.dataclass
class CacheUse:
  """Use of the cache in a call of a decoder; by default none.

  Attributes:
    index: int32 [] or [batch], position of the inputs in an existing cache.
    prefill_lengths: int32 [batch], lengths of prompts; see `layers.MultiHeadDotProductAttention`.
    decode: True to use the cache.
    prefill: True to read an entire prompt and make a self-attention cache of it.
    fill: True to only make an empty self-attention cache and cache the keys and values of the encoder's output.
    max_decode_length: length of the cache.
  """

  index: jax.Array | None = None
  prefill_lengths: jax.Array | None = None
  decode: bool = struct.field(pytree_node=False, default=False)
  prefill: bool = struct.field(pytree_node=False, default=False)
  fill: bool = struct.field(pytree_node=False, default=False)
  max_decode_length: int | None = struct.field(pytree_node=False, default=None)

  @property
  def is_used(self) -> bool:
    """True if the call computes with a cache or makes one."""
    return self.decode or self.prefill

  def num_keys(self, length: int) -> int:
    """Return the number of keys of self-attention with `length` inputs: in a step, that of the cache."""
    if self.index is None:
      return length
    assert self.max_decode_length is not None  # The length of the cache that has the index.
    return self.max_decode_length


NO_CACHE = CacheUse()


class Tokens(NamedTuple):
  """Tokens at the positions of a layer's input.

  Attributes:
    mask: bool [batch, length], False at padding.
    ids: int32 [batch, length], the stack's input tokens.
  """

  mask: jax.Array
  ids: jax.Array


class TokenFeedForwardFactory(abc.ABC):
  """`FeedForwardFactory` whose blocks get the tokens; factories derive from this class.

  Its blocks are called as `block(x, token_mask=..., token_ids=..., decode=..., deterministic=...)`, see `Tokens`.
  """

  @abc.abstractmethod
  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """Return a module named `name`, a child of the current layer."""


# The feed-forward part of a layer: one block, called `mlp`, or two sub-layers `mlp` and `extra_mlp`.
FeedForward = FeedForwardFactory | tuple[FeedForwardFactory, FeedForwardFactory]
_FEED_FORWARD_NAMES = ('mlp', 'extra_mlp')


def feed_forward_factories(feed_forward: FeedForward) -> tuple[FeedForwardFactory, ...]:
  """Return the factories of a layer's feed-forward part.

  Raises:
    ConfigError: a tuple of another length than 1 or 2.
  """
  if isinstance(feed_forward, tuple):
    factories = feed_forward
  else:
    factories = (feed_forward,)
  if not 1 <= len(factories) <= len(_FEED_FORWARD_NAMES):
    raise checks.invalid(
      '',
      'feed_forward_fn',
      f'a function that returns a factory or a tuple of 1 or {len(_FEED_FORWARD_NAMES)} factories',
      factories,
    )
  return factories


def dense_feed_forward(config: StackConfig, name: str) -> nn.Module:
  """Return T5's feed-forward block; see `FeedForwardFactory`."""
  return layers.MlpBlock(
    intermediate_dim=config.mlp_dim,
    activations=config.mlp_activations,
    intermediate_dropout_rate=config.dropout_rate,
    dtype=config.dtype,
    name=name,
  )


def custom_option(factory: FeedForwardFactory) -> str | None:
  """Return the option that makes the block of a factory one that `transformers` does not have; None for its blocks.

  It is the factory's attribute `custom_option`; factories without one are custom, except `dense_feed_forward`.
  """
  if factory is dense_feed_forward:
    return None
  return getattr(factory, 'custom_option', 'feed_forward_fn')


def layer_norm(config: StackConfig, name: str) -> layers.LayerNorm:
  """Return the norm of a network, a submodule with the given name."""
  return layers.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=config.dtype, name=name)


def token_embedding(config: StackConfig, **kwargs: Any) -> layers.Embed:
  """Return a token embedding; `kwargs` are arguments of the module, such as its name."""
  return layers.Embed(
    num_embeddings=config.vocab_size,
    features=config.emb_dim,
    dtype=config.dtype,
    attend_dtype=jnp.float32,
    embedding_init=nn.initializers.normal(stddev=1.0),
    **kwargs,
  )


def relative_position_biases(config: StackConfig, **kwargs: Any) -> layers.RelativePositionBiases:
  """Return a table of relative position biases; `kwargs` are arguments of the module, such as its name."""
  return layers.RelativePositionBiases(
    num_buckets=config.num_relpos_buckets,
    max_distance=config.max_relpos_distance,
    num_heads=config.num_heads,
    # The scores are float32, so rounding the biases to the compute dtype would gain nothing.
    dtype='float32',
    embedding_init=relpos_bias_init,
    **kwargs,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionEncoding:
  """Position encoding of self-attention: biases of its scores, encoded queries and keys, or both.

  Attributes:
    biases_fn: function of (config, name=) that returns a module, called as `module(num queries, num keys,
      bidirectional, query_offset)`, of biases <float>[1 or batch, heads, q, k]; see `layers.RelativePositionBiases`.
      There is one per stack or per layer, see `relpos_bias_tables` of the configuration. Those of a
      `layers.RelativePositionBiases` are kept by distance, so that long rows need no array of all pairs. None adds no
      biases.
    encode_positions_fn: see `layers.MultiHeadDotProductAttention`. In packed rows it gets positions in the row, so it
      must depend only on distances.
  """

  biases_fn: Callable[..., nn.Module] | None = None
  encode_positions_fn: layers.EncodePositionsFn | None = None

  def biases(
    self,
    config: StackConfig,
    q_len: int,
    k_len: int,
    bidirectional: bool,
    offset: jax.Array | None = None,
  ) -> jax.Array | layers.DistanceBias | None:
    """Return the biases of a module named `relpos_bias`; None without biases.

    Args:
      config: hyper-parameters.
      q_len: number of queries.
      k_len: number of keys.
      bidirectional: True in encoders.
      offset: position of the first query, int32 [] or [batch]; None for 0.

    Returns:
      <float>[1 or batch, heads, q_len, k_len], or the same by distance.
    """
    if self.biases_fn is None:
      return None
    module = checks.call_custom(
      'PositionEncoding', 'biases_fn', 'config, name=', self.biases_fn, config, name='relpos_bias'
    )
    # A subclass may compute others.
    if type(module) is layers.RelativePositionBiases and offset is None:
      return module.by_distance(q_len, k_len, bidirectional)
    biases = module(q_len, k_len, bidirectional, offset)
    if getattr(biases, 'ndim', None) != 4:
      raise ConfigError(
        '`PositionEncoding.biases_fn` must return a module of biases of shape [1 or batch, heads, q, k], got '
        f'{getattr(biases, "shape", biases)}. Add the missing dims, of size 1 where biases are equal.'
      )
    return biases


# T5's position encoding.
RELATIVE_POSITIONS = PositionEncoding(biases_fn=relative_position_biases)


class AttentionFactory(Protocol):
  """Factory of the attention blocks of a layer.

  A block is a `layers.MultiHeadDotProductAttention`, or has the same methods and caches: networks call `__call__`,
  `init_cache`, `cache_keys_values` and `attend_to_cache`, and read `cache_index` and the length of `cached_key`.
  """

  def __call__(
    self, config: StackConfig, name: str, encode_positions_fn: layers.EncodePositionsFn | None
  ) -> nn.Module:
    """Return a module named `name`.

    Args:
      config: configuration of the network.
      name: 'attention' in encoders, 'self_attention' or 'encoder_decoder_attention' in decoders.
      encode_positions_fn: attribute of the position encoding; None for attention to an encoder's output.
    """
    ...


def t5_attention(
  config: StackConfig,
  name: str,
  encode_positions_fn: layers.EncodePositionsFn | None,
  block: Callable[..., nn.Module] = layers.MultiHeadDotProductAttention,
) -> nn.Module:
  """Return T5's attention block; see `AttentionFactory`. `block` may be another class with the same arguments."""
  return block(
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    dtype=config.dtype,
    dropout_rate=config.dropout_rate,
    float32_logits=config.float32_attention_logits,
    flat_kernels=not config.stacked_params,
    attention_kernel=config.attention_kernel,
    encode_positions_fn=encode_positions_fn,
    name=name,
  )


def constrain_activations(x: jax.Array) -> jax.Array:
  """Return `x` <dtype>[batch, length, embed], sharded by the logical names of its dims."""
  return with_logical_constraint(x, ('batch', 'length', 'embed'))


class Residual(nn.Module):
  """Base class of layers: pre-norm sub-layers with residual connections.

  Attributes:
    config: hyper-parameters.
    feed_forward: factory of the feed-forward block, or a tuple of two.
    attention: factory of the attention blocks.
    position_encoding: position encoding of self-attention.
  """

  config: StackConfig
  feed_forward: FeedForward = dense_feed_forward
  attention: AttentionFactory = t5_attention
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def _self_attention(self, name: str) -> nn.Module:
    return self._make_attention(name, self.position_encoding.encode_positions_fn)

  def _make_attention(
    self, name: str, encode_positions_fn: layers.EncodePositionsFn | None
  ) -> nn.Module:
    return checks.call_custom(
      '',
      'attention_fn(stack, layer)',
      'config, name, encode_positions_fn',
      self.attention,
      self.config,
      name,
      encode_positions_fn,
    )

  def _with_layer_positions(
    self,
    bias: layers.AttentionBias | None,
    q_len: int,
    k_len: int,
    bidirectional: bool,
    offset: jax.Array | None = None,
  ) -> layers.AttentionBias | None:
    """Return `bias` with the position biases of this layer, if each layer has a table."""
    if not self.config.relpos_per_layer:
      return bias
    position = self.position_encoding.biases(self.config, q_len, k_len, bidirectional, offset)
    if position is None:
      return bias
    if bias is None:
      return layers.AttentionBias().with_position(position)
    return bias.with_position(position)

  def _norm(self, x: jax.Array, name: str) -> jax.Array:
    return constrain_activations(layer_norm(self.config, name)(x))

  def _add(self, x: jax.Array, update: jax.Array, deterministic: bool) -> jax.Array:
    """Add a sub-layer's output to the residual stream, with one dropout mask for all positions."""
    dropout = nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))
    return constrain_activations(x + dropout(update, deterministic=deterministic))

  def _feed_forward(
    self, x: jax.Array, tokens: Tokens | None, deterministic: bool, decode: bool = False
  ) -> jax.Array:
    """Apply the feed-forward sub-layer, or two, with residual connections."""
    factories = feed_forward_factories(self.feed_forward)
    for name, factory in zip(_FEED_FORWARD_NAMES[: len(factories)], factories, strict=True):
      inputs = {}
      if isinstance(factory, TokenFeedForwardFactory) and tokens is not None:
        inputs = dict(token_mask=tokens.mask, token_ids=tokens.ids)
      block = factory(self.config, name)
      normed = self._norm(x, f'pre_{name}_layer_norm')
      update = block(normed, decode=decode, deterministic=deterministic, **inputs)
      x = self._add(x, update, deterministic)
    return x


class EncoderLayer(Residual):
  """Encoder layer: self-attention and feed-forward block, each with a norm before and a residual connection.

  Attributes:
    config: hyper-parameters.
    feed_forward: factory of the feed-forward block, or a tuple of two.
    attention: factory of the attention blocks.
    position_encoding: position encoding of self-attention.
  """

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    bias: layers.AttentionBias | None = None,
    tokens: Tokens | None = None,
    *,
    deterministic: bool = False,
  ) -> jax.Array:
    """Apply the layer to the residual stream.

    Args:
      inputs: residual stream, <dtype>[batch, length, embed].
      bias: bias of self-attention; without positions if each layer has its own table.
      tokens: tokens for feed-forward blocks that need them.
      deterministic: True for no dropout.

    Returns:
      <dtype>[batch, length, embed].
    """
    bias = self._with_layer_positions(bias, inputs.shape[1], inputs.shape[1], True)
    x = self._norm(inputs, 'pre_attention_layer_norm')
    x = self._self_attention('attention')(x, x, bias=bias, deterministic=deterministic)
    return self._feed_forward(self._add(inputs, x, deterministic), tokens, deterministic)


class DecoderLayer(Residual):
  """Decoder layer: self-attention, attention to an encoder's output, feed-forward block, each pre-norm and residual.

  Attributes:
    config: hyper-parameters.
    feed_forward: factory of the feed-forward block, or a tuple of two.
    attention: factory of the attention blocks.
    position_encoding: position encoding of self-attention.
  """

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    encoded: jax.Array | None = None,
    bias: layers.AttentionBias | None = None,
    encoder_decoder_bias: layers.AttentionBias | None = None,
    tokens: Tokens | None = None,
    cache: CacheUse = NO_CACHE,
    *,
    deterministic: bool = False,
  ) -> jax.Array | None:
    """Apply the layer to the residual stream, or make its cache.

    Args:
      inputs: residual stream, <dtype>[batch, length, embed]; ignored with `cache.fill`.
      encoded: <dtype>[batch, encoder length, embed]; not read if its keys and values are cached, or without encoder.
      bias: bias of self-attention; without positions if each layer has its own table.
      encoder_decoder_bias: bias of the attention to the encoder's output.
      tokens: tokens for feed-forward blocks that need them.
      cache: use of the cache.
      deterministic: True for no dropout.

    Returns:
      <dtype>[batch, length, embed], or None with `cache.fill`.
    """
    cross_attention = None
    if self.config.has_encoder:
      cross_attention = self._make_attention('encoder_decoder_attention', None)
    if cache.fill:
      assert (
        cross_attention is not None
      )  # Only networks with an encoder make a cache before the first step.
      assert encoded is not None
      self._self_attention('self_attention').init_cache(encoded.shape[0], cache.max_decode_length)
      cross_attention.cache_keys_values(encoded)
      return None

    q_len = inputs.shape[1]
    bias = self._with_layer_positions(bias, q_len, cache.num_keys(q_len), False, cache.index)
    x = self._norm(inputs, 'pre_self_attention_layer_norm')
    x = self._self_attention('self_attention')(
      x,
      x,
      bias=bias,
      decode=cache.decode,
      deterministic=deterministic,
      prefill=cache.prefill,
      prefill_lengths=cache.prefill_lengths,
      cache_length=cache.max_decode_length,
    )
    x = self._add(inputs, x, deterministic)
    if cross_attention is not None:
      y = self._norm(x, 'pre_cross_attention_layer_norm')
      if cache.is_used and cross_attention.has_variable('cross_cache', 'cached_key'):
        y = cross_attention.attend_to_cache(
          y, bias=encoder_decoder_bias, deterministic=deterministic
        )
      else:
        y = cross_attention(y, encoded, bias=encoder_decoder_bias, deterministic=deterministic)
      x = self._add(x, y, deterministic)
    return self._feed_forward(x, tokens, deterministic, cache.is_used)


# (stack 'encoder' or 'decoder', number of the layer) -> factory, or two, of its feed-forward blocks.
FeedForwardFn = Callable[[str, int], FeedForward]


def dense_everywhere(stack: str, layer: int) -> FeedForwardFactory:
  """Return the factory of T5's feed-forward block, for every layer of both stacks."""
  del stack, layer
  return dense_feed_forward


# (stack 'encoder' or 'decoder', number of the layer) -> factory of its attention blocks.
AttentionFn = Callable[[str, int], AttentionFactory]


def t5_attention_everywhere(stack: str, layer: int) -> AttentionFactory:
  """Return the factory of T5's attention blocks, for every layer of both stacks."""
  del stack, layer
  return t5_attention
