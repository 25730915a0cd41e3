"""The few things that inference does to files, in one place: a test lets each of them fail in turn."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import BinaryIO

_BLOCK = 1 << 20


class Disk:
  """Writes so that a file has its name only when all of it is on the disk."""

  def write(self, path: pathlib.Path, write_fn: Callable[[pathlib.Path], None]) -> None:
    """Lets `write_fn` write a temporary file, flushes it, and gives it the name `path`.

    Args:
      path: the file; one of that name is replaced.
      write_fn: called with the path of the temporary file, which lies beside `path`.
    """
    temporary = path.with_name(f'{path.name}.tmp')
    try:
      write_fn(temporary)
      self.flush(temporary)
    except OSError as error:
      # A full disk is reported by `write`, which knows no name.
      error.filename = error.filename or str(temporary)
      raise
    self.rename(temporary, path)

  def flush(self, path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)

  def rename(self, source: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file another name, which may be taken, and waits until that is on the disk."""
    source.replace(target)
    self.flush(target.parent)

  def remove(self, path: pathlib.Path) -> None:
    """Removes a file, if it is there."""
    path.unlink(missing_ok=True)


def copy(sources: Iterable[pathlib.Path], target: BinaryIO) -> None:
  """Appends the content of files to an open one."""
  for source in sources:
    with open(source, 'rb') as stream:
      while block := stream.read(_BLOCK):
        target.write(block)


def describe(path: pathlib.Path) -> dict[str, int | str]:
  """Returns the size, the hash and the number of lines of a file."""
  digest, size, lines = hashlib.sha256(), 0, 0
  with open(path, 'rb') as stream:
    while block := stream.read(_BLOCK):
      digest.update(block)
      size += len(block)
      lines += block.count(b'\n')
  return {'size': size, 'sha256': digest.hexdigest(), 'lines': lines}
