"""The layers of T5 stacks. Each takes its feed-forward block, or two of them, as an argument."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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
    """Returns a module called `name`, a child of the layer that is being built."""
    ...


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
    """Returns a module called `name`, a child of the layer that is being built."""


# The feed-forward part of a layer: one block, called `mlp`, or two sub-layers `mlp` and `extra_mlp`.
FeedForward = FeedForwardFactory | tuple[FeedForwardFactory, FeedForwardFactory]
_FEED_FORWARD_NAMES = ('mlp', 'extra_mlp')


def feed_forward_factories(feed_forward: FeedForward) -> tuple[FeedForwardFactory, ...]:
  """Returns the factories of a layer's feed-forward part.

  Raises:
    ConfigError: a tuple of neither one nor two.
  """
  factories = feed_forward if isinstance(feed_forward, tuple) else (feed_forward,)
  if not 1 <= len(factories) <= len(_FEED_FORWARD_NAMES):
    raise ConfigError(f'got {len(factories)} feed-forward blocks for a layer; expected one, or a tuple of at most '
                      f'{len(_FEED_FORWARD_NAMES)}. Let feed_forward_fn return a factory or two of them.')
  return factories


def dense_feed_forward(config: StackConfig, name: str) -> nn.Module:
  """Builds T5's own feed-forward block."""
  return layers.MlpBlock(
      intermediate_dim=config.mlp_dim, activations=config.mlp_activations,
      intermediate_dropout_rate=config.dropout_rate, dtype=config.dtype, name=name)


def token_embedding(config: StackConfig, **kwargs: Any) -> layers.Embed:
  """Builds a token embedding; `kwargs` go to the module (its name)."""
  return layers.Embed(
      num_embeddings=config.vocab_size, features=config.emb_dim, dtype=config.dtype, attend_dtype=jnp.float32,
      embedding_init=nn.initializers.normal(stddev=1.0), **kwargs)


def relative_position_biases(config: StackConfig, **kwargs: Any) -> layers.RelativePositionBiases:
  """Builds a table of relative position biases; `kwargs` go to the module (its name)."""
  return layers.RelativePositionBiases(
      num_buckets=config.num_relpos_buckets, max_distance=config.max_relpos_distance, num_heads=config.num_heads,
      # Added to float32 scores: rounding it to the compute dtype would gain nothing.
      dtype='float32', embedding_init=relpos_bias_init, **kwargs)


def attention(config: StackConfig, name: str) -> layers.MultiHeadDotProductAttention:
  """Builds an attention block called `name`."""
  return layers.MultiHeadDotProductAttention(
      num_heads=config.num_heads, head_dim=config.head_dim, dtype=config.dtype, dropout_rate=config.dropout_rate,
      float32_logits=config.float32_attention_logits, flat_kernels=not config.stacked_params,
      attention_kernel=config.attention_kernel, name=name)


def constrain_activations(x: jax.Array) -> jax.Array:
  """Names the dims of activations [batch, length, embed] for the partitioner."""
  return nn_partitioning.with_sharding_constraint(x, ('batch', 'length', 'embed'))


class Residual(nn.Module):
  """What all layers share: pre-norm sub-layers with residual connections.

  Attributes:
    config: hyper-parameters.
    feed_forward: builds the feed-forward block, or two.
  """

  config: StackConfig
  feed_forward: FeedForward = dense_feed_forward

  def _norm(self, x: jax.Array, name: str) -> jax.Array:
    return constrain_activations(layers.LayerNorm(dtype=self.config.dtype, name=name)(x))

  def _add(self, x: jax.Array, update: jax.Array, deterministic: bool) -> jax.Array:
    """Adds a sub-layer's output to the residual stream, dropped out with one mask for all positions."""
    dropout = nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))
    return constrain_activations(x + dropout(update, deterministic=deterministic))

  def _feed_forward(
      self, x: jax.Array, tokens: Tokens | None, deterministic: bool, decode: bool = False) -> jax.Array:
    """Runs the feed-forward sub-layer, or two, residual connections included."""
    for name, factory in zip(_FEED_FORWARD_NAMES, feed_forward_factories(self.feed_forward)):
      told = {}
      if isinstance(factory, TokenFeedForwardFactory) and tokens is not None:
        told = dict(token_mask=tokens.mask, token_ids=tokens.ids)
      update = factory(self.config, name)(
          self._norm(x, f'pre_{name}_layer_norm'), decode=decode, deterministic=deterministic, **told)
      x = self._add(x, update, deterministic)
    return x

  def _decoder_self_attention(
      self, inputs: jax.Array, bias: layers.AttentionBias | None, decode_index: jax.Array | None, deterministic: bool,
      decode: bool, cache_length: int | None, prefill: bool, prefill_lengths: jax.Array | None) -> jax.Array:
    """Runs the self-attention sub-layer of a decoder, its own position biases and residual connection included."""
    cfg = self.config
    if cfg.relpos_per_layer:
      q_len = inputs.shape[1]
      k_len = q_len if decode_index is None else cache_length
      position = relative_position_biases(cfg, name='relpos_bias')(q_len, k_len, False, decode_index)
      bias = (bias or layers.AttentionBias()).with_position(position)
    x = self._norm(inputs, 'pre_self_attention_layer_norm')
    x = attention(cfg, 'self_attention')(
        x, x, bias=bias, decode=decode, deterministic=deterministic, prefill=prefill, prefill_lengths=prefill_lengths,
        cache_length=cache_length)
    return self._add(inputs, x, deterministic)


class EncoderLayer(Residual):
  """Self-attention and feed-forward, each behind a norm and with a residual connection.

  Attributes:
    config: hyper-parameters.
    feed_forward: builds the feed-forward block, or two.
  """

  @nn.compact
  def __call__(
      self, inputs: jax.Array, bias: layers.AttentionBias | None = None, tokens: Tokens | None = None, *,
      deterministic: bool = False) -> jax.Array:
    """Transforms <dtype>[batch, length, embed] to the same shape.

    Args:
      inputs: the residual stream.
      bias: bias of self-attention; without positions if each layer has its own table.
      tokens: for feed-forward blocks that ask for them.
      deterministic: no dropout.
    """
    if self.config.relpos_per_layer:
      length = inputs.shape[1]
      position = relative_position_biases(self.config, name='relpos_bias')(length, length, True)
      bias = (bias or layers.AttentionBias()).with_position(position)
    x = self._norm(inputs, 'pre_attention_layer_norm')
    x = attention(self.config, 'attention')(x, x, bias=bias, deterministic=deterministic)
    return self._feed_forward(self._add(inputs, x, deterministic), tokens, deterministic)


class DecoderLayer(Residual):
  """Self-attention, attention to the encoder's output, feed-forward; each behind a norm and with a residual connection.

  Attributes:
    config: hyper-parameters.
    feed_forward: builds the feed-forward block, or two.
  """

  @nn.compact
  def __call__(
      self, inputs: jax.Array, encoded: jax.Array | None, bias: layers.AttentionBias | None = None,
      encoder_decoder_bias: layers.AttentionBias | None = None, decode_index: jax.Array | None = None,
      prefill_lengths: jax.Array | None = None, tokens: Tokens | None = None, *, deterministic: bool = False,
      decode: bool = False, max_decode_length: int | None = None, prefill: bool = False, fill_cache: bool = False
  ) -> jax.Array | None:
    """Transforms the residual stream, or makes the cache for it.

    Args:
      inputs: <dtype>[batch, length, embed] the residual stream; ignored with `fill_cache`.
      encoded: <dtype>[batch, encoder length, embed]; not read where its keys and values are cached.
      bias: bias of self-attention; without positions if each layer has its own table.
      encoder_decoder_bias: bias of the attention to the encoder's output.
      decode_index: int32 [] or [batch], position of `inputs` in the cache when there is one.
      prefill_lengths: int32 [batch], see `layers.MultiHeadDotProductAttention`.
      tokens: for feed-forward blocks that ask for them.
      deterministic: no dropout.
      decode: use the cache.
      max_decode_length: length of the cache.
      prefill: run a whole prompt and make the self-attention cache of it.
      fill_cache: only make an empty self-attention cache and cache the keys and values of `encoded`.

    Returns:
      <dtype>[batch, length, embed], or None with `fill_cache`.
    """
    cfg = self.config
    cross_attention = attention(cfg, 'encoder_decoder_attention')
    if fill_cache:
      attention(cfg, 'self_attention').init_cache(encoded.shape[0], max_decode_length)
      cross_attention.cache_keys_values(encoded)
      return None

    x = self._decoder_self_attention(
        inputs, bias, decode_index, deterministic, decode, max_decode_length, prefill, prefill_lengths)
    y = self._norm(x, 'pre_cross_attention_layer_norm')
    if (decode or prefill) and cross_attention.has_variable('cross_cache', 'cached_key'):
      y = cross_attention.attend_to_cache(y, bias=encoder_decoder_bias, deterministic=deterministic)
    else:
      y = cross_attention(y, encoded, bias=encoder_decoder_bias, deterministic=deterministic)
    return self._feed_forward(self._add(x, y, deterministic), tokens, deterministic, decode or prefill)


# Says which feed-forward block, or two, layer `layer` of the stack 'encoder' or 'decoder' has.
FeedForwardFn = Callable[[str, int], FeedForward]


def dense_everywhere(stack: str, layer: int) -> FeedForwardFactory:
  """Gives every layer of both stacks T5's own feed-forward block."""
  del stack, layer
  return dense_feed_forward
