"""Advisory lock of a model directory: a locked file on a disk (`folders.disk`), a `lease` in an object store."""

from __future__ import annotations

import os
import time
import zlib

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints.folders import base
from t5x_lite.storage import files
from t5x_lite.storage import open_folders

# A network file system may show a new file only after its caches expire.
_SHARED_SECONDS = 60.0


def _forget_in_child() -> None:
  for state in open_folders.all_folders():
    if state.lock is not None:
      state.lock.abandon()
      state.lock = None


os.register_at_fork(after_in_child=_forget_in_child)


class ModelDirLock:
  """A lock of a directory; a context manager, released at the latest when the process ends.

  A process may lock a directory several times; the last `release` frees it.
  """

  def __init__(self, folder: base.Folder, held: base.HeldLock | None, what: str):
    """Store the arguments.

    Args:
      folder: the directory.
      held: its lock; None in other processes than the lead.
      what: name of the directory's kind, for messages.
    """
    self.directory = folder.path
    self._folder = folder
    self._held = held
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
    if self._held is None:
      self.check_folder()
    else:
      self._held.check()

  def check_folder(self) -> None:
    """Raise OSError if the path leads to another folder than the one that was locked; see `base.Folder.check_same`."""
    self._folder.check_same()

  def hold_again(self) -> None:
    """Count one more holder, which will call `release`."""
    self._num_holders += 1

  @property
  def holder(self) -> str:
    """Text that names the process that holds the lock; '' in other processes than the lead."""
    if self._held is None:
      return ''
    return self._held.holder

  def is_seen(self, checksum: int) -> bool:
    """Return True if the `holder` that this process reads in the directory has this checksum."""
    try:
      return zlib.crc32(self._folder.read_holder().encode()) == checksum
    except (OSError, ValueError):  # ValueError: not a text
      return False

  @property
  def is_away(self) -> bool:
    """True if the directory was moved or unmounted; False if it is there or was deleted, and in an object store."""
    try:
      self.check_folder()
    except OSError:
      return self._held is None or not self._held.is_deleted
    return False

  def release(self) -> None:
    """Release the lock once; the last release frees the directory, and further calls do nothing."""
    state = open_folders.open_folder(str(self.directory))
    with state.guard:
      if self._num_holders == 0:
        return
      self._num_holders -= 1
      if self._num_holders == 0:
        if state.lock is self:  # not of the parent of a forked process
          state.lock = None
          state.retry_seconds = None
          state.verified.clear()
        state.check_fn = None
        if self._held is not None:
          self._held.release()

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

  def abandon(self) -> None:
    """Forget the lock in a forked child: it is the parent's."""
    if self._held is not None:
      self._held.abandon()
      self._held = None

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
  folder = folders.model_folder(files.path(directory).absolute())
  is_lead = multihost.is_lead()  # Before anything is created, since it raises without a device.
  try:
    folder.make()
    state = open_folders.open_folder(str(folder.path))
    with state.guard:
      if state.lock is not None:
        state.lock.hold_again()
        return state.lock
      held = None
      if is_lead:
        held = folder.lock(what, elsewhere)
        state.check_fn = held.check_writing
      lock = ModelDirLock(folder, held, what)
      state.lock = lock
    try:
      if is_lead:
        folder.clean_leftovers()
    except OSError:
      lock.release()
      raise
    return lock
  except (OSError, ValueError) as e:  # ValueError: a path with a null byte
    if isinstance(e, errors.T5xLiteError):
      raise
    raise folder.unwritable(e, what, elsewhere) from e


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
  folder = folders.model_folder(files.path(directory).absolute())
  folder.check_can_be_made(what, elsewhere)


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
  wanted = int(multihost.broadcast_from_lead(np.uint32(zlib.crc32(lock.holder.encode()))))
  deadline = time.monotonic() + seconds
  while not (is_seen := lock.is_seen(wanted)) and time.monotonic() < deadline:
    time.sleep(0.1)
  if multihost.any_process(not is_seen):
    error = errors.CheckpointError(
      f'The {lock._what} {str(lock.directory)!r} must be the same folder for all processes, and process '
      f'{jax.process_index()} does not see the file {discovery.LOCK_FILENAME} of process 0 there. Use a folder that '
      'all machines share, under the same path.'
    )
    raise errors.of_other_process(error) if is_seen else error
