"""The part of a save that each process writes in a thread; a spool folder takes what cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import logging
from typing import Any

import jax

from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.folders import base
from t5x_lite.checkpoints.restoring import restore
from t5x_lite.checkpoints.saving import spool
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSave:
  """The part of a save that this process writes; all processes call the methods together.

  Attributes:
    pending: the save.
    parts: arrays of this process.
    data_state: position of this process's data iterator, name -> bytes, or None.
    begin_fn: begins the save, in the lead process.
    kept: where to keep a checkpoint that cannot be written, or None.
    problem: error because of which this process must not write, or None.
  """

  pending: base.PendingCheckpoint
  parts: array_io.HostParts
  data_state: Mapping[str, bytes] | None
  begin_fn: Callable[[base.PendingCheckpoint], None]
  kept: spool.Spool | None
  problem: Exception | None = None

  def write(self) -> None:
    """Write the part of this process.

    Raises:
      OSError: it cannot be written.
      CheckpointError: the lead process could not begin the save.
    """
    failed: BaseException | None = self.problem
    if multihost.is_lead() and failed is None:
      try:
        self.begin_fn(self.pending)
      except BaseException as e:  # pylint: disable=broad-exception-caught
        failed = e
    self._barrier('begun')
    if failed is not None:
      raise failed
    if not self.pending.folder.has_begun(self.pending):
      if multihost.is_lead():
        raise errors.CheckpointError(
          f'{str(self.pending.temporary)!r}, which was just made, is not found'
        )
      raise errors.of_other_process(
        errors.CheckpointError('the lead process could not begin it; see its message')
      )
    self._write(self.pending)

  def keep(self, kept: spool.Spool, failed: BaseException | None) -> BaseException | None:
    """Write the checkpoint to the spool folder if a process has failed; return the error, or None.

    Args:
      kept: the spool folder.
      failed: error of this process, or None. If the checkpoint is kept, the error has its path as `kept_at`.
    """
    if failed is None:
      outcome = spool.OK
    elif isinstance(failed, errors.DirectoryInUseError):
      outcome = spool.LOST_LEASE
    else:
      outcome = spool.FAILED
    worst = outcome
    if jax.process_count() > 1:
      worst = self._worst_of_all(kept, outcome)
    is_committed = worst == spool.OK and self.pending.folder.is_committed(self.pending)
    if failed is None and not is_committed:
      failed = errors.of_other_process(
        errors.CheckpointError('another process could not write its part; see its message')
      )
    if failed is None and multihost.is_lead():
      kept.clear(self.pending)
    if worst == spool.FAILED:  # after a lost lease another run continues in the store
      error: Any = failed  # of any class, so that none has the attribute
      error.kept_at = self.keep_copy(kept)
    return failed

  def _worst_of_all(self, kept: spool.Spool, outcome: int) -> int:
    """Return the worst outcome of all processes, `FAILED` if one could not write its own to the spool folder."""
    try:
      kept.report(self.pending, outcome)
    except OSError as e:  # reach the barrier, in which the others wait
      _logger.error(
        'The checkpoint of step %d cannot be kept in %s: %s', self.pending.step, kept.folder, e
      )
    self._barrier('told')
    worst = kept.worst(self.pending)
    self._barrier('counted')
    if multihost.is_lead():
      with contextlib.suppress(OSError):
        kept.forget(self.pending)
    return worst

  def keep_copy(self, kept: spool.Spool) -> str | None:
    """Write the checkpoint to the spool folder; return its path there, or None after an error, which is logged.

    Does nothing if the folder has this save or a later one.
    """
    try:
      return str(kept.write(self.pending, self._write, self._barrier))
    except (OSError, errors.CheckpointError) as e:
      _logger.error(
        'The checkpoint of step %d could not be written to %s: %s',
        self.pending.step,
        kept.folder,
        e,
      )
      return None

  def _write(self, pending: base.PendingCheckpoint) -> None:
    if self.data_state is not None:
      write_data_state(pending, self.data_state)
    array_io.write_parts(pending.state, self.parts)

  def _barrier(self, name: str) -> None:
    state_io.barrier(f'{self.pending.final.name}-{self.pending.attempt}:{name}')


def write_data_state(pending: base.PendingCheckpoint, data_state: Mapping[str, bytes]) -> None:
  """Write the position of this process's data iterator for a save."""
  name = restore.data_dir_name(jax.process_index(), jax.process_count())
  folder = pending.temporary / name / pending.own_folder
  for each in (folder.parent, folder):  # without the checkpoint, which may have been moved away
    each.mkdir(exist_ok=True)
  for key, value in data_state.items():
    files.write(folder / restore.data_file_name(key), value, durable=False)  # flushed at the commit
