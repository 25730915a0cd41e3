"""Loop of a training run: stretches of steps, with evaluations, saves and rollbacks at the pauses between them."""

from collections.abc import Iterator, Mapping
import contextlib
import copy
import dataclasses
import enum
import functools
import logging
import math
from typing import Any

import clu.values
import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite.apps.common import report
from t5x_lite.apps.common import speed
from t5x_lite.apps.common import starting_point
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.plan import Stretch
from t5x_lite.apps.train.batches import no_batch_error
from t5x_lite.apps.train.compilation import StepCompilation
from t5x_lite.apps.train.open_run import OpenRun
from t5x_lite.apps.train.saves import TrainSaves
from t5x_lite.apps.train.step_log import StepLog
from t5x_lite.errors import (
  CheckpointDamagedError,
  NonFiniteMetricError,
  StoppedOnSignalError,
  did_you_mean,
)
from t5x_lite.evaluation import Threshold
from t5x_lite.formatting import capitalized
from t5x_lite.storage import files
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import actions as actions_lib
from t5x_lite.trainer import summaries
from t5x_lite.trainer import trainer as trainer_lib
from t5x_lite.trainer.actions import TRAIN_METRIC_KEY
from t5x_lite.trainer.actions import ActionMode
from t5x_lite.trainer.actions import Stop
from t5x_lite.trainer.actions import run_actions


class EndKind(enum.IntEnum):
  """Kinds of the end of a run. If there are several reasons at once, the greatest kind decides."""

  ACTION = 1
  COMPLETED = 2
  DATA_ENDED = 3  # before the last step
  DATA_ERROR = 4
  FUNCTION_ERROR = 5  # of a user's function
  INTERRUPTION = 6
  NON_FINITE = 7  # a metric or the state, and the policy allows no further rollback


@dataclasses.dataclass(frozen=True)
class RunEnd:
  """Why a run ends.

  Attributes:
    kind: what ends the run.
    reason: its name for the log, e.g. that of a signal.
    error: its error, or None.
  """

  kind: EndKind
  reason: str = ''
  error: Exception | None = None

  @property
  def saves(self) -> bool:
    """Whether the state is saved."""
    return self.kind is not EndKind.NON_FINITE

  def __str__(self) -> str:
    """Return the reason with the message of its error."""
    if self.error is None:
      return self.reason
    return f'{self.reason}: {self.error}'


@dataclasses.dataclass(kw_only=True)
class TrainLoop:
  """Loop of a run. `train` calls its methods in order.

  Attributes:
    run: the run.
    saves: saves the state; None for a run without checkpoints.
    last_step: step at which the run ends: `run.last_step`, or that of a resumed run whose data has ended before.
    evaluation_due: names of the evaluations that are due at the current step.
    first_data_state: position in the data at the start; None if no rollback can need it.
  """

  run: OpenRun
  saves: TrainSaves | None
  last_step: float
  evaluation_due: tuple[str, ...]
  first_data_state: Any

  def __post_init__(self):
    run = self.run
    actions = run.cfg.actions_by_mode
    self._first_actions_state = actions_lib.get_actions_state(actions)
    actions_lib.set_actions_state(actions, run.facts.get('actions', {}))
    run.trainer.non_finite.bad_steps_in_a_row = run.facts.get('bad_steps_in_a_row', 0)
    # Step at which this process, or the newest rollback, began.
    self._first_step = run.start.step
    self._step_log = StepLog(
      run.cfg.log_cfg,
      run.progress,
      run.memory,
      run.trainer.train_metrics_manager,
      self._first_step,
      speed_fn=functools.partial(speed.describe, run.trainer, run.batches.tokens_per_step),
    )
    self._stretches = run.plan(self._first_step)
    self._stretch: Stretch | None = None
    # Why the run ends, as far as it is known; see `_end_run`.
    self._end: RunEnd | None = None
    self._unknown_metrics: set[str] = set()
    # Step of the newest results of each evaluation.
    self._evaluated_at: dict[str, int] = {}
    # Best values, for `WhenBest`, at the start of the run.
    self._first_best: list[Any] = []
    # Newest step with known metrics.
    self._last_seen: tuple[int, Mapping[str, Any]] | None = None

  # ---- Before the first step -----------------------------------------------------------------------------------------

  def begin(self, compilation: StepCompilation) -> None:
    """Wait for the compiled training step; compute the evaluation and the save that are due before the first step."""
    run = self.run
    if self._first_step < self.last_step:
      devices = report.describe_devices(run.cfg.partitioner)
      with run.progress.working(f'compiling the training step for {devices}'):
        speed.count_flops(run.trainer, run.batches.element_spec)
        compiled = compilation.finish()
      run.progress.log(str(compiled))
      run.events.emit(
        'compiled', compilation_seconds=compiled.seconds, cache_hit=compiled.cache_hit
      )
      run.progress.note('waiting for the first step')
    if self.saves is None:
      run.signals.doing = 'finishing the step'
    else:
      run.signals.doing = 'finishing the step and saving'
    if self.evaluation_due:
      self._evaluate(record_metrics=run.start.resumes and self.saves is not None)
    if self.saves is not None and not run.start.resumes:
      reasons = self.saves.reasons(self._first_step)
      if reasons:
        with run.watchdog.watching('saving'):
          self.saves.save(reasons, self.evaluation_due)
    self._first_best = run.facts.get('best_metrics', [])
    self._begin_progress(self._first_step)

  def next_stretch(self) -> Stretch | None:
    """Return the next stretch of steps; None at the end of the run."""
    run = self.run
    if self._end is not None or run.trainer.stop_training or run.batches.has_ended:
      return None
    return next(self._stretches, None)

  # ---- A stretch -----------------------------------------------------------------------------------------------------

  def train(self, stretch: Stretch) -> None:
    """Train a stretch, unless the run must stop earlier, and call the training actions with its metrics."""
    run = self.run
    trainer = run.trainer
    summary = None
    preemption = None
    self._stretch = stretch
    self._step_log.start_clock()
    with run.watchdog.watching():
      run.profiler.before(stretch.first, lambda: trainer.finish_steps(self._on_step))
      try:
        summary = trainer.train(
          self._step_log.logged(run.batches),
          stretch.num_steps,
          stretch.first,
          on_step=self._on_step,
          should_stop=run.batches.should_stop,
        )
        self._look_for_end_of_data()
      except trainer_lib.PreemptionError as error:
        preemption = RunEnd(EndKind.INTERRUPTION, 'PreemptionError', error)
      interruption = self._signal() or preemption
      run.profiler.after(trainer.step, lambda: trainer.finish_steps(self._on_step))
    actions = run.cfg.actions_by_mode
    may_stop = ActionMode.TRAIN in actions or interruption is not None or not self._is_complete
    if stretch.evaluations or stretch.save or may_stop or run.batches.has_ended:
      # Metrics are read one step late: read the last ones before evaluating or saving.
      with run.watchdog.watching():
        trainer.finish_steps(self._on_step)
    if summary is not None and ActionMode.TRAIN in actions:
      values = summary.result()
      if values:
        metrics = {TRAIN_METRIC_KEY: values}
        stop = run_actions(ActionMode.TRAIN, actions, lambda: trainer.train_state, metrics)
        self._end_by_action(stop)
    if trainer.step > stretch.first or run.batches.has_ended:
      with self._keeping_error():
        self.evaluation_due = ()
        if self._is_complete:
          self.evaluation_due = self._due_evaluations(stretch, summary)
    self._end_by_data_error()
    self._end_unless_finished(interruption)

  @contextlib.contextmanager
  def _keeping_error(self) -> Iterator[None]:
    """Context of a user's function whose error ends the run after a save; several processes cannot save alone."""
    try:
      yield
    except Exception as error:  # users' functions may raise anything
      if jax.process_count() > 1:
        raise
      self._end_run(_of_error(EndKind.FUNCTION_ERROR, error))

  def _due_evaluations(
    self, stretch: Stretch, summary: trainer_lib.MetricValueMapFuture | None
  ) -> tuple[str, ...]:
    """Return the names of the evaluations at the end of a stretch whose condition holds."""
    run = self.run
    whens = run.cfg.whens
    step = run.trainer.step
    last_step = self.last_step
    names = stretch.evaluations
    if run.batches.has_ended or self._ends_by(EndKind.ACTION):
      last_step = step
      names = tuple(name for name, when in whens.items() if when.is_due(step, step))
      if step == stretch.first:  # The data has ended after a step with evaluations.
        names = tuple(name for name in names if self._evaluated_at.get(name) != step)

    def is_met(when):
      if when.condition is None or when.is_due_at_end(step, last_step):
        return True
      assert summary is not None  # the stretch has steps
      numbers = {}
      for name, value in summary.result().items():
        if isinstance(value, clu.values.Scalar):
          numbers[name] = float(np.asarray(value.value))
      self._warn_of_unknown_metric(when.condition, numbers)
      holds = checks.call_custom(
        'When', 'condition', 'step, metrics', when.condition, step, numbers
      )
      if holds is None or np.ndim(holds):
        raise checks.invalid(
          'When',
          'condition',
          'a function that returns True or False',
          holds,
          'Return True to evaluate.',
        )
      # Times differ between processes, which must decide equally.
      return bool(multihost.broadcast_from_lead(np.bool_(bool(holds))))

    return tuple(name for name in names if is_met(whens[name]))

  def _warn_of_unknown_metric(self, condition: Any, metrics: Mapping[str, float]) -> None:
    """Warn once if the metrics of training lack that of a `Threshold`, whose evaluation is then left out."""
    if not isinstance(condition, Threshold) or not metrics:
      return
    if condition.metric in {*metrics, *self._unknown_metrics}:
      return
    self._unknown_metrics.add(condition.metric)
    logging.getLogger(__name__).warning(
      '`Threshold.metric` is %r, and training has no metric of that name: the evaluation is left out.%s',
      condition.metric,
      did_you_mean(condition.metric, metrics, lists_all=False),
    )

  def evaluate(self) -> None:
    """Compute the evaluations that are due, unless the run must stop."""
    run = self.run
    may_evaluate = self._end is None or self._ends_by(EndKind.ACTION)
    if self.evaluation_due and self._is_sound and may_evaluate:
      paused_at = run.progress.pause()
      self._evaluate()
      run.progress.resume(paused_at)
      self._end_unless_finished(self._signal())
    if run.trainer.stop_training and self._end is None and not self._has_last_step:
      self._end_run(RunEnd(EndKind.ACTION, 'stopped'))
    run.trainer.stop_training |= self._end is not None

  def save(self) -> None:
    """Save the state if a save is due or the run ends."""
    trainer = self.run.trainer
    if self.saves is None or not self._is_sound or trainer.step <= self._first_step:
      return
    reasons = []
    if self._is_complete and not self._ends_by(EndKind.FUNCTION_ERROR):
      with self._keeping_error():
        reasons = list(self.saves.reasons(trainer.step, self.evaluation_due))
    trainer.stop_training |= self._end is not None
    reasons_to_end = []
    if self._has_last_step:
      reasons_to_end.append('end of the run')
    if self._end is not None:
      reasons_to_end.append(self._end.reason)
    reasons += reasons_to_end
    if reasons or (self._is_complete and self._stretch is not None and self._stretch.save):
      # A run that is interrupted continues, and its next step shows whether the state is sound.
      is_last = bool(reasons_to_end) and not self._ends_by(EndKind.INTERRUPTION)
      with self.run.watchdog.watching('saving'):
        self.saves.save(reasons or ['fixed step'], self.evaluation_due, is_last=is_last)
        self.run.watchdog.beat(trainer.step)

  def recover(self) -> None:
    """Roll back a non-finite state if the policy allows it; collect garbage if that is due."""
    trainer = self.run.trainer
    if trainer.non_finite.finding is not None:
      if self.saves is not None:
        self.saves.mark_unsound()
      if self._has_no_roll_back:
        self._end_run(RunEnd(EndKind.NON_FINITE))
      elif not trainer.stop_training:
        self._roll_back()
    elif self._is_complete and self._stretch is not None and self._stretch.collect_garbage:
      self.run.collect_garbage()

  # ---- After the last step -------------------------------------------------------------------------------------------

  def end(self) -> tuple[int, TrainState]:
    """Wait for pending writes.

    Returns:
      (number of completed steps, state).

    Raises:
      NonFiniteMetricError, SaveError, StoppedOnSignalError, Exception: see `train`.
    """
    run = self.run
    trainer = run.trainer
    with run.watchdog.watching():
      trainer.finish_steps(self._on_step)
    if self._last_seen is not None:
      run.progress.update(self._last_seen[0], _shown(self._last_seen[1]), last=True)
    end = self._last_end()
    run.progress.note('waiting for the checkpoint')
    with run.watchdog.watching('saving'):
      if self.saves is not None:
        self.saves.finish(must_succeed=end.saves)
      else:
        trainer.flush()
        run.evaluations.flush()
        files.flush(run.cfg.model_dir)
    run.progress.clear()
    saved = None
    if self.saves is not None:
      if trainer.non_finite.finding is not None or not end.saves:
        saved = self.saves.newest_sound_step()
      else:
        saved = self.saves.newest_step()
    if not end.saves:
      raise NonFiniteMetricError(self._describe_divergence(saved))
    if saved is not None:
      where = f'step {saved:,} is saved in {run.cfg.model_dir}'
    else:
      where = 'no checkpoint was saved'
    where += f'. To resume:\n  {runtime.command_line()}'
    if end.kind is EndKind.INTERRUPTION:
      of_steps = ''
      if self.last_step < math.inf:
        of_steps = f' of {self.last_step:,}'
      raise StoppedOnSignalError(
        f'Stopped after step {trainer.step:,}{of_steps} by {end}; {where}', signal=str(end)
      )
    if end.error is not None:
      what = 'The training data'
      if end.kind is EndKind.FUNCTION_ERROR:
        what = 'A function of the configuration'
      run.progress.log(f'{what} failed after step {trainer.step:,}; {where}')
      raise end.error
    run.events.stop(end.kind.name.lower())
    if end.kind is EndKind.DATA_ENDED:
      run.progress.log(
        f'Ended at step {trainer.step:,} of {run.last_step:,}: data_ended, the training data has no further batch.'
      )
    return trainer.step, trainer.train_state

  # ---- Why the run ends ----------------------------------------------------------------------------------------------

  def _end_run(self, end: RunEnd) -> None:
    """Note that no further step follows, and why: of several reasons, the newest of the greatest kind."""
    if self._end is None or end.kind >= self._end.kind:
      self._end = end

  def _ends_by(self, kind: EndKind) -> bool:
    """Return whether the run ends for a reason of this kind."""
    return self._end is not None and self._end.kind is kind

  def _end_by_action(self, stop: Stop) -> None:
    """End the run if actions request it."""
    if stop == Stop.EARLY:
      self._end_run(RunEnd(EndKind.ACTION, 'action'))
    elif stop == Stop.NON_FINITE:
      self._end_run(RunEnd(EndKind.NON_FINITE))

  def _end_by_data_error(self) -> None:
    """End the run if the training data has failed."""
    if self.run.batches.error is not None:
      self._end_run(_of_error(EndKind.DATA_ERROR, self.run.batches.error))

  def _signal(self) -> RunEnd | None:
    """Return the end by a stop signal, or None, at a point that all processes reach."""
    if not self.run.signals.is_due(may_wait=True):
      return None
    return RunEnd(EndKind.INTERRUPTION, self.run.signals.name or 'a signal to another process')

  def _end_unless_finished(self, interruption: RunEnd | None) -> None:
    """End the run if it is interrupted, which has no effect after the last evaluation."""
    is_sound = self.run.trainer.non_finite.finding is None
    is_finished = self._has_last_step and is_sound and not self.evaluation_due
    if interruption is not None and not is_finished:
      self._end_run(interruption)

  def _last_end(self) -> RunEnd:
    """Return why the run has ended, when nothing is left but to wait for pending writes."""
    trainer = self.run.trainer
    if trainer.non_finite.finding is not None and not trainer.stop_training:
      self._end_run(RunEnd(EndKind.NON_FINITE))
    self._end_by_data_error()
    if self.run.batches.has_ended and trainer.step < self.run.last_step < math.inf:
      self._end_run(RunEnd(EndKind.DATA_ENDED))
    elif self._has_last_step:
      self._end_run(RunEnd(EndKind.COMPLETED))
    return self._end or RunEnd(EndKind.ACTION)

  # ---- Parts ---------------------------------------------------------------------------------------------------------

  @property
  def _is_complete(self) -> bool:
    assert self._stretch is not None  # set by `train`
    return self.run.trainer.step == self._stretch.last or self.run.batches.has_ended

  @property
  def _has_last_step(self) -> bool:
    """Whether the state is that of the last step of the run, as far as it is known."""
    return self.run.trainer.step >= self.last_step or self.run.batches.has_ended

  @property
  def _is_sound(self) -> bool:
    is_saved = self._end is None or self._end.saves
    return self.run.trainer.non_finite.finding is None and is_saved

  @property
  def _num_roll_backs(self) -> int:
    return self.run.facts.get('num_roll_backs', 0)

  @property
  def _has_no_roll_back(self) -> bool:
    """Whether the policy allows no further rollback."""
    return self._num_roll_backs >= self.run.trainer.non_finite.policy.roll_back_limit

  def _on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
    run = self.run
    run.watchdog.beat(step)
    run.events.on_step(step)
    self._step_log.on_step(step, metrics)
    run.evaluations.poll()
    if self.saves is not None:
      self.saves.confirm()
    self._last_seen = step, metrics
    if run.progress.due and step < self.last_step:  # `end` shows the last one
      run.progress.update(step, _shown(metrics))

  def _evaluate(self, *, record_metrics: bool = False) -> None:
    """Compute the evaluations that are due; `record_metrics` adds the results to the checkpoint of this step."""
    run = self.run
    actions = run.cfg.actions_by_mode
    remembered = copy.deepcopy(actions_lib.get_actions_state(actions))
    names = list(self.evaluation_due)
    is_interrupted = False
    run.events.emit('evaluation_begun', evaluations=names)
    with run.watchdog.watching('evaluation'):
      try:
        self._end_by_action(run.evaluations.evaluate(names))
        if self._ends_by(EndKind.ACTION):  # The run ends here.
          at_end = []
          for name, when in run.cfg.whens.items():
            if when.at_end and name not in names:
              at_end.append(name)
          self._end_by_action(run.evaluations.evaluate(at_end))
          names += at_end
        self.evaluation_due = ()
        self._evaluated_at |= dict.fromkeys(names, run.trainer.step)
        if record_metrics and self.saves is not None:
          self.saves.record_metrics(run.trainer.step)
      except waiting.Interrupted:
        # The evaluation will be repeated, so actions must forget this one.
        actions_lib.set_actions_state(actions, remembered)
        is_interrupted = True
    run.events.emit('evaluation_ended', evaluations=names, is_interrupted=is_interrupted)

  def _look_for_end_of_data(self) -> None:
    """Find out whether the data has ended, which ends the run.

    Raises:
      DataError: the run has no step.
    """
    run = self.run
    step = run.trainer.step
    if step >= self.last_step or not run.batches.reached_end():
      return
    if step == run.facts['start_step']:
      raise no_batch_error(run.cfg.train_dataset_cfg)
    run.progress.log(f'The training data ended after step {step:,}.')

  def _begin_progress(self, step: int) -> None:
    last_step = self.last_step if self.last_step < math.inf else 0
    progress = self.run.progress
    progress.step = step
    progress.begin(last_step, step, tokens_per_step=self.run.batches.tokens_per_step)

  def _roll_back(self) -> None:
    """Restore the newest sound checkpoint, or else the run's starting point, and plan from there."""
    run = self.run
    trainer = run.trainer
    cfg = run.cfg
    start = run.start
    finding = trainer.non_finite.finding
    assert finding is not None  # checked by `recover`
    if self.saves is not None:
      self.saves.check_directory()  # without its checkpoints the run would begin again
    bad_step_age = trainer.step - finding.step
    try:
      point = starting_point.choose_start(cfg.model_dir, cfg.checkpoint_cfg)
    except CheckpointDamagedError:  # The first steps were bad.
      if start.resumes:
        raise
      point = start
    if not point.resumes:
      point = start
    run.facts['num_roll_backs'] = self._num_roll_backs + 1
    recorded = point.metadata.get('run', {}).get('best_metrics', [])
    if point.step == start.step:
      recorded = self._first_best
    run.facts['best_metrics'] = recorded
    log = logging.getLogger(__name__)
    log.warning(
      '%s is not finite: rolling back to %s at step %d and skipping the batch of this step (rollback %d of '
      '%d).',
      capitalized(finding.what),
      point.description,
      point.step,
      self._num_roll_backs,
      trainer.non_finite.policy.roll_back_limit,
    )
    run.profiler.close()
    trainer.rewind(run.state_shape)  # Frees the memory of the state.
    run.evaluations.close_files()
    if multihost.is_lead():
      summaries.discard_after(cfg.model_dir, point.step)
    restored = run.set_state(point)
    facts = point.metadata.get('run', {}) if point.resumes else {}
    actions_lib.set_actions_state(
      cfg.actions_by_mode, facts.get('actions', self._first_actions_state)
    )
    trainer.non_finite.bad_steps_in_a_row = facts.get('bad_steps_in_a_row', 0)
    if point is start:
      data_state = self.first_data_state
    else:
      data_state = restored and restored.data_state
    if data_state is None:
      log.warning('The position in the data is unknown: the data continues after the bad step.')
    run.batches.rewind(data_state, facts, point.step, bad_step_age=bad_step_age)
    if self.saves is not None:
      self.saves.rewind(point.step)
    run.events.emit(
      'rollback',
      to_step=point.step,
      source=point.description,
      reason=f'{finding.what} is not finite',
    )
    run.events.step = point.step
    self._first_step = point.step
    self._evaluated_at.clear()
    self.evaluation_due = ()
    self._stretches = run.plan(point.step)
    self._begin_progress(point.step)

  def _describe_divergence(self, sound: int | None) -> str:
    """Return the error message; `sound` is the step of the newest sound checkpoint."""
    non_finite = self.run.trainer.non_finite
    step = self.run.trainer.step
    what = 'a watched metric is not finite (see the lines above)'
    if non_finite.finding is not None:
      what = f'{non_finite.finding.what} is not finite'
      if non_finite.policy.roll_back_limit and self._has_no_roll_back:
        what += f', after {self._num_roll_backs} rollback(s)'
    if sound is None:
      newest = 'The run has no sound checkpoint'
    else:
      newest = f'The same command resumes from step {sound:,}, the newest sound checkpoint'
    return (
      f'Training stopped at step {step:,} in {self.run.cfg.model_dir}: {what}. {newest}. Lower the learning rate, '
      'clip gradients, check the data, or set `trainer.NonFinitePolicy.action`. To find the operation of a NaN, run '
      'the same command with --jax_debug_nans=true.'
    )


def _of_error(kind: EndKind, error: Exception) -> RunEnd:
  """Return the end of a run by an error."""
  return RunEnd(kind, f'error {type(error).__name__}', error)


def _shown(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Return the metrics of a completed step that the progress line shows."""
  names = [name for name in ('loss', 'accuracy') if name in metrics]
  with np.errstate(invalid='ignore'):  # metrics of a skipped step are 0 / 0
    return {name: float(jax.device_get(metrics[name]).compute()) for name in names}
