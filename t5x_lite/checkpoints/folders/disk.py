"""Model directory on a disk.

All files of a save are hashed into the manifest and flushed before one atomic rename gives the directory its name. A
process that dies before the rename leaves no checkpoint; one that dies after it leaves a complete checkpoint. The lock
is `flock` on a file: the kernel releases it when the process ends, also after `kill -9`. On a network file system it
depends on its mount; see "Shared file systems" in docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import socket
import time
from typing import Any
import uuid

import jax

from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.folders import base
from t5x_lite.checkpoints.locks import lease
from t5x_lite.storage import files

# Errors of `flock` on file systems without locks, or whose lock service does not answer.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class DiskFolder(base.Folder):
  """See `base.Folder`."""

  path: pathlib.Path

  def __init__(self, path: pathlib.Path):
    super().__init__(path)
    self._status: os.stat_result | None = None
    self._created: list[pathlib.Path] = []
    self._run_id = ''
    self._has_rest = False

  # ---- saves --------------------------------------------------------------------------------------------------------

  def new_save(self, step: int, attempt: str, **fields: Any) -> base.PendingCheckpoint:
    """See `base.Folder.new_save`."""
    self._run_id = attempt.rpartition('-')[0]
    final = self.path / f'{discovery.CHECKPOINT_PREFIX}_{step}'
    return base.PendingCheckpoint(
      folder=self,
      step=step,
      temporary=final.with_name(f'{final.name}{discovery.WRITING_INFIX}{attempt}'),
      final=final,
      own_folder='',
      attempt=attempt,
      **fields,
    )

  def begin(self, pending: base.PendingCheckpoint) -> None:
    """See `base.Folder.begin`."""
    pending.temporary.mkdir()

  def has_begun(self, pending: base.PendingCheckpoint) -> bool:
    """See `base.Folder.has_begun`."""
    return pending.temporary.is_dir()

  def mark_written(self, pending: base.PendingCheckpoint) -> None:
    """See `base.Folder.mark_written`."""
    if jax.process_count() > 1:
      pending.mark(jax.process_index()).touch()

  def commit(
    self, pending: base.PendingCheckpoint, check_fn: Callable[[], None] = lambda: None
  ) -> None:
    """See `base.Folder.commit`."""
    root = pending.temporary
    for mark in pending.marks():
      mark.unlink()
    array_io.merge(pending.state)
    hashes = manifest_lib.hash_files(root, manifest_lib.list_files(root))
    state_io.check_written(pending.state, pending.arrays)
    check_fn()
    manifest_lib.write(root, pending.manifest(hashes))
    files.fsync_tree(root)
    final = pending.final
    is_replacing = final.exists()
    if is_replacing:
      # Damaged, or of an earlier run. Between the two renames no checkpoint has the name: after a crash
      # `clean_leftovers` renames the old one back.
      final.rename(pending.replaced)
    try:
      root.rename(final)
    except OSError:
      if is_replacing:
        pending.replaced.rename(final)
      raise
    files.fsync(final.parent)
    if is_replacing:
      self._remove_replaced(pending)

  def is_committed(self, pending: base.PendingCheckpoint) -> bool:
    """See `base.Folder.is_committed`."""
    # It was renamed; without the second condition, a directory that is away would have all checkpoints.
    return not pending.temporary.exists() and pending.final.is_dir()

  def discard(self, pending: base.PendingCheckpoint, error: BaseException) -> None:
    """See `base.Folder.discard`."""
    del pending, error
    self.discard_rest()

  def discard_rest(self) -> None:
    """Remove the folders of all saves of this run that failed."""
    # `fullmatch`, since names of replaced checkpoints have the same suffix.
    name = re.compile(
      rf'{discovery.CHECKPOINT_PREFIX}_\d+{re.escape(discovery.WRITING_INFIX)}{self._run_id}-\d+'
    )
    try:
      left = [folder for folder in self.path.iterdir() if name.fullmatch(folder.name)]
    except OSError:  # the directory is away; the next save tries again
      self._has_rest = True
      return
    for folder in left:
      shutil.rmtree(folder, ignore_errors=True)
    self._has_rest = any(folder.exists() for folder in left)

  def close(self) -> None:
    """Remove what failed saves have left."""
    if self._has_rest:
      self.discard_rest()

  # ---- checkpoints --------------------------------------------------------------------------------------------------

  def delete(self, path: files.Path, final_name: str) -> None:
    """Rename a folder, then delete it."""
    doomed = path.with_name(f'{final_name}{discovery.DELETED_INFIX}{uuid.uuid4().hex[:8]}')
    path.rename(doomed)
    shutil.rmtree(doomed)

  def move(self, source: files.Path, target: files.Path) -> None:
    """Rename a checkpoint."""
    source.rename(target)

  def upload(self, source: pathlib.Path, name: str) -> None:
    """See `base.Folder.upload`."""
    target = self.path / name
    discovery.check_free(target)
    temporary = target.with_name(f'{name}{discovery.WRITING_INFIX}{uuid.uuid4().hex[:8]}')
    try:
      shutil.copytree(source, temporary)
      files.fsync_tree(temporary)
      files.rename(temporary, target)
    except BaseException:
      files.remove_tree(temporary, ignore_errors=True)
      raise

  def clean_leftovers(self) -> list[str]:
    """See `base.Folder.clean_leftovers`."""
    done = []
    for entry, match in base.leftovers(self.path):
      if entry.name.startswith(f'{discovery.METRICS_FILENAME}{discovery.WRITING_INFIX}'):
        entry.unlink()
        done.append(entry.name)
      elif match is not None and self._clean(entry, match):
        done.append(entry.name)
    return done

  # ---- lock ---------------------------------------------------------------------------------------------------------

  def make(self) -> None:
    """See `base.Folder.make`."""
    path = self.path
    self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    self.path = path.resolve()
    self._status = os.stat(self.path)

  def check_can_be_made(self, what: str, elsewhere: str) -> None:
    """See `base.Folder.check_can_be_made`."""
    path = self.path
    # A link whose target does not exist is in the way too.
    nearest = next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())
    if not nearest.is_dir():
      raise self._not_a_folder(what, elsewhere)
    if not os.access(nearest, os.W_OK | os.X_OK):
      raise errors.CheckpointError(
        f'The {what} {str(path)!r} cannot be written: no permission for {str(nearest)!r}. Change its permissions, or '
        f'choose {elsewhere}.'
      )

  def lock(self, what: str, elsewhere: str) -> FileLock:
    """Lock the file `.lock` of the directory."""
    while True:
      self.path.mkdir(parents=True, exist_ok=True)
      fd = files.open_regular(self.path / discovery.LOCK_FILENAME, os.O_RDWR | os.O_CREAT, 0o644)
      try:
        self._flock(fd, what, elsewhere)
        if _is_file(fd, self.path / discovery.LOCK_FILENAME):
          self._status = os.stat(self.path)
          return FileLock(self, fd, self._created, what)
      except BaseException:
        os.close(fd)
        raise
      os.close(fd)  # its last holder has deleted the file, so other processes would lock a new one

  def _flock(self, fd: int, what: str, elsewhere: str) -> None:
    try:
      files.flock(fd)
    except BlockingIOError:
      raise errors.DirectoryInUseError(
        self.in_use(what, elsewhere).format(holder=self.holder_name())
      ) from None
    except OSError as e:
      if e.errno not in _NO_LOCKS:
        raise
      raise errors.CheckpointError(
        f'The {what} {str(self.path)!r} cannot be locked: {e.strerror}. Mount its file system with locks (NFS: without '
        f'nolock, and with rpc.statd for version 3), or choose {elsewhere}.'
      ) from e

  def holder_name(self) -> str:
    """Return the process that the lock file names, as text."""
    try:
      return lease.holder_name(self.read_holder())
    except OSError:
      return 'another process'

  def check_same(self) -> None:
    """See `base.Folder.check_same`."""
    if self._status is not None and not os.path.samestat(os.stat(self.path), self._status):
      raise OSError(
        errno.ESTALE,
        'this is another folder than the one that the run has locked, which was moved or unmounted',
        str(self.path),
      )

  def read_holder(self) -> str:
    """See `base.Folder.read_holder`."""
    return (self.path / discovery.LOCK_FILENAME).read_text()

  def unwritable(self, error: Exception, what: str, elsewhere: str) -> errors.T5xLiteError:
    """See `base.Folder.unwritable`."""
    text = f'The {what} {str(self.path)!r} cannot be written: {error}.'
    if errors.is_disk_full(error):
      return errors.SaveError(
        f'{text} Free disk space, then rerun the command, or choose {elsewhere}.'
      )
    is_no_folder = isinstance(error, (FileExistsError, NotADirectoryError))
    if is_no_folder or files.broken_link(self.path):
      return self._not_a_folder(what, elsewhere)
    return errors.CheckpointError(f'{text} Change its permissions, or choose {elsewhere}.')

  def _not_a_folder(self, what: str, elsewhere: str) -> errors.CheckpointError:
    broken = files.broken_link(self.path)
    if broken is not None:
      return errors.CheckpointError(
        f'The {what} {str(self.path)!r} cannot be written: {broken}. Delete or replace the link, or choose '
        f'{elsewhere}.'
      )
    return errors.CheckpointError(
      f'The {what} {str(self.path)!r} cannot be written: it is a file, or in one. Choose {elsewhere}.'
    )


class FileLock:
  """Lock of a directory on a disk, see `base.HeldLock`."""

  def __init__(self, folder: DiskFolder, fd: int, created: list[pathlib.Path], what: str):
    """Write the name of this process to the locked file.

    Args:
      folder: the directory.
      fd: the file, open and locked.
      created: the directory and those above it, as far as `DiskFolder.make` has made them.
      what: name of the directory's kind, for messages.
    """
    self._folder = folder
    self._fd: int | None = fd
    self._created = created
    self._what = what
    self.holder = json.dumps(
      {
        'pid': os.getpid(),
        'host': socket.gethostname(),
        'since': time.strftime('%Y-%m-%d %H:%M:%S'),
      }
    )
    os.ftruncate(fd, 0)
    os.pwrite(fd, self.holder.encode(), 0)
    os.fsync(fd)  # a network file system shows it to other hosts

  @property
  def is_deleted(self) -> bool:
    """True if the directory was deleted: its files have no name any more."""
    return self._fd is not None and not os.fstat(self._fd).st_nlink

  def check(self) -> None:
    """Raise if another process has locked the directory too: locks of its file system failed or were lost.

    Raises:
      DirectoryInUseError: the lock file names another process.
      OSError: the directory is away, or the lock file cannot be read.
    """
    self._folder.check_same()
    try:
      found = self._folder.read_holder()
    except FileNotFoundError:  # deleted by hand, which is not yet a second run
      return
    if found != self.holder:
      raise errors.DirectoryInUseError(
        f'The {self._what} {str(self._folder.path)!r} is also in use by {self._folder.holder_name()}, because its '
        'file system did not keep the lock of this run. Stop one of the runs, and mount the file system with locks.'
      )

  def check_writing(self) -> None:
    """Raise if the path leads to another folder than the one that is locked, or to none."""
    self._folder.check_same()

  def release(self) -> None:
    """Remove the directories and the file that locking created, if nothing else was written there; free the lock.

    A process that has opened the file meanwhile notices its removal, see `DiskFolder.lock`.
    """
    if self._created:
      with contextlib.suppress(OSError):  # another process has written to it, deleted or moved it
        self._remove_unused()
    self.abandon()

  def _remove_unused(self) -> None:
    self._folder.check_same()
    if os.listdir(self._folder.path) != [discovery.LOCK_FILENAME]:
      return
    os.unlink(self._folder.path / discovery.LOCK_FILENAME)
    for folder in self._created:
      os.rmdir(folder)

  def abandon(self) -> None:
    """Close the file: a forked child shares it, and would keep the directory locked after the run has ended."""
    if self._fd is not None:
      os.close(self._fd)
      self._fd = None


def _is_file(fd: int, path: pathlib.Path) -> bool:
  """Return True if the open file is the file at `path`."""
  try:
    return os.path.samestat(os.fstat(fd), os.stat(path))
  except FileNotFoundError:
    return False
