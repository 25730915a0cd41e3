"""Models whose networks have sparse layers: the routers' losses join the loss, and the metrics tell of the experts."""

import copy
import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from moe import grouping
from moe import metrics as moe_metrics
from moe import networks
from moe import recording
from moe.layers import MoeLayer
from moe.routing import token_routers as routers
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import losses
from t5x_lite import models
from t5x_lite.networks.stacks import StackNetwork
from t5x_lite.types import Array, Batch, Params


_logger = logging.getLogger(__name__)

# The feature that tells the length of a stack's rows, and by zeros its padding.
_TOKENS = {'encoder': 'encoder_input_tokens', 'decoder': 'decoder_target_tokens'}
# Of a micro-batch: the number of the stack's tokens in the batch that it is cut from, padding aside.
_NUM_TOKENS = {stack: f'batch/num_tokens/{stack}' for stack in _TOKENS}


class _SparseModel(models.BaseTransformerModel):
  """What both models add to their dense ones."""

  RANDOM_STREAMS = ('dropout', 'jitter')

  _aux_loss_factor: float = 0.0
  _router_z_loss_factor: float = 0.0
  _replayed: recording.Record | None = None
  _num_microbatches: int = 1

  def _set_factors(self, aux_loss_factor: float, router_z_loss_factor: float) -> None:
    for name, value in (('aux_loss_factor', aux_loss_factor), ('router_z_loss_factor', router_z_loss_factor)):
      if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise errors.ConfigError(f'got {name}={value!r}; expected a finite number, at least 0.')
    self._aux_loss_factor = float(aux_loss_factor)
    self._router_z_loss_factor = float(router_z_loss_factor)
    self._warn_of_unused_factors()

  def _warn_of_unused_factors(self) -> None:
    """Says so where no router has the loss that a factor is for; gin's model files set factors for all routers."""
    routers_of_network = [block.unbound_router() for block in self._blocks().values()]
    for loss, option, value in (('auxiliary_loss', 'aux_loss_factor', self._aux_loss_factor),
                                ('router_z_loss', 'router_z_loss_factor', self._router_z_loss_factor)):
      if value and routers_of_network and not any(loss in router.losses for router in routers_of_network):
        names = ' and '.join(sorted({type(router).__name__ for router in routers_of_network}))
        _logger.warning('%s=%g has no effect: the routers of this network (%s) have no such loss. Set it to 0.',
                        option, value, names)

  def _blocks(self) -> dict[str, networks.SparseBlock]:
    """Return the blocks of the sparse layers by stack; {} for networks other than those of this package."""
    if not isinstance(self.module, StackNetwork) or not isinstance(
        self.module.feed_forward_fn, networks.SparseFeedForward):
      return {}
    return self.module.feed_forward_fn.blocks()

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """See `BaseModel.get_initial_variables`."""
    variables = super().get_initial_variables(rng, input_shapes, input_types)
    # Decisions about a batch, like what is sown, are no state.
    variables.pop(recording.ROUTING, None)
    return variables

  def auxiliary_losses(self, intermediates: Mapping[str, Any], batch: Batch):
    """See `BaseTransformerModel.auxiliary_losses` and `moe.metrics`."""
    factors = (self._aux_loss_factor, self._router_z_loss_factor)
    if self._num_microbatches > 1:
      num_tokens = {stack: batch[name] for stack, name in _NUM_TOKENS.items() if name in batch}
      return moe_metrics.microbatch_losses_and_sums(intermediates, *factors, self._num_microbatches, num_tokens)
    return moe_metrics.expert_losses_and_metrics(intermediates, *factors)

  def for_microbatches(self, batch, num_microbatches):
    """See `BaseModel.for_microbatches`; micro-batches hold whole groups of tokens.

    Raises:
      ConfigError: they cannot; or the model replays the routing of an entire batch.
    """
    if self._replayed is not None:
      raise errors.ConfigError('a model `with_replayed_routing` must get the entire batch that was recorded, got '
                               f'num_microbatches={num_microbatches}. Set num_microbatches=None.')
    model, batch, fixed = super().for_microbatches(batch, num_microbatches)
    model._num_microbatches = num_microbatches
    num_rows = next(iter(batch.values())).shape[0]
    blocks = self._blocks()
    # Of an unknown network, slices of consecutive rows hold whole groups if any slices do: its layers check that.
    model.rows_together = 1 if blocks else max(num_rows // num_microbatches, 1)
    for stack, block in blocks.items():
      groups = grouping.divide_microbatch(
          num_rows, batch[_TOKENS[stack]].shape[1], num_microbatches, block.group_size, block.num_groups_multiple)
      model.rows_together = math.lcm(model.rows_together, groups.rows_together)
    num_tokens = {_NUM_TOKENS[stack]: jnp.sum(batch[_TOKENS[stack]] > 0).astype(jnp.float32) for stack in blocks}
    return model, batch, fixed | num_tokens

  def metrics_of_microbatches(self, metrics):
    """See `BaseModel.metrics_of_microbatches`."""
    metrics = dict(metrics)
    sums = metrics.pop(moe_metrics.PREFIX, None)
    if sums is None:
      return metrics
    return metrics | moe_metrics.metrics_of_sums(sums, self._aux_loss_factor, self._router_z_loss_factor)

  def compute_logits(self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=()):
    """See `BaseTransformerModel.compute_logits`; routes as a record says, if there is one."""
    if self._num_microbatches > 1:
      if routers.STATE in (flax_mutables or {}):
        step = routers.step_of(flax_mutables[routers.STATE], self._num_microbatches)
        flax_mutables = {**flax_mutables, routers.STEP: step}
      with nn.intercept_methods(self._tell_layers):
        return super().compute_logits(params, batch, dropout_rng, flax_mutables=flax_mutables, mutable=mutable)
    if self._replayed is None:
      return super().compute_logits(params, batch, dropout_rng, flax_mutables=flax_mutables, mutable=mutable)
    logits, collections = super().compute_logits(
        params, batch, dropout_rng, flax_mutables={**(flax_mutables or {}), recording.REPLAY: self._replayed},
        mutable=tuple(dict.fromkeys((*mutable, recording.ROUTING))))
    # A layer that finds no record of its own would route anew, in silence.
    recording.check_layers(self._replayed, collections.get(recording.ROUTING, {}))
    return logits, {name: tree for name, tree in collections.items() if name in mutable}

  def _tell_layers(self, method, args, kwargs, context):
    """Tell the sparse layers, wherever the network has them, that they see a micro-batch."""
    if isinstance(context.module, MoeLayer) and context.method_name == '__call__':
      kwargs = {**kwargs, 'num_microbatches': self._num_microbatches}
    return method(*args, **kwargs)

  def record_routing(
      self, params: Params, batch: Batch, dropout_rng: Array | None = None, *,
      flax_mutables: Mapping[str, Any] | None = None) -> recording.Record:
    """Return who goes where in a pass over `batch`, layer by layer; to be jitted by the caller, or not.

    Args:
      params: the parameters.
      batch: a batch as the feature converter makes it.
      dropout_rng: the key that the training step used, for its noise; None routes as evaluation does.
      flax_mutables: the module's other collections.

    Returns:
      A record, see `moe.recording`.

    Raises:
      ConfigError: the network has no sparse layer.
    """
    _, collections = self.compute_logits(
        params, batch, dropout_rng, flax_mutables=flax_mutables, mutable=(recording.ROUTING,))
    return recording.as_record(collections.get(recording.ROUTING, {}))

  def with_replayed_routing(self, record: recording.Record, replay_gates: bool = False) -> '_SparseModel':
    """Return this model with its tokens going where `record` says, in losses and scores of one batch.

    Args:
      record: what `record_routing` returned, or `recording.RoutingFiles.read`.
      replay_gates: weigh the experts' outputs with the recorded gates too. They are constants: the routers then have
        gradients from their own losses only, and experts repeat a pass even after their routers changed. Otherwise
        gates are computed anew from the routers' probabilities of the recorded experts, so gradients reach the routers.

    Raises:
      ConfigError: it is no record, or one without gates where they are asked for.
    """
    recording.check_record(record, with_gates=replay_gates)
    model = copy.copy(self)
    model._replayed = record if replay_gates else recording.without_gates(record)
    return model


class MoeEncoderDecoderModel(_SparseModel, models.EncoderDecoderModel):
  """An encoder-decoder model with sparse layers.

  The loss is that of `EncoderDecoderModel`, plus `aux_loss_factor` times the mean load-balancing loss and
  `router_z_loss_factor` times the mean router z-loss of the sparse layers. Fedus et al. 2021,
  https://arxiv.org/abs/2101.03961, section 2.2; Zoph et al. 2022, https://arxiv.org/abs/2202.08906, section 3.2.

  Args:
    module: see `EncoderDecoderModel`; its layers sow what `moe.metrics` reads.
    input_vocabulary: see `EncoderDecoderModel`, as the following.
    output_vocabulary: vocabulary of the targets.
    optimizer_def: the optimizer.
    decode_fn: decoding algorithm of predictions.
    feature_converter_cls: in place of 'encoder_decoder'.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: of the logits, see `losses.token_cross_entropy`.
    loss_normalizing_factor: what the summed cross entropy is divided by.
    aux_loss_factor: weight of the load-balancing loss, e.g. 0.01.
    router_z_loss_factor: weight of the router z-loss, e.g. 0.001.
    default_decoder_params: what predictions use where a call does not say.
    auxiliary_losses_per_target: count the two losses once for every target token, as the cross entropy counts, before
      all are divided by the normalising factor. They are means over tokens: added as they are to a cross entropy that
      is a sum over tokens (`loss_normalizing_factor=None`), as T5X adds them, they weigh less the larger the batch.
    metric_fns: see `EncoderDecoderModel`.

  Raises:
    ConfigError: see `EncoderDecoderModel`; or a factor below 0.
  """

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
  ):
    super().__init__(
        module, input_vocabulary, output_vocabulary, optimizer_def, decode_fn, feature_converter_cls, label_smoothing,
        z_loss, loss_normalizing_factor, default_decoder_params, metric_fns=metric_fns)
    self._set_factors(aux_loss_factor, router_z_loss_factor)
    self.auxiliary_losses_per_target = auxiliary_losses_per_target


class MoeDecoderOnlyModel(_SparseModel, models.DecoderOnlyModel):
  """A decoder-only model with sparse layers; its loss has the terms of `MoeEncoderDecoderModel`.

  Args:
    module: see `DecoderOnlyModel`; its layers sow what `moe.metrics` reads.
    vocabulary: of inputs and targets.
    optimizer_def: the optimizer.
    decode_fn: decoding algorithm of predictions.
    inputs_bidirectional_attention: let the inputs see each other both ways.
    feature_converter_cls: in place of 'decoder_only'.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: of the logits, see `losses.token_cross_entropy`.
    loss_normalizing_factor: what the summed cross entropy is divided by.
    aux_loss_factor: see `MoeEncoderDecoderModel`.
    router_z_loss_factor: see `MoeEncoderDecoderModel`.
    auxiliary_losses_per_target: see `MoeEncoderDecoderModel`.
    metric_fns: see `DecoderOnlyModel`.

  Raises:
    ConfigError: see `DecoderOnlyModel`; or a factor below 0.
  """

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
  ):
    super().__init__(
        module, vocabulary, optimizer_def, decode_fn, inputs_bidirectional_attention, feature_converter_cls,
        label_smoothing, z_loss, loss_normalizing_factor, metric_fns=metric_fns)
    self._set_factors(aux_loss_factor, router_z_loss_factor)
    self.auxiliary_losses_per_target = auxiliary_losses_per_target
