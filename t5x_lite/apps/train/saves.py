"""Checkpoints of a training run: when they count as sound, and what follows from a save that fails."""

from collections.abc import Mapping, Sequence
import logging
import math
from typing import Any

import jax

from t5x_lite import actions as actions_lib
from t5x_lite import checkpoints
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import start as start_lib
from t5x_lite.apps.common.evaluations import RunEvaluations
from t5x_lite.apps.train.batches import TrainBatches
from t5x_lite.apps.train.config import TrainConfig
from t5x_lite.errors import CheckpointDamagedError, DataError, SaveError
from t5x_lite.evaluation import TRAINING_EVAL


_FAILED = object()
_OF_ANOTHER_PROCESS = SaveError('Another process could not write its part; see its message.')


class TrainSaves:
  """Saves the state of a run.

  A checkpoint is sound once the step after it had a finite loss and gradient norm or, where the run ends with it, the
  evaluation before it a finite loss. Until then no older checkpoint is deleted for its sake.
  """

  def __init__(self, manager: checkpoints.CheckpointManager, cfg: TrainConfig, *, trainer: trainer_lib.BaseTrainer,
               evaluations: RunEvaluations, batches: TrainBatches, run_facts: dict[str, Any],
               progress: runtime.Progress):
    """Saves nothing yet.

    Args:
      manager: writes the checkpoints.
      cfg: the run's configuration.
      trainer: holds the state.
      evaluations: know the metrics of the state.
      batches: knows the position in the data.
      run_facts: what a restart must know of the run, as it is at each save.
      progress: is told what is going on.
    """
    self._manager = manager
    self._run_cfg = cfg
    self._cfg = cfg.checkpoint_cfg.save
    self._trainer = trainer
    self._evaluations = evaluations
    self._batches = batches
    self._run_facts = run_facts
    self._progress = progress
    self._unconfirmed: int | None = None
    self._is_writing = False
    self._failures_in_a_row = 0
    self._last_failure: Exception | None = None

  def is_due(self, step: int) -> bool:
    """Returns whether the configuration asks for a checkpoint of `step`."""
    return self._manager.should_save(step)

  def record_metrics(self, step: int) -> None:
    """Adds the metrics of the last evaluation to the checkpoint of `step`, which was saved before it."""
    self._manager.record_metrics(step, _finite(self._evaluations.numbers(step)))

  def save(self, evaluation_due: Sequence[str] = (), *, is_last: bool = False) -> None:
    """Saves the state, once all that was written up to it is on disk; a state that is not finite is not saved.

    Args:
      evaluation_due: kinds of evaluation that are still to be made at this step.
      is_last: whether the run ends here, so that no step will show whether the state is sound.

    Raises:
      SaveError: this failed, as did as many saves before it as the configuration allows.
    """
    trainer = self._trainer
    state = trainer.train_state.state_dict()
    if not trainer.non_finite.test_state(trainer.step, state):
      return
    self._progress.note(f'saving step {trainer.step:,}')
    self.settle()
    facts = {**self._run_facts, **self._batches.facts, 'actions': actions_lib.get_actions_state(self._run_cfg.actions_by_mode),
             'evaluation_due': evaluation_due, 'bad_steps_in_a_row': trainer.non_finite.bad_steps_in_a_row}
    data_state = self._prepare()
    if data_state is _FAILED:
      return
    numbers = self._evaluations.numbers(trainer.step)
    losses = [value for name, value in numbers.items()
              if name.startswith(f'{TRAINING_EVAL}/') and name.endswith('/loss')]
    # A step says more than an evaluation, whose parameters may be an average: it is asked where one follows.
    is_sound = is_last and bool(losses) and all(map(math.isfinite, losses)) and (
        not trainer.train_state.evaluates_other_params)
    try:
      self._is_writing = self._manager.save(
          trainer.step, state, data_state=data_state,
          metrics=_finite(numbers),
          metadata={'run': facts, **start_lib.layout_metadata(self._run_cfg.model),
                    **start_lib.optimizer_metadata(trainer.train_state)}, is_sound=is_sound)
    except SaveError as error:
      self._count_failure(error)
    else:
      self._unconfirmed = trainer.step if self._is_writing and not is_sound else None

  def confirm(self) -> None:
    """Tells the manager once a step after the last save has shown it to be sound; warns early of one that failed."""
    if self._is_writing and self._manager.has_failed and jax.process_count() == 1:
      self.settle()
    if self._unconfirmed is not None and self._trainer.non_finite.newest_finite_step > self._unconfirmed:
      self._manager.confirm(self._unconfirmed)
      self._unconfirmed = None

  def finish(self, *, must_succeed: bool = True) -> None:
    """Waits until everything is on disk.

    Args:
      must_succeed: raise where the last save failed; otherwise it is only warned of, for a run that ends for a worse
        reason.

    Raises:
      SaveError: the last save failed, or its metrics could not be written.
    """
    try:
      self._trainer.flush()
      self._evaluations.flush()
      self.settle(is_last=True)
    except OSError as error:
      self._last_failure = self._cannot_write(error)
    except SaveError as error:
      self._last_failure = error
    if not multihost.any_process(self._last_failure is not None):
      return
    cause = self._last_failure or _OF_ANOTHER_PROCESS
    message = (f'The last save of the run failed: {cause} Free disk space or fix the path, then rerun the command: it '
               'resumes from the newest checkpoint.')
    if must_succeed:
      raise SaveError(message) from cause
    logging.getLogger(__name__).warning('%s', message)

  def settle(self, *, is_last: bool = False) -> None:
    """Waits for the save before and counts it if it failed; raises as `save` does."""
    if not self._is_writing:
      return
    self._is_writing = False
    try:
      self._manager.wait()
    except SaveError as error:
      self._count_failure(error, is_last=is_last)
    else:
      self._failures_in_a_row, self._last_failure = 0, None

  def condemn(self) -> None:
    """Marks the checkpoints whose parameters gave the non-finite loss that the trainer found."""
    self.settle()
    finding = self._trainer.non_finite.finding
    # With skipped updates a later batch may have shown that the parameters are sound.
    if finding.condemns_params and self._trainer.non_finite.newest_finite_step < finding.step:
      self._manager.mark_unsound(
          finding.step - 1, self._trainer.step,
          f'{finding.what[:1].upper()}{finding.what[1:]} was not finite. Delete this file to use the checkpoint all the same.')

  def newest_step(self) -> int | None:
    """Returns the step of the newest checkpoint of the run; None without one."""
    return self._manager.latest_step()

  def newest_sound_step(self) -> int | None:
    """Returns the step of the newest sound checkpoint of the run; None without one."""
    self.settle()
    try:
      return checkpoints.newest_sound_step(self._manager.directory)
    except CheckpointDamagedError:
      return None

  def rewind(self, step: int) -> None:
    """Has later checkpoints than `step` replaced when the run saves those steps again."""
    self._manager.forget_after(step)
    self._unconfirmed = None

  def _prepare(self) -> Any:
    """Writes everything that the checkpoint will stand for; returns the position in the data or `_FAILED`."""
    failed, data_state = None, None
    try:
      self._trainer.flush()
      self._evaluations.flush()
    except OSError as error:
      failed = self._cannot_write(error)
    try:
      data_state = self._batches.get_state() if self._cfg.save_dataset else None
    except (OSError, DataError) as error:
      failed = SaveError(f'The position in the data at step {self._trainer.step} is not known, so its checkpoint was '
                         f'not written: {error}')
    if multihost.any_process(failed is not None):
      self._count_failure(failed or _OF_ANOTHER_PROCESS)
      return _FAILED
    return data_state

  def _cannot_write(self, error: OSError) -> SaveError:
    return SaveError(f'The metrics up to step {self._trainer.step} could not be written to '
                     f'{self._manager.directory!r}, so its checkpoint was not: {error.strerror or error}.')

  def _count_failure(self, error: Exception, *, is_last: bool = False) -> None:
    self._failures_in_a_row += 1
    self._last_failure = error
    if self._failures_in_a_row >= self._cfg.max_failures_in_a_row:
      raise SaveError(f'{self._failures_in_a_row} saves in a row failed, which '
                      f'`SaveCheckpointConfig.max_failures_in_a_row` allows no longer. The last: {error}') from error
    if not is_last:
      logging.getLogger(__name__).warning('%s Training continues; the next save tries again.', error)


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: value for name, value in metrics.items() if math.isfinite(value)}
