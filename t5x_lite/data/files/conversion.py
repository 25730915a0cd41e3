"""Local files made once from compressed files and Parquet tables, so that records are read by their place.

A converted file is kept in a folder of this machine under the hash of the original's content, and used again.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fcntl
import gzip
import hashlib
import io
import logging
import os
import pathlib
import shutil
import time
from typing import IO
import zlib

from t5x_lite.data.files.line_index import CHUNK
from t5x_lite.data.files.local_copies import local_paths
from t5x_lite.data.files.records import reading
from t5x_lite.data.files.records import version_of
from t5x_lite.errors import DataError
from t5x_lite.formatting import format_bytes
from t5x_lite.storage import files

DEFAULT_FOLDER = '~/.cache/t5x_lite/data'
# Changes when the form of a converted file does.
_FORM = '1'
# Changes when the index of a file does, see `line_index`.
_INDEX_FORM = '1'
_logger = logging.getLogger(__name__)


def is_compressed(path: str) -> bool:
  """Return whether the name of a file says that it is compressed by gzip."""
  return path.lower().endswith('.gz')


def converted(
  path: str,
  suffix: str,
  convert_fn: Callable[[str, pathlib.Path], None],
  *,
  cache_dir: str | None,
  variant: str = '',
) -> str:
  """Return the path of the converted form of a file, which is made if it does not exist.

  Args:
    path: the original, local or in an object store.
    suffix: suffix of the converted file.
    convert_fn: `fn(original, new)` that writes the new file.
    cache_dir: folder of converted files; None for `DEFAULT_FOLDER`.
    variant: text that distinguishes conversions of one original, e.g. the columns.

  Raises:
    DataError: the original cannot be read, is damaged or changes, or the disk lacks space.
  """
  (local,) = local_paths([path])
  with reading(path):
    version = version_of(os.stat(local))
  digest = hashlib.sha256(f'{_FORM} {suffix} {variant} '.encode())
  with reading(path), open(local, 'rb') as stream:
    while chunk := stream.read(CHUNK):
      digest.update(chunk)
  folder = pathlib.Path(os.path.expanduser(cache_dir or DEFAULT_FOLDER))
  if folder.parts[0].startswith('~'):
    raise DataError(
      f'{path} cannot be converted in {folder}: the home folder is unknown. Choose another folder with --cache_dir.'
    )
  target = folder / f'{digest.hexdigest()[:32]}{suffix}'
  if target.exists():
    return str(target)
  start = time.monotonic()

  def write(unfinished: pathlib.Path) -> None:
    convert_fn(local, unfinished)
    if version_of(os.stat(local)) != version:  # The name would be the hash of another content.
      raise DataError(
        f'{path} must not change while it is converted. Rerun the command when the file is complete.'
      )

  try:
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f'{target.name}.lock')):
      if target.exists():
        return str(target)
      for left in folder.glob(f'{target.name}{files.WRITING_INFIX}*'):  # of killed processes
        files.remove(left)
      check_space(folder, os.path.getsize(local), path)
      # Durable, since a part of it after a crash of the machine would be used as if it were all.
      files.write(target, write)
  except OSError as error:
    raise DataError(
      f'{path} cannot be converted in {folder}: {error.strerror or error}. Choose another folder with --cache_dir.'
    ) from error
  _logger.info(
    'Converted %s to %s (%s, %.1f s), which later runs use again.',
    path,
    target,
    format_bytes(target.stat().st_size),
    time.monotonic() - start,
  )
  return str(target)


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
  """Exclude other processes, which wait; the lock ends with the process."""
  with open(path, 'wb', opener=files.open_regular) as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    yield


def check_space(folder: pathlib.Path, size: int, what: str) -> None:
  """Raise if a disk has less than `size` bytes left.

  Raises:
    DataError: names the folder, and how to choose another one.
  """
  free = shutil.disk_usage(folder).free
  if size > free:
    raise DataError(
      f'Converting {what} requires at least {format_bytes(size)}, and {folder} has {format_bytes(free)} left. Choose '
      'a folder on a larger disk with --cache_dir.'
    )


def decompressed(paths: Sequence[str], suffix: str, cache_dir: str | None) -> list[str]:
  """Return local paths of the contents of files, of which those that end in .gz are decompressed.

  Args:
    paths: files, local or in an object store.
    suffix: suffix of decompressed files.
    cache_dir: see `converted`.

  Raises:
    DataError: see `converted`.
  """
  plain = local_paths([path for path in paths if not is_compressed(path)])
  remaining = iter(plain)
  return [
    converted(
      path, suffix, lambda old, new, path=path: _decompress(path, old, new), cache_dir=cache_dir
    )
    if is_compressed(path)
    else next(remaining)
    for path in paths
  ]


def index_paths(
  paths: Sequence[str], copies: Sequence[str], options: str
) -> list[pathlib.Path | None]:
  """Return where the index of the records of each file is kept: next to decompressed files; None for others.

  Args:
    paths: files, local or in an object store.
    copies: result of `decompressed`.
    options: text of all options on which an index depends.
  """
  digest = hashlib.sha256(f'{_INDEX_FORM} {options}'.encode()).hexdigest()[:8]
  return [
    pathlib.Path(f'{copy}.{digest}.index') if is_compressed(path) else None
    for path, copy in zip(paths, copies, strict=True)
  ]


def _decompress(path: str, local: str, target: pathlib.Path) -> None:
  try:
    with gzip.open(local, 'rb') as stream, target.open('wb') as output:
      _copy(stream, output, path)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise DataError(
      f'{path} must be a complete file of gzip, got a damaged or another one: {error}. Write or download it '
      'again, or, if it is not compressed, remove .gz from its name.'
    ) from error


def _copy(stream: io.BufferedIOBase | IO[bytes], output: IO[bytes], path: str) -> None:
  while chunk := stream.read(CHUNK):
    check_space(pathlib.Path(output.name).parent, len(chunk), path)
    output.write(chunk)
