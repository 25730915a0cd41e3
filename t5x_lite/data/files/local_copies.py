"""Local copies of objects in stores, for files that are read at random positions, or by libraries without stores."""

import atexit
from collections.abc import Sequence
import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import tempfile
import threading
from typing import TYPE_CHECKING

from t5x_lite.errors import DataError
from t5x_lite.formatting import format_bytes
from t5x_lite.storage import files

if TYPE_CHECKING:
  from t5x_lite.storage import object_store

_PREFIX = 't5x_lite-copies-'
_logger = logging.getLogger(__name__)


def local_paths(paths: Sequence[str]) -> list[str]:
  """Return local paths of files, of which those in object stores are copied to the folder of temporary files.

  A process copies each version of an object once. Its copies are removed when Python exits, or, if it was killed, by
  the next process.

  Args:
    paths: local paths, which are returned unchanged, and paths in object stores.

  Raises:
    DataError: an object cannot be read, or the disk lacks space.
  """
  if not any(map(files.is_remote, paths)):
    return list(paths)
  from t5x_lite.storage import object_store

  opened = [files.path(path) for path in paths]
  remote = list(dict.fromkeys(path for path in opened if files.is_remote(path)))
  of_process = _copies_of_process()
  with of_process.guard:
    folder = of_process.folder
    try:
      versions = object_store.in_parallel(lambda path: path.version(), remote)
      copies = {}
      missing = []
      for path, version in zip(remote, versions, strict=True):
        digest = hashlib.sha256(f'{path} {version}'.encode()).hexdigest()
        copy = folder / f'{digest[:32]}{path.suffix}'
        copies[path] = copy
        if not copy.exists():
          missing.append((path, copy, version))
      if missing:
        sizes = object_store.in_parallel(lambda item: item[0].stat().st_size, missing)
        _check_space(folder, [path for path, _, _ in missing], sum(sizes))
        object_store.in_parallel(lambda item: _copy(*item), missing)
    except OSError as error:
      raise DataError(f'Cannot read {error.filename!r}: {error.strerror or error}.') from error
  local = []
  for path, remote_path in zip(paths, opened, strict=True):
    if remote_path in copies:
      path = str(copies[remote_path])
    local.append(path)
  return local


def _check_space(folder: pathlib.Path, paths: Sequence[files.Path], size: int) -> None:
  free = shutil.disk_usage(folder).free
  what = str(paths[0])
  if len(paths) > 1:
    what += f' and {len(paths) - 1} more'
  if size > free:
    raise DataError(
      f'Reading {what} requires a local copy of {format_bytes(size)}, and {folder.parent} has '
      f'{format_bytes(free)} left. Set TMPDIR to a folder on a larger disk.'
    )
  _logger.info(
    'Copying %s (%s) to %s until this program ends; TMPDIR chooses another disk.',
    what,
    format_bytes(size),
    folder,
  )


def _copy(source: 'object_store.StorePath', target: pathlib.Path, version: str) -> None:
  """Copy a version of an object; the target appears when it is complete."""
  unfinished = target.with_name(f'{target.name}{files.WRITING_INFIX}')
  with source.open('rb') as stream, unfinished.open('wb') as output:
    shutil.copyfileobj(stream, output, 1 << 20)
  if source.version() != version:
    raise DataError(
      f'{source} was changed while it was copied. Rerun the command when the file is complete.'
    )
  unfinished.rename(target)


class _Copies:
  """Copies of this process.

  Attributes:
    guard: held while files are copied, so that no thread copies what another one does.
  """

  def __init__(self):
    self.guard = threading.Lock()

  @functools.cached_property
  def folder(self) -> pathlib.Path:
    """Folder of the copies; the first use makes it, and removes those of dead processes."""
    for left in pathlib.Path(tempfile.gettempdir()).glob(f'{_PREFIX}*'):
      with contextlib.suppress(OSError):  # Locked by another process.
        descriptor = files.lock_folder(left)
        shutil.rmtree(left, ignore_errors=True)
        os.close(descriptor)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
    files.lock_folder(folder)  # Until the process ends.
    process = os.getpid()
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(folder, ignore_errors=True))
    return folder


@functools.cache
def _copies_of_process() -> _Copies:
  return _Copies()
