"""Sparse networks: which layers of the dense T5's and decoder-only stacks get many experts, and how these are built.

Nothing of the networks is written anew: their layers take feed-forward blocks as arguments, and here are such.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import flax.linen as nn

from moe.experts import ExpertMlp
from moe.layers import MoeLayer
from moe.routing import Router, TokensChooseRouter
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.networks import decoder_only, t5
from t5x_lite.networks.t5_config import StackConfig
from t5x_lite import checks

_logger = logging.getLogger(__name__)

# Where the sparse layers of a stack are; also 'every_<n>'.
LAYOUTS = ('bottom', 'middle', 'mixed', 'top')
_EVERY = re.compile(r'every_([1-9]\d*)')


def sparse_layers(layout: str, num_layers: int, num_sparse_layers: int | None) -> tuple[int, ...]:
  """Return the numbers of the layers that are sparse. T5X's layouts, and 'every_<n>'.

  Args:
    layout: 'bottom': the first ones. 'top': the last ones. 'middle': the middle ones. 'mixed': the last of each block
      of `num_layers / num_sparse_layers` layers. 'every_<n>': the last of each n layers.
    num_layers: layers of the stack.
    num_sparse_layers: how many are sparse; None with 'every_<n>', which says so itself.

  Raises:
    ConfigError: an unknown layout, or a number that does not fit.

  >>> sparse_layers('mixed', num_layers=12, num_sparse_layers=3), sparse_layers('every_5', 12, None)
  ((3, 7, 11), (4, 9))
  """
  every = _EVERY.fullmatch(layout) if isinstance(layout, str) else None
  if every is None and layout not in LAYOUTS:
    raise ConfigError(f"unknown layout of sparse layers {layout!r}; expected one of {', '.join(LAYOUTS)}, or every_2, "
                      f'every_3 and so on.{did_you_mean(str(layout), (*LAYOUTS, "every_2"))}')
  if every:
    if num_sparse_layers is not None:
      raise ConfigError(f'got {num_sparse_layers} sparse layers with the layout {layout!r}, which says itself how many '
                        "there are. Leave the number at None, or use 'mixed'.")
    period = int(every[1])
    if period > num_layers:
      raise ConfigError(f'got the layout {layout!r} for a stack of {num_layers} layers, none of which it makes sparse. '
                        'Set the number of its layers too, or a shorter period; for a dense stack leave the layout at '
                        "'mixed' and the number of sparse layers at None.")
    return tuple(range(period - 1, num_layers, period))
  checks.check_number('sparse_layers', 'the number of sparse layers', num_sparse_layers, at_least=0,
                       at_most=num_layers, integer=True)
  if not num_sparse_layers:
    return ()
  if layout == 'mixed':
    if num_layers % num_sparse_layers:
      raise ConfigError(f"got {num_sparse_layers} sparse layers of {num_layers} with the layout 'mixed'; expected a "
                        "divisor. Change the number, or use 'every_<n>', 'bottom', 'middle' or 'top'.")
    period = num_layers // num_sparse_layers
    return tuple(range(period - 1, num_layers, period))
  dense = num_layers - num_sparse_layers
  start = {'bottom': 0, 'middle': (dense + 1) // 2, 'top': dense}[layout]
  return tuple(range(start, start + num_sparse_layers))


class BlockFactory(Protocol):
  """Builds experts that are no MLPs: `t5.FeedForwardFactory`, called once per layer."""

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """Return one expert, a module called `name`; see `experts.ExpertFactory`."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseBlock(t5.TokenFeedForwardFactory):
  """Builds the `MoeLayer` of a layer. Equal ones are equal objects, so that layers run in loops.

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
    if isinstance(self.expert_activations, Sequence) and not isinstance(self.expert_activations, str):
      # gin gives lists, which have no hash.
      object.__setattr__(self, 'expert_activations', tuple(self.expert_activations))
    mlp_options = ('expert_dim', 'expert_activations', 'expert_dropout_rate')
    given = [name for name in mlp_options if getattr(self, name) is not None] + ['expert_bias'] * self.expert_bias
    if self.expert is not None and given:
      raise ConfigError(f'SparseBlock: got {", ".join(given)} with a factory of experts, which they do not reach. Set '
                        'them in the factory, or leave `expert` at None.')
    if self.router is not None and not isinstance(self.router, Router):
      raise ConfigError(f'SparseBlock: got router={self.router!r}; expected a Router, such as TokensChooseRouter(8). '
                        'In gin, router = @moe.TokensChooseRouter() with the parentheses.')
    # Refuses options now rather than when a network is built.
    mlp = self._mlp(1 if self.expert_dim is None else self.expert_dim, ('relu',), 0.0)
    self._layer(mlp if self.expert is None else _no_block, 'float32', parent=None)

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    """See `t5.FeedForwardFactory`."""
    if self.expert is None:
      expert = self._mlp(config.mlp_dim, tuple(config.mlp_activations), config.dropout_rate)
    else:
      expert = lambda *, name: self.expert(config, name)
    return self._layer(expert, config.dtype, name=name)

  def _mlp(self, dim, activations, dropout_rate) -> ExpertMlp:
    """Return what an expert is, given what holds for options that are None."""
    return ExpertMlp(
        dim=dim if self.expert_dim is None else self.expert_dim,
        activations=activations if self.expert_activations is None else self.expert_activations,
        dropout_rate=dropout_rate if self.expert_dropout_rate is None else self.expert_dropout_rate,
        use_bias=self.expert_bias)

  def unbound_router(self) -> Router:
    """Return a router of its own for a layer: two blocks that got the same object would share its weights."""
    router = TokensChooseRouter(self.num_experts) if self.router is None else self.router
    return router.clone(parent=None)

  def _layer(self, expert, dtype, **module_fields) -> MoeLayer:
    return MoeLayer(
        num_experts=self.num_experts, expert=expert, router=self.unbound_router(), group_size=self.group_size,
        train_capacity_factor=self.train_capacity_factor, eval_capacity_factor=self.eval_capacity_factor,
        min_expert_capacity=self.min_expert_capacity, dispatch=self.dispatch, shared_expert_dim=self.shared_expert_dim,
        receive_factor=self.receive_factor, num_groups_multiple=self.num_groups_multiple, dtype=dtype, **module_fields)


def _no_block(*, name):
  raise AssertionError(f'{name} is built in a network only.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfStack(t5.TokenFeedForwardFactory):
  """A sparse block that knows for how many layers its stack was laid out."""

  block: SparseBlock
  stack: str
  num_layers: int

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    _check_depth(config, self.stack, self.num_layers)
    return self.block(config, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseOfStack:
  """T5's own block in such a stack: one of another depth may reach none of the sparse layers, and is refused too."""

  stack: str
  num_layers: int

  def __call__(self, config: StackConfig, name: str) -> nn.Module:
    _check_depth(config, self.stack, self.num_layers)
    return t5.dense_feed_forward(config, name)


def _check_depth(config: StackConfig, stack: str, num_layers: int) -> None:
  if config.num_layers_of(stack) != num_layers:
    raise ConfigError(f'SparseFeedForward: got num_{stack}_layers={num_layers} for a network with '
                      f'{config.LAYER_COUNTS[stack]}={config.num_layers_of(stack)}; expected the same. Set both, by '
                      'one macro in gin.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFeedForward:
  """Says which layers are sparse: the `feed_forward_fn` of `t5.Transformer` and `decoder_only.DecoderWrapper`.

  Layers that are not sparse have T5's own block; without any sparse layer the network is the dense one. In gin:

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
    decoder_block: a different `SparseBlock` for the decoder, for experts that choose tokens: these would choose later
      tokens too, which a decoder must not see.
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
    for name in ('block', 'decoder_block'):
      value = getattr(self, name)
      if not isinstance(value, SparseBlock) and not (name == 'decoder_block' and value is None):
        raise ConfigError(f'SparseFeedForward: got {name}={value!r}; expected a SparseBlock. In gin, '
                          f'{name} = @moe.SparseBlock() with the parentheses.')
    if self.decoder_block is not None and not self._sparse_layers('decoder'):
      raise ConfigError('SparseFeedForward: got a decoder_block, but no layer of the decoder is sparse. Set '
                        'num_decoder_sparse_layers, or leave decoder_block at None.')
    for stack in ('encoder', 'decoder'):
      name = f'num_{stack}_layers'
      checks.check_number('SparseFeedForward', name, getattr(self, name), at_least=0, integer=True)
      self._sparse_layers(stack)
    if self._sparse_layers('decoder'):
      self._warn_of_later_tokens((self.decoder_block or self.block).unbound_router())

  def _warn_of_later_tokens(self, router: Router) -> None:
    """Warn of a router of the decoder that looks at tokens which decoding does not know yet."""
    name = type(router).__name__
    if router.uses_later_tokens == 'always':
      _logger.warning(
          'Routing in the decoder depends on later tokens (%s): its losses look into the future and are too good, and '
          'decoding, which cannot, routes otherwise. Let tokens choose in the decoder: '
          'decoder_block = @decoder/moe.SparseBlock() with a TokensChooseRouter, as models/experts_choose_base.gin has '
          'it, or make no layer of the decoder sparse.', name)
    elif router.uses_later_tokens == 'training':
      _logger.warning(
          'Tokens of the decoder are routed in training by a %s, which looks at later ones too; evaluation and '
          'decoding do not, and route otherwise. Prefer a TokensChooseRouter in the decoder.', name)

  def _sparse_layers(self, stack: str) -> tuple[int, ...]:
    layout, number = getattr(self, f'{stack}_layout'), getattr(self, f'num_{stack}_sparse_layers')
    if number is None and layout in LAYOUTS:
      number = 0
    return sparse_layers(layout, getattr(self, f'num_{stack}_layers'), number)

  def blocks(self) -> dict[str, SparseBlock]:
    """Return the block of the sparse layers of each stack that has some."""
    blocks = {'encoder': self.block, 'decoder': self.decoder_block or self.block}
    return {stack: block for stack, block in blocks.items() if self._sparse_layers(stack)}

  def __call__(self, stack: str, layer: int) -> t5.FeedForward:
    """Return the feed-forward block, or two, of layer `layer` of `stack`."""
    sparse, num_layers = self._sparse_layers(stack), getattr(self, f'num_{stack}_layers')
    if not sparse:
      return t5.dense_feed_forward
    if layer not in sparse:
      return _DenseOfStack(stack=stack, num_layers=num_layers)
    own = self.decoder_block if stack == 'decoder' and self.decoder_block is not None else self.block
    block = _OfStack(block=own, stack=stack, num_layers=num_layers)
    return (block, t5.dense_feed_forward) if self.extra_mlp else block


def sparse_transformer(config: t5.T5Config, block: SparseBlock, **layout: Any) -> t5.Transformer:
  """Return a T5 encoder-decoder with sparse layers.

  Args:
    config: the network.
    block: builds the feed-forward block of sparse layers.
    **layout: fields of `SparseFeedForward` that say which layers are sparse.
  """
  depths = dict(num_encoder_layers=config.num_encoder_layers, num_decoder_layers=config.num_decoder_layers)
  return t5.Transformer(config, SparseFeedForward(block=block, **depths, **layout))


def sparse_decoder_only(
    config: decoder_only.TransformerConfig, block: SparseBlock, **layout: Any) -> decoder_only.DecoderWrapper:
  """Return a decoder-only network with sparse layers; see `sparse_transformer`.

  Args:
    config: the network.
    block: builds the feed-forward block of sparse layers.
    **layout: fields of `SparseFeedForward` that say which layers are sparse.
  """
  return decoder_only.DecoderWrapper(
      config, SparseFeedForward(block=block, num_decoder_layers=config.num_layers, **layout))
