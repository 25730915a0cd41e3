"""Local folder for the checkpoint and the metrics of a save that the run directory did not take.

    SPOOL_DIR/<quoted MODEL_DIR>/checkpoint_<step>/     as in a model directory on a disk
    SPOOL_DIR/<quoted MODEL_DIR>/unwritten/<quoted path>  contents of other files of the run

The next run of the same command copies them to the run directory first. With several processes all must share the
folder.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import logging
import os
import pathlib
import threading
import time
from typing import Any
import urllib.parse

import jax

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints.folders import base
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)

OK, FAILED, LOST_LEASE = range(3)
_UNWRITTEN = 'unwritten'
# A network file system may show a new file only after its caches expire.
_SHARED_SECONDS = 60.0


class Spool:
  """The part of a spool folder that belongs to one model directory."""

  def __init__(self, spool_dir: str, model_dir: files.PathLike):
    """Make the folder.

    Raises:
      ConfigError: the folder is not local, is in the model directory, or cannot be written.
    """
    # Without links, so that the next run finds it: a run on a disk resolves its directory, too.
    self._model_dir = files.path(files.real_path(model_dir))
    is_valid = isinstance(spool_dir, str) and bool(spool_dir) and not files.is_remote(spool_dir)
    if is_valid:
      folder = pathlib.Path(files.real_path(spool_dir))
      is_valid = self._model_dir not in (folder, *folder.parents)
    checks.check(
      'train',
      {'spool_dir': spool_dir},
      spool_dir=checks.Expectation(
        'a local folder outside of MODEL_DIR',
        lambda name: is_valid,
        'Omit it, or name a folder on another disk.',
      ),
    )
    # Number of the newest save that this process has kept, and its path.
    self._newest: tuple[int, files.Path] | None = None
    self._num_writing = 0
    self._guard = threading.Lock()  # of these attributes and of the checkpoints in the folder
    # Of a write. Only for a single process: of several, one could write the later of two checkpoints, and another one
    # the earlier, and each would wait for the other.
    self._turn: contextlib.AbstractContextManager[Any] = threading.Lock()
    if jax.process_count() > 1:
      self._turn = contextlib.nullcontext()
    quoted = urllib.parse.quote(str(self._model_dir), safe='')
    self.folder = pathlib.Path(spool_dir).absolute() / quoted
    try:
      files.make_writable(self.folder)
    except OSError as e:
      raise errors.ConfigError(
        f'`train.spool_dir` must be a folder that can be written, got {spool_dir!r} ({e}).'
      ) from e

  def report(self, pending: base.PendingCheckpoint, outcome: int) -> None:
    """Tell all processes the outcome of this process's part of a save: `OK`, `FAILED` or `LOST_LEASE`."""
    files.make_writable(self.folder)
    path = self.folder / f'{_name(pending)}.process_{jax.process_index()}'
    files.write(path, str(outcome), durable=False)

  def worst(self, pending: base.PendingCheckpoint) -> int:
    """Return the worst outcome of all processes, `FAILED` if one cannot be read; only after a barrier."""
    paths = [self.folder / f'{_name(pending)}.process_{i}' for i in range(jax.process_count())]
    deadline = time.monotonic()
    if len(paths) > 1:
      deadline += _SHARED_SECONDS
    while not all(path.exists() for path in paths):  # a network file system may show them late
      if time.monotonic() > deadline:
        return FAILED
      time.sleep(0.1)
    return max(int(path.read_text()) for path in paths)

  def forget(self, pending: base.PendingCheckpoint) -> None:
    """Remove the reports; only in the lead process, when all have read them."""
    for path in self.folder.glob(f'{_name(pending)}.process_*'):
      files.remove(path)

  def write(
    self,
    pending: base.PendingCheckpoint,
    write_fn: Callable[[base.PendingCheckpoint], None],
    barrier_fn: Callable[[str], None],
  ) -> files.Path:
    """Write a checkpoint in place of those kept before; all processes call this together.

    Does nothing if this save or a later one is kept: an earlier save may fail after a later one was kept. Several
    threads may write different saves, whose temporary folders have different names.

    Args:
      pending: the save in the run directory.
      write_fn: writes the part of this process of a save.
      barrier_fn: waits for all processes; gets a name.

    Returns:
      Path of the checkpoint that is kept.

    Raises:
      OSError: e.g. the disk is full.
      CheckpointError: another process could not write its part.
    """
    with self._turn:
      with self._guard:
        self._forget_moved()
        if self._newest is not None and self._is_kept(_number(pending), self._newest[0]):
          return self._newest[1]
        self._num_writing += 1
      try:
        path = self._write(pending, write_fn, barrier_fn)
      finally:
        with self._guard:
          self._num_writing -= 1
      with self._guard:
        if self._newest is None or self._newest[0] < _number(pending):
          self._newest = _number(pending), path
        return self._newest[1]

  def _is_kept(self, number: int, newest: int) -> bool:
    if (
      jax.process_count() > 1
    ):  # another process may not yet know of a later one, and would wait for this one
      return number == newest
    return number <= newest

  def _write(
    self,
    pending: base.PendingCheckpoint,
    write_fn: Callable[[base.PendingCheckpoint], None],
    barrier_fn: Callable[[str], None],
  ) -> files.Path:
    here = folders.model_folder(self.folder).new_save(
      pending.step,
      pending.attempt,
      arrays=pending.arrays,
      metadata=pending.metadata,
      metrics=pending.metrics,
      has_data_state=pending.has_data_state,
    )
    failed = None

    def write_part():
      write_fn(here)
      here.folder.mark_written(here)

    # A process that fails reaches each barrier too; otherwise the others would wait for it.
    for name, fn, is_for_lead in (
      ('begun', lambda: self._begin(here), True),
      ('parts', write_part, False),
      ('kept', lambda: self._commit(here), True),
    ):
      if failed is None and (multihost.is_lead() or not is_for_lead):
        try:
          fn()
        except (OSError, errors.CheckpointError) as e:
          failed = e
      barrier_fn(f'spool {name}')
    newest = discovery.latest_step(self.folder)
    if failed is None and (newest is None or newest < here.step):
      failed = errors.of_other_process(
        errors.CheckpointError('another process could not write its part')
      )
    if failed is not None:
      if multihost.is_lead():  # a full disk could otherwise take no later checkpoint
        files.remove_tree(here.temporary, ignore_errors=True)
      raise failed
    return here.final

  def _forget_moved(self) -> None:
    """Warn of the kept checkpoint if it was moved or deleted, and forget it."""
    if self._newest is not None and not self._newest[1].is_dir():
      _logger.warning(
        '%s was moved or deleted while the run uses it. The folder is made again for the newest state.',
        self._newest[1],
      )
      self._newest = None

  def _begin(self, here: base.PendingCheckpoint) -> None:
    files.make_writable(self.folder)  # it may have been moved or deleted
    here.folder.begin(here)

  def _commit(self, here: base.PendingCheckpoint) -> None:
    with self._guard:
      if self._newest is not None and _number(here) < self._newest[0]:
        files.remove_tree(here.temporary, ignore_errors=True)
        return
      here.folder.commit(here)
      self._newest = _number(here), here.final
      self._write_unwritten()
      for step in discovery.all_steps(self.folder):
        if step != here.step:
          folders.remove_checkpoint_dir(discovery.get_checkpoint_dir(self.folder, step))

  def clear(self, pending: base.PendingCheckpoint | None = None) -> None:
    """Remove everything that was kept, after a save in the run directory, unless a later one than `pending` is kept."""
    with self._turn, self._guard:
      if pending is not None and self._newest is not None and _number(pending) < self._newest[0]:
        return
      if self._num_writing:  # a later one, which replaces what is kept
        return
      self._newest = None
      self._remove_all()

  def _remove_all(self) -> None:
    files.remove_tree(self.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
      self.folder.mkdir(parents=True, exist_ok=True)

  def recover(self) -> int | None:
    """Copy the checkpoint to the run directory and remove it here, if it is newer than all sound checkpoints there.

    Call it in the lead process, which must hold the lock of the model directory.

    Returns:
      Step of the copied checkpoint, or None.

    Raises:
      CheckpointDamagedError: the kept checkpoint differs from its manifest.
      OSError: the run directory does not take it.
    """
    step = discovery.latest_step(self.folder)
    if step is None:
      return None
    there = -1
    for each in discovery.all_steps(self._model_dir):
      if not discovery.is_marked_unsound(discovery.get_checkpoint_dir(self._model_dir, each)):
        there = max(there, each)
    source = pathlib.Path(discovery.get_checkpoint_dir(self.folder, step))
    if there >= step and self._is_committed(source):
      _logger.info(
        '%s has the checkpoint of step %d that was kept in %s, where it is deleted.',
        self._model_dir,
        step,
        self.folder,
      )
      self.clear()
      return None
    if there >= step:
      _logger.warning(
        'The checkpoint of step %d in %s is not used, because it is not newer than that of step %d in '
        '%s. Delete it, or the other one to use it; the next one that the run directory does not take replaces it.',
        step,
        self.folder,
        there,
        self._model_dir,
      )
      return None
    problem = manifest.damage(source)
    if problem:
      raise errors.CheckpointDamagedError(
        f'{problem} A former run kept it because the run directory failed. To go on without it, from step '
        f'{max(there, 0)} in {str(self._model_dir)!r}, delete {str(self.folder)!r}.'
      )
    target = self._model_dir / source.name
    _logger.info(
      'Copying the checkpoint of step %d, which was kept in %s, to %s.', step, source, target
    )
    for path in (self.folder / _UNWRITTEN).glob('*'):
      files.write_unwritten(urllib.parse.unquote(path.name), path.read_bytes())
      path.unlink()  # a part would be added again
    folders.model_folder(self._model_dir).upload(source, source.name)
    self.clear()
    return step

  def _is_committed(self, source: pathlib.Path) -> bool:
    """Return True if the run directory took a kept checkpoint later, and has it undamaged.

    A process that is killed between this commit and `clear` leaves the copy.
    """
    committed = self._model_dir / source.name
    try:
      kept = manifest.read(source)
      found = manifest.read(committed)
      if kept is None or found is None or discovery.is_marked_unsound(committed):
        return False
      if (kept.arrays, kept.metadata) != (found.arrays, found.metadata):  # of another run
        return False
      return manifest.damage(committed) is None
    except errors.CheckpointError:  # an invalid manifest
      return False

  def _write_unwritten(self) -> None:
    files.remove_tree(self.folder / _UNWRITTEN, ignore_errors=True)
    for path, content in files.unwritten(self._model_dir).items():
      (self.folder / _UNWRITTEN).mkdir(exist_ok=True)
      files.write(self.folder / _UNWRITTEN / urllib.parse.quote(path, safe=''), content)


def recover(spool_dir: str | None, model_dir: files.PathLike) -> None:
  """Copy the checkpoint of a former run in `spool_dir` to its model directory; all processes call this.

  See `Spool.recover`.

  Raises:
    ConfigError: `spool_dir` is no local folder.
    CheckpointError: the kept checkpoint is damaged, or could not be copied.
  """
  if spool_dir is None:
    return
  kept = Spool(spool_dir, model_dir)
  failed = None
  if multihost.is_lead():
    try:
      kept.recover()
    except (OSError, errors.CheckpointError) as e:
      if isinstance(e, errors.CheckpointError):
        failed = e
      else:
        failed = errors.CheckpointError(
          f'What was kept in {str(kept.folder)!r} could not be copied to {os.fspath(model_dir)!r}: {e}. Run the '
          'command again when the run directory can be written.'
        )
  if multihost.any_process(failed is not None):
    raise failed or errors.of_other_process(
      errors.CheckpointError('The lead process failed; see its message.')
    )


def _number(pending: base.PendingCheckpoint) -> int:
  """Return the number of a save of this process, which ends the text of the attempt."""
  return int(pending.attempt.rpartition('-')[2])


def _name(pending: base.PendingCheckpoint) -> str:
  return f'{pending.final.name}-{pending.attempt}'
