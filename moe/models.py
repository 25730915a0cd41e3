"""Models of networks with sparse layers, with losses of routers and metrics of experts."""

from collections.abc import Mapping, Sequence
import copy
import logging
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from moe import grouping
from moe import metrics as moe_metrics
from moe import networks
from moe import recording
from moe.layers import MoeLayer
from moe.routing import token_routers as routers
from t5x_lite import adapters
from t5x_lite import checks
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import losses
from t5x_lite import models
from t5x_lite.networks.stacks import StackNetwork
from t5x_lite.types import Array, Batch, Params

_logger = logging.getLogger(__name__)

# Feature with the tokens of each stack; 0 is padding.
_TOKENS = {'encoder': 'encoder_input_tokens', 'decoder': 'decoder_target_tokens'}
# Name of the number of tokens of a stack in the entire batch without padding, stored in its micro-batches.
_NUM_TOKENS = {stack: f'batch/num_tokens/{stack}' for stack in _TOKENS}


class _SparseModel(models.BaseTransformerModel):
  """Mixin of sparse models: losses, metrics and recorded routing."""

  RANDOM_STREAMS = ('dropout', 'jitter')

  _aux_loss_factor: float = 0.0
  _router_z_loss_factor: float = 0.0
  _replayed: recording.Record | None = None
  _num_microbatches: int = 1
  _skips_padding_rows: bool = False

  def _set_factors(self, aux_loss_factor: float, router_z_loss_factor: float) -> None:
    factor = checks.number(at_least=0)
    checks.check(type(self).__name__, locals(), aux_loss_factor=factor, router_z_loss_factor=factor)
    self._aux_loss_factor = float(aux_loss_factor)
    self._router_z_loss_factor = float(router_z_loss_factor)
    self._warn_of_unused_factors()

  def _warn_of_unused_factors(self) -> None:
    """Log a warning if no router has the loss of a factor; gin's model files set factors for all routers."""
    routers_of_network = [block.unbound_router() for block in self._blocks().values()]
    for loss, option, value in (
      ('auxiliary_loss', 'aux_loss_factor', self._aux_loss_factor),
      ('router_z_loss', 'router_z_loss_factor', self._router_z_loss_factor),
    ):
      if not value or not routers_of_network:
        continue
      if not any(loss in router.losses for router in routers_of_network):
        names = ' and '.join(sorted({type(router).__name__ for router in routers_of_network}))
        _logger.warning(
          '%s=%g has no effect: the routers of this network (%s) have no such loss. Set the factor to 0.',
          option,
          value,
          names,
        )

  def _blocks(self) -> dict[str, networks.SparseBlock]:
    """Return the blocks of the sparse layers by stack; {} for networks that are not of this package."""
    if not isinstance(self.module, StackNetwork):
      return {}
    feed_forward = self.module.feed_forward_fn
    if not isinstance(feed_forward, networks.SparseFeedForward):
      return {}
    return feed_forward.blocks()

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """Initialize all variables; see `BaseModel.get_initial_variables`."""
    variables = super().get_initial_variables(rng, input_shapes, input_types)
    # Choices of a batch do not belong to the state.
    variables.pop(recording.ROUTING, None)
    return variables

  def auxiliary_losses(self, intermediates: Mapping[str, Any], batch: Batch):
    """Return the losses of routers and metrics of experts; see `BaseTransformerModel` and `moe.metrics`."""
    factors = (self._aux_loss_factor, self._router_z_loss_factor)
    if self._num_microbatches > 1:
      num_tokens = {stack: batch[name] for stack, name in _NUM_TOKENS.items() if name in batch}
      return moe_metrics.microbatch_losses_and_sums(
        intermediates, *factors, self._num_microbatches, num_tokens
      )
    return moe_metrics.expert_losses_and_metrics(intermediates, *factors)

  def auxiliary_loss_terms(self, intermediates: Mapping[str, Any]):
    """Return the losses of routers with their weights in means over batches; see `BaseTransformerModel`."""
    return moe_metrics.loss_terms(intermediates, self._aux_loss_factor, self._router_z_loss_factor)

  def eval_fn(self, params, batch, flax_mutables=None):
    """Compute (loss, metrics) without dropout, of which padding rows are no part; see `BaseModel.eval_fn`."""
    model = copy.copy(self)
    model._skips_padding_rows = True
    return super(_SparseModel, model).eval_fn(params, batch, flax_mutables)

  def for_microbatches(self, batch, num_microbatches):
    """Return the model for micro-batches, which consist of entire groups; see `BaseModel.for_microbatches`.

    Raises:
      ConfigError: micro-batches do not consist of entire groups, or the model replays the routing of an entire batch.
    """
    if self._replayed is not None:
      raise errors.ConfigError(
        'A model that `with_replayed_routing` returned must get the entire batch that was '
        f'recorded, got num_microbatches={num_microbatches}. Set num_microbatches=None.'
      )
    model, batch, fixed = super().for_microbatches(batch, num_microbatches)
    model._num_microbatches = num_microbatches
    num_rows = next(iter(batch.values())).shape[0]
    blocks = self._blocks()
    # For an unknown network, consecutive rows are the most likely to be entire groups; its layers check that.
    if blocks:
      model.rows_together = 1
    else:
      model.rows_together = max(num_rows // num_microbatches, 1)
    for stack, block in blocks.items():
      groups = grouping.divide_microbatch(
        num_rows,
        batch[_TOKENS[stack]].shape[1],
        num_microbatches,
        block.group_size,
        block.num_groups_multiple,
      )
      model.rows_together = math.lcm(model.rows_together, groups.rows_together)
    num_tokens = {}
    for stack in blocks:
      is_token = batch[_TOKENS[stack]] > 0
      num_tokens[_NUM_TOKENS[stack]] = jnp.sum(is_token).astype(jnp.float32)
    return model, batch, fixed | num_tokens

  def metrics_of_microbatches(self, metrics):
    """Return the metrics of a batch; see `BaseModel.metrics_of_microbatches`."""
    metrics = dict(metrics)
    sums = metrics.pop(moe_metrics.PREFIX, None)
    if sums is None:
      return metrics
    return metrics | moe_metrics.metrics_of_sums(
      sums, self._aux_loss_factor, self._router_z_loss_factor
    )

  def compute_logits(
    self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=(), return_logits=True
  ):
    """Run the network, with recorded routing if it is set; see `BaseTransformerModel.compute_logits`."""
    if self._num_microbatches > 1 and flax_mutables is not None and routers.STATE in flax_mutables:
      step = routers.step_of(flax_mutables[routers.STATE], self._num_microbatches)
      flax_mutables = {**flax_mutables, routers.STEP: step}
    written = mutable
    if self._replayed is not None:
      flax_mutables = {**(flax_mutables or {}), recording.REPLAY: self._replayed}
      written = tuple(dict.fromkeys((*mutable, recording.ROUTING)))
    with nn.intercept_methods(self._with_layer_options):
      logits, collections = super().compute_logits(
        params,
        batch,
        dropout_rng,
        flax_mutables=flax_mutables,
        mutable=written,
        return_logits=return_logits,
      )
    if self._replayed is None:
      return logits, collections
    # A layer without a record would compute its routing silently.
    recording.check_layers(self._replayed, collections.get(recording.ROUTING, {}))
    return logits, {name: tree for name, tree in collections.items() if name in mutable}

  def _with_layer_options(self, method, args, kwargs, context):
    """Call `method`, with options of this model if it belongs to a sparse layer; an interceptor of Flax."""
    if isinstance(context.module, MoeLayer):
      if context.method_name == '__call__' and self._num_microbatches > 1:
        kwargs = {**kwargs, 'num_microbatches': self._num_microbatches}
      if context.method_name == '_sow_metrics' and self._skips_padding_rows:
        kwargs = {**kwargs, 'skips_padding_rows': True}
    return method(*args, **kwargs)

  def record_routing(
    self,
    params: Params,
    batch: Batch,
    dropout_rng: Array | None = None,
    *,
    flax_mutables: Mapping[str, Any] | None = None,
  ) -> recording.Record:
    """Return the routing of all layers in a pass over `batch`; callers may jit this method.

    Args:
      params: tree of parameters.
      batch: batch of the feature converter, arrays [batch, ...] by name.
      dropout_rng: key of the training step, for its noise; None for the routing of an evaluation.
      flax_mutables: the module's other collections.

    Returns:
      Record, see `moe.recording`.

    Raises:
      ConfigError: the network has no sparse layer.
    """
    _, collections = self.compute_logits(
      params, batch, dropout_rng, flax_mutables=flax_mutables, mutable=(recording.ROUTING,)
    )
    return recording.as_record(collections.get(recording.ROUTING, {}))

  def with_replayed_routing(
    self, record: recording.Record, replay_gates: bool = False
  ) -> '_SparseModel':
    """Return a copy of this model that repeats a recorded routing, in losses and scores of one batch.

    Args:
      record: result of `record_routing` or `recording.RoutingFiles.read`.
      replay_gates: True to use the recorded gates too. They are constants, so routers get gradients only from their
        losses, and outputs do not depend on the routers. False to compute gates from the routers' probabilities of the
        recorded experts, so that routers get gradients.

    Raises:
      ConfigError: an invalid record, or one without gates if `replay_gates` is set.
    """
    recording.check_record(record, with_gates=replay_gates)
    model = copy.copy(self)
    if replay_gates:
      model._replayed = record
    else:
      model._replayed = recording.without_gates(record)
    return model


class MoeEncoderDecoderModel(_SparseModel, models.EncoderDecoderModel):
  """Encoder-decoder model with sparse layers.

  The loss is that of `EncoderDecoderModel`, plus `aux_loss_factor` times the mean load-balancing loss and
  `router_z_loss_factor` times the mean router z-loss of the sparse layers. Fedus et al. 2021,
  https://arxiv.org/abs/2101.03961, section 2.2; Zoph et al. 2022, https://arxiv.org/abs/2202.08906, section 3.2.

  Args:
    module: see `EncoderDecoderModel`; its layers sow the values of `moe.metrics`.
    input_vocabulary: see `EncoderDecoderModel`, as the following.
    output_vocabulary: vocabulary of the targets.
    optimizer_def: the optimizer.
    decode_fn: decoding algorithm of predictions.
    feature_converter_cls: feature converter, instead of 'encoder_decoder'.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: of the logits, see `losses.token_cross_entropy`.
    loss_normalizing_factor: divisor of the summed cross entropy.
    aux_loss_factor: weight of the load-balancing loss, e.g. 0.01.
    router_z_loss_factor: weight of the router z-loss, e.g. 0.001.
    default_decoder_params: `DecoderParams` of predictions whose call does not specify them.
    auxiliary_losses_per_target: True to multiply the two losses by the number of target tokens before the division by
      the normalizing factor. They are means over tokens, so if they are added to a sum over tokens
      (`loss_normalizing_factor=None`), as in T5X, their relative weight decreases with the batch size.
    metric_fns: see `EncoderDecoderModel`.
    constraints: see `EncoderDecoderModel`.
    adapter: see `EncoderDecoderModel`.

  Raises:
    ConfigError: see `EncoderDecoderModel`; or a negative factor.
  """

  ACCEPTS_STACKED_LAYERS = True
  SUPPORTS_CHUNKED_LOSS = True

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary: Any,
    output_vocabulary: Any,
    optimizer_def: Any,
    decode_fn: decoding.DecodeFnCallable = decoding.beam_search,
    feature_converter_cls: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor = None,
    aux_loss_factor: float = 0.0,
    router_z_loss_factor: float = 0.0,
    *,
    default_decoder_params: models.DecoderParams | None = None,
    auxiliary_losses_per_target: bool = False,
    metric_fns: Sequence[models.MetricFn] = (),
    constraints: decoding.Constraints | None = None,
    adapter: adapters.Lora | None = None,
  ):
    super().__init__(
      module,
      input_vocabulary,
      output_vocabulary,
      optimizer_def,
      decode_fn,
      feature_converter_cls,
      label_smoothing,
      z_loss,
      loss_normalizing_factor,
      default_decoder_params,
      metric_fns=metric_fns,
      constraints=constraints,
      adapter=adapter,
    )
    self._set_factors(aux_loss_factor, router_z_loss_factor)
    self.auxiliary_losses_per_target = auxiliary_losses_per_target


class MoeDecoderOnlyModel(_SparseModel, models.DecoderOnlyModel):
  """Decoder-only model with sparse layers, with the loss of `MoeEncoderDecoderModel`.

  Args:
    module: see `DecoderOnlyModel`; its layers sow the values of `moe.metrics`.
    vocabulary: vocabulary of inputs and targets.
    optimizer_def: the optimizer.
    decode_fn: decoding algorithm of predictions.
    inputs_bidirectional_attention: True for bidirectional attention among the inputs.
    feature_converter_cls: feature converter, instead of 'decoder_only'.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: of the logits, see `losses.token_cross_entropy`.
    loss_normalizing_factor: divisor of the summed cross entropy.
    aux_loss_factor: see `MoeEncoderDecoderModel`.
    router_z_loss_factor: see `MoeEncoderDecoderModel`.
    auxiliary_losses_per_target: see `MoeEncoderDecoderModel`.
    metric_fns: see `DecoderOnlyModel`.
    constraints: see `DecoderOnlyModel`.
    adapter: see `DecoderOnlyModel`.

  Raises:
    ConfigError: see `DecoderOnlyModel`; or a negative factor.
  """

  ACCEPTS_STACKED_LAYERS = True
  SUPPORTS_CHUNKED_LOSS = True

  def __init__(
    self,
    module: nn.Module,
    vocabulary: Any,
    optimizer_def: Any,
    decode_fn: decoding.DecodeFnCallable = decoding.temperature_sample,
    inputs_bidirectional_attention: bool = False,
    feature_converter_cls: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor = None,
    aux_loss_factor: float = 0.0,
    router_z_loss_factor: float = 0.0,
    *,
    auxiliary_losses_per_target: bool = False,
    metric_fns: Sequence[models.MetricFn] = (),
    constraints: decoding.Constraints | None = None,
    adapter: adapters.Lora | None = None,
  ):
    super().__init__(
      module,
      vocabulary,
      optimizer_def,
      decode_fn,
      inputs_bidirectional_attention,
      feature_converter_cls,
      label_smoothing,
      z_loss,
      loss_normalizing_factor,
      metric_fns=metric_fns,
      constraints=constraints,
      adapter=adapter,
    )
    self._set_factors(aux_loss_factor, router_z_loss_factor)
    self.auxiliary_losses_per_target = auxiliary_losses_per_target
