"""Handling of Ctrl-C, SIGTERM and SIGHUP: finish the step, save, and print how to resume."""

import os
import signal
import threading
from types import FrameType

import jax

from t5x_lite import multihost
from t5x_lite import standard_streams
from t5x_lite.runtime import monitor as monitor_lib
from t5x_lite.runtime.stop_requests import StopRequests

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signals_that_end_a_wait() -> str:
  """Return them for a message."""
  if jax.process_count() == 1:
    return 'SIGTERM or Ctrl-C'
  return 'SIGTERM or Ctrl-C, sent twice to all processes,'


class _Repeated:
  """Handler that ignores the SIGTERM that has ended a `StopSignals`; any later one gets the handler of before."""

  def __init__(self, requests: StopRequests):
    self._requests = requests
    self._previous = signal.getsignal(signal.SIGTERM)

  def __call__(self, number: int, frame: FrameType | None) -> None:
    del frame
    if not self._requests.is_repeated(number):
      signal.signal(number, self._previous)
      os.kill(os.getpid(), number)


class StopSignals:
  """Context within which a signal sets `requested`, and a second SIGINT or SIGTERM ends the process at once.

  A SIGTERM within a second of another one is the same: a supervisor may signal the launcher, which passes it on, and
  its processes. SIGHUP, sent when the terminal closes, never ends the process: the kernel and the shell may both send
  it, and a scheduler's SIGTERM may follow. A signal that was ignored before, e.g. SIGHUP under `nohup`, stays ignored.

  Outside the main thread, which is the only one to receive signals in Python, the context has no effect.

  Attributes:
    doing: the work of the program after the first signal, for its message.
  """

  def __init__(self, doing: str = 'finishing the step and saving'):
    """Store the arguments; `__enter__` installs the handlers.

    Args:
      doing: see the class.
    """
    self.doing = doing
    self._received: signal.Signals | None = None
    self._requests = StopRequests()
    self._previous = {}

  @property
  def requested(self) -> bool:
    """True after a signal has arrived, at this process or, where they have a monitor, at another one."""
    monitor = monitor_lib.current_monitor()
    return self._received is not None or (monitor is not None and bool(monitor.stops.request))

  @property
  def name(self) -> str:
    """Name of the signal that has arrived, e.g. 'SIGTERM' or 'SIGTERM to process 1'; empty before."""
    monitor = monitor_lib.current_monitor()
    if monitor is not None and monitor.stops.request:
      return monitor.stops.request
    if self._received is None:
      return ''
    return self._received.name

  @property
  def ends_waits(self) -> bool:
    """True if the request ends a wait at once: several processes wait for the next point at which all of them stop."""
    return self.requested and jax.process_count() == 1

  def is_due(self, *, may_wait: bool = False) -> bool:
    """Return whether to stop at this point, such as between two steps, which all processes reach in the same order.

    Several processes agree on it by their monitor.

    Args:
      may_wait: whether processes without a monitor, whose program has called `jax.distributed.initialize`, wait for
        each other to agree. Otherwise they continue to the next point at which they may.
    """
    if jax.process_count() == 1:
      return self.requested
    monitor = monitor_lib.current_monitor()
    if monitor is None:
      return may_wait and multihost.any_process(self.requested)
    return monitor.stops.is_due()

  def __enter__(self) -> 'StopSignals':
    if threading.current_thread() is threading.main_thread():
      self._previous = {
        number: signal.signal(number, self._handle)
        for number in _SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
      }
    return self

  def __exit__(self, exc_type, error: BaseException | None, traceback) -> None:
    for number, handler in self._previous.items():
      signal.signal(
        number, signal.SIG_DFL if handler is None else handler
      )  # None: not installed from Python.
    is_repeated = signal.SIGTERM in self._previous and self._requests.is_repeated(signal.SIGTERM)
    if error is not None and is_repeated:
      # The program is ending, perhaps already saved, with a status that the same SIGTERM must not replace.
      signal.signal(signal.SIGTERM, _Repeated(self._requests))
    self._previous = {}

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    if self._requests.add(number):
      # Checkpoints are atomic: an incomplete one is discarded.
      os._exit(128 + number)
    if self._received is not None:
      return
    self._received = signal.Signals(number)
    if number == signal.SIGINT:
      again = 'press Ctrl-C again'
    elif number == signal.SIGTERM:
      again = 'send SIGTERM again'
    else:
      again = 'send SIGTERM twice'
    new_line = '\n' if os.isatty(2) else ''  # after the ^C of the terminal
    # `print` is not reentrant: the handler may interrupt a `print` of the main program.
    standard_streams.write_without_waiting(
      f'{new_line}{self._received.name}: {self.doing}; {again} to exit immediately.\n'
    )
