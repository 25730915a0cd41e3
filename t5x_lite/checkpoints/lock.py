"""One run per model directory: an advisory lock that ends with the process that took it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time

from t5x_lite import errors, multihost
from t5x_lite.checkpoints import discovery

LOCK_FILENAME = '.lock'

_held: dict[str, ModelDirLock] = {}
_held_guard = threading.Lock()


def _forget_in_child() -> None:
  # A forked child shares the open file, so its copy would keep the directory locked after the run itself has ended.
  for lock in _held.values():
    lock._close()  # pylint: disable=protected-access
  _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class ModelDirLock:
  """A held lock; a context manager, and released at the latest when the process ends.

  The same process may lock a directory again; the lock is free once every `release` has been called.
  """

  def __init__(self, directory: pathlib.Path, fd: int | None, created: list[pathlib.Path]):
    self.directory = directory
    self._fd = fd
    self._created = created
    self._num_holders = 1

  @property
  def held(self) -> bool:
    """Whether the lock has not been released."""
    return self._num_holders > 0

  def release(self) -> None:
    """Gives back one hold; the last one frees the directory. Further calls do nothing."""
    with _held_guard:
      if self._num_holders == 0:
        return
      self._num_holders -= 1
      if self._num_holders == 0:
        _held.pop(str(self.directory), None)
        self._remove_unused()
        self._close()

  def _remove_unused(self) -> None:
    """Takes away what locking has created if nothing else was written: a run that was refused leaves no trace.

    Elsewhere the file stays. A process that has opened it meanwhile finds out, see `_acquire`.
    """
    if self._fd is None or not self._created:
      return
    with contextlib.suppress(OSError):  # not empty: someone else has begun to write there; or gone already
      if os.listdir(self.directory) != [LOCK_FILENAME]:
        return
      os.unlink(self.directory / LOCK_FILENAME)
      for folder in self._created:
        os.rmdir(folder)

  def _close(self) -> None:
    if self._fd is not None:
      os.close(self._fd)
      self._fd = None

  def __enter__(self) -> ModelDirLock:
    return self

  def __exit__(self, *exc_info) -> None:
    self.release()


def lock_model_dir(directory: str | os.PathLike[str], *, what: str = 'model directory',
                   elsewhere: str = 'another MODEL_DIR') -> ModelDirLock:
  """Creates `directory` where it is missing, holds it against other runs, and tidies up after dead ones.

  The lock is `flock` on `directory/.lock`: the kernel drops it when the process ends, `kill -9` included. Only the lead
  process of a run locks; in the others the returned object holds nothing.

  Args:
    directory: the model directory, or another that one run at a time may use.
    what: names its kind in messages.
    elsewhere: what messages propose in its place.

  Returns:
    The lock, to be released or kept until the process ends.

  Raises:
    DirectoryInUseError: another process holds the directory; the message names it.
    ConfigError: the path is remote.
    CheckpointError: the directory cannot be created or written.
    SaveError: the disk is full.
  """
  discovery.check_local_path(directory, what)
  path = pathlib.Path(directory).absolute()
  created = []
  try:
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    path = path.resolve()
    with _held_guard:
      if str(path) in _held:
        _held[str(path)]._num_holders += 1  # pylint: disable=protected-access
        return _held[str(path)]
      lock = ModelDirLock(path, _acquire(path, what, elsewhere) if multihost.is_lead() else None, created)
      _held[str(path)] = lock
    try:
      if multihost.is_lead():
        discovery.clean_leftovers(path)
    except OSError:
      lock.release()
      raise
    return lock
  except (OSError, ValueError) as e:  # ValueError: a path with a null byte
    if isinstance(e, errors.T5xLiteError):
      raise
    if errors.is_disk_full(e):
      raise errors.SaveError(f'The {what} {str(path)!r} cannot be written: {e}. Free disk space, then rerun the '
                             f'command, or choose {elsewhere}.') from e
    raise errors.CheckpointError(
        f'The {what} {str(path)!r} cannot be written: {e}. Expected a directory that this user may create '
        f'files in; choose {elsewhere} or change its permissions.') from e


def _acquire(path: pathlib.Path, what: str, elsewhere: str) -> int:
  while True:
    path.mkdir(parents=True, exist_ok=True)
    fd = os.open(path / LOCK_FILENAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
      try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise errors.DirectoryInUseError(_in_use_message(path, what, elsewhere)) from None
      if _is_file(fd, path / LOCK_FILENAME):
        holder = {'pid': os.getpid(), 'host': socket.gethostname(), 'since': time.strftime('%Y-%m-%d %H:%M:%S')}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
        return fd
    except BaseException:
      os.close(fd)
      raise
    os.close(fd)  # its last holder has removed it: others would lock a new file beside this one


def _is_file(fd: int, path: pathlib.Path) -> bool:
  """Whether an open file is the one that has the name `path`."""
  try:
    return os.path.samestat(os.fstat(fd), os.stat(path))
  except FileNotFoundError:
    return False


def _in_use_message(path: pathlib.Path, what: str, elsewhere: str) -> str:
  try:
    holder = json.loads((path / LOCK_FILENAME).read_text())
    who = f"process {holder['pid']} on host {holder['host']}, since {holder['since']}"
  except (OSError, ValueError, KeyError, TypeError):
    who = 'another process'  # It holds the lock, and has not written its name yet.
  return (f'The {what} {str(path)!r} is in use by {who}. Expected a directory that no live run holds: wait for that '
          f'run or stop it, or give this one {elsewhere}.')
