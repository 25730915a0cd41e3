"""Evaluation by decoding: every example of a split is predicted once, and the task's metrics are computed.

Results are written to `inference_eval/<task>/`: TensorBoard events, `metrics.jsonl`, and `predictions-<step>.jsonl`
with the first examples and their predictions; means over several tasks are written to `inference_eval/mean/`.

The outputs of the model are computed before `evaluate` returns, so that training may overwrite the parameters. Texts,
postprocessing, metrics and files need only these outputs; with `concurrent_metrics` they are computed in a thread while
training continues.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import time
from typing import Any, Protocol

import clu.values
import jax

from t5x_lite import checks
from t5x_lite import data
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite.errors import DataError, call_all
from t5x_lite.evaluation import judging
from t5x_lite.evaluation import metric_names
from t5x_lite.evaluation.config import InferenceEvalConfig
from t5x_lite.evaluation.outputs import OutputRunner
from t5x_lite.models import BaseModel
from t5x_lite.storage import files
from t5x_lite.train_state import EvaluationState
from t5x_lite.trainer import summaries
from t5x_lite.trainer import train_step
from t5x_lite.types import PyTree

MetricsByTask = dict[str, dict[str, clu.values.Value]]


class NoMetricsError(DataError):
  """Error for tasks without metrics."""


class AllMetricsFuture(Protocol):
  """Future of metrics by task."""

  def result(self) -> MetricsByTask:
    """Wait for the metrics and return them by task and name; raise errors of the computation."""
    ...

  def done(self) -> bool:
    """Return whether `result` returns or raises immediately."""
    ...


class EvaluatorConstructor(Protocol):
  """Constructor of seqio's Evaluator, possibly with bound options, for `inference_evaluator_cls`."""

  def __call__(
    self,
    mixture_or_task_name: str,
    feature_converter: Any,
    eval_split: str,
    use_cached: bool,
    seed: int | None,
    sequence_length: Mapping[str, int] | None,
    log_dir: str | None,
    use_memory_cache: bool,
  ) -> Any:
    """Return the Evaluator; the arguments are those of `seqio.Evaluator`."""
    ...


class InferenceEvaluator:
  """Decodes the tasks of a dataset configuration and computes their metrics."""

  def __init__(
    self,
    infer_eval_dataset_cfg: data.DatasetConfig,
    inference_evaluator_cls: Any,
    model: BaseModel,
    partitioner: partitioning.BasePartitioner,
    log_dir: str | None = None,
    verify_matching_vocabs_fn: Callable[[data.DatasetConfig, BaseModel], None] | None = (
      data.verify_matching_vocabs
    ),
    *,
    cfg: InferenceEvalConfig = InferenceEvalConfig(),
    concurrent_metrics: bool = False,
    folder: str = metric_names.INFERENCE_EVAL,
  ):
    """Read the examples; compute and write nothing.

    Args:
      infer_eval_dataset_cfg: evaluation data.
      inference_evaluator_cls: None, or seqio's Evaluator with its options bound, which then computes the metrics from
        the outputs and passes them to its loggers; the metrics are the same.
      model: the model.
      partitioner: partitioner of the programs.
      log_dir: the run directory, or None to write nothing.
      verify_matching_vocabs_fn: raises if the vocabularies of data and model differ; None skips the check.
      cfg: options of the evaluation.
      concurrent_metrics: compute metrics in a thread.
      folder: folder of the results in `log_dir`.

    Raises:
      ConfigError: an option is out of range, or the model does not support the data.
      NoMetricsError: no task has metrics.
    """
    infer_eval_dataset_cfg.check()
    check_evaluator_cls(inference_evaluator_cls, infer_eval_dataset_cfg, cfg)
    if cfg.decode_fn is not None:
      model = model.with_decode_fn(cfg.decode_fn)
    if verify_matching_vocabs_fn is not None:
      verify_matching_vocabs_fn(infer_eval_dataset_cfg, model)
    layout = partitioner.get_data_layout(infer_eval_dataset_cfg.batch_size)
    if log_dir is None:
      self._folder = None
    else:
      self._folder = files.path(log_dir) / folder
    self._seqio: Any = None
    if inference_evaluator_cls is None:
      self._tasks = data.open_eval_tasks(
        data.with_feature_lengths(
          infer_eval_dataset_cfg,
          feature_converter=model.FEATURE_CONVERTER,
          decodes=True,
          num_examples=cfg.num_examples,
          folder=log_dir,
        ),
        layout,
        feature_converter=model.FEATURE_CONVERTER,
        num_examples=cfg.num_examples,
      )
    else:
      from t5x_lite.data.seqio import evaluator as seqio_evaluator

      self._seqio = seqio_evaluator.SeqioEvaluator(
        inference_evaluator_cls,
        infer_eval_dataset_cfg,
        layout,
        model.FEATURE_CONVERTER,
        log_dir=self._folder,
        writes=multihost.is_lead(),
      )
      self._tasks = self._seqio.tasks
    if cfg.metric_fns is not None:
      changes = {
        'metric_fns': tuple(cfg.metric_fns),
        'score_metric_fns': (),
        'predict_with_aux_metric_fns': (),
        'output_metrics': (),
      }
      self._tasks = [dataclasses.replace(task, **changes) for task in self._tasks]
    if not self._tasks:
      raise NoMetricsError(
        f'No task of {infer_eval_dataset_cfg.name!r} has metrics for evaluation by decoding. Add '
        'metric functions to the task, or remove this evaluation.'
      )
    for task in self._tasks:
      if any(kind.startswith('predict') for kind in task.kinds):
        model.check_prediction_features(task.element_spec)
    names = [task.name for task in self._tasks]
    if len(names) > 1:
      metric_names.check_task_names(names)
      names.append(metric_names.MEAN)
    self._num_examples_to_write = cfg.num_examples_to_write
    self._runner = OutputRunner(model, partitioner, cfg)
    self._managers = {}
    for name in names:
      self._managers[name] = summaries.MetricsManager(f'{folder}/{name}', log_dir)
    self._worker = None
    if concurrent_metrics:
      self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='inference-eval')
    self._pending: list[concurrent.futures.Future] = []
    # Files of predictions that could not be written yet, oldest first.
    self._unwritten: list[tuple[files.Path, Sequence[Mapping[str, Any]]]] = []

  @property
  def eval_tasks(self) -> Sequence[data.EvalTask]:
    """Tasks that are evaluated."""
    return self._tasks

  @property
  def model_feature_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shape of a global batch by feature, the largest over the tasks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for task in self._tasks:
      for name, spec in task.element_spec.items():
        shape: Any = spec.shape
        shapes[name] = tuple(map(max, shapes.setdefault(name, shape), shape))
    return shapes

  @property
  def num_batches(self) -> int:
    """Number of batches per evaluation."""
    return sum(map(self._runner.num_batches, self._tasks))

  def programs(
    self, train_state: EvaluationState, train_state_axes: PyTree
  ) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Return the programs that `evaluate` compiles; see `OutputRunner.programs`."""
    return self._runner.programs(self._tasks, train_state, train_state_axes)

  def check(self, train_state: EvaluationState, train_state_axes: PyTree) -> None:
    """Raise if the model does not support the tasks or its decoding options; see `OutputRunner.check`."""
    self._runner.check(self._tasks, train_state, train_state_axes)

  def flush(self) -> None:
    """Wait until all results are on disk; raise errors of the background thread.

    Raises:
      OSError: e.g. the disk is full; no result is lost, and the next flush tries again.
    """
    pending = self._pending
    self._pending = []
    concurrent.futures.wait(pending)  # Also if one raises: afterwards, the thread no longer writes.
    call_all(
      [
        *(future.result for future in pending),
        self._write_predictions,
        *(manager.flush for manager in self._managers.values()),
      ]
    )

  def close_files(self) -> None:
    """Wait for all results and close the metrics files; see `MetricsManager.close_files`."""
    try:
      self.flush()
    except OSError:
      self._unwritten.clear()
    for manager in self._managers.values():
      manager.close_files()

  def close(self) -> None:
    """Finish pending writes; `flush` raises their errors."""
    if self._worker is not None:
      self._worker.shutdown(wait=True)
    with contextlib.suppress(OSError):
      self._write_predictions()
    for manager in self._managers.values():
      manager.close()

  def evaluate(
    self,
    train_state: EvaluationState,
    train_state_axes: PyTree,
    *,
    step: int | None = None,
    note_fn: Callable[[str], None] = lambda text: None,
    compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    read_fn: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, doing: batches,
  ) -> AllMetricsFuture:
    """Evaluate a state on every task.

    Args:
      train_state: training or inference state, sharded over the mesh; it may be overwritten when this returns.
      train_state_axes: mesh PartitionSpecs of the state.
      step: step of the results; default: the state's.
      note_fn: called before each batch with a description of the work; its errors end the evaluation.
      compiling_fn: returns the context in which programs are compiled.
      read_fn: iterates over its first argument, the batches of a task that are not in memory; the second argument
        describes the work.

    Returns:
      Future of metrics by task and name, the same on every process. The future, or `flush`, raises DataError for a
      metric that cannot be written. Results that a full disk cannot hold are kept for `flush`.
    """
    if step is None:
      current: Any = train_state.step
      step = int(current)
    parts = []
    outputs = {}
    for task in self._tasks:
      start = time.perf_counter()
      outputs[task.name] = found = self._runner.run(
        task, train_state, train_state_axes, note_fn, compiling_fn, read_fn
      )
      if self._seqio is None:
        # The devices compute the next task at the same time.
        parts.append(self._submit(self._compute_metrics, task, found, step, start))
    if self._seqio is not None:
      parts.append(self._submit(self._compute_metrics_by_seqio, outputs, step))
    return self._submit(self._conclude, parts, step)

  def _submit(self, fn: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
    if self._worker is not None:
      future = self._worker.submit(fn, *args)
    else:
      future = concurrent.futures.Future()
      future.set_result(fn(*args))
    self._pending = [f for f in self._pending if not f.done() or f.exception() is not None]
    self._pending.append(future)
    return future

  def _compute_metrics(
    self, task: data.EvalTask, outputs: Mapping[str, PyTree], step: int, start: float
  ) -> MetricsByTask:
    result = judging.compute_metrics(task, outputs, self._num_examples_to_write)
    self._write(task.name, step, result.metrics, result.predictions)
    self._managers[task.name].write_scalars(
      step, {'timing/evaluation_seconds': time.perf_counter() - start}, events_only=True
    )
    return {task.name: dict(result.metrics)}

  def _compute_metrics_by_seqio(
    self, outputs: Mapping[str, Mapping[str, PyTree]], step: int
  ) -> MetricsByTask:
    plain = {}
    for name, found in outputs.items():
      plain[name] = {kind: judging.as_numpy(tree) for kind, tree in found.items()}
    metrics = {}
    for name, found in self._seqio.judge(step, plain).items():
      metrics[name] = {}
      for metric, value in found.items():
        with contextlib.suppress(DataError):  # Images and the like are for seqio's loggers.
          metrics[name] |= judging.as_values(metric, value)
    for task in self._tasks:
      texts = judging.decode_texts(task, plain[task.name])
      self._write(
        task.name,
        step,
        metrics[task.name],
        judging.prediction_rows(task, plain[task.name], texts, self._num_examples_to_write),
      )
    return metrics

  def _write(
    self, name: str, step: int, metrics: Mapping[str, clu.values.Value], predictions: Any
  ) -> None:
    self._managers[name].write_values(step, metrics)
    if self._folder is not None and multihost.is_lead():
      self._unwritten.append(
        (self._folder / name / f'{summaries.PREDICTIONS_PREFIX}{step}.jsonl', predictions)
      )
      with contextlib.suppress(OSError):  # `flush` raises it.
        self._write_predictions()

  def _write_predictions(self) -> None:
    """Write pending files of predictions in order; raise OSError e.g. if the disk is full."""
    while self._unwritten:
      path, predictions = self._unwritten.pop(0)
      try:
        judging.write_predictions(path, predictions)
      except OSError:
        self._unwritten.insert(0, (path, predictions))
        raise

  def _conclude(self, parts: Sequence[concurrent.futures.Future], step: int) -> MetricsByTask:
    """Collect the metrics of all tasks and write their means; the thread has computed the tasks before."""
    metrics: MetricsByTask = {}
    for part in parts:
      metrics |= part.result()
    if metric_names.MEAN in self._managers:
      self._managers[metric_names.MEAN].write_values(step, metric_names.mean_over_tasks(metrics))
    return metrics


def check_evaluator_cls(
  inference_evaluator_cls: Any,
  dataset_cfg: data.DatasetConfig | None,
  cfg: InferenceEvalConfig = InferenceEvalConfig(),
) -> None:
  """Raise if the evaluator is not supported, or if options conflict with its own.

  Args:
    inference_evaluator_cls: None or seqio's Evaluator.
    dataset_cfg: evaluation data, or None.
    cfg: options of the evaluation.

  Raises:
    ConfigError: see above.
  """
  if inference_evaluator_cls is None:
    return
  expectation = ''
  if not callable(inference_evaluator_cls):
    expectation = (
      'None or a class such as seqio.Evaluator (in gin @seqio.Evaluator, without parentheses)'
    )
  elif dataset_cfg is not None and not data.get_source(dataset_cfg).supports_seqio_evaluator:
    expectation = f"None unless `DatasetConfig.source` is 'seqio' (it is {dataset_cfg.source!r})"
  checks.check(
    '',
    {
      'inference_evaluator_cls': inference_evaluator_cls,
      'num_examples': cfg.num_examples,
      'metric_fns': cfg.metric_fns,
    },
    inference_evaluator_cls=checks.Expectation(
      expectation, lambda _: not expectation, 'With None, t5x_lite computes the same metrics.'
    ),
    num_examples=checks.Expectation(
      'None with an inference_evaluator_cls',
      lambda number: number is None,
      'Set seqio.Evaluator.num_examples instead.',
    ),
    metric_fns=checks.Expectation('None with an inference_evaluator_cls', lambda fns: fns is None),
  )


def check_eval_batch(
  cfg: data.DatasetConfig | None, partitioner: partitioning.BasePartitioner
) -> None:
  """Raise ConfigError if the batch size of an evaluation is not divisible by the data axes."""
  if cfg is not None:
    train_step.check_microbatches(cfg.batch_size, None, partitioner.data_mesh_size)
