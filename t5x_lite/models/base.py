"""What a model is to the rest of the house, and what all Transformers share.

A model owns a network (a Linen module) but no parameters: its methods are pure functions of parameters and batch,
fit to be traced. It names its feature converter; the data storey resolves that name.
"""

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
import copy
import math
import numbers
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import losses
from t5x_lite import metrics as metrics_lib
from t5x_lite import tree_utils
from t5x_lite.models import batch_metrics
from t5x_lite.networks.network import Network
from t5x_lite.types import Array, Batch, Params

MetricsMap = batch_metrics.MetricsMap
# Takes logits <float32>[batch, length, vocab] and the batch they were computed from; returns metrics of it by name.
MetricFn = Callable[[Array, Batch], MetricsMap]
# Collections of a module other than its parameters, e.g. {'batch_stats': {...}}.
FlaxMutables = Mapping[str, Any]
# Of a slice of a batch: the weight of the auxiliary losses in that batch.
_AUXILIARY_WEIGHT = 'batch/auxiliary_weight'


class BaseModel(abc.ABC):
  """A network with its loss, its predictions and its initial variables.

  Args:
    optimizer_def: the optimizer definition that trains the model, or None for a model that is never trained.
  """

  # Name of the feature converter that makes this model's batches; an instance may hold a name or a class of its own.
  FEATURE_CONVERTER: ClassVar[str]
  # Consecutive rows of a batch, counted from its first, that must be in one micro-batch.
  rows_together: int = 1

  def __init__(self, optimizer_def: Any):
    self.optimizer_def = optimizer_def

  def for_microbatches(self, batch: Batch, num_microbatches: int) -> tuple['BaseModel', Batch, Batch]:
    """Returns (model, batch, fixed) whose losses over the slices of that batch sum to this model's loss over `batch`.

    To be called before a batch is cut along dim 0, so that what the loss reads off the whole batch is fixed.

    Args:
      batch: the whole batch.
      num_microbatches: number of slices, all of one size; each holds blocks of `rows_together` rows of the model that
        is returned.

    Returns:
      (a model for slices of any batch, the batch to cut, what is known of this whole batch: arrays to be added to each
      slice under the names that they have here).
    """
    del num_microbatches
    return self, batch, {}

  def metrics_of_microbatches(self, metrics: MetricsMap) -> MetricsMap:
    """Returns the metrics of a batch, given the merged metrics of its slices; of the model of `for_microbatches`."""
    return metrics

  @abc.abstractmethod
  def loss_fn(
      self, params: Params, batch: Batch, dropout_rng: Array | None, flax_mutables: FlaxMutables | None = None
  ) -> tuple[Array, MetricsMap | tuple[MetricsMap, FlaxMutables]]:
    """Computes the loss to differentiate with respect to `params`.

    Args:
      params: the parameters.
      batch: a batch as the feature converter makes it.
      dropout_rng: key for dropout; None computes without dropout.
      flax_mutables: the module's other collections, updated by this pass.

    Returns:
      (loss, metrics), or (loss, (metrics, updated flax_mutables)) where `flax_mutables` holds any collection.
    """

  @abc.abstractmethod
  def eval_fn(
      self, params: Params, batch: Batch, flax_mutables: FlaxMutables | None = None) -> tuple[Array, MetricsMap]:
    """Computes (loss, metrics) without dropout; `flax_mutables` are read, not updated."""

  def predict_batch(
      self, params: Params, batch: Batch, rng: Array | None = None, *, flax_mutables: FlaxMutables | None = None
  ) -> Array:
    """Returns the predictions of `predict_batch_with_aux` alone, usually <int32>[batch, length] tokens."""
    return self.predict_batch_with_aux(params, batch, rng=rng, flax_mutables=flax_mutables)[0]

  def check_prediction_features(self, features: Collection[str]) -> None:
    """Refuses batches without what predictions need, by their features' names; here every batch will do.

    Args:
      features: names of the features of a batch.

    Raises:
      ConfigError: naming the feature and what to do.
    """
    del features

  @abc.abstractmethod
  def predict_batch_with_aux(
      self, params: Params, batch: Batch, rng: Array | None = None, *, flax_mutables: FlaxMutables | None = None
  ) -> tuple[Array, Mapping[str, Array]]:
    """Returns (predictions, what else is known of them); every array has the batch dim first."""

  @abc.abstractmethod
  def score_batch(
      self, params: Params, batch: Batch, return_intermediates: bool = False, *,
      flax_mutables: FlaxMutables | None = None,
  ) -> Array | tuple[Array, Mapping[str, Any]]:
    """Returns <float32>[batch] log-likelihoods of the targets; with `return_intermediates`, (those, sown values)."""

  @abc.abstractmethod
  def get_initial_variables(
      self, rng: Array, input_shapes: Mapping[str, tuple[int, ...]], input_types: Mapping[str, Any] | None = None
  ) -> dict[str, Any]:
    """Initialises all variables.

    Args:
      rng: key of the parameters.
      input_shapes: shape of every feature of a batch.
      input_types: dtype of features; int32 where none is given.

    Returns:
      Collections by name: 'params', 'params_axes' (logical axis names, if the module names any), and others.
    """


class BaseTransformerModel(BaseModel):
  """What Transformer models share: token losses, metrics, vocabularies.

  Args:
    module: the network. In training it gets a random key for each of `RANDOM_STREAMS`.
    input_vocabulary: vocabulary of the inputs.
    output_vocabulary: vocabulary of the targets; both are used through `vocab_size`, `eos_id`, `pad_id` and `decode`.
    optimizer_def: the optimizer, or None for a model that is never trained.
    decode_fn: decoding algorithm of predictions.
    label_smoothing: probability mass, in [0, 1), moved from the target to all other ids.
    z_loss: coefficient of the z-loss, which keeps the softmax's normaliser near 1.
    loss_normalizing_factor: divisor of the summed loss: None, a number above 0, or a special factor or its name; see
      `losses.SpecialLossNormalizingFactor`.
    feature_converter_cls: name of a feature converter, or a seqio converter class, in place of the class's
      `FEATURE_CONVERTER`.
    metric_fns: functions of (logits, batch) that return further metrics of training and evaluation by name,
      `clu.metrics.Metric`s. They are traced with the loss. Of a batch that is cut into micro-batches they see these,
      and what they return is merged.

  Raises:
    ConfigError: a number out of its range, an unknown normalising factor, a vocabulary larger than the network's, a
      `decode_fn` or metric that is no function, a `decode_fn` that `decoding.contract_of` raises for, or a module with
      an attribute that only a `networks.Network` has.
  """

  # Names of the random streams that the module draws from in training.
  RANDOM_STREAMS: ClassVar[tuple[str, ...]] = ('dropout',)
  # For subclasses with `auxiliary_losses`: count them once for every target token, as the cross entropy counts, before
  # both are divided by the normalising factor. Their ratio is then the same for batches of any size. Otherwise they are
  # added to the divided cross entropy as they are, as in T5X.
  auxiliary_losses_per_target: bool = False

  def __init__(
      self,
      module: nn.Module,
      input_vocabulary: Any,
      output_vocabulary: Any,
      optimizer_def: Any,
      decode_fn: decoding.DecodeFnCallable | None = None,
      label_smoothing: float = 0.0,
      z_loss: float = 0.0,
      loss_normalizing_factor: losses.LossNormalizingFactor = None,
      *,
      feature_converter_cls: Any = None,
      metric_fns: Sequence[MetricFn] = (),
  ):
    super().__init__(optimizer_def)
    if not isinstance(metric_fns, (list, tuple)) or not all(map(callable, metric_fns)):
      raise errors.ConfigError(f'Got metric_fns={metric_fns!r}; expected a list of functions of (logits, batch). In '
                               'gin, metric_fns = [@my_module.my_metric] without parentheses behind the name.')
    _check_decode_fn(decode_fn)
    _check_in_range('label_smoothing', label_smoothing, 'at least 0 and below 1', lambda x: 0 <= x < 1)
    _check_in_range('z_loss', z_loss, 'a finite number, at least 0', lambda x: 0 <= x < math.inf)
    if isinstance(loss_normalizing_factor, str):
      loss_normalizing_factor = losses.convert_special_loss_normalizing_factor_to_enum(loss_normalizing_factor)
    elif not (loss_normalizing_factor is None
              or isinstance(loss_normalizing_factor, losses.SpecialLossNormalizingFactor)):
      _check_in_range('loss_normalizing_factor', loss_normalizing_factor,
                      'None, a finite number above 0, or the name of a special factor', lambda x: 0 < x < math.inf)
    _check_network(module)
    # Any other network is checked by its logits when it is initialised.
    network_vocab_size = module.vocab_size if isinstance(module, Network) else None
    if network_vocab_size is not None:
      check_vocabulary_fits('input_vocabulary', input_vocabulary, network_vocab_size)
      check_vocabulary_fits('output_vocabulary', output_vocabulary, network_vocab_size)
    if feature_converter_cls is not None:
      self.FEATURE_CONVERTER = feature_converter_cls
    self.module = module
    self._metric_fns = tuple(metric_fns)
    self._input_vocabulary = input_vocabulary
    self._output_vocabulary = output_vocabulary
    self._decode_fn = decode_fn
    self._label_smoothing = label_smoothing
    self._z_loss = z_loss
    self._loss_normalizing_factor = loss_normalizing_factor
    # What the auxiliary loss of a slice counts in the loss of its batch.
    self._auxiliary_loss_share = 1.0

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

  def with_decode_fn(self, decode_fn: decoding.DecodeFnCallable) -> 'BaseTransformerModel':
    """Returns this model with another decoding algorithm; this one stays as it is.

    Raises:
      ConfigError: `decode_fn` is no function, or one that `decoding.contract_of` raises for.
    """
    _check_decode_fn(decode_fn)
    model = copy.copy(self)
    model._decode_fn = decode_fn
    return model

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
    """Runs the network on given targets (teacher forcing).

    Args:
      params: the parameters.
      batch: a batch as the feature converter makes it.
      dropout_rng: key for dropout; None computes without dropout.
      flax_mutables: the module's other collections.
      mutable: names of collections that the pass may write.

    Returns:
      (<float32>[batch, length, vocab] logits, the `mutable` collections after the pass as nested dicts).
    """

  def auxiliary_losses(self, intermediates: Mapping[str, Any], batch: Batch) -> tuple[Array | float, MetricsMap]:
    """Returns (a loss to add to the cross entropy, metrics about it). For subclasses; here (0, {}).

    The loss is meant to be a mean over the batch: over micro-batches the mean of theirs is added.

    Args:
      intermediates: what the module has sown into the collection of that name, {} if nothing.
      batch: the batch.
    """
    del intermediates, batch
    return 0.0, {}

  def for_microbatches(self, batch, num_microbatches):
    """See `BaseModel.for_microbatches`; fixes a normalising factor that depends on the batch."""
    model = copy.copy(self)
    model._auxiliary_loss_share = self._auxiliary_loss_share / num_microbatches
    factor, weights = losses.get_loss_normalizing_factor_and_weights(self._loss_normalizing_factor, batch)
    fixed = {}
    if self.auxiliary_losses_per_target:
      fixed[_AUXILIARY_WEIGHT] = self._auxiliary_weight(batch, weights, factor)
    if isinstance(self._loss_normalizing_factor, losses.SpecialLossNormalizingFactor):
      fixed[losses.FACTOR_OF_BATCH] = factor
      batch = {**batch, 'decoder_loss_weights': weights}
    return model, batch, fixed

  def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
    """See `BaseModel.loss_fn`: the weighted cross entropy of the batch, plus `auxiliary_losses`."""
    updated = tuple(flax_mutables or ())
    loss, metrics, collections = self._loss(params, batch, dropout_rng, flax_mutables, updated)
    if not updated:
      return loss, metrics
    return loss, (metrics, {name: collections[name] for name in updated})

  def eval_fn(self, params, batch, flax_mutables=None):
    """See `BaseModel.eval_fn`."""
    loss, metrics, _ = self._loss(params, batch, None, flax_mutables, ())
    return loss, metrics

  def _loss(self, params, batch, dropout_rng, flax_mutables, updated):
    """Returns (loss, metrics, collections after the pass) where the collections named in `updated` may be written."""
    logits, collections = self.compute_logits(
        params, batch, dropout_rng, flax_mutables=flax_mutables, mutable=('intermediates', *updated))
    factor, weights = losses.get_loss_normalizing_factor_and_weights(self._loss_normalizing_factor, batch)
    targets = batch['decoder_target_tokens']
    loss, z_loss, _ = losses.compute_weighted_cross_entropy(
        logits, targets, weights, self._label_smoothing, self._z_loss, factor)
    metrics = batch_metrics.compute_base_metrics(logits, targets, weights, loss, z_loss, self._segment_ids(batch))
    auxiliary_loss, auxiliary_metrics = self.auxiliary_losses(collections.get('intermediates', {}), batch)
    # Only `loss` counts what is added: `cross_ent_loss` and the losses per token stay those of the cross entropy.
    loss += auxiliary_loss * (self._auxiliary_weight(batch, weights, factor) * self._auxiliary_loss_share)
    metrics |= {'loss': metrics_lib.AveragePerStep(total=loss), **auxiliary_metrics}
    for metric_fn in self._metric_fns:
      metrics |= _own_metrics(metric_fn, logits, batch, metrics)
    return loss, metrics, collections

  def _auxiliary_weight(self, batch: Batch, weights: Array | None, factor: Array | float | None) -> Array | float:
    """Returns what the auxiliary losses of a batch are multiplied by; of a slice, that of the batch it is cut from."""
    if not self.auxiliary_losses_per_target:
      return 1.0
    if _AUXILIARY_WEIGHT in batch:
      return batch[_AUXILIARY_WEIGHT]
    num_targets = (jnp.float32(batch['decoder_target_tokens'].size) if weights is None
                   else jnp.sum(weights, dtype=jnp.float32))
    return num_targets if factor is None else num_targets / factor

  def _rngs(self, rng: Array | None) -> dict[str, Array] | None:
    """Returns a key of each random stream, made of one; None without it."""
    if rng is None:
      return None
    first, *others = self.RANDOM_STREAMS
    return {first: rng, **{name: jax.random.fold_in(rng, i) for i, name in enumerate(others, start=1)}}

  def _segment_ids(self, batch: Batch) -> dict[str, Array]:
    """Returns segment ids by the names that metrics give them; of an unpacked batch, 1 at tokens and 0 at padding."""
    suffix = '_segment_ids'
    packed = {name.removesuffix(suffix): ids for name, ids in batch.items() if name.endswith(suffix)}
    if packed:
      return packed
    names = ('encoder_input_tokens', 'decoder_target_tokens')
    return {name: (batch[name] != 0).astype(jnp.int32) for name in names if name in batch}

  def score_batch(self, params, batch, return_intermediates=False, *, flax_mutables=None):
    """Computes each row's log-likelihood: the sum of log p(target) times loss weight, no smoothing, no z-loss.

    Args:
      params: the parameters.
      batch: a batch with targets; without `decoder_loss_weights`, targets above 0 count.
      return_intermediates: also return what the network has sown.
      flax_mutables: the module's other collections.

    Returns:
      <float32>[batch] scores, or (scores, the `intermediates` collection, in which `decoder` also has `target_tokens`
      and `loss_weights`, each in a tuple as sown values are).
    """
    logits, collections = self.compute_logits(params, batch, flax_mutables=flax_mutables, mutable=('intermediates',))
    targets = batch['decoder_target_tokens']
    weights = batch.get('decoder_loss_weights')
    weights = jnp.asarray(targets > 0 if weights is None else weights, jnp.float32)
    scores = -jnp.sum(losses.token_cross_entropy(logits, targets)[0] * weights, axis=-1)
    if not return_intermediates:
      return scores
    # Not sown, but needed to make sense of what is.
    intermediates = dict(collections.get('intermediates', {}))
    known = {'target_tokens': (targets,), 'loss_weights': (weights,)}
    return scores, {**intermediates, 'decoder': {**intermediates.get('decoder', {}), **known}}


def check_vocabulary_fits(name: str, vocabulary: Any, network_vocab_size: int) -> None:
  """Refuses a vocabulary with ids that the network has no embedding or logit for.

  Raises:
    ConfigError: the vocabulary is larger than the network's.
  """
  if vocabulary is None or isinstance(vocabulary, (str, int, float, list, tuple, dict)):
    raise errors.ConfigError(f'Got {name}={vocabulary!r}; expected a vocabulary, an object with vocab_size, eos_id and '
                             'decode, such as vocabularies.ByteVocabulary().')
  if vocabulary.vocab_size > network_vocab_size:
    raise errors.ConfigError(
        f'Got {name} with vocab_size={vocabulary.vocab_size} and a network with vocab_size={network_vocab_size}; '
        f'expected a network with a vocab_size of at least {vocabulary.vocab_size}. Raise vocab_size in the '
        "network's config, or use a smaller vocabulary.")


def _own_metrics(metric_fn, logits, batch, others):
  """Returns what a user's function measures, with names that `others` do not have."""
  name = getattr(metric_fn, '__name__', repr(metric_fn))
  measured = metric_fn(logits, batch)
  if not isinstance(measured, Mapping) or not all(map(metrics_lib.is_metric_obj, measured.values())):
    raise errors.ConfigError(f'The metric function {name} of the model must return a dict of clu.metrics.Metric by '
                             f'name, got {measured!r}. For a mean return clu.metrics.Average(total=..., count=...).')
  if taken := sorted(set(measured) & set(others)):
    raise errors.ConfigError(f'The metric function {name} of the model returned {", ".join(taken)}, which the model or '
                             'a function before it has; expected other names. Rename it.')
  return dict(measured)


def _check_decode_fn(decode_fn):
  if decode_fn is not None and not callable(decode_fn):
    raise errors.ConfigError(f'Got decode_fn={decode_fn!r}; expected a decoding algorithm, such as '
                             'decoding.greedy_search, or None for a model that does not predict.')
  if decode_fn is not None:
    decoding.contract_of(decode_fn)


def _check_network(module):
  """Raises a ConfigError for what a module says of its cache that would have no effect, as it is no `Network`."""
  if isinstance(module, Network):
    return
  for name in ('cache_offset', 'share_beams'):
    if hasattr(module, name):
      owner, value = type(module).__name__, getattr(module, name)
      raise errors.ConfigError(
          f'Got a module of class {owner} with {f"the method {name}" if callable(value) else f"{name}={value!r}"}; '
          f'expected a networks.Network, as models ask no other module for it. Write `class {owner}(networks.Network)` '
          'in place of `nn.Module`, or leave it out.')


def _check_in_range(name, value, expected, is_in_range):
  if not isinstance(value, numbers.Real) or isinstance(value, bool) or not is_in_range(value):
    raise errors.ConfigError(f'Got {name}={value!r}; expected {expected}.')


def apply_module(
    module: nn.Module,
    params: Params,
    *args,
    flax_mutables: FlaxMutables | None = None,
    mutable: tuple[str, ...] = (),
    **kwargs,
) -> tuple[Any, dict[str, Any]]:
  """Applies `module` to `params` and its other collections.

  Returns:
    (output, the `mutable` collections after the pass as nested dicts).
  """
  output, collections = module.apply(
      {**(flax_mutables or {}), 'params': params}, *args, mutable=list(mutable), **kwargs)
  return output, tree_utils.to_dict(collections)


def get_input_vocabulary(model: BaseTransformerModel) -> Any:
  """Returns the model's input vocabulary; for configuration files, which cannot read attributes."""
  return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Any:
  """Returns the model's output vocabulary; for configuration files, which cannot read attributes."""
  return model.output_vocabulary
