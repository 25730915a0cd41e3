"""Watchdog that reports a hanging run, e.g. in a collective that waits for a dead process, and may end it."""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import os
import threading
import time
from typing import Literal, TypeAlias

import numpy as np

from t5x_lite import checks
from t5x_lite.errors import ExitCode
from t5x_lite.runtime.stacks import print_stacks

# Seconds until a warning, by activity; if the median is long, _NUM_MEDIANS medians.
WARNING_SECONDS = {'step': 600.0, 'evaluation': 1800.0, 'saving': 1800.0}
_NUM_MEDIANS = 20
# Limit of a step: 'auto' is the larger of these seconds and so many medians.
_Seconds: TypeAlias = float | Literal['auto'] | None
_AUTO = 'auto'
_AUTO_SECONDS = 1800.0
_AUTO_MEDIANS = 50
# Number of recent durations for the median.
_NUM_DURATIONS = 101
# Number of checks within the shortest limit, and maximum seconds between two checks.
_CHECKS_PER_LIMIT = 20
_MAX_PERIOD = 10.0


@dataclasses.dataclass(eq=False)
class Activity:
  """Limits and recent durations of an activity, in seconds.

  Attributes:
    noun: name of a unit of the activity, such as 'step'.
    option: option with the limit.
    max_seconds: value of this option.
    warning_seconds: seconds until a warning.
    auto_seconds: smallest limit with `max_seconds='auto'`.
    durations: of the last completed units.
    num_completed: number of completed units.
    spent_seconds: time of the unit that is not completed, before the activity was left.
  """

  noun: str
  option: str
  max_seconds: _Seconds
  warning_seconds: float
  auto_seconds: float = _AUTO_SECONDS
  durations: collections.deque[float] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_NUM_DURATIONS)
  )
  num_completed: int = 0
  spent_seconds: float = 0.0

  @property
  def limit(self) -> float | None:
    """Seconds after which the process ends; None for no limit, with 'auto' also in the first unit."""
    if self.max_seconds != _AUTO:
      return self.max_seconds
    durations = list(self.durations)
    if not durations:
      return None
    return max(self.auto_seconds, _AUTO_MEDIANS * float(np.median(durations)))

  def complete(self, seconds: float) -> None:
    """Add the duration of a unit, in seconds since the activity was entered or the last unit was completed.

    The first unit, which may compile or load programs, counts only until the second.
    """
    if self.num_completed == 1:
      self.durations.clear()
    self.durations.append(self.spent_seconds + seconds)
    self.spent_seconds = 0.0
    self.num_completed += 1

  def leave(self, seconds: float) -> None:
    """Add time to the unit that is not completed, for which the activity will be entered again."""
    self.spent_seconds += seconds

  def is_late(self, seconds: float) -> bool:
    """Return whether this duration requires a warning."""
    if seconds < self.warning_seconds:
      return False
    durations = list(self.durations)
    return not durations or seconds >= _NUM_MEDIANS * np.median(durations)


class Watchdog:
  """Thread that acts if `beat` is not called for too long during a watched activity.

  It warns once, with the stacks of all threads, and ends the process if the activity has a limit. The limit 'auto' of a
  step is the larger of 1,800 s and 50 times the median of the steps, from the second step on. With
  `warn_every_seconds` it also warns, in every activity and as often as this time passes, while no step is completed.
  Time in which this process was stopped (SIGSTOP) does not count.

  Activities are 'step', 'evaluation' (one of its batches) and 'saving', with separate limits. 'compiling' has no limit;
  restoring and waiting for training data are not watched either.
  """

  def __init__(
    self,
    max_step_seconds: _Seconds = None,
    on_timeout: Callable[[str], None] | None = None,
    *,
    max_evaluation_seconds: float | None = None,
    max_saving_seconds: float | None = None,
    warn_every_seconds: float | None = None,
    on_warning: Callable[[str], None] = print_stacks,
    phase_fn: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    others_fn: Callable[[], str] = lambda: '',
    others_are_busy_fn: Callable[[], bool] = lambda: False,
    warning_seconds: Mapping[str, float] = WARNING_SECONDS,
    auto_seconds: float = _AUTO_SECONDS,
  ):
    """Configure the watchdog; `start`, or the first `watching`, starts the thread.

    Args:
      max_step_seconds: maximum time of a training step; 'auto' see the class; None for no limit.
      on_timeout: called with a message when a limit is exceeded; by default writes the message and the stacks of all
        threads to stderr and ends the process with status 4.
      max_evaluation_seconds: maximum time of a batch of an evaluation, including its metrics; None for no limit.
      max_saving_seconds: maximum time that training waits for a save; None for no limit.
      warn_every_seconds: interval of warnings while the number of completed steps does not increase, also during
        evaluations, saves, compilation and waits for data; it never ends the process. None for no such warnings.
      on_warning: called with a warning; by default writes it and the stacks of all threads to stderr.
      phase_fn: returns a context that is entered with each activity, from its name; `EventLog.phase` for the goodput.
      others_fn: returns a sentence about the processes of the run for messages, or ''.
      others_are_busy_fn: returns whether another process evaluates, saves or compiles, for which a step of this one
        waits; the limit 'auto' then begins again.
      warning_seconds: seconds until a warning by activity, or 20 times the median if that is longer.
      auto_seconds: smallest limit with 'auto'.

    Raises:
      ConfigError: a limit is not positive.
    """
    seconds = checks.number(above=0).or_none()
    checks.check(
      'train',
      locals(),
      max_step_seconds=checks.Expectation(
        "a number > 0, 'auto' or None",
        lambda value: (isinstance(value, str) and value == _AUTO) or seconds.holds(value),
        "'auto' is the larger of 1,800 s and 50 times the median of the steps.",
      ),
      max_evaluation_seconds=seconds,
      max_saving_seconds=seconds,
      warn_every_seconds=seconds,
    )
    self._warn_every_seconds = warn_every_seconds
    self._activities = {
      'compiling': None,
      'step': Activity(
        'step', 'max_step_seconds', max_step_seconds, warning_seconds['step'], auto_seconds
      ),
      'evaluation': Activity(
        'batch of an evaluation',
        'max_evaluation_seconds',
        max_evaluation_seconds,
        warning_seconds['evaluation'],
      ),
      'saving': Activity(
        'save', 'max_saving_seconds', max_saving_seconds, warning_seconds['saving']
      ),
    }
    limits = [*warning_seconds.values(), auto_seconds]
    for limit in (
      max_step_seconds,
      max_evaluation_seconds,
      max_saving_seconds,
      warn_every_seconds,
    ):
      if limit is not None and limit != _AUTO:
        limits.append(limit)
    self._period = min(min(limits) / _CHECKS_PER_LIMIT, _MAX_PERIOD)
    self._on_timeout = on_timeout or _print_stacks_and_exit
    self._on_warning = on_warning
    self._phase_fn = phase_fn
    self._others_fn = others_fn
    self._others_are_busy_fn = others_are_busy_fn
    # (activity, last step): replaced at each beat, so that the thread needs no lock.
    self._watched: tuple[Activity | None, int | None] = (None, None)
    self._alive_at = 0.0
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    """Start the thread, if it is not running."""
    if self._thread is None:
      self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)
      self._thread.start()

  def beat(self, step: int | None = None) -> None:
    """Report progress of the activity.

    Args:
      step: number of completed steps; None if no step was completed, e.g. while the run waits for data.
    """
    activity, last = self._watched
    now = time.monotonic()
    if activity is not None and step is not None:
      activity.complete(now - self._alive_at)
    self._alive_at = now
    self._watched = (activity, last if step is None else step)

  @contextlib.contextmanager
  def watching(self, name: str = 'step') -> Iterator[None]:
    """Watch an activity within the context; entering it counts as a beat. The outer activity is not watched meanwhile.

    Args:
      name: 'step', 'evaluation', 'saving', or 'compiling', which watches nothing.
    """
    self.start()
    outer, step = self._watched
    self._switch(self._activities[name], step)
    try:
      with self._phase_fn(name):
        yield
    finally:
      self._switch(outer, self._watched[1])

  def _switch(self, activity: Activity | None, step: int | None) -> None:
    """Watch another activity. The time of the last one until now belongs to the unit that it will complete."""
    left = self._watched[0]
    if left is not None:
      left.leave(time.monotonic() - self._alive_at)
    self._watched = (activity, step)
    self.beat()

  def close(self) -> None:
    """End the thread."""
    self._closed.set()
    if self._thread is not None:
      self._thread.join()

  def _others(self) -> str:
    text = self._others_fn()
    return text and f' {text}'

  def _watch(self) -> None:
    seen = (None, None)
    seconds = 0.0
    warned = False
    stillness = _Stillness(self._warn_every_seconds)
    now = time.monotonic()
    while not self._closed.wait(self._period):
      previous = now
      now = time.monotonic()
      awake = awake_seconds(now - previous, self._period)
      if (duration := stillness.add(self._watched[1], awake)) is not None:
        self._on_warning(
          f'warning: Watchdog: no step was completed within {duration:.3g} seconds'
          f'{_after(self._watched[1])}, see `warn_every_seconds`. The run continues.{self._others()}'
        )
      if self._watched is not seen:
        seen = self._watched
        seconds = 0.0
        warned = False
        continue
      seconds += awake
      activity, step = seen
      if activity is None:
        continue
      after = _after(step)
      limit = activity.limit
      is_auto = activity.max_seconds == _AUTO
      if limit is not None and seconds >= limit:
        if is_auto and self._others_are_busy_fn():
          seconds = 0.0
          continue
        remedy = f'Raise {activity.option} if this duration is normal'
        if is_auto:
          remedy = f'Set {activity.option} to a larger number if this duration is normal'
        self._on_timeout(
          f'Watchdog: no {activity.noun} was completed within {limit:g} seconds{after}. {remedy}, otherwise rerun '
          f'the command.{self._others()}'
        )
        seconds = float('-inf')  # Once per hang.
      elif not warned and activity.is_late(seconds):
        warned = True
        text = f'set `{activity.option}` to limit the wait'
        if limit is not None:
          text = f'`{activity.option}` ends it after {limit:g} seconds'
        self._on_warning(
          f'warning: Watchdog: no {activity.noun} was completed within {seconds:.3g} seconds{after}. The run '
          f'continues to wait; {text}.{self._others()}'
        )


class _Stillness:
  """Time without a completed step, which is reported once per interval."""

  def __init__(self, interval: float | None):
    self._interval = interval
    self._step: int | None = None
    self._seconds = 0.0
    self._next = interval

  def add(self, step: int | None, seconds: float) -> float | None:
    """Add time, and return all seconds without a completed step if an interval has ended; otherwise None.

    Args:
      step: number of completed steps; None before the first.
      seconds: time since the last call.
    """
    if self._interval is None or self._next is None:
      return None
    if step != self._step:
      self._step = step
      self._seconds = 0.0
      self._next = self._interval
      return None
    self._seconds += seconds
    if self._seconds < self._next:
      return None
    self._next = self._seconds + self._interval
    return self._seconds


def _after(step: int | None) -> str:
  if step is None:
    return ''
  return f' after step {step}'


def awake_seconds(elapsed: float, expected: float) -> float:
  """Return the number of `elapsed` seconds of a wait in which the process was running.

  A wait that takes much longer than expected means that the process was stopped.

  >>> awake_seconds(1.5, expected=1.0), awake_seconds(3600.0, expected=1.0)
  (1.5, 1.0)
  """
  if elapsed <= 2 * expected:
    return elapsed
  return expected


def _print_stacks_and_exit(message: str) -> None:
  print_stacks(message)
  # The main thread hangs, so that sys.exit would not end the process. An incomplete checkpoint is discarded at the next
  # start, as after a kill.
  os._exit(ExitCode.WATCHDOG)
