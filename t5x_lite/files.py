"""Files that are written: whole or not at all, or line by line at their end. Every whole file is written by `write`."""

from collections.abc import Callable
import concurrent.futures
import contextlib
import os
import pathlib
import uuid

# What is not whole yet, a file or a folder, has this and a random text at the end of its name.
WRITING_INFIX = '.tmp-'
# More threads than cores gain nothing for data that is in the page cache, but hide the latency of a disk.
NUM_THREADS = min(8, 2 * (os.cpu_count() or 1))
# What is appended is written in pieces of this size, or when it is flushed.
_BUFFER_BYTES = 1 << 16


def write(path: str | os.PathLike[str], content: str | bytes | Callable[[pathlib.Path], None], *,
          durable: bool = True) -> None:
  """Gives a file its content in one step: whoever reads, now or after a crash, finds the former one or all of it.

  Args:
    path: the file; one of that name is replaced. Its folder exists.
    content: bytes, a text for UTF-8, or a function that writes the file whose path it gets, in the same folder.
    durable: wait until the content and the name are on the disk.

  Raises:
    OSError: the disk is full, for instance; it names `path`. What was there is as it was, and nothing else remains.
  """
  path = pathlib.Path(path)
  if isinstance(content, str):
    content = content.encode('utf-8')
  temporary = path.with_name(f'{path.name}{WRITING_INFIX}{uuid.uuid4().hex[:8]}')
  try:
    if callable(content):
      content(temporary)
    else:
      temporary.write_bytes(content)
    if durable:
      fsync(temporary)
    rename(temporary, path, durable=durable)
  except BaseException as error:
    with contextlib.suppress(OSError):
      remove(temporary)
    if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # a full disk knows no name
      error.filename = str(path)
    raise


def rename(source: pathlib.Path, target: pathlib.Path, *, durable: bool = True) -> None:
  """Gives a file another name, which may be taken; if `durable`, waits until that is on the disk."""
  source.replace(target)
  if durable:
    fsync(target.parent)


def remove(path: pathlib.Path) -> None:
  """Removes a file, if it is there."""
  path.unlink(missing_ok=True)


def fsync(path: str | os.PathLike[str]) -> None:
  """Waits until a file's bytes, or a directory's entries, are on disk."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def fsync_tree(root: pathlib.Path) -> None:
  """Waits until everything below `root`, and `root`'s own entries, are on disk."""
  paths = [path for path in root.rglob('*') if not path.is_symlink()]
  with concurrent.futures.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix='files-fsync') as pool:
    list(pool.map(fsync, paths))
  fsync(root)


class AppendedFile:
  """File to which bytes are appended in order. What a full disk refuses is kept and written when there is room.

  The first write makes the file and its folder, so a disk that is full by then loses nothing either.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._fd: int | None = None
    self._closed = False
    self._unwritten = bytearray()

  def append(self, content: bytes, *, at_once: bool) -> None:
    """Takes `content`, and tries to write it: at once, or as soon as there is more of it."""
    self._unwritten += content
    if at_once or len(self._unwritten) > _BUFFER_BYTES:
      with contextlib.suppress(OSError):  # `flush` tells.
        self._write()

  def flush(self) -> None:
    """Waits until everything is on the disk; raises OSError if it is full."""
    self._write()
    os.fsync(self._fd)

  def close(self) -> None:
    """Writes what can be written and closes the file."""
    if self._closed:
      return
    self._closed = True
    try:
      self._write()
    finally:
      if self._fd is not None:
        os.close(self._fd)

  def _write(self) -> None:
    if self._fd is None:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    while self._unwritten:
      del self._unwritten[:os.write(self._fd, self._unwritten)]
