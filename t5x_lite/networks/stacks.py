"""What stacks of layers share: embedding, running the layers, and for decoders position biases, cache and logits."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks import scan
from t5x_lite.networks.t5_blocks import (
    RELATIVE_POSITIONS,
    AttentionFn,
    FeedForwardFn,
    PositionEncoding,
    TokenFeedForwardFactory,
    Tokens,
    constrain_activations,
    dense_everywhere,
    feed_forward_factories,
    t5_attention_everywhere,
    token_embedding,
)


def layer_tree(config: Any, stack: str) -> scan.LayerTree:
  """Returns where the variables of the layers of `stack` ('encoder' or 'decoder') are within that stack's."""
  return scan.LayerTree(name=stack, stacked=config.stacked_params)


class Stack(nn.Module):
  """What encoders and decoders share.

  Attributes:
    config: hyper-parameters, a `T5Config` or one with the same properties.
    shared_embedding: the token embedding; None for one of the stack's own, called `token_embedder`.
    feed_forward_fn: says which feed-forward block, or two, each layer has.
    attention_fn: says which attention blocks each layer has.
    position_encoding: how self-attention is told of positions.
  """

  config: Any
  shared_embedding: nn.Module | None = None
  feed_forward_fn: FeedForwardFn = dense_everywhere
  attention_fn: AttentionFn = t5_attention_everywhere
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def setup(self):
    own = self.shared_embedding is None
    self.embedding = token_embedding(self.config, name='token_embedder') if own else self.shared_embedding

  def _run_layers(
      self, layer_cls: Callable[..., nn.Module], stack: str, num_layers: int, x: Any, *operands: Any, **options: Any):
    """Runs the stack's layers on `x`; see `scan.run_layers`."""
    modules = [
        layer_cls(self.config, self.feed_forward_fn(stack, i), self.attention_fn(stack, i), self.position_encoding,
                  parent=None) for i in range(num_layers)]
    return scan.run_layers(
        self, modules, x, *operands, tree=layer_tree(self.config, stack), scan=self.config.scan_layers,
        remat_policy=self.config.remat_policy, **options)

  def _position(
      self, q_len: int, k_len: int, bidirectional: bool, offset: jax.Array | None = None) -> jax.Array | None:
    """Returns the position biases that all layers share, or None; arguments as those of `PositionEncoding.biases`."""
    if self.config.relpos_per_layer:
      return None
    return self.position_encoding.biases(self.config, q_len, k_len, bidirectional, offset)

  def _tokens(self, stack: str, ids: jax.Array, mask: jax.Array) -> Tokens | None:
    """Returns what the layers of `stack` get to know of int32 [batch, length] tokens; None if no block asks for it."""
    for i in range(self.config.num_layers_of(stack)):
      factories = feed_forward_factories(self.feed_forward_fn(stack, i))
      if any(isinstance(factory, TokenFeedForwardFactory) for factory in factories):
        return Tokens(mask, ids)
    return None

  def _embed(self, tokens: jax.Array, deterministic: bool) -> jax.Array:
    """Embeds int32 [batch, length] to <dtype>[batch, length, embed], dropped out."""
    x = self.embedding(tokens.astype(jnp.int32))
    x = nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))(x, deterministic=deterministic)
    return constrain_activations(x.astype(self.config.dtype))


class DecoderStack(Stack):
  """What decoders share, with and without an encoder."""

  def _cached(self, name: str) -> jax.Array | None:
    """Returns an array of the first layer's self-attention cache, None if there is none."""
    return scan.read_first_layer(self, layer_tree(self.config, 'decoder'), 'cache', ('self_attention', name))

  def _cache_length(self, max_decode_length: int | None) -> int | None:
    """Returns the length of the cache that there is, else `max_decode_length`.

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
    """Returns the bias of self-attention for `q_len` queries from cache position `index` ([] or [batch]) on.

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
  """Returns bool of the shape of `tokens` [batch, length]: True at the first `lengths` [batch] positions of each row.

  In prompts the start token is 0 as padding is, so what is a prompt is known by length alone; all of it when None.
  """
  if lengths is None:
    return jnp.ones(tokens.shape, jnp.bool_)
  return jnp.arange(tokens.shape[1], dtype=jnp.int32) < lengths[:, None]
