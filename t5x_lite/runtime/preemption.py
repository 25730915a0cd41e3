"""Ctrl-C and SIGTERM as a polite request: finish the step, save, say how to go on."""

import os
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
  """Context within which the first SIGINT or SIGTERM sets `requested`, and the second ends the process at once.

  Outside the main thread, where Python takes no signals, it changes nothing and `requested` stays false.
  """

  def __init__(self, doing: str = 'finishing the step and saving'):
    """Takes nothing over yet; see `__enter__`.

    Args:
      doing: what the program does after the first signal, for the line that it prints then.
    """
    self._doing = doing
    self._received: signal.Signals | None = None
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
      self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
    return self

  def __exit__(self, *exc_info) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous = {}

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    if self._received is not None:
      # Checkpoints are atomic: whatever is being written now is simply not there.
      os._exit(128 + number)
    self._received = signal.Signals(number)
    # Not print(): a handler may interrupt a print() of the main program, whose stream is then locked.
    os.write(2, f'\n{self._received.name}: {self._doing}; once more to exit at once.\n'.encode())
