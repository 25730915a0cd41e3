"""Evaluates checkpoints: one, the newest, or all of a run, each once.

    python -m t5x_lite eval runs/cloze --all --gin.EVAL_OUTPUT_DIR=runs/cloze_eval

The same command goes on with an evaluation that was stopped or killed, and takes what has been saved since.
"""

import collections
from collections.abc import Callable, Mapping
import contextlib
import os
import pathlib
import shlex
import sys
from typing import Any

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite import standard_streams
from t5x_lite import state_init
from t5x_lite import summaries
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import report
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.evaluations import EvaluationInterrupted, RunEvaluations
from t5x_lite.apps.evaluate import record as eval_record
from t5x_lite.errors import CheckpointDamagedError, ConfigError, StoppedOnSignalError, did_you_mean
from t5x_lite.evaluation import InferenceEvaluator

# T5X's names.
__all__ = ['InferenceEvaluator', 'evaluate']

BEST_FILENAME = 'best.json'


def evaluate(
    *,
    model: models.BaseTransformerModel,
    dataset_cfg: data.DatasetConfig,
    restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None,
    partitioner: partitioning.PjitPartitioner,
    output_dir: str,
    inference_evaluator_cls: Any = None,
    training_evaluator_cls: trainer_lib.BaseTrainerConstructor | None = None,
    summarize_config_fn: Callable[[str, Any, int], None] | None = None,
    train_state_initializer_cls: type[state_init.TrainStateInitializer] = state_init.TrainStateInitializer,
    train_eval_get_dataset_fn: Callable[..., Mapping[str, data.EvalBatches]] = data.open_eval_iterators,
    fallback_init_rng: int | None = None,
    infer_eval_cfg: evaluation.InferenceEvalConfig | None = evaluation.InferenceEvalConfig(),
    eval_steps: int | None = None,
    best_metric: str | None = None,
    best_metric_mode: str = 'max',
    verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None = data.verify_matching_vocabs,
    settings: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> dict[int, dict[str, float]]:
  """Evaluates every checkpoint that the configuration names and that has not been evaluated before.

  Results go to `output_dir/inference_eval/<task>/` and `output_dir/training_eval/<task>/`, as those of a training run
  do, and means over several tasks to the folder `mean` beside the tasks. What is finished stands in
  `output_dir/evaluated.json`, the best checkpoint in `output_dir/best.json`.

  Args:
    model: the model; no optimizer is needed.
    dataset_cfg: what to evaluate on: a task, or each task of a mixture.
    restore_checkpoint_cfg: which checkpoints; with mode 'all' in ascending order of step. None for random parameters.
    partitioner: the mesh and what is sharded over it.
    output_dir: where results go; not the directory of a training run.
    inference_evaluator_cls: None, or seqio.Evaluator; see `evaluation.InferenceEvaluator`.
    training_evaluator_cls: `trainer.Trainer`, to evaluate with given targets (teacher forcing) too; None does not.
    summarize_config_fn: called with (output_dir, None, 0) to record the configuration.
    train_state_initializer_cls: makes the state.
    train_eval_get_dataset_fn: opens the data for `training_evaluator_cls`, as `data.open_eval_iterators`.
    fallback_init_rng: seed of random parameters, used when there is no checkpoint.
    infer_eval_cfg: how to evaluate by decoding; None does not.
    eval_steps: the most batches of an evaluation with given targets; None is the whole split.
    best_metric: full name of the metric by which the best checkpoint is chosen, e.g. 'inference_eval/mean/f1'.
    best_metric_mode: 'max' or 'min', which of two values is the better one.
    verify_matching_vocabs_fn: refuses data whose vocabulary is not the model's; None does not look.
    settings: what else decides the results, by name. Results of other settings are not added to; the command gives all
      that gin binds.
    dry_run: say what would be evaluated, and do nothing.

  Returns:
    Step to metrics by full name, of all finished checkpoints, those of former runs included.

  Raises:
    ConfigError: options that are out of range or contradict each other, an unknown metric, or results of another
      configuration; before any compute.
    DataError: unknown or empty data, or a metric that cannot be written.
    CheckpointError: there is no checkpoint, or one does not fit the model.
    CheckpointDamagedError: a checkpoint is damaged; of several, the others have been evaluated.
    DirectoryInUseError: another process writes to `output_dir`.
    StoppedOnSignalError: stopped by SIGINT, SIGTERM or SIGHUP; what is finished is safe, and the message has the command
      to resume.
  """
  # --------------------------------------------------------------------------------------------------------------------
  # Options
  # --------------------------------------------------------------------------------------------------------------------
  _check_output_dir(output_dir)
  if best_metric_mode not in ('max', 'min'):
    raise ConfigError(f"best_metric_mode is {best_metric_mode!r}; expected 'max' or 'min'.")
  if infer_eval_cfg is None and training_evaluator_cls is None:
    raise ConfigError('infer_eval_cfg and training_evaluator_cls are both None, so there is nothing to do: give at '
                      'least one of them.')
  if eval_steps is not None and training_evaluator_cls is None:
    raise ConfigError(f'eval_steps is {eval_steps}, but only an evaluation with given targets counts in batches: give '
                      'training_evaluator_cls (in gin @trainer.Trainer), or limit infer_eval_cfg.num_examples.')
  if infer_eval_cfg is not None:
    evaluation.check_evaluator_cls(inference_evaluator_cls, dataset_cfg, infer_eval_cfg)
  evaluation.check_eval_batch(dataset_cfg, partitioner)

  with contextlib.ExitStack() as stack:
    if not dry_run:
      stack.enter_context(standard_streams.lossy_output('stdout', 'stderr'))
      stack.enter_context(checkpoints.lock_model_dir(
          output_dir, what='folder of results', elsewhere='another place (EVAL_OUTPUT_DIR)'))
    signals = stack.enter_context(runtime.StopSignals('ending before the first batch'))
    opening = waiting.DataWaits(signals, lambda doing: StoppedOnSignalError(
        f'Stopped by {signals.name} while {doing}; nothing was evaluated.'))
    progress = runtime.Progress(enabled=multihost.is_lead(), unit='batch')
    stack.callback(progress.clear)

    # ------------------------------------------------------------------------------------------------------------------
    # Data: tasks to decode, and batches to evaluate on with given targets
    # ------------------------------------------------------------------------------------------------------------------
    progress.note(f'opening the data: {dataset_cfg.name}')
    if verify_matching_vocabs_fn is not None:
      opening.call(lambda: verify_matching_vocabs_fn(dataset_cfg, model), 'opening the evaluation data')
    summary_dir = None if dry_run else output_dir
    evaluator, eval_batches = None, {}
    if infer_eval_cfg is not None:
      try:
        evaluator = opening.call(lambda: InferenceEvaluator(
            dataset_cfg, inference_evaluator_cls, model, partitioner, summary_dir, None, cfg=infer_eval_cfg,
            concurrent_metrics=True), 'opening the evaluation data')
      except evaluation.NoMetricsError as error:
        if training_evaluator_cls is None:
          raise
        progress.log(f'{error} Evaluating with given targets only.')
      else:
        stack.callback(evaluator.close)
    if training_evaluator_cls is not None:
      layout = partitioner.get_data_layout(dataset_cfg.batch_size)
      eval_batches = opening.call(lambda: train_eval_get_dataset_fn(
          dataset_cfg, layout, eval_steps, feature_converter=model.FEATURE_CONVERTER), 'opening the evaluation data')

    # ------------------------------------------------------------------------------------------------------------------
    # State: its shapes, from which everything is checked before anything is computed
    # ------------------------------------------------------------------------------------------------------------------
    spec = _input_spec(evaluator, eval_batches)
    input_shapes, input_types = ({name: leaf.shape for name, leaf in spec.items()},
                                 {name: leaf.dtype for name, leaf in spec.items()})
    initializer = train_state_initializer_cls(
        None, model.get_initial_variables, input_shapes, partitioner, input_types)
    trainer = stack.enter_context((training_evaluator_cls or trainer_lib.Trainer)(
        model=model, train_state=initializer.global_train_state_shape, partitioner=partitioner,
        eval_names=list(eval_batches), summary_dir=summary_dir, train_state_axes=initializer.train_state_axes,
        rng=jax.random.key(0)))
    num_batches = 0

    def note(text):
      nonlocal num_batches
      if signals.requested and jax.process_count() == 1:
        raise EvaluationInterrupted
      progress.note(text)
      if progress.due:
        progress.update(num_batches, {})
      num_batches += 1

    evaluations = stack.enter_context(contextlib.closing(RunEvaluations(
        trainer=trainer, eval_batches=eval_batches, evaluator=evaluator, partitioner=partitioner,
        train_state_axes=initializer.train_state_axes, summary_dir=summary_dir, progress=progress, note_fn=note,
        read_fn=waiting.DataWaits(signals, lambda doing: EvaluationInterrupted()).iterate)))
    if best_metric is not None:
      evaluations.check_metric_name('best_metric', best_metric)

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints: those that are named, without those that are finished
    # ------------------------------------------------------------------------------------------------------------------
    progress.note('looking for checkpoints')
    record = eval_record.EvalRecord(output_dir, _identity(
        dataset_cfg, restore_checkpoint_cfg, fallback_init_rng, evaluator, infer_eval_cfg, inference_evaluator_cls,
        eval_batches, eval_steps, settings))
    todo: dict[int, str] = {}
    num_done = 0

    def is_done(path: str, step: int) -> bool:
      nonlocal num_done
      if multihost.broadcast_from_lead(np.bool_(record.is_done(path, step))):
        num_done += 1
        return True
      if todo.setdefault(step, path) != path:
        raise ConfigError(f'{todo[step]!r} and {path!r} are both of step {step}, under which results are written: '
                          'evaluate them into different folders (EVAL_OUTPUT_DIR).')
      return False

    restored_models = restore_lib.restore_for_inference(
        model, restore_checkpoint_cfg, partitioner, input_shapes, input_types, fallback_init_rng,
        train_state_initializer_cls=train_state_initializer_cls, is_done=is_done, applies_transforms=dry_run)
    progress.clear()
    if dry_run:
      print(_plan(todo, num_done, evaluations.num_batches, output_dir))
      return record.results
    if summarize_config_fn is not None and multihost.is_lead():
      summarize_config_fn(output_dir, None, 0)
    progress.log(f'{num_done} checkpoint(s) are finished already.' if num_done else f'Results go to {output_dir}.')

    # ------------------------------------------------------------------------------------------------------------------
    # Loop: while the next checkpoint is restored, the host still judges what the last one has made
    # ------------------------------------------------------------------------------------------------------------------
    shapes, finishing = initializer.global_train_state_shape, None
    del initializer, spec

    def finish() -> None:
      """Waits until the last checkpoint's results are on disk, and remembers it."""
      step, path = finishing
      numbers = evaluations.numbers(step)
      trainer.flush()
      evaluations.flush()
      record.add(step, path, numbers)
      if best_metric is not None:
        _check_found(best_metric, numbers)
        _write_best(output_dir, record, best_metric, best_metric_mode)

    damage, stopped, is_first = None, False, True
    signals.doing = 'finishing the batch'
    progress.begin(max(len(todo), 1) * evaluations.num_batches, 0)
    try:
      for state, _, path, step in restored_models:
        if finishing is not None:
          finish()
          finishing = None
        if is_first and multihost.is_lead():
          # What was written of unfinished ones, before the files are opened. Random parameters have no name in `todo`.
          summaries.discard_evaluations(output_dir, {*todo, step})
        is_first = False
        trainer.train_state = state
        del state
        progress.log(f'Evaluating {path or "random parameters"}: {report.run_header(shapes, partitioner)}.')
        evaluations.evaluate(evaluations.kinds)
        finishing = step, path
        trainer.train_state = shapes  # the devices need not hold two
        if multihost.any_process(signals.requested):
          stopped = True
          break
    except EvaluationInterrupted:
      stopped = True
    except CheckpointDamagedError as error:
      damage = error
    if finishing is not None:
      finish()
    if best_metric is not None and record.results:  # also where all was finished before
      _check_found(best_metric, dict(collections.ChainMap(*record.results.values())))
      _write_best(output_dir, record, best_metric, best_metric_mode)

    # ------------------------------------------------------------------------------------------------------------------
    # End: say what came of it
    # ------------------------------------------------------------------------------------------------------------------
    progress.clear()
    results = record.results
    if multihost.is_lead() and results:
      print(report.format_evaluations(results, evaluations.tasks), flush=True)
      if best_metric is not None and (best := _best(record, best_metric, best_metric_mode)) is not None:
        print(f'\nBest by {best_metric} ({best_metric_mode}): step {best:,}, '
              f'{runtime.format_number(results[best][best_metric])}, {record.path(best)}')
      print(f'\nResults are in {output_dir}.', flush=True)
    num_left = len([step for step in todo if step not in results])
    if stopped and (num_left or not results):
      name = signals.name or 'a signal to another process'
      raise StoppedOnSignalError(f'Stopped by {name}; {len(results)} checkpoint(s) are finished, {num_left} are left. '
                                 f'To resume:\n  {shlex.join(sys.orig_argv)}')
    if damage is not None:
      raise damage
    return results


def _check_output_dir(output_dir: Any) -> None:
  if not isinstance(output_dir, str) or not output_dir.strip():
    raise ConfigError(f'output_dir is {output_dir!r}; expected the path of a folder for results. Set EVAL_OUTPUT_DIR.')
  is_run = os.path.isdir(os.path.join(output_dir, 'train')) or (
      os.path.isdir(output_dir) and checkpoints.all_steps(output_dir, require_manifest=False))
  if is_run:
    raise ConfigError(f'output_dir is {output_dir!r}, the directory of a training run, whose own results would be '
                      'mixed with these. Choose a folder of its own (EVAL_OUTPUT_DIR), e.g. '
                      f'{os.path.join(output_dir, "eval")!r}.')


def _input_spec(evaluator: InferenceEvaluator | None,
                eval_batches: Mapping[str, data.EvalBatches]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns feature name to shape and dtype of a batch that the parameters can be initialised with."""
  if evaluator is not None:
    types = {name: leaf.dtype for task in evaluator.eval_tasks for name, leaf in task.element_spec.items()}
    return {name: jax.ShapeDtypeStruct(shape, types[name]) for name, shape in evaluator.model_feature_shapes.items()}
  return dict(next(iter(eval_batches.values())).element_spec)


def _identity(dataset_cfg, restore_cfg, fallback_init_rng, evaluator, infer_eval_cfg, inference_evaluator_cls,
              eval_batches, eval_steps, settings) -> dict[str, Any]:
  """Returns what the results depend on besides the checkpoint, as JSON values."""
  names = ('split', 'shuffle', 'use_cached', 'pack', 'trim_output_features', 'source')
  identity = {
      'dataset': {'mixture_or_task_name': dataset_cfg.name, 'seed': dataset_cfg.effective_seed,
                  'task_feature_lengths': dict(sorted(dataset_cfg.task_feature_lengths.items())),
                  **{name: getattr(dataset_cfg, name) for name in names}},
      'restore': {'fallback_init_rng': fallback_init_rng, **({} if restore_cfg is None else {
          'dtype': restore_cfg.dtype, 'assignment_map': repr(restore_cfg.assignment_map),
          'strict': restore_cfg.strict, 'fallback_to_scratch': restore_cfg.fallback_to_scratch})},
      'settings': dict(settings or {}),
  }
  if evaluator is not None:
    identity['inference_eval'] = {
        'tasks': {task.name: len(task.examples) for task in evaluator.eval_tasks},
        'num_examples': infer_eval_cfg.num_examples, 'by_seqio': inference_evaluator_cls is not None}
  if eval_batches:
    identity['training_eval'] = {
        'tasks': {name: batches.num_examples for name, batches in eval_batches.items()}, 'eval_steps': eval_steps}
  return identity


def _plan(todo: Mapping[int, str], num_done: int, num_batches: int, output_dir: str) -> str:
  lines = [f'Results go to {output_dir}.', f'{num_done} checkpoint(s) are finished already.',
           f'{len(todo)} checkpoint(s) are to be evaluated on {num_batches} batches each:']
  return '\n'.join([*lines, *(f'  {path}' for path in todo.values())])


def _check_found(best_metric: str, numbers: Mapping[str, float]) -> None:
  """Refuses a name that only the results could tell to be unknown."""
  if best_metric not in numbers:
    raise ConfigError(f'best_metric is {best_metric!r}, which was not among the metrics.'
                      f'{did_you_mean(best_metric, numbers)} The results are kept; run the command again with a '
                      'metric that there is.')


def _best(record: eval_record.EvalRecord, metric: str, mode: str) -> int | None:
  """Returns the step with the best value of a metric; of equal ones the later."""
  results = record.results
  best = checkpoints.KeepBest(1, metric, mode, keep_without_metrics=False).steps_to_keep(list(results), results)
  return next(iter(best), None)


def _write_best(output_dir: str, record: eval_record.EvalRecord, metric: str, mode: str) -> None:
  best = _best(record, metric, mode)
  if multihost.is_lead() and best is not None:
    eval_record.write_json(pathlib.Path(output_dir) / BEST_FILENAME, {
        'metric': metric, 'mode': mode, 'step': best, 'value': record.results[best][metric],
        'path': record.path(best)})
