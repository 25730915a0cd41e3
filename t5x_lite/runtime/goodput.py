"""Goodput of a run: how its time divides into training steps, other work, repeated work and downtime."""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

from t5x_lite.formatting import format_duration
from t5x_lite.runtime.events import PHASES
from t5x_lite.runtime.events import Event

# Shares of the time of a run, and their names for people.
SHARES: Mapping[str, str] = {
  'step': 'training steps',
  'data': 'waiting for data',
  'evaluation': 'evaluation',
  'saving': 'saving',
  'compiling': 'compiling',
  'starting': 'starting',
  'other': 'other',
  'repeated': 'repeated work',
  'down': 'down',
}
# Causes of a stop after which the run was complete: the time until somebody continues it does not count.
_COMPLETE = ('completed', 'action')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
  """Time of a run, over all of its processes one after the other.

  Attributes:
    seconds: share, a key of `SHARES`, to its seconds. 'repeated' is all work after the checkpoint to which a restart or
      a rollback returned, of any phase; 'down' is the time between the last event of a process that did not complete
      the run and the start of the next process. The other shares do not contain these.
    num_starts: number of processes.
  """

  seconds: Mapping[str, float]
  num_starts: int

  @property
  def total_seconds(self) -> float:
    """Sum of all shares."""
    return sum(self.seconds.values())

  @property
  def details(self) -> dict[str, Any]:
    """JSON values for the event 'summary'."""
    return {
      'goodput': round(self.seconds['step'] / max(self.total_seconds, 1e-9), 6),
      'num_starts': self.num_starts,
      'total_seconds': {name: round(seconds, 3) for name, seconds in self.seconds.items()},
    }

  def describe(self) -> str:
    """Return one line; its percentages add up to 100.

    >>> print(Goodput(seconds={'step': 50.0, 'data': 0.0, 'saving': 25.0, 'down': 25.0}, num_starts=2).describe())
    Time of the run 1:40, started 2 times: 50.0% training steps, 25.0% saving, 25.0% down.
    """
    total = max(self.total_seconds, 1e-9)
    tenths = _rounded([1000 * seconds / total for seconds in self.seconds.values()])
    shares = []
    for name, tenth in zip(self.seconds, tenths, strict=True):
      if tenth:
        shares.append(f'{tenth // 10}.{tenth % 10}% {SHARES[name]}')
    starts = ''
    if self.num_starts > 1:
      starts = f', started {self.num_starts} times'
    return f'Time of the run {format_duration(self.total_seconds)}{starts}: {", ".join(shares)}.'


def measure(events: Iterable[Event]) -> Goodput:
  """Return the goodput of the events of a run, in order, of one process at a time."""
  total = dict.fromkeys(SHARES, 0.0)
  # Time by phase that a restart may turn into repeated work, with the steps at its end, which never decrease.
  kept: list[tuple[int, Mapping[str, float]]] = []
  num_starts = 0
  previous = 0.0
  is_complete = True
  was_complete = False

  def repeat_after(step: int) -> None:
    while kept and kept[-1][0] > step:
      _, seconds = kept.pop()
      total['repeated'] += sum(seconds.values())

  def add(seconds: Mapping[str, float]) -> None:
    for phase, value in seconds.items():
      share = phase if phase in PHASES else 'other'
      total[share] += value

  for event in events:
    if event.kind == 'start':
      was_complete = is_complete and num_starts > 0
      num_starts += 1
      if not is_complete:
        total['down'] += max(0.0, event.wall_time - previous)
      is_complete = False
    elif event.kind == 'stop':
      # A command that fails before its first step, e.g. by a wrong option, leaves a complete run complete.
      cause = event.details.get('cause')
      is_complete = cause in _COMPLETE or was_complete and cause == 'error'
    elif event.kind == 'first_step':
      was_complete = False
    elif event.kind == 'restored' and event.step is not None:
      repeat_after(event.step)
    # The time of a start is not repeated work.
    if event.step is None or event.kind == 'restored':
      add(event.seconds)
    else:
      kept.append((event.step, event.seconds))
    if event.kind == 'rollback':
      repeat_after(event.details['to_step'])
    previous = event.wall_time
  for _, seconds in kept:
    add(seconds)
  return Goodput(seconds=total, num_starts=num_starts)


def _rounded(values: list[float]) -> list[int]:
  """Round to integers whose sum is the rounded sum of `values`."""
  whole = [int(value) for value in values]
  by_remainder = sorted(range(len(values)), key=lambda i: whole[i] - values[i])
  num_missing = round(sum(values)) - sum(whole)
  for i in by_remainder[:num_missing]:
    whole[i] += 1
  return whole
