"""Sparse networks: selection of the sparse layers of T5 and decoder-only networks, and factories of their blocks.

The networks are the dense ones, whose layers have feed-forward blocks as arguments.
"""

from collections.abc import Callable, Sequence
import dataclasses
import logging
import re
from typing import Any, ClassVar, Protocol

import flax.linen as nn

from moe.experts import ExpertMlp
from moe.layers import MoeLayer
from moe.routing.base import Router
from moe.routing.token_routers import TokensChooseRouter
from t5x_lite import checks
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from t5x_lite.networks.t5_config import StackConfig

_logger = logging.getLogger(__name__)

# Layouts of the sparse layers of a stack; another one is 'every_<n>'.
LAYOUTS = ('bottom', 'middle', 'mixed', 'top')
_EVERY = re.compile(r'every_([1-9]\d*)')


def sparse_layers(layout: str, num_layers: int, num_sparse_layers: int | None) -> tuple[int, ...]:
  """Return the numbers of the sparse layers, by T5X's layouts or 'every_<n>'.

  Args:
    layout: 'bottom' for the first layers, 'top' for the last, 'middle', 'mixed' for the last of each block of
      `num_layers / num_sparse_layers` layers, or 'every_<n>' for the last of each n layers.
    num_layers: number of layers of the stack.
    num_sparse_layers: number of sparse layers; None with 'every_<n>'.

  Raises:
    ConfigError: an unknown layout, or a number that does not fit the layout.

  >>> sparse_layers('mixed', num_layers=12, num_sparse_layers=3), sparse_layers('every_5', 12, None)
  ((3, 7, 11), (4, 9))
  """
  every = None
  if isinstance(layout, str):
    every = _EVERY.fullmatch(layout)
  number = checks.number(at_least=0, at_most=num_layers, integer=True)
  is_mixed = layout == 'mixed'
  period = 0
  layouts = (*LAYOUTS, 'every_2')
  expectation = number.text
  layers_remedy = ''
  remedy = ''
  if every:
    period = int(every[1])
    layouts = (layout,)
    expectation = f'None with {layout!r}'
    layers_remedy = (
      f"Set the number of layers for {layout!r}; for a dense stack leave the layout at 'mixed'."
    )
  if is_mixed:
    expectation = f'0 or a divisor of the {num_layers} layers with {layout!r}'
    remedy = "Alternatively, use 'every_<n>', 'bottom', 'middle' or 'top'."

  def fits(n):
    if every:
      return n is None
    if not number.holds(n):
      return False
    return not (is_mixed and n and num_layers % n)

  checks.check(
    'sparse_layers',
    locals(),
    layout=checks.one_of(layouts, "'every_<n>' may have any n."),
    num_layers=checks.number(at_least=period, integer=True, remedy=layers_remedy),
    num_sparse_layers=checks.Expectation(expectation, fits, remedy),
  )
  if every:
    return tuple(range(period - 1, num_layers, period))
  if not num_sparse_layers:
    return ()
  if is_mixed:
    period = num_layers // num_sparse_layers
    return tuple(range(period - 1, num_layers, period))
  dense = num_layers - num_sparse_layers
  start = {'bottom': 0, 'middle': (dense + 1) // 2, 'top': dense}[layout]
  return tuple(range(start, start + num_sparse_layers))


class BlockFactory(Protocol):
  """Factory of custom experts, a `t5.FeedForwardFactory` that is called once per layer."""

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """Return one expert, a module named `name`; see `experts.ExpertFactory`."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseBlock(t5.TokenFeedForwardFactory):
  """Factory of the `MoeLayer` of a layer; factories with equal fields are equal, so that layers run in loops.

  Attributes:
    num_experts: experts of a layer.
    router: router with the same number of experts; None is a `TokensChooseRouter` with one choice.
    expert_dim: hidden units of an expert; None is the network's `mlp_dim`.
    expert_activations: activations of an expert; None is the network's `mlp_activations`. Two make a gated block.
    expert_dropout_rate: dropout of an expert's hidden units; None is the network's `dropout_rate`.
    expert_bias: whether the projections of an expert have biases.
    expert: factory of custom experts, modules called as `block(x, decode=..., deterministic=...)`. It excludes the four
      options above and requires both capacity factors.
    group_size: maximal number of tokens that are routed together. The largest divisor of the batch's tokens up to it is
      used.
    train_capacity_factor: capacity of an expert in training, as a multiple of tokens / experts; None is dropless.
    eval_capacity_factor: capacity of an expert without dropout, as a multiple of tokens / experts; None is dropless.
    min_expert_capacity: minimal capacity of an expert, with a capacity factor; None is T5X's 4.
    dispatch: form of dispatch, one of `dispatch.METHODS`.
    shared_expert_dim: hidden units of a dense block `shared_mlp` that computes every token and whose output is added; 0
      for none. It has no biases.
    receive_factor: size of receive buffers, as a multiple of the mean; None drops nothing. See
      `dispatch.apply_experts`.
    num_groups_multiple: the number of groups is a multiple of this. Padding tokens are added if needed, and a group may
      then have more than `group_size` tokens, but less than twice as many.
  """

  num_experts: int
  router: Router | None = None
  expert_dim: int | None = None
  expert_activations: Sequence[str | Callable[..., Any]] | None = None
  expert_dropout_rate: float | None = None
  expert_bias: bool = False
  expert: BlockFactory | None = None
  group_size: int = 4096
  train_capacity_factor: float | None = None
  eval_capacity_factor: float | None = None
  min_expert_capacity: int | None = None
  dispatch: str = 'auto'
  shared_expert_dim: int = 0
  receive_factor: float | None = None
  num_groups_multiple: int = 1

  def __post_init__(self):
    activations = self.expert_activations
    if isinstance(activations, Sequence) and not isinstance(activations, str):
      # gin gives lists, which have no hash.
      object.__setattr__(self, 'expert_activations', tuple(activations))
    mlp_options = ('expert_dim', 'expert_activations', 'expert_dropout_rate')
    given = [name for name in mlp_options if getattr(self, name) is not None]
    if self.expert_bias:
      given.append('expert_bias')
    checks.check(
      'SparseBlock',
      vars(self),
      expert=checks.Expectation(
        f'None with {", ".join(given)}',
        lambda expert: expert is None or not given,
        'Set them in the factory.',
      ),
      router=checks.instance(
        Router,
        'a router, such as TokensChooseRouter(8),',
        'In gin, router = @moe.TokensChooseRouter().',
      ).or_none(),
    )
    # Check options now, not when a network is built.
    mlp = self._mlp(1, ('relu',), 0.0)
    if self.expert is None:
      self._layer(mlp, 'float32', parent=None)
    else:
      self._layer(_no_block, 'float32', parent=None)

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """Return the sparse layer named `name`; see `t5.FeedForwardFactory`."""
    make_expert = self.expert
    if make_expert is None:
      mlp = self._mlp(config.mlp_dim, tuple(config.mlp_activations), config.dropout_rate)
      return self._layer(mlp, config.dtype, name=name)

    def expert(*, name):
      return make_expert(config, name)

    return self._layer(expert, config.dtype, name=name)

  def _mlp(self, dim, activations, dropout_rate) -> ExpertMlp:
    """Return the hyper-parameters of an expert, given the values of options that are None."""
    if self.expert_dim is not None:
      dim = self.expert_dim
    if self.expert_activations is not None:
      activations = self.expert_activations
    if self.expert_dropout_rate is not None:
      dropout_rate = self.expert_dropout_rate
    return ExpertMlp(
      dim=dim,
      activations=activations,
      dropout_rate=dropout_rate,
      use_bias=self.expert_bias,
    )

  @property
  def custom_option(self) -> str | None:
    """Option by which the layers differ from Switch Transformer's in what an array does not show; None without one."""
    if self.expert is not None:
      return 'moe.SparseBlock.expert'
    if self.expert_activations is not None:
      return 'moe.SparseBlock.expert_activations'
    router = self.unbound_router()
    if type(router) is not TokensChooseRouter:
      return 'moe.SparseBlock.router'
    if router.num_selected != 1 or router.normalize_gates or router.score != 'softmax':
      return 'moe.SparseBlock.router'
    return None

  def unbound_router(self) -> Router:
    """Return a copy of the router, since layers with the same object would share its weights."""
    if self.router is None:
      router = TokensChooseRouter(self.num_experts)
    else:
      router = self.router
    return router.clone(parent=None)

  def _layer(self, expert, dtype, **module_fields) -> MoeLayer:
    return MoeLayer(
      num_experts=self.num_experts,
      expert=expert,
      router=self.unbound_router(),
      group_size=self.group_size,
      train_capacity_factor=self.train_capacity_factor,
      eval_capacity_factor=self.eval_capacity_factor,
      min_expert_capacity=self.min_expert_capacity,
      dispatch=self.dispatch,
      shared_expert_dim=self.shared_expert_dim,
      receive_factor=self.receive_factor,
      num_groups_multiple=self.num_groups_multiple,
      dtype=dtype,
      **module_fields,
    )


def _no_block(*, name):
  raise AssertionError(f'{name} needs a network.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfStack(t5.TokenFeedForwardFactory):
  """Sparse block that checks the number of layers of its stack."""

  block: SparseBlock
  stack: str
  num_layers: int

  @property
  def custom_option(self) -> str | None:
    return self.block.custom_option

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    _check_depth(config, self.stack, self.num_layers)
    return self.block(config, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseOfStack:
  """T5's block that checks the number of layers of its stack, which may have no sparse layer."""

  custom_option: ClassVar[None] = None

  stack: str
  num_layers: int

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    _check_depth(config, self.stack, self.num_layers)
    return t5.dense_feed_forward(config, name)


def _check_depth(config: StackConfig, stack: str, num_layers: int) -> None:
  if config.num_layers_of(stack) != num_layers:
    raise checks.invalid(
      'SparseFeedForward',
      f'num_{stack}_layers',
      f'{config.num_layers_of(stack)}, the {config.LAYER_COUNTS[stack]} of the network',
      num_layers,
      'In gin, set both by one macro.',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFeedForward:
  """Selection of sparse layers, the `feed_forward_fn` of `t5.Transformer` and `decoder_only.DecoderWrapper`.

  Dense layers have T5's block; without sparse layers the network is the dense one. In gin:

      network.Transformer.feed_forward_fn = @moe.SparseFeedForward()
      moe.SparseFeedForward:
        block = @moe.SparseBlock()
        num_encoder_layers = %NUM_ENCODER_LAYERS
        num_decoder_layers = %NUM_DECODER_LAYERS
        num_encoder_sparse_layers = %NUM_ENCODER_SPARSE_LAYERS
        num_decoder_sparse_layers = %NUM_DECODER_SPARSE_LAYERS

  Attributes:
    block: the `SparseBlock` of sparse layers.
    num_encoder_layers: layers of the network's encoder, 0 without one. Another number than the network's is an error.
    num_decoder_layers: layers of the network's decoder.
    num_encoder_sparse_layers: number of sparse encoder layers; None for none, and with the layout 'every_<n>'.
    num_decoder_sparse_layers: number of sparse decoder layers; None for none, and with the layout 'every_<n>'.
    encoder_layout: which layers are sparse. 'bottom': the first; 'middle'; 'top': the last; 'mixed': the last layer of
      each block of (layers / sparse layers), which must be an integer; 'every_<n>': the last of each n.
    decoder_layout: the same for the decoder.
    extra_mlp: a second, dense feed-forward sub-layer `extra_mlp` in sparse layers, as in ST-MoE
      (https://arxiv.org/abs/2202.08906, appendix C).
    decoder_block: a different `SparseBlock` for the decoder. It is needed if experts choose tokens in the encoder: in a
      decoder they would also choose later tokens, which it must not see.
  """

  block: SparseBlock
  num_encoder_layers: int = 0
  num_decoder_layers: int = 0
  num_encoder_sparse_layers: int | None = None
  num_decoder_sparse_layers: int | None = None
  encoder_layout: str = 'mixed'
  decoder_layout: str = 'mixed'
  extra_mlp: bool = False
  decoder_block: SparseBlock | None = None

  def __post_init__(self):
    block = checks.instance(SparseBlock, 'a SparseBlock', 'In gin, write @moe.SparseBlock().')
    count = checks.number(at_least=0, integer=True)
    if self._sparse_layers('decoder'):
      decoder_block_expectation = block.or_none()
    else:
      decoder_block_expectation = checks.Expectation(
        'None without sparse layers in the decoder',
        lambda value: value is None,
        'Alternatively, set num_decoder_sparse_layers.',
      )
    checks.check(
      'SparseFeedForward',
      vars(self),
      block=block,
      num_encoder_layers=count,
      num_decoder_layers=count,
      decoder_block=decoder_block_expectation,
    )
    decoder_block = self.blocks().get('decoder')
    if decoder_block is not None:
      self._warn_of_later_tokens(decoder_block.unbound_router())

  def _warn_of_later_tokens(self, router: Router) -> None:
    """Log a warning if the routing in the decoder depends on later tokens, which decoding does not know."""
    name = type(router).__name__
    if router.uses_later_tokens == 'always':
      _logger.warning(
        'Routing in the decoder depends on later tokens (%s). So the losses of training are too low, and decoding '
        'routes tokens differently. Use token choice in the decoder: decoder_block = @decoder/moe.SparseBlock() with '
        'a TokensChooseRouter, as in models/experts_choose_base.gin, or a dense decoder.',
        name,
      )
    elif router.uses_later_tokens == 'training':
      _logger.warning(
        'In training the routing in the decoder depends on later tokens (%s), but not in evaluation and decoding. '
        'Prefer a TokensChooseRouter in the decoder.',
        name,
      )

  def _sparse_layers(self, stack: str) -> tuple[int, ...]:
    layout = getattr(self, f'{stack}_layout')
    number = getattr(self, f'num_{stack}_sparse_layers')
    if number is None and layout in LAYOUTS:
      number = 0
    return sparse_layers(layout, getattr(self, f'num_{stack}_layers'), number)

  def blocks(self) -> dict[str, SparseBlock]:
    """Return the block of the sparse layers of each stack with sparse layers."""
    blocks = {'encoder': self.block, 'decoder': self.decoder_block or self.block}
    return {stack: block for stack, block in blocks.items() if self._sparse_layers(stack)}

  def __call__(self, stack: str, layer: int) -> t5.FeedForward:
    """Return the factory, or two, of the feed-forward blocks of layer `layer` of `stack`."""
    sparse = self._sparse_layers(stack)
    num_layers = getattr(self, f'num_{stack}_layers')
    if not sparse:
      return t5.dense_feed_forward
    if layer not in sparse:
      return _DenseOfStack(stack=stack, num_layers=num_layers)
    block = _OfStack(block=self.blocks()[stack], stack=stack, num_layers=num_layers)
    if self.extra_mlp:
      return (block, t5.dense_feed_forward)
    return block


def sparse_transformer(config: t5.T5Config, block: SparseBlock, **layout: Any) -> t5.Transformer:
  """Return a T5 encoder-decoder with sparse layers.

  Args:
    config: configuration of the network.
    block: factory of the sparse feed-forward block.
    **layout: fields of `SparseFeedForward` that select the sparse layers.
  """
  feed_forward = SparseFeedForward(
    block=block,
    num_encoder_layers=config.num_encoder_layers,
    num_decoder_layers=config.num_decoder_layers,
    **layout,
  )
  return t5.Transformer(config, feed_forward)


def sparse_decoder_only(
  config: decoder_only.TransformerConfig, block: SparseBlock, **layout: Any
) -> decoder_only.DecoderWrapper:
  """Return a decoder-only network with sparse layers; see `sparse_transformer`.

  Args:
    config: configuration of the network.
    block: factory of the sparse feed-forward block.
    **layout: fields of `SparseFeedForward` that select the sparse layers.
  """
  feed_forward = SparseFeedForward(block=block, num_decoder_layers=config.num_layers, **layout)
  return decoder_only.DecoderWrapper(config, feed_forward)
