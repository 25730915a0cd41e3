"""Garbage collection at chosen steps: a collection in one of many processes makes all others wait for it."""

from collections.abc import Callable, Iterator
import contextlib
import gc


@contextlib.contextmanager
def manual_gc(enabled: bool) -> Iterator[Callable[[], int]]:
  """Disable automatic garbage collection within the context, if `enabled`.

  Args:
    enabled: whether to disable automatic collection.

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
