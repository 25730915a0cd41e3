"""Loop of a training run: stretches of steps, with evaluations, saves and rollbacks at the pauses between them."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import copy
import dataclasses
import logging
import math
from typing import Any

import clu.values
import jax
import numpy as np

from t5x_lite import actions as actions_lib
from t5x_lite import checks
from t5x_lite import files
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite import state_init
from t5x_lite import summaries
from t5x_lite import trainer as trainer_lib
from t5x_lite.actions import TRAIN_METRIC_KEY
from t5x_lite.actions import ActionMode
from t5x_lite.actions import Stop
from t5x_lite.actions import run_actions
from t5x_lite.apps.common import start as start_lib
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.evaluations import RunEvaluations
from t5x_lite.apps.common.plan import Stretch
from t5x_lite.apps.train.batches import TrainBatches
from t5x_lite.apps.train.batches import no_batch_error
from t5x_lite.apps.train.compilation import StepCompilation
from t5x_lite.apps.train.config import TrainConfig
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
from t5x_lite.train_state import TrainState


@dataclasses.dataclass(kw_only=True)
class TrainLoop:
  """Loop of a run. `train` calls its methods in order.

  Attributes:
    cfg: configuration of the run.
    trainer: trainer, which holds the state.
    initializer: initializer of the state after a rollback.
    init_rng: key for new parameters.
    compilation: compilation of the training step.
    batches: training batches.
    evaluations: evaluations of the run.
    saves: saves the state; None for a run without checkpoints.
    start: starting point of the run.
    plan_fn: returns the stretches after a step.
    last_step: step at which the run ends; `math.inf` if no number of steps ends it.
    configured_last_step: the same without regard to data that has ended before the run was resumed.
    facts: facts of the run that checkpoints record.
    first_data_state: position in the data at the start; None if no rollback can need it.
    progress: log and progress line.
    watchdog: notified of each step.
    events: log of the run's events.
    profiler: profiler of the configured steps.
    step_log: log of batches and steps.
    signals: stop signals.
    collect_garbage_fn: collects garbage at the configured steps.
    evaluation_due: names of the evaluations that are due at the current step.
  """

  cfg: TrainConfig
  trainer: trainer_lib.BaseTrainer
  initializer: state_init.TrainStateInitializer
  init_rng: jax.Array
  compilation: StepCompilation
  batches: TrainBatches
  evaluations: RunEvaluations
  saves: TrainSaves | None
  start: start_lib.StartingPoint
  plan_fn: Callable[[int], Iterator[Stretch]]
  last_step: float
  configured_last_step: float
  facts: dict[str, Any]
  first_data_state: Any
  progress: runtime.Progress
  watchdog: runtime.Watchdog
  events: runtime.EventLog
  profiler: runtime.StepProfiler
  step_log: StepLog
  signals: runtime.StopSignals
  collect_garbage_fn: Callable[[], None]
  evaluation_due: tuple[str, ...]

  def __post_init__(self):
    self._first_actions_state = actions_lib.get_actions_state(self.cfg.actions_by_mode)
    actions_lib.set_actions_state(self.cfg.actions_by_mode, self.facts.get('actions', {}))
    self.trainer.non_finite.bad_steps_in_a_row = self.facts.get('bad_steps_in_a_row', 0)
    # Step at which this process, or the newest rollback, began.
    self._first_step = self.start.step
    self._stretches = self.plan_fn(self._first_step)
    self._stretch: Stretch | None = None
    self._stop = Stop.CONTINUE
    self._interrupted = ''
    self._unknown_metrics: set[str] = set()
    # Step of the newest results of each evaluation.
    self._evaluated_at: dict[str, int] = {}
    # Error of a user's function that ends the run.
    self._error: Exception | None = None
    # True if the state is not finite and the policy allows no further rollback.
    self._has_given_up = False
    # Best values, for `WhenBest`, at the start of the run.
    self._first_best: list[Any] = []
    # Newest step with known metrics.
    self._last_seen: tuple[int, Mapping[str, Any]] | None = None

  # ---- Before the first step -----------------------------------------------------------------------------------------

  def begin(self) -> None:
    """Wait for the compiled training step; compute the evaluation and the save that are due before the first step."""
    if self._first_step < self.last_step:
      self.progress.note('compiling the training step')
      compiled = self.compilation.finish()
      self.progress.log(str(compiled))
      self.events.emit(
        'compiled', compilation_seconds=compiled.seconds, cache_hit=compiled.cache_hit
      )
      self.progress.note('waiting for the first step')
    if self.saves is None:
      self.signals.doing = 'finishing the step'
    else:
      self.signals.doing = 'finishing the step and saving'
    if self.evaluation_due:
      self._evaluate(record_metrics=self.start.resumes and self.saves is not None)
    if self.saves is not None and not self.start.resumes:
      reasons = self.saves.reasons(self._first_step)
      if reasons:
        with self.watchdog.watching('saving'):
          self.saves.save(reasons, self.evaluation_due)
    self._first_best = self.facts.get('best_metrics', [])
    self._begin_progress(self._first_step)

  def next_stretch(self) -> Stretch | None:
    """Return the next stretch of steps; None at the end of the run."""
    if self._stop or self._has_given_up or self.trainer.stop_training or self.batches.has_ended:
      return None
    return next(self._stretches, None)

  # ---- A stretch -----------------------------------------------------------------------------------------------------

  def train(self, stretch: Stretch) -> None:
    """Train a stretch, unless the run must stop earlier, and call the training actions with its metrics."""
    trainer = self.trainer
    summary = None
    self._stretch = stretch
    self.step_log.start_clock()
    with self.watchdog.watching():
      self.profiler.before(stretch.first, lambda: trainer.finish_steps(self._on_step))
      try:
        summary = trainer.train(
          self.step_log.logged(self.batches),
          stretch.num_steps,
          stretch.first,
          on_step=self._on_step,
          should_stop=self.batches.should_stop,
        )
        self._look_for_end()
      except trainer_lib.PreemptionError as error:
        self._interrupted = f'PreemptionError: {error}'
      self._look_for_signals()
      self.profiler.after(trainer.step, lambda: trainer.finish_steps(self._on_step))
    actions = self.cfg.actions_by_mode
    may_stop = ActionMode.TRAIN in actions or bool(self._interrupted) or not self._is_complete
    if stretch.evaluations or stretch.save or may_stop or self.batches.has_ended:
      # Metrics are read one step late: read the last ones before evaluating or saving.
      with self.watchdog.watching():
        trainer.finish_steps(self._on_step)
    if summary is not None and ActionMode.TRAIN in actions:
      values = summary.result()
      if values:
        metrics = {TRAIN_METRIC_KEY: values}
        stop = run_actions(ActionMode.TRAIN, actions, lambda: trainer.train_state, metrics)
        self._request_stop(stop)
    if trainer.step > stretch.first or self.batches.has_ended:
      with self._keeping_error():
        self.evaluation_due = ()
        if self._is_complete:
          self.evaluation_due = self._due_evaluations(stretch, summary)

  @contextlib.contextmanager
  def _keeping_error(self) -> Iterator[None]:
    """Context of a user's function whose error ends the run after a save; several processes cannot save alone."""
    try:
      yield
    except Exception as error:  # users' functions may raise anything
      if jax.process_count() > 1:
        raise
      self._error = error

  def _due_evaluations(
    self, stretch: Stretch, summary: trainer_lib.MetricValueMapFuture | None
  ) -> tuple[str, ...]:
    """Return the names of the evaluations at the end of a stretch whose condition holds."""
    whens = self.cfg.whens
    step = self.trainer.step
    last_step = self.last_step
    names = stretch.evaluations
    if self.batches.has_ended or self._stop == Stop.EARLY:
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
    has_failed = self.batches.error is not None or self._error is not None
    if self.evaluation_due and self._is_sound and not has_failed and not self._interrupted:
      paused_at = self.progress.pause()
      self._evaluate()
      self.progress.resume(paused_at)
      self._look_for_signals()
    self.trainer.stop_training |= bool(self._stop) or bool(self._interrupted) or has_failed

  def save(self) -> None:
    """Save the state if a save is due or the run ends."""
    if self.saves is None or not self._is_sound or self.trainer.step <= self._first_step:
      return
    reasons = []
    if self._is_complete and self._error is None:
      with self._keeping_error():
        reasons = list(self.saves.reasons(self.trainer.step, self.evaluation_due))
    self.trainer.stop_training |= self._error is not None
    reasons_to_end = self._reasons_to_end()
    reasons += reasons_to_end
    if reasons or (self._is_complete and self._stretch is not None and self._stretch.save):
      with self.watchdog.watching('saving'):
        self.saves.save(
          reasons or ['fixed step'],
          self.evaluation_due,
          is_last=bool(reasons_to_end) and not self._interrupted,
        )
        self.watchdog.beat(self.trainer.step)

  def _reasons_to_end(self) -> list[str]:
    """Return why no further step follows, for the log; empty if one does."""
    error = self._error or self.batches.error
    found = {
      'end of the run': self._has_last_step,
      self._interrupted.partition(':')[0]: bool(self._interrupted),
      'action': self._stop != Stop.CONTINUE,
      f'error {type(error).__name__}': error is not None,
    }
    return [reason for reason, holds in found.items() if holds] or [
      'stopped'
    ] * self.trainer.stop_training

  def recover(self) -> None:
    """Roll back a non-finite state if the policy allows it; collect garbage if that is due."""
    if self.trainer.non_finite.finding is not None:
      if self.saves is not None:
        self.saves.mark_unsound()
      self._has_given_up = self._num_roll_backs >= self.trainer.non_finite.policy.roll_back_limit
      if not self._has_given_up and not self.trainer.stop_training:
        self._roll_back()
    elif self._is_complete and self._stretch is not None and self._stretch.collect_garbage:
      self.collect_garbage_fn()

  # ---- After the last step -------------------------------------------------------------------------------------------

  def end(self) -> tuple[int, TrainState]:
    """Wait for pending writes.

    Returns:
      (number of completed steps, state).

    Raises:
      NonFiniteMetricError, SaveError, StoppedOnSignalError, Exception: see `train`.
    """
    trainer = self.trainer
    with self.watchdog.watching():
      trainer.finish_steps(self._on_step)
    if self._last_seen is not None:
      self.progress.update(self._last_seen[0], _shown(self._last_seen[1]), last=True)
    finding = trainer.non_finite.finding
    has_diverged = (
      self._stop == Stop.NON_FINITE
      or self._has_given_up
      or (finding is not None and not trainer.stop_training)
    )
    self.progress.note('waiting for the checkpoint')
    with self.watchdog.watching('saving'):
      if self.saves is not None:
        self.saves.finish(must_succeed=not has_diverged)
      else:
        trainer.flush()
        self.evaluations.flush()
        files.flush(self.cfg.model_dir)
    self.progress.clear()
    saved = None
    if self.saves is not None:
      if has_diverged or finding is not None:
        saved = self.saves.newest_sound_step()
      else:
        saved = self.saves.newest_step()
    if has_diverged:
      raise NonFiniteMetricError(self._describe_divergence(saved))
    if saved is not None:
      where = f'step {saved:,} is saved in {self.cfg.model_dir}'
    else:
      where = 'no checkpoint was saved'
    where += f'. To resume:\n  {runtime.command_line()}'
    if self._interrupted and (
      not self._has_last_step or self.evaluation_due or finding is not None
    ):
      if self.last_step < math.inf:
        of_steps = f' of {self.last_step:,}'
      else:
        of_steps = ''
      raise StoppedOnSignalError(
        f'Stopped after step {trainer.step:,}{of_steps} by {self._interrupted}; {where}',
        signal=self._interrupted,
      )
    if self._error is not None:
      self.progress.log(
        f'A function of the configuration failed after step {trainer.step:,}; {where}'
      )
      raise self._error
    if self.batches.error is not None:
      self.progress.log(f'The training data failed after step {trainer.step:,}; {where}')
      raise self.batches.error
    is_early = self.batches.has_ended and trainer.step < self.configured_last_step < math.inf
    if is_early:
      cause = 'data_ended'
    elif self._has_last_step:
      cause = 'completed'
    else:
      cause = 'action'
    self.events.stop(cause)
    if is_early:
      self.progress.log(
        f'Ended at step {trainer.step:,} of {self.configured_last_step:,}: data_ended, the training data has no '
        'further batch.'
      )
    return trainer.step, trainer.train_state

  # ---- Parts ---------------------------------------------------------------------------------------------------------

  @property
  def _is_complete(self) -> bool:
    assert self._stretch is not None  # set by `train`
    return self.trainer.step == self._stretch.last or self.batches.has_ended

  @property
  def _has_last_step(self) -> bool:
    """Whether the state is that of the last step of the run, as far as it is known."""
    return self.trainer.step >= self.last_step or self.batches.has_ended

  @property
  def _is_sound(self) -> bool:
    return self.trainer.non_finite.finding is None and self._stop != Stop.NON_FINITE

  @property
  def _num_roll_backs(self) -> int:
    return self.facts.get('num_roll_backs', 0)

  def _on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
    self.watchdog.beat(step)
    self.events.on_step(step)
    self.step_log.on_step(step, metrics)
    self.evaluations.poll()
    if self.saves is not None:
      self.saves.confirm()
    self._last_seen = step, metrics
    if self.progress.due and step < self.last_step:  # `end` shows the last one
      self.progress.update(step, _shown(metrics))

  def _evaluate(self, *, record_metrics: bool = False) -> None:
    """Compute the evaluations that are due; `record_metrics` adds the results to the checkpoint of this step."""
    remembered = copy.deepcopy(actions_lib.get_actions_state(self.cfg.actions_by_mode))
    names = list(self.evaluation_due)
    is_interrupted = False
    self.events.emit('evaluation_begun', evaluations=names)
    with self.watchdog.watching('evaluation'):
      try:
        self._request_stop(self.evaluations.evaluate(names))
        if self._stop == Stop.EARLY:  # The run ends here.
          at_end = []
          for name, when in self.cfg.whens.items():
            if when.at_end and name not in names:
              at_end.append(name)
          self._request_stop(self.evaluations.evaluate(at_end))
          names += at_end
        self.evaluation_due = ()
        self._evaluated_at |= dict.fromkeys(names, self.trainer.step)
        if record_metrics and self.saves is not None:
          self.saves.record_metrics(self.trainer.step)
      except waiting.Interrupted:
        # The evaluation will be repeated, so actions must forget this one.
        actions_lib.set_actions_state(self.cfg.actions_by_mode, remembered)
        is_interrupted = True
    self.events.emit('evaluation_ended', evaluations=names, is_interrupted=is_interrupted)

  def _request_stop(self, stop: Stop) -> None:
    self._stop = max(self._stop, stop)

  def _look_for_signals(self) -> None:
    if self.signals.is_due(may_wait=True):
      self._interrupted = self.signals.name or 'a signal to another process'

  def _look_for_end(self) -> None:
    """Find out whether the data has ended, which ends the run.

    Raises:
      DataError: the run has no step.
    """
    step = self.trainer.step
    if step >= self.last_step or not self.batches.reached_end():
      return
    if step == self.facts['start_step']:
      raise no_batch_error(self.cfg.train_dataset_cfg)
    self.progress.log(f'The training data ended after step {step:,}.')

  def _begin_progress(self, step: int) -> None:
    last_step = self.last_step if self.last_step < math.inf else 0
    self.progress.step = step
    self.progress.begin(last_step, step, tokens_per_step=self.batches.tokens_per_step)

  def _roll_back(self) -> None:
    """Restore the newest sound checkpoint, or else the run's starting point, and plan from there."""
    trainer = self.trainer
    cfg = self.cfg
    finding = trainer.non_finite.finding
    assert finding is not None  # checked by `recover`
    if self.saves is not None:
      self.saves.check_directory()  # without its checkpoints the run would begin again
    bad_step_age = trainer.step - finding.step
    try:
      point = start_lib.choose_start(cfg.model_dir, cfg.checkpoint_cfg)
    except CheckpointDamagedError:  # The first steps were bad.
      if self.start.resumes:
        raise
      point = self.start
    if not point.resumes:
      point = self.start
    self.facts['num_roll_backs'] = self._num_roll_backs + 1
    recorded = point.metadata.get('run', {}).get('best_metrics', [])
    if point.step == self.start.step:
      recorded = self._first_best
    self.facts['best_metrics'] = recorded
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
    self.profiler.close()
    trainer.rewind(self.initializer.global_train_state_shape)  # Frees the memory of the state.
    self.evaluations.close_files()
    if multihost.is_lead():
      summaries.discard_after(cfg.model_dir, point.step)
    restored = start_lib.set_state(
      trainer, point, self.initializer, cfg.partitioner, cfg.model, self.init_rng
    )
    facts = point.metadata.get('run', {}) if point.resumes else {}
    actions_lib.set_actions_state(
      cfg.actions_by_mode, facts.get('actions', self._first_actions_state)
    )
    trainer.non_finite.bad_steps_in_a_row = facts.get('bad_steps_in_a_row', 0)
    if point is self.start:
      data_state = self.first_data_state
    else:
      data_state = restored and restored.data_state
    if data_state is None:
      log.warning('The position in the data is unknown: the data continues after the bad step.')
    self.batches.rewind(data_state, facts, point.step, bad_step_age=bad_step_age)
    if self.saves is not None:
      self.saves.rewind(point.step)
    self.events.emit(
      'rollback',
      to_step=point.step,
      source=point.description,
      reason=f'{finding.what} is not finite',
    )
    self.events.step = point.step
    self._first_step = point.step
    self._evaluated_at.clear()
    self.evaluation_due = ()
    self._stretches = self.plan_fn(point.step)
    self._begin_progress(point.step)

  def _describe_divergence(self, sound: int | None) -> str:
    """Return the error message; `sound` is the step of the newest sound checkpoint."""
    finding = self.trainer.non_finite.finding
    step = self.trainer.step
    what = 'a watched metric is not finite (see the lines above)'
    if finding is not None:
      what = f'{finding.what} is not finite'
      if self._has_given_up and self.trainer.non_finite.policy.roll_back_limit:
        what += f', after {self._num_roll_backs} rollback(s)'
    if sound is None:
      newest = 'The run has no sound checkpoint'
    else:
      newest = f'The same command resumes from step {sound:,}, the newest sound checkpoint'
    return (
      f'Training stopped at step {step:,} in {self.cfg.model_dir}: {what}. {newest}. Lower the learning rate, '
      'clip gradients, check the data, or set `trainer.NonFinitePolicy.action`.'
    )


def _shown(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Return the metrics of a completed step that the progress line shows."""
  names = [name for name in ('loss', 'accuracy') if name in metrics]
  with np.errstate(invalid='ignore'):  # metrics of a skipped step are 0 / 0
    return {name: float(jax.device_get(metrics[name]).compute()) for name in names}
