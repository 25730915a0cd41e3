"""JAX's persistent compilation cache: a folder of compiled programs that later processes load instead of compiling."""

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import os

import jax
from jax.experimental.compilation_cache import compilation_cache

from t5x_lite import checks

_HIT = '/jax/compilation_cache/cache_hits'
_MISS = '/jax/compilation_cache/cache_misses'


def use_compilation_cache(folder: str) -> None:
  """Load compiled programs from `folder` in this process, and save all newly compiled ones there.

  A program is found by the same version of JAX on the same kind and number of devices if it is equal, including its
  constants. JAX's environment variable JAX_COMPILATION_CACHE_DIR has the same effect, except for programs that compile
  in less than a second.

  Args:
    folder: path of the folder; created if missing.

  Raises:
    ConfigError: the folder cannot be created or written.
  """
  try:
    os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
      raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
  except OSError as error:
    raise checks.invalid('', '--compilation_cache_dir', 'a writable folder', folder, f'{error.strerror}.') from error
  jax.config.update('jax_compilation_cache_dir', os.path.abspath(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  compilation_cache.reset_cache()  # JAX keeps the first folder otherwise.


@dataclasses.dataclass
class CacheCounts:
  """Use of the compilation cache.

  Attributes:
    hits: number of programs loaded from the cache.
    misses: number of programs compiled and saved in the cache.
  """

  hits: int = 0
  misses: int = 0


@contextlib.contextmanager
def count_cache_use() -> Iterator[CacheCounts]:
  """Count the use of the persistent cache within the context, in all threads."""
  counts = CacheCounts()

  def listen(event: str, **_) -> None:
    counts.hits += event == _HIT
    counts.misses += event == _MISS

  jax.monitoring.register_event_listener(listen)
  try:
    yield counts
  finally:
    jax.monitoring.unregister_event_listener(listen)
