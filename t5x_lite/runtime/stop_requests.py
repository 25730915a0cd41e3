"""Signals that ask a process to stop: which of them repeats an earlier one."""

from collections.abc import Callable
import signal
import time

# A supervisor may signal the launcher and its processes at once; the launcher then passes on what they already have.
_SAME_SECONDS = 1.0


class StopRequests:
  """Counts the requests of a user or a scheduler to stop.

  A SIGTERM within a second of another one is the same request. SIGHUP never counts: the kernel, a shell and a scheduler
  may all send it.

  Attributes:
    count: number of requests.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Store the clock, which returns seconds."""
    self.count = 0
    self._clock = clock
    self._terminated_at = -float('inf')

  def add(self, number: int) -> bool:
    """Count a signal; return whether it is a further request, after which the process ends at once."""
    if number == signal.SIGHUP:
      return False
    if number == signal.SIGTERM:
      is_same = self.is_repeated(number)
      self._terminated_at = self._clock()
      if is_same:
        return False
    self.count += 1
    return self.count > 1

  def is_repeated(self, number: int) -> bool:
    """Return whether a signal that comes now is the same SIGTERM as the last one."""
    return number == signal.SIGTERM and self._clock() - self._terminated_at < _SAME_SECONDS
