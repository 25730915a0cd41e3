"""Evaluations of a run, teacher-forced and by decoding, and their results.

Metrics have full names, `<kind>/<task>/<metric>`; the task `mean` holds the means over tasks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
import contextlib
from typing import Any

import clu.values

from t5x_lite import actions as actions_lib
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import runtime
from t5x_lite import summaries
from t5x_lite import trainer as trainer_lib
from t5x_lite.actions import ActionMode, Stop
from t5x_lite.apps.common import report
from t5x_lite.evaluation import INFERENCE_EVAL, MEAN, TRAINING_EVAL

MetricsByTask = Mapping[str, Mapping[str, clu.values.Value]]


class EvaluationInterrupted(Exception):
  """Error that `note_fn` or `read_fn` raise to interrupt an evaluation, which is repeated later."""


class RunEvaluations:
  """Evaluates the state of a run and keeps the results of the last evaluation.

  `evaluate` may return before the metrics of an evaluation by decoding are computed, if the evaluator computes them
  concurrently and no action needs them. `numbers` and `flush` wait for them.
  """

  def __init__(self, *, trainer: trainer_lib.BaseTrainer, eval_batches: Mapping[str, data.EvalBatches],
               evaluator: evaluation.InferenceEvaluator | None, summary_dir: str | None, progress: runtime.Progress,
               note_fn: Callable[[str], None],
               compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
               read_fn: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, doing: batches,
               actions: Mapping[ActionMode, Sequence[actions_lib.BaseAction]] | None = None):
    """Store the arguments; compute nothing.

    Args:
      trainer: trainer that holds the state; computes teacher-forced evaluations.
      eval_batches: batches of each teacher-forced evaluation by task name; may be empty.
      evaluator: evaluator by decoding, or None.
      summary_dir: the run directory; None writes no metrics.
      progress: log of the results.
      note_fn: called before each batch with a description of the work; may raise `EvaluationInterrupted`.
      compiling_fn: returns the context in which programs are compiled.
      read_fn: iterates over its first argument, batches; the second one describes the work. For example
        `waiting.DataWaits.iterate`. May raise `EvaluationInterrupted`.
      actions: actions that are called with the results and may stop the run.
    """
    self._trainer = trainer
    self._eval_batches = eval_batches
    self._evaluator = evaluator
    self._progress = progress
    self._note = note_fn
    self._compiling = compiling_fn
    self._read = read_fn
    self._actions = actions or {}
    self._mean_manager = None
    if len(eval_batches) > 1:
      evaluation.check_task_names(eval_batches)
      self._mean_manager = summaries.MetricsManager(f'{TRAINING_EVAL}/{MEAN}', summary_dir)
    # State of the last evaluation: its step, the known metrics, and the metrics that are still being computed.
    self._step: int | None = None
    self._numbers: dict[str, float] = {}
    self._pending: evaluation.AllMetricsFuture | None = None

  @property
  def kinds(self) -> tuple[str, ...]:
    """Configured kinds of evaluation."""
    return ((TRAINING_EVAL,) if self._eval_batches else ()) + ((INFERENCE_EVAL,) if self._evaluator else ())

  @property
  def tasks(self) -> dict[str, list[str]]:
    """Names of the evaluated tasks, by kind."""
    names = {TRAINING_EVAL: list(self._eval_batches),
             INFERENCE_EVAL: [task.name for task in self._evaluator.eval_tasks] if self._evaluator else []}
    return {kind: names[kind] for kind in self.kinds}

  @property
  def num_batches(self) -> int:
    """Number of batches per evaluation."""
    return sum(map(len, self._eval_batches.values())) + (self._evaluator.num_batches if self._evaluator else 0)

  def evaluate(self, kinds: Collection[str]) -> Stop:
    """Evaluate the trainer's state, which may be overwritten when this returns.

    Args:
      kinds: kinds of evaluation to compute.

    Returns:
      Request of the actions: continue or stop.
    """
    self._collect_pending()
    self._step, self._numbers = None, {}
    numbers, stop, pending = {}, Stop.CONTINUE, None
    trainer = self._trainer
    if TRAINING_EVAL in kinds:
      with self._compiling():
        trainer.compile_eval({name: batches.element_spec for name, batches in self._eval_batches.items()})
      results = trainer.eval({name: self._global_batches(name) for name in self._eval_batches})
      if self._mean_manager is not None:
        self._mean_manager.write_values(trainer.step, evaluation.mean_over_tasks(results))
      numbers |= self._report(trainer.step, TRAINING_EVAL, results)
      stop = actions_lib.run_actions(
          ActionMode.TRAIN_EVAL, self._actions, lambda: trainer.train_state, _with_mean(results))
    if INFERENCE_EVAL in kinds:
      pending = self._evaluator.evaluate(
          trainer.train_state, trainer.train_state_axes, step=trainer.step, note_fn=self._note,
          compiling_fn=self._compiling, read_fn=self._read)
    self._step, self._numbers, self._pending = trainer.step, numbers, pending
    if pending is not None and (ActionMode.INFER_EVAL in self._actions or pending.done()):
      results = pending.result()
      self._collect_pending()
      stop = max(stop, actions_lib.run_actions(
          ActionMode.INFER_EVAL, self._actions, lambda: trainer.train_state, _with_mean(results)))
    return stop

  def poll(self) -> None:
    """Report results that have become available; do not wait."""
    if self._pending is not None and self._pending.done():
      self._collect_pending()

  def numbers(self, step: int) -> dict[str, float]:
    """Return metrics by full name if the last evaluation is complete and of `step`, else {}; wait for the metrics."""
    self._collect_pending()
    return dict(self._numbers) if self._step == step else {}

  def flush(self) -> None:
    """Wait until all results are reported and on disk.

    Raises:
      OSError: e.g. the disk is full; no result is lost, and the next flush tries again.
    """
    self._collect_pending()
    if self._evaluator is not None:
      self._evaluator.flush()
    if self._mean_manager is not None:
      self._mean_manager.flush()

  def close_files(self) -> None:
    """Wait for all results, discard them and close the metrics files, which the next evaluation opens again.

    After a rollback, a run may reach the step of the last evaluation again with another state. Results that a full disk
    cannot hold are dropped, see `MetricsManager.close_files`.
    """
    self._collect_pending()
    self._step, self._numbers = None, {}
    if self._evaluator is not None:
      self._evaluator.close_files()
    if self._mean_manager is not None:
      self._mean_manager.close_files()

  def close(self) -> None:
    """Finish pending writes."""
    if self._evaluator is not None:
      self._evaluator.close()
    if self._mean_manager is not None:
      self._mean_manager.close()

  def check_metric_name(self, option: str, name: str) -> None:
    """Raise if no evaluation computes the metric; compute nothing.

    The trainer may hold the shapes of a state.

    Args:
      option: option that contains the name.
      name: full name of a metric.

    Raises:
      ConfigError: the metric is unknown.
    """
    # Only names of the metric's own kind are collected: this traces the model or calls the metric functions.
    known: dict[str, set[str] | None] = dict.fromkeys(f'{TRAINING_EVAL}/{task}' for task in self._eval_batches)
    if self._evaluator is not None:
      known |= dict.fromkeys(f'{INFERENCE_EVAL}/{task.name}' for task in self._evaluator.eval_tasks)
    if str(name).startswith(f'{TRAINING_EVAL}/') and self._eval_batches:
      step_fn = self._trainer.partitioned_eval_step()
      for task, batches in self._eval_batches.items():
        known[f'{TRAINING_EVAL}/{task}'] = set(step_fn.lower(self._trainer.step_state, batches.element_spec).out_info)
    if str(name).startswith(f'{INFERENCE_EVAL}/') and self._evaluator is not None:
      known |= {f'{INFERENCE_EVAL}/{task.name}': evaluation.names_of_metrics(task)
                for task in self._evaluator.eval_tasks}
    evaluation.check_metric_name(option, name, known)

  def _collect_pending(self) -> None:
    """Wait for pending metrics and report them."""
    if self._pending is not None:
      pending, self._pending = self._pending, None
      self._numbers |= self._report(self._step, INFERENCE_EVAL, pending.result())

  def _report(self, step: int, kind: str, results: MetricsByTask) -> dict[str, float]:
    """Log results by task and return them as numbers by full name."""
    for task, values in _with_mean(results).items():
      self._progress.log(f'step {step:,}  {kind}/{task}: {report.format_metrics(values)}')
    return evaluation.full_names(kind, results)

  def _global_batches(self, name: str) -> Iterator[dict[str, Any]]:
    batches = self._eval_batches[name]
    for number, batch in enumerate(self._read(batches, f'reading a batch of the evaluation data {name!r}')):
      self._note(f'evaluating {name}: batch {number + 1} of {len(batches)}')
      yield data.to_global_arrays(batch, self._trainer.partitioner, batches.element_spec)


def due_kinds(recorded: Any, kinds: Sequence[str]) -> tuple[str, ...]:
  """Return those of `kinds` that a checkpoint lists as not yet computed at its step.

  Args:
    recorded: names of kinds; older checkpoints have a bool for all kinds.
    kinds: kinds of evaluation of the run.

  >>> due_kinds(['inference_eval'], ['training_eval', 'inference_eval']), due_kinds(True, ['training_eval'])
  (('inference_eval',), ('training_eval',))
  """
  if isinstance(recorded, bool):
    return tuple(kinds) if recorded else ()
  return tuple(kind for kind in kinds if kind in recorded)


def _with_mean(results: MetricsByTask) -> MetricsByTask:
  return {**results, MEAN: evaluation.mean_over_tasks(results)} if len(results) > 1 else results
