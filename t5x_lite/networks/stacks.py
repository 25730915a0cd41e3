"""Encoder and decoder stacks (embedding, layers, norm, cache, logits), and the base class of networks made of them."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks import scan
from t5x_lite.networks.network import Network
from t5x_lite.networks.segments import find_segments
from t5x_lite.networks.segments import kinds_of
from t5x_lite.networks.t5_blocks import NO_CACHE
from t5x_lite.networks.t5_blocks import RELATIVE_POSITIONS
from t5x_lite.networks.t5_blocks import AttentionFn
from t5x_lite.networks.t5_blocks import CacheUse
from t5x_lite.networks.t5_blocks import DecoderLayer
from t5x_lite.networks.t5_blocks import EncoderLayer
from t5x_lite.networks.t5_blocks import FeedForwardFn
from t5x_lite.networks.t5_blocks import PositionEncoding
from t5x_lite.networks.t5_blocks import TokenFeedForwardFactory
from t5x_lite.networks.t5_blocks import Tokens
from t5x_lite.networks.t5_blocks import constrain_activations
from t5x_lite.networks.t5_blocks import custom_option
from t5x_lite.networks.t5_blocks import dense_everywhere
from t5x_lite.networks.t5_blocks import feed_forward_factories
from t5x_lite.networks.t5_blocks import layer_norm
from t5x_lite.networks.t5_blocks import t5_attention
from t5x_lite.networks.t5_blocks import t5_attention_everywhere
from t5x_lite.networks.t5_blocks import token_embedding
from t5x_lite.networks.t5_config import RELPOS_FIELDS
from t5x_lite.networks.t5_config import StackConfig


def layer_tree(config: StackConfig, stack: str) -> scan.LayerTree:
  """Return the positions of the variables of layers within a stack.

  Args:
    config: hyper-parameters.
    stack: 'encoder' or 'decoder'.
  """
  return scan.LayerTree(name=stack, stacked=config.stacked_params)


class Stack(nn.Module):
  """Base class of encoder and decoder.

  Attributes:
    config: hyper-parameters.
    shared_embedding: token embedding; None for a separate one named `token_embedder`.
    feed_forward_fn: function from a stack and layer to the factory, or two, of its feed-forward blocks.
    attention_fn: function from a stack and layer to the factory of its attention blocks.
    position_encoding: position encoding of self-attention.
  """

  config: StackConfig
  shared_embedding: nn.Module | None = None
  feed_forward_fn: FeedForwardFn = dense_everywhere
  attention_fn: AttentionFn = t5_attention_everywhere
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def setup(self):
    if self.shared_embedding is None:
      self.embedding = token_embedding(self.config, name='token_embedder')
    else:
      self.embedding = self.shared_embedding

  def _run_layers(
    self, layer_cls: Callable[..., nn.Module], stack: str, x: Any, *operands: Any, **options: Any
  ):
    """Run the layers of `stack` on `x`; see `scan.run_layers`."""
    modules = [
      layer_cls(
        self.config,
        self.feed_forward_fn(stack, i),
        self.attention_fn(stack, i),
        self.position_encoding,
        parent=None,
      )
      for i in range(self.config.num_layers_of(stack))
    ]
    return scan.run_layers(
      self,
      modules,
      x,
      *operands,
      tree=layer_tree(self.config, stack),
      scan=self.config.scan_layers,
      remat_policy=self.config.remat_policy,
      remat_offload=self.config.remat_offload,
      **options,
    )

  def _position(
    self, q_len: int, k_len: int, bidirectional: bool, offset: jax.Array | None = None
  ) -> jax.Array | layers.DistanceBias | None:
    """Return the position biases of all layers, or None; for the arguments see `PositionEncoding.biases`."""
    if self.config.relpos_per_layer:
      return None
    return self.position_encoding.biases(self.config, q_len, k_len, bidirectional, offset)

  def _tokens(self, stack: str, ids: jax.Array, mask: jax.Array) -> Tokens | None:
    """Return the tokens, `ids` int32 [batch, length], for the layers of `stack`; None if no block needs them."""
    for i in range(self.config.num_layers_of(stack)):
      factories = feed_forward_factories(self.feed_forward_fn(stack, i))
      if any(isinstance(factory, TokenFeedForwardFactory) for factory in factories):
        return Tokens(mask, ids)
    return None

  def _embed(self, tokens: jax.Array, deterministic: bool) -> jax.Array:
    """Return embeddings <dtype>[batch, length, embed] of int32 [batch, length], with dropout."""
    x = self.embedding(tokens.astype(jnp.int32))
    x = nn.Dropout(rate=self.config.dropout_rate, broadcast_dims=(-2,))(
      x, deterministic=deterministic
    )
    return constrain_activations(x.astype(self.config.dtype))


class Encoder(Stack):
  """Encoder: embedding, layers, norm."""

  @nn.compact
  def __call__(
    self,
    encoder_input_tokens: jax.Array,
    encoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    *,
    encoder_segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Encode tokens.

    Args:
      encoder_input_tokens: int32 [batch, length]; 0 is padding.
      encoder_mask: <any>[batch, 1, length, length], positive where attention is allowed, instead of the mask of padding
        and segments; see `layers.make_attention_mask`.
      deterministic: True for no dropout.
      encoder_segment_ids: int32 [batch, length], number of the packed example of each position.

    Returns:
      <dtype>[batch, length, embed].
    """
    cfg = self.config
    length = encoder_input_tokens.shape[1]
    position = self._position(length, length, bidirectional=True)
    valid = encoder_input_tokens > 0
    if encoder_mask is not None:
      bias = masked_bias(encoder_mask, position)
    else:
      bias = layers.make_attention_bias(
        valid,
        valid,
        query_segment_ids=encoder_segment_ids,
        key_segment_ids=encoder_segment_ids,
        position=position,
        arrays=layers.uses_arrays(cfg.attention_kernel, length, length),
      )
    x = self._embed(encoder_input_tokens, deterministic)
    tokens = self._tokens('encoder', encoder_input_tokens, valid)
    x = self._run_layers(EncoderLayer, 'encoder', x, bias, tokens, deterministic=deterministic)
    x = layer_norm(cfg, 'encoder_norm')(x)
    return constrain_activations(nn.Dropout(rate=cfg.dropout_rate)(x, deterministic=deterministic))


class DecoderMasks(NamedTuple):
  """Masks of a decoder, positive where attention is allowed; None for no mask.

  Attributes:
    decoder: <any>[batch, 1, length, length] of self-attention; in a step of decoding [batch, 1, 1, cache length].
    encoder_decoder: <any>[batch, 1, length, encoder length] of the attention to the encoder's output.
  """

  decoder: jax.Array | None
  encoder_decoder: jax.Array | None


class EncoderOutput(NamedTuple):
  """Input of a decoder from an encoder.

  Attributes:
    encoded: <dtype>[batch, encoder length, embed]; not read if its keys and values are cached.
    tokens: int32 [batch, encoder length], encoded tokens; 0 is padding. Not read with `DecoderMasks`.
    segment_ids: int32 [batch, encoder length], number of the packed example of each position; None for unpacked rows.
  """

  encoded: jax.Array | None
  tokens: jax.Array | None
  segment_ids: jax.Array | None = None


class Decoder(Stack):
  """Decoder, with or without an encoder: embedding, layers, norm, logits."""

  @nn.compact
  def __call__(
    self,
    decoder_input_tokens: jax.Array | None,
    decoder_target_tokens: jax.Array | None,
    decoder_segment_ids: jax.Array | None = None,
    decoder_causal_attention: jax.Array | None = None,
    encoder: EncoderOutput | None = None,
    *,
    deterministic: bool = False,
    cache: CacheUse = NO_CACHE,
    return_logits: bool = True,
    masks: DecoderMasks | None = None,
  ) -> jax.Array | layers.OutputProjection | None:
    """Compute logits, or make the cache for decoding step by step.

    Args:
      decoder_input_tokens: int32 [batch, length].
      decoder_target_tokens: int32 [batch, length]; 0 is padding. Ignored in decoding.
      decoder_segment_ids: int32 [batch, length], number of the packed example of each position.
      decoder_causal_attention: int32 [batch, length], nonzero at positions with bidirectional attention (within their
        segment); None for causal attention.
      encoder: output of the encoder; None for a network without encoder.
      deterministic: True for no dropout.
      cache: use of the cache; `index` and the length of an existing cache are read from it.
      return_logits: False to return the operands of the product that gives the logits.
      masks: masks instead of those of tokens, segments and order. A step of decoding also masks later positions.

    Returns:
      float32 [batch, length, vocab], or None with `cache.fill`.

    Raises:
      ConfigError: packed rows in decoding, a prefix in a step of decoding, a cache of another length, or a prompt
        longer than the cache.
    """
    run = functools.partial(self._run_layers, DecoderLayer, 'decoder')
    if cache.fill:
      assert (
        encoder is not None
      )  # Only networks with an encoder make a cache before the first step.
      return run(None, encoder.encoded, None, None, None, cache, deterministic=True)

    assert decoder_input_tokens is not None  # It is None with `cache.fill` only.
    length = decoder_input_tokens.shape[1]
    kernel = self.config.attention_kernel
    if cache.is_used:
      encoder_is_packed = encoder is not None and encoder.segment_ids is not None
      if decoder_segment_ids is not None or encoder_is_packed:
        raise ConfigError('Cached decoding needs unpacked rows, got segment ids. Set pack=False.')
      index = None
      if not cache.prefill:
        index = self._cached('cache_index')
      cache = dataclasses.replace(
        cache, max_decode_length=self._cache_length(cache.max_decode_length), index=index
      )
      # No mask is needed: the positions of a prompt do not attend to later ones, which steps overwrite.
      valid = prompt_positions(decoder_input_tokens, None)
      if cache.prefill:
        real = prompt_positions(decoder_input_tokens, cache.prefill_lengths)
      else:
        real = valid
    elif masks is None:
      assert decoder_target_tokens is not None
      valid = real = decoder_target_tokens > 0
    else:
      valid = real = jnp.ones_like(decoder_input_tokens) > 0
    if masks is not None:
      bias = self._masked_bias(masks.decoder, length, cache)
    elif cache.index is None:
      # Teacher forcing; a prompt; or with `decode`, a pass over dummy inputs that makes a cache, as in T5X.
      if decoder_causal_attention is None:
        prefix = None
      else:
        prefix = decoder_causal_attention > 0
      bias = layers.make_attention_bias(
        valid,
        valid,
        query_segment_ids=decoder_segment_ids,
        key_segment_ids=decoder_segment_ids,
        causal=True,
        prefix=prefix,
        position=self._position(length, length, bidirectional=False),
        arrays=layers.uses_arrays(kernel, length, length),
      )
    elif decoder_causal_attention is not None:
      raise ConfigError(
        'A step of decoding must not get decoder_causal_attention. Pass it with prefill=True, when the '
        'prompt is read.'
      )
    else:
      bias = self._step_bias(length, cache.num_keys(length), cache.index)
    encoded = None
    if encoder is not None:
      encoded = encoder.encoded
    cross_bias = None
    if masks is not None:
      cross_bias = masked_bias(masks.encoder_decoder)
    elif encoder is not None:
      assert encoder.tokens is not None
      cross_bias = layers.make_attention_bias(
        real,
        encoder.tokens > 0,
        query_segment_ids=decoder_segment_ids,
        key_segment_ids=encoder.segment_ids,
        arrays=layers.uses_arrays(kernel, length, encoder.tokens.shape[1]),
      )

    fresh = ()
    if cache.prefill:
      fresh = ('cache',)
    y = self._embed(decoder_input_tokens, deterministic)
    y = run(
      y,
      encoded,
      bias,
      cross_bias,
      self._tokens('decoder', decoder_input_tokens, real),
      cache,
      deterministic=deterministic,
      fresh=fresh,
    )
    projection = self._project(y, deterministic)
    if return_logits:
      return projection.logits()
    return projection

  def _cached(self, name: str) -> jax.Array | None:
    """Return an array of the first layer's self-attention cache; None without cache."""
    return scan.read_first_layer(
      self, layer_tree(self.config, 'decoder'), 'cache', ('self_attention', name)
    )

  def _cache_length(self, max_decode_length: int | None) -> int | None:
    """Return the length of the existing cache, or else `max_decode_length`.

    Raises:
      ConfigError: both are given and differ.
    """
    cached_key = self._cached('cached_key')
    slot_table = self._cached('slot_table')
    if slot_table is not None:
      length = slot_table.shape[1]
    elif cached_key is not None:
      length = cached_key.shape[2]
    else:
      return max_decode_length
    if max_decode_length not in (None, length):
      raise checks.invalid(
        '',
        'max_decode_length',
        f'{length}, the length of the cache',
        max_decode_length,
        'Make the cache by init_cache with this max_decode_length.',
      )
    return length

  def _step_bias(self, q_len: int, cache_length: int, index: jax.Array) -> layers.AttentionBias:
    """Return the bias of self-attention for `q_len` queries from cache position `index` ([] or [batch]) on.

    It has no mask: the cache masks later positions and positions that are not filled.
    """
    position = self._position(q_len, cache_length, False, index)
    if position is None:
      return layers.AttentionBias()
    return layers.AttentionBias().with_position(position)

  def _masked_bias(
    self, mask: jax.Array | None, length: int, cache: CacheUse
  ) -> layers.AttentionBias:
    """Return the bias of self-attention for a given mask, see `DecoderMasks`."""
    position = self._position(length, cache.num_keys(length), False, cache.index)
    return masked_bias(mask, position)

  def _project(self, y: jax.Array, deterministic: bool) -> layers.OutputProjection:
    """Return the logits of <dtype>[batch, length, embed], after the last norm, as a product to compute."""
    cfg = self.config
    y = layer_norm(cfg, 'decoder_norm')(y)
    y = nn.Dropout(rate=cfg.dropout_rate, broadcast_dims=(-2,))(y, deterministic=deterministic)
    y = constrain_activations(y)
    if not cfg.logits_via_embedding:
      return layers.LogitsDense(cfg.vocab_size, name='logits_dense')(
        y, chunk_size=cfg.loss_chunk_size
      )
    divisor = 1.0
    if cfg.scale_tied_logits:
      # The table's vectors have unit variance per dim, so their products with y have variance emb_dim.
      divisor = math.sqrt(cfg.emb_dim)
    return layers.OutputProjection(
      y,
      self.embedding.embedding,
      vocab_dim=0,
      divisor=divisor,
      chunk_size=cfg.loss_chunk_size,
    )


def masked_bias(
  mask: jax.Array | None, position: jax.Array | layers.DistanceBias | None = None
) -> layers.AttentionBias:
  """Return the bias of attention for a mask and position biases, both optional; see `layers.make_attention_mask`."""
  if mask is None:
    bias = layers.AttentionBias()
  else:
    bias = layers.AttentionBias.from_array(layers.mask_to_bias(mask))
  if position is None:
    return bias
  return bias.with_position(position)


def prompt_positions(tokens: jax.Array, lengths: jax.Array | None) -> jax.Array:
  """Return bool [batch, length], True at the positions of prompts.

  The start token of prompts is 0, like padding, so only lengths identify a prompt.

  Args:
    tokens: int32 [batch, length].
    lengths: int32 [batch], lengths of the prompts; None for all positions.
  """
  if lengths is None:
    return jnp.ones(tokens.shape, jnp.bool_)
  return jnp.arange(tokens.shape[1], dtype=jnp.int32) < lengths[:, None]


class StackNetwork(Network):
  """Base class of networks made of these stacks.

  Attributes:
    config: hyper-parameters.
    feed_forward_fn: function from a stack and layer to the factory, or two, of its feed-forward blocks; by default
      T5's.
    attention_fn: function from a stack and layer to the factory of its attention blocks; by default T5's.
    position_encoding: position encoding of self-attention; by default T5's relative position biases.
  """

  config: StackConfig
  feed_forward_fn: FeedForwardFn = dense_everywhere
  attention_fn: AttentionFn = t5_attention_everywhere
  position_encoding: PositionEncoding = RELATIVE_POSITIONS

  def __post_init__(self):
    checks.check(
      type(self).__name__,
      {'position_encoding': self.position_encoding},
      position_encoding=checks.instance(
        PositionEncoding,
        'a `PositionEncoding`',
        'In gin, call the function that returns one: @name().',
      ),
    )
    if self.attention_fn is not t5_attention_everywhere:
      for stack in self.config.LAYER_COUNTS:
        factory = checks.call_custom(
          type(self).__name__, 'attention_fn', 'stack, layer', self.attention_fn, stack, 0
        )
        checks.check(
          type(self).__name__,
          {'attention_fn(stack, layer)': factory},
          **{
            'attention_fn(stack, layer)': checks.Expectation(
              'a factory of attention blocks', callable
            )
          },
        )
    if not self.has_position_biases:
      for field in dataclasses.fields(self.config):
        value = getattr(self.config, field.name)
        if field.name in RELPOS_FIELDS and value != field.default:
          raise checks.invalid(
            type(self.config).__name__,
            field.name,
            f'{field.default!r} with a `{type(self).__name__}.position_encoding` without biases',
            value,
            'Alternatively, give the position encoding a biases_fn.',
          )
    super().__post_init__()

  @property
  def has_position_biases(self) -> bool:
    """True if the position encoding adds biases."""
    return self.position_encoding.biases_fn is not None

  @property
  def custom_blocks(self) -> tuple[str, ...]:
    """Options that make blocks that `transformers` does not have, such as `attention_fn`; it has Switch's experts."""
    attention = []
    feed_forward = []
    for stack in self.config.LAYER_COUNTS:
      for i in range(self.config.num_layers_of(stack)):
        attention.append(self.attention_fn(stack, i))
        feed_forward.extend(feed_forward_factories(self.feed_forward_fn(stack, i)))
    options = dict.fromkeys(map(custom_option, feed_forward))
    names = [option for option in options if option is not None]
    if any(factory is not t5_attention for factory in attention):
      names.append('attention_fn')
    if self.position_encoding != RELATIVE_POSITIONS:
      names.append('position_encoding')
    return tuple(names)

  def _stack(self, stack_cls: type[Stack], shared_embedding: nn.Module | None = None) -> Stack:
    """Return an encoder or decoder of this network's layers."""
    return stack_cls(
      self.config, shared_embedding, self.feed_forward_fn, self.attention_fn, self.position_encoding
    )

  @property
  def vocab_size(self) -> int:
    """Number of ids with an embedding and a logit."""
    return self.config.vocab_size

  @property
  def loss_chunk_size(self) -> int | None:
    """See `StackConfig`."""
    return self.config.loss_chunk_size

  @property
  def scanned_layers(self) -> dict[str, list[tuple[int, ...]]]:
    """Numbers of the layers that a loop runs at one position of its body, by stack, as `scan.run_layers` does."""
    if self.config.scan_layers is False or self.config.stacked_params:
      return {}
    result = {}
    for stack in self.config.LAYER_COUNTS:
      layers_of_stack = range(self.config.num_layers_of(stack))
      kinds = kinds_of(
        [(self.feed_forward_fn(stack, i), self.attention_fn(stack, i)) for i in layers_of_stack]
      )
      result[stack] = []
      for segment in find_segments(kinds):
        if segment.repeats < self.min_stacked_layers:
          continue
        for offset in range(segment.period):
          result[stack].append(tuple(segment.layers_at(offset)))
    return result

  @property
  def min_stacked_layers(self) -> int:
    """Least number of layers that are stacked."""
    if self.config.scan_layers:
      return 2
    return scan.MIN_LAYERS_OF_A_LOOP

  @staticmethod
  def share_beams(cache: Mapping[str, Any], num_beams: int) -> dict[str, Any]:
    """Return `cache` in a form that beam search need not reorder; see `layers.share_beams`."""
    return layers.share_beams(cache, num_beams)
