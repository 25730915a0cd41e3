"""Train a model: the entire job, from configured objects to the last checkpoint, in one function.

    python -m t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze

The same command resumes a run that was stopped or killed; the result is bitwise that of an uninterrupted run.
"""

import os
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common import report
from t5x_lite.apps.common import starting_point
from t5x_lite.apps.common import trainer_setup
from t5x_lite.apps.common.evaluations import due_names
from t5x_lite.apps.common.options import takes_options
from t5x_lite.apps.train.batches import no_batch_error
from t5x_lite.apps.train.compilation import StepCompilation
from t5x_lite.apps.train.config import TrainConfig
from t5x_lite.apps.train.loop import TrainLoop
from t5x_lite.apps.train.open_run import OpenRun
from t5x_lite.apps.train.saves import TrainSaves
from t5x_lite.formatting import show
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import summaries
from t5x_lite.trainer.actions import TRAIN_METRIC_KEY
from t5x_lite.trainer.actions import run_actions

# T5X's names for `actions`.
__all__ = ['TRAIN_METRIC_KEY', 'run_actions', 'train']


@takes_options(TrainConfig)
def train(cfg: TrainConfig) -> tuple[int, TrainState]:
  """Train a model, with evaluations and checkpoints.

  The run starts from its own newest sound checkpoint in `model_dir`, else from that of `checkpoint_cfg.restore`, else
  from scratch. At each step, evaluations come before the save, so that a checkpoint covers all results up to its step.

  Returns:
    (number of completed steps, state); with `dry_run` the state's shapes.

  Raises:
    ConfigError: options are out of range or contradict each other; raised before any computation.
    DataError: the data is unknown or empty.
    CheckpointError: a checkpoint is missing, damaged or does not match the model.
    DirectoryInUseError: another run uses `model_dir`.
    DataStalledError: a training batch took longer than `max_batch_seconds`; the state is saved.
    Exception: errors of the training data; the state is saved first, except with several processes.
    NonFiniteMetricError: a loss, a gradient norm, the state or a watched metric was not finite, and the trainer's
      policy (`trainer.NonFinitePolicy`) does not continue; nothing is saved afterwards.
    SaveError: the last save failed, or several in a row.
    StoppedOnSignalError: stopped by SIGINT, SIGTERM or SIGHUP; the state is saved, and the message has the command to
      resume.
  """
  with OpenRun(cfg) as run:
    # Everything is made from shapes and checked before anything is computed or written.
    run.choose_start()
    run.open_data()
    run.plan_steps()
    run.make_trainer()
    run.make_evaluations()
    run.restore_position()
    first_step = run.start.step
    if cfg.dry_run:
      _describe(run)
      return first_step, run.state_shape

    # State: restored or new, before files, since a checkpoint may not match. The step compiles meanwhile.
    compilation = StepCompilation(
      run.stack,
      run.trainer,
      run.batches.element_spec,
      is_needed=first_step < run.last_step,
      phase_fn=run.events.phase,
    )
    _make_state(run)
    last_step, evaluation_due = _find_end(run)
    saves = _open_saves(run)

    # Files: results after the starting point are deleted, since they will be written again.
    _begin_files(run, last_step, redo_evaluation=run.start.resumes and bool(evaluation_due))

    # Loop: train, evaluate, save; roll back non-finite states if the policy allows it.
    loop = TrainLoop(
      run=run,
      saves=saves,
      last_step=last_step,
      evaluation_due=evaluation_due,
      first_data_state=_first_data_state(run),
    )
    run.begin_loop()
    run.stack.enter_context(runtime.reporting_errors())
    loop.begin(compilation)
    while (stretch := loop.next_stretch()) is not None:
      loop.train(stretch)
      loop.evaluate()
      loop.save()
      loop.recover()
    step, train_state = loop.end()
    if multihost.is_lead():
      bad_steps = run.trainer.non_finite.bad_steps_in_a_row
      show(report.final_report(run.cfg.model_dir, bad_steps_in_a_row=bad_steps), flush=True)
    return step, train_state


def _describe(run: OpenRun) -> None:
  """Check the values that a run would read before its first step, and print its plan."""
  start = run.start
  if start.step < run.last_step:
    _read_first_batch(run)
  starting_point.check_values(
    start, run.state_shape, requires_finite=run.trainer.non_finite.policy.tests
  )
  choices = trainer_setup.trace_steps(run.trainer, run.data)
  stretches = plan_lib.list_stretches(run.plan(start.step), run.last_step, run.cfg.longest_period)
  if stretches and not start.resumes:
    stretches = run.cfg.before_first_step(start.step) + stretches
  num_epochs = run.cfg.train_dataset_cfg.num_epochs
  text = report.describe(
    train_state_shape=run.state_shape,
    partitioner=run.cfg.partitioner,
    specs=run.data.element_specs,
    start=start,
    plan=plan_lib.describe_plan(stretches, run.last_step, num_epochs),
    num_microbatches=run.trainer.num_microbatches,
    attention_kernels=choices,
    fit=run.fit,
    model=run.cfg.model,
  )
  if multihost.is_lead():
    show(text)


def _read_first_batch(run: OpenRun) -> None:
  """Raise as a run would if the data has no first batch."""
  batches = run.batches
  if next(batches, None) is not None:
    return
  if batches.error is not None:
    raise batches.error
  if batches.has_ended and run.start.step == run.facts['start_step']:
    raise no_batch_error(run.cfg.train_dataset_cfg)


def _make_state(run: OpenRun) -> None:
  """Restore or initialize the state of the trainer."""
  devices = report.describe_devices(run.cfg.partitioner)
  with run.progress.working(
    f'making the state on {devices}: {run.start.description}; the training step is compiled meanwhile'
  ):
    restored = run.set_state(run.start)
  if restored is not None and run.trainer.non_finite.policy.tests:
    starting_point.check_finite(run.start, run.trainer.step_state)


def _find_end(run: OpenRun) -> tuple[float, tuple[str, ...]]:
  """Return the last step of the run, and the names of the evaluations that are due before the next step.

  A resumed run whose data has ended has no further step. If the run was stopped before that was known, the
  evaluations at the end of the run are due too.
  """
  whens = run.cfg.whens
  facts = run.facts
  step = run.start.step
  if not run.start.resumes:
    return run.last_step, tuple(name for name, when in whens.items() if when.at_start)
  # The run may have been stopped before this step's evaluation.
  due = due_names(facts.get('evaluation_due', False), tuple(whens))
  if not facts['start_step'] < step < run.last_step or not run.batches.reached_end():
    return run.last_step, due
  is_known = 'data_ended_at' in facts and facts['data_ended_at'] == facts['batch_number']
  if not is_known:
    due = tuple(name for name, when in whens.items() if name in due or when.at_end)
  return step, due


def _open_saves(run: OpenRun) -> TrainSaves | None:
  """Return what saves the state; None for a run without checkpoints."""
  cfg = run.cfg
  save_cfg = cfg.checkpoint_cfg.save
  if save_cfg is None:
    return None
  checkpointer = None
  if checkpoints.is_custom(save_cfg.checkpointer_cls, 'save', '_get_state_dict_for_save'):
    if run.is_saved_apart:
      raise checks.invalid(
        'SaveCheckpointConfig', 'save_base', 'True with this checkpointer_cls', False, 'Set it.'
      )
    checkpointer = checkpoints.save_checkpointer(
      save_cfg, run.state_shape, cfg.partitioner, cfg.model_dir
    )
    given = {name: value for name, value in checkpointer.retention.items() if value is not None}
    save_cfg = save_cfg.changed(**given)
  manager = checkpoints.CheckpointManager(cfg.model_dir, save_cfg=save_cfg, spool_dir=cfg.spool_dir)
  return TrainSaves(run.stack.enter_context(manager), run, checkpointer)


def _begin_files(run: OpenRun, last_step: float, *, redo_evaluation: bool) -> None:
  """Log the start, delete results after the starting point, and write everything that is known before the first step.

  Args:
    run: the run.
    last_step: step at which the run ends.
    redo_evaluation: whether the evaluations at the starting point are repeated.
  """
  cfg = run.cfg
  start = run.start
  shape = run.state_shape
  end = plan_lib.describe_end(last_step, cfg.train_dataset_cfg.num_epochs)
  run.progress.log(f'Training in {cfg.model_dir}: {report.run_header(shape, cfg.partitioner)}.')
  adapter = report.describe_adapter(cfg.model, shape)
  if adapter is not None:
    run.progress.log(adapter)
  run.progress.log(f'Starting from {start.description} at step {start.step:,}, {end}.')
  run.events.step = start.step
  run.events.emit('restored', source=start.description, resumes=start.resumes)
  run.events.open()
  if not multihost.is_lead():
    return
  last_kept = start.step if start.resumes else -1
  summaries.discard_after(cfg.model_dir, last_kept, redo_evaluation=redo_evaluation)
  partitioning.write_model_info(
    os.path.join(cfg.model_dir, 'model-info.txt'), shape, cfg.partitioner
  )
  partitioning.write_state_tree(
    os.path.join(cfg.model_dir, 'trainer_state_tree.txt'),
    shape.state_dict(),
    run.trainer.train_state_axes.state_dict(),
  )
  size = report.state_size(shape, cfg.partitioner)
  run.progress.log(size.describe())
  manager = run.trainer.train_metrics_manager
  if not start.resumes:
    manager.write_scalars(start.step, size.metrics(), events_only=True)
    report.report_truncation(
      run.data.sample_truncation_fn, run.progress.log, manager, run.events, start.step
    )
  if cfg.summarize_config_fn is not None:
    cfg.summarize_config_fn(cfg.model_dir, manager.summary_writer, start.step)
  run.trackers.start()


def _first_data_state(run: OpenRun) -> Any:
  """Return the position in the data at the start; None if no rollback can need it."""
  if run.start.resumes or not run.trainer.non_finite.policy.roll_back_limit:
    return None
  run.waits.until(run.data.batches.open, 'reading the position in the training data')
  return run.batches.get_state()
