"""Predictions and scores of lists of texts, for `InteractiveModel` and `t5x_lite chat`.

`apps.infer` processes files and entire splits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import inspect
from typing import Any

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.data.batches import features as features_lib
from t5x_lite.data.interfaces import count_tokens
from t5x_lite.data.text import examples as text_examples
from t5x_lite.data.text import ids as text_ids
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.models import BaseTransformerModel
from t5x_lite.train_state import EvaluationState
from t5x_lite.types import PyTree

# Kinds of output by method.
_KINDS = {'predict': 'predict_with_aux', 'score': 'score'}


def element_spec(
  model: BaseTransformerModel, task_feature_lengths: Mapping[str, int], batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
  """Return shapes and dtypes of a global batch by model feature.

  Args:
    model: the model.
    task_feature_lengths: lengths in ids by task feature.
    batch_size: number of rows per batch.

  Raises:
    ConfigError: lengths or batch size are not positive integers, or not supported by the model.
  """
  converter = _converter(model)
  # `DatasetConfig` checks lengths and batch size.
  data.DatasetConfig(
    'texts', task_feature_lengths, 'train', batch_size, False, 0, source='builtin'
  ).check()
  converter.check(task_feature_lengths, ['inputs', 'targets'], 'texts')
  return converter.element_spec(task_feature_lengths, batch_size, False)


def _converter(model: BaseTransformerModel) -> features_lib.FeatureConverter:
  if not isinstance(model.FEATURE_CONVERTER, str):
    raise checks.invalid(
      type(model).__name__,
      'feature_converter_cls',
      f'one of {", ".join(features_lib.CONVERTERS)}',
      model.FEATURE_CONVERTER,
      "Classes of seqio's converters are not supported for texts.",
    )
  return features_lib.get_converter(model.FEATURE_CONVERTER)


class TextInference:
  """Predicts and scores examples in batches; padding rows are dropped."""

  def __init__(
    self,
    model: BaseTransformerModel,
    partitioner: partitioning.BasePartitioner,
    train_state_axes: PyTree,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
    add_eos: bool | Mapping[str, bool] = True,
    length_remedies: Mapping[str, str] | None = None,
    literal_sentinels: bool = False,
  ):
    """Store the arguments; compile nothing.

    Args:
      model: the model.
      partitioner: partitioner of the programs.
      train_state_axes: mesh PartitionSpecs of the states.
      task_feature_lengths: lengths in ids by task feature.
      batch_size: number of rows per global batch.
      add_eos: whether texts end with the end-of-sequence id, for all features or by name.
      length_remedies: see `ExampleReader`.
      literal_sentinels: see `TextFeature`.

    Raises:
      ConfigError: lengths or batch size are not supported by model or mesh, or the model's feature converter is a class
        of seqio.
    """
    # Shape and dtype of a global batch by model feature.
    self.element_spec = element_spec(model, task_feature_lengths, batch_size)
    self._converter = _converter(model)
    if not isinstance(add_eos, Mapping):
      add_eos = {'inputs': add_eos, 'targets': add_eos}
    vocabularies = {'inputs': model.input_vocabulary, 'targets': model.output_vocabulary}
    features = {}
    for name, vocabulary in vocabularies.items():
      features[name] = text_examples.TextFeature(
        vocabulary=vocabulary, add_eos=add_eos[name], literal_sentinels=literal_sentinels
      )
    self.reader = text_examples.ExampleReader(
      self._converter, features, task_feature_lengths, length_remedies
    )
    self._model = model
    self._partitioner = partitioner
    self._axes = train_state_axes
    # Raises if the batch is not divisible by the data axes.
    partitioner.get_data_layout(batch_size)
    self._local_rows = partitioner.get_rows(batch_size)
    self._batch_size = batch_size
    self._runner = evaluation.PredictRunner(model, partitioner)

  def batches(
    self, examples: Sequence[Mapping[str, Any]]
  ) -> Iterator[tuple[int, dict[str, jax.Array]]]:
    """Yield (number of examples, global batch of arrays [batch, ...]); rows of zeros pad the last batch.

    Args:
      examples: result of `reader.read`, the same on every process.
    """
    for start in range(0, len(examples), self._batch_size):
      # A row is a list of examples, which is empty in the rows that pad the last batch.
      rows: list[list[dict[str, Any]]] = []
      for example in examples[start : start + self._batch_size]:
        rows.append([{name: example[name] for name in self.reader.lengths}])
      num_examples = len(rows)
      rows += [[]] * (self._batch_size - num_examples)
      local_rows = [rows[row] for row in self._local_rows]
      batch = self._converter.convert(local_rows, self.reader.lengths, False)
      yield num_examples, data.to_global_arrays(batch, self._partitioner, self.element_spec)

  def predict(
    self,
    train_state: EvaluationState,
    examples: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    first: int = 0,
    **options: Any,
  ) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Decode examples.

    Args:
      train_state: training or inference state, sharded over the mesh.
      examples: result of `reader.read`.
      seed: seed of sampling; batch k uses the key of `seed`, folded with `first` + k.
      first: see `seed`.
      **options: arguments of the model's `predict_batch_with_aux`, e.g. `num_decodes=4, return_all_decodes=True`.

    Returns:
      (ids, auxiliary outputs): per example <int32>[length], or [num_decodes, length] with all decodes; and lists with
      one value per example, by name.
    """
    return self._run('predict', train_state, examples, seed, first, options)

  def text(self, ids: np.ndarray) -> str | list[str]:
    """Return the text of predicted ids, int32[length], or a list of texts for int32[num_decodes, length]."""
    decode = self._model.output_vocabulary.decode
    if ids.ndim > 1:
      return [decode(row.tolist()) for row in ids]
    return decode(ids.tolist())

  def score(
    self, train_state: EvaluationState, examples: Sequence[Mapping[str, Any]], **options: Any
  ) -> tuple[list[float], dict[str, Any]]:
    """Compute the log-likelihood of each example's targets.

    Args:
      train_state: see `predict`.
      examples: see `predict`.
      **options: arguments of the model's `score_batch`; with `return_intermediates=True` the auxiliary outputs are the
        sown values of the network.

    Returns:
      (scores, auxiliary outputs), as in `predict`.
    """
    return self._run('score', train_state, examples, 0, 0, options)

  def evaluate(
    self,
    train_state: EvaluationState,
    examples: Sequence[Mapping[str, Any]],
    metric_fns: Sequence[Callable[..., Mapping[str, Any]]],
    postprocessor: Callable[..., Any] | None = None,
  ) -> dict[str, Any]:
    """Predict or score examples, as the metrics require, and compute the metrics.

    Args:
      train_state: see `predict`.
      examples: see `predict`.
      metric_fns: functions whose required parameters are, by name as in seqio, `(targets, predictions)`,
        `(targets, predictions, aux_values)` or `(targets, scores)`; each returns a mapping of metric name to value.
      postprocessor: `fn(text, example=..., is_target=...)`, applied to targets and predictions.

    Returns:
      Metrics by name.

    Raises:
      ConfigError: `metric_fns` is empty, or a function has other parameters.
      DataError: two functions return a metric of the same name.
    """
    wanted = [_metric_parameters(fn) for fn in metric_fns]
    if not wanted:
      raise ConfigError(
        '`metric_fns` is empty. Pass at least one function, such as data.exact_match.'
      )

    def process(texts, is_target):
      if postprocessor is None:
        return list(texts)
      return [
        postprocessor(text, example=example, is_target=is_target)
        for text, example in zip(texts, examples, strict=True)
      ]

    given: dict[str, Any] = {
      'targets': process([self._target(example) for example in examples], True)
    }
    if any('predictions' in names for names in wanted):
      ids, given['aux_values'] = self.predict(train_state, examples)
      given['predictions'] = process(map(self._comparable_text, ids), False)
    if any('scores' in names for names in wanted):
      given['scores'], _ = self.score(train_state, examples)
      given['num_tokens'] = count_tokens(examples)
    found: dict[str, Any] = {}
    for fn, names in zip(metric_fns, wanted, strict=True):
      metrics = fn(**{name: given[name] for name in names})
      for name in found.keys() & metrics.keys():
        raise DataError(f'Two metric functions return a metric {name!r}. Rename one of them.')
      found |= metrics
    return found

  def _comparable_text(self, ids: np.ndarray) -> str | list[str]:
    """Return the result of `text` with sentinels, which the texts of targets have too."""
    vocabulary = self._model.output_vocabulary
    if ids.ndim > 1:
      return [text_ids.decode_ids(row, vocabulary) for row in ids]
    return text_ids.decode_ids(ids, vocabulary)

  def _target(self, example: Mapping[str, Any]) -> str:
    if 'targets_pretokenized' in example:
      return example['targets_pretokenized']
    return text_ids.decode_ids(example['targets'], self._model.output_vocabulary)

  def compile(self, kind: str, train_state: EvaluationState, **options: Any) -> None:
    """Compile 'predict' or 'score' with these options ahead of time; otherwise the first call compiles."""
    self._runner.compile(
      _KINDS[kind], self.element_spec, tree_utils.shapes(train_state), self._axes, options
    )

  def _run(
    self,
    kind: str,
    train_state: EvaluationState,
    examples: Sequence[Mapping[str, Any]],
    seed: int,
    first: int,
    options: Mapping[str, Any],
  ) -> tuple[list[Any], dict[str, Any]]:
    """Return (outputs, auxiliary values) by example."""
    batches = (
      (count, first + number, batch) for number, (count, batch) in enumerate(self.batches(examples))
    )
    found = self._runner.run(
      _KINDS[kind], batches, train_state, self._axes, seed=seed, options=options
    )
    results = [_first_rows(outputs, count) for count, outputs in found]
    return jax.tree.map(_by_example, *results)


def _first_rows(outputs: PyTree, count: int) -> tuple[PyTree, PyTree]:
  """Return (outputs, auxiliary values) of the first rows of a batch."""
  if not isinstance(outputs, tuple):
    outputs = (outputs, {})
  return jax.tree.map(lambda rows: rows[:count], outputs)


def _by_example(*batches: np.ndarray) -> list[Any]:
  """Return a list with one value per example, from the outputs of several batches."""
  rows = np.concatenate(batches)
  if rows.ndim == 1:
    return rows.tolist()
  return list(rows)


def _metric_parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
  """Return the names of the parameters that a metric function gets: as in seqio the required ones, and `num_tokens`."""
  parameters = inspect.signature(fn).parameters
  names = tuple(name for name, each in parameters.items() if each.default is each.empty)
  if names not in (
    ('targets', 'predictions'),
    ('targets', 'predictions', 'aux_values'),
    ('targets', 'scores'),
  ):
    raise ConfigError(
      f'The required parameters of the metric function {getattr(fn, "__name__", fn)!r} must be '
      '(targets, predictions), (targets, predictions, aux_values) or (targets, scores), by these '
      f'names, got ({", ".join(names)}).'
    )
  if 'num_tokens' in parameters:
    return (*names, 'num_tokens')
  return names
