"""Interface of models, and the base class of Transformer models.

A model has a network (a Linen module) but no parameters: its methods are pure, traceable functions of parameters and
batch. `FEATURE_CONVERTER` names its feature converter, which `data` resolves.
"""

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
import copy
import logging
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_lite import adapters
from t5x_lite import checks
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import layer_stacks
from t5x_lite import losses
from t5x_lite import metrics as metrics_lib
from t5x_lite import optimizers
from t5x_lite import subclassing
from t5x_lite import tree_utils
from t5x_lite.adapters import kernels as adapter_kernels
from t5x_lite.models import batch_metrics
from t5x_lite.models import qk_clip
from t5x_lite.models import token_losses
from t5x_lite.models import vocabulary_size
from t5x_lite.networks.network import Network
from t5x_lite.types import Array, Batch, Params, PyTree

MetricFn = batch_metrics.MetricFn
MetricsMap = batch_metrics.MetricsMap
# Collections of a module other than its parameters, e.g. {'batch_stats': {...}}.
FlaxMutables = Mapping[str, Any]
# Name of the weight of the auxiliary losses of a batch, stored in its slices.
_AUXILIARY_WEIGHT = 'batch/auxiliary_weight'


class BaseModel(subclassing.WithFeatureConverter, abc.ABC):
  """Network with its loss, predictions and initial variables.

  Args:
    optimizer_def: optimizer definition that trains the model; None for a model that is never trained.
  """

  # Name of the feature converter of this model's batches; an instance may have another name or class.
  FEATURE_CONVERTER: Any
  # Number of consecutive rows of a batch, from its first row, that must be in one micro-batch.
  rows_together: int = 1

  def __init__(self, optimizer_def: Any):
    self.optimizer_def = optimizer_def

  @property
  def scanned_layers(self) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """Layers whose parameters `loss_fn` and `eval_fn` also take stacked; see `Network.scanned_layers`."""
    return {}

  @property
  def min_stacked_layers(self) -> int:
    """Least number of layers that are stacked; see `Network.min_stacked_layers`."""
    return 2

  def for_microbatches(
    self, batch: Batch, num_microbatches: int
  ) -> tuple['BaseModel', Batch, Batch]:
    """Return (model, batch, fixed) whose losses over the slices of that batch sum to this model's loss over `batch`.

    Call it before a batch is divided along dim 0: it computes the values of the loss that depend on the entire batch.

    Args:
      batch: the entire batch.
      num_microbatches: number of slices, all of one size; each has blocks of `rows_together` rows (of the returned
        model).

    Returns:
      (model for slices of any batch, batch to divide, arrays by name to add to each slice of this batch).
    """
    del num_microbatches
    return self, batch, {}

  def metrics_of_microbatches(self, metrics: MetricsMap) -> MetricsMap:
    """Return the metrics of a batch from the merged metrics of its slices, for the model of `for_microbatches`."""
    return metrics

  def gradient_metrics(self, grads: PyTree, params_axes: Mapping[str, Any] | None) -> MetricsMap:
    """Return metrics of the gradients of a step by name; by default none.

    Args:
      grads: gradients, nested dicts like the parameters; equal layers may be stacked, see `layer_stacks`.
      params_axes: axes metadata of the parameters, without stacked layers.
    """
    del grads, params_axes
    return {}

  def params_constraint(
    self, metrics: MetricsMap, frozen: Collection[str], stored: Mapping[str, str]
  ) -> Callable[[Params], Params] | None:
    """Return a function from the parameters after an update to those of the new state; by default None, no change.

    Args:
      metrics: metrics of the step.
      frozen: '/'-joined paths of parameters that are not trained. In them, in `stored` and in the argument of the
        function equal layers may be stacked, see `layer_stacks`.
      stored: see `OptimizerDef.stored_params`.
    """
    del metrics, frozen, stored
    return None

  @abc.abstractmethod
  def loss_fn(
    self,
    params: Params,
    batch: Batch,
    dropout_rng: Array | None,
    flax_mutables: FlaxMutables | None = None,
  ) -> tuple[Array, MetricsMap | tuple[MetricsMap, FlaxMutables]]:
    """Compute the loss to differentiate with respect to `params`.

    Args:
      params: tree of parameters.
      batch: batch of the feature converter, arrays [batch, ...] by name.
      dropout_rng: key for dropout; None computes without dropout.
      flax_mutables: the module's other collections, updated by this pass.

    Returns:
      (float32 scalar loss, metrics), or (loss, (metrics, updated flax_mutables)) if `flax_mutables` is not empty.
    """

  def eval_fn(
    self, params: Params, batch: Batch, flax_mutables: FlaxMutables | None = None
  ) -> tuple[Array, MetricsMap]:
    """Compute (loss, metrics) by `loss_fn` without dropout; `flax_mutables` are read, not updated."""
    loss, metrics = self.loss_fn(params, batch, None, **mutables_argument(flax_mutables))
    if isinstance(metrics, tuple):
      metrics, _ = metrics
    return loss, metrics

  def with_metric_fns(self, metric_fns: Sequence[MetricFn], owner: str) -> 'BaseModel':
    """Return a copy of this model with other metric functions; by default unsupported.

    Args:
      metric_fns: see `BaseTransformerModel`.
      owner: class that has the option `metric_fns`, for error messages.

    Raises:
      ConfigError: the model does not support metric functions.
    """
    raise checks.invalid(
      owner,
      'metric_fns',
      f'None for the model {type(self).__name__}',
      metric_fns,
      'Remove it, or derive the model from models.BaseTransformerModel.',
    )

  def with_decode_fn(
    self, decode_fn: decoding.DecodeFnCallable | decoding.LabelScores
  ) -> 'BaseModel':
    """Return a copy of this model with another decoding algorithm; by default unsupported.

    Args:
      decode_fn: decoding algorithm, or labels to score.

    Raises:
      ConfigError: the model has no decoding algorithm, or an error of `decoding.contract_of`.
    """
    raise checks.invalid(
      '',
      'decode_fn',
      f'None for the model {type(self).__name__}',
      decode_fn,
      'Remove it, or derive the model from models.BaseTransformerModel.',
    )

  def predict_batch(
    self,
    params: Params,
    batch: Batch,
    rng: Array | None = None,
    *,
    flax_mutables: FlaxMutables | None = None,
  ) -> Array:
    """Return only the predictions, usually <int32>[batch, length] tokens. See `predict_batch_with_aux`."""
    mutables = mutables_argument(flax_mutables)
    return self.predict_batch_with_aux(params, batch, rng=rng, **mutables)[0]

  def check_prediction_features(self, features: Collection[str]) -> None:
    """Raise if a feature that predictions need is missing; by default no feature is needed.

    Args:
      features: names of the features of a batch.

    Raises:
      ConfigError: a feature is missing.
    """
    del features

  @abc.abstractmethod
  def predict_batch_with_aux(
    self,
    params: Params,
    batch: Batch,
    rng: Array | None = None,
    *,
    flax_mutables: FlaxMutables | None = None,
  ) -> tuple[Array, Mapping[str, Array]]:
    """Return (predictions, other arrays by name, such as scores); the first dim of every array is the batch.

    Args:
      params: tree of parameters.
      batch: batch of the feature converter, arrays [batch, ...] by name.
      rng: key for sampling; None for deterministic predictions.
      flax_mutables: the module's other collections; read, not updated.
    """

  @abc.abstractmethod
  def score_batch(
    self,
    params: Params,
    batch: Batch,
    return_intermediates: bool = False,
    *,
    flax_mutables: FlaxMutables | None = None,
  ) -> Array | tuple[Array, Mapping[str, Any]]:
    """Return <float32>[batch] log-likelihoods of the targets.

    Args:
      params: tree of parameters.
      batch: batch of the feature converter, arrays [batch, ...] by name.
      return_intermediates: whether to return (log-likelihoods, sown values).
      flax_mutables: the module's other collections; read, not updated.
    """

  @abc.abstractmethod
  def get_initial_variables(
    self,
    rng: Array,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None = None,
  ) -> dict[str, Any]:
    """Initialize all variables.

    Args:
      rng: key of the parameters.
      input_shapes: shape of every feature of a batch.
      input_types: dtype of features, by default int32.

    Returns:
      Collections by name: 'params', 'params_axes' (logical axis names, if the module has any), and others.
    """


class BaseTransformerModel(BaseModel):
  """Base class of Transformer models: token losses, metrics, vocabularies.

  Args:
    module: network. In training it gets a random key for each of `RANDOM_STREAMS`.
    input_vocabulary: vocabulary of the inputs.
    output_vocabulary: vocabulary of the targets; both are used through `vocab_size`, `eos_id`, `pad_id` and `decode`.
    optimizer_def: the optimizer, or None for a model that is never trained.
    decode_fn: decoding algorithm of predictions; or `decoding.LabelScores`, which scores labels instead.
    constraints: constraints on predictions, which `decode_fn` must support. They replace a `logit_processor` of
      `decode_fn`. None for none.
    adapter: low-rank adapters of kernels of the network, to which the optimizer is restricted; None for none.
    label_smoothing: probability mass, in [0, 1), moved from the target to all other ids.
    z_loss: coefficient of the z-loss, which keeps the softmax's normaliser near 1.
    loss_normalizing_factor: divisor of the summed loss: None, a number above 0, or a special factor or its name; see
      `losses.SpecialLossNormalizingFactor`.
    feature_converter_cls: name of a feature converter, or a seqio converter class, in place of the class's
      `FEATURE_CONVERTER`.
    metric_fns: functions of (logits, batch) that return additional metrics by name, `clu.metrics.Metric`s. They are
      traced with the loss, for each micro-batch, and the results are merged.

  Raises:
    ConfigError: a number out of range, an unknown normalizing factor, a vocabulary larger than the network's, a
      `decode_fn` or metric that is not a function, an error of `decoding.contract_of`, or a module with an attribute
      that only a `networks.Network` has.
  """

  # True in a class whose `loss_fn` and `eval_fn` only pass parameters on to the network, which may then get those of
  # equal layers stacked. A subclass must declare it again; see `layer_stacks.is_accepted_by`.
  ACCEPTS_STACKED_LAYERS: ClassVar[bool] = False
  # True in a class whose `compute_logits` passes `return_logits` to the network; see `Network`. Not inherited.
  SUPPORTS_CHUNKED_LOSS: ClassVar[bool] = False
  # Names of the random streams of the module in training.
  RANDOM_STREAMS: ClassVar[tuple[str, ...]] = ('dropout',)
  # For subclasses with `auxiliary_losses`. True: multiply them by the number of target tokens before the division by
  # the normalizing factor, so that their ratio to the cross entropy does not depend on the batch size. False, as in
  # T5X: add them to the divided cross entropy.
  auxiliary_losses_per_target: bool = False
  # A subclass for T5X may set T5X's attributes in its `__init__` without calling ours, and these are not among them.
  adapter: adapters.Lora | None = None
  _constraints: decoding.Constraints | None = None
  _custom_metrics = batch_metrics.CustomMetrics('BaseTransformerModel', ())
  # Weight of the auxiliary loss of a slice in the loss of its batch; the slices have equal sizes.
  _auxiliary_loss_share: float = 1.0

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary: Any,
    output_vocabulary: Any,
    optimizer_def: Any,
    decode_fn: decoding.DecodeFnCallable | decoding.LabelScores | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor = None,
    *,
    feature_converter_cls: Any = None,
    metric_fns: Sequence[MetricFn] = (),
    constraints: decoding.Constraints | None = None,
    adapter: adapters.Lora | None = None,
  ):
    super().__init__(_restricted(optimizer_def, adapter, type(self).__name__))
    self.adapter = adapter
    if isinstance(loss_normalizing_factor, str):
      loss_normalizing_factor = losses.convert_special_loss_normalizing_factor_to_enum(
        loss_normalizing_factor
      )
    factor_number = checks.number(above=0).or_none()
    checks.check(
      type(self).__name__,
      locals(),
      label_smoothing=checks.number(at_least=0, below=1),
      z_loss=checks.number(at_least=0),
      loss_normalizing_factor=checks.Expectation(
        f'{factor_number.text}, or the name of a special factor',
        lambda x: isinstance(x, losses.SpecialLossNormalizingFactor) or factor_number.holds(x),
      ),
      metric_fns=checks.Expectation(
        'a list of functions of (logits, batch)',
        lambda fns: isinstance(fns, (list, tuple)) and all(map(callable, fns)),
        'In gin, write metric_fns = [@my_module.my_metric] without parentheses.',
      ),
    )
    decode_fn = _usable_decode_fn(decode_fn, output_vocabulary)
    _check_network(module)
    # The vocabularies of any other network are checked against its logits when it is initialized.
    if isinstance(module, Network):
      network_vocab_size = module.vocab_size
    else:
      network_vocab_size = None
    if network_vocab_size is not None:
      vocabulary_size.check_vocabulary_fits(
        'input_vocabulary', input_vocabulary, network_vocab_size
      )
      vocabulary_size.check_vocabulary_fits(
        'output_vocabulary', output_vocabulary, network_vocab_size
      )
    if feature_converter_cls is not None:
      self.FEATURE_CONVERTER = feature_converter_cls
    self.module = module
    self._custom_metrics = batch_metrics.CustomMetrics(type(self).__name__, metric_fns)
    token_losses.check_chunk_size(self, module, type(self).__name__, metric_fns)
    self._input_vocabulary = input_vocabulary
    self._output_vocabulary = output_vocabulary
    self._decode_fn = decode_fn
    self._constraints = _encoded(constraints, output_vocabulary, type(self).__name__)
    self._label_smoothing = label_smoothing
    self._z_loss = z_loss
    self._loss_normalizing_factor = loss_normalizing_factor

  @property
  def scanned_layers(self) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """See base class; those of a network, if network and model accept stacked layers."""
    accepts = isinstance(self.module, Network) and layer_stacks.is_accepted_by(self, self.module)
    if accepts:
      return self.module.scanned_layers
    return {}

  @property
  def min_stacked_layers(self) -> int:
    """See base class."""
    if isinstance(self.module, Network):
      return self.module.min_stacked_layers
    return super().min_stacked_layers

  @property
  def input_vocabulary(self) -> Any:
    """Vocabulary of the inputs."""
    return self._input_vocabulary

  @property
  def output_vocabulary(self) -> Any:
    """Vocabulary of the targets."""
    return self._output_vocabulary

  @property
  def decode_fn(self) -> decoding.DecodeFnCallable | None:
    """Decoding algorithm of predictions."""
    return self._decode_fn

  def with_decode_fn(
    self, decode_fn: decoding.DecodeFnCallable | decoding.LabelScores
  ) -> 'BaseTransformerModel':
    """Return a copy of this model with another decoding algorithm; see `BaseModel.with_decode_fn`."""
    model = copy.copy(self)
    model._decode_fn = _usable_decode_fn(decode_fn, self.output_vocabulary)
    return model

  @property
  def constraints(self) -> decoding.Constraints | None:
    """Constraints on predictions, with encoded outputs; None for none."""
    return self._constraints

  def with_constraints(self, constraints: decoding.Constraints | None) -> 'BaseTransformerModel':
    """Return a copy of this model with other constraints on its predictions.

    Args:
      constraints: the constraints, or None.

    Raises:
      ConfigError: the file of allowed outputs is invalid.
    """
    model = copy.copy(self)
    model._constraints = _encoded(constraints, self.output_vocabulary, type(self).__name__)
    return model

  def with_metric_fns(self, metric_fns, owner):
    """See `BaseModel.with_metric_fns`."""
    token_losses.check_chunk_size(self, self.module, owner, metric_fns)
    model = copy.copy(self)
    model._custom_metrics = batch_metrics.CustomMetrics(owner, metric_fns)
    return model

  def with_adapter(self, adapter: adapters.Lora | None) -> 'BaseTransformerModel':
    """Return a copy of this model with another adapter, for passes of the network; its optimizer is unchanged."""
    model = copy.copy(self)
    model.adapter = adapter
    return model

  def network_params(self, params: Params, dropout_rng: Array | None = None) -> Params:
    """Return the parameters for passes of the network: those of an adapter get its scale and dropout.

    Args:
      params: tree of parameters.
      dropout_rng: key for dropout of the passes; None for no dropout.
    """
    if self.adapter is None:
      return params
    return self.adapter.prepare(params, has_dropout=dropout_rng is not None)

  def gradient_metrics(self, grads, params_axes):
    """See base class; the number of adapters without a gradient."""
    if self.adapter is None or params_axes is None:
      return {}
    return adapters.metrics_of_gradients(grads, params_axes)

  def params_constraint(self, metrics, frozen, stored):
    """See base class; QK-clip if the network's configuration has its threshold."""
    config = qk_clip.config_of(self.module)
    if config is None:
      return None
    return lambda params: qk_clip.clip(params, config, metrics, frozen, stored)

  def _initialize(self, rng: Array, *args: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return (output of the network, its new variables with those of the adapter).

    Args:
      rng: key of the parameters.
      *args: arguments of the network.
      **options: keyword arguments of the network.
    """
    if self.adapter is not None:
      # With sown values, which say what kernels support an adapter.
      options['mutable'] = True
    output, variables = self.module.init_with_output(rng, *args, **options)
    variables = dict(tree_utils.to_dict(variables))
    # Sown values belong to a batch, not to the state.
    intermediates = variables.pop('intermediates', {})
    if self.adapter is not None:
      sites = adapter_kernels.sites_of(intermediates)
      variables = self.adapter.add_to(variables, rng, sites)
    return output, variables

  @abc.abstractmethod
  def compute_logits(
    self,
    params: Params,
    batch: Batch,
    dropout_rng: Array | None = None,
    *,
    flax_mutables: FlaxMutables | None = None,
    mutable: tuple[str, ...] = (),
  ) -> tuple[Array, dict[str, Any]]:
    """Run the network on given targets (teacher forcing).

    Args:
      params: tree of parameters.
      batch: batch of the feature converter, arrays [batch, ...] by name.
      dropout_rng: key for dropout; None computes without dropout.
      flax_mutables: the module's other collections.
      mutable: names of collections that the pass may write.

    Returns:
      (<float32>[batch, length, vocab] logits, the `mutable` collections after the pass as nested dicts). Classes that
      declare `SUPPORTS_CHUNKED_LOSS` return a `layers.OutputProjection` of the logits with `return_logits=False`.
    """

  def weighted_loss(
    self,
    outputs: token_losses.Outputs,
    targets: Array,
    weights: Array | None,
    loss_normalizing_factor: Array | float | None,
  ) -> tuple[Array, Array, Array]:
    """Return the loss of the tokens of a batch. Override it to change only the loss.

    Args:
      outputs: <float>[batch, length, vocab] logits; `layers.OutputProjection` if `compute_logits` returns one.
      targets: <int>[batch, length] token ids.
      weights: <float>[batch, length], or None for ones.
      loss_normalizing_factor: divisor of the sum over the tokens; None means 1.

    Returns:
      (loss, z_loss, is_correct): float32 scalars, the loss to differentiate and the part of it that is z-loss, which is
      only a metric; and bool[batch, length], True where the prediction is correct.
    """
    loss, z_loss, is_correct = token_losses.weighted_loss(
      outputs, targets, weights, self._label_smoothing, self._z_loss, loss_normalizing_factor
    )
    return loss.value, z_loss.value, is_correct

  def auxiliary_losses(
    self, intermediates: Mapping[str, Any], batch: Batch
  ) -> tuple[Array | float, MetricsMap]:
    """Return (loss to add to the cross entropy, its metrics); by default (0, {}).

    The loss must be a mean over the batch: the mean over micro-batches is added.

    Args:
      intermediates: collection `intermediates` of the module, {} if it is empty.
      batch: arrays [batch, ...] by name.

    Returns:
      (float32 scalar, metrics by name).
    """
    del intermediates, batch
    return 0.0, {}

  def auxiliary_loss_terms(
    self, intermediates: Mapping[str, Any]
  ) -> metrics_lib.WeightedAverage | None:
    """Return the terms of `auxiliary_losses` with their own weights in means over batches, or None.

    By default, None: the loss of a batch has one weight. For auxiliary losses that are means over other numbers than
    the targets, such as tokens of the encoder, return their weights. A class that overrides `auxiliary_losses` without
    this method has the default.

    Args:
      intermediates: see `auxiliary_losses`.
    """
    del intermediates
    return None

  def for_microbatches(self, batch, num_microbatches):
    """See `BaseModel.for_microbatches`; computes a normalizing factor that depends on the batch."""
    model = copy.copy(self)
    model._auxiliary_loss_share = self._auxiliary_loss_share / num_microbatches
    factor, weights = losses.get_loss_normalizing_factor_and_weights(
      self._loss_normalizing_factor, batch
    )
    fixed = {}
    if self.auxiliary_losses_per_target:
      fixed[_AUXILIARY_WEIGHT] = self._auxiliary_weight(batch, weights, factor)
    if isinstance(self._loss_normalizing_factor, losses.SpecialLossNormalizingFactor):
      fixed[losses.FACTOR_OF_BATCH] = factor
      if subclassing.overrides(self, BaseTransformerModel.loss_fn):
        logging.getLogger(__name__).info(
          'The losses of micro-batches are divided by the %s of the batch before %s.loss_fn, also if it changes the '
          'targets or their weights.',
          self._loss_normalizing_factor.name,
          type(self).__name__,
        )
    return model, batch, fixed

  def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
    """Compute the weighted cross entropy of the batch plus `auxiliary_losses`; see `BaseModel.loss_fn`."""
    updated = tuple(flax_mutables or ())
    config = qk_clip.config_of(self.module)
    sown = () if config is None else (qk_clip.ATTENTION_SCORES,)
    loss, metrics, collections = self._loss(
      params, batch, dropout_rng, flax_mutables, (*updated, *sown)
    )
    if config is not None:
      metrics |= qk_clip.metrics_of_scores(config, collections)
    if not updated:
      return loss, metrics
    return loss, (metrics, {name: collections[name] for name in updated})

  def eval_fn(self, params, batch, flax_mutables=None):
    """See `BaseModel.eval_fn`; if `loss_fn` is not overridden, rows of zeros belong to no mean."""
    if subclassing.overrides(self, BaseTransformerModel.loss_fn):
      return super().eval_fn(params, batch, flax_mutables)
    loss, metrics, _ = self._loss(params, batch, None, flax_mutables, (), is_evaluation=True)
    return loss, metrics

  def _loss(self, params, batch, dropout_rng, flax_mutables, updated, is_evaluation=False):
    """Return (loss, metrics, collections after the pass).

    Args:
      params, batch, dropout_rng, flax_mutables: see `loss_fn`.
      updated: names of the collections that the pass writes.
      is_evaluation: True if rows of zeros are padding that belongs to no mean.
    """
    mutable = updated
    if subclassing.overrides(self, BaseTransformerModel.auxiliary_losses):
      mutable = ('intermediates', *updated)
    outputs, collections = self.compute_logits(
      params,
      batch,
      dropout_rng,
      flax_mutables=flax_mutables,
      mutable=mutable,
      **token_losses.logits_arguments(self, self.module, self._custom_metrics.metric_fns),
    )
    rows = {}
    if is_evaluation:
      rows = {losses.REAL_ROWS: losses.real_rows(batch)}
    factor, weights = losses.get_loss_normalizing_factor_and_weights(
      self._loss_normalizing_factor, {**batch, **rows}
    )
    targets = batch['decoder_target_tokens']
    loss, z_loss, is_correct = self.weighted_loss(outputs, targets, weights, factor)
    counted = weights
    if is_evaluation and self._counts_rows_without_weights():
      counted = rows[losses.REAL_ROWS]
    normalized = losses.NormalizedLoss.of(loss, counted, factor)
    share = self._auxiliary_loss_share
    if share != 1.0:
      normalized = normalized.of_microbatch(share, factor)
    z_loss = normalized.with_value(jax.lax.stop_gradient(z_loss))
    segment_ids = batch_metrics.segment_ids_of(batch)
    auxiliary_loss, auxiliary_metrics = self.auxiliary_losses(
      collections.get('intermediates', {}), batch
    )
    # Only `loss` includes auxiliary losses; `cross_ent_loss` and the losses per token do not.
    auxiliary_weight = self._auxiliary_weight(batch, weights, factor)
    loss = normalized.value + auxiliary_loss * (auxiliary_weight * share)
    if subclassing.overrides(self, BaseTransformerModel._compute_metrics):
      metrics = self._compute_metrics(
        logits=outputs,
        targets=targets,
        mask=weights,
        loss=loss,
        z_loss=z_loss.value,
        segment_ids=segment_ids,
      )
      metrics = {**auxiliary_metrics, **metrics}
      return loss, self._custom_metrics.add_to(metrics, outputs, batch), collections
    metrics = batch_metrics.metrics_of_batch(
      is_correct,
      targets,
      weights,
      normalized,
      z_loss,
      segment_ids,
      self._token_sums(outputs, batch, weights),
    )
    terms = None
    if self._has_auxiliary_loss_terms():
      terms = self.auxiliary_loss_terms(collections.get('intermediates', {}))
    if terms is None:
      loss_metric = normalized.with_value(loss).average()
    else:
      loss_metric = normalized.weighted_average().add_terms(terms.scale(auxiliary_weight))
    metrics |= {'loss': loss_metric, **auxiliary_metrics}
    return loss, self._custom_metrics.add_to(metrics, outputs, batch), collections

  def _compute_metrics(
    self,
    logits: Array,
    targets: Array,
    mask: Array | None,
    loss: Array,
    z_loss: Array | None = None,
    segment_ids: Mapping[str, Array] | None = None,
  ) -> MetricsMap:
    """Return the metrics of a batch: T5X's method, which `loss_fn` calls if a subclass overrides it.

    Args:
      logits: <float32>[..., length, vocab].
      targets: <int>[..., length].
      mask: <float>[..., length] loss weights, or None for ones.
      loss: float32 scalar.
      z_loss: float32 scalar, the part of `loss` that is z-loss.
      segment_ids: <int>[batch, length of the feature] by feature, 0 at padding.
    """
    return batch_metrics.compute_base_metrics(logits, targets, mask, loss, z_loss, segment_ids)

  def _token_sums(
    self, outputs: token_losses.Outputs, batch: Batch, weights: Array | None
  ) -> losses.TokenSums | None:
    """Return the sums over the tokens if the loss has other weights than the tokens, or None.

    Args:
      outputs: see `weighted_loss`.
      batch: arrays [batch, ...] by name.
      weights: <float>[batch, length] weights of the loss.
    """
    average = losses.SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE
    if weights is None or self._loss_normalizing_factor is not average:
      return None
    # Padding that has weights in the batch has none in the average.
    of_tokens = jnp.where(weights != 0, losses.token_weights(batch), 0.0)
    # Outputs without gradients, so that chunks of a loss compute no gradients for a metric.
    loss, z_loss, _ = self.weighted_loss(
      jax.lax.stop_gradient(outputs), batch['decoder_target_tokens'], of_tokens, None
    )
    return losses.TokenSums(loss, z_loss, jnp.sum(of_tokens))

  def _counts_rows_without_weights(self) -> bool:
    """Return whether the normalizing factor includes real rows whose loss weights are all 0."""
    kind = self._loss_normalizing_factor
    is_special = isinstance(kind, losses.SpecialLossNormalizingFactor)
    return not is_special or kind is losses.SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS

  def _has_auxiliary_loss_terms(self) -> bool:
    """Return whether `auxiliary_loss_terms` are those of `auxiliary_losses`, and means over batches."""
    is_sum = self.auxiliary_losses_per_target and not isinstance(
      self._loss_normalizing_factor, losses.SpecialLossNormalizingFactor
    )
    # A subclass may override only `auxiliary_losses`.
    for cls in type(self).__mro__:
      if 'auxiliary_loss_terms' in vars(cls):
        return not is_sum
      if 'auxiliary_losses' in vars(cls):
        return False
    return False

  def _auxiliary_weight(
    self, batch: Batch, weights: Array | None, factor: Array | float | None
  ) -> Array | float:
    """Return the factor of the auxiliary losses of a batch; for a slice, the factor of its batch."""
    if not self.auxiliary_losses_per_target:
      return 1.0
    if _AUXILIARY_WEIGHT in batch:
      return batch[_AUXILIARY_WEIGHT]
    if weights is None:
      num_targets = jnp.float32(batch['decoder_target_tokens'].size)
    else:
      num_targets = jnp.sum(weights, dtype=jnp.float32)
    if factor is None:
      return num_targets
    return num_targets / factor

  def _rngs(self, rng: Array | None) -> dict[str, Array] | None:
    """Return a key for each random stream, derived from `rng`; None if `rng` is None."""
    if rng is None:
      return None
    first, *others = self.RANDOM_STREAMS
    return {
      first: rng,
      **{name: jax.random.fold_in(rng, i) for i, name in enumerate(others, start=1)},
    }

  def score_batch(self, params, batch, return_intermediates=False, *, flax_mutables=None):
    """Compute each row's log-likelihood: the sum of log p(target) times loss weight, without smoothing and z-loss.

    Args:
      params: tree of parameters.
      batch: batch with targets; without `decoder_loss_weights` targets above 0 have weight 1.
      return_intermediates: True to return sown values of the network too.
      flax_mutables: the module's other collections.

    Returns:
      <float32>[batch] scores, or (scores, the `intermediates` collection, to which `target_tokens` and
      `loss_weights` are added under `decoder`, each in a tuple like sown values).
    """
    arguments = token_losses.logits_arguments(self, self.module, ())
    mutable = ()
    if return_intermediates:
      mutable = ('intermediates',)
    outputs, collections = self.compute_logits(
      params, batch, flax_mutables=flax_mutables, mutable=mutable, **arguments
    )
    targets = batch['decoder_target_tokens']
    weights = jnp.asarray(batch.get('decoder_loss_weights', targets > 0), jnp.float32)
    scores = -jnp.sum(token_losses.token_losses(outputs, targets) * weights, axis=-1)
    if not return_intermediates:
      return scores
    # Targets and weights are not sown, but needed to interpret sown values.
    intermediates = dict(collections.get('intermediates', {}))
    known = {'target_tokens': (targets,), 'loss_weights': (weights,)}
    return scores, {**intermediates, 'decoder': {**intermediates.get('decoder', {}), **known}}


def _usable_decode_fn(decode_fn, vocabulary):
  decode_fn = decoding.encoded(decode_fn, vocabulary)
  checks.check(
    '',
    locals(),
    decode_fn=checks.Expectation(
      'a decoding algorithm, such as decoding.greedy_search,', callable
    ).or_none(),
  )
  if decode_fn is not None:
    decoding.contract_of(decode_fn)
  return decode_fn


def _restricted(optimizer_def: Any, adapter: adapters.Lora | None, owner: str) -> Any:
  """Return the optimizer of the parameters that a model with `adapter` trains."""
  checks.check(
    owner,
    {'adapter': adapter},
    adapter=checks.instance(
      adapters.Lora, 'an adapters.Lora', 'In gin, write adapter = @adapters.Lora().'
    ).or_none(),
  )
  # Other values are rejected where they are used.
  if adapter is None or not isinstance(optimizer_def, optimizers.OptimizerDef):
    return optimizer_def
  unset = checks.Expectation(
    'unset with an adapter',
    lambda value: not value,
    'Adapters are float32; to keep the other parameters in bfloat16 set Lora.base_dtype.',
  )
  checks.check(
    'with_update_options',
    vars(optimizer_def.update_options),
    param_dtype=unset,
    stochastic_rounding=unset,
  )
  return optimizers.MultiOptimizer(
    [(adapter.trained_patterns, optimizer_def)], part_names=['adapter']
  )


def _encoded(constraints, vocabulary, owner):
  checks.check(
    owner,
    {'constraints': constraints},
    constraints=checks.instance(
      decoding.Constraints,
      'decoding.Constraints',
      'In gin, write constraints = @decoding.Constraints().',
    ).or_none(),
  )
  # Without effect, they must not change the program.
  if constraints is None or constraints == decoding.Constraints():
    return None
  return constraints.encoded(vocabulary)


def _check_network(module):
  """Raise ConfigError for attributes of a cache that have no effect because the module is not a `Network`."""
  if isinstance(module, Network):
    return
  for name in ('cache_offset', 'share_beams'):
    if hasattr(module, name):
      owner = type(module).__name__
      value = getattr(module, name)
      if callable(value):
        attribute = f'method {name}'
      else:
        attribute = f'attribute {name}={value!r}'
      raise errors.ConfigError(
        f'The {attribute} of module class {owner} has an effect only in a networks.Network. '
        f'Write `class {owner}(networks.Network)` instead of `nn.Module`, or remove it.'
      )


def mutables_argument(flax_mutables: FlaxMutables | None) -> dict[str, Any]:
  """Return the keyword argument `flax_mutables` if it has a value; methods written for T5X do not have it."""
  if flax_mutables:
    return {'flax_mutables': flax_mutables}
  return {}


def apply_module(
  module: nn.Module,
  params: Params,
  *args,
  flax_mutables: FlaxMutables | None = None,
  mutable: Sequence[str] | Literal[True] = (),
  **kwargs,
) -> tuple[Any, dict[str, Any]]:
  """Apply `module` to `params` and its other collections.

  Args:
    module: Linen module.
    params: tree of parameters.
    *args: arguments of the module's method.
    flax_mutables: other collections.
    mutable: names of collections that the pass may write; True for all.
    **kwargs: keyword arguments of `module.apply`.

  Returns:
    (output, the `mutable` collections after the pass as nested dicts).
  """
  if mutable is not True:
    mutable = list(mutable)
  output, collections = module.apply(
    {**(flax_mutables or {}), 'params': params}, *args, mutable=mutable, **kwargs
  )
  return output, tree_utils.to_dict(collections)


def get_input_vocabulary(model: BaseTransformerModel) -> Any:
  """Return the model's input vocabulary, for gin files, which cannot read attributes."""
  return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Any:
  """Return the model's output vocabulary, for gin files, which cannot read attributes."""
  return model.output_vocabulary
