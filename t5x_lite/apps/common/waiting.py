"""Waiting for data: another thread opens or reads it, while the main thread handles signals."""

from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import contextlib
import contextvars
import queue
import threading
import time
from typing import TypeVar

from t5x_lite import runtime

T = TypeVar('T')

# Interval at which the main thread checks for signals.
POLL_SECONDS = 0.2
# Interval of the warnings with the stacks of all threads while data is awaited.
WARNING_SECONDS = 300.0


def wait_for(
  poll_fn: Callable[[float], T],
  check_fn: Callable[[float], None],
  warning_fn: Callable[[float], str],
  *,
  warning_seconds: float = WARNING_SECONDS,
  clock: Callable[[], float] = time.monotonic,
) -> T:
  """Poll until there is a result and return it. Time in which this process was stopped does not count.

  Args:
    poll_fn: waits at most the given number of seconds for a result; returns a false value without a result.
    check_fn: called after each poll without a result, with the seconds waited; may raise to end the wait.
    warning_fn: returns the warning, printed with the stacks of all threads, from the seconds waited.
    warning_seconds: interval of the warnings.
    clock: returns seconds.

  Raises:
    Exception: errors of `poll_fn` and `check_fn`.
  """
  now = clock()
  waited = 0.0
  num_warnings = 0
  while not (found := poll_fn(POLL_SECONDS)):
    before = now
    now = clock()
    waited += runtime.awake_seconds(now - before, POLL_SECONDS)
    check_fn(waited)
    if waited >= warning_seconds * (num_warnings + 1):
      num_warnings += 1
      runtime.print_stacks(f'warning: {warning_fn(waited)}')
  return found


class DataWaits:
  """Opens or reads data in other threads, while the calling thread waits and checks for signals.

  When a signal ends the wait, a stalled thread is abandoned; it ends when its call returns. With several processes,
  signals do not end a wait, since no process can stop alone.
  """

  def __init__(
    self,
    signals: runtime.StopSignals,
    stop_error_fn: Callable[[str], Exception],
    *,
    on_wait: Callable[[], object] = lambda: None,
    warning_seconds: float = WARNING_SECONDS,
  ):
    """Store the arguments.

    Args:
      signals: stop signals; a request to stop ends the wait.
      stop_error_fn: returns the error to raise after a signal, from a description of the interrupted work.
      on_wait: called repeatedly during a wait.
      warning_seconds: interval of the warnings about a long wait, with the stacks of all threads.
    """
    self._signals = signals
    self._stop_error_fn = stop_error_fn
    self._on_wait = on_wait
    self._warning_seconds = warning_seconds

  def until(self, poll_fn: Callable[[float], T], doing: str) -> T:
    """Poll until there is a result and return it; see `wait_for`.

    Args:
      poll_fn: waits at most the given number of seconds for a result; returns a false value without a result.
      doing: description of the work, e.g. 'opening the training data'.

    Raises:
      Exception: errors of `poll_fn`, or `stop_error_fn`'s error after a signal.
    """

    def check(waited: float) -> None:
      del waited
      self._on_wait()
      if self._signals.ends_waits:
        raise self._stop_error_fn(doing)

    def warning(waited: float) -> str:
      return (
        f'{doing[:1].upper()}{doing[1:]} has taken {waited:.0f} s. The run waits; '
        f'{runtime.signals_that_end_a_wait()} ends the wait.'
      )

    return wait_for(poll_fn, check, warning, warning_seconds=self._warning_seconds)

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
      return self._result(caller.submit(fn), doing, close_fn)

  def iterate(self, iterable: Iterable[T], doing: str) -> Iterator[T]:
    """Yield the elements of `iterable`, all read in one thread; raise like `call`."""
    end = object()
    with contextlib.closing(_Caller()) as caller:
      iterator = self._result(caller.submit(lambda: iter(iterable)), doing)
      while (element := self._result(caller.submit(lambda: next(iterator, end)), doing)) is not end:
        yield element

  def _result(
    self,
    future: concurrent.futures.Future,
    doing: str,
    close_fn: Callable[[T], None] = lambda result: None,
  ) -> T:
    try:
      self.until(lambda seconds: concurrent.futures.wait([future], seconds).done, doing)
    except BaseException:
      future.add_done_callback(lambda late: late.exception() or close_fn(late.result()))
      raise
    return future.result()


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
