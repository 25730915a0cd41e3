"""Finite batches of seqio Tasks for evaluation, teacher-forced or by decoding with the Task's metrics.

Every process reads the entire split and uses its rows of each batch, so results do not depend on the number of
processes. `seqio_evaluator` uses seqio's Evaluator instead.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
from typing import Any

import jax
import numpy as np

from t5x_lite.data.batches.positions import shard_rows
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import EvalBatches
from t5x_lite.data.interfaces import EvalTask
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.interfaces import IndexedBatches
from t5x_lite.data.interfaces import OutputMetric
from t5x_lite.data.interfaces import batches_of_rows
from t5x_lite.data.interfaces import warn_of_omitted_tasks
from t5x_lite.data.seqio import features as seqio_features
from t5x_lite.data.seqio.packages import element_specs
from t5x_lite.data.seqio.packages import numpy_elements
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import reading
from t5x_lite.data.seqio.packages import seqio
from t5x_lite.data.seqio.packages import tf
from t5x_lite.data.seqio.source import convert
from t5x_lite.data.seqio.source import task_dataset
from t5x_lite.errors import DataError


def open_eval_iterators(
  cfg: DatasetConfig, layout: Any, eval_steps: int | None, feature_converter: Any
) -> dict[str, EvalBatches]:
  """Return task name to batches; see `DataSource.open_eval_iterators`."""
  result = {}
  own = shard_rows(layout)
  if eval_steps is None:
    limit = -1
  else:
    limit = eval_steps * layout.batch_size
  for task, converter in _tasks(cfg, feature_converter):
    dataset = convert(converter, task_dataset(task, cfg, num_epochs=1), cfg, task).take(limit)
    rows = _materialize(dataset, task, cfg)
    result[task.name] = _eval_batches(dataset, rows, layout, own, task, cfg)
  return result


def open_eval_tasks(
  cfg: DatasetConfig, layout: Any, feature_converter: Any, num_examples: int | None
) -> list[EvalTask]:
  """Return the tasks with metrics; see `DataSource.open_eval_tasks`."""
  result = []
  omitted = []
  own = shard_rows(layout)
  for task, converter in _tasks(cfg, feature_converter):
    with quiet():
      if not task.metric_objs:
        omitted.append(task.name)
        continue
    dataset = task_dataset(task, cfg, num_epochs=1)
    if num_examples is not None:
      dataset = dataset.take(num_examples)
    raw_examples = _materialize(dataset, task, cfg)
    features = convert(converter, dataset, cfg, task)
    rows = _materialize(features, task, cfg)
    if len(rows) != len(raw_examples):
      raise DataError(
        f'The feature converter must make one row per example, got {len(rows)} rows for the '
        f'{len(raw_examples)} examples of {task.name!r}. Use a converter that does not pack.'
      )
    result.append(make_eval_task(task, raw_examples, features, rows, layout, own, cfg))
  warn_of_omitted_tasks(result, omitted)
  return result


def make_eval_task(
  task: Any,
  raw_examples: Sequence[dict[str, Any]],
  features: tf.data.Dataset,
  rows: Sequence[dict[str, np.ndarray]],
  layout: Any,
  own: slice,
  cfg: DatasetConfig,
) -> EvalTask:
  """Return the `EvalTask` of a seqio Task with metrics.

  Args:
    task: the Task.
    raw_examples: examples as returned by seqio.
    features: dataset of model features.
    rows: elements of `features`, arrays without a batch dim.
    layout: the partitioner's layout of a batch.
    own: this process's rows of a batch.
    cfg: options of the dataset.
  """
  batches = _eval_batches(features, rows, layout, own, task, cfg)
  table = None
  indexed = _with_indices(batches, layout, own)
  if cfg.use_memory_cache:
    table = {
      name: np.stack([row[name] for row in rows]).astype(spec.dtype, copy=False)
      for name, spec in batches.element_spec.items()
    }
    indexed = batches_of_rows(table, layout.batch_size, own)
  with quiet():
    # seqio also makes an object of each metric function, at the end of the list.
    objects = task.metric_objs[: len(task.metric_objs) - len(task.metric_fns)]
    return EvalTask(
      name=task.name,
      batches=indexed,
      examples=[_as_text(example) for example in raw_examples],
      metric_fns=tuple(task.predict_metric_fns),
      score_metric_fns=tuple(task.score_metric_fns),
      predict_with_aux_metric_fns=tuple(task.predict_with_aux_metric_fns),
      output_metrics=tuple(_output_metric(metric, task, raw_examples) for metric in objects),
      postprocess=functools.partial(_postprocess, task),
      element_spec=batches.element_spec,
      output_vocabulary=task.output_features['targets'].vocabulary,
      rows=table,
      own=own,
    )


# seqio's output types to our kinds.
KINDS = {
  seqio.metrics.ModelOutputType.PREDICTION: 'predict',
  seqio.metrics.ModelOutputType.SCORE: 'score',
  seqio.metrics.ModelOutputType.PREDICTION_WITH_AUX: 'predict_with_aux',
  seqio.metrics.ModelOutputType.SCORE_WITH_INTERMEDIATES: 'score_with_intermediates',
}


def _output_metric(metric: Any, task: Any, raw_examples: Sequence[dict[str, Any]]) -> OutputMetric:
  def compute(outputs: Any) -> Mapping[str, Any]:
    with quiet():
      judged = metric.from_model_output(raw_examples, outputs, task.output_features, 'targets')
      if isinstance(judged, seqio.metrics.CollectingMetric):
        return judged.actual_compute(raw_examples, task.output_features, 'targets', [])[0]
      return judged.compute()

  return OutputMetric(kind=KINDS[metric.model_output_type], compute_fn=compute)


def _postprocess(task: Any, text: Any, *, example: Mapping[str, Any], is_target: bool) -> Any:
  """Call the Task's postprocessor like seqio, with the texts of the example as bytes."""
  encoded = dict(example)
  for name, value in example.items():
    if isinstance(value, str):
      encoded[name] = value.encode('utf-8')
  return task.postprocess_fn(text, example=encoded, is_target=is_target)


def _tasks(cfg: DatasetConfig, feature_converter: Any) -> Iterator[tuple[Any, Any]]:
  """Yield (task, converter) of each task with the split."""
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  for task in seqio_features.subtasks_with_split(provider, cfg.split):
    yield task, seqio_features.get_converter(cfg, feature_converter, task)


def _materialize(
  dataset: tf.data.Dataset, task: Any, cfg: DatasetConfig
) -> list[dict[str, np.ndarray]]:
  """Return all elements of `dataset` as NumPy arrays.

  Raises:
    DataError: the dataset is empty, or reading fails.
  """
  with reading(cfg, task):
    rows = list(numpy_elements(dataset))
  check_not_empty(rows, cfg.split, task.name)
  return rows


def _eval_batches(
  dataset: tf.data.Dataset,
  rows: Sequence[dict[str, np.ndarray]],
  layout: Any,
  own: slice,
  task: Any,
  cfg: DatasetConfig,
) -> EvalBatches:
  spec = {}
  for name, element in element_specs(dataset).items():
    shape = (layout.batch_size, *element.shape)
    spec[name] = jax.ShapeDtypeStruct(shape, element.dtype.as_numpy_dtype)
  num_examples = len(rows)
  keep = rows if cfg.use_memory_cache else None

  def batches() -> Iterator[HostBatch]:
    if keep is None:
      current = _materialize(dataset, task, cfg)
    else:
      current = keep
    for start in range(0, num_examples, layout.batch_size):
      mine = current[start : start + layout.batch_size][own]
      batch = {
        name: np.zeros((own.stop - own.start, *s.shape[1:]), s.dtype) for name, s in spec.items()
      }
      for name, array in batch.items():
        for i, row in enumerate(mine):
          array[i] = row[name]
      yield batch

  return EvalBatches(batches, spec, -(-num_examples // layout.batch_size), num_examples)


def _with_indices(batches: EvalBatches, layout: Any, own: slice) -> IndexedBatches:
  def indexed() -> Iterator[tuple[np.ndarray, HostBatch]]:
    for k, batch in enumerate(batches):
      indices = np.arange(k * layout.batch_size, (k + 1) * layout.batch_size, dtype=np.int32)
      indices[indices >= batches.num_examples] = -1
      yield indices[own], batch

  return IndexedBatches(indexed, len(batches))


def _as_text(example: dict[str, Any]) -> dict[str, Any]:
  """Return `example` with decoded `*_pretokenized` texts; other fields are unchanged."""
  decoded = dict(example)
  for name, value in example.items():
    if name.endswith('_pretokenized') and isinstance(value, bytes):
      decoded[name] = value.decode('utf-8')
  return decoded
