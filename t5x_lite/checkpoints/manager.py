"""Saving while training goes on, and restoring what was saved.

A save takes the state's values at once and returns; a background thread then writes them below a temporary name and
commits them (`commit`). Only then is anything older deleted (`retention`). What goes wrong in the background is raised
by the next `save`, `wait`, `restore` or `close`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors, files, multihost, tree_utils
from t5x_lite.checkpoints import config as config_lib
from t5x_lite.checkpoints import commit as commit_lib
from t5x_lite.checkpoints import choice, discovery, manifest, policies, retention, state_io, transforms
from t5x_lite.checkpoints import lock as lock_lib
from t5x_lite.checkpoints import restore as restore_lib

_logger = logging.getLogger(__name__)
# TensorStore's threads may create folders again for this long after one of them has failed.
_LATE_WRITES_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
  """What a save transform is told of an array, besides its value.

  Attributes:
    name: '/'-joined name.
    shape: global shape.
    dtype: dtype before the cast to the config's.
  """

  name: str
  shape: tuple[int, ...]
  dtype: Any


# Where a manager of this process saves. Two would delete each other's checkpoints.
_saving_directories: set[str] = set()


class CheckpointManager:
  """The checkpoints of one model directory.

  With a `save_cfg` it holds the directory's lock and saves; without one it only reads. All processes of a run build it
  and call its methods together. Use it as a context manager, or call `close` in a
  `finally`: Python stops the threads that write when the main program ends, and the save under way is then lost (those
  before it are not).
  """

  def __init__(self, directory: discovery.PathLike, *, save_cfg: config_lib.SaveCheckpointConfig | None = None):
    """Opens `directory`.

    Args:
      directory: the model directory.
      save_cfg: when to save and what to keep; None for a manager that only reads.

    Raises:
      DirectoryInUseError: another run holds the directory.
      ConfigError: the path is remote.
      CheckpointError: the directory cannot be written.
    """
    discovery.check_local_path(directory, 'model directory')
    self._directory = pathlib.Path(directory).absolute()
    self._save_cfg = save_cfg
    self._thread: threading.Thread | None = None
    self._error: tuple[int, BaseException] | None = None
    self._own_steps: set[int] = set()
    self._has_partial_files = False
    # The newest step known to give a finite loss, and committed steps that are not known to: see `confirm`.
    self._sound_step: int | None = None
    self._committed_unsound: set[int] = set()
    self._committing = threading.Lock()
    self._writer: state_io.StateWriter | None = None
    self._lock: lock_lib.ModelDirLock | None = None
    self._save_policy = policies.AnySavePolicy(())
    if save_cfg is not None:
      self._save_policy = policies.save_policies_from_config(save_cfg)
      self._retention = policies.retention_policies_from_config(save_cfg)
      self._lock = lock_lib.lock_model_dir(self._directory)
      _claim(self._directory, self._lock)
      try:
        # The same in all processes: they write into one temporary directory.
        number = int(multihost.broadcast_from_lead(np.int32(uuid.uuid4().int % 2**31)))
        self._run_id = f'{number:08x}'
        self._num_saves = 0
        self._writer = state_io.StateWriter()
      except BaseException:
        self._release()
        raise

  @property
  def directory(self) -> str:
    """The model directory."""
    return str(self._directory)

  # ---- when and what ------------------------------------------------------------------------------------------------

  def should_save(self, step: int) -> bool:
    """Returns whether the config asks for a save after `step` steps."""
    return self._save_policy.should_save(step)

  def next_save_step(self, step: int) -> int | None:
    """Returns the first step after `step` at which the config asks for a save, or None."""
    return self._save_policy.next_step(step)

  def all_steps(self) -> Sequence[int]:
    """Returns the committed steps, ascending; a save that is still being written is not among them."""
    return discovery.all_steps(self._directory)

  def latest_step(self) -> int | None:
    """Returns the newest committed step, or None."""
    return discovery.latest_step(self._directory)

  def checkpoint_path(self, step: int) -> str:
    """Returns the path that the checkpoint of `step` has or would have."""
    return discovery.get_checkpoint_dir(self._directory, step)

  # ---- saving -------------------------------------------------------------------------------------------------------

  def save(self, step: int, state: transforms.StateDict, *, data_state: Mapping[str, bytes] | None = None,
           metrics: Mapping[str, float] | None = None, metadata: Mapping[str, Any] | None = None,
           is_sound: bool = True) -> bool:
    """Saves `state` as the checkpoint of `step`, whatever the config's schedule says.

    Returns as soon as the values are taken: the caller may train on, also with donated buffers. A save that is still
    being written is waited for first. A checkpoint of this step that this manager has committed or restored is left as
    it is; another one, damaged or of a run that went another way, is replaced.

    Args:
      step: number of training steps taken, from 0.
      state: nested dict of global arrays (`FlaxOptimTrainState.state_dict()`).
      data_state: position of this process's data iterator: name -> bytes. Left out where the config says so.
      metrics: finite numbers known now; more can be recorded later.
      metadata: anything that JSON can hold, such as the parameter layout; given back at restore.
      is_sound: whether the state is known to give a finite loss. If not, no older checkpoint is deleted for this one
        until `confirm` says so.

    Returns:
      Whether a save was begun.

    Raises:
      SaveError: an earlier save failed (the message names its step), or this one could not be begun.
      ConfigError: the manager only reads, or an argument cannot be stored.
    """
    if self._writer is None:
      raise errors.ConfigError('This CheckpointManager only reads or is closed: build one with a save_cfg to save.')
    if isinstance(step, bool) or int(step) != step or step < 0:
      raise errors.ConfigError(f'save: got step {step!r}, expected a whole number from 0 up.')
    step = int(step)
    self.wait()
    if step in self._own_steps:
      # Someone may have deleted it by hand; the processes must agree on what they see.
      if multihost.broadcast_from_lead(np.int32(os.path.isdir(self.checkpoint_path(step)))):
        return False
    pending, values = self._begin(step, state, data_state if self._save_cfg.save_dataset else None, metrics, metadata)
    if is_sound:
      self._sound_step = step
    self._thread = threading.Thread(target=self._run, args=(pending, values), name=f'checkpoint-{step}')
    self._thread.start()
    return True

  def confirm(self, step: int) -> None:
    """Says that the state saved as `step`, the newest, gave a finite loss; deletes what the config does not keep.

    Does not wait; deleting happens in the background.
    """
    with self._committing:
      self._sound_step = step
      is_due = step in self._committed_unsound
      self._committed_unsound.discard(step)
    if is_due and multihost.is_lead():
      self._join()  # The thread of this step has committed it: nothing is left to wait for.
      self._thread = threading.Thread(target=self._apply_retention, args=(step,), name=f'checkpoint-retention-{step}')
      self._thread.start()

  def mark_unsound(self, first_step: int, last_step: int, reason: str) -> list[int]:
    """Marks the checkpoints from `first_step` to `last_step`, except the one confirmed last.

    No run resumes from a checkpoint so marked. It is not deleted, but replaced when its step is saved again.

    Args:
      first_step: the earliest step to mark.
      last_step: the latest.
      reason: a note for people.

    Returns:
      The steps marked.
    """
    self.wait()
    steps = [step for step in self.all_steps() if first_step <= step <= last_step and step != self._sound_step]
    for step in steps if multihost.is_lead() else ():
      try:
        discovery.mark_unsound(self.checkpoint_path(step), reason)
      except OSError as e:  # The loss is what ends the run, and what it is to be known by.
        _logger.warning('%s could not be marked as unsound: %s.', self.checkpoint_path(step), e.strerror)
    self._own_steps.difference_update(steps)
    multihost.sync(f'unsound from {first_step}')
    return steps

  def forget_after(self, step: int) -> None:
    """Has checkpoints of later steps than `step` replaced when those steps are saved again, by another way."""
    self.wait()
    self._own_steps = {own for own in self._own_steps if own <= step}

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Records metrics of the checkpoint of `step` that were computed after it was saved, for keeping the best.

    Takes effect at the next commit. Only the lead process's values count.
    """
    if self._writer is None:
      raise errors.ConfigError('This CheckpointManager only reads or is closed: build one with a save_cfg.')
    if multihost.is_lead():
      retention.record_metrics(self._directory, step, metrics)

  @property
  def has_failed(self) -> bool:
    """Whether a save failed in the background, so that the next `wait` raises."""
    return self._error is not None

  def wait(self) -> None:
    """Waits until nothing is being written.

    Raises:
      SaveError: a save failed in the background; the message names its step.
    """
    self._join()
    if self._error is not None:
      step, error = self._error
      self._error = None
      raise errors.SaveError(
          f'The checkpoint of step {step} could not be written to {self.directory!r}: {commit_lib.explain(error)}. '
          'Checkpoints saved before it are whole.') from error

  def close(self) -> None:
    """Waits for the last save and releases the directory; raises as `wait` does."""
    try:
      self.wait()
    finally:
      if self._writer is not None:
        writer, self._writer = self._writer, None
        with contextlib.suppress(Exception):  # `wait` has told of a save that failed, and Orbax tells of it again.
          writer.close()
        deadline = time.monotonic() + _LATE_WRITES_SECONDS
        while self._has_partial_files and time.monotonic() < deadline:
          self._remove_partial_files()
          time.sleep(0.05)
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
      restore_cfg: config_lib.RestoreCheckpointConfig | None = None,
      transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
      initial_state_fn: Callable[[], transforms.StateDict] | None = None,
  ) -> restore_lib.RestoredCheckpoint:
    """Restores a checkpoint; see `restore.restore_checkpoint`, whose arguments these are.

    Args:
      step_or_path: a step of this directory, the path of any checkpoint, or None for the newest sound one here.
      target: names, shapes and dtypes that are wanted.
      shardings: layout of the result.
      restore_cfg: how to fit the stored state to the wanted one.
      transformation_fns: further transforms.
      initial_state_fn: source of what the checkpoint lacks.

    Returns:
      The restored state; `is_resuming` is set when the checkpoint is one of this directory.

    Raises:
      CheckpointDamagedError: the checkpoint that was asked for is damaged, or all are.
      CheckpointError: there is none, or it does not fit.
    """
    self.wait()
    if step_or_path is None:
      step_or_path = choice.newest_sound_step(self._directory)
      if step_or_path is None:
        raise errors.CheckpointError(f'There is no checkpoint in {self.directory!r} to restore.')
    path = self.checkpoint_path(step_or_path) if isinstance(step_or_path, int) else os.fspath(step_or_path)
    parent = pathlib.Path(os.path.normpath(path)).absolute().parent
    restored = restore_lib.restore_checkpoint(
        path, target, shardings=shardings, restore_cfg=restore_cfg, transformation_fns=transformation_fns,
        initial_state_fn=initial_state_fn, is_resuming=os.path.realpath(parent) == os.path.realpath(self._directory))
    if restored.is_resuming and restored.is_verified:
      self._own_steps.add(restored.step)
    return restored

  # ---- the save, step by step ---------------------------------------------------------------------------------------

  def _begin(self, step, state, data_state, metrics, metadata):
    """Returns (the save, values that are still to be given to the writer or None where it has them)."""
    flat = self._transformed(state)
    flat = state_io.cast_floating(flat, restore_lib.is_cast, self._save_cfg.dtype)
    self._num_saves += 1
    name = f'{discovery.CHECKPOINT_PREFIX}_{step}{discovery.WRITING_INFIX}{self._run_id}-{self._num_saves}'
    pending = commit_lib.PendingCheckpoint(
        step=step, temporary=self._directory / name, final=pathlib.Path(self.checkpoint_path(step)),
        arrays=manifest.describe_arrays(flat), metadata=_as_json(dict(metadata or {}), 'metadata'),
        metrics=_as_json({k: float(v) for k, v in (metrics or {}).items()}, 'metrics'),
        has_data_state=data_state is not None)

    def make_folder():
      if multihost.is_lead():
        self._remove_partial_files()
        pending.temporary.mkdir()
        retention.forget_metrics(self._directory, step)

    try:
      _on_all_processes(make_folder)
      if data_state is not None:
        _on_all_processes(lambda: self._write_data_state(pending.temporary, data_state))
      # Orbax stores no arrays without elements; the manifest says of what shape they are, and that is all of them.
      values = state_io.snapshot({name: leaf for name, leaf in flat.items() if 0 not in leaf.shape})
      if not state_io.may_start_later(values):
        self._writer.start(pending.temporary / discovery.STATE_DIRNAME, values)
        values = None
    except Exception as e:
      self._remove_partial_files()
      raise errors.SaveError(
          f'The checkpoint of step {step} could not be begun in {self.directory!r}: {commit_lib.explain(e)}. '
          'Checkpoints saved before it are whole.') from e
    return pending, values

  def _transformed(self, state: transforms.StateDict) -> dict[str, Any]:
    # Numbers become arrays; None and empty nodes hold nothing to store, and the wanted state has them at restore.
    flat = {name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            for name, leaf in tree_utils.flatten_dict(state).items() if leaf is not None}
    fns = self._save_cfg.state_transformation_fns
    if not fns:
      return flat
    tree = tree_utils.unflatten_dict(flat)
    infos = tree_utils.unflatten_dict(
        {name: ParameterInfo(name, tuple(leaf.shape), jnp.dtype(leaf.dtype)) for name, leaf in flat.items()})
    for fn in fns:
      tree, infos = fn(tree, infos)
    return tree_utils.flatten_dict(tree)

  def _write_data_state(self, root: pathlib.Path, data_state: Mapping[str, bytes]) -> None:
    folder = root / restore_lib.data_dir_name(jax.process_index(), jax.process_count())
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in data_state.items():
      files.write(folder / restore_lib.data_file_name(key), value, durable=False)  # with all others, at the commit

  def _run(self, pending: commit_lib.PendingCheckpoint, values: Mapping[str, Any] | None) -> None:
    failed: BaseException | None = None
    try:
      try:
        if values is not None:
          self._writer.start(pending.temporary / discovery.STATE_DIRNAME, values)
        self._writer.finish()
        commit_lib.mark_part_written(pending)
      except BaseException as e:  # pylint: disable=broad-exception-caught
        failed = e
      # Reached by failed processes too, so that the others do not wait for them in vain.
      state_io.barrier(f'{pending.temporary.name}:written')
      if multihost.is_lead() and failed is None:
        try:
          commit_lib.commit(pending)
          with self._committing:
            is_sound = self._sound_step == pending.step
            if not is_sound:
              self._committed_unsound.add(pending.step)
          if is_sound:
            self._apply_retention(pending.step)
        except BaseException as e:  # pylint: disable=broad-exception-caught
          failed = e
      state_io.barrier(f'{pending.temporary.name}:committed')
      # The commit takes the temporary name away, so one that is still there tells the other processes of a failure.
      if failed is None and pending.temporary.exists():
        failed = errors.CheckpointError('the lead process could not commit it; see its message')
      state_io.barrier(f'{pending.temporary.name}:checked')
      if failed is not None and multihost.is_lead():
        self._remove_partial_files()
    except BaseException as e:  # pylint: disable=broad-exception-caught
      failed = failed or e  # A barrier timed out: a process is gone.
    if failed is None:
      self._own_steps.add(pending.step)
    else:
      self._error = (pending.step, failed)

  def _remove_partial_files(self) -> None:
    # In full: what is set aside under a `replaced` name ends like these.
    name = re.compile(rf'{discovery.CHECKPOINT_PREFIX}_\d+{re.escape(discovery.WRITING_INFIX)}{self._run_id}-\d+')
    for folder in self._directory.iterdir():
      if name.fullmatch(folder.name):
        self._has_partial_files = True
        shutil.rmtree(folder, ignore_errors=True)

  def _apply_retention(self, step: int) -> None:
    try:
      retention.apply(self._directory, self._retention, step, with_metrics=self._save_cfg.keep_best is not None,
                      keep_dataset_checkpoints=self._save_cfg.keep_dataset_checkpoints)
    except Exception as e:  # pylint: disable=broad-exception-caught
      # The state is saved; what could not be deleted is tried again after the next commit.
      _logger.warning('Deleting old checkpoints in %s failed: %s', self._directory, e)

  def _release(self) -> None:
    _saving_directories.discard(os.path.realpath(self._directory))
    self._lock.release()

  def _join(self) -> None:
    if self._thread is not None:
      self._thread.join()
      self._thread = None


def _claim(directory: pathlib.Path, lock: lock_lib.ModelDirLock) -> None:
  name = os.path.realpath(directory)
  if name in _saving_directories:
    lock.release()
    raise errors.DirectoryInUseError(
        f'Another CheckpointManager of this process saves to {str(directory)!r}; close it first, or use that one.')
  _saving_directories.add(name)


def _on_all_processes(fn: Callable[[], None]) -> None:
  """Calls `fn`; raises on every process if it fails on one, since training continues after a failed save."""
  failed = None
  try:
    fn()
  except Exception as e:  # pylint: disable=broad-exception-caught
    failed = e
  if multihost.any_process(failed is not None):
    raise failed or errors.CheckpointError('another process could not write its part; see its message')


def _as_json(value: dict[str, Any], what: str) -> dict[str, Any]:
  try:
    return json.loads(json.dumps(value))
  except (TypeError, ValueError) as e:
    raise errors.ConfigError(f'save: {what} {value!r} cannot be stored: {e}. Expected names and plain values.') from e
