"""Reports a run that hangs, e.g. in a collective that waits for a dead process, and ends it if that is asked for."""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import os
import statistics
import threading
import time

from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.runtime.stacks import print_stacks

# Activity to the seconds after which the watchdog warns; where this is the usual pace, after _NUM_MEDIANS medians.
WARNING_SECONDS = {'step': 600.0, 'evaluation': 1800.0, 'saving': 1800.0}
_NUM_MEDIANS = 20
# Number of the last durations that give the median.
_NUM_DURATIONS = 101
# The thread looks so many times within the shortest limit, at least at the longest period, in seconds.
_LOOKS_PER_LIMIT = 20
_LONGEST_PERIOD = 10.0


@dataclasses.dataclass(eq=False)
class _Activity:
  """Limits of an activity in seconds, and how long it took lately."""

  noun: str
  option: str
  max_seconds: float | None
  warning_seconds: float
  durations: collections.deque[float] = dataclasses.field(
      default_factory=lambda: collections.deque(maxlen=_NUM_DURATIONS))

  def is_late(self, seconds: float) -> bool:
    """Returns True if that long is worth a warning."""
    if seconds < self.warning_seconds:
      return False
    durations = list(self.durations)
    return not durations or seconds >= _NUM_MEDIANS * statistics.median(durations)


class Watchdog:
  """A thread that acts when, during a watched activity, `beat` is not called for too long.

  It warns once, with the stacks of all threads, and ends the process where the activity has a limit. Only time in which
  this process could run counts: a process that was stopped (SIGSTOP) and continued is as late as it was before.

  Activities are 'step', 'evaluation' (a batch of one) and 'saving', each with a limit of its own. Compiling, restoring
  and waiting for training data are not watched.
  """

  def __init__(self, max_step_seconds: float | None = None, on_timeout: Callable[[str], None] | None = None, *,
               max_evaluation_seconds: float | None = None, max_saving_seconds: float | None = None,
               on_warning: Callable[[str], None] = print_stacks,
               warning_seconds: Mapping[str, float] = WARNING_SECONDS):
    """Configures the watchdog; the thread starts with the first `watching`.

    Args:
      max_step_seconds: the longest a training step may take; None sets no limit.
      on_timeout: called with a message when a limit is exceeded; by default writes the message and the stacks of all
        threads to stderr and ends the process with status 4.
      max_evaluation_seconds: the longest a batch of an evaluation may take, its metrics included; None sets no limit.
      max_saving_seconds: the longest that training may wait for a save; None sets no limit.
      on_warning: called with a message at a warning; by default writes it and the stacks of all threads to stderr.
      warning_seconds: activity to the seconds after which to warn, unless 20 times the median is longer.

    Raises:
      ConfigError: a limit is not positive.
    """
    self._activities = {
        'step': _Activity('step', 'max_step_seconds', max_step_seconds, warning_seconds['step']),
        'evaluation': _Activity('batch of an evaluation', 'max_evaluation_seconds', max_evaluation_seconds,
                                warning_seconds['evaluation']),
        'saving': _Activity('save', 'max_saving_seconds', max_saving_seconds, warning_seconds['saving'])}
    limits = list(warning_seconds.values())
    for activity in self._activities.values():
      if activity.max_seconds is not None:
        if activity.max_seconds <= 0:
          raise ConfigError(f'{activity.option} is {activity.max_seconds}; expected a positive number, or None for no '
                            'limit.')
        limits.append(activity.max_seconds)
    self._period = min(min(limits) / _LOOKS_PER_LIMIT, _LONGEST_PERIOD)
    self._on_timeout = on_timeout or _print_stacks_and_exit
    self._on_warning = on_warning
    # Replaced as a whole at each sign of life, so that the thread needs no lock: what is watched, after which step.
    self._watched: tuple[_Activity | None, int | None] = (None, None)
    self._alive_at = 0.0
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None

  def beat(self, step: int | None = None) -> None:
    """Tells the watchdog that the activity makes progress.

    Args:
      step: number of steps at the completed one; None if none was completed, as while the run waits for data.
    """
    activity, last = self._watched
    now = time.monotonic()
    if activity is not None and step is not None:
      activity.durations.append(now - self._alive_at)
    self._alive_at = now
    self._watched = (activity, last if step is None else step)

  @contextlib.contextmanager
  def watching(self, name: str | None = 'step') -> Iterator[None]:
    """Context of an activity; entering it counts as a beat. An activity around it is not watched meanwhile.

    Args:
      name: 'step', 'evaluation' or 'saving'; None to watch nothing, for instance while a program is compiled.
    """
    if self._thread is None:
      self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)
      self._thread.start()
    outer, step = self._watched
    self._watched = (None if name is None else self._activities[name], step)
    self.beat()
    try:
      yield
    finally:
      self._watched = (outer, self._watched[1])
      self.beat()

  def close(self) -> None:
    """Ends the thread."""
    self._closed.set()
    if self._thread is not None:
      self._thread.join()

  def _watch(self) -> None:
    seen, seconds, warned = None, 0.0, False
    now = time.monotonic()
    while not self._closed.wait(self._period):
      previous, now = now, time.monotonic()
      if self._watched is not seen:
        seen, seconds, warned = self._watched, 0.0, False
        continue
      seconds += awake_seconds(now - previous, self._period)
      activity, step = seen
      if activity is None:
        continue
      after = '' if step is None else f' after step {step}'
      if activity.max_seconds is not None and seconds >= activity.max_seconds:
        self._on_timeout(
            f'Watchdog: no {activity.noun} was completed for {activity.max_seconds:g} seconds{after}. Raise '
            f'{activity.option} if that is the usual pace, else run the same command again.')
        seconds = float('-inf')  # once per hang
      elif not warned and activity.is_late(seconds):
        warned = True
        self._on_warning(
            f'warning: Watchdog: no {activity.noun} was completed for {seconds:.3g} seconds{after}. The run continues '
            f'to wait; `{activity.option}` sets a limit.')


def awake_seconds(elapsed: float, expected: float) -> float:
  """Returns how many of the `elapsed` seconds of a wait count as time in which the process ran.

  A wait that lasts much longer than expected means that the process was stopped, and with it the work that is waited
  for.

  >>> awake_seconds(1.5, expected=1.0), awake_seconds(3600.0, expected=1.0)
  (1.5, 1.0)
  """
  return elapsed if elapsed <= 2 * expected else expected


def _print_stacks_and_exit(message: str) -> None:
  print_stacks(message)
  # The main thread hangs: nothing that waits for it, as sys.exit would, can end the process. What is being saved is
  # discarded by the next start, as after a kill; finished checkpoints stay.
  os._exit(ExitCode.WATCHDOG)
