"""Lock of a model directory in an object store: a lease, an object that its owner writes again and again.

Every write has the condition that the object is still the one that this owner, or nobody, has written, so two owners
cannot both believe that they have it. No clocks are compared: whoever wants the lease watches for `LEASE_SECONDS`
whether it changes. An owner that could not renew it for that time saves nothing until it has renewed it; if another
process has taken it meanwhile, the owner's run ends.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
import uuid

from t5x_lite import errors
from t5x_lite.formatting import printable
from t5x_lite.storage import files

if TYPE_CHECKING:
  from t5x_lite.storage import object_store

_logger = logging.getLogger(__name__)

# After this time without a renewal another process may take the lease.
LEASE_SECONDS = 60.0
_RENEWAL_SECONDS = 12.0
_POLL_SECONDS = 1.0
# A request without an answer for this time has failed.
_REQUEST_SECONDS = 15.0
# Writes of a missing object in a row that may fail because another process has been faster.
_MAX_VAIN = 5


class Lease:
  """A lease that this process holds and renews in a thread until `release`."""

  is_deleted = False  # a store has no folders

  def __init__(self, folder: object_store.StorePath, name: str, *, in_use: str):
    """Take the lease of `folder`.

    Args:
      folder: folder in an object store.
      name: name of the lease's object below it.
      in_use: first words of the message of an error.

    Raises:
      DirectoryInUseError: another process holds the lease.
      OSError: the store cannot be reached or written.
      ConfigError: the store's package, or credentials, are missing.
    """
    (
      folder / name
    ).is_file()  # reports missing packages, buckets and credentials better than TensorStore
    self._path = folder / name
    self._name = name
    self._in_use = in_use
    self._store = _open(folder)
    self.holder = json.dumps(
      {
        'pid': os.getpid(),
        'host': socket.gethostname(),
        'machine': _machine(),
        'since': time.strftime('%Y-%m-%d %H:%M:%S'),
        'id': uuid.uuid4().hex,
      }
    )
    self._number = 0
    self._lost: errors.DirectoryInUseError | None = None
    self._guard = threading.Lock()
    self._generation = self._take()
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._keep, name='lease', daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Raise unless this process holds the lease, which is renewed first if it is old.

    Raises:
      DirectoryInUseError: another process has taken it.
      OSError: it could not be renewed, and another process may take it.
    """
    # There must be time for the request that follows.
    if self._lost is None and _now() > self._valid_until - LEASE_SECONDS / 2:
      self._renew()
    if self._lost is not None:
      raise self._lost

  def check_writing(self) -> None:
    """Do the same as `check`, before each attempt to write a file below the folder."""
    self.check()

  def release(self) -> None:
    """Stop renewing and delete the lease's object."""
    self._stopped.set()
    with self._guard:
      # An expired one may be another owner's in the next moment, and S3 deletes without a condition.
      if self._lost is None and _now() < self._valid_until:
        try:
          self._store.write(self._name, None, if_equal=self._generation).result(
            timeout=_REQUEST_SECONDS
          )
        except (ValueError, TimeoutError) as e:
          _logger.warning(
            '%s could not be deleted (%s); it expires after %g seconds.',
            self._path,
            _text(e),
            LEASE_SECONDS,
          )

  def abandon(self) -> None:
    """Forget the lease in a forked child: it is the parent's."""
    self._stopped.set()

  def _take(self) -> bytes:
    """Write the object with the condition that it is missing or expired, and return its generation."""
    from t5x_lite.storage import object_store

    seen = None
    since = 0.0
    start = _now()
    num_vain = 0
    while True:
      found = object_store.retrying(self._read, self._path)
      is_there = found.state == 'value'
      # The answer to the write was lost.
      if is_there and _constant_part(found.value) == self.holder:
        self._valid_until = start + LEASE_SECONDS
        return found.stamp.generation
      if is_there and seen is None:
        seen = found.stamp.generation
        since = _now()
        if not _has_ended(found.value):
          _logger.info(
            '%s names %s; waiting for up to %g seconds to see whether it still runs.',
            self._path,
            holder_name(found.value),
            LEASE_SECONDS,
          )
      elif is_there and found.stamp.generation != seen:
        raise errors.DirectoryInUseError(self._in_use.format(holder=holder_name(found.value)))
      if not is_there or _has_ended(found.value) or _now() - since > LEASE_SECONDS:
        start = _now()
        written = object_store.retrying(
          functools.partial(self._write, found.stamp.generation), self._path
        )
        if written:
          self._valid_until = start + LEASE_SECONDS
          return written
        # Another process was faster, which the next read shows; or there is no bucket, which TensorStore's driver for
        # S3 takes for another generation.
        num_vain = 0 if is_there else num_vain + 1
        if num_vain == _MAX_VAIN:
          raise FileNotFoundError(
            errno.ENOENT,
            f'there is no bucket {self._path.parts[2]!r}, or it takes no objects',
            str(self._path),
          )
        if num_vain:
          time.sleep(_POLL_SECONDS * num_vain / _MAX_VAIN)
      else:
        time.sleep(_POLL_SECONDS)

  def _keep(self) -> None:
    while not self._stopped.wait(_RENEWAL_SECONDS if _now() < self._valid_until else _POLL_SECONDS):
      try:
        self._renew()
      except OSError as e:
        _logger.debug('The lease %s could not be renewed: %s', self._path, e)
      if self._lost is not None:
        return

  def _renew(self) -> None:
    with self._guard:
      if self._stopped.is_set():
        return
      start = _now()
      generation = self._write(self._generation)
      if not generation:
        found = self._read()
        if (
          found.state == 'value' and _constant_part(found.value) == self.holder
        ):  # the answer to a write was lost
          generation = found.stamp.generation
        elif (
          found.state != 'value' and start < self._valid_until
        ):  # deleted by hand, or by a run that has ended
          generation = self._write(found.stamp.generation)
      if generation:
        self._generation = generation
        self._valid_until = start + LEASE_SECONDS
      else:
        self._lost = errors.DirectoryInUseError(
          f'{self._in_use.format(holder=holder_name(found.value))} That process took the lease {str(self._path)!r} '
          f'because this one could not renew it for {LEASE_SECONDS:g} seconds.'
        )

  def _write(self, generation: bytes) -> bytes:
    """Write the object if its generation is `generation`; return the new generation, or b'' if it is another."""
    self._number += 1  # stores know contents by their hash, so each must differ
    content = json.dumps(json.loads(self.holder) | {'renewed': self._number}).encode()
    try:
      return (
        self._store.write(self._name, content, if_equal=generation)
        .result(timeout=_REQUEST_SECONDS)
        .generation
      )
    except (ValueError, TimeoutError) as e:
      raise self._error('written', e) from e

  def _read(self) -> Any:
    try:
      return self._store.read(self._name).result(timeout=_REQUEST_SECONDS)
    except (ValueError, TimeoutError) as e:
      raise self._error('read', e) from e

  def _error(self, what: str, error: Exception) -> OSError:
    """Return the exception for one of TensorStore, whose kind is the first word of its text."""
    if str(error).startswith('NOT_FOUND'):  # of an object it is no error
      return FileNotFoundError(
        errno.ENOENT, f'there is no bucket {self._path.parts[2]!r}', str(self._path)
      )
    is_denied = str(error).startswith('PERMISSION_DENIED')
    return (PermissionError if is_denied else OSError)(
      errno.EACCES if is_denied else errno.EIO,
      f'the lease cannot be {what} ({_text(error)})',
      str(self._path),
    )


def read_holder(path: files.Path) -> str:
  """Return the `Lease.holder` of the lease at `path`.

  Raises:
    OSError: it is missing or cannot be read.
  """
  return _constant_part(path.read_bytes())


def holder_name(content: str | bytes) -> str:
  """Return the process that a lock or lease names, as text."""
  try:
    holder = json.loads(content)
    return printable(f'process {holder["pid"]} on host {holder["host"]}, since {holder["since"]}')
  except (ValueError, KeyError, TypeError):
    return 'another process'  # it holds the lock and has not yet written its name


def _constant_part(content: bytes) -> str:
  try:
    return json.dumps(
      {name: value for name, value in json.loads(content).items() if name != 'renewed'}
    )
  except (ValueError, AttributeError):
    return ''


def _has_ended(content: bytes) -> bool:
  """Return True if the holder was a process of this machine that has ended."""
  try:
    holder = json.loads(content)
    pid = int(holder['pid'])
    machine = holder['machine']
  except (ValueError, KeyError, TypeError):
    return False
  if machine is None or machine != _machine() or holder.get('host') != socket.gethostname():
    return False
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return True
  except OSError:
    return False
  return False


def _now() -> float:
  """Return seconds of a clock that also runs while the machine is suspended, where there is one."""
  if hasattr(time, 'CLOCK_BOOTTIME'):
    return time.clock_gettime(time.CLOCK_BOOTTIME)
  return time.monotonic()


def _machine() -> str | None:
  """Return a name of this boot of this machine and its namespace of process numbers; None if it is unknown."""
  try:
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as f:
      return f'{f.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return None


def _open(folder: object_store.StorePath) -> Any:
  import tensorstore  # takes 0.1 s

  from t5x_lite.storage import object_store

  # Few retries: the thread tries again anyway, and must notice that the lease is getting old.
  retries = {'max_retries': 3, 'initial_delay': '500ms', 'max_delay': '2s'}
  context = tensorstore.Context(object_store.kvstore_context(folder, retries))
  return tensorstore.KvStore.open(object_store.kvstore_spec(folder), context=context).result()


def _text(error: BaseException) -> str:
  return ' '.join(str(error).split())[:300] or 'no answer'
