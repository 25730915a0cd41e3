"""Waiting for data in the main thread, which sees signals, while another thread opens or reads it."""

from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import contextlib
import contextvars
import queue
import threading
import time
from typing import TypeVar

import jax

from t5x_lite import runtime

T = TypeVar('T')

# Python runs signal handlers in the main thread, and between two polls their request is seen.
POLL_SECONDS = 0.2
# A warning with the stacks of all threads is printed whenever data has been awaited for so long.
WARNING_SECONDS = 300.0


def wait_for(poll_fn: Callable[[float], T], check_fn: Callable[[float], None],
             warning_fn: Callable[[float], str], *, warning_seconds: float = WARNING_SECONDS,
             clock: Callable[[], float] = time.monotonic) -> T:
  """Returns the result of a poll that has one. Time in which this process was stopped does not count.

  Args:
    poll_fn: waits at most so many seconds for a result; a false value if there is none.
    check_fn: called after each poll without a result, with the seconds waited; it may raise to end the wait.
    warning_fn: seconds waited to the message that is printed with the stacks of all threads.
    warning_seconds: how often to warn.
    clock: function that returns seconds.

  Raises:
    Exception: what `poll_fn` or `check_fn` raised.
  """
  now, waited, num_warnings = clock(), 0.0, 0
  while not (found := poll_fn(POLL_SECONDS)):
    before, now = now, clock()
    waited += runtime.awake_seconds(now - before, POLL_SECONDS)
    check_fn(waited)
    if waited >= warning_seconds * (num_warnings + 1):
      num_warnings += 1
      runtime.print_stacks(f'warning: {warning_fn(waited)}')
  return found


class DataWaits:
  """Opens or reads data in other threads, while the calling thread waits and looks for signals.

  A thread that stalls is left behind when a signal ends the wait, and ends when the stall does. With several processes
  none can stop alone, so signals do not end a wait.
  """

  def __init__(self, signals: runtime.StopSignals, stop_error_fn: Callable[[str], Exception], *,
               on_wait: Callable[[], object] = lambda: None, warning_seconds: float = WARNING_SECONDS):
    """Args:
      signals: a request ends the wait.
      stop_error_fn: returns the error to raise then; its argument says what was being done.
      on_wait: called again and again during a wait.
      warning_seconds: a longer wait is reported with the stacks of all threads, again after each further such time.
    """
    self._signals = signals
    self._stop_error_fn = stop_error_fn
    self._on_wait = on_wait
    self._warning_seconds = warning_seconds

  def until(self, poll_fn: Callable[[float], T], doing: str) -> T:
    """Returns the result of a poll that has one; see `wait_for`.

    Args:
      poll_fn: waits at most so many seconds for a result; a false value if there is none.
      doing: what is being done, e.g. 'opening the training data'.

    Raises:
      Exception: what `poll_fn` raised, or the error for a stop by a signal.
    """
    def check(waited: float) -> None:
      del waited
      self._on_wait()
      if self._signals.requested and jax.process_count() == 1:
        raise self._stop_error_fn(doing)

    return wait_for(
        poll_fn, check, lambda waited: (f'{doing[:1].upper()}{doing[1:]} has taken {waited:.0f} s. The run waits; '
                                        'SIGTERM or Ctrl-C ends the wait.'), warning_seconds=self._warning_seconds)

  def call(self, fn: Callable[[], T], doing: str, close_fn: Callable[[T], None] = lambda result: None) -> T:
    """Returns what `fn` returns, called in a thread; raises what it raises, or the error for a stop by a signal.

    Args:
      fn: opens or reads data.
      doing: see `until`.
      close_fn: called with what `fn` returns, or has just returned, after a stop: in the thread, or in the caller's if
        `fn` has ended by then.
    """
    with contextlib.closing(_Caller()) as caller:
      return self._result(caller.submit(fn), doing, close_fn)

  def iterate(self, iterable: Iterable[T], doing: str) -> Iterator[T]:
    """Yields the elements of `iterable`, all read in one thread; raises as `call`."""
    end = object()
    with contextlib.closing(_Caller()) as caller:
      iterator = self._result(caller.submit(lambda: iter(iterable)), doing)
      while (element := self._result(caller.submit(lambda: next(iterator, end)), doing)) is not end:
        yield element

  def _result(self, future: concurrent.futures.Future, doing: str,
              close_fn: Callable[[T], None] = lambda result: None) -> T:
    try:
      self.until(lambda seconds: concurrent.futures.wait([future], seconds).done, doing)
    except BaseException:
      future.add_done_callback(lambda late: late.exception() or close_fn(late.result()))
      raise
    return future.result()


class _Caller:
  """A thread that calls functions one after another; it does not keep the process alive."""

  def __init__(self):
    self._calls: queue.SimpleQueue = queue.SimpleQueue()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(self._run,), name='t5x_lite-data-reading', daemon=True).start()

  def submit(self, fn: Callable[[], T]) -> concurrent.futures.Future:
    """Returns the future of what `fn` returns."""
    future = concurrent.futures.Future()
    self._calls.put((fn, future))
    return future

  def _run(self) -> None:
    while (call := self._calls.get()) is not None:
      _answer(*call)
      del call  # It holds a batch until the next one is asked for.

  def close(self) -> None:
    """Ends the thread after the calls that were submitted; does not wait for it."""
    self._calls.put(None)


def _answer(fn: Callable[[], T], future: concurrent.futures.Future) -> None:
  try:
    result = fn()
  except BaseException as error:  # raised where the result is awaited
    future.set_exception(error)
  else:
    future.set_result(result)
