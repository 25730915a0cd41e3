"""Ctrl-C, SIGTERM and SIGHUP as a request: finish the step, save, say how to resume."""

import contextlib
import os
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
  """Context within which a signal sets `requested`, and a second SIGINT or SIGTERM ends the process at once.

  SIGHUP, sent when the terminal closes, only requests: the kernel and the shell may both send it, and a scheduler's
  SIGTERM may come with it. A signal that was ignored before, as `nohup` does with SIGHUP, stays ignored.

  Outside the main thread, where Python takes no signals, it changes nothing and `requested` stays false.

  Attributes:
    doing: what the program does after the first signal, for the line that it prints then.
  """

  def __init__(self, doing: str = 'finishing the step and saving'):
    """Takes nothing over yet; see `__enter__`.

    Args:
      doing: see the class.
    """
    self.doing = doing
    self._received: signal.Signals | None = None
    self._asked = False  # by SIGINT or SIGTERM
    self._previous = {}

  @property
  def requested(self) -> bool:
    """Whether a signal has arrived."""
    return self._received is not None

  @property
  def name(self) -> str:
    """Name of the signal that arrived, e.g. 'SIGTERM'; empty if none has."""
    return '' if self._received is None else self._received.name

  def __enter__(self) -> 'StopSignals':
    if threading.current_thread() is threading.main_thread():
      self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS
                        if signal.getsignal(number) is not signal.SIG_IGN}
    return self

  def __exit__(self, *exc_info) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed from Python
    self._previous = {}

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    if number != signal.SIGHUP:
      if self._asked:
        # Checkpoints are atomic: whatever is being written now is simply not there.
        os._exit(128 + number)
      self._asked = True
    if self._received is not None:
      return
    self._received = signal.Signals(number)
    again = 'once more' if self._asked else 'SIGTERM twice'
    # Not print(): a handler may interrupt a print() of the main program, whose stream is then locked.
    with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
      os.write(2, f'\n{self._received.name}: {self.doing}; {again} to exit at once.\n'.encode())
