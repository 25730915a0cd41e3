"""JAX's persistent compilation cache: a folder of compiled programs that later processes load instead of compiling."""

from collections.abc import Iterator
import contextlib
import dataclasses
import os

import jax
from jax.experimental.compilation_cache import compilation_cache

from t5x_lite.errors import ConfigError

_HIT = '/jax/compilation_cache/cache_hits'
_MISS = '/jax/compilation_cache/cache_misses'


def use_compilation_cache(folder: str) -> None:
  """Lets this process load compiled programs from `folder`, and write there what it compiles, however small.

  A program is found again by the same JAX on the same kind and number of devices, if it is the same to the last
  constant. JAX reads the environment variable JAX_COMPILATION_CACHE_DIR to the same effect, but leaves out programs
  that take less than a second to compile.

  Args:
    folder: is made if need be.

  Raises:
    ConfigError: the folder cannot be made or written.
  """
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError as error:
    raise ConfigError(f'compilation_cache_dir is {folder!r}, which cannot be made: {error.strerror}. Choose another '
                      'folder.') from error
  if not os.access(folder, os.W_OK | os.X_OK):
    raise ConfigError(f'compilation_cache_dir is {folder!r}, which cannot be written. Choose another folder.')
  jax.config.update('jax_compilation_cache_dir', os.path.abspath(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  compilation_cache.reset_cache()  # JAX keeps the first folder that it has seen


@dataclasses.dataclass
class CacheCounts:
  """What became of the programs that were compiled.

  Attributes:
    hits: loaded from the cache.
    misses: compiled, and written into it.
  """

  hits: int = 0
  misses: int = 0


@contextlib.contextmanager
def count_cache_use() -> Iterator[CacheCounts]:
  """Counts what the persistent cache is asked for within the context, in all threads."""
  counts = CacheCounts()

  def listen(event: str, **_) -> None:
    counts.hits += event == _HIT
    counts.misses += event == _MISS

  jax.monitoring.register_event_listener(listen)
  try:
    yield counts
  finally:
    jax.monitoring.unregister_event_listener(listen)
