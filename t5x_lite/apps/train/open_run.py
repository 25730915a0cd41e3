"""A training run while it is open: its directory, and everything that is made before the first step.

Everything is checked before anything is computed or written.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import logging
import os
from typing import Any, Self

import jax

from t5x_lite import checkpoints
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite import trackers
from t5x_lite.apps.common import adapter_base
from t5x_lite.apps.common import memory as memory_lib
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common import starting_point
from t5x_lite.apps.common import trainer_setup
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.evaluations import RunEvaluations
from t5x_lite.apps.train.batches import TrainBatches
from t5x_lite.apps.train.compilation import log_compilation
from t5x_lite.apps.train.config import TrainConfig
from t5x_lite.command_line import standard_streams
from t5x_lite.errors import ConfigError, ExitCode, StoppedOnSignalError
from t5x_lite.runtime import cluster_environment
from t5x_lite.storage import files
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import summaries


class OpenRun(contextlib.AbstractContextManager):
  """An open run. Its methods make its parts, and `train` calls them in the order of the class.

  Entering it locks the directory and handles signals; leaving it closes everything, the newest part first. A dry run
  locks and writes nothing.

  Attributes:
    cfg: configuration; the path of the directory has no links.
    stack: closes the parts of the run.
    signals: stop signals.
    trackers: threads that send the results to trackers; without any on other processes than the lead.
    progress: log and progress line.
    events: log of the run's events.
    watchdog: notified of each step.
    profiler: profiler of the configured steps.
    memory: memory of the devices.
    waits: waits for data before the first step.
    loop_waits: waits for data of the loop, which a signal ends by `waiting.Interrupted`.
    start: starting point of the run.
    data: data of the run.
    facts: facts of the run that checkpoints record.
    last_step: step at which the run ends; `math.inf` if no number of steps ends it.
    trainer: trainer, which holds the state; at first its shapes.
    initializer: initializer of the state.
    init_rng: key for new parameters.
    fit: arrays that will be new or not restored; None if they are unknown.
    is_saved_apart: whether checkpoints have an adapter without its base.
    evaluations: evaluations of the run.
    batches: training batches.
    collect_garbage: collects garbage at the configured steps.
  """

  def __init__(self, cfg: TrainConfig):
    """Store the configuration.

    Args:
      cfg: configuration of the run.

    Raises:
      ConfigError: the steps to profile are invalid.
    """
    self._given_dir = os.fspath(cfg.model_dir)
    cfg = dataclasses.replace(cfg, model_dir=checkpoints.without_links(cfg.model_dir))
    self.cfg = cfg
    files.set_store_seconds(cfg.model_dir, cfg.max_store_seconds)
    self.profiler = runtime.StepProfiler(cfg.profile_steps, os.path.join(cfg.model_dir, 'train'))

  def __enter__(self) -> Self:
    with contextlib.ExitStack() as stack:
      self._open(stack)
      self.stack = stack.pop_all()
    return self

  def __exit__(self, *exc_info) -> None:
    self.stack.__exit__(*exc_info)
    # The parts refer to the run: they would stay in memory until the next collection of garbage.
    vars(self).clear()

  def _open(self, stack: contextlib.ExitStack) -> None:
    cfg = self.cfg
    if cfg.dry_run:
      checkpoints.check_model_dir(cfg.model_dir)
    else:
      stack.enter_context(standard_streams.lossy_output('stdout', 'stderr'))
      checkpoints.check_is_shared(stack.enter_context(checkpoints.lock_model_dir(cfg.model_dir)))
      summaries.check_files(cfg.model_dir)
      files.check_regular(os.path.join(cfg.model_dir, runtime.EVENTS_FILE))
      checkpoints.recover_spooled(cfg.spool_dir, cfg.model_dir)
    process = jax.process_index()
    self.progress = runtime.Progress(
      enabled=multihost.is_lead() and not cfg.dry_run, process=process
    )
    stack.callback(self.progress.clear)
    stack.enter_context(self.progress.above_line())
    # Left after the events, whose last one tells the trackers how the run has ended.
    given = [trackers.make_tracker(each) for each in cfg.trackers if multihost.is_lead()]
    self.trackers = stack.enter_context(trackers.FollowerThreads(cfg.model_dir, given))
    # Before the events, so that signals during the hooks of the first and the last event stop the run as usual.
    self.signals = stack.enter_context(runtime.StopSignals('ending before the first step'))
    self.events = runtime.EventLog(
      os.path.join(cfg.model_dir, runtime.EVENTS_FILE),
      process=process,
      event_fns=(*_launcher_hooks(), *cfg.event_hooks),
      log_fn=self.progress.log,
    )
    if not cfg.dry_run:
      stack.enter_context(self.events)
    self.watchdog = _make_watchdog(cfg, self.events)
    self.waits = waiting.DataWaits(self.signals, lambda doing: self._stop_error(f', while {doing}'))
    self.memory = runtime.DeviceMemory(
      cfg.partitioner.mesh.local_devices, is_enabled=cfg.log_cfg.device_memory
    )
    if cfg.model_dir != self._given_dir:
      self.progress.log(
        f'MODEL_DIR {self._given_dir} is a link or below one: the run uses {cfg.model_dir} until it ends.'
      )

  def _stop_error(self, when: str) -> StoppedOnSignalError:
    """Return the error after a signal before the first step."""
    name = self.signals.name
    return StoppedOnSignalError(
      f'Stopped by {name} before the first step{when}; there is nothing to save.', signal=name
    )

  # ---- Parts ---------------------------------------------------------------------------------------------------------

  def choose_start(self) -> None:
    """Find the run's own newest sound checkpoint, else the configured one, else start with new parameters."""
    self.progress.note('looking for checkpoints')
    with runtime.reporting_errors():
      self.start = starting_point.choose_start(self.cfg.model_dir, self.cfg.checkpoint_cfg)
      if self.cfg.verify_base and self.start.base is not None:
        self.progress.note('comparing the base of the adapter')
        checkpoints.check_base(self.start.base, self.start.description, all_bytes=True)
    if starting_point.has_earlier_sentinels(
      self.start
    ):  # A run of an earlier version keeps its ids.
      self.cfg = self.cfg.with_earlier_sentinels()

  def open_data(self) -> None:
    """Open training data, sharded over processes and devices, and the data of evaluations."""
    self.data = trainer_setup.open_data(
      self.stack,
      self.cfg,
      num_prefetched_batches=self.cfg.num_prefetched_batches,
      num_retries=self.cfg.num_retries,
      concurrent_metrics=self.cfg.concurrent_metrics,
      log_dir=self.summary_dir,
      note_fn=self.progress.note,
      open_fn=self.waits.call,
    )
    names = [each.name for each in self.data.evaluations]
    self.cfg = self.cfg.without_missing_evaluations(names)
    save_cfg = self.cfg.checkpoint_cfg.save
    if save_cfg is not None and save_cfg.save_dataset:
      # A pipeline without a known position is an error now instead of at the first save.
      self.waits.until(self.data.batches.open, 'reading the position in the training data')
    self.stack.enter_context(runtime.reporting_errors())

  def plan_steps(self) -> None:
    """Find the first and the last step."""
    self.facts = starting_point.facts_of_run(self.start, self.cfg.random_seed)
    start_step = self.facts['start_step']
    self.last_step = _find_last_step(self.cfg, self.start, start_step)
    self.progress.step = self.start.step
    self.profiler.check(start_step, self.last_step)
    plan_lib.warn_of_late_steps(self.cfg.whens, self.last_step)

  def make_trainer(self) -> None:
    """Make the trainer from the shapes of the state, and check that they fit the checkpoint and the memory."""
    cfg = self.cfg
    self.trainer, self.initializer, self.init_rng = trainer_setup.make_trainer(
      self.stack,
      cfg,
      self.data,
      random_seed=self.facts['random_seed'],
      summary_dir=self.summary_dir,
      first_step=self.start.step,
      last_step=self.last_step,
    )
    shape = self.state_shape
    memory_lib.check_run(shape, cfg.partitioner, self.data.element_specs)
    if not self.start.is_new:
      checkpoints.check_keeps_dtypes(shape.state_dict(), self.start.restore_cfg)
    self.start = starting_point.without_other_optimizer(self.start, shape)
    self.fit = starting_point.check_start(
      self.start, shape, cfg.model, applies_transforms=cfg.dry_run
    )
    self.is_saved_apart = adapter_base.is_saved_apart(
      cfg, cfg.checkpoint_cfg.save, self.start, self.fit, shape
    )
    starting_point.report_learning_rates(
      self.start, self.trainer, shape, self.last_step, fit=self.fit
    )

  def make_evaluations(self) -> None:
    """Make the evaluations, which a signal interrupts, and check the metrics of save policies."""
    self.loop_waits = waiting.DataWaits(self.signals, on_wait=self._on_wait)
    self.evaluations = RunEvaluations(
      trainer=self.trainer,
      evaluations=self.data.evaluations,
      summary_dir=self.summary_dir,
      progress=self.progress,
      note_fn=self._note_batch,
      compiling_fn=functools.partial(log_compilation, self.watchdog, self.progress),
      actions=self.cfg.actions_by_mode,
      read_fn=self.loop_waits.iterate,
    )
    self.stack.enter_context(contextlib.closing(self.evaluations))
    save_cfg = self.cfg.checkpoint_cfg.save
    if save_cfg is not None:
      self.evaluations.check_metric_names(checkpoints.metric_names(save_cfg))

  def restore_position(self) -> None:
    """Restore the position in the data, before the state: the checkpoint may hold a position in other data."""
    batches = self.data.batches
    data_state, num_data_processes = starting_point.read_position(self.start)
    if data_state is not None:
      starting_point.warn_of_process_count(self.start, num_data_processes, batches)
      batches.set_state(data_state)
      self.waits.until(batches.open, 'restoring the position in the training data')
    elif self.start.resumes:
      logging.getLogger(__name__).warning(
        'The checkpoint has no position in the data (save_dataset=False): the data starts from its beginning.'
      )
    starting_point.record_data(self.start, self.facts, self.cfg.train_dataset_cfg)
    self.batches = TrainBatches(
      batches,
      should_stop=self.signals.is_due,
      waits=self.loop_waits,
      facts={} if data_state is None else self.facts,
      first_step=self.start.step,
      max_batch_seconds=self.cfg.max_batch_seconds,
      is_computing=self._is_computing,
      phase_fn=self.events.phase,
    )

  def begin_loop(self) -> None:
    """Start the watchdog, and leave the collection of garbage to the loop.

    Raises:
      StoppedOnSignalError: a signal has arrived.
    """
    if self.signals.is_due():
      raise self._stop_error('')
    self.collect_garbage = self.stack.enter_context(runtime.manual_gc(self.cfg.gc_period > 0))
    self.stack.callback(self.watchdog.close)
    self.watchdog.start()
    self.stack.callback(self.profiler.close)

  # ---- For the parts -------------------------------------------------------------------------------------------------

  @property
  def summary_dir(self) -> str | None:
    """Folder of metrics; None in a dry run."""
    if self.cfg.dry_run:
      return None
    return self.cfg.model_dir

  @property
  def state_shape(self) -> TrainState:
    """Shapes of the state."""
    return self.initializer.global_train_state_shape

  def plan(self, first_step: int) -> Iterator[plan_lib.Stretch]:
    """Yield the stretches of steps after `first_step`."""
    return self.cfg.plan(
      first_step, last_step=self.last_step, pause_steps=self.profiler.pause_steps
    )

  def set_state(self, point: starting_point.StartingPoint) -> checkpoints.RestoredCheckpoint | None:
    """Give the trainer the state of a starting point; see `starting_point.set_state`."""
    return starting_point.set_state(
      self.trainer, point, self.initializer, self.cfg.partitioner, self.cfg.model, self.init_rng
    )

  def _on_wait(self) -> None:
    self.watchdog.beat()
    self.events.tick()

  def _note_batch(self, text: str) -> None:
    """Show that a batch of an evaluation follows."""
    if self.signals.is_due():
      raise waiting.Interrupted
    self.watchdog.beat(self.trainer.step)
    self.events.tick()
    self.progress.note(text)

  def _is_computing(self) -> bool:
    """Return whether the device still computes a step."""
    step: Any = self.trainer.step_state.step
    return not self.cfg.dry_run and not step.is_ready()


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


def _find_last_step(
  cfg: TrainConfig, start: starting_point.StartingPoint, start_step: int
) -> float:
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
