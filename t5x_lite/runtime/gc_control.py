"""Garbage collection at chosen moments: a collection in one of many processes makes all the others wait for it."""

from collections.abc import Callable, Iterator
import contextlib
import gc


@contextlib.contextmanager
def manual_gc(enabled: bool) -> Iterator[Callable[[], int]]:
  """Within it, and if `enabled`, nothing is collected except when the yielded function is called.

  Args:
    enabled: whether to switch automatic collection off.

  Yields:
    `gc.collect`.
  """
  if not enabled:
    yield gc.collect
    return
  was_enabled = gc.isenabled()
  gc.collect()
  gc.disable()
  try:
    yield gc.collect
  finally:
    if was_enabled:
      gc.enable()
