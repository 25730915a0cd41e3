"""Paths of object stores (gs://, s3://), with the methods of `pathlib.Path` that this package uses.

`files.path` makes them. A store has objects with whole names and no folders: a folder exists while an object below it
does. An object appears whole or not at all, and cannot be renamed or appended to.

Requests that fail for a reason that may pass (no connection, status 408, 429 or 5xx) are repeated with growing pauses,
up to `retry_seconds(path)`. Names and bytes go through fsspec (gcsfs, s3fs), arrays and conditional writes through
TensorStore's own drivers, see `kvstore_spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import io
import logging
import os
import pathlib
import posixpath
import random
import time
from typing import IO, Any

# Read when these libraries are imported. TensorFlow would be imported for each path, and has no s3://; the other
# variable adds a request for the kind of each bucket.
os.environ.setdefault('EPATH_USE_TF', 'false')
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
# TensorStore, which reads these at its first request, waits without end for a connection that is silent.
os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS', '30')
os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES', '1')

from etils.epath import gpath  # pylint: disable=wrong-import-position
import fsspec  # pylint: disable=wrong-import-position

from t5x_lite import errors  # pylint: disable=wrong-import-position
from t5x_lite.storage import open_folders  # pylint: disable=wrong-import-position

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Kind:
  """Words for messages about a kind of store."""

  name: str
  extra: str
  package: str
  credentials: str


_KINDS = {
  'gs': _Kind(
    'Google Cloud Storage',
    'gcs',
    'gcsfs',
    'run `gcloud auth application-default login`, or let GOOGLE_APPLICATION_CREDENTIALS name a key file',
  ),
  's3': _Kind(
    'S3', 's3', 's3fs', 'run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY'
  ),
}
# Statuses of HTTP that another attempt may change.
_TEMPORARY = {408, 429, *range(500, 600)}
# Names of exceptions of the packages: missing credentials, and requests without an answer.
_NO_CREDENTIALS = {
  'NoCredentialsError',
  'PartialCredentialsError',
  'DefaultCredentialsError',
  'ProfileNotFound',
}
_NO_ANSWER = {
  'ClientError',
  'RequestException',
  'TimeoutError',
  'ConnectionError',
  'HTTPClientError',
  'FSTimeoutError',
  'TransportError',
  'RefreshError',
  'ChecksumError',
  'IncompleteRead',
}
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
# Attempts of a package within one of ours.
_NUM_ATTEMPTS = 3
# In an outage the time of all requests counts from the first that failed, but each gets this many seconds.
_LEAST_SECONDS = 5.0
# Its machine may never reach a store that a process has not yet reached, which the user should soon know.
_FIRST_REQUEST_SECONDS = 20.0
# Result of `retry_seconds` without `set_retry_seconds`.
RETRY_SECONDS = 300.0
# Bytes per request of a file that is read in order.
_BLOCK_BYTES = 1 << 25
# Requests of one call at a time.
NUM_THREADS = 16


class StoreUnavailableError(OSError):
  """A store did not answer, or answered with temporary errors, for longer than `retry_seconds(path)`."""


def retry_seconds(path: StorePath) -> float:
  """Return for how many seconds a request that fails for a temporary reason is repeated.

  Paths below the folder of a run have its limit. Otherwise, as for the data of a run, it is the
  longest limit of the runs of this process.
  """
  for folder in open_folders.folders_above(str(path)):
    if folder.retry_seconds is not None:
      return folder.retry_seconds
  limits = []
  for folder in open_folders.all_folders():
    if folder.retry_seconds is not None:
      limits.append(folder.retry_seconds)
    elif folder.lock is not None:
      limits.append(RETRY_SECONDS)
  return max(limits, default=RETRY_SECONDS)


def set_retry_seconds(folder: StorePath, seconds: float) -> None:
  """Set the result of `retry_seconds` for a folder."""
  with open_folders.limit_changed:  # ends the pauses between attempts, whose time may be over now
    open_folders.open_folder(str(folder)).retry_seconds = seconds
    open_folders.limit_changed.notify_all()


class StorePath(gpath.PosixGPath):
  """The path of an object or of a folder in an object store; the methods are those of `pathlib.Path`.

  Every method raises FileNotFoundError, PermissionError or StoreUnavailableError (all of them OSErrors that name the
  path), or ConfigError if the store's package or the credentials are missing.
  """

  # ---- the path itself ----------------------------------------------------------------------------------------------

  def absolute(self) -> StorePath:
    """Return the path: all paths of stores are absolute."""
    return self

  def resolve(self, strict: bool = False) -> StorePath:
    """Return the path without '..': there are no links."""
    del strict
    scheme, _, name = str(self).partition('://')
    if '..' not in self.parts:
      return self
    return StorePath(f'{scheme}://{posixpath.normpath(name)}')

  def expanduser(self) -> StorePath:
    """Return the path."""
    return self

  def is_symlink(self) -> bool:
    """Return False: there are no links."""
    return False

  # ---- reading ------------------------------------------------------------------------------------------------------

  def exists(self) -> bool:
    """Return True if there is an object of this name or below it."""
    return self.is_file() or self.is_dir()

  def is_file(self) -> bool:
    """Return True if there is an object of this name; False too if the path cannot be read, like `pathlib`."""
    try:
      return self._info()['type'] == 'file'
    except FileNotFoundError:
      return False

  def is_dir(self) -> bool:
    """Return True if there is an object below this path."""
    if len(self.parts) == 3:  # a bucket, which some keys may not list
      return True
    try:
      entries = self._call(lambda fs, name: fs.ls(name, detail=True, refresh=True))
      return bool(entries) and not self.is_file()
    except FileNotFoundError:
      return False

  def stat(self) -> os.stat_result:
    """Return a result in which only `st_size` and `st_mtime` (0 if unknown) are meaningful, and 0 for a folder."""
    info = self._info()
    changed = info.get('LastModified') or info.get('mtime')
    seconds = 0
    if changed is not None:
      seconds = changed.timestamp()
    mode = 0o100644 if info['type'] == 'file' else 0o040755
    size = info.get('size') or 0
    return os.stat_result((mode, 0, 0, 1, 0, 0, size, seconds, seconds, seconds))

  def version(self) -> str:
    """Return a text that differs between any two contents of the object."""
    info = self._info()
    return str(info.get('generation') or info.get('ETag') or info.get('etag'))

  def read_bytes(self) -> bytes:
    """Return the content."""
    return self._call(lambda fs, name: fs.cat_file(name))

  def read_range(self, start: int, end: int) -> bytes:
    """Return the bytes from `start` to before `end`."""
    if end > start:
      return self._call(lambda fs, name: fs.cat_file(name, start=start, end=end))
    return b''

  def read_text(
    self, encoding: str | None = None, errors: str | None = None, newline: str | None = None
  ) -> str:
    """Return the content as text, UTF-8 by default."""
    with self.open('r', encoding=encoding, errors=errors, newline=newline) as f:
      return f.read()

  def open(
    self,
    mode: str = 'r',
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
  ) -> IO[Any]:
    """Open the object for reading ('r', 'rt' or 'rb'), `buffering` bytes at a time; `files.write` writes objects."""
    if mode not in ('r', 'rt', 'rb'):
      raise ValueError(
        f'{self} can only be read, got mode {mode!r}: `files.write` writes objects of stores.'
      )
    if buffering <= 1:
      buffering = _BLOCK_BYTES
    binary = io.BufferedReader(_Reader(self), buffering)
    if mode == 'rb':
      return binary
    return io.TextIOWrapper(binary, encoding or 'utf-8', errors, newline)

  def iterdir(self) -> Iterator[StorePath]:
    """Yield the objects and folders in this folder, in alphabetical order.

    Raises:
      FileNotFoundError: nothing is below this path.
    """
    found = self._call(lambda fs, name: fs.ls(name, detail=False, refresh=True))
    keys = {key.rstrip('/') for key in found} - {self._name}
    names = {key.rpartition('/')[2] for key in keys}
    for name in sorted(names):
      if name:
        yield self / name

  def find(self) -> dict[str, int]:
    """Return relative path -> size of every object below this folder, in alphabetical order; may be empty."""
    try:
      found = self._call(lambda fs, name: fs.find(name, detail=True, withdirs=False, refresh=True))
    except FileNotFoundError:
      return {}
    start = len(self._name) + 1
    sizes = {}
    for key in sorted(found):
      name = key[start:]
      if name and not key.endswith('/'):
        sizes[name] = found[key]['size']
    return sizes

  def rglob(self, pattern: str) -> Iterator[StorePath]:
    """Yield the objects, without folders, at any depth whose last component matches `pattern`."""
    for name in self.find():
      path = self / name
      if _name_matches(path, pattern):
        yield path

  def glob(self, pattern: str) -> Iterator[StorePath]:
    """Yield the objects and folders that match a pattern, in alphabetical order; '**' is any number of folders."""
    if pattern.startswith('**/'):
      found = set()
      for folder in self._folders():
        found |= set(folder.glob(pattern.removeprefix('**/')))
      yield from sorted(found)
      return
    first, _, rest = pattern.partition('/')
    is_name = not set('*?[') & set(first)
    try:
      if is_name:
        entries = [self / first]
      else:
        entries = [entry for entry in self.iterdir() if _name_matches(entry, first)]
    except FileNotFoundError:
      return
    for entry in entries:
      if rest:
        yield from entry.glob(rest)
      elif not is_name or entry.exists():
        yield entry

  def _folders(self) -> set[StorePath]:
    """Return this folder and all folders below it."""
    folders: set[StorePath] = {self}
    for name in self.find():
      folders.update(folder for folder in (self / name).parents if self in folder.parents)
    return folders

  # ---- writing ------------------------------------------------------------------------------------------------------

  def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
    """Do nothing: a folder exists while an object below it does."""
    del mode, parents, exist_ok

  def write_bytes(self, data: bytes, check_fn: Callable[[], None] = lambda: None) -> int:
    """Write the object; readers find its former content or all of the new one; `check_fn` precedes each attempt."""
    self._call(lambda fs, name: (check_fn(), fs.pipe_file(name, data)))
    return len(data)

  def write_text(
    self,
    data: str,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
  ) -> int:
    """Write the object, by default in UTF-8."""
    del newline
    return self.write_bytes(data.encode(encoding or 'utf-8', errors or 'strict'))

  def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
    """Write an empty object unless the object exists."""
    del mode, exist_ok
    if not self.is_file():
      self.write_bytes(b'')

  def upload(self, source: str | os.PathLike[str]) -> None:
    """Write the object with the content of a local file."""
    self._call(lambda fs, name: fs.put_file(os.fspath(source), name))

  def copy_object(self, target: StorePath) -> None:
    """Copy the object within the store."""
    self._call(lambda fs, name: fs.cp_file(name, target._name))  # pylint: disable=protected-access

  def unlink(self, missing_ok: bool = False) -> None:
    """Remove the object."""
    if not missing_ok:
      self._info()  # S3 ignores that an object is missing
    try:
      self._call(lambda fs, name: fs.rm_file(name))
    except FileNotFoundError:
      if not missing_ok:
        raise

  def rmtree(self, missing_ok: bool = True) -> None:
    """Remove every object below this folder."""
    names = list(self.find())
    if not names and not missing_ok:
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
    in_parallel(lambda name: (self / name).unlink(missing_ok=True), names)

  # ---- requests -----------------------------------------------------------------------------------------------------

  @property
  def _name(self) -> str:
    """Bucket and key."""
    return '/'.join(self.parts[2:])

  def _info(self) -> dict[str, Any]:
    return self._call(lambda fs, name: fs.info(name, refresh=True))

  def _call(self, fn: Callable[[Any, str], Any]) -> Any:
    """Return `fn(file system, name)`, repeated while it fails for a temporary reason."""
    scheme = self.parts[1]
    if len(self.parts) < 3:
      raise errors.ConfigError(
        f'A path in a store must name a bucket, got {str(self)!r}. Write {scheme}://BUCKET/NAME.'
      )
    return retrying(lambda: fn(connection(scheme).file_system, self._name), self)


def _name_matches(path: StorePath, pattern: str) -> bool:
  return pathlib.PurePosixPath(path.name).match(pattern)


def retrying(fn: Callable[[], Any], path: StorePath) -> Any:
  """Return `fn()`, which is repeated while it fails for a temporary reason; errors name `path`."""
  folder = open_folders.folder_of(str(path))
  store = connection(path.parts[1])
  start = time.monotonic()
  pause = _FIRST_PAUSE
  is_first = True
  while True:
    try:
      result = fn()
      folder.outage = None
      store.is_reached = True
      return result
    except errors.T5xLiteError:
      raise
    except Exception as e:  # pylint: disable=broad-exception-caught
      problem = _explained(e, path)
      if problem is not None:
        folder.outage = None
        if isinstance(problem, FileNotFoundError | FileExistsError):
          store.is_reached = True
        raise problem from e
      now = time.monotonic()
      began, last = folder.outage or (start, now)
      if now - last > 2 * _LONGEST_PAUSE:
        began = start
      folder.outage = began, now
      limit = retry_seconds(path)
      if not store.is_reached:
        limit = min(_FIRST_REQUEST_SECONDS, limit)
      seconds_left = max(start + min(_LEAST_SECONDS, limit), began + limit) - now
      if seconds_left <= 0:
        raise StoreUnavailableError(
          errno.EIO,
          f'the store did not answer for {limit:g} seconds, last error: {_text(e)}',
          str(path),
        ) from e
      level = logging.WARNING if is_first and began == start else logging.DEBUG
      _logger.log(level, '%s: %s. Trying again for up to %g seconds.', path, _text(e), limit)
      with open_folders.limit_changed:
        open_folders.limit_changed.wait(min(pause * random.uniform(0.5, 1), seconds_left))
      pause = min(2 * pause, _LONGEST_PAUSE)
      is_first = False


def is_in_outage(path: StorePath) -> bool:
  """Return True if the store has not answered for `retry_seconds(path)`, and did not a moment ago."""
  began, last = open_folders.folder_of(str(path)).outage or (0.0, 0.0)
  return last - began >= retry_seconds(path) and time.monotonic() - last < _LONGEST_PAUSE


def in_parallel(fn: Callable[[Any], Any], items: Any) -> list[Any]:
  """Return `fn(item)` for each item, several at a time; the first error is raised."""
  with concurrent.futures.ThreadPoolExecutor(
    NUM_THREADS, thread_name_prefix='object-store'
  ) as pool:
    return list(pool.map(fn, items))


def kvstore_spec(path: StorePath) -> dict[str, Any]:
  """Return the specification of TensorStore's key-value store whose keys are the names below a folder."""
  scheme, bucket = path.parts[1:3]
  spec = {
    'driver': 'gcs' if scheme == 'gs' else 's3',
    'bucket': bucket,
    'path': ''.join(f'{part}/' for part in path.parts[3:]),
  }
  if scheme == 's3':
    # TensorStore reads the credentials of the usual places, but neither of these.
    endpoint = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')
    region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION')
    if endpoint:
      spec['endpoint'] = endpoint
    if endpoint or region:
      spec['aws_region'] = region or 'us-east-1'
  return spec


def kvstore_context(path: StorePath, retries: dict[str, Any] | None = None) -> dict[str, Any]:
  """Return TensorStore's context for a folder: credentials, and retries, by default for about `retry_seconds(path)`."""
  if retries is None:
    retries = _retries(retry_seconds(path))
  context = {'gcs_request_retries': retries, 's3_request_retries': retries}
  # Otherwise TensorStore first looks for files, and prints that they are missing. The specification of an open store
  # would not keep the choice.
  if os.environ.get('AWS_ACCESS_KEY_ID'):
    context['aws_credentials'] = {'type': 'environment'}
  return context


def _retries(seconds: float) -> dict[str, Any]:
  num_doublings = 0
  total = 0.0
  pause = _FIRST_PAUSE
  while total < seconds:
    total += pause
    pause = min(2 * pause, _LONGEST_PAUSE)
    num_doublings += 1
  return {
    'max_retries': max(1, num_doublings),
    'initial_delay': f'{round(1000 * _FIRST_PAUSE)}ms',
    'max_delay': f'{round(_LONGEST_PAUSE)}s',
  }


class Connection:
  """Connection of this process to the stores of a scheme.

  Attributes:
    is_reached: whether an answer has come, so that the machine can reach the store.
  """

  def __init__(self, scheme: str):
    self._scheme = scheme
    self.is_reached = False

  @functools.cached_property
  def file_system(self) -> Any:
    """The file system of fsspec; the first use raises ConfigError without its package."""
    return _file_system(self._scheme)


@functools.cache
def connection(scheme: str) -> Connection:
  """Return the connection to the stores of a scheme."""
  return Connection(scheme)


def _file_system(scheme: str) -> Any:
  kind = _KINDS[scheme]
  # They log each failed attempt as an error, with a traceback.
  for name in ('gcsfs', 'aiobotocore.credentials'):
    if logging.getLogger(name).level == logging.NOTSET:  # not set by the user
      logging.getLogger(name).setLevel(logging.CRITICAL)
  # The packages repeat requests for a minute, which `retrying` would not count; parts of large files need a few.
  with errors.needs_packages(
    f'A path that begins with {scheme}://', kind.package, extra=kind.extra
  ):
    if scheme == 's3':
      found = fsspec.filesystem(
        's3',
        use_listings_cache=False,
        config_kwargs={
          'connect_timeout': 10,
          'read_timeout': 30,
          'retries': {'total_max_attempts': 1},
        },
      )
      found.retries = _NUM_ATTEMPTS
    else:
      import aiohttp
      from gcsfs import retry

      found = fsspec.filesystem(
        'gcs',
        use_listings_cache=False,
        requests_timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30),
      )
      # Without the name of this decorator, which is private, it only takes longer until an error is known.
      once = getattr(type(found)._request, '__wrapped__', None)  # pylint: disable=protected-access
      if once is not None:
        retry_request: Any = retry.retry_request  # has optional arguments by `decorator`
        request = retry_request(retries=_NUM_ATTEMPTS)(once)
        found._request = functools.partial(request, found)  # pylint: disable=protected-access
    return found


def _explained(error: BaseException, path: StorePath) -> BaseException | None:
  """Return the exception to raise for a permanent error; None if another attempt may succeed."""
  kind = _KINDS[path.parts[1]]
  names = {base.__name__ for base in type(error).__mro__}
  # An answer that ends too early has the status 400 as its cause.
  if names & {'ClientPayloadError', 'ClientConnectionError'}:
    status = None
  else:
    status = _status(error)
  if errors.is_disk_full(error):  # of the local file of an upload or download
    return error
  if isinstance(error, FileNotFoundError) or status == 404:
    if isinstance(error, FileNotFoundError) and error.filename == str(path):  # of the lease
      return error
    if 'specified bucket' in str(error):
      return FileNotFoundError(errno.ENOENT, f'there is no bucket {path.parts[2]!r}', str(path))
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
  if isinstance(error, FileExistsError) or status == 412:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
  if names & _NO_CREDENTIALS or status == 401:
    return errors.ConfigError(
      f'{kind.name} needs credentials for {str(path)!r} ({_text(error)}): {kind.credentials}.'
    )
  if isinstance(error, PermissionError) or status == 403 or str(error).startswith('Forbidden'):
    return PermissionError(
      errno.EACCES,
      f'{kind.name} denies the access ({_text(error)}); use credentials that have '
      f'it: {kind.credentials}',
      str(path),
    )
  if isinstance(error, (IsADirectoryError, NotADirectoryError)):
    return error
  if status is None:
    is_temporary = isinstance(error, (OSError, EOFError)) or bool(names & _NO_ANSWER)
  else:
    # S3 has codes with the statuses 400 (RequestTimeout) and 409 (OperationAborted) for what may pass.
    is_temporary = (
      status in _TEMPORARY
      or isinstance(error, TimeoutError)
      or getattr(error, 'errno', 0) == errno.EBUSY
    )
  if is_temporary:
    return None
  if isinstance(error, ValueError | OSError) or status is not None:
    return OSError(errno.EIO, f'{kind.name} rejects the request: {_text(error)}', str(path))
  return error


def _status(error: BaseException | None) -> int | None:
  """Return the status of HTTP that caused an exception of gcsfs, s3fs or their libraries; None without an answer."""
  while error is not None:
    response = getattr(error, 'response', None)
    if isinstance(response, dict):
      found = response.get('ResponseMetadata', {}).get('HTTPStatusCode')
    else:
      found = None
    for value in (found, getattr(error, 'code', None), getattr(error, 'status', None)):
      if value is None:
        continue
      with contextlib.suppress(TypeError, ValueError):
        if int(value) >= 100:
          return int(value)
    error = error.__cause__
  return None


def _text(error: BaseException) -> str:
  text = ' '.join(str(error).split())[:300].rstrip('.')
  if text:
    return f'{type(error).__name__}: {text}'
  return type(error).__name__


class _Reader(io.RawIOBase):
  """Reads an object by ranges, each of which is repeated on errors."""

  def __init__(self, path: StorePath):
    super().__init__()
    self._path = path
    self._size = path.stat().st_size
    self._position = 0
    self.name = str(path)

  def readable(self) -> bool:
    """See base class."""
    return True

  def seekable(self) -> bool:
    """See base class."""
    return True

  def tell(self) -> int:
    """See base class."""
    return self._position

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    """See base class."""
    origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
    self._position = origin + offset
    return self._position

  def readinto(self, buffer: Any) -> int:
    """See base class."""
    end = min(self._position + len(buffer), self._size)
    data = self._path.read_range(self._position, end)
    buffer[: len(data)] = data
    self._position += len(data)
    return len(data)
