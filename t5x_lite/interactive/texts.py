"""A model at work on a few texts: predictions and scores of examples as a person types them, each call compiled once.

For `InteractiveModel` and the command `chat`; files and whole splits are read by `apps.infer`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import inspect
from typing import Any

import jax
import numpy as np

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import partitioning
from t5x_lite.data import features as features_lib
from t5x_lite.data import text_examples
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.models import BaseTransformerModel
from t5x_lite.train_state import TrainState
from t5x_lite.types import PyTree

# What is computed to predict, and to score.
_KINDS = {'predict': 'predict_with_aux', 'score': 'score'}


def element_spec(model: BaseTransformerModel, task_feature_lengths: Mapping[str, int],
                 batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns model feature name to shape and dtype of a global batch of the model.

  Args:
    model: the model.
    task_feature_lengths: task feature name to length in ids.
    batch_size: rows of the batch.

  Raises:
    ConfigError: lengths or a batch size that are no positive integers or do not fit the model.
  """
  converter = _converter(model)
  # Its checks of lengths and batch size are those wanted here.
  data.DatasetConfig('texts', task_feature_lengths, 'train', batch_size, False, 0, source='builtin')
  converter.check(task_feature_lengths, ['inputs', 'targets'], 'texts')
  return converter.element_spec(task_feature_lengths, batch_size, False)


def _converter(model: BaseTransformerModel) -> features_lib.FeatureConverter:
  if not isinstance(model.FEATURE_CONVERTER, str):
    raise ConfigError(f"The model's feature converter is {model.FEATURE_CONVERTER!r}; texts are converted without "
                      f'seqio, so expected a name: {", ".join(features_lib.CONVERTERS)}. Leave feature_converter_cls '
                      'out of the model.')
  return features_lib.get_converter(model.FEATURE_CONVERTER)


class TextInference:
  """Predicts and scores examples, batch by batch; rows that only fill a batch are dropped."""

  def __init__(self, model: BaseTransformerModel, partitioner: partitioning.BasePartitioner, train_state_axes: PyTree,
               task_feature_lengths: Mapping[str, int], batch_size: int, add_eos: bool | Mapping[str, bool] = True,
               length_remedies: Mapping[str, str] | None = None):
    """Compiles and computes nothing yet.

    Args:
      model: the model.
      partitioner: compiles over the mesh.
      train_state_axes: mesh PartitionSpecs of the states that will be given.
      task_feature_lengths: task feature name to length in ids.
      batch_size: rows of a global batch.
      add_eos: whether texts end with the end-of-sequence id, of all features or by name.
      length_remedies: see `ExampleReader`.

    Raises:
      ConfigError: lengths or a batch size that do not fit model or mesh, or a model that has a converter class of seqio
        in place of the name of a feature converter.
    """
    # Model feature name to shape and dtype of a global batch.
    self.element_spec = element_spec(model, task_feature_lengths, batch_size)
    self._converter = _converter(model)
    if not isinstance(add_eos, Mapping):
      add_eos = {'inputs': add_eos, 'targets': add_eos}
    vocabularies = {'inputs': model.input_vocabulary, 'targets': model.output_vocabulary}
    self.reader = text_examples.ExampleReader(self._converter, {
        name: text_examples.TextFeature(vocabulary=vocabulary, add_eos=add_eos[name])
        for name, vocabulary in vocabularies.items()}, task_feature_lengths, length_remedies)
    self._model = model
    self._partitioner = partitioner
    self._axes = train_state_axes
    partitioner.get_data_layout(batch_size)  # refuses a batch that does not divide
    self._own = partitioner.get_rows(batch_size)
    self._batch_size = batch_size
    self._runner = evaluation.PredictRunner(model, partitioner)

  def batches(self, examples: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, jax.Array]]]:
    """Yields (number of examples, global batch), the last one filled up with rows of zeros.

    Args:
      examples: what `reader.read` returned, the same on every process.
    """
    for start in range(0, len(examples), self._batch_size):
      rows = [(example,) for example in examples[start:start + self._batch_size]]
      filled = [*rows, *[()] * (self._batch_size - len(rows))]
      task_rows = [[{name: e[name] for name in self.reader.lengths} for e in filled[row]] for row in self._own]
      batch = self._converter.convert(task_rows, self.reader.lengths, False)
      yield len(rows), data.to_global_arrays(batch, self._partitioner, self.element_spec)

  def predict(self, train_state: TrainState, examples: Sequence[Mapping[str, Any]], *, seed: int = 0, first: int = 0,
              **options: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Decodes examples.

    Args:
      train_state: training or inference state, sharded over the mesh.
      examples: what `reader.read` returned.
      seed: of what is drawn; batch k draws with the key of `seed`, folded with `first` + k.
      first: see `seed`.
      **options: of the model's `predict_batch_with_aux`, e.g. `num_decodes=4, return_all_decodes=True`.

    Returns:
      (ids, auxiliary values): of each example <int32>[length], or [num_decodes, length] where the model returns all
      decodes; and, by name, one value for each example.
    """
    return self._run('predict', train_state, examples, seed, first, options)

  def text(self, ids: np.ndarray) -> str | list[str]:
    """Returns the text of predicted ids, or the texts of several decodes, as the output vocabulary has them."""
    if ids.ndim > 1:
      return [self.text(row) for row in ids]
    return self._model.output_vocabulary.decode(ids.tolist())

  def score(self, train_state: TrainState, examples: Sequence[Mapping[str, Any]],
            **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Computes the log-likelihood of each example's targets.

    Args:
      train_state: see `predict`.
      examples: see `predict`.
      **options: of the model's `score_batch`; with `return_intermediates=True` the auxiliary values are what the
        network has sown.

    Returns:
      (scores, auxiliary values), as in `predict`.
    """
    return self._run('score', train_state, examples, 0, 0, options)

  def evaluate(self, train_state: TrainState, examples: Sequence[Mapping[str, Any]],
               metric_fns: Sequence[Callable[..., Mapping[str, Any]]],
               postprocessor: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Predicts or scores examples, whichever the metrics want, and judges the results.

    Args:
      train_state: see `predict`.
      examples: see `predict`.
      metric_fns: functions whose required parameters are, by name as in seqio, `(targets, predictions)`,
        `(targets, predictions, aux_values)` or `(targets, scores)`; each returns a mapping of metric name to value.
      postprocessor: `fn(text, example=..., is_target=...)`, applied to targets and predictions.

    Returns:
      Metric name to value.

    Raises:
      ConfigError: no function, or one with other parameters.
      DataError: two functions return a metric of one name.
    """
    wanted = [_metric_parameters(fn) for fn in metric_fns]
    if not wanted:
      raise ConfigError('metric_fns is empty; expected at least one function, such as data.exact_match.')

    def process(texts, is_target):
      if postprocessor is None:
        return list(texts)
      return [postprocessor(text, example=example, is_target=is_target)
              for text, example in zip(texts, examples, strict=True)]

    given: dict[str, Any] = {'targets': process([self._target(example) for example in examples], True)}
    if any('predictions' in names for names in wanted):
      ids, given['aux_values'] = self.predict(train_state, examples)
      given['predictions'] = process(map(self.text, ids), False)
    if any('scores' in names for names in wanted):
      given['scores'], _ = self.score(train_state, examples)
    found: dict[str, Any] = {}
    for fn, names in zip(metric_fns, wanted, strict=True):
      metrics = fn(**{name: given[name] for name in names})
      for name in found.keys() & metrics.keys():
        raise DataError(f'Two metric functions return a metric {name!r}; expected each name once.')
      found |= metrics
    return found

  def _target(self, example: Mapping[str, Any]) -> str:
    if 'targets_pretokenized' in example:
      return example['targets_pretokenized']
    return self._model.output_vocabulary.decode(example['targets'].tolist())

  def compile(self, kind: str, train_state: TrainState, **options: Any) -> None:
    """Compiles 'predict' or 'score' with these options ahead of time; otherwise the first call does."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), train_state)
    self._runner.compile(_KINDS[kind], self.element_spec, shapes, self._axes, options)

  def _run(self, kind: str, train_state: TrainState, examples: Sequence[Mapping[str, Any]], seed: int, first: int,
           options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns (outputs, auxiliary values) by example."""
    batches = ((count, first + number, batch) for number, (count, batch) in enumerate(self.batches(examples)))
    found = self._runner.run(_KINDS[kind], batches, train_state, self._axes, seed=seed, options=options)
    results = [jax.tree.map(lambda rows, n=count: rows[:n], outputs if isinstance(outputs, tuple) else (outputs, {}))
               for count, outputs in found]
    return jax.tree.map(_by_example, *results)


def _by_example(*batches: np.ndarray) -> list[Any]:
  """Returns one value per example of an output that came in batches."""
  rows = np.concatenate(batches)
  return rows.tolist() if rows.ndim == 1 else list(rows)


def _metric_parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
  """Returns the names of the parameters that a metric function requires: seqio's contract, they say what it wants."""
  names = tuple(name for name, parameter in inspect.signature(fn).parameters.items()
                if parameter.default is parameter.empty)
  if names not in (('targets', 'predictions'), ('targets', 'predictions', 'aux_values'), ('targets', 'scores')):
    raise ConfigError(f'The metric function {getattr(fn, "__name__", fn)!r} takes ({", ".join(names)}); expected the '
                      'parameters (targets, predictions), (targets, predictions, aux_values) or (targets, scores), by '
                      'these names.')
  return names
