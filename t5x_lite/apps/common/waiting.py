"""Waiting for data: another thread opens or reads it, while the main thread handles signals."""

from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import contextlib
import contextvars
import functools
import queue
import threading
import time
from typing import Any, TypeVar

from t5x_lite import runtime

T = TypeVar('T')

# Interval at which the main thread checks for signals.
POLL_SECONDS = 0.2
# Interval of the warnings with the stacks of all threads while data is awaited.
WARNING_SECONDS = 300.0


class Interrupted(Exception):
  """Error that ends a wait or an evaluation after a signal."""


class DataWaits:
  """Opens or reads data in other threads, while the calling thread waits and checks for signals and limits.

  When a signal ends the wait, a stalled thread is abandoned; it ends when its call returns. With several processes,
  signals do not end a wait, since no process can stop alone.
  """

  def __init__(
    self,
    signals: runtime.StopSignals,
    stop_error_fn: Callable[[str], Exception] = Interrupted,
    *,
    on_wait: Callable[[], object] = lambda: None,
    warning_seconds: float = WARNING_SECONDS,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Store the arguments.

    Args:
      signals: stop signals; a request to stop ends the wait.
      stop_error_fn: returns the error to raise after a signal, from a description of the interrupted work.
      on_wait: called repeatedly during a wait.
      warning_seconds: interval of the warnings about a long wait, with the stacks of all threads.
      clock: returns seconds.
    """
    self._signals = signals
    self._stop_error_fn = stop_error_fn
    self._on_wait = on_wait
    self._warning_seconds = warning_seconds
    self._clock = clock

  def until(
    self,
    poll_fn: Callable[[float], T],
    doing: str,
    *,
    warning_fn: Callable[[float], str] | None = None,
    check_fn: Callable[[float], object] = lambda waited: None,
  ) -> T:
    """Poll until there is a result and return it. Time in which this process was stopped does not count.

    Args:
      poll_fn: waits at most the given number of seconds for a result; returns a false value without a result.
      doing: description of the work, e.g. 'opening the training data'.
      warning_fn: returns the warning about a long wait from the seconds waited; None for one that describes the work.
      check_fn: called after each poll without a result, with the seconds waited; may raise to end the wait.

    Raises:
      Exception: errors of `poll_fn` and `check_fn`, or `stop_error_fn`'s error after a signal.
    """
    if warning_fn is None:
      warning_fn = functools.partial(_describe_wait, doing)
    now = self._clock()
    waited = 0.0
    next_warning = self._warning_seconds
    while not (found := poll_fn(POLL_SECONDS)):
      before = now
      now = self._clock()
      waited += runtime.awake_seconds(now - before, POLL_SECONDS)
      self._on_wait()
      if self._signals.ends_waits:
        raise self._stop_error_fn(doing)
      check_fn(waited)
      if waited >= next_warning:
        next_warning += self._warning_seconds
        runtime.print_stacks(f'warning: {warning_fn(waited)}')
    return found

  def call(
    self, fn: Callable[[], T], doing: str, close_fn: Callable[[T], None] = lambda result: None
  ) -> T:
    """Call `fn` in a thread and return its result; raise its error, or the error after a signal.

    Args:
      fn: opens or reads data.
      doing: see `until`.
      close_fn: called with the result of `fn` if a signal has ended the wait, in the thread, or in the caller's if `fn`
        has ended by then.
    """
    with contextlib.closing(_Caller()) as caller:
      future = caller.submit(fn)
      try:
        return self.result(future, doing)
      except BaseException:
        future.add_done_callback(lambda late: late.exception() or close_fn(late.result()))
        raise

  def iterate(self, iterable: Iterable[T], doing: str) -> Iterator[T]:
    """Yield the elements of `iterable`, all read in one thread; raise like `call`."""
    end = object()
    with contextlib.closing(_Caller()) as caller:
      iterator = self.result(caller.submit(lambda: iter(iterable)), doing)
      while (element := self.result(caller.submit(lambda: next(iterator, end)), doing)) is not end:
        yield element

  def result(self, future: concurrent.futures.Future, doing: str) -> Any:
    """Wait for a future and return its result; raise its error, or the error after a signal."""
    self.until(lambda seconds: concurrent.futures.wait([future], seconds).done, doing)
    return future.result()


def _describe_wait(doing: str, waited: float) -> str:
  return (
    f'{doing[:1].upper()}{doing[1:]} has taken {waited:.0f} s. The run waits; '
    f'{runtime.signals_that_end_a_wait()} ends the wait.'
  )


class _Caller:
  """Daemon thread that calls functions one by one."""

  def __init__(self):
    self._calls: queue.SimpleQueue = queue.SimpleQueue()
    context = contextvars.copy_context()
    threading.Thread(
      target=context.run, args=(self._run,), name='t5x_lite-data-reading', daemon=True
    ).start()

  def submit(self, fn: Callable[[], T]) -> concurrent.futures.Future:
    """Return the future of what `fn` returns."""
    future = concurrent.futures.Future()
    self._calls.put((fn, future))
    return future

  def _run(self) -> None:
    while (call := self._calls.get()) is not None:
      _answer(*call)
      del call  # Otherwise it keeps a batch alive until the next call.

  def close(self) -> None:
    """End the thread after the submitted calls; do not wait for it."""
    self._calls.put(None)


def _answer(fn: Callable[[], T], future: concurrent.futures.Future) -> None:
  try:
    result = fn()
  except BaseException as error:  # Raised in the waiting thread.
    future.set_exception(error)
  else:
    future.set_result(result)
