"""Checkpoints of a training run: confirmation that they are sound, and handling of failed saves."""

from collections.abc import Callable, Mapping, Sequence
import logging
import math
import os
import time
from typing import Any

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import multihost
from t5x_lite.apps.common import adapter_base
from t5x_lite.apps.common import starting_point
from t5x_lite.apps.train.open_run import OpenRun
from t5x_lite.errors import (
  CheckpointDamagedError,
  CheckpointError,
  DataError,
  SaveError,
  call_all,
  of_other_process,
)
from t5x_lite.evaluation import TRAINING_EVAL
from t5x_lite.formatting import capitalized
from t5x_lite.storage import files
from t5x_lite.trainer import actions as actions_lib

# After a signal, a store that does not answer has this time; the checkpoint is then only in the spool folder.
_STORE_SECONDS_AFTER_SIGNAL = 10.0
# Time between two looks for a signal while a save is waited for.
_POLL_SECONDS = 0.2
_FAILED = object()
_OF_ANOTHER_PROCESS = of_other_process(
  SaveError('Another process could not write its part; see its message.')
)


class TrainSaves:
  """Saves the state of a run.

  A checkpoint is sound if the next step had a finite loss and gradient norm or, at the end of the run, if the last
  evaluation had a finite loss. No older checkpoint is deleted before that.
  """

  def __init__(
    self,
    manager: checkpoints.CheckpointManager,
    run: OpenRun,
    checkpointer: checkpoints.Checkpointer | None = None,
  ):
    """Store the arguments; save nothing.

    Args:
      manager: checkpoint manager.
      run: the run, whose trainer holds the state.
      checkpointer: checkpointer of a user, whose `save` is called; None for none.
    """
    self._manager = manager
    self._checkpointer = checkpointer
    self._run_cfg = run.cfg
    self._cfg = run.cfg.checkpoint_cfg.save
    # Checkpoints have the trained parameters and this identity of the others; None: all parameters.
    self._base = None
    if run.is_saved_apart:
      self._base = adapter_base.identify(run.start)
    self._trainer = run.trainer
    self._evaluations = run.evaluations
    self._batches = run.batches
    self._run_facts = run.facts
    self._run = run
    self._unconfirmed: int | None = None
    self._is_writing = False
    self._failures_in_a_row = 0
    self._last_failure: Exception | None = None
    self._saved_at = time.monotonic()
    # Step at which the run continues if it ends now.
    self._newest = run.trainer.step
    self._policy = checkpoints.save_policies_from_config(self._cfg)
    # Line of the last checkpoint that the writing thread has committed, for the log of the main thread.
    self._committed = ''
    # Metrics for which a save policy waits; those of users may read any.
    ours = (
      checkpoints.WhenBest,
      checkpoints.EveryNMinutes,
      checkpoints.EveryNSteps,
      checkpoints.AtSteps,
    )
    # Policies that look for a new best value; the best values are facts of the run.
    self._best_policies = [p for p in self._cfg.policies if isinstance(p, checkpoints.WhenBest)]
    self._needed = None
    if all(isinstance(p, ours) for p in self._cfg.policies):
      self._needed = [p.metric_name for p in self._best_policies]

  def reasons(self, step: int, evaluation_due: Sequence[str] = ()) -> list[str]:
    """Return the names of the policies that ask for a checkpoint of `step`; all processes must call this together.

    Args:
      step: number of completed steps.
      evaluation_due: evaluations of this step that are not yet computed.
    """
    if not self._cfg.policies:
      return list(map(_name, self._policy.due(step)))

    def metrics() -> dict[str, float]:
      if evaluation_due:
        return {}
      return self._evaluations.numbers(step, self._needed)

    point = checkpoints.SavePoint(
      metrics_fn=metrics,
      best=self._best,
      seconds_since_save=time.monotonic() - self._saved_at,
    )
    reasons = list(map(_name, self._due(step, point)))
    best_metrics = {}
    if self._best_policies:
      best_metrics = point.metrics
    self._update_best(best_metrics)
    return reasons

  def _due(self, step: int, point: checkpoints.SavePoint) -> list[checkpoints.SavePolicy]:
    """Return the policies that save a step, the same on all processes: those of the lead, and requests to any."""
    policies = self._policy.policies
    due = self._policy.due(step, point)
    mine = np.array([any(policy is each for each in due) for policy in policies])
    requested = [isinstance(policy, checkpoints.OnRequest) for policy in policies]
    decided = multihost.broadcast_from_lead(mine)
    if any(requested):
      is_requested_here = bool((mine & np.array(requested)).any())
      decided = decided | np.array(requested) & multihost.any_process(is_requested_here)
    return [policy for policy, is_due in zip(policies, decided, strict=True) if is_due]

  def record_metrics(self, step: int) -> None:
    """Add the metrics of the last evaluation to the checkpoint of `step`, which was saved earlier."""
    numbers = self._evaluations.numbers(step)
    self._manager.record_metrics(step, _finite(numbers))
    self._update_best(numbers)

  def save(
    self, reasons: Sequence[str], evaluation_due: Sequence[str] = (), *, is_last: bool = False
  ) -> None:
    """Save the state after all results up to its step are on disk; skip a non-finite state.

    Args:
      reasons: reasons of the save, for the log.
      evaluation_due: kinds of evaluation that are not yet computed at this step.
      is_last: whether the run ends here, so that no later step shows whether the state is sound.

    Raises:
      SaveError: this save failed, and as many before it as the configuration allows.
    """
    trainer = self._trainer
    part = None
    base = self._base
    if base is not None and self._has_base(base):
      part = adapter_base.trained_part(trainer.step_state, self._run_cfg.model.adapter)
    if trainer.non_finite.policy.tests:
      tested = trainer.step_state if part is None else part
      if not trainer.non_finite.test_state(trainer.step, tested.state_dict()):
        return
      del tested  # so that arrays of `step_state` are freed one by one
    start = self._saved_at = time.monotonic()
    for policy in self._cfg.policies:
      if isinstance(policy, checkpoints.OnRequest):
        policy.done()
    size = ''
    metadata = {}
    if part is None:
      state = trainer.train_state.state_dict()
    else:
      state = adapter_base.arrays_to_save(part, trainer.stacked_layers)
      num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
      assert base is not None  # Without a base the state has no such part.
      size = f' (adapter, {num_bytes / 2**20:,.1f} MiB; base {_shown_path(base["path"])})'
      metadata['base'] = base
    self._run.progress.note(f'saving step {trainer.step:,}')
    if files.is_remote(self._manager.directory) and self._manager.is_writing:
      self._run.progress.log('Waiting for the previous save, which the store has not yet taken.')
    keep_first = self._wait_or_keep()
    if keep_first:
      self._is_writing = False  # the manager waits for it
    else:
      self.wait()
    facts = {
      **self._run_facts,
      **self._batches.facts,
      'actions': actions_lib.get_actions_state(self._run_cfg.actions_by_mode),
      'evaluation_due': evaluation_due,
      'bad_steps_in_a_row': trainer.non_finite.bad_steps_in_a_row,
    }
    data_state, problem = self._prepare()
    if data_state is _FAILED:
      return
    numbers = self._evaluations.numbers(trainer.step)
    losses = [
      value
      for name, value in numbers.items()
      if name.startswith(f'{TRAINING_EVAL}/') and name.endswith('/loss')
    ]
    # Evaluation parameters may be an average, which does not show that the parameters are finite.
    is_sound = False
    if is_last and losses and all(map(math.isfinite, losses)):
      is_sound = not self._run.state_shape.evaluates_other_params
    step = trainer.step
    name = os.path.basename(self._manager.checkpoint_path(step))
    self._run.events.emit('save_begun', checkpoint=step)

    def on_commit() -> None:
      self._run.events.emit('save_committed', checkpoint=step)
      self._newest = step
      seconds = time.monotonic() - start
      self._committed = (
        f'step {step:,}  Saved {name} in {seconds:.1f} s{size}: {", ".join(reasons)}.'
      )

    def write(state_dict: Any, transformation_fns: Sequence[Any] | None = None) -> None:
      self._is_writing = self._manager.save(
        step,
        state_dict,
        transformation_fns=transformation_fns,
        data_state=data_state,
        metrics=_finite(numbers),
        on_commit=on_commit,
        metadata={
          'run': facts,
          **starting_point.layout_metadata(self._run_cfg.model),
          **adapter_base.metadata_of(self._run_cfg.model, self._run.state_shape),
          **starting_point.optimizer_metadata(self._run.state_shape),
          **metadata,
        },
        is_sound=is_sound,
        problem=problem,
        keep_first=keep_first,
      )

    try:
      if self._checkpointer is None:
        write(state)
      else:
        self._save_by_user(self._checkpointer, write)
    except SaveError as error:
      self._count_failure(error)
    else:
      if self._is_writing and not is_sound:
        self._unconfirmed = step
      else:
        self._unconfirmed = None

  def _save_by_user(
    self, checkpointer: checkpoints.Checkpointer, write_fn: Callable[..., None]
  ) -> None:
    """Save the state by `save` of the class of a user; its `super().save` calls `write_fn`."""
    written = []

    def write(state_dict: Any, transformation_fns: Sequence[Any]) -> None:
      written.append(True)
      write_fn(state_dict, transformation_fns)

    checkpointer.set_writer(write)
    checkpointer.save(self._trainer.train_state, self._cfg.state_transformation_fns)
    if not written:
      logging.getLogger(__name__).warning(
        '%s.save has not called Checkpointer.save: the run cannot resume at step %s.',
        type(checkpointer).__name__,
        f'{self._trainer.step:,}',
      )

  def _has_base(self, base: Mapping[str, Any]) -> bool:
    """Return whether the base is still there and unchanged; otherwise all checkpoints from now on have it.

    A base in a store is not asked for, which may take long.
    """
    problem = None
    if multihost.is_lead() and not files.is_remote(base['path']):
      try:
        checkpoints.check_base(base, self._manager.directory)
      except (CheckpointError, OSError) as error:
        problem = error
    if multihost.any_process(problem is not None):
      logging.getLogger(__name__).warning(
        'All parameters are saved from now on: %s To resume this run, add '
        '--gin.checkpoints.SaveCheckpointConfig.save_base=True.',
        problem,
      )
      self._base = None
    return self._base is not None

  def confirm(self) -> None:
    """Confirm the last checkpoint once a later step has shown it to be sound; log a save, and warn if it failed."""
    self._log_committed()
    if self._is_writing and self._manager.has_failed and jax.process_count() == 1:
      self.wait()
    if (
      self._unconfirmed is not None
      and self._trainer.non_finite.newest_finite_step > self._unconfirmed
    ):
      self._manager.confirm(self._unconfirmed)
      self._unconfirmed = None

  def finish(self, *, must_succeed: bool = True) -> None:
    """Wait until everything is on disk.

    Args:
      must_succeed: raise if the last save failed; False only warns, for a run that ends with another error.

    Raises:
      SaveError: the last save failed, or its metrics could not be written.
    """
    unwritten = None
    try:
      call_all([self._trainer.flush, self._evaluations.flush])
    except OSError as error:
      unwritten = self._cannot_write(error)
    # Also after that error: closing the manager would raise the error of the save instead, without the lost steps.
    try:
      self.wait(is_last=True)
    except SaveError as error:
      self._last_failure = error
    self._last_failure = self._last_failure or unwritten
    if not multihost.any_process(self._last_failure is not None):
      return
    cause = self._last_failure or _OF_ANOTHER_PROCESS
    message = f'The last save of the run failed: {cause} {self._remedy()}'
    if must_succeed:
      raise SaveError(message) from cause
    logging.getLogger(__name__).warning('%s', message)

  def _remedy(self) -> str:
    """Return what to do after failed saves, and which steps are lost."""
    if files.is_remote(self._manager.directory):
      remedy = 'Wait for the store'
    else:
      remedy = 'Free disk space or fix the path'
    newest = max(self._newest_there(), getattr(self._last_failure, 'kept_step', None) or 0)
    text = f'{remedy}, then rerun the command: it continues from step {newest:,}'
    first = newest + 1
    step = self._trainer.step
    if first == step:
      text += f'; step {step:,} is lost'
    elif first < step:
      text += f'; steps {first:,} to {step:,} are lost'
    return f'{text}.'

  def _newest_there(self) -> int:
    """Return the step from which the checkpoints of the directory let the run continue."""
    if files.is_remote(self._manager.directory) or self._manager.is_away:
      return self._newest  # the directory comes back with its checkpoints
    try:
      found = [step for step in self._manager.all_steps() if step <= self._newest]
    except FileNotFoundError:  # deleted
      found = []
    except OSError:
      return self._newest
    return max(found, default=self._run_facts['start_step'])

  def wait(self, *, is_last: bool = False) -> None:
    """Wait for the previous save and count it if it failed; raise like `save`."""
    if not self._is_writing:
      return
    self._is_writing = False
    try:
      if self._wait_or_keep() and jax.process_count() == 1:
        self._manager.keep()
      self._manager.wait()
    except SaveError as error:
      self._count_failure(error, is_last=is_last)
    else:
      self._log_committed()
      self._failures_in_a_row = 0
      self._last_failure = None

  def _wait_or_keep(self) -> bool:
    """Wait for the previous save, and return whether a signal means that the spool folder must have the state first.

    The machine may soon be taken away, so a store that does not answer gets less time. Several processes hear of a
    signal at different times, so they agree.
    """
    while True:
      keeps = self._run.signals.requested and self._run_cfg.spool_dir is not None
      if keeps or not self._manager.is_writing:
        break
      self._manager.wait_for(_POLL_SECONDS)
    keeps = multihost.any_process(keeps)
    if keeps:
      limit = min(self._run_cfg.max_store_seconds, _STORE_SECONDS_AFTER_SIGNAL)
      files.set_store_seconds(self._manager.directory, limit)
    return keeps

  def _log_committed(self) -> None:
    if self._committed:
      self._run.progress.log(self._committed)
      self._committed = ''

  def mark_unsound(self) -> None:
    """Mark the checkpoints whose parameters caused the non-finite loss that the trainer found."""
    self.wait()
    finding = self._trainer.non_finite.finding
    assert finding is not None  # the reason of this call
    # With skipped updates, a later batch may have shown that the parameters are finite.
    if finding.params_may_be_bad and self._trainer.non_finite.newest_finite_step < finding.step:
      self._manager.mark_unsound(
        finding.step - 1,
        self._trainer.step,
        f'{capitalized(finding.what)} was not finite. '
        'Delete this file to use the checkpoint anyway.',
      )

  def newest_step(self) -> int | None:
    """Return the step of the newest checkpoint; None without one, and if the directory cannot be read."""
    try:
      return self._manager.latest_step()
    except OSError:
      return None

  def newest_sound_step(self) -> int | None:
    """Return the step of the newest sound checkpoint of the run, or None."""
    self.wait()
    try:
      return checkpoints.newest_sound_step(self._manager.directory)
    except (CheckpointDamagedError, OSError):
      return None

  def check_directory(self) -> None:
    """Raise SaveError if the checkpoints of the run cannot be read now, e.g. because the directory is away."""
    try:
      self._manager.check_directory()
    except OSError as error:
      raise SaveError(
        f'The run cannot return to an earlier step: {error}. Fix the path, then rerun the command.'
      ) from error

  def rewind(self, step: int) -> None:
    """Let the run replace checkpoints later than `step` when it saves these steps again."""
    self._manager.forget_after(step)
    self._unconfirmed = None
    self._newest = step

  @property
  def _best(self) -> dict[tuple[str, str], float]:
    return {(name, mode): value for name, mode, value in self._run_facts.get('best_metrics', ())}

  def _update_best(self, metrics: Mapping[str, float]) -> None:
    best = self._best
    for policy in self._best_policies:
      value = metrics.get(policy.metric_name, math.nan)
      if policy.is_better(value, best.get(policy.key)):
        best[policy.key] = value
    if best:
      self._run_facts['best_metrics'] = [[*key, value] for key, value in best.items()]

  def _prepare(self) -> tuple[Any, Exception | None]:
    """Write all results that the checkpoint covers.

    Returns:
      (position in the data or `_FAILED`, error because of which only the spool folder can have the checkpoint).
    """
    failed = None
    problem = None
    data_state = None
    try:
      self._trainer.flush()
      self._evaluations.flush()
    except OSError as error:
      if self._run_cfg.spool_dir is None:
        failed = self._cannot_write(error)
      else:
        problem = error
    try:
      if self._cfg.save_dataset:
        data_state = self._batches.get_state()
      else:
        data_state = None
    except (OSError, DataError) as error:
      failed = SaveError(
        f'The position in the data at step {self._trainer.step} is unknown, so its checkpoint was '
        f'not written: {error}'
      )
    if multihost.any_process(failed is not None):
      self._count_failure(failed or _OF_ANOTHER_PROCESS)
      return _FAILED, None
    return data_state, problem

  def _cannot_write(self, error: OSError) -> SaveError:
    cause = error.strerror or str(error)
    if error.filename is not None:  # the path to fix may be a folder below the directory
      cause += f': {str(error.filename)!r}'
    return SaveError(
      f'The metrics up to step {self._trainer.step} could not be written to '
      f'{self._manager.directory!r}, so its checkpoint was not: {cause}.'
    )

  def _count_failure(self, error: Exception, *, is_last: bool = False) -> None:
    self._failures_in_a_row += 1
    self._last_failure = error
    if self._failures_in_a_row >= self._cfg.max_failures_in_a_row:
      raise SaveError(
        f'{self._failures_in_a_row} saves in a row failed, the limit of '
        f'`SaveCheckpointConfig.max_failures_in_a_row`. Last error: {error} {self._remedy()}'
      ) from error
    if not is_last:
      logging.getLogger(__name__).warning(
        '%s Training continues; the next save tries again.', error
      )


def _shown_path(path: str) -> str:
  """Return a path for the log, relative if it is below the current folder."""
  folder = os.getcwd() + os.sep
  return path.removeprefix(folder)


def _name(policy: checkpoints.SavePolicy) -> str:
  """Return the name of a policy, with its metric."""
  name = type(policy).__name__
  if isinstance(policy, checkpoints.WhenBest):
    return f'{name} {policy.metric_name}'
  return name


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: value for name, value in metrics.items() if math.isfinite(value)}
