"""The evaluations of a run: with given targets and by decoding, what they found, and what follows from it.

Metrics go by their full names, `<kind>/<task>/<metric>`, with the task `mean` for the means over tasks.
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
  """Leaves an evaluation, which will be made again: raise it from `note_fn` or `read_fn`."""


class RunEvaluations:
  """Makes the evaluations of a run and keeps what the last one found.

  The host's half of an evaluation by decoding may still be under way when `evaluate` returns, if the evaluator works
  concurrently and no action waits for its results. `numbers` and `flush` wait for it.
  """

  def __init__(self, *, trainer: trainer_lib.BaseTrainer, eval_batches: Mapping[str, data.EvalBatches],
               evaluator: evaluation.InferenceEvaluator | None, summary_dir: str | None, progress: runtime.Progress,
               note_fn: Callable[[str], None],
               compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
               read_fn: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, doing: batches,
               actions: Mapping[ActionMode, Sequence[actions_lib.BaseAction]] | None = None):
    """Computes nothing yet.

    Args:
      trainer: holds the state, and evaluates with given targets.
      eval_batches: task name to what to evaluate on with given targets; empty for nothing.
      evaluator: evaluates by decoding, or None.
      summary_dir: the run's folder, None to write nothing.
      progress: is told the results.
      note_fn: is told before each batch what is going on; it may raise `EvaluationInterrupted`.
      compiling_fn: makes the context in which programs are compiled.
      read_fn: called with batches and what is done with them, iterates over them, e.g. `waiting.DataWaits.iterate`; it
        may raise `EvaluationInterrupted`.
      actions: look at the results and may ask to stop.
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
    # Of the last evaluation: its step, what is known, and what is still being judged.
    self._step: int | None = None
    self._numbers: dict[str, float] = {}
    self._pending: evaluation.AllMetricsFuture | None = None

  @property
  def kinds(self) -> tuple[str, ...]:
    """The kinds of evaluation that there are."""
    return ((TRAINING_EVAL,) if self._eval_batches else ()) + ((INFERENCE_EVAL,) if self._evaluator else ())

  @property
  def tasks(self) -> dict[str, list[str]]:
    """Kind to the names of the tasks that are evaluated."""
    names = {TRAINING_EVAL: list(self._eval_batches),
             INFERENCE_EVAL: [task.name for task in self._evaluator.eval_tasks] if self._evaluator else []}
    return {kind: names[kind] for kind in self.kinds}

  @property
  def num_batches(self) -> int:
    """How many batches the evaluations of a state compute."""
    return sum(map(len, self._eval_batches.values())) + (self._evaluator.num_batches if self._evaluator else 0)

  def evaluate(self, kinds: Collection[str]) -> Stop:
    """Evaluates the trainer's state, which may be overwritten when this returns.

    Args:
      kinds: which of the evaluations to make.

    Returns:
      Whether actions ask to stop.
    """
    self._settle()
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
      stop = actions_lib.run_actions(ActionMode.TRAIN_EVAL, self._actions, trainer.train_state, _with_mean(results))
    if INFERENCE_EVAL in kinds:
      pending = self._evaluator.evaluate(
          trainer.train_state, trainer.train_state_axes, step=trainer.step, note_fn=self._note,
          compiling_fn=self._compiling, read_fn=self._read)
    self._step, self._numbers, self._pending = trainer.step, numbers, pending
    if pending is not None and (ActionMode.INFER_EVAL in self._actions or pending.done()):
      results = pending.result()
      self._settle()
      stop = max(stop, actions_lib.run_actions(
          ActionMode.INFER_EVAL, self._actions, trainer.train_state, _with_mean(results)))
    return stop

  def poll(self) -> None:
    """Reports what has been judged meanwhile; does not wait."""
    if self._pending is not None and self._pending.done():
      self._settle()

  def numbers(self, step: int) -> dict[str, float]:
    """Returns metrics by full name if the last evaluation is complete and is that of `step`; waits for the judge."""
    self._settle()
    return dict(self._numbers) if self._step == step else {}

  def flush(self) -> None:
    """Waits until all results are reported and on disk; raises what went wrong.

    Raises:
      OSError: the disk is full, for instance; nothing is lost, and the next flush tries again.
    """
    self._settle()
    if self._evaluator is not None:
      self._evaluator.flush()
    if self._mean_manager is not None:
      self._mean_manager.flush()

  def close_files(self) -> None:
    """Waits for all results, forgets them and closes the files of metrics, which the next evaluation opens again.

    A run that rolls back may reach the step of the last evaluation again, with another state. What a full disk refuses
    is dropped, see `MetricsManager.close_files`.
    """
    self._settle()
    self._step, self._numbers = None, {}
    if self._evaluator is not None:
      self._evaluator.close_files()
    if self._mean_manager is not None:
      self._mean_manager.close_files()

  def close(self) -> None:
    """Finishes pending writes."""
    if self._evaluator is not None:
      self._evaluator.close()
    if self._mean_manager is not None:
      self._mean_manager.close()

  def check_metric_name(self, option: str, name: str) -> None:
    """Refuses the name of a metric that none of the evaluations computes; computes nothing itself.

    The trainer may hold the shapes of a state.

    Args:
      option: the option that gives the name.
      name: the full name of a metric.

    Raises:
      ConfigError: see above.
    """
    # Finding the names takes a trace of the model or a pass of the metric functions: only where they matter.
    known: dict[str, set[str] | None] = dict.fromkeys(f'{TRAINING_EVAL}/{task}' for task in self._eval_batches)
    if self._evaluator is not None:
      known |= dict.fromkeys(f'{INFERENCE_EVAL}/{task.name}' for task in self._evaluator.eval_tasks)
    if str(name).startswith(f'{TRAINING_EVAL}/') and self._eval_batches:
      step_fn = self._trainer.partitioned_eval_step()
      for task, batches in self._eval_batches.items():
        known[f'{TRAINING_EVAL}/{task}'] = set(step_fn.lower(self._trainer.train_state, batches.element_spec).out_info)
    if str(name).startswith(f'{INFERENCE_EVAL}/') and self._evaluator is not None:
      known |= {f'{INFERENCE_EVAL}/{task.name}': evaluation.names_of_metrics(task)
                for task in self._evaluator.eval_tasks}
    evaluation.check_metric_name(option, name, known)

  def _settle(self) -> None:
    """Waits for what is being judged, and reports it."""
    if self._pending is not None:
      pending, self._pending = self._pending, None
      self._numbers |= self._report(self._step, INFERENCE_EVAL, pending.result())

  def _report(self, step: int, kind: str, results: MetricsByTask) -> dict[str, float]:
    """Shows results by task and returns them as numbers by full name."""
    for task, values in _with_mean(results).items():
      self._progress.log(f'step {step:,}  {kind}/{task}: {report.format_metrics(values)}')
    return evaluation.full_names(kind, results)

  def _global_batches(self, name: str) -> Iterator[dict[str, Any]]:
    batches = self._eval_batches[name]
    for number, batch in enumerate(self._read(batches, f'reading a batch of the evaluation data {name!r}')):
      self._note(f'evaluating {name}: batch {number + 1} of {len(batches)}')
      yield data.to_global_arrays(batch, self._trainer.partitioner, batches.element_spec)


def due_kinds(recorded: Any, kinds: Sequence[str]) -> tuple[str, ...]:
  """Returns which of `kinds` a checkpoint says are still to be made at its step.

  Args:
    recorded: their names; or, from before they had periods of their own, whether any is.
    kinds: those that the run has.

  >>> due_kinds(['inference_eval'], ['training_eval', 'inference_eval']), due_kinds(True, ['training_eval'])
  (('inference_eval',), ('training_eval',))
  """
  if isinstance(recorded, bool):
    return tuple(kinds) if recorded else ()
  return tuple(kind for kind in kinds if kind in recorded)


def _with_mean(results: MetricsByTask) -> MetricsByTask:
  return {**results, MEAN: evaluation.mean_over_tasks(results)} if len(results) > 1 else results
