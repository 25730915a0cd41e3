"""Train a model: the entire job, from configured objects to the last checkpoint, in one function.

    python -m t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze

The same command resumes a run that was stopped or killed; the result is bitwise that of an uninterrupted run.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import logging
import os
from typing import Any

import jax

from t5x_lite import checkpoints
from t5x_lite import evaluation
from t5x_lite import files
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite import standard_streams
from t5x_lite import summaries
from t5x_lite import trainer as trainer_lib
from t5x_lite.actions import TRAIN_METRIC_KEY
from t5x_lite.actions import run_actions
from t5x_lite.apps.common import memory as memory_lib
from t5x_lite.apps.common import parts as parts_lib
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common import report
from t5x_lite.apps.common import start as start_lib
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.evaluations import EvaluationInterrupted
from t5x_lite.apps.common.evaluations import RunEvaluations
from t5x_lite.apps.common.evaluations import due_names
from t5x_lite.apps.common.options import takes_options
from t5x_lite.apps.train.batches import TrainBatches
from t5x_lite.apps.train.batches import no_batch_error
from t5x_lite.apps.train.compilation import StepCompilation
from t5x_lite.apps.train.compilation import log_compilation
from t5x_lite.apps.train.config import TrainConfig
from t5x_lite.apps.train.loop import TrainLoop
from t5x_lite.apps.train.saves import TrainSaves
from t5x_lite.apps.train.step_log import StepLog
from t5x_lite.errors import ConfigError, ExitCode, StoppedOnSignalError
from t5x_lite.formatting import show
from t5x_lite.runtime import cluster_environment
from t5x_lite.train_state import TrainState

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
  given_dir = cfg.model_dir
  cfg = dataclasses.replace(cfg, model_dir=checkpoints.without_links(cfg.model_dir))
  files.set_store_seconds(cfg.model_dir, cfg.max_store_seconds)
  profiler = runtime.StepProfiler(cfg.profile_steps, os.path.join(cfg.model_dir, 'train'))
  with contextlib.ExitStack() as stack:
    if cfg.dry_run:
      checkpoints.check_model_dir(cfg.model_dir)
    else:
      stack.enter_context(standard_streams.lossy_output('stdout', 'stderr'))
      checkpoints.check_is_shared(stack.enter_context(checkpoints.lock_model_dir(cfg.model_dir)))
      summaries.check_files(cfg.model_dir)
      files.check_regular(os.path.join(cfg.model_dir, runtime.EVENTS_FILE))
      checkpoints.recover_spooled(cfg.spool_dir, cfg.model_dir)
    progress = runtime.Progress(
      enabled=multihost.is_lead() and not cfg.dry_run, process=jax.process_index()
    )
    stack.callback(progress.clear)
    stack.enter_context(progress.above_line())
    # Before the events, so that signals during the hooks of the first and the last event stop the run as usual.
    signals = stack.enter_context(runtime.StopSignals('ending before the first step'))
    events = runtime.EventLog(
      os.path.join(cfg.model_dir, runtime.EVENTS_FILE),
      process=jax.process_index(),
      event_fns=(*_launcher_hooks(), *cfg.event_hooks),
      log_fn=progress.log,
    )
    if not cfg.dry_run:
      stack.enter_context(events)
    watchdog = _make_watchdog(cfg, events)
    opening = waiting.DataWaits(
      signals,
      lambda doing: StoppedOnSignalError(
        f'Stopped by {signals.name} before the first step, while {doing}; there is nothing to save.',
        signal=signals.name,
      ),
    )
    memory = runtime.DeviceMemory(
      cfg.partitioner.mesh.local_devices, is_enabled=cfg.log_cfg.device_memory
    )

    if cfg.model_dir != os.fspath(given_dir):
      progress.log(
        f'MODEL_DIR {os.fspath(given_dir)} is a link or below one: the run uses {cfg.model_dir} until it ends.'
      )

    # Starting point: this run's checkpoint, the configured one, or none. A run of an earlier version keeps its ids.
    progress.note('looking for checkpoints')
    with runtime.reporting_errors():
      start = start_lib.choose_start(cfg.model_dir, cfg.checkpoint_cfg)
    if start_lib.has_earlier_sentinels(start):
      cfg = cfg.with_earlier_sentinels()

    # Data: an iterator of global batches, sharded over processes and devices, and finite batches for evaluation.
    run_data = parts_lib.open_data(
      stack,
      cfg,
      num_prefetched_batches=cfg.num_prefetched_batches,
      num_retries=cfg.num_retries,
      concurrent_metrics=cfg.concurrent_metrics,
      log_dir=None if cfg.dry_run else cfg.model_dir,
      note_fn=progress.note,
      open_fn=opening.call,
    )
    cfg = cfg.without_missing_evaluations([each.name for each in run_data.evaluations])
    batches = run_data.batches
    save_cfg = cfg.checkpoint_cfg.save
    if save_cfg is not None and save_cfg.save_dataset:
      # A pipeline without a known position is an error now instead of at the first save.
      opening.until(batches.open, 'reading the position in the training data')

    # Plan: the first and the last step.
    stack.enter_context(runtime.reporting_errors())
    first_step = start.step
    facts = start_lib.facts_of_run(start, cfg.random_seed)
    last_step = _find_last_step(cfg, start, facts['start_step'])
    num_epochs = cfg.train_dataset_cfg.num_epochs
    progress.step = first_step
    profiler.check(facts['start_step'], last_step)
    plan_lib.warn_of_late_steps(cfg.whens, last_step)

    # Trainer: built from the state's shapes, so that everything is checked before anything is computed.
    trainer, initializer, init_rng = parts_lib.make_trainer(
      stack,
      cfg,
      run_data,
      random_seed=facts['random_seed'],
      summary_dir=None if cfg.dry_run else cfg.model_dir,
      first_step=first_step,
      last_step=last_step,
    )
    state_shape = initializer.global_train_state_shape
    memory_lib.check_run(state_shape, cfg.partitioner, run_data.element_specs)
    if not start.is_new:
      checkpoints.check_keeps_dtypes(state_shape.state_dict(), start.restore_cfg)
    start = start_lib.without_other_optimizer(start, state_shape)
    fit = start_lib.check_start(start, state_shape, cfg.model, applies_transforms=cfg.dry_run)
    start_lib.report_learning_rates(start, trainer, state_shape, last_step, fit=fit)

    def on_wait() -> None:
      watchdog.beat()
      events.tick()

    def is_computing() -> bool:
      step: Any = trainer.step_state.step
      return not cfg.dry_run and not step.is_ready()

    def note(text: str) -> None:
      if signals.is_due():
        raise EvaluationInterrupted
      watchdog.beat(trainer.step)
      events.tick()
      progress.note(text)

    waits = waiting.DataWaits(signals, lambda doing: EvaluationInterrupted(), on_wait=on_wait)
    run_evaluations = RunEvaluations(
      trainer=trainer,
      evaluations=run_data.evaluations,
      summary_dir=None if cfg.dry_run else cfg.model_dir,
      progress=progress,
      note_fn=note,
      compiling_fn=functools.partial(log_compilation, watchdog, progress),
      actions=cfg.actions_by_mode,
      read_fn=waits.iterate,
    )
    stack.enter_context(contextlib.closing(run_evaluations))
    names = ()
    if save_cfg is not None:
      names = checkpoints.metric_names(save_cfg)
    run_evaluations.check_metric_names(names)
    plan_fn = functools.partial(cfg.plan, last_step=last_step, pause_steps=profiler.pause_steps)

    # Data: the position in it, before the state is read, since a checkpoint may hold a position in other data.
    data_state, num_data_processes = start_lib.read_position(start)
    if data_state is not None:
      start_lib.warn_of_process_count(start, num_data_processes, batches)
      batches.set_state(data_state)
      opening.until(batches.open, 'restoring the position in the training data')
    elif start.resumes:
      logging.getLogger(__name__).warning(
        'The checkpoint has no position in the data (save_dataset=False): the data starts from its beginning.'
      )
    start_lib.record_data(start, facts, cfg.train_dataset_cfg)
    train_batches = TrainBatches(
      batches,
      should_stop=signals.is_due,
      ends_wait=lambda: signals.ends_waits,
      facts={} if data_state is None else facts,
      first_step=first_step,
      max_batch_seconds=cfg.max_batch_seconds,
      on_wait=on_wait,
      is_computing=is_computing,
      phase_fn=events.phase,
    )
    if cfg.dry_run:
      if first_step < last_step:
        _read_first_batch(cfg, train_batches, is_first=first_step == facts['start_step'])
      start_lib.check_values(start, state_shape, requires_finite=trainer.non_finite.policy.tests)
      choices = parts_lib.trace_steps(trainer, run_data)
      text = report.describe(
        train_state_shape=state_shape,
        partitioner=cfg.partitioner,
        specs=run_data.element_specs,
        start=start,
        plan=plan_lib.describe_plan(
          plan_lib.list_stretches(plan_fn(first_step), last_step, cfg.longest_period),
          last_step,
          num_epochs,
        ),
        num_microbatches=trainer.num_microbatches,
        attention_kernels=choices,
        fit=fit,
      )
      if multihost.is_lead():
        show(text)
      return first_step, state_shape

    # State: restored or new, before anything is written, since a checkpoint may not match. The step compiles meanwhile.
    compilation = StepCompilation(
      stack, trainer, batches.element_spec, is_needed=first_step < last_step, phase_fn=events.phase
    )
    progress.note(f'making the state: {start.description}')
    restored = start_lib.set_state(
      trainer, start, initializer, cfg.partitioner, cfg.model, init_rng
    )
    if restored is not None and trainer.non_finite.policy.tests:
      start_lib.check_finite(start, trainer.step_state)
    configured_last_step = last_step
    # The run may have been stopped before this step's evaluation.
    last_step, evaluation_due = _find_end(last_step, train_batches, facts, start, cfg.whens)
    manager = None
    if save_cfg is not None:
      manager = stack.enter_context(
        checkpoints.CheckpointManager(cfg.model_dir, save_cfg=save_cfg, spool_dir=cfg.spool_dir)
      )

    # Files: results after the starting point are deleted, since they will be written again.
    progress.log(f'Training in {cfg.model_dir}: {report.run_header(state_shape, cfg.partitioner)}.')
    progress.log(
      f'Starting from {start.description} at step {first_step:,}, '
      f'{plan_lib.describe_end(last_step, num_epochs)}.'
    )
    events.step = first_step
    events.emit('restored', source=start.description, resumes=start.resumes)
    events.open()
    if multihost.is_lead():
      _begin_files(
        cfg, start, run_data, trainer, progress, state_shape, redo_evaluation=bool(evaluation_due)
      )
    if not start.resumes:
      evaluation_due = tuple(name for name, when in cfg.whens.items() if when.at_start)

    # Loop: train, evaluate, save; roll back non-finite states if the policy allows it.
    first_data_state = None
    if not start.resumes and trainer.non_finite.policy.roll_back_limit:
      opening.until(batches.open, 'reading the position in the training data')
      first_data_state = train_batches.get_state()
    saves = None
    if manager is not None:
      saves = TrainSaves(
        manager,
        cfg,
        trainer=trainer,
        evaluations=run_evaluations,
        batches=train_batches,
        run_facts=facts,
        progress=progress,
        events=events,
        signals=signals,
      )
    if signals.is_due():
      raise StoppedOnSignalError(
        f'Stopped by {signals.name} before the first step; there is nothing to save.',
        signal=signals.name,
      )
    del restored, run_data, state_shape  # Frees their memory for the loop.
    collect_garbage = stack.enter_context(runtime.manual_gc(cfg.gc_period > 0))
    stack.callback(watchdog.close)
    watchdog.start()
    stack.callback(profiler.close)
    loop = TrainLoop(
      cfg=cfg,
      trainer=trainer,
      initializer=initializer,
      init_rng=init_rng,
      compilation=compilation,
      batches=train_batches,
      evaluations=run_evaluations,
      saves=saves,
      start=start,
      plan_fn=plan_fn,
      last_step=last_step,
      configured_last_step=configured_last_step,
      facts=facts,
      first_data_state=first_data_state,
      progress=progress,
      watchdog=watchdog,
      events=events,
      profiler=profiler,
      step_log=StepLog(cfg.log_cfg, progress, memory, trainer.train_metrics_manager, first_step),
      signals=signals,
      collect_garbage_fn=collect_garbage,
      evaluation_due=evaluation_due,
    )
    stack.enter_context(runtime.reporting_errors())
    loop.begin()
    while (stretch := loop.next_stretch()) is not None:
      loop.train(stretch)
      loop.evaluate()
      loop.save()
      loop.recover()
    step, train_state = loop.end()
    if multihost.is_lead():
      show(
        report.final_report(
          cfg.model_dir, bad_steps_in_a_row=trainer.non_finite.bad_steps_in_a_row
        ),
        flush=True,
      )
    return step, train_state


def _read_first_batch(cfg: TrainConfig, batches: TrainBatches, *, is_first: bool) -> None:
  """Raise as a run would if the data has no first batch; `is_first` tells whether the run has had no step before."""
  if next(batches, None) is not None:
    return
  if batches.error is not None:
    raise batches.error
  if batches.has_ended and is_first:
    raise no_batch_error(cfg.train_dataset_cfg)


def _make_watchdog(cfg: TrainConfig, events: runtime.EventLog) -> runtime.Watchdog:
  """Return the watchdog; in a cluster, connect it and the events with the monitor of the processes."""
  options = {}
  if (monitor := runtime.current_monitor()) is not None:
    monitor.state_fn = lambda: events.state
    monitor.call_at_end(
      lambda failure: events.stop('other_process', process=failure.process, message=str(failure))
    )
    options = {
      'others_fn': monitor.describe_processes,
      'others_are_busy_fn': lambda: monitor.others_are_in(('evaluation', 'saving', 'compiling')),
      'on_timeout': lambda message: monitor.end_all(message, ExitCode.WATCHDOG),
    }
  return runtime.Watchdog(
    cfg.max_step_seconds,
    max_evaluation_seconds=cfg.max_evaluation_seconds,
    max_saving_seconds=cfg.max_saving_seconds,
    warn_every_seconds=cfg.warn_every_seconds,
    phase_fn=events.phase,
    **options,
  )


def _launcher_hooks() -> tuple[Callable[[runtime.Event], None], ...]:
  """Return the hook that tells `launch` of the steps from which a restart can continue, if it asks for them."""
  if jax.process_index() or not cluster_environment.tells_launcher():
    return ()

  def tell(event: runtime.Event) -> None:
    if event.kind == 'restored':
      cluster_environment.tell_launcher('restored', event.step)
    elif event.kind == 'save_committed':
      cluster_environment.tell_launcher('saved', event.details['checkpoint'])

  return (tell,)


def _find_last_step(cfg: TrainConfig, start: start_lib.StartingPoint, start_step: int) -> float:
  """Return the last step of the configuration, see `plan.last_step_of_run`; raise if `start` is at a later step."""
  last_step = plan_lib.last_step_of_run(cfg.total_steps, cfg.relative_steps, start_step)
  if (
    cfg.total_steps is not None and cfg.relative_steps is not None
  ):  # T5X's run files always bind total_steps
    logging.getLogger(__name__).info(
      'relative_steps=%s replaces total_steps=%s: the run ends at step %s.',
      cfg.relative_steps,
      cfg.total_steps,
      last_step,
    )
  if start.step > last_step:
    raise ConfigError(
      f'{start.path or start.description} is at step {start.step}, past the end of the run at step '
      f'{last_step}. Raise total_steps (TRAIN_STEPS), which includes the steps of the checkpoint, or '
      'choose another model_dir.'
    )
  return last_step


def _find_end(
  last_step: float,
  batches: TrainBatches,
  facts: Mapping[str, Any],
  start: start_lib.StartingPoint,
  whens: Mapping[str, evaluation.When],
) -> tuple[float, tuple[str, ...]]:
  """Return the last step of the run, and the names of the evaluations that are due before the next step.

  A resumed run whose data has ended has no further step. If the run was stopped before that was known, the
  evaluations at the end of the run are due too.

  Args:
    last_step: step at which the run ends if its data does not end before.
    batches: training batches.
    facts: facts of the run.
    start: the starting point.
    whens: when each evaluation is due, by its name.
  """
  due = due_names(facts.get('evaluation_due', False), tuple(whens))
  if (
    not start.resumes
    or not facts['start_step'] < start.step < last_step
    or not batches.reached_end()
  ):
    return last_step, due
  is_known = 'data_ended_at' in facts and facts['data_ended_at'] == facts['batch_number']
  if not is_known:
    due = tuple(name for name, when in whens.items() if name in due or when.at_end)
  return start.step, due


def _begin_files(
  cfg: TrainConfig,
  start: start_lib.StartingPoint,
  run_data: parts_lib.RunData,
  trainer: trainer_lib.BaseTrainer,
  progress: runtime.Progress,
  state_shape: TrainState,
  *,
  redo_evaluation: bool,
) -> None:
  """Delete results after the starting point, and write everything that is known before the first step.

  Args:
    cfg: configuration of the run.
    start: the starting point.
    run_data: data of the run, sampled once to report truncated texts.
    trainer: trainer, whose metrics are written.
    progress: log.
    state_shape: shapes of the state.
    redo_evaluation: whether the evaluations at the starting point are repeated.
  """
  last_step = start.step if start.resumes else -1
  summaries.discard_after(cfg.model_dir, last_step, redo_evaluation=redo_evaluation)
  partitioning.write_model_info(
    os.path.join(cfg.model_dir, 'model-info.txt'), state_shape, cfg.partitioner
  )
  partitioning.write_state_tree(
    os.path.join(cfg.model_dir, 'trainer_state_tree.txt'),
    state_shape.state_dict(),
    trainer.train_state_axes.state_dict(),
  )
  size = report.state_size(state_shape, cfg.partitioner)
  progress.log(size.describe())
  if not start.resumes:
    trainer.train_metrics_manager.write_scalars(start.step, size.metrics(), events_only=True)
    report.report_truncation(
      run_data.sample_truncation_fn, progress.log, trainer.train_metrics_manager, start.step
    )
  if cfg.summarize_config_fn is not None:
    cfg.summarize_config_fn(cfg.model_dir, trainer.train_metrics_manager.summary_writer, start.step)
