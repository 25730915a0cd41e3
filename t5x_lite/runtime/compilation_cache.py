"""JAX's persistent compilation cache: a folder of compiled programs that later processes load instead of compiling."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
from importlib import metadata
import logging
import os
import pathlib
import platform
import sys
import threading
import time
from typing import Any
import zlib

import jax
from jax.experimental.compilation_cache import compilation_cache

from t5x_lite.storage import files

# File systems of other machines, where many small files are slow and the CPU may be another one.
_REMOTE = (
  '9p',
  'afs',
  'beegfs',
  'ceph',
  'cifs',
  'glusterfs',
  'gpfs',
  'lustre',
  'ncpfs',
  'nfs',
  'nfs4',
  'panfs',
  'smb3',
  'smbfs',
  'sshfs',
  'virtiofs',
)
_HIT = '/jax/compilation_cache/cache_hits'
_MISS = '/jax/compilation_cache/cache_misses'
# Also reported for programs from the cache.
_COMPILATION = '/jax/core/compile/backend_compile_duration'


def use_compilation_cache(folder: str) -> None:
  """Load compiled programs from `folder` in this process, and save all newly compiled ones there.

  A program is found by the same version of JAX on the same kind and number of devices if it is equal, including its
  constants. JAX's environment variable JAX_COMPILATION_CACHE_DIR has the same effect, except for programs that compile
  in less than a second.

  Args:
    folder: path of the folder; created if missing.

  Raises:
    OSError: the folder cannot be created or written.
  """
  files.make_writable(folder)
  jax.config.update('jax_compilation_cache_dir', os.path.abspath(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  compilation_cache.reset_cache()  # JAX keeps the first folder otherwise.


def disable_compilation_cache() -> None:
  """Neither load nor save compiled programs in this process, whatever JAX_COMPILATION_CACHE_DIR says."""
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()  # JAX keeps the first folder otherwise.


def use_default_compilation_cache(max_bytes: int = 4 * 2**30) -> None:
  """Use the cache of this user and machine, see `default_folder`, unless JAX's settings name another or disable it.

  Incomplete programs, which a killed process left, are deleted first, then those that were not used for longest.

  Args:
    max_bytes: size of all programs above which some are deleted.
  """
  folder = default_folder()
  config: Any = jax.config  # JAX adds the options as attributes
  is_set = config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache
  if folder is None or is_set or jax.distributed.is_initialized():
    return
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whoever can write compiled programs can run code in this process.
    if folder.stat().st_uid != os.getuid():
      return
    clean(folder, max_bytes)
    use_compilation_cache(str(folder))
  except OSError:  # read-only, a full disk
    return


def default_folder() -> pathlib.Path | None:
  """Return the folder of this user and machine, in XDG_CACHE_HOME or ~/.cache; None if programs are not safe there.

  JAX distinguishes programs by its version and the kind of device. The folder's name also has a hash of jaxlib and the
  features of the CPU, since programs of the CPU contain its instructions. None on other systems than Linux, where this
  is not tested, and on network file systems.
  """
  if sys.platform != 'linux':
    return None
  home = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  if not os.path.isabs(home) or _is_remote(home):
    return None
  # Equal names are equal programs.
  jaxlib_version = metadata.version('jaxlib')
  identity = '\n'.join((platform.machine(), jaxlib_version, _cpu_features()))
  name = hashlib.sha256(identity.encode()).hexdigest()
  return pathlib.Path(home) / 't5x_lite' / f'programs-{name[:12]}'


def _cpu_features() -> str:
  """Return the features of the CPU in the order of the kernel."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace').splitlines()
  except OSError:
    return ''
  for line in lines:
    if line.lower().startswith(('flags', 'features')):
      return line
  return ''


def _is_remote(path: str) -> bool:
  """Return whether `path`, which may not exist yet, is on a network file system."""
  path = os.path.realpath(path)
  try:
    lines = pathlib.Path('/proc/self/mounts').read_bytes().splitlines()
  except OSError:
    return False
  kinds = {}
  for line in lines:
    _, escaped, kind, *_ = line.split()
    # Spaces are written as octal numbers; other bytes are those of the path.
    point = os.fsdecode(escaped.decode('unicode_escape').encode('latin-1'))
    kinds[point] = kind.decode()
  found = [point for point in kinds if os.path.commonpath((path, point)) == point]
  if not found:  # In a chroot, the path may be in none of them.
    return False
  kind = kinds[max(found, key=len)]
  return kind in _REMOTE or kind.startswith('fuse.')


def clean(folder: pathlib.Path, max_bytes: int) -> None:
  """Delete incomplete programs, then those that were not used for longest until the rest takes at most `max_bytes`.

  JAX does not write a file at once: one of a process that was killed would give a warning in each later process. Only
  files that are newer than the last call are read.
  """
  checked = folder / 'checked'
  last = checked.stat().st_mtime if checked.exists() else 0.0
  now = time.time()
  programs = []
  for path in folder.glob('*-cache'):
    with contextlib.suppress(FileNotFoundError):  # another process has deleted it
      stat = path.stat()
      if stat.st_mtime >= last and not _is_complete(path):
        path.unlink()
        continue
      programs.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
  total = sum(size for _, size, _ in programs)
  for _, size, path in sorted(programs):
    if total <= max_bytes:
      break
    path.unlink(missing_ok=True)
    total -= size
  checked.touch()
  os.utime(checked, (now, now))  # Other processes may have begun to write programs since.


def _is_complete(path: pathlib.Path) -> bool:
  """Return whether a program is complete; True if it is not compressed by zlib, whose data ends with a checksum."""
  data = path.read_bytes()
  if data[:1] != b'\x78' and data:
    return True
  try:
    zlib.decompress(data)
  except zlib.error:
    return False
  return True


@dataclasses.dataclass
class CacheCounts:
  """Compilations and the use of the compilation cache.

  Attributes:
    hits: number of programs loaded from the cache.
    misses: number of programs compiled and saved in the cache.
    programs: number of programs compiled or loaded.
    seconds: time spent on them, without tracing.
  """

  hits: int = 0
  misses: int = 0
  programs: int = 0
  seconds: float = 0.0

  def __str__(self) -> str:
    """Return e.g. '3 programs in 1.5 s, 2 from the compilation cache'."""
    if not self.hits:
      hits = 'none'
    elif self.hits == self.programs:
      hits = 'all'
    else:
      hits = f'{self.hits:,}'
    noun = 'program' if self.programs == 1 else 'programs'
    return f'{self.programs:,} {noun} in {self.seconds:.1f} s, {hits} from the compilation cache'


@contextlib.contextmanager
def count_cache_use(*, all_threads: bool = False) -> Iterator[CacheCounts]:
  """Count compilations and the use of the persistent cache within the context.

  Args:
    all_threads: count those of all threads instead of this thread alone.
  """
  counts = CacheCounts()
  thread = threading.get_ident()

  def is_counted() -> bool:
    return all_threads or threading.get_ident() == thread

  def listen(event: str, **_) -> None:
    if is_counted():
      counts.hits += event == _HIT
      counts.misses += event == _MISS

  def listen_to_durations(event: str, seconds: float, **_) -> None:
    if event == _COMPILATION and is_counted():
      counts.programs += 1
      counts.seconds += seconds

  with _listening(listen, listen_to_durations):
    yield counts


@contextlib.contextmanager
def log_compilations() -> Iterator[None]:
  """Context in which each program is logged with its name at the level DEBUG, when it is compiled or loaded.

  JAX's own option, jax_log_compiles, logs three records per program, with all shapes.
  """
  loaded = threading.local()

  def listen(event: str, **_) -> None:
    if event == _HIT:
      loaded.value = True

  def listen_to_durations(event: str, seconds: float, **details) -> None:
    if event == _COMPILATION:
      if getattr(loaded, 'value', False):
        verb = 'Loaded'
      else:
        verb = 'Compiled'
      loaded.value = False
      logging.getLogger(__name__).debug(
        '%s %s in %.3f s.', verb, details.get('fun_name', 'a program'), seconds
      )

  with _listening(listen, listen_to_durations):
    yield


@contextlib.contextmanager
def _listening(
  listen: Callable[..., None], listen_to_durations: Callable[..., None]
) -> Iterator[None]:
  """Context in which JAX passes its events, and their durations, to functions."""
  jax.monitoring.register_event_listener(listen)
  jax.monitoring.register_event_duration_secs_listener(listen_to_durations)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_listener(listen)
    jax.monitoring.unregister_event_duration_listener(listen_to_durations)
