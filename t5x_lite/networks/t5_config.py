"""Hyper-parameters of networks of T5's layers: those that all share, and the T5 encoder-decoder's."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.layers import ATTENTION_KERNELS, activation_fn
from t5x_lite.networks.scan import REMAT_POLICIES

# Forms of the parameter tree: those of T5X's `examples/t5` and `examples/scalable_t5`.
PARAM_LAYOUTS = ('t5', 'scalable_t5')
RELPOS_BIAS_TABLES = ('per_stack', 'per_layer')
# Fields that matter to position encodings with biases only.
RELPOS_FIELDS = ('relpos_bias_tables', 'num_relpos_buckets', 'max_relpos_distance')
_DTYPES = ('float32', 'bfloat16', 'float16')


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
  """Raise ConfigError unless `value` of the option `name` is one of `choices`."""
  if value not in choices:
    raise ConfigError(f'got {name}={value!r}; expected one of {", ".join(map(repr, choices))}.'
                      f'{did_you_mean(str(value), choices)}')


@dataclasses.dataclass(frozen=True)
class _FieldsBeforeDepth:
  """The fields that T5X has before the numbers of layers; see `StackConfig`."""

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8


@dataclasses.dataclass(frozen=True)
class StackConfig(_FieldsBeforeDepth):
  """Hyper-parameters and checks that all networks of T5's layers share: T5X's fields, then keyword-only additions.

  A configuration derives from this class and from one with its numbers of layers, which in T5X's order follow
  `num_heads`.

  T5 1.0 is the default form: relu and (set `logits_via_embedding`) tied logits. T5 1.1 has
  `mlp_activations=('gelu', 'linear')`. Raffel et al. 2020, https://arxiv.org/abs/1910.10683.

  Attributes:
    vocab_size: rows of the embedding table: at least the number of ids of the vocabulary.
    dtype: compute dtype, 'float32', 'bfloat16' or 'float16'. Parameters, norms, softmax and logits are always float32.
    emb_dim: width of the residual stream.
    num_heads: attention heads.
    head_dim: size of a head.
    mlp_dim: hidden width of the feed-forward block.
    mlp_activations: activations of its gated projections, by name; T5 1.1 has ('gelu', 'linear').
    dropout_rate: dropout rate of embeddings, sub-layer outputs, hidden units and attention weights.
    logits_via_embedding: compute logits with the embedding table (tied logits, as in T5 1.0) instead of a
      `logits_dense` kernel.
    float32_attention_logits: keep attention scores in float32 in half-precision computation; otherwise they are rounded
      to `dtype` before the softmax.
    remat_policy: intermediate results that the backward pass keeps. 'none': all; 'minimal': outputs of matrix products
      with parameters; 'full': only the input of each layer.
    scan_layers: compile each stack as one loop over its layers. The same parameter tree and numbers, a program whose
      size does not depend on the depth, a somewhat slower step; with the 't5' layout each step stacks the parameters.
      Layers with different feed-forward blocks (the 't5' layout only) run as one loop for each segment that repeats.
    param_layout: form of the parameter tree. 't5': one subtree per layer, kernels of attention as matrices.
      'scalable_t5': one subtree with a dim over layers in position 1, kernels of attention with dims for heads and kv.
      `param_layouts.convert` converts.
    relpos_bias_tables: 'per_stack', one table of relative position biases for all layers of a stack (T5, mT5), or
      'per_layer' (umT5, and everything that T5X trained with scalable_t5). None is the layout's own: 'per_stack' for
      't5', 'per_layer' for 'scalable_t5' (which has no other).
    attention_kernel: 'auto', 'dot', or 'cudnn' (NVIDIA GPU, half precision); see `layers.dot_product_attention`.
    num_relpos_buckets: buckets of distances in a table.
    max_relpos_distance: all distances from this one on share a bucket.
    scale_tied_logits: divide the logits of `logits_via_embedding` by sqrt(emb_dim), as T5 1.0 and T5X do. False is for
      T5 1.1 and mT5 models that transformers 5 ties.
  """

  # Name of each stack to the field that counts its layers.
  LAYER_COUNTS: ClassVar[Mapping[str, str]]

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

  def num_layers_of(self, stack: str) -> int:
    """Return the number of layers of `stack`, 'encoder' or 'decoder'."""
    return getattr(self, self.LAYER_COUNTS[stack])

  @property
  def relpos_per_layer(self) -> bool:
    """True if each layer has its own table of relative position biases."""
    return (self.relpos_bias_tables or ('per_layer' if self.stacked_params else 'per_stack')) == 'per_layer'

  @property
  def has_encoder(self) -> bool:
    """True if the network has an encoder, whose output its decoder reads."""
    return 'encoder' in self.LAYER_COUNTS

  @property
  def stacked_params(self) -> bool:
    """True if the parameter tree has one subtree per stack with a dim over layers."""
    return self.param_layout == 'scalable_t5'

  def __post_init__(self):
    for name in ('vocab_size', 'emb_dim', 'num_heads', *self.LAYER_COUNTS.values(), 'head_dim', 'mlp_dim',
                 'num_relpos_buckets', 'max_relpos_distance'):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ConfigError(f'got {name}={value!r}; expected a positive integer below 2**31.')
    if self.num_relpos_buckets % 4 or self.max_relpos_distance <= self.num_relpos_buckets // 2:
      raise ConfigError(
          f'got num_relpos_buckets={self.num_relpos_buckets} and max_relpos_distance={self.max_relpos_distance}; '
          'expected a multiple of 4 (each direction has exact and spaced buckets) and a distance above half of it.')
    if not 0.0 <= self.dropout_rate < 1.0:
      raise ConfigError(f'got dropout_rate={self.dropout_rate!r}; expected a number in [0, 1).')
    try:
      dtype_name = jnp.dtype(self.dtype).name
    except TypeError:
      dtype_name = str(self.dtype)
    check_choice('dtype', dtype_name, _DTYPES)
    if isinstance(self.mlp_activations, str) or not self.mlp_activations:
      raise ConfigError(f'got mlp_activations={self.mlp_activations!r}; expected a sequence of names, such as '
                        "('gelu', 'linear').")
    for activation in self.mlp_activations:
      activation_fn(activation)
    check_choice('remat_policy', self.remat_policy, REMAT_POLICIES)
    check_choice('param_layout', self.param_layout, PARAM_LAYOUTS)
    check_choice('attention_kernel', self.attention_kernel, ATTENTION_KERNELS)
    if self.relpos_bias_tables is not None:
      check_choice('relpos_bias_tables', self.relpos_bias_tables, RELPOS_BIAS_TABLES)
    if self.param_layout == 'scalable_t5' and self.relpos_bias_tables == 'per_stack':
      raise ConfigError("got param_layout='scalable_t5' with relpos_bias_tables='per_stack', but that tree holds a "
                        "table per layer. Use param_layout='t5' (scan_layers works with both), or 'per_layer'.")
    if not self.scale_tied_logits and not self.logits_via_embedding:
      raise ConfigError(f'`{type(self).__name__}.scale_tied_logits` must be True with logits_via_embedding=False, got '
                        'False. Set logits_via_embedding=True, or leave scale_tied_logits out: a `logits_dense` kernel '
                        'is never scaled.')
    if self.attention_kernel == 'cudnn' and dtype_name == 'float32':
      raise ConfigError("got attention_kernel='cudnn' with dtype='float32', but the fused kernel computes in half "
                        "precision only. Set dtype='bfloat16', or attention_kernel='auto'.")


@dataclasses.dataclass(frozen=True)
class _EncoderDecoderDepth(_FieldsBeforeDepth):
  """Depth of an encoder-decoder, in T5X's position: behind the fields of the base."""

  LAYER_COUNTS: ClassVar[Mapping[str, str]] = {'encoder': 'num_encoder_layers', 'decoder': 'num_decoder_layers'}

  num_encoder_layers: int = 6
  num_decoder_layers: int = 6


@dataclasses.dataclass(frozen=True)
class T5Config(StackConfig, _EncoderDecoderDepth):
  """Hyper-parameters of the T5 encoder-decoder; see `StackConfig`.

  Attributes:
    num_encoder_layers: layers of the encoder.
    num_decoder_layers: layers of the decoder.
    float32_attention_logits: see `StackConfig`; T5X has it as the last positional field.
  """

  float32_attention_logits: bool = False


@dataclasses.dataclass(frozen=True)
class _DecoderOnlyDepth(_FieldsBeforeDepth):
  """Depth of a decoder-only network, in T5X's position: behind the fields of the base."""

  LAYER_COUNTS: ClassVar[Mapping[str, str]] = {'decoder': 'num_layers'}

  num_layers: int = 6


@dataclasses.dataclass(frozen=True)
class TransformerConfig(StackConfig, _DecoderOnlyDepth):
  """Hyper-parameters of a decoder-only network; see `StackConfig`.

  T5X has only the param_layout 't5' for this network. Prefixes that are read both ways need the attention_kernel 'dot',
  which 'auto' takes.

  Attributes:
    num_layers: number of layers.
  """
