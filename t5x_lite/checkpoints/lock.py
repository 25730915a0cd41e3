"""Advisory lock of a model directory, released by the kernel when the process ends.

On a network file system the lock depends on its mount; see "Shared file systems" in docs/reliability.md. In an object
store it is a `lease`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import time
import zlib

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite import files
from t5x_lite import multihost
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import lease
from t5x_lite.storage import open_folders

LOCK_FILENAME = '.lock'

# Errors of `flock` on file systems without locks, or whose lock service does not answer.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# A network file system may show a new file only after its caches expire.
_SHARED_SECONDS = 60.0


def _forget_in_child() -> None:
  # A forked child shares the open file, so its copy would keep the directory locked after the run has ended.
  for folder in open_folders.all_folders():
    if folder.lock is not None:
      folder.lock._close()  # pylint: disable=protected-access
      folder.lock = None


os.register_at_fork(after_in_child=_forget_in_child)


class ModelDirLock:
  """A lock of a directory; a context manager, released at the latest when the process ends.

  A process may lock a directory several times; the last `release` frees it.
  """

  def __init__(
    self,
    directory: files.Path,
    fd: int | None,
    created: list[files.Path],
    holder: str = '',
    what: str = 'directory',
    held_lease: lease.Lease | None = None,
  ):
    self.directory = directory
    self._folder: os.stat_result | None = None
    if not files.is_remote(directory):
      self._folder = os.stat(directory)
    self._fd = fd
    self._lease = held_lease
    self._created = created
    self._holder = holder
    self._what = what
    self._num_holders = 1
    self._has_saver = False

  @property
  def held(self) -> bool:
    """True until the lock is released."""
    return self._num_holders > 0

  def check(self) -> None:
    """Raise if another process has locked the directory too: locks of its file system failed or were lost.

    Raises:
      DirectoryInUseError: the lock file names another process.
      OSError: the directory is away or the lock file cannot be read, or a lease in a store has expired and cannot be
        renewed.
    """
    if self._lease is not None:
      self._lease.check()
    self.check_folder()
    if self._fd is None:
      return
    try:
      found = (self.directory / LOCK_FILENAME).read_text()
    except FileNotFoundError:  # deleted by hand, which is not yet a second run
      return
    if found != self._holder:
      raise errors.DirectoryInUseError(
        f'The {self._what} {str(self.directory)!r} is also in use by {_holder_name(self.directory)}, because its '
        'file system did not keep the lock of this run. Stop one of the runs, and mount the file system with locks.'
      )

  def check_folder(self) -> None:
    """Raise if the path of the directory leads to another folder than the one that was locked, or to none.

    It does after a rename or an unmount. What is written there would go into the folder of another run, or into a new
    folder that nobody has locked. Does nothing in an object store.

    Raises:
      OSError: the path leads elsewhere.
    """
    if self._folder is not None and not os.path.samestat(os.stat(self.directory), self._folder):
      raise OSError(
        errno.ESTALE,
        'this is another folder than the one that the run has locked, which was moved or unmounted',
        str(self.directory),
      )

  @property
  def is_away(self) -> bool:
    """True if the directory was moved or unmounted; False if it is there or was deleted, and in an object store."""
    try:
      self.check_folder()
    except OSError:
      # The files of a deleted directory have no name any more.
      return self._fd is None or os.fstat(self._fd).st_nlink > 0
    return False

  def release(self) -> None:
    """Release the lock once; the last release frees the directory, and further calls do nothing."""
    folder = open_folders.open_folder(str(self.directory))
    with folder.guard:
      if self._num_holders == 0:
        return
      self._num_holders -= 1
      if self._num_holders == 0:
        if folder.lock is self:  # not of the parent of a forked process
          folder.lock = None
          folder.retry_seconds = None
          folder.verified.clear()
        self._remove_unused()
        files.fence(self.directory, None)
        if self._lease is not None:
          self._lease.release()
        self._close()

  def begin_saving(self) -> None:
    """Note that a manager saves to the directory, until `end_saving`.

    Raises:
      DirectoryInUseError: another manager of this process does; they would delete each other's checkpoints.
    """
    if self._has_saver:
      raise errors.DirectoryInUseError(
        f'Another CheckpointManager of this process saves to {str(self.directory)!r}; close it first, or use that one.'
      )
    self._has_saver = True

  def end_saving(self) -> None:
    """Let another manager save to the directory."""
    self._has_saver = False

  def _remove_unused(self) -> None:
    """Remove the directories and the file that locking created, if nothing else was written there.

    A process that has opened the file meanwhile notices its removal, see `_acquire`.
    """
    if self._fd is None or not self._created:
      return
    with contextlib.suppress(OSError):  # another process has written to it, deleted or moved it
      self.check_folder()
      if os.listdir(self.directory) != [LOCK_FILENAME]:
        return
      os.unlink(self.directory / LOCK_FILENAME)
      for folder in self._created:
        os.rmdir(folder)

  def _close(self) -> None:
    if self._lease is not None:
      self._lease.abandon()
      self._lease = None
    if self._fd is not None:
      os.close(self._fd)
      self._fd = None

  def __enter__(self) -> ModelDirLock:
    return self

  def __exit__(self, *exc_info) -> None:
    self.release()


def lock_model_dir(
  directory: str | os.PathLike[str],
  *,
  what: str = 'model directory',
  elsewhere: str = 'another MODEL_DIR',
) -> ModelDirLock:
  """Create `directory` if it is missing, lock it against other runs, and remove leftovers of runs that died.

  The lock is `flock` on `directory/.lock`: the kernel releases it when the process ends, also after `kill -9`. In an
  object store it is a lease (see `lease`), which expires if its owner is killed. Only the lead process of a run locks;
  in other processes the returned object holds no lock.

  Args:
    directory: the model directory, or another directory that only one run may use at a time.
    what: name of the directory's kind, for messages.
    elsewhere: alternative to the directory, for messages.

  Returns:
    The lock.

  Raises:
    DirectoryInUseError: another process holds the directory; the message names it.
    ConfigError: the path has an unknown scheme, a store's package or credentials are missing, or the lock file is a
      link (LinkedFileError).
    CheckpointError: the directory cannot be created or written, or its file system has no locks.
    SaveError: the disk is full.
  """
  discovery.check_path(directory, what)
  path = files.path(directory).absolute()
  created: list[files.Path] = []
  is_lead = multihost.is_lead()  # Before anything is created, since it raises without a device.
  try:
    if not files.is_remote(path):
      created = [folder for folder in (path, *path.parents) if not folder.exists()]
      path.mkdir(parents=True, exist_ok=True)
      path = path.resolve()
    folder = open_folders.open_folder(str(path))
    with folder.guard:
      if folder.lock is not None:
        folder.lock._num_holders += 1  # pylint: disable=protected-access
        return folder.lock
      if not is_lead:
        lock = ModelDirLock(path, None, created, '', what)
      elif files.is_remote(path):
        held = lease.Lease(path, LOCK_FILENAME, in_use=_in_use(path, what, elsewhere))
        files.fence(path, held.check)
        lock = ModelDirLock(path, None, created, held.holder, what, held)
      else:
        fd, holder = _acquire(path, what, elsewhere)
        lock = ModelDirLock(path, fd, created, holder, what)
        files.fence(path, lock.check_folder)
      folder.lock = lock
    try:
      if is_lead:
        discovery.clean_leftovers(path)
    except OSError:
      lock.release()
      raise
    return lock
  except (OSError, ValueError) as e:  # ValueError: a path with a null byte
    if isinstance(e, errors.T5xLiteError):
      raise
    if files.is_remote(path):
      from t5x_lite import object_store

      # The status of an outage tells a scheduler to try again.
      if isinstance(e, object_store.StoreUnavailableError):
        kind = errors.SaveError
      else:
        kind = errors.CheckpointError
      raise kind(
        f'The {what} {str(path)!r} cannot be written: {getattr(e, "strerror", None) or e}.'
      ) from e
    is_full = errors.is_disk_full(e)
    if is_full:
      remedy = 'Free disk space, then rerun the command'
    elif isinstance(e, (FileExistsError, NotADirectoryError)) or files.broken_link(path):
      raise _no_folder_error(path, what, elsewhere) from e
    else:
      remedy = 'Change its permissions'
    raise (errors.SaveError if is_full else errors.CheckpointError)(
      f'The {what} {str(path)!r} cannot be written: {e}. {remedy}, or choose {elsewhere}.'
    ) from e


def without_links(directory: str | os.PathLike[str]) -> str:
  """Return the path of a directory without links, for a run to use until it ends.

  A link that is switched during the run would lead to a folder that the run has not locked. A path without links is
  returned unchanged, also a relative one, and so is a link to nothing, which `lock_model_dir` reports.

  Args:
    directory: path of the directory, which need not exist; in an object store it has no links.
  """
  name = os.fspath(directory)
  if files.is_remote(name) or '\0' in name:  # `lock_model_dir` reports a null byte
    return name
  real = files.real_path(name)
  is_dangling = os.path.islink(name) and not os.path.exists(name)
  if is_dangling or real == os.path.abspath(name):
    return name
  return real


def check_model_dir(directory: str | os.PathLike[str]) -> None:
  """Raise what `lock_model_dir` would raise for the path of a model directory; create nothing, for `--dry_run`.

  Raises:
    ConfigError, CheckpointError: see `lock_model_dir`.
  """
  what = 'model directory'
  elsewhere = 'another MODEL_DIR'
  discovery.check_path(directory, what)
  path = files.path(directory).absolute()
  if files.is_remote(path):
    return
  # A link whose target does not exist is in the way too.
  nearest = next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())
  if not nearest.is_dir():
    raise _no_folder_error(path, what, elsewhere)
  if not os.access(nearest, os.W_OK | os.X_OK):
    raise errors.CheckpointError(
      f'The {what} {str(path)!r} cannot be written: no permission for {str(nearest)!r}. Change its permissions, or '
      f'choose {elsewhere}.'
    )


def _no_folder_error(path: files.Path, what: str, elsewhere: str) -> errors.CheckpointError:
  broken = files.broken_link(path)
  if broken is not None:
    return errors.CheckpointError(
      f'The {what} {str(path)!r} cannot be written: {broken}. Delete or replace the link, or choose '
      f'{elsewhere}.'
    )
  return errors.CheckpointError(
    f'The {what} {str(path)!r} cannot be written: it is a file, or in one. Choose {elsewhere}.'
  )


def check_is_shared(lock: ModelDirLock, *, seconds: float = _SHARED_SECONDS) -> None:
  """Raise unless all processes see the directory that the lead has locked; all of them must call this.

  Args:
    lock: the lock of this process.
    seconds: time in which a network file system must show the lock of the lead.

  Raises:
    CheckpointError: a process has another directory under this path, or another path.
  """
  if jax.process_count() == 1:
    return
  wanted = multihost.broadcast_from_lead(np.uint32(zlib.crc32(lock._holder.encode())))
  deadline = time.monotonic() + seconds
  while not (is_seen := _read_checksum(lock.directory) == wanted) and time.monotonic() < deadline:
    time.sleep(0.1)
  if multihost.any_process(not is_seen):
    error = errors.CheckpointError(
      f'The {lock._what} {str(lock.directory)!r} must be the same folder for all processes, and process '
      f'{jax.process_index()} does not see the file {LOCK_FILENAME} of process 0 there. Use a folder that all '
      'machines share, under the same path.'
    )
    raise errors.of_other_process(error) if is_seen else error


def _read_checksum(directory: files.Path) -> int | None:
  path = directory / LOCK_FILENAME
  try:
    return zlib.crc32(
      lease.read_holder(path).encode() if files.is_remote(path) else path.read_bytes()
    )
  except OSError:
    return None


def _in_use(path: files.Path, what: str, elsewhere: str) -> str:
  """Return the message about a directory that `{holder}` uses."""
  name = repr(str(path)).replace('{', '{{').replace('}', '}}')
  return f'The {what} {name} is in use by {{holder}}. Wait for that run or stop it, or choose {elsewhere}.'


def _acquire(path: pathlib.Path, what: str, elsewhere: str) -> tuple[int, str]:
  """Return (open lock file, contents that name this process)."""
  while True:
    path.mkdir(parents=True, exist_ok=True)
    fd = files.open_regular(path / LOCK_FILENAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise errors.DirectoryInUseError(
          _in_use(path, what, elsewhere).format(holder=_holder_name(path))
        ) from None
      except OSError as e:
        if e.errno not in _NO_LOCKS:
          raise
        raise errors.CheckpointError(
          f'The {what} {str(path)!r} cannot be locked: {e.strerror}. Mount its file system with locks (NFS: without '
          f'nolock, and with rpc.statd for version 3), or choose {elsewhere}.'
        ) from e
      if _is_file(fd, path / LOCK_FILENAME):
        holder = json.dumps(
          {
            'pid': os.getpid(),
            'host': socket.gethostname(),
            'since': time.strftime('%Y-%m-%d %H:%M:%S'),
          }
        )
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)
        os.fsync(fd)  # a network file system shows it to other hosts
        return fd, holder
    except BaseException:
      os.close(fd)
      raise
    os.close(fd)  # its last holder has deleted the file, so other processes would lock a new one


def _is_file(fd: int, path: pathlib.Path) -> bool:
  """Return True if the open file is the file at `path`."""
  try:
    return os.path.samestat(os.fstat(fd), os.stat(path))
  except FileNotFoundError:
    return False


def _holder_name(path: files.Path) -> str:
  """Return the process that the lock file of a directory names, as text."""
  try:
    return lease.holder_name((path / LOCK_FILENAME).read_text())
  except OSError:
    return 'another process'
