"""Hyper-parameters of networks of T5's layers: common ones, and those of each architecture."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.layers import ATTENTION_KERNELS
from t5x_lite.layers import activation_fn
from t5x_lite.networks.remat import REMAT_POLICIES
from t5x_lite.networks.remat import RESULT_NAMES

# Layouts of the parameter tree, those of T5X's `examples/t5` and `examples/scalable_t5`.
PARAM_LAYOUTS = ('t5', 'scalable_t5')
RELPOS_BIAS_TABLES = ('per_stack', 'per_layer')
# Fields that have an effect only with biases in the position encoding.
RELPOS_FIELDS = ('relpos_bias_tables', 'num_relpos_buckets', 'max_relpos_distance')
_DTYPES = ('float32', 'bfloat16', 'float16')


def _dtype_name(dtype: Any) -> str:
  try:
    return jnp.dtype(dtype).name
  except TypeError:
    return str(dtype)


@dataclasses.dataclass(frozen=True)
class _FieldsBeforeDepth:
  """Fields that precede the numbers of layers in T5X's order; see `StackConfig`."""

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8


@dataclasses.dataclass(frozen=True)
class StackConfig(_FieldsBeforeDepth):
  """Hyper-parameters of all networks of T5's layers: T5X's fields, then keyword-only additions.

  A configuration derives from this class and from a class with its numbers of layers, which in T5X's order follow
  `num_heads`.

  T5 1.0 is the default form: relu and (set `logits_via_embedding`) tied logits. T5 1.1 has
  `mlp_activations=('gelu', 'linear')`. Raffel et al. 2020, https://arxiv.org/abs/1910.10683.

  Attributes:
    vocab_size: number of rows of the embedding table, at least the number of ids of the vocabulary.
    dtype: compute dtype, 'float32', 'bfloat16' or, with a warning of its small range, 'float16'. Parameters, norms,
      softmax and logits are always float32; with 'bfloat16' the product of the logits has bfloat16 operands and float32
      sums.
    emb_dim: width of the residual stream.
    num_heads: number of attention heads.
    head_dim: size of a head.
    mlp_dim: hidden width of the feed-forward block.
    mlp_activations: activations of its gated projections, by name; T5 1.1 has ('gelu', 'linear').
    dropout_rate: dropout rate of embeddings, sub-layer outputs, hidden units and attention weights.
    logits_via_embedding: True to compute logits with the embedding table (tied logits, as in T5 1.0) instead of a
      `logits_dense` kernel.
    float32_attention_logits: True to keep attention scores in float32 in half-precision computation, False to round
      them to `dtype` before the softmax.
    remat_policy: results of a layer that are stored for its backward pass, which computes the others again. 'none':
      all, in loops (see `scan_layers`) all but those of simple operations on elements; 'minimal': products with
      parameters, as in T5X, and those of experts; 'save_attention': the weights and the context of attention, so that
      its two products of quadratic size are not computed again; 'save_dots_except_mlp': query, key, value and output of
      attention; 'full': only the input of each layer; 'offload': those of `remat_offload`. With results that are not
      stored, `jax.debug` callbacks of a layer run again in the backward pass.
    remat_offload: names of results, out of `remat.RESULT_NAMES`, that 'offload' stores in the host's memory; () with
      other policies.
    scan_layers: True to compile each stack as one loop over its layers, False to compile each layer. A loop has the
      same parameter tree, the same results up to rounding, and a program whose size does not grow with the depth. None
      compiles loops where the parameters of equal layers are stacked in any case: with the layout 'scalable_t5', and in
      the training and evaluation steps of the trainer, which stacks six or more equal layers if the optimizer supports
      it (see `OptimizerDef.stacking_key`). With True the trainer stacks two or more, and other programs stack the
      parameters in each run. Layers with different feed-forward blocks ('t5' layout only) run as one loop per repeated
      segment. Decoding steps are never loops.
    param_layout: form of the parameter tree. 't5': one subtree per layer, attention kernels as matrices. 'scalable_t5':
      one subtree with a dim over layers in position 1, attention kernels with dims for heads and kv.
      `param_layouts.convert` converts between them.
    relpos_bias_tables: 'per_stack', one table of relative position biases for all layers of a stack (T5, mT5), or
      'per_layer' (umT5, and models that T5X trained with scalable_t5). None is 'per_stack' for the layout 't5' and
      'per_layer' for 'scalable_t5', which supports no other value.
    attention_kernel: one of `layers.ATTENTION_KERNELS`: 'auto', 'dot', 'blockwise', 'cudnn' (NVIDIA GPU, half
      precision) or 'splash' (TPU); see `layers.dot_product_attention`.
    num_relpos_buckets: number of buckets of distances in a table.
    max_relpos_distance: smallest distance of the last bucket.
    scale_tied_logits: True to divide the logits of `logits_via_embedding` by sqrt(emb_dim), as in T5 1.0 and T5X. False
      is for T5 1.1 and mT5 models that transformers 5 ties.
    layer_norm_epsilon: constant that the norms add to the mean square of their inputs; 1e-6 in T5X and in T5's models.
    loss_chunk_size: number of target tokens of a device whose logits the loss computes at once; 0 for all tokens. None
      is all tokens if their logits take at most 128 MiB per device, else as many as take this memory, but at least
      256. The results are equal up to rounding. Needs a model without `metric_fns`.
    qk_clip_threshold: largest attention score of a head, query . key, above which an update of the training step scales
      the query and key kernels of this head down (QK-clip, https://arxiv.org/abs/2507.20534, which has 100); None for
      no such limit.
  """

  # Field with the number of layers of each stack, by the name of the stack.
  LAYER_COUNTS: ClassVar[Mapping[str, str]]

  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str] = ('relu',)
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  _: dataclasses.KW_ONLY
  float32_attention_logits: bool = False
  remat_policy: str = 'none'
  remat_offload: Sequence[str] = ()
  scan_layers: bool | None = None
  param_layout: str = 't5'
  relpos_bias_tables: str | None = None
  attention_kernel: str = 'auto'
  num_relpos_buckets: int = 32
  max_relpos_distance: int = 128
  scale_tied_logits: bool = True
  layer_norm_epsilon: float = 1e-6
  loss_chunk_size: int | None = None
  qk_clip_threshold: float | None = None

  def num_layers_of(self, stack: str) -> int:
    """Return the number of layers of `stack`, 'encoder' or 'decoder'."""
    return getattr(self, self.LAYER_COUNTS[stack])

  @property
  def relpos_per_layer(self) -> bool:
    """True if each layer has its own table of relative position biases."""
    return (
      self.relpos_bias_tables or ('per_layer' if self.stacked_params else 'per_stack')
    ) == 'per_layer'

  @property
  def has_encoder(self) -> bool:
    """True if the network has an encoder."""
    return 'encoder' in self.LAYER_COUNTS

  @property
  def stacked_params(self) -> bool:
    """True if the parameter tree has one subtree per stack with a dim over layers."""
    return self.param_layout == 'scalable_t5'

  def __post_init__(self):
    size = checks.number(at_least=1, below=2**31, integer=True)
    values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    values['dtype'] = dtype = _dtype_name(self.dtype)
    checks.check(
      type(self).__name__,
      values,
      vocab_size=size,
      emb_dim=size,
      num_heads=size,
      **dict.fromkeys(self.LAYER_COUNTS.values(), size),
      head_dim=size,
      mlp_dim=size,
      num_relpos_buckets=checks.Expectation(
        'a positive multiple of 4', lambda buckets: size.holds(buckets) and buckets % 4 == 0
      ),
      max_relpos_distance=checks.Expectation(
        'an integer above num_relpos_buckets / 2',
        lambda distance: size.holds(distance) and distance > self.num_relpos_buckets // 2,
      ),
      dropout_rate=checks.number(at_least=0, below=1),
      layer_norm_epsilon=checks.number(at_least=1e-12, below=1),
      loss_chunk_size=checks.number(at_least=0, integer=True).or_none(),
      qk_clip_threshold=checks.number(above=0).or_none(),
      dtype=checks.one_of(_DTYPES),
      mlp_activations=checks.Expectation(
        "a sequence of names, such as ('gelu', 'linear')",
        lambda names: isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 0,
      ),
      remat_policy=checks.one_of(REMAT_POLICIES),
      remat_offload=checks.Expectation(
        f'a sequence of names out of {RESULT_NAMES}' if self.remat_policy == 'offload' else '()',
        lambda names: (
          isinstance(names, Sequence)
          and not isinstance(names, str)
          and set(names) <= set(RESULT_NAMES)
          and bool(names) == (self.remat_policy == 'offload')
        ),
        '' if self.remat_policy == 'offload' else "Names need remat_policy='offload'.",
      ),
      param_layout=checks.one_of(PARAM_LAYOUTS),
      attention_kernel=checks.one_of(
        [kernel for kernel in ATTENTION_KERNELS if kernel != 'cudnn' or dtype != 'float32'],
        "'cudnn' needs half precision: set dtype='bfloat16'." if dtype == 'float32' else '',
      ),
      relpos_bias_tables=checks.one_of(
        ('per_layer',) if self.stacked_params else RELPOS_BIAS_TABLES,
        "'per_stack' needs param_layout='t5'." if self.stacked_params else '',
      ).or_none(),
      scale_tied_logits=checks.one_of(
        (True, False) if self.logits_via_embedding else (True,),
        '' if self.logits_via_embedding else 'False needs logits_via_embedding=True.',
      ),
    )
    for activation in self.mlp_activations:
      activation_fn(activation)
    if dtype == 'float16':
      checks.warn_of_float16(f'{type(self).__name__}.dtype')


@dataclasses.dataclass(frozen=True)
class _EncoderDecoderDepth(_FieldsBeforeDepth):
  """Depth of an encoder-decoder, at T5X's position, after the fields of the base class."""

  LAYER_COUNTS: ClassVar[Mapping[str, str]] = {
    'encoder': 'num_encoder_layers',
    'decoder': 'num_decoder_layers',
  }

  num_encoder_layers: int = 6
  num_decoder_layers: int = 6


@dataclasses.dataclass(frozen=True)
class T5Config(StackConfig, _EncoderDecoderDepth):
  """Hyper-parameters of the T5 encoder-decoder; see `StackConfig`.

  Attributes:
    num_encoder_layers: number of layers of the encoder.
    num_decoder_layers: number of layers of the decoder.
    float32_attention_logits: see `StackConfig`; T5X has it as the last positional field.
  """

  float32_attention_logits: bool = False


@dataclasses.dataclass(frozen=True)
class _DecoderOnlyDepth(_FieldsBeforeDepth):
  """Depth of a decoder-only network, at T5X's position, after the fields of the base class."""

  LAYER_COUNTS: ClassVar[Mapping[str, str]] = {'decoder': 'num_layers'}

  num_layers: int = 6


@dataclasses.dataclass(frozen=True)
class TransformerConfig(StackConfig, _DecoderOnlyDepth):
  """Hyper-parameters of a decoder-only network; see `StackConfig`.

  T5X has only the param_layout 't5' for this network. Bidirectional attention among prefixes needs the
  attention_kernel 'dot' or 'blockwise', which 'auto' chooses.

  Attributes:
    num_layers: number of layers.
  """
