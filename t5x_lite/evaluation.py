"""Evaluation by real decoding: every example of a split is predicted once, and the task's own metrics judge the texts.

Results go to `inference_eval/<task>/`: TensorBoard events, `metrics.jsonl`, and `predictions-<step>.jsonl` with the
first examples beside their predictions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import os
import pathlib
import time
from typing import Any

import clu.values
import jax
import numpy as np

from t5x_lite import data
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import summaries
from t5x_lite import train_step
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.models import BaseModel
from t5x_lite.train_state import TrainState
from t5x_lite.types import Array, Batch, PyTree

PREDICTIONS_PREFIX = 'predictions-'


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationResult:
  """What an evaluation of one task found.

  Attributes:
    metrics: metric name to value.
    predictions: for every example that is predicted, what `write_predictions` writes of it: its index, `inputs` and
      `targets` as text where the task keeps them, and `prediction`; with `score` where the task has metrics of scores.
  """

  metrics: Mapping[str, clu.values.Value]
  predictions: Sequence[Mapping[str, Any]]


class InferenceEvaluator:
  """Decodes the tasks of a dataset configuration and computes their metrics."""

  def __init__(self, infer_eval_dataset_cfg: data.DatasetConfig, inference_evaluator_cls: Any, model: BaseModel,
               partitioner: partitioning.BasePartitioner, log_dir: str | None = None,
               verify_matching_vocabs_fn: Callable[[data.DatasetConfig, BaseModel], None] | None = (
                   data.verify_matching_vocabs), *,
               num_examples_to_write: int | None = 1000):
    """Reads the examples; computes and writes nothing yet.

    Args:
      infer_eval_dataset_cfg: what to decode.
      inference_evaluator_cls: None. T5X hands the work to seqio's Evaluator here, this class does it itself.
      model: the model.
      partitioner: compiles over the mesh.
      log_dir: the model directory, or None to write nothing.
      verify_matching_vocabs_fn: refuses data whose vocabulary is not the model's; None does not look.
      num_examples_to_write: how many predictions to write at each evaluation; None writes all.

    Raises:
      ConfigError: an option is out of range, or the configuration does not fit the model.
      DataError: no task has metrics.
    """
    check_evaluator_cls(inference_evaluator_cls)
    if num_examples_to_write is not None and num_examples_to_write < 0:
      raise ConfigError(f'num_examples_to_write is {num_examples_to_write}; expected at least 0, or None for all.')
    if verify_matching_vocabs_fn is not None:
      verify_matching_vocabs_fn(infer_eval_dataset_cfg, model)
    layout = partitioner.get_data_layout(infer_eval_dataset_cfg.batch_size)
    self._tasks = data.open_eval_tasks(infer_eval_dataset_cfg, layout, feature_converter=model.FEATURE_CONVERTER)
    if not self._tasks:
      raise DataError(f'No task of {infer_eval_dataset_cfg.name!r} has metrics to evaluate by decoding. Give the task '
                      'metric functions, or set infer_eval_dataset_cfg to None.')
    self._model = model
    self._partitioner = partitioner
    self._num_examples_to_write = num_examples_to_write
    self._log_dir = None if log_dir is None else pathlib.Path(log_dir)
    self._managers = {
        task.name: summaries.MetricsManager(f'inference_eval/{task.name}', log_dir) for task in self._tasks}

  @property
  def eval_tasks(self) -> Sequence[data.EvalTask]:
    """The tasks that are evaluated."""
    return self._tasks

  @property
  def model_feature_shapes(self) -> dict[str, tuple[int, ...]]:
    """Feature name to the shape of a global batch, the largest over the tasks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for task in self._tasks:
      for name, spec in task.element_spec.items():
        shapes[name] = tuple(np.maximum(shapes.get(name, spec.shape), spec.shape).tolist())
    return shapes

  def flush(self) -> None:
    """Waits until all results are on disk."""
    for manager in self._managers.values():
      manager.flush()

  def close(self) -> None:
    """Finishes pending writes."""
    for manager in self._managers.values():
      manager.close()

  def evaluate(self, train_state: TrainState, train_state_axes: PyTree, *, step: int | None = None,
               note_fn: Callable[[str], None] = lambda text: None) -> dict[str, EvaluationResult]:
    """Evaluates a state on every task.

    Args:
      train_state: training or inference state, sharded over the mesh.
      train_state_axes: its mesh PartitionSpecs.
      step: the number under which results are written; by default the state's.
      note_fn: told what is going on, from time to time.

    Returns:
      Task name to result, the same on every process.

    Raises:
      DataError: a metric returned something that cannot be written.
    """
    step = int(train_state.step) if step is None else step
    results = {}
    for task in self._tasks:
      start = time.perf_counter()
      results[task.name] = result = self._evaluate_task(task, train_state, train_state_axes, note_fn)
      manager = self._managers[task.name]
      manager.write_values(step, result.metrics)
      manager.write_scalars(step, {'timing/evaluation_seconds': time.perf_counter() - start}, events_only=True)
      if self._log_dir is not None and multihost.is_lead():
        folder = self._log_dir / 'inference_eval' / task.name
        write_predictions(folder / f'{PREDICTIONS_PREFIX}{step}.jsonl',
                          result.predictions[:self._num_examples_to_write])
    return results

  def _evaluate_task(self, task: data.EvalTask, train_state, train_state_axes, note_fn) -> EvaluationResult:
    predictions = [{'index': i, **_texts(example)} for i, example in enumerate(task.examples)]
    metrics: dict[str, Any] = {}
    if task.metric_fns:
      run = functools.partial(self._run, task, self._predict_step(train_state_axes), train_state)
      tokens = _by_example(run(note_fn=lambda k, n: note_fn(f'decoding {task.name}: batch {k} of {n}')), task)
      texts = [task.output_vocabulary.decode([int(i) for i in row]) for row in tokens]
      processed = [task.postprocess(text, example=example, is_target=False)
                   for text, example in zip(texts, task.examples, strict=True)]
      for row, text in zip(predictions, texts, strict=True):
        row['prediction'] = text
      targets = task.targets()
      for fn in task.metric_fns:
        metrics.update(_as_mapping(fn, fn(targets, processed)))
    if task.score_metric_fns:
      run = functools.partial(self._run, task, self._score_step(train_state_axes), train_state)
      scores = [float(x) for x in
                _by_example(run(note_fn=lambda k, n: note_fn(f'scoring {task.name}: batch {k} of {n}')), task)]
      for row, score in zip(predictions, scores, strict=True):
        row['score'] = score
      targets = task.targets()
      for fn in task.score_metric_fns:
        metrics.update(_as_mapping(fn, fn(targets, scores)))
    return EvaluationResult(metrics={name: _as_value(name, value) for name, value in metrics.items()},
                            predictions=predictions)

  def _run(self, task, step_fn, train_state, *, note_fn) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (indices, outputs) of each global batch; the device works on one batch while the host reads the last."""
    waiting = None
    for number, (indices, batch) in enumerate(task.batches):
      note_fn(number + 1, len(task.batches))
      spec = {**task.element_spec, _INDICES: jax.ShapeDtypeStruct((_num_rows(task.element_spec),), np.int32)}
      arrays = data.to_global_arrays({**batch, _INDICES: indices}, self._partitioner, spec)
      # Indices travel with the rows: with several processes none has those of the whole batch otherwise.
      outputs = step_fn(train_state, arrays, np.int32(number))
      if waiting is not None:
        yield jax.device_get(waiting)
      waiting = outputs
    if waiting is not None:
      yield jax.device_get(waiting)

  def _predict_step(self, train_state_axes):
    def predict(train_state, batch, rng):
      return self._model.predict_batch(train_state.params, batch, rng=rng, **_mutables(train_state))
    return self._step('predict', predict, train_state_axes)

  def _score_step(self, train_state_axes):
    def score(train_state, batch, rng):
      del rng
      return self._model.score_batch(train_state.params, batch, **_mutables(train_state))
    return self._step('score', score, train_state_axes)

  @functools.cached_property
  def _steps(self) -> dict[str, Callable[..., tuple[Array, Array]]]:
    return {}

  def _step(self, name: str, fn: Callable[[TrainState, Batch, Array], Array], train_state_axes: PyTree):
    """Returns the compiled form of `fn` with (indices, rows) as result on every process, made at the first call."""
    if name not in self._steps:
      data_spec = self._partitioner.data_partition_spec

      def step_fn(train_state, batch, number):
        batch = dict(batch)
        indices = batch.pop(_INDICES)
        return indices, fn(train_state, batch, jax.random.fold_in(jax.random.key(0), number))

      self._steps[name] = self._partitioner.partition(
          step_fn, in_axis_resources=(train_state_axes, data_spec, None), out_axis_resources=None)
    return self._steps[name]


_INDICES = 'example_indices'


def check_evaluator_cls(inference_evaluator_cls: Any) -> None:
  """Refuses anything but None for the argument through which T5X takes seqio's Evaluator.

  Raises:
    ConfigError: it is something.
  """
  if inference_evaluator_cls is not None:
    raise ConfigError(
        f'inference_evaluator_cls is {inference_evaluator_cls!r}; expected None: t5x_lite decodes, judges and logs by '
        'itself. Leave the option out. All examples of the split are evaluated.')


def check_eval_batch(cfg: data.DatasetConfig | None, partitioner: partitioning.BasePartitioner) -> None:
  """Refuses a batch size of an evaluation that does not divide over the data axes."""
  if cfg is not None:
    train_step.check_microbatches(cfg.batch_size, None, partitioner.data_mesh_size)


def write_predictions(path: str | os.PathLike[str], predictions: Sequence[Mapping[str, Any]]) -> None:
  """Writes one JSON object a line, atomically."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'{path.name}.tmp')
  temporary.write_text(
      ''.join(json.dumps(row, ensure_ascii=False, default=_jsonable) + '\n' for row in predictions), encoding='utf-8')
  temporary.replace(path)


def _num_rows(element_spec: Mapping[str, jax.ShapeDtypeStruct]) -> int:
  return next(iter(element_spec.values())).shape[0]


def _mutables(train_state: TrainState) -> dict[str, Any]:
  mutables = tree_utils.to_dict(train_state.flax_mutables)
  return {'flax_mutables': mutables} if mutables else {}


def _by_example(batches: Iterator[tuple[np.ndarray, np.ndarray]], task: data.EvalTask) -> list[np.ndarray]:
  """Returns the outputs in the order of the task's examples; rows of index -1 are filling."""
  outputs: list[np.ndarray | None] = [None] * len(task.examples)
  for indices, rows in batches:
    for index, row in zip(indices.tolist(), rows, strict=True):
      if index >= 0:
        outputs[index] = row
  missing = [i for i, output in enumerate(outputs) if output is None]
  if missing:
    raise DataError(f'The batches of {task.name!r} left out {len(missing)} of {len(outputs)} examples, the first '
                    f'number {missing[0]}. Evaluate an unpacked split without filters that depend on the batch.')
  return outputs


def _texts(example: Mapping[str, Any]) -> dict[str, Any]:
  return {name: example[f'{name}_pretokenized'] for name in ('inputs', 'targets') if f'{name}_pretokenized' in example}


def _as_mapping(fn: Callable[..., Any], result: Any) -> Mapping[str, Any]:
  """Returns what a metric function returned, if it is what seqio's convention says."""
  if isinstance(result, Mapping):
    return result
  raise DataError(f'The metric function {getattr(fn, "__name__", fn)!r} returned {result!r}; expected a mapping from '
                  "metric name to value, e.g. {'accuracy': 0.5}.")


def _as_value(name: str, value: Any) -> clu.values.Value:
  """Returns a metric's result as a clu value; seqio's classes of the same names have the same `value`."""
  if isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
    return clu.values.Scalar(float(np.asarray(value)))
  kind = type(value).__name__
  if kind == 'Scalar':
    return clu.values.Scalar(float(np.asarray(value.value)))
  if kind == 'Text':
    return clu.values.Text(str(value.value))
  raise DataError(f'The metric {name!r} is a {kind}; expected a number, or a Scalar or Text of clu or seqio.')


def _jsonable(value: Any) -> Any:
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    return np.asarray(value).tolist()
  if isinstance(value, bytes):
    return value.decode('utf-8', errors='replace')
  return str(value)
