"""Atomic writing of files, and appending to files. All complete files are written by `write`."""

from collections.abc import Callable
import concurrent.futures
import contextlib
import errno
import os
import pathlib
import uuid

# Suffix, before a random text, of the names of incomplete files and folders.
WRITING_INFIX = '.tmp-'
# More threads than cores do not help for data in the page cache, but hide the latency of a disk.
NUM_THREADS = min(8, 2 * (os.cpu_count() or 1))
# Size up to which appended bytes are buffered.
_BUFFER_BYTES = 1 << 16


def make_writable(folder: str | os.PathLike[str]) -> None:
  """Create a folder and its parents if they are missing.

  Raises:
    OSError: the folder cannot be created, or files in it cannot be written; it names the path.
  """
  os.makedirs(folder, exist_ok=True)
  if not os.access(folder, os.W_OK | os.X_OK):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(folder))


def write(path: str | os.PathLike[str], content: str | bytes | Callable[[pathlib.Path], None], *,
          durable: bool = True) -> None:
  """Write a file atomically: readers, also after a crash, find the former content or all of the new one.

  Args:
    path: path of the file, which is replaced if it exists. Its folder must exist.
    content: bytes, a text for UTF-8, or a function that writes the file at the given path, in the same folder.
    durable: wait until content and name are on disk.

  Raises:
    OSError: e.g. the disk is full; it names `path`. A former file is unchanged, and no partial file remains.
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
    if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # A full disk gives no name.
      error.filename = str(path)
    raise


def rename(source: pathlib.Path, target: pathlib.Path, *, durable: bool = True) -> None:
  """Rename a file and replace `target` if it exists; if `durable`, wait until the new name is on disk."""
  source.replace(target)
  if durable:
    fsync(target.parent)


def remove(path: pathlib.Path) -> None:
  """Remove a file if it exists."""
  path.unlink(missing_ok=True)


def fsync(path: str | os.PathLike[str]) -> None:
  """Wait until a file's bytes, or a directory's entries, are on disk."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def fsync_tree(root: pathlib.Path) -> None:
  """Wait until everything below `root`, and `root`'s own entries, are on disk."""
  paths = [path for path in root.rglob('*') if not path.is_symlink()]
  with concurrent.futures.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix='files-fsync') as pool:
    list(pool.map(fsync, paths))
  fsync(root)


class AppendedFile:
  """File to which bytes are appended in order. Bytes that a full disk cannot hold are kept and written later.

  The first write creates the file and its folder.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._fd: int | None = None
    self._closed = False
    self._unwritten = bytearray()

  def append(self, content: bytes, *, at_once: bool) -> None:
    """Append `content` to the buffer and try to write it: immediately, or when the buffer is full."""
    self._unwritten += content
    if at_once or len(self._unwritten) > _BUFFER_BYTES:
      with contextlib.suppress(OSError):  # `flush` raises it.
        self._write()

  def flush(self) -> None:
    """Write the buffer and wait until it is on disk; raise OSError if the disk is full."""
    self._write()
    os.fsync(self._fd)

  def close(self) -> None:
    """Write the buffer and close the file."""
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
