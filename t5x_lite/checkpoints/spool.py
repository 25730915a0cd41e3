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
import urllib.parse

import jax

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import files
from t5x_lite import multihost
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints.folders import base

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
    self._guard = threading.Lock()
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

    Does nothing if this save or a later one is kept: an earlier save may fail after a later one was kept.

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
    with self._guard:
      if self._newest is not None and _number(pending) <= self._newest[0]:
        return self._newest[1]
      path = self._write(pending, write_fn, barrier_fn)
      self._newest = _number(pending), path
      return path

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
      ('begun', lambda: here.folder.begin(here), True),
      ('parts', write_part, False),
      ('kept', lambda: self._commit(here), True),
    ):
      if failed is None and (multihost.is_lead() or not is_for_lead):
        try:
          fn()
        except (OSError, errors.CheckpointError) as e:
          failed = e
      barrier_fn(f'spool {name}')
    if failed is None and not here.final.exists():
      failed = errors.of_other_process(
        errors.CheckpointError('another process could not write its part')
      )
    if failed is not None:
      raise failed
    return here.final

  def _commit(self, here: base.PendingCheckpoint) -> None:
    here.folder.commit(here)
    self._write_unwritten()
    for step in discovery.all_steps(self.folder):
      if step != here.step:
        folders.remove_checkpoint_dir(discovery.get_checkpoint_dir(self.folder, step))

  def clear(self, pending: base.PendingCheckpoint | None = None) -> None:
    """Remove everything that was kept, after a save in the run directory, unless a later one than `pending` is kept."""
    with self._guard:
      if pending is not None and self._newest is not None and _number(pending) < self._newest[0]:
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
    if there >= step:
      _logger.warning(
        'The checkpoint of step %d in %s is not used, because it is not newer than that of step %d in '
        '%s. Delete it, or it is replaced by the next one that the run directory does not take.',
        step,
        self.folder,
        there,
        self._model_dir,
      )
      return None
    source = pathlib.Path(discovery.get_checkpoint_dir(self.folder, step))
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
