"""Evaluations of a run, teacher-forced and by decoding, and their results.

Metrics have full names, `<folder of the evaluation>/<task>/<metric>`; the task `mean` holds the means over tasks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import clu.values

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import runtime
from t5x_lite.apps.common import report
from t5x_lite.errors import call_all
from t5x_lite.evaluation import MEAN
from t5x_lite.trainer import actions as actions_lib
from t5x_lite.trainer import summaries
from t5x_lite.trainer import trainer as trainer_lib
from t5x_lite.trainer.actions import ActionMode
from t5x_lite.trainer.actions import Stop

MetricsByTask = Mapping[str, Mapping[str, clu.values.Value]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenEvaluation:
  """An evaluation with its data opened.

  Attributes:
    name: name, unique in a run: 'training_eval' and 'inference_eval' for the evaluations of
      `train_eval_dataset_cfg` and `infer_eval_dataset_cfg`.
    folder: folder of the results, the beginning of the names of its metrics.
    batches: batches by task name, of a teacher-forced evaluation.
    metric_fns: metric functions of a teacher-forced evaluation; None for those of the model.
    evaluator: evaluator, of an evaluation by decoding.
  """

  name: str
  folder: str
  batches: Mapping[str, data.EvalBatches] = dataclasses.field(default_factory=dict)
  metric_fns: Sequence[models.MetricFn] | None = None
  evaluator: evaluation.InferenceEvaluator | None = None

  @property
  def tasks(self) -> list[str]:
    """Names of the tasks."""
    if self.evaluator:
      return [task.name for task in self.evaluator.eval_tasks]
    return list(self.batches)

  def task_of_run(self, task: str) -> str:
    """Return the name of a task among all tasks of its kind, for the trainer and actions: '<name>/<task>'."""
    return '/'.join([*self.folder.split('/')[1:], task])


class RunEvaluations:
  """Evaluates the state of a run and keeps the results of the last evaluation.

  `evaluate` may return before the metrics of an evaluation by decoding are computed, if the evaluator computes them
  concurrently and no action needs them. `numbers` and `flush` wait for them.
  """

  def __init__(
    self,
    *,
    trainer: trainer_lib.BaseTrainer,
    evaluations: Sequence[OpenEvaluation],
    summary_dir: str | None,
    progress: runtime.Progress,
    note_fn: Callable[[str], None],
    compiling_fn: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    read_fn: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, doing: batches,
    actions: Mapping[ActionMode, Sequence[actions_lib.BaseAction]] | None = None,
  ):
    """Store the arguments; compute nothing.

    Args:
      trainer: trainer that holds the state; computes teacher-forced evaluations.
      evaluations: the evaluations, in the order in which they are computed.
      summary_dir: the run directory; None writes no metrics.
      progress: log of the results.
      note_fn: called before each batch with a description of the work; may raise `waiting.Interrupted`.
      compiling_fn: returns the context in which the programs of an evaluation are compiled, from its name.
      read_fn: iterates over its first argument, batches; the second one describes the work. For example
        `waiting.DataWaits.iterate`. May raise `waiting.Interrupted`; the evaluation is repeated later.
      actions: actions that are called with the results and may stop the run.
    """
    self._trainer = trainer
    self._evaluations = {each.name: each for each in evaluations}
    self._progress = progress
    self._note = note_fn
    self._compiling = compiling_fn
    self._read = read_fn
    self._actions = actions or {}
    self._mean_managers = {}
    for each in evaluations:
      if len(each.batches) > 1:
        evaluation.check_task_names(each.batches)
        self._mean_managers[each.name] = summaries.MetricsManager(
          f'{each.folder}/{MEAN}', summary_dir
        )
    # State of the last evaluation: its step, the known metrics, and the metrics that are still being computed.
    self._step: int | None = None
    self._numbers: dict[str, float] = {}
    self._pending: list[tuple[OpenEvaluation, evaluation.AllMetricsFuture]] = []

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the evaluations, in their order."""
    return tuple(self._evaluations)

  @property
  def tasks(self) -> dict[str, list[str]]:
    """Names of the evaluated tasks, by folder of the evaluation."""
    return {each.folder: each.tasks for each in self._evaluations.values()}

  @property
  def num_batches(self) -> int:
    """Number of batches per evaluation."""
    total = 0
    for each in self._evaluations.values():
      if each.evaluator:
        total += each.evaluator.num_batches
      else:
        total += sum(map(len, each.batches.values()))
    return total

  @property
  def _evaluators(self) -> list[evaluation.InferenceEvaluator]:
    return [each.evaluator for each in self._evaluations.values() if each.evaluator is not None]

  def evaluate(self, names: Collection[str]) -> Stop:
    """Evaluate the trainer's state, which may be overwritten when this returns.

    Args:
      names: names of the evaluations to compute.

    Returns:
      Request of the actions: continue or stop.
    """
    self._collect_pending()
    # Numbers of evaluations before these, of the same state.
    if self._step == self._trainer.step:
      numbers = self._numbers
    else:
      numbers = {}
    self._step = None
    self._numbers = {}
    pending = []
    # By the action's name of the task.
    results_of: dict[ActionMode, dict[str, Any]] = {mode: {} for mode in ActionMode}
    trainer = self._trainer
    due = [each for name, each in self._evaluations.items() if name in names]
    for each in due:
      if each.evaluator is not None:
        continue
      batches_of = {each.task_of_run(task): batches for task, batches in each.batches.items()}
      with self._compiling(each.name):
        trainer.compile_eval(
          {name: batches.element_spec for name, batches in batches_of.items()}, each.metric_fns
        )
      found = trainer.eval(
        {name: self._global_batches(name, batches) for name, batches in batches_of.items()}
      )
      results = {task: found[each.task_of_run(task)] for task in each.batches}
      if each.name in self._mean_managers:
        self._mean_managers[each.name].write_values(
          trainer.step, evaluation.mean_over_tasks(results)
        )
      numbers |= self._report(trainer.step, each, results)
      results_of[ActionMode.TRAIN_EVAL] |= _by_task_of_run(each, results)
    stop = self._run_actions(ActionMode.TRAIN_EVAL, results_of)
    # Decoding takes the state of single layers, to which stacked ones are converted once.
    for each in due:
      if each.evaluator is not None:
        pending.append(
          (
            each,
            each.evaluator.evaluate(
              trainer.train_state,
              trainer.train_state_axes,
              step=trainer.step,
              note_fn=self._note,
              compiling_fn=functools.partial(self._compiling, each.name),
              read_fn=self._read,
            ),
          )
        )
    self._step = trainer.step
    self._numbers = numbers
    self._pending = pending
    is_done = all(future.done() for _, future in pending)
    if pending and (ActionMode.INFER_EVAL in self._actions or is_done):
      self._collect_pending()
      for each, future in pending:
        results_of[ActionMode.INFER_EVAL] |= _by_task_of_run(each, future.result())
      stop = max(stop, self._run_actions(ActionMode.INFER_EVAL, results_of))
    return stop

  def _run_actions(self, mode: ActionMode, results_of: Mapping[ActionMode, MetricsByTask]) -> Stop:
    if not results_of[mode]:
      return Stop.CONTINUE
    return actions_lib.run_actions(
      mode, self._actions, lambda: self._trainer.train_state, results_of[mode]
    )

  def poll(self) -> None:
    """Report results that have become available; do not wait."""
    if self._pending and all(future.done() for _, future in self._pending):
      self._collect_pending()

  def numbers(self, step: int, needed: Collection[str] | None = None) -> dict[str, float]:
    """Return metrics by full name if the last evaluation is complete and of `step`, else {}; wait for the metrics.

    Args:
      step: number of completed steps.
      needed: full names of the metrics to wait for; None waits for all.
    """
    if needed is None or any(
      name.startswith(f'{each.folder}/') for each, _ in self._pending for name in needed
    ):
      self._collect_pending()
    if self._step == step:
      return dict(self._numbers)
    return {}

  def flush(self) -> None:
    """Wait until all results are reported and on disk.

    Raises:
      OSError: e.g. the disk is full; no result is lost, and the next flush tries again.
    """
    parts = (*self._evaluators, *self._mean_managers.values())
    call_all([self._collect_pending, *(each.flush for each in parts)])

  def close_files(self) -> None:
    """Wait for all results, discard them and close the metrics files, which the next evaluation opens again.

    After a rollback, a run may reach the step of the last evaluation again with another state. Results that a full disk
    cannot hold are dropped, see `MetricsManager.close_files`.
    """
    self._collect_pending()
    self._step = None
    self._numbers = {}
    for each in (*self._evaluators, *self._mean_managers.values()):
      each.close_files()

  def close(self) -> None:
    """Finish pending writes."""
    for each in (*self._evaluators, *self._mean_managers.values()):
      each.close()

  def check_metric_names(self, names: Iterable[tuple[str, str]]) -> None:
    """Raise if no evaluation computes a metric; compute nothing.

    The trainer may hold the shapes of a state.

    Args:
      names: pairs (option, full name of a metric).

    Raises:
      ConfigError: a metric is unknown.
    """
    for option, name in names:
      # Only names of the metric's own evaluation are collected: this traces the model or calls the metric functions.
      known: dict[str, dict[str, set[str] | None]] = {}
      for each in self._evaluations.values():
        known[each.folder] = dict.fromkeys(each.tasks)
        if not str(name).startswith(f'{each.folder}/'):
          continue
        if each.evaluator is not None:
          tasks = each.evaluator.eval_tasks
          known[each.folder] = {task.name: evaluation.names_of_metrics(task) for task in tasks}
        else:
          step_fn = self._trainer.eval_steps.make(each.metric_fns)
          known[each.folder] = {}
          for task, batches in each.batches.items():
            lowered = step_fn.lower(self._trainer.step_state, batches.element_spec)
            known[each.folder][task] = set(lowered.out_info)
      evaluation.check_metric_name(option, name, known)

  def _collect_pending(self) -> None:
    """Wait for pending metrics and report them."""
    pending = self._pending
    self._pending = []
    for each, future in pending:
      assert self._step is not None  # set by the evaluation that made `_pending`
      self._numbers |= self._report(self._step, each, future.result())

  def _report(self, step: int, each: OpenEvaluation, results: MetricsByTask) -> dict[str, float]:
    """Log results by task and return them as numbers by full name."""
    for task, values in _with_mean(results).items():
      self._progress.log(f'step {step:,}  {each.folder}/{task}: {report.format_metrics(values)}')
    return evaluation.full_names(each.folder, results)

  def _global_batches(self, name: str, batches: data.EvalBatches) -> Iterator[dict[str, Any]]:
    for number, batch in enumerate(
      self._read(batches, f'reading a batch of the evaluation data {name!r}')
    ):
      self._note(f'evaluating {name}: batch {number + 1} of {len(batches)}')
      yield data.to_global_arrays(batch, self._trainer.partitioner, batches.element_spec)


def due_names(recorded: Any, names: Sequence[str]) -> tuple[str, ...]:
  """Return those of `names` that a checkpoint lists as not yet computed at its step.

  Args:
    recorded: names of evaluations; older checkpoints have a bool for all.
    names: names of the evaluations of the run.

  >>> due_names(['inference_eval'], ['training_eval', 'inference_eval']), due_names(True, ['training_eval'])
  (('inference_eval',), ('training_eval',))
  """
  if isinstance(recorded, bool):
    if recorded:
      return tuple(names)
    return ()
  return tuple(name for name in names if name in recorded)


def _by_task_of_run(
  each: OpenEvaluation, results: MetricsByTask
) -> dict[str, Mapping[str, clu.values.Value]]:
  return {each.task_of_run(task): values for task, values in _with_mean(results).items()}


def _with_mean(results: MetricsByTask) -> MetricsByTask:
  if len(results) > 1:
    return {**results, MEAN: evaluation.mean_over_tasks(results)}
  return results
