"""Part of an evaluation that runs on the host: decoding of texts, postprocessing, metrics, and rows of predictions."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import sys
from typing import Any

import clu.values
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import data
from t5x_lite.data.interfaces import REFERENCES
from t5x_lite.errors import DataError
from t5x_lite.storage import files
from t5x_lite.storage import json_lines
from t5x_lite.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationResult:
  """Result of an evaluation of one task.

  Attributes:
    metrics: metrics by name.
    predictions: rows for `write_predictions` of the first examples: index, the texts `inputs` and `targets` if the task
      keeps them, `references` if a target has several texts, and the outputs of the model: `prediction` (a list for
      several decodes), `score`, `aux`.
  """

  metrics: Mapping[str, clu.values.Value]
  predictions: Sequence[Mapping[str, Any]]


def compute_metrics(
  task: data.EvalTask, outputs: Mapping[str, PyTree], num_predictions: int | None = None
) -> EvaluationResult:
  """Compute the metrics of a task.

  Args:
    task: the task.
    outputs: result of `OutputRunner.run`.
    num_predictions: number of examples whose predictions are returned; None for all.

  Raises:
    DataError: a metric cannot be written, or two metrics have the same name.
  """
  outputs = {kind: as_numpy(tree) for kind, tree in outputs.items()}
  texts = decode_texts(task, outputs)
  predictions = prediction_rows(task, outputs, texts, num_predictions)
  metrics: dict[str, Any] = {}

  def add(fn, result):
    for name, value in _as_mapping(fn, result).items():
      if name in metrics:
        raise DataError(f'Two metrics of {task.name!r} have the name {name!r}. Rename one of them.')
      metrics.update(as_values(name, value))

  if task.metric_fns or task.score_metric_fns or task.predict_with_aux_metric_fns:
    targets = task.targets()
  if texts is not None and (task.metric_fns or task.predict_with_aux_metric_fns):
    processed = [
      task.postprocess(text, example=example, is_target=False)
      for text, example in zip(texts, task.examples, strict=True)
    ]
  for fn in task.metric_fns:
    add(fn, fn(targets, processed))
  for fn in task.score_metric_fns:
    add(fn, task.call_score_metric(fn, targets, outputs['score']))
  for fn in task.predict_with_aux_metric_fns:
    add(fn, fn(targets, processed, outputs['predict_with_aux'][1]))
  for metric in task.output_metrics:
    add(metric.compute_fn, metric.compute_fn(outputs[metric.kind]))
  return EvaluationResult(metrics=metrics, predictions=predictions)


def as_numpy(tree: PyTree) -> PyTree:
  """Return arrays with 64-bit dtypes, as seqio converts Python's numbers, so that metrics get the same values."""

  def convert(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
      return np.asarray(x, np.float64)
    if jnp.issubdtype(x.dtype, jnp.integer):
      return np.asarray(x, np.int64)
    return np.asarray(x)

  return jax.tree.map(convert, tree)


def decode_texts(task: data.EvalTask, outputs: Mapping[str, PyTree]) -> list[Any] | None:
  """Return the text of each prediction, a list for several decodes; None without predictions."""
  if 'predict' in outputs:
    tokens = outputs['predict']
  elif 'predict_with_aux' in outputs:
    tokens = outputs['predict_with_aux'][0]
  else:
    return None

  def decode(row):
    if row.ndim > 1:
      return [decode(part) for part in row]
    return task.decode(row.tolist())

  return [decode(row) for row in tokens]


def prediction_rows(
  task: data.EvalTask,
  outputs: Mapping[str, PyTree],
  texts: Sequence[Any] | None,
  num_rows: int | None,
) -> list[dict[str, Any]]:
  """Return `EvaluationResult.predictions`.

  Args:
    task: the task.
    outputs: result of `OutputRunner.run`.
    texts: result of `decode_texts`.
    num_rows: number of examples; None for all.
  """
  rows = []
  scores = outputs.get('score', outputs.get('score_with_intermediates', (None,))[0])
  aux = outputs.get('predict_with_aux', (None, {}))[1]
  for i, example in enumerate(task.examples[:num_rows]):
    row: dict[str, Any] = {'index': i}
    for name in ('inputs', 'targets'):
      if f'{name}_pretokenized' in example:
        row[name] = example[f'{name}_pretokenized']
    if REFERENCES in example:
      row['references'] = example[REFERENCES]
    if texts is not None:
      row['prediction'] = texts[i]
    if scores is not None:
      row['score'] = float(scores[i])
    if aux:
      row['aux'] = {name: value[i].tolist() for name, value in aux.items()}
    rows.append(row)
  return rows


def write_predictions(
  path: str | os.PathLike[str], predictions: Sequence[Mapping[str, Any]]
) -> None:
  """Write one JSON object per line, atomically.

  Args:
    path: path of the file; missing folders are created.
    predictions: the rows.

  Raises:
    OSError: e.g. the disk is full; no partial file remains.
  """
  path = files.path(path)
  files.make_folder_of(path)
  files.write(path, ''.join(map(json_lines.to_line, predictions)), durable=False, behind=True)


def as_value(name: str, value: Any) -> clu.values.Value:
  """Return a metric's result as a clu value.

  Raises:
    DataError: the result is neither a number nor a text.
  """
  is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
  if is_number and np.size(value) == 1:
    return clu.values.Scalar(float(np.asarray(value).reshape(())))
  found: Any = value
  if isinstance(value, _value_classes('Scalar')):
    return clu.values.Scalar(float(np.asarray(found.value)))
  if isinstance(value, _value_classes('Text')):
    if isinstance(value, clu.values.Text):
      text = value.value
    else:
      text = found.textdata
    if isinstance(text, bytes):
      text = text.decode('utf-8', errors='replace')
    return clu.values.Text(str(text))
  raise DataError(
    f'The metric {name!r} must be a number, or a Scalar or Text of clu or seqio, got a '
    f'{type(value).__name__}. For other kinds, set inference_evaluator_cls = @seqio.Evaluator and its '
    'logger_cls.'
  )


def as_values(name: str, value: Any) -> dict[str, clu.values.Value]:
  """Return a metric's result as a clu value by name, and its signature, if it has one, as `<name>_signature`.

  Raises:
    DataError: see `as_value`.
  """
  found = {name: as_value(name, value)}
  number = value
  if isinstance(value, _value_classes('Scalar')):
    number = value.value
  if isinstance(number, data.ScoreWithSignature):
    found[f'{name}_signature'] = clu.values.Text(number.signature)
  return found


def as_number(name: str, value: Any) -> float:
  """Return a metric's result, a number or a `Scalar` of clu or seqio, as a float.

  Raises:
    DataError: the result is not a number.
  """
  if isinstance(value, _value_classes('Scalar')):
    number = value.value
  else:
    number = value
  try:
    return float(np.asarray(number))
  except (TypeError, ValueError):
    raise DataError(f'The metric {name!r} must be a number, got {value!r}.') from None


def _value_classes(name: str) -> tuple[type, ...]:
  """Return the classes of this name for metrics: clu's, and seqio's if seqio is imported."""
  classes = [getattr(clu.values, name)]
  if sys.modules.get('seqio') is not None:
    from t5x_lite.data.seqio.packages import seqio

    classes.append(getattr(seqio.metrics, name))
  return tuple(classes)


def _as_mapping(fn: Callable[..., Any], result: Any) -> Mapping[str, Any]:
  """Return the result of a metric function; raise if it is not a mapping."""
  if isinstance(result, Mapping):
    return result
  raise DataError(
    f'The metric function {getattr(fn, "__name__", fn)!r} must return a mapping of metric name to value, '
    f"e.g. {{'accuracy': 0.5}}, got {result!r}."
  )
