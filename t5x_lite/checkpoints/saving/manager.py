"""Manager that saves checkpoints in the background and restores them.

A save copies the state's values and returns; a background thread then writes them below a temporary name and commits
them (`folders`). Older checkpoints are deleted only after the commit (`retention`). The next `save`, `wait`, `restore`
or `close` raises errors of the background thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import operator
import os
import threading
from typing import Any
import uuid

import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.folders import base as folders_base
from t5x_lite.checkpoints.locks import lock as lock_lib
from t5x_lite.checkpoints.restoring import choice
from t5x_lite.checkpoints.restoring import restore as restore_lib
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.checkpoints.saving import policies
from t5x_lite.checkpoints.saving import process_save
from t5x_lite.checkpoints.saving import retention
from t5x_lite.checkpoints.saving import spool as spool_lib
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)


class CheckpointManager:
  """Manager of the checkpoints of one model directory.

  With a `save_cfg` it holds the directory's lock and saves; without one it only reads. All processes of a run build it
  and call its methods together. Use it as a context manager, or call `close` in a `finally` block: Python stops the
  writing threads when the main program ends, and an unfinished save is then lost.
  """

  def __init__(
    self,
    directory: discovery.PathLike,
    *,
    save_cfg: config.SaveCheckpointConfig | None = None,
    spool_dir: str | None = None,
  ):
    """Open `directory`.

    Args:
      directory: the model directory, on a disk or in an object store.
      save_cfg: options of saving; None for a manager that only reads.
      spool_dir: local folder for checkpoints that cannot be written to `directory`; see `spool`.

    Raises:
      DirectoryInUseError: another run, or another manager of this process, holds the directory.
      ConfigError: the path has an unknown scheme, or `spool_dir` is not a local folder.
      CheckpointError: the directory cannot be written.
    """
    discovery.check_path(directory, 'model directory')
    self._directory = files.path(directory).absolute()
    self._save_cfg = save_cfg and save_cfg.validated()
    self._thread: threading.Thread | None = None
    self._begun: process_save.ProcessSave | None = None
    self._error: tuple[int, BaseException] | None = None
    self._own_steps: set[int] = set()
    # The newest step with a finite loss, and committed steps whose loss is not yet known; see `confirm`.
    self._sound_step: int | None = None
    self._committed_unsound: set[int] = set()
    self._committing = threading.Lock()
    self._lock: lock_lib.ModelDirLock | None = None
    self._folder = folders.model_folder(self._directory)
    self._spool: spool_lib.Spool | None = None
    if spool_dir is not None:
      self._spool = spool_lib.Spool(spool_dir, self._directory)
    self._recorder = concurrent.futures.ThreadPoolExecutor(
      1, thread_name_prefix='checkpoint-metrics'
    )
    self._save_policy = policies.AnySavePolicy(())
    if save_cfg is not None:
      self._save_policy = policies.save_policies_from_config(save_cfg)
      self._retention = policies.retention_policies_from_config(save_cfg)
      self._lock = lock_lib.lock_model_dir(self._directory)
      # Without links: a link that is switched later would lead to a folder that is not locked.
      self._directory = self._lock.directory
      self._folder = folders.model_folder(self._directory)
      try:
        self._lock.begin_saving()
      except errors.DirectoryInUseError:
        self._lock.release()
        raise
      try:
        # Equal in all processes, which write into one temporary directory.
        number = int(multihost.broadcast_from_lead(np.int32(uuid.uuid4().int % 2**31)))
        self._run_id = f'{number:08x}'
        self._num_saves = 0
      except BaseException:
        self._release()
        raise

  @property
  def directory(self) -> str:
    """The model directory."""
    return str(self._directory)

  # ---- when and what ------------------------------------------------------------------------------------------------

  def should_save(self, step: int, point: policies.SavePoint | None = None) -> bool:
    """Return True if the configuration requests a save after `step` steps; see `SavePolicy`."""
    return self._save_policy.should_save(step, point)

  def next_save_step(self, step: int) -> int | None:
    """Return the first step after `step` at which the configuration requests a save, or None."""
    return self._save_policy.next_step(step)

  def all_steps(self) -> Sequence[int]:
    """Return the committed steps, ascending, without an unfinished save."""
    return discovery.all_steps(self._directory)

  def latest_step(self) -> int | None:
    """Return the newest committed step, or None."""
    return discovery.latest_step(self._directory)

  def checkpoint_path(self, step: int) -> str:
    """Return the path of the checkpoint of `step`, whether it exists or not."""
    return discovery.get_checkpoint_dir(self._directory, step)

  # ---- saving -------------------------------------------------------------------------------------------------------

  def save(
    self,
    step: int,
    state: transforms.StateDict,
    *,
    data_state: Mapping[str, bytes] | None = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    is_sound: bool = True,
    on_commit: Callable[[], None] = lambda: None,
    problem: Exception | None = None,
    keep_first: bool = False,
    transformation_fns: Sequence[transforms.SaveStateTransformationFn] | None = None,
  ) -> bool:
    """Save `state` as the checkpoint of `step`, independent of the schedule of the configuration.

    First waits for an unfinished save. Returns when the values are copied: the caller may then continue training, also
    with donated buffers. A checkpoint of this step that this manager has committed or restored is not saved again; any
    other checkpoint of this step is replaced.

    Args:
      step: number of training steps taken, >= 0.
      state: nested dict of global arrays (`FlaxOptimTrainState.state_dict()`).
      data_state: position of this process's data iterator, name -> bytes; ignored if the configuration does not save
        it.
      metrics: finite numbers known now; more can be recorded later.
      metadata: JSON values such as the parameter layout, returned at restore.
      is_sound: whether the state is known to give a finite loss. If False, no older checkpoint is deleted until
        `confirm`.
      on_commit: called after the commit by the thread that writes the checkpoint.
      problem: error because of which this process cannot write the checkpoint to the directory, only to the spool
        folder; None for none.
      keep_first: whether to write the checkpoint to the spool folder first, before an unfinished save is waited for; a
        process that is stopped may have little time. An error of the unfinished save is then only logged.
      transformation_fns: functions instead of `state_transformation_fns` of the configuration; None for those.

    Returns:
      True if a save was started.

    Raises:
      SaveError: an earlier save failed (the message names its step), or this save could not be started.
      DirectoryInUseError: another run saves to the directory, because the lock was lost.
      ConfigError: the manager only reads, or the step is invalid.
      TypeError: JSON does not support a value of `metadata`.
    """
    self._check_can_save()
    checks.check(
      'CheckpointManager.save',
      {'step': operator.index(step)},
      step=checks.number(at_least=0, integer=True),
    )
    step = int(step)
    if not self._saving_options.save_dataset:
      data_state = None
    begun = None
    if keep_first and self._spool is not None:
      begun = self._begin(step, state, data_state, metrics, metadata, transformation_fns)
      begun.keep_copy(self._spool)
      try:
        self.wait()
      except errors.SaveError as e:
        _logger.warning('%s', e)
    else:
      self.wait()
    if step in self._own_steps:
      # It may have been deleted by hand; all processes must take the same branch.
      is_there = False
      with contextlib.suppress(OSError):  # the save reports that the directory cannot be read
        is_there = files.path(self.checkpoint_path(step)).is_dir()
      if multihost.broadcast_from_lead(np.int32(is_there)):
        if begun is not None and self._spool is not None and multihost.is_lead():
          self._spool.clear()
        return False
    if begun is None:
      begun = self._begin(step, state, data_state, metrics, metadata, transformation_fns)
    begun = dataclasses.replace(begun, problem=problem or self._forget_metrics(step))
    if is_sound:
      self._sound_step = step
    self._thread = threading.Thread(
      target=self._run, args=(begun, on_commit), name=f'checkpoint-{step}'
    )
    self._begun = begun
    self._thread.start()
    return True

  def keep(self) -> None:
    """Write the save that is not yet finished to the spool folder, if there is one; only with a single process."""
    if self.is_writing and self._begun is not None and self._spool is not None:
      self._begun.keep_copy(self._spool)

  def confirm(self, step: int) -> None:
    """Confirm that the newest saved state, of `step`, gave a finite loss; deletes old checkpoints in the background."""
    with self._committing:
      self._sound_step = step
      is_due = step in self._committed_unsound
      self._committed_unsound.discard(step)
    if is_due and multihost.is_lead():
      self._begun = None  # it is committed
      self._thread = threading.Thread(
        target=self._apply_retention_after,
        args=(self._thread, step),
        name=f'checkpoint-retention-{step}',
      )
      self._thread.start()

  def mark_unsound(self, first_step: int, last_step: int, reason: str) -> list[int]:
    """Mark the checkpoints from `first_step` to `last_step` as unsound, except the one confirmed last.

    No run resumes from a marked checkpoint. It is replaced when its step is saved again.

    Args:
      first_step: first step to mark.
      last_step: last step to mark.
      reason: a note for people.

    Returns:
      The marked steps.
    """
    self.wait()
    found: Sequence[int] = ()
    try:
      found = self.all_steps()
    except OSError as e:  # do not hide the error of the loss
      _logger.warning('No checkpoint in %s could be marked as unsound: %s.', self._directory, e)
    steps = [step for step in found if first_step <= step <= last_step and step != self._sound_step]
    if multihost.is_lead():
      for step in steps:
        path = self.checkpoint_path(step)
        try:
          discovery.mark_unsound(path, reason)
        except OSError as e:  # do not hide the error of the loss, which ends the run
          _logger.warning('%s could not be marked as unsound: %s.', path, e.strerror)
    self._own_steps.difference_update(steps)
    multihost.sync(f'unsound from {first_step}')
    return steps

  def forget_after(self, step: int) -> None:
    """Let later saves replace the checkpoints of steps after `step`, e.g. after a rollback."""
    self.wait()
    self._own_steps = {own for own in self._own_steps if own <= step}

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Record metrics of the checkpoint of `step` that were computed after its save, for keeping the best.

    Takes effect at the next commit. Only the values of the lead process are recorded.
    """
    self._check_can_save()
    if not multihost.is_lead():
      return
    record_fn = functools.partial(retention.record_metrics, self._directory, step, dict(metrics))
    if self._folder.answers_late:
      self._recorder.submit(self._record, step, record_fn)
    else:
      self._record(step, record_fn)

  def _record(self, step: int, fn: Callable[[], None]) -> None:
    try:
      self._check_folder()
      fn()
    except OSError as e:
      _logger.warning(
        'The metrics of step %d are not recorded for keeping the best checkpoints: %s', step, e
      )

  @property
  def is_writing(self) -> bool:
    """True if a save is not yet finished."""
    return self._thread is not None and self._thread.is_alive()

  @property
  def has_failed(self) -> bool:
    """True if a save failed in the background, so that the next `wait` raises."""
    return self._error is not None

  def wait_for(self, seconds: float) -> None:
    """Wait at most this time until the background threads have finished; raises nothing."""
    if self._thread is not None:
      self._thread.join(seconds)

  def wait(self) -> None:
    """Wait until the background threads have finished.

    Raises:
      SaveError: a save failed in the background; the message names its step.
      DirectoryInUseError: another run saves to the directory, because the lock was lost.
    """
    self._join()
    if self._error is not None:
      step, error = self._error
      self._error = None
      raise self._save_error(step, error) from error

  def close(self) -> None:
    """Wait for the last save and release the directory; raises like `wait`."""
    try:
      self.wait()
    finally:
      self._recorder.shutdown()
      self._folder.close()
      self._release()

  def __enter__(self) -> CheckpointManager:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  # ---- restoring ----------------------------------------------------------------------------------------------------

  def restore(
    self,
    step_or_path: int | discovery.PathLike | None,
    target: transforms.StateDict,
    *,
    shardings: Any = None,
    restore_cfg: config.RestoreCheckpointConfig | None = None,
    transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    initial_state_fn: Callable[[], transforms.StateDict] | None = None,
  ) -> restore_lib.RestoredCheckpoint:
    """Restore a checkpoint; see `restore.restore_checkpoint` for the arguments.

    Args:
      step_or_path: a step of this directory, the path of any checkpoint, or None for the newest intact checkpoint of
        this directory.
      target: nested dict of arrays or `jax.ShapeDtypeStruct`s with the names, shapes and dtypes of the result.
      shardings: layout of the result.
      restore_cfg: options of the conversion to the target state.
      transformation_fns: further transforms.
      initial_state_fn: function that returns the arrays that are missing in the checkpoint.

    Returns:
      The restored state; `is_resuming` is True if the checkpoint is in this directory.

    Raises:
      CheckpointDamagedError: the requested checkpoint is damaged, or all are.
      CheckpointError: the checkpoint does not exist or does not fit.
    """
    self.wait()
    if step_or_path is None:
      step_or_path = choice.newest_sound_step(self._directory)
      if step_or_path is None:
        raise errors.CheckpointError(f'There is no checkpoint in {self.directory!r} to restore.')
    if isinstance(step_or_path, int):
      path = self.checkpoint_path(step_or_path)
    else:
      path = os.fspath(step_or_path)
    parent = files.path(path).absolute().parent
    restored = restore_lib.restore_checkpoint(
      path,
      target,
      shardings=shardings,
      restore_cfg=restore_cfg,
      transformation_fns=transformation_fns,
      initial_state_fn=initial_state_fn,
      is_resuming=files.real_path(parent) == files.real_path(self._directory),
    )
    if restored.is_resuming and restored.is_verified:
      self._own_steps.add(restored.step)
    return restored

  # ---- steps of a save ----------------------------------------------------------------------------------------------

  def _check_can_save(self) -> None:
    if self._lock is None:
      raise errors.ConfigError(
        'This CheckpointManager cannot save: it is closed, or it has no save_cfg. Create one '
        'with a save_cfg.'
      )

  def _save_error(self, step: int, error: BaseException) -> errors.T5xLiteError:
    if isinstance(error, errors.DirectoryInUseError):
      return errors.DirectoryInUseError(str(error))  # later saves would fail too
    kept = ''
    kept_at = getattr(error, 'kept_at', None)  # see `ProcessSave.keep`
    if kept_at is not None:
      kept = (
        f' This one is kept in {kept_at!r}; the next run with the same command and --spool_dir copies it to '
        'the run directory.'
      )
    found = errors.SaveError(
      f'The checkpoint of step {step} could not be written to {self.directory!r}: '
      f'{folders_base.explain(error).rstrip(".")}. Earlier checkpoints are complete.{kept}'
    )
    if kept:
      found.kept_step = step
    return found

  def _begin(
    self,
    step: int,
    state: transforms.StateDict,
    data_state: Mapping[str, bytes] | None,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None,
    transformation_fns: Sequence[transforms.SaveStateTransformationFn] | None,
  ) -> process_save.ProcessSave:
    """Return a save with copies of the arrays, for the thread; touches no file of a checkpoint."""
    cfg = self._saving_options
    if transformation_fns is None:
      transformation_fns = cfg.state_transformation_fns
    flat = transforms.transform_saved(state, transformation_fns)
    if cfg.dtype is not None:
      flat = state_io.cast_floating(flat, restore_lib.is_cast, cfg.dtype)
    self._num_saves += 1
    pending = self._folder.new_save(
      step,
      f'{self._run_id}-{self._num_saves}',
      arrays=manifest.describe_arrays(flat),
      metadata=json.loads(json.dumps(dict(metadata or {}))),
      metrics={name: float(value) for name, value in (metrics or {}).items()},
      has_data_state=data_state is not None,
    )
    # Arrays without elements are not stored; the manifest has their shapes.
    flat = {name: leaf for name, leaf in flat.items() if 0 not in leaf.shape}
    try:
      parts = array_io.host_parts(flat)
    except Exception as e:
      raise self._save_error(step, e) from e
    return process_save.ProcessSave(
      pending=pending,
      parts=parts,
      data_state=data_state,
      begin_fn=self._make_folder,
      kept=self._spool,
    )

  def _forget_metrics(self, step: int) -> Exception | None:
    """Forget the metrics of an earlier state of `step`; return the error because of which the save fails, or None.

    Raises:
      DirectoryInUseError: see `save`.
    """
    if not multihost.is_lead():
      return None
    forget_fn = functools.partial(retention.forget_metrics, self._directory, step)
    if self._folder.answers_late:  # in the order of these calls
      self._recorder.submit(self._record, step, forget_fn)
      return None
    try:
      self._check_lock()
      forget_fn()
    except OSError as e:
      return e
    return None

  @property
  def _saving_options(self) -> config.SaveCheckpointConfig:
    assert self._save_cfg is not None  # see `_check_can_save`
    return self._save_cfg

  def _check_lock(self) -> None:
    assert self._lock is not None  # see `_check_can_save`
    self._lock.check()

  def _check_folder(self) -> None:
    assert self._lock is not None  # see `_check_can_save`
    self._lock.check_folder()

  @property
  def is_away(self) -> bool:
    """True if the directory was moved or unmounted, with its checkpoints; False if it was deleted, and in a store."""
    return self._lock is not None and self._lock.is_away

  def check_directory(self) -> None:
    """Raise if the checkpoints in the directory are not those of this run, e.g. because it was moved away.

    Raises:
      DirectoryInUseError: another run saves to the directory, because the lock was lost.
      OSError: the directory cannot be read, or is another folder than the one that was locked.
    """
    if self._lock is not None and not self._folder.answers_late:
      self._lock.check()

  def _make_folder(self, pending: folders_base.PendingCheckpoint) -> None:
    self._check_lock()
    self._folder.discard_rest()
    self._folder.begin(pending)

  def _run(
    self,
    begun: process_save.ProcessSave,
    on_commit: Callable[[], None],
  ) -> None:
    failed: BaseException | None = None
    pending = begun.pending
    name = f'{pending.final.name}-{pending.attempt}'
    try:
      try:
        begun.write()
        self._folder.mark_written(pending)
      except BaseException as e:  # pylint: disable=broad-exception-caught
        failed = e
      # Failed processes reach the barrier too; otherwise the others would wait for them.
      state_io.barrier(f'{name}:written')
      if multihost.is_lead() and failed is None:
        try:
          self._folder.commit(pending, self._check_lock)
          with self._committing:
            is_sound = self._sound_step == pending.step
            if not is_sound:
              self._committed_unsound.add(pending.step)
          if is_sound:
            self._apply_retention(pending.step)
        except BaseException as e:  # pylint: disable=broad-exception-caught
          failed = e
      state_io.barrier(f'{name}:committed')
      if begun.kept is not None:
        failed = begun.keep(begun.kept, failed)
      elif failed is None and not self._folder.is_committed(pending):
        failed = errors.of_other_process(
          errors.CheckpointError('the lead process could not commit it; see its message')
        )
      state_io.barrier(f'{name}:checked')
      if failed is not None and multihost.is_lead():
        self._folder.discard(pending, failed)
    except BaseException as e:  # pylint: disable=broad-exception-caught
      failed = failed or e  # a barrier timed out because a process died
    if failed is None:
      self._own_steps.add(pending.step)
      on_commit()
    else:
      self._error = (pending.step, failed)

  def _apply_retention_after(self, thread: threading.Thread | None, step: int) -> None:
    """Apply the retention after the thread that has committed `step`, which may still ask a silent store for it."""
    if thread is not None:
      thread.join()
    self._apply_retention(step)

  def _apply_retention(self, step: int) -> None:
    try:
      self._check_folder()  # nothing is deleted in the folder of another run
      retention.apply(
        self._directory,
        self._retention,
        step,
        with_metrics=self._saving_options.keep_best is not None,
        keep_dataset_checkpoints=self._saving_options.keep_dataset_checkpoints,
      )
    except Exception as e:  # pylint: disable=broad-exception-caught
      # The state is saved; the next commit tries the deletion again.
      _logger.warning('Deleting old checkpoints in %s failed: %s', self._directory, e)

  def _release(self) -> None:
    if self._lock is not None:
      lock = self._lock
      self._lock = None
      lock.end_saving()
      lock.release()

  def _join(self) -> None:
    if self._thread is not None:
      self._thread.join()
      self._thread = None
      self._begun = None
