"""Paths, atomic writing of files, and appending to files, on local file systems and in object stores.

`path` makes all paths of this package, and `write` writes all complete files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import errno
import fcntl
import glob
import os
import pathlib
import re
import shutil
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, overload
import uuid
import weakref

from t5x_lite import errors
from t5x_lite.errors import T5xLiteError
from t5x_lite.storage import hub
from t5x_lite.storage import open_folders

if TYPE_CHECKING:
  from typing_extensions import TypeIs

  from t5x_lite.storage import object_store

  Path = pathlib.Path | object_store.StorePath
else:
  Path = pathlib.Path  # for annotations; the other one is imported when it is needed

# Suffix, before a random text, of the names of incomplete files and folders.
WRITING_INFIX = '.tmp-'
# More threads than cores do not help for data in the page cache, but hide the latency of a disk.
NUM_THREADS = min(8, 2 * (os.cpu_count() or 1))
# Size up to which appended bytes are buffered.
_BUFFER_BYTES = 1 << 16
# A part of an appended file in a store is written again until it has this size, and not more often than this unless it
# is flushed: stores limit the writes of one object to one per second.
_PART_BYTES = 1 << 20
_PART_SECONDS = 15.0
_PART_INFIX = '.part-'
# End of the name of a part whose number is not yet known, because the store was not yet asked for the others.
_NEW_PART = f'{_PART_INFIX}new'

PathLike = str | os.PathLike[str]
# Schemes of the object stores that `path` knows.
STORES = ('gs', 's3')
_ONE_SLASH_RE = re.compile(r'(gs|s3|hf):/(?!/)')


@overload
def is_remote(name: Path) -> TypeIs[object_store.StorePath]: ...
@overload
def is_remote(name: PathLike) -> bool: ...
def is_remote(name: PathLike) -> bool:
  """Return True if a path names an object store, as gs://bucket/name does."""
  return '://' in os.fspath(name) and not hub.is_name(name)


def path(name: PathLike) -> Path:
  """Return a path with the methods of `pathlib.Path`: local, or in an object store if it begins with a scheme.

  The path of a name of the Hugging Face hub (hf://) is the local folder of the model, see `hub.local_folder`.

  >>> path('runs/a') / 'config.gin'
  PosixPath('runs/a/config.gin')

  Raises:
    ConfigError: the scheme is unknown, or there is no bucket; a missing package or credentials are reported by the
      first request.
  """
  if not is_remote(name):
    if hub.is_name(name):
      return hub.local_folder(os.fspath(name))
    found = _ONE_SLASH_RE.match(os.fspath(name))
    if found:  # otherwise a local folder 's3:' would be made
      raise errors.ConfigError(
        f'A path in a store must begin with {found[1]}://, got {os.fspath(name)!r}.'
      )
    if isinstance(name, pathlib.Path):
      return name
    return pathlib.Path(name)
  scheme = os.fspath(name).partition('://')[0]
  if scheme not in STORES:
    known = ' or '.join(f'{store}://' for store in STORES)
    raise errors.ConfigError(f'Paths in stores must begin with {known}, got {os.fspath(name)!r}.')
  from t5x_lite.storage import object_store  # takes 0.1 s

  if isinstance(name, object_store.StorePath):
    return name
  found = object_store.StorePath(name)
  if len(found.parts) < 3 or '..' in found.parts:  # clients of stores resolve '..' differently
    raise errors.ConfigError(
      f"A path in a store must be {scheme}://BUCKET/NAME without '..', got {os.fspath(name)!r}."
    )
  return found


def set_store_seconds(name: PathLike, seconds: float) -> None:
  """Set how long requests are repeated if they fail for a temporary reason, for the folder `name` of a store.

  Does nothing for a local path.
  """
  if is_remote(name):
    from t5x_lite.storage import object_store

    object_store.set_retry_seconds(_store_path(name), seconds)


def make_writable(folder: str | os.PathLike[str]) -> None:
  """Create a folder and its parents if they are missing; does nothing in an object store, which has no folders.

  Raises:
    OSError: the folder cannot be created, or files in it cannot be written; it names the path.
  """
  if is_remote(folder):
    return
  os.makedirs(folder, exist_ok=True)
  if not os.access(folder, os.W_OK | os.X_OK):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(folder))


def make_folder_of(path: Path) -> None:
  """Create the folder of a file and its parents if they are missing, unless `fence` forbids it."""
  fence_of(path)()
  path.parent.mkdir(parents=True, exist_ok=True)


def write(
  path: str | os.PathLike[str],
  content: str | bytes | Callable[[pathlib.Path], None],
  *,
  durable: bool = True,
  behind: bool = False,
) -> None:
  """Write a file atomically: readers, also after a crash, find the former content or all of the new one.

  Args:
    path: path of the file, which is replaced if it exists. Its folder must exist.
    content: bytes, a text for UTF-8, or a function that writes the file at the given local path: in the same folder, or
      in the folder of temporary files if `path` is in an object store.
    durable: wait until content and name are on disk.
    behind: return at once if `path` is in an object store and `content` is no function. The object is written before
      the next one that is not written behind, or by `flush`.

  Raises:
    OSError: e.g. the disk is full; it names `path`. A former file is unchanged, and no partial file remains.
  """
  if isinstance(content, str):
    content = content.encode('utf-8')
  if is_remote(path):
    if behind and not callable(content):
      target = _store_path(path)
      folder = open_folders.folder_of(str(target))
      folder.behind[str(target)] = content
      _start_writing_behind(folder)
    else:
      flush(path)
      _write_object(path, content)
    return
  path = pathlib.Path(path)
  fence_of(path)()
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
    # A full disk gives no name.
    if isinstance(error, OSError) and error.filename in (None, str(temporary)):
      error.filename = str(path)
    raise


def open_regular(
  name: str | os.PathLike[str], flags: int = os.O_WRONLY | os.O_CREAT, mode: int = 0o666
) -> int:
  """Open a local file to lock, append or truncate it; return its descriptor. Also an `opener` of `open`.

  A folder of a run may be someone else's, in which a link would let the run change any file of the user.

  Args:
    name: path of the file; links to folders in it are followed.
    flags: flags of `os.open`.
    mode: permissions of a new file.

  Raises:
    LinkedFileError: the file is a link or a special file.
    OSError: the file cannot be opened.
  """
  try:
    # Without O_NONBLOCK, a FIFO would wait for a reader.
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
  except OSError as error:
    if error.errno in (errno.ELOOP, errno.ENXIO):  # A link; a FIFO without a reader, or a socket.
      check_regular(name)
    raise
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    check_regular(name)
  return descriptor


def open_to_read(
  name: str | os.PathLike[str], flags: int = os.O_RDONLY, *, max_bytes: int | None = None
) -> int:
  """Open a local file to read it; return its descriptor. Also an `opener` of `open`.

  Args:
    name: path of a regular file, or of a link to one.
    flags: flags of `os.open`.
    max_bytes: largest size; None for any.

  Raises:
    InvalidFileError: the file is not a regular file, which may have no end or keep its reader waiting, or too large.
    OSError: the file cannot be opened.
  """
  # Without O_NONBLOCK, a FIFO would wait for a writer.
  descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)
  status = os.fstat(descriptor)
  try:
    is_folder = stat.S_ISDIR(status.st_mode)  # Reading it fails with its own error.
    if not is_folder and not stat.S_ISREG(status.st_mode):
      raise errors.InvalidFileError(
        f'{os.fspath(name)!r} must be a regular file, got a pipe, a device or a socket. Replace it by a copy of the '
        'file.'
      )
    check_size(name, status.st_size, max_bytes)
  except BaseException:
    os.close(descriptor)
    raise
  return descriptor


def check_size(name: PathLike, size: int, max_bytes: int | None) -> None:
  """Raise InvalidFileError if the size of a file is more than `max_bytes`; None for any size."""
  if max_bytes is not None and size > max_bytes:
    raise errors.InvalidFileError(
      f'{os.fspath(name)!r} must have at most {max_bytes:,} bytes, got {size:,}. Replace it by a copy of the '
      'original file.'
    )


def flock(descriptor: int) -> None:
  """Lock an open local file or folder until it is closed; raise BlockingIOError if another process has locked it."""
  fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_folder(folder: PathLike) -> int:
  """Lock a local folder that this process has made; return the descriptor, which holds the lock until it is closed.

  Raises:
    OSError: another process has locked it, or it is missing.
  """
  descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    flock(descriptor)
  except OSError:
    os.close(descriptor)
    raise
  return descriptor


def check_regular(name: str | os.PathLike[str]) -> None:
  """Raise if a path is that of a link or a special file, see `open_regular`; does nothing for a missing file.

  Raises:
    LinkedFileError: it is.
  """
  if is_remote(name):
    return
  try:
    mode = os.lstat(name).st_mode
  except OSError:
    return
  if stat.S_ISREG(mode):
    return
  if stat.S_ISLNK(mode):
    got = f'a link to {os.readlink(name)!r}, which would be changed'
    remedy = 'Delete the link, or replace it by a copy of the file.'
  else:
    got = 'a folder or a special file'
    remedy = 'Delete it.'
  raise errors.LinkedFileError(f'{os.fspath(name)!r} must be a regular file, got {got}. {remedy}')


def _write_object(name: PathLike, content: bytes | Callable[[pathlib.Path], None]) -> None:
  from t5x_lite.storage import uploads

  target = _store_path(name)
  if not callable(content):
    target.write_bytes(content)
    return
  with uploads.local_file(target.suffix) as local:
    content(local)
    target.upload(local)


def _store_path(name: PathLike) -> object_store.StorePath:
  """Return the path of a name that is in a store."""
  found = path(name)
  assert is_remote(found)
  return found


def flush(name: PathLike) -> None:
  """Return when all that was appended to files of the run of `name`, or written behind, is in the store.

  The run is the nearest open folder above `name`. Does nothing for a local path.

  Raises:
    OSError: the store does not take it; nothing is lost, and the next call tries again.
  """
  if not is_remote(name):
    return
  folders = open_folders.folders_around(str(path(name)))
  for folder in folders:
    for parts_of_file in list(folder.parts):
      parts_of_file.write_now()
  for folder in folders:
    _write_behind(folder)


def _write_behind(folder: open_folders.OpenFolder) -> None:
  with folder.behind_guard:
    for name in list(folder.behind):
      content = folder.behind[name]
      _store_path(name).write_bytes(content, fence_of(name))
      if folder.behind[name] is content:  # and not replaced meanwhile
        del folder.behind[name]


def _start_writing_behind(folder: open_folders.OpenFolder) -> None:
  def run():
    with contextlib.suppress(OSError, T5xLiteError):  # `flush` raises it.
      _write_behind(folder)

  threading.Thread(target=run, name='files-behind', daemon=True).start()


def unwritten(folder: PathLike) -> dict[str, bytes]:
  """Return path -> content of what was appended below a folder, or written behind, and could not yet be written."""
  name = _full_name(folder)
  found: dict[str, bytes] = {}
  for each in open_folders.folders_around(name):
    for reference in list(each.appended):
      file = reference()
      if file is not None and (content := file.unwritten()):
        found[os.path.abspath(file.path)] = content
    for parts_of_file in list(each.parts):
      waiting = parts_of_file.unwritten()
      if waiting is not None:
        part, content = waiting
        found[str(part)] = content
    found |= dict(each.behind)
  return {path: content for path, content in found.items() if path.startswith(f'{name}/')}


def _full_name(name: PathLike) -> str:
  """Return the name by which `open_folders` knows a path."""
  if is_remote(name):
    return str(path(name))
  return os.path.abspath(name)


def write_unwritten(name: str, content: bytes) -> None:
  """Write what another process had as `unwritten`."""
  if not is_remote(name):
    local = appended(pathlib.Path(name))
    local.append(content, at_once=True)
    local.flush()
    local.close()
    return
  first = name.removesuffix(_NEW_PART)
  if first == name:
    write(name, content)
    return
  file = AppendedParts(_store_path(first))
  file.append(content, at_once=True)
  file.close()


def rename(source: pathlib.Path, target: pathlib.Path, *, durable: bool = True) -> None:
  """Rename a file and replace `target` if it exists; if `durable`, wait until the new name is on disk."""
  source.replace(target)
  if durable:
    fsync(target.parent)


def remove(path: Path) -> None:
  """Remove a file if it exists."""
  path.unlink(missing_ok=True)


def remove_tree(folder: Path, *, ignore_errors: bool = False) -> None:
  """Remove a folder and everything below it."""
  if not is_remote(folder):
    shutil.rmtree(folder, ignore_errors=ignore_errors)
    return
  try:
    folder.rmtree()
  except OSError:
    if not ignore_errors:
      raise


def each(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
  """Return `fn` of each item, of which several are computed at a time if they are paths or names in a store."""
  if len(items) < 2 or not any(map(is_remote, items[:1])):
    return [fn(item) for item in items]
  from t5x_lite.storage import object_store

  return object_store.in_parallel(fn, items)


def real_path(name: PathLike) -> str:
  """Return the absolute path without links, which is equal for two names of one folder."""
  if '://' in os.fspath(name):
    return str(path(name))
  return os.path.realpath(name)


def broken_link(name: PathLike) -> str | None:
  """Describe the link at which a path ends without a target, for an error message.

  Args:
    name: a path; the link may be the path itself or one of its parents.

  Returns:
    Link and target, or that the link leads back to itself; None without such a link, and for an object store.
  """
  if '://' in os.fspath(name):
    return None
  absolute = pathlib.Path(name).absolute()
  for each in (*reversed(absolute.parents), absolute):
    if not os.path.islink(each):
      continue
    try:
      os.stat(each)
    except FileNotFoundError:
      return f'{str(each)!r} is a link to {os.path.realpath(each)!r}, which does not exist'
    except OSError as error:
      if error.errno == errno.ELOOP:
        return f'{str(each)!r} is a link that leads back to itself'
      return None
  return None


def fsync(path: str | os.PathLike[str]) -> None:
  """Wait until a file's bytes, or a directory's entries, are on disk."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def fsync_tree(root: Path) -> None:
  """Wait until everything below `root`, and `root`'s own entries, are on disk."""
  paths = [path for path in root.rglob('*') if not path.is_symlink()]
  with concurrent.futures.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix='files-fsync') as pool:
    list(pool.map(fsync, paths))
  fsync(root)


def parts(name: PathLike) -> list[Path]:
  """Return the files whose contents in this order are those of an `AppendedFile`, of which the first is `name`.

  A local file has one part. In an object store, further parts are called `<name>.part-00001` and so on.
  """
  first = path(name)
  if not is_remote(first):
    return [first]
  pattern = f'{glob.escape(first.name)}{_PART_INFIX}*'
  listed = [part for part in first.parent.glob(pattern) if _number_of(part)]
  found: list[Path] = [first, *sorted(listed, key=_number_of)]
  following = _numbered(first, _number_of(found[-1]) + 1)
  while following.is_file():  # A listing may miss new objects.
    found.append(following)
    following = _numbered(first, _number_of(following) + 1)
  return found


def _numbered(first: object_store.StorePath, number: int) -> object_store.StorePath:
  return first.with_name(f'{first.name}{_PART_INFIX}{number:05d}')


def _number_of(part: Path) -> int:
  match = re.fullmatch(rf'.*{re.escape(_PART_INFIX)}(\d+)', part.name)
  if match:
    return int(match.group(1))
  return 0


def is_cut(name: Path) -> bool:
  """Return True if the last line of a file has no end; parts in a store are complete."""
  if is_remote(name):
    return False
  try:
    with name.open('rb') as file:
      file.seek(-1, os.SEEK_END)
      return file.read() != b'\n'
  except OSError:  # missing or empty
    return False


def appended(
  name: PathLike,
  *,
  header: bytes = b'',
  first_fn: Callable[[], bytes] = bytes,
  root: PathLike | None = None,
  missing_fn: Callable[[str, bytes | None], bytes] = lambda cause, last: b'',
) -> AppendedFile | AppendedParts:
  """Return a file to append to: an `AppendedFile`, or in an object store `AppendedParts`.

  Args:
    name: path of the file.
    header: first bytes of each part, for formats in which each part must be a file of its own.
    first_fn: returns the bytes after the first header; called now, or in a store by the thread that writes, so that it
      may make requests.
    root: see `AppendedFile`; not used in a store.
    missing_fn: see `AppendedFile`; not used in a store, whose parts are written again.
  """
  target = path(name)
  if is_remote(target):
    return AppendedParts(target, header=header, first_fn=first_fn)
  if root is None:
    folder = target.parent
  else:
    folder = pathlib.Path(root)
  file = AppendedFile(target, root=folder, header=header, missing_fn=missing_fn)
  if header:
    file.append(header, at_once=False)
  if first := first_fn():
    file.append(first, at_once=False)
  return file


class AppendedFile:
  """File to which records are appended in order. Records that a full disk cannot hold are kept and written later.

  The first write creates the file and its folder. Each write first looks whether the path still leads to the open file
  and whether the file has all that was written. If not, the next records come after the rest of a file of lines that
  was truncated or replaced, otherwise in a new file. Files with a header continue in files `<name>.1` and so on.
  """

  def __init__(
    self,
    path: pathlib.Path,
    *,
    root: pathlib.Path,
    header: bytes,
    missing_fn: Callable[[str, bytes | None], bytes],
  ):
    """Store the arguments; nothing is written.

    Args:
      path: path of the file, below `root`.
      root: folder that is used even if it is moved, and never made again: a run directory that is away, for example
        because its disk is unmounted, comes back. The file stays in it; folders below it are made again.
      header: first bytes of each file, which the caller appends to the first one; b'' for a file of lines.
      missing_fn: returns the first record after records were lost, given the cause and the last record that was written
        to the file, or None.
    """
    self._path = path
    self._relative = path.relative_to(root)
    self._root = root
    self._root_status: os.stat_result | None = None
    self._header = header
    self._missing_fn = missing_fn
    self._num_continued = 0
    self._fd: int | None = None
    self._closed = False
    self._unwritten: list[bytes] = []
    self._num_unwritten = 0  # bytes
    self._num_written_of_first = 0  # bytes of the first unwritten record
    self._last: bytes | None = None
    self._size = 0
    self._loss = ''
    # Of the buffer, which another thread may read. Not held during a write, which may wait for a disk.
    self._lock = threading.Lock()
    # Nothing has to be written to a file that nobody uses any more.
    files_of_folder = open_folders.folder_of(os.path.abspath(path)).appended
    files_of_folder.add(weakref.ref(self, files_of_folder.discard))

  @property
  def path(self) -> pathlib.Path:
    """The file."""
    return self._path

  def unwritten(self) -> bytes:
    """Return the bytes that are not yet in the file."""
    with self._lock:
      return b''.join(self._unwritten)[self._num_written_of_first :]

  def former_parts(self) -> list[Path]:
    """Return the file if it exists; for a writer that has not yet written."""
    if self._path.exists():
      return [self._path]
    return []

  def append(self, content: bytes, *, at_once: bool) -> None:
    """Append a record to the buffer and try to write it: immediately, or when the buffer is full."""
    with self._lock:
      self._unwritten.append(content)
      self._num_unwritten += len(content)
    if at_once or self._num_unwritten > _BUFFER_BYTES:
      with contextlib.suppress(OSError):  # `flush` raises it.
        self._write()

  def flush(self) -> None:
    """Write the buffer and wait until it is on disk; raise OSError if the disk is full."""
    os.fsync(self._write())

  def close(self) -> None:
    """Write the buffer and close the file."""
    if self._closed:
      return
    self._closed = True
    try:
      self._write()
    finally:
      self._close()

  def take_loss(self) -> str:
    """Return once, as a predicate of the file, why records are missing in it; '' if none are."""
    loss = self._loss
    self._loss = ''
    return loss

  def _close(self) -> None:
    if self._fd is not None:
      os.close(self._fd)
      self._fd = None

  def _write(self) -> int:
    """Write the buffer, and return the descriptor of the file."""
    cause = ''
    if self._fd is not None:
      cause = self._find_loss()
      if cause:
        self._close()
    if self._fd is None:
      self._open(cause)
    assert self._fd is not None
    while content := self.unwritten():
      num_written = os.write(self._fd, content)
      self._size += num_written
      self._drop(num_written)
    return self._fd

  def _drop(self, num_bytes: int) -> None:
    """Remove bytes that were written from the start of the buffer."""
    with self._lock:
      num_bytes += self._num_written_of_first
      num_records = 0
      for record in self._unwritten:
        if num_bytes < len(record):
          break
        num_bytes -= len(record)
        self._num_unwritten -= len(record)
        self._last = record
        num_records += 1
      del self._unwritten[:num_records]
      self._num_written_of_first = num_bytes

  def _find_loss(self) -> str:
    """Return why the path does not lead to all that was written, '' if it does.

    Raises:
      OSError: the root is away and the file was deleted, or the file system does not answer.
    """
    assert self._fd is not None
    try:
      held = os.fstat(self._fd)
    except OSError:  # E.g. a stale handle, which does not recover.
      self._close()
      raise
    if not self._is_root_there():
      if held.st_nlink:  # The file has moved with the root.
        return ''
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._root))
    try:
      found = os.lstat(self._path)
    except (FileNotFoundError, NotADirectoryError):
      return 'was deleted or renamed'
    if not os.path.samestat(held, found):
      return 'was replaced'
    if held.st_size < self._size:
      return 'was truncated'
    return ''

  def _is_root_there(self) -> bool:
    assert self._root_status is not None
    try:
      return os.path.samestat(os.stat(self._root), self._root_status)
    except OSError:
      return False

  def _open(self, cause: str) -> None:
    """Open the file, and begin with what is missing in it."""
    if self._root_status is None:
      make_folder_of(self._path)
      # A link to the root may lead elsewhere later.
      self._root = self._root.resolve()
      self._path = self._root / self._relative
      self._root_status = os.stat(self._root)
    elif not self._is_root_there():
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._root))
    make_folder_of(self._path)
    if cause and self._header:
      self._num_continued += 1
      name = f'{self._relative.name}.{self._num_continued}'
      self._path = (self._root / self._relative).with_name(name)
    self._fd = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    size = os.fstat(self._fd).st_size
    if not cause and size < self._size:  # The file was closed after an error.
      cause = 'was truncated, deleted or renamed'
    if cause:
      first = self._header + self._missing_fn(cause, self._last)
      if not self._header and is_cut(self._path):
        first = b'\n' + first
      with self._lock:
        self._unwritten.insert(0, first)
        self._num_unwritten += len(first)
        self._num_written_of_first = 0
      self._loss = cause
    self._size = size


def fence(folder: PathLike, check_fn: Callable[[], None] | None) -> None:
  """Let `check_fn` precede writing below a folder; None ends this.

  In a store it precedes each attempt to append or to write behind: a run that lost its lease could otherwise write into
  the files of the next one. On a disk it precedes the creation of each file and of its folder: a run whose folder was
  moved away could otherwise write into another folder that has taken the path.
  """
  open_folders.open_folder(_full_name(folder)).check_fn = check_fn


def fence_of(name: PathLike) -> Callable[[], None]:
  """Return the function of `fence` for a path, or one that does nothing."""
  for folder in open_folders.folders_above(_full_name(name)):
    if folder.check_fn is not None:
      return folder.check_fn
  return lambda: None


class AppendedParts:
  """`AppendedFile` for object stores: the file consists of objects (see `parts`), each of which is written completely.

  A part is written again at each flush, and some seconds after an append, until it is large; then the next one begins.
  Another writer of the same name begins a new part. Neither `append` nor its `flush` waits for the store: a thread
  writes, and `write` first writes what was appended to files of the same run (`files.flush`). So an object that says
  that something is complete, as the manifest of a checkpoint does, comes after all that was appended before it.
  """

  def __init__(
    self,
    first: object_store.StorePath,
    *,
    header: bytes = b'',
    first_fn: Callable[[], bytes] = bytes,
  ):
    self._first = first
    self._header = header
    self._first_fn: Callable[[], bytes] | None = first_fn
    self._first_number = sys.maxsize
    self._part: object_store.StorePath | None = None
    self._content = bytearray(header)
    self._num_written = len(header)
    self._last_write = time.monotonic()
    self._closed = False
    self._timer: threading.Timer | None = None
    self._lock = threading.Lock()  # of the attributes
    self._write_lock = threading.Lock()  # held during requests
    self._folder = open_folders.folder_of(str(first))
    self._folder.parts.add(self)

  def append(self, content: bytes, *, at_once: bool) -> None:
    """Append `content`; it is written at the next flush, or some seconds after the last write; ignores `at_once`."""
    del at_once
    with self._lock:
      self._content += content
      self._start_timer(max(0.0, self._last_write + _PART_SECONDS - time.monotonic()))

  def flush(self) -> None:
    """Begin to write the appended bytes."""
    with self._lock:
      if self._timer is not None:
        self._timer.cancel()
        self._timer = None
      self._start_timer(0)

  def unwritten(self) -> tuple[object_store.StorePath, bytes] | None:
    """Return (part, its content) if the store has not yet taken all that was appended."""
    with self._lock:
      if len(self._content) == self._num_written:
        return None
      part = self._part or self._first.with_name(f'{self._first.name}{_NEW_PART}')
      return part, bytes(self._content)

  def take_loss(self) -> str:
    """Return ''; see `AppendedFile`. A part that is deleted is written again, as long as it is the last one."""
    return ''

  def former_parts(self) -> list[Path]:
    """Return the parts that other writers have written before."""
    return [
      part
      for part in parts(self._first)
      if _number_of(part) < self._first_number and part.is_file()
    ]

  def write_now(self) -> None:
    """Write the appended bytes; raise OSError if the store does not take them."""
    self._write()

  def close(self) -> None:
    """Write the remaining bytes."""
    with self._lock:
      is_first = not self._closed
      self._closed = True
      if self._timer is not None:
        self._timer.cancel()
    if is_first:
      try:
        self.check_outage()
        self._write()
      finally:
        self._folder.parts.discard(self)

  def check_outage(self) -> None:
    """Raise OSError if the store does not answer, instead of waiting for it once more, at the end of a run."""
    from t5x_lite.storage import object_store

    if object_store.is_in_outage(self._first):
      raise object_store.StoreUnavailableError(
        errno.EIO, 'the store did not answer', str(self._first)
      )

  def _start_timer(self, seconds: float) -> None:
    if self._timer is None and not self._closed:
      self._timer = threading.Timer(seconds, self._write_later)
      self._timer.daemon = True
      self._timer.start()

  def _write_later(self) -> None:
    with contextlib.suppress(OSError, T5xLiteError):  # `files.write` or `close` raises it.
      self._write()
    with self._lock:
      self._timer = None
      if len(self._content) > self._num_written:  # appended meanwhile, or the store did not take it
        self._start_timer(_PART_SECONDS)

  def _write(self) -> None:
    with self._write_lock:
      with self._lock:
        if len(self._content) == self._num_written:
          return
      if self._first_fn is not None:
        first = self._first_fn()
        with self._lock:
          self._content[len(self._header) : len(self._header)] = first
        self._first_fn = None
      with self._lock:
        content = bytes(self._content)
        self._last_write = time.monotonic()
      if self._part is None:
        self._part = self._next_part()
        self._first_number = _number_of(self._part)
      self._part.write_bytes(content, fence_of(self._part))
      with self._lock:
        self._num_written = len(content)
        if len(content) > _PART_BYTES:
          self._part = _numbered(self._first, _number_of(self._part) + 1)
          self._content[: len(content)] = self._header
          self._num_written = len(self._header)

  def _next_part(self) -> object_store.StorePath:
    found = parts(self._first)
    if len(found) == 1 and not self._first.is_file():
      return self._first
    return _numbered(self._first, _number_of(found[-1]) + 1)
