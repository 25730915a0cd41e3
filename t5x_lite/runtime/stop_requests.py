"""Requests to stop: which signal repeats an earlier one, and the step or other point at which all processes stop."""

from collections.abc import Callable
import signal
import threading
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


class StopAgreement:
  """Agreement in one process. The processes exchange `request`, `limit` and `stop_at`, see `Monitor`.

  Points are counted, and all processes come to the same ones in the same order. A process that hears of the request
  continues at most to its next point, `limit`, until it knows the largest limit, at which all stop. The limit is set by
  another thread than the one that comes to the points, which may be waiting for a process that waits at its limit.

  Attributes:
    request: signal and process of the request, e.g. 'SIGTERM to process 1'; empty before.
    limit: number of the point that this process does not pass without knowing `stop_at`; None before a request.
    has_agreed: True if all processes stop together.
  """

  def __init__(self):
    """Begin without a request."""
    self.request = ''
    self.limit: int | None = None
    self.has_agreed = False
    self._lock = threading.Lock()
    self._point = 0
    self._stop_at: int | None = None
    self._is_known = threading.Event()

  @property
  def is_pending(self) -> bool:
    """True if a stop was requested and the point is not known yet."""
    return bool(self.request) and not self._is_known.is_set()

  def begin(self, request: str) -> None:
    """Note a request; only the first counts."""
    with self._lock:
      if not self.request:
        self.request = request
        self.limit = self._point + 1

  def agree(self, stop_at: int) -> None:
    """Note the point at which all stop, the largest limit of all processes."""
    self._stop_at = stop_at
    self._is_known.set()

  def is_due(self) -> bool:
    """Count a point, and return whether all processes stop at it; may wait for the agreement."""
    with self._lock:
      self._point += 1
      if self.limit is None or self._point < self.limit:
        return False
    self._is_known.wait()
    assert self._stop_at is not None  # `agree` has set it
    is_due = self._point >= self._stop_at
    self.has_agreed |= is_due
    return is_due
