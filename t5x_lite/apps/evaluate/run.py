"""Evaluate checkpoints of a run: one, the newest, or all, each once.

    python -m t5x_lite eval runs/cloze --all --gin.EVAL_OUTPUT_DIR=runs/cloze_eval

The same command resumes an evaluation that was stopped or killed, and evaluates checkpoints saved in the meantime.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import files
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite import standard_streams
from t5x_lite import summaries
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import report
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.evaluations import OpenEvaluation
from t5x_lite.apps.common.evaluations import RunEvaluations
from t5x_lite.apps.common.options import takes_options
from t5x_lite.apps.evaluate import record as eval_record
from t5x_lite.apps.evaluate.config import EvaluateConfig
from t5x_lite.checkpoints import builders
from t5x_lite.errors import CheckpointDamagedError, ConfigError, StoppedOnSignalError, did_you_mean
from t5x_lite.evaluation import InferenceEvaluator
from t5x_lite.formatting import format_number
from t5x_lite.formatting import show

# T5X's names.
__all__ = ['InferenceEvaluator', 'evaluate']

BEST_FILENAME = 'best.json'


@takes_options(EvaluateConfig)
def evaluate(cfg: EvaluateConfig) -> dict[int, dict[str, float]]:
  """Evaluate every configured checkpoint that has not been evaluated yet.

  Results are written to `output_dir/inference_eval/<task>/` and `output_dir/training_eval/<task>/`, as in a training
  run, and means over several tasks to the task folder `mean`. `output_dir/evaluated.json` lists evaluated checkpoints,
  and `output_dir/best.json` names the best one.

  Returns:
    Metrics by step and full name of all evaluated checkpoints, including those of former calls.

  Raises:
    ConfigError: options are out of range or contradict each other, a metric is unknown, or `output_dir` has results of
      another configuration; raised before any computation.
    DataError: the data is unknown or empty, or a metric cannot be written.
    CheckpointError: a checkpoint is missing or does not match the model.
    CheckpointDamagedError: a checkpoint is damaged; all others were evaluated.
    DirectoryInUseError: another process uses `output_dir`.
    StoppedOnSignalError: stopped by SIGINT, SIGTERM or SIGHUP; results of evaluated checkpoints are saved, and the
      message has the command to resume.
  """
  recorded = restore_lib.with_recorded_ids(cfg.dataset_cfg, cfg.restore_checkpoint_cfg)
  cfg = dataclasses.replace(
    cfg, dataset_cfg=recorded, output_dir=checkpoints.without_links(cfg.output_dir)
  )
  with contextlib.ExitStack() as stack:
    if not cfg.dry_run:
      stack.enter_context(standard_streams.lossy_output('stdout', 'stderr'))
      checkpoints.check_is_shared(
        stack.enter_context(
          checkpoints.lock_model_dir(
            cfg.output_dir, what='folder of results', elsewhere='another folder (EVAL_OUTPUT_DIR)'
          )
        )
      )
      summaries.check_files(cfg.output_dir)
    signals = stack.enter_context(runtime.StopSignals('ending before the first batch'))
    progress = runtime.Progress(enabled=multihost.is_lead(), unit='batch')
    stack.callback(progress.clear)

    # ------------------------------------------------------------------------------------------------------------------
    # Data: tasks to decode, and batches for teacher-forced evaluation
    # ------------------------------------------------------------------------------------------------------------------
    progress.note(f'opening the data: {cfg.dataset_cfg.name}')

    def stop_error(doing: str) -> StoppedOnSignalError:
      return StoppedOnSignalError(
        f'Stopped by {signals.name} while {doing}; nothing was evaluated.'
      )

    waits = waiting.DataWaits(signals, stop_error)
    open_fn = functools.partial(waits.call, doing='opening the evaluation data')
    verify_fn = cfg.verify_matching_vocabs_fn
    if verify_fn is not None:
      open_fn(lambda: verify_fn(cfg.dataset_cfg, cfg.model))
    evaluator = _open_evaluator(cfg, open_fn, progress)
    if evaluator is not None:
      stack.callback(evaluator.close)
    eval_batches = {}
    if cfg.training_evaluator_cls is not None:
      layout = cfg.partitioner.get_data_layout(cfg.dataset_cfg.batch_size)
      eval_batches = open_fn(
        lambda: data.open_eval_data(
          cfg.train_eval_get_dataset_fn,
          cfg.dataset_cfg,
          layout,
          cfg.eval_steps,
          cfg.model.FEATURE_CONVERTER,
          cfg.summary_dir,
        )
      )

    # ------------------------------------------------------------------------------------------------------------------
    # Model: shapes of its state, from which everything is checked before anything is computed
    # ------------------------------------------------------------------------------------------------------------------
    input_shapes, input_types = _input_spec(evaluator, eval_batches)
    initializer = cfg.train_state_initializer_cls(
      None, cfg.model.get_initial_variables, input_shapes, cfg.partitioner, input_types
    )
    shapes = initializer.global_train_state_shape
    if evaluator is not None:
      evaluator.check(shapes, initializer.train_state_axes)
    trainer = stack.enter_context(
      (cfg.training_evaluator_cls or trainer_lib.Trainer)(
        model=cfg.model,
        train_state=shapes,
        partitioner=cfg.partitioner,
        eval_names=list(eval_batches),
        summary_dir=cfg.summary_dir,
        train_state_axes=initializer.train_state_axes,
        rng=jax.random.key(0),
      )
    )
    evaluations = stack.enter_context(
      contextlib.closing(
        RunEvaluations(
          trainer=trainer,
          evaluations=_open_evaluations(evaluator, eval_batches),
          summary_dir=cfg.summary_dir,
          progress=progress,
          note_fn=_BatchNotes(signals, progress),
          read_fn=waiting.DataWaits(signals).iterate,
        )
      )
    )
    if cfg.best_metric is not None:
      evaluations.check_metric_names([('best_metric', cfg.best_metric)])

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints: the configured ones, without those that are evaluated already
    # ------------------------------------------------------------------------------------------------------------------
    progress.note('looking for checkpoints')
    stack.enter_context(runtime.reporting_errors('evaluation'))
    record = eval_record.EvalRecord(cfg.output_dir, cfg.identity(evaluator, eval_batches))
    todo = _ToDo(record, cfg.restore_checkpoint_cfg)
    restored_models = restore_lib.restore_for_inference(
      cfg.model,
      cfg.restore_checkpoint_cfg,
      cfg.partitioner,
      input_shapes,
      input_types,
      cfg.fallback_init_rng,
      train_state_initializer_cls=cfg.train_state_initializer_cls,
      is_done=todo.is_done,
      applies_transforms=cfg.dry_run,
    )
    progress.clear()
    if cfg.dry_run:
      if multihost.is_lead():
        show(todo.describe(evaluations.num_batches, cfg.output_dir))
      return record.results
    if cfg.summarize_config_fn is not None and multihost.is_lead():
      cfg.summarize_config_fn(cfg.output_dir, None, 0)
    if todo.num_done:
      progress.log(f'{todo.num_done} checkpoint(s) are already evaluated.')
    else:
      progress.log(f'Writing results to {cfg.output_dir}.')

    # ------------------------------------------------------------------------------------------------------------------
    # Evaluate: the host computes metrics of a checkpoint while the next one is restored
    # ------------------------------------------------------------------------------------------------------------------
    del initializer
    unfinished: list[tuple[int, str | None]] = []  # At most one.

    def finish() -> None:
      """Wait until the last checkpoint's results are on disk, and record it."""
      for step, path in unfinished:
        numbers = evaluations.numbers(step)
        trainer.flush()
        evaluations.flush()
        record.add(step, path, numbers)
        _write_best(cfg, record, numbers)
      unfinished.clear()

    damage = None
    stopped = False
    is_first = True
    signals.doing = 'finishing the batch'
    progress.begin(max(len(todo.paths), 1) * evaluations.num_batches, 0)
    try:
      for state, _, path, step, origin in restored_models:
        finish()
        if is_first and multihost.is_lead():
          # Delete partial results before the files are opened. `todo` does not include random parameters.
          summaries.discard_evaluations(cfg.output_dir, {*todo.paths, step})
        is_first = False
        trainer.train_state = state
        del state
        progress.log(
          f'Evaluating {origin or "random parameters"}: {report.run_header(shapes, cfg.partitioner)}.'
        )
        evaluations.evaluate(evaluations.names)
        unfinished.append((step, path))
        trainer.train_state = shapes  # The devices need not hold two states.
        if signals.is_due(may_wait=True):
          stopped = True
          break
    except waiting.Interrupted:
      stopped = True
    except CheckpointDamagedError as error:
      damage = error
    finish()

    # ------------------------------------------------------------------------------------------------------------------
    # Write: the best checkpoint, also if all were evaluated before, and the report
    # ------------------------------------------------------------------------------------------------------------------
    results = record.results
    if results:
      _write_best(cfg, record, collections.ChainMap(*results.values()))
    progress.clear()
    if multihost.is_lead() and results:
      _print_results(cfg, record, evaluations.tasks)
    num_left = len(todo.paths.keys() - results.keys())
    if stopped and (num_left or not results):
      name = signals.name or 'a signal to another process'
      raise StoppedOnSignalError(
        f'Stopped by {name}; {len(results)} checkpoint(s) are evaluated, {num_left} are left. '
        f'To resume:\n  {runtime.command_line()}'
      )
    if damage is not None:
      raise damage
    return results


def _open_evaluator(
  cfg: EvaluateConfig, open_fn: Callable[..., Any], progress: runtime.Progress
) -> InferenceEvaluator | None:
  """Return the evaluator by decoding; None if it is not configured, or if no task has metrics for it."""
  if cfg.infer_eval_cfg is None:
    return None
  try:
    return open_fn(
      lambda: InferenceEvaluator(
        cfg.dataset_cfg,
        cfg.inference_evaluator_cls,
        cfg.model,
        cfg.partitioner,
        cfg.summary_dir,
        None,
        cfg=cfg.infer_eval_cfg,
        concurrent_metrics=True,
      ),
      close_fn=lambda opened: opened.close(),
    )
  except evaluation.NoMetricsError as error:
    if cfg.training_evaluator_cls is None:
      raise
    progress.log(f'{error} Computing only the teacher-forced evaluation.')
    return None


def _open_evaluations(
  evaluator: InferenceEvaluator | None, eval_batches: Mapping[str, data.EvalBatches]
) -> list[OpenEvaluation]:
  """Return the teacher-forced evaluation and that by decoding, if they are configured."""
  found = []
  if eval_batches:
    found.append(
      OpenEvaluation(
        name=evaluation.TRAINING_EVAL, folder=evaluation.TRAINING_EVAL, batches=eval_batches
      )
    )
  if evaluator is not None:
    found.append(
      OpenEvaluation(
        name=evaluation.INFERENCE_EVAL, folder=evaluation.INFERENCE_EVAL, evaluator=evaluator
      )
    )
  return found


def _input_spec(
  evaluator: InferenceEvaluator | None,
  eval_batches: Mapping[str, data.EvalBatches],
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
  """Return shapes and dtypes, by feature name, of a batch for initialization."""
  if evaluator is not None:
    types = {}
    for task in evaluator.eval_tasks:
      for name, leaf in task.element_spec.items():
        types[name] = leaf.dtype
    return evaluator.model_feature_shapes, types
  spec = next(iter(eval_batches.values())).element_spec
  shapes = {name: leaf.shape for name, leaf in spec.items()}
  types = {name: leaf.dtype for name, leaf in spec.items()}
  return shapes, types


class _BatchNotes:
  """Callback before each batch: shows the progress, and interrupts the evaluation after a signal."""

  def __init__(self, signals: runtime.StopSignals, progress: runtime.Progress):
    self._signals = signals
    self._progress = progress
    self._num_batches = 0

  def __call__(self, text: str) -> None:
    if self._signals.is_due():
      raise waiting.Interrupted
    self._progress.note(text)
    if self._progress.due:
      self._progress.update(self._num_batches, {})
    self._num_batches += 1


class _ToDo:
  """Paths by step of the checkpoints to evaluate, in the order in which they are found."""

  def __init__(
    self, record: eval_record.EvalRecord, restore_cfg: checkpoints.RestoreCheckpointConfig | None
  ):
    self._record = record
    self._restore_cfg = restore_cfg and restore_lib.for_inference(restore_cfg)
    self.paths: dict[int, str] = {}
    self.num_done = 0

  def is_done(self, path: str, step: int) -> bool:
    """Return whether a checkpoint is evaluated already; count or list it."""
    if multihost.broadcast_from_lead(np.bool_(self._record.is_done(path, step))):
      self.num_done += 1
      return True
    if self.paths.setdefault(step, path) != path:
      raise ConfigError(
        f'{self.paths[step]!r} and {path!r} both have step {step}, and results are written by step. '
        'Evaluate them into different folders (EVAL_OUTPUT_DIR).'
      )
    return False

  def describe(self, num_batches: int, output_dir: str) -> str:
    """Return the text of a dry run."""
    cfg = self._restore_cfg
    kind = 'checkpoint'
    paths: list[str | None] = list(self.paths.values())
    if cfg is not None and cfg.builders and not cfg.paths:
      kind = 'built state'
      paths = [None]
    origins = [builders.describe(path, cfg) for path in paths]
    return '\n'.join(
      [
        f'Results will be written to {output_dir}.',
        f'{self.num_done} checkpoint(s) are already evaluated.',
        f'{len(origins)} {kind}(s) will be evaluated on {num_batches} batches each:',
        *(f'  {origin}' for origin in origins),
      ]
    )


def _best(cfg: EvaluateConfig, record: eval_record.EvalRecord) -> int | None:
  """Return the step with the best value of the configured metric, the latest of equal ones; None without a metric."""
  if cfg.best_metric is None:
    return None
  results = record.results
  policy = checkpoints.KeepBest(
    1, cfg.best_metric, cfg.best_metric_mode, keep_without_metrics=False
  )
  return next(iter(policy.steps_to_keep(list(results), results)), None)


def _write_best(
  cfg: EvaluateConfig, record: eval_record.EvalRecord, found: Mapping[str, float]
) -> None:
  """Write the best checkpoint to best.json; raise if the metric is not in the results."""
  metric = cfg.best_metric
  if metric is None:
    return
  if metric not in found:
    raise ConfigError(
      f'`evaluate.best_metric` is {metric!r}, which is not in the results.'
      f'{did_you_mean(metric, found)} The results are kept; rerun the command with another metric.'
    )
  best = _best(cfg, record)
  if multihost.is_lead() and best is not None:
    eval_record.write_json(
      files.path(cfg.output_dir) / BEST_FILENAME,
      {
        'metric': metric,
        'mode': cfg.best_metric_mode,
        'step': best,
        'value': record.results[best][metric],
        'path': record.path(best),
      },
    )


def _print_results(
  cfg: EvaluateConfig, record: eval_record.EvalRecord, tasks: Mapping[str, Sequence[str]]
) -> None:
  results = record.results
  show(report.format_evaluations(results, tasks), flush=True)
  metric = cfg.best_metric
  best = _best(cfg, record)
  if metric is not None and best is not None:
    show(
      f'\nBest by {metric} ({cfg.best_metric_mode}): step {best:,}, '
      f'{format_number(results[best][metric])}, {record.path(best)}'
    )
  show(f'\nResults are in {cfg.output_dir}.', flush=True)
