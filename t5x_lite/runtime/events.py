"""Events of a run, as values and as lines of the file `events.jsonl`.

A line is one event: `{"event": "save_begun", "wall_time": 1700000000.123, "step": 100, "process": 0, "seconds":
{"step": 9.1, "data": 0.2}, "checkpoint": 100}`. `seconds` is the time since the previous event of the process, divided
into phases, so that the file accounts for all of it.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import os
from typing import Any

from t5x_lite.storage import json_lines

EVENTS_FILE = 'events.jsonl'
# Phases of a run. Time outside of a phase is 'starting' before the first step and 'other' after it.
PHASES = ('step', 'data', 'evaluation', 'saving', 'compiling', 'starting', 'other')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
  """An event of a run.

  Attributes:
    kind: 'start', 'restored', 'data_sampled', 'compiled', 'first_step', 'progress', 'evaluation_begun',
      'evaluation_ended', 'save_begun', 'save_committed', 'warning', 'rollback', 'missing', 'stop' or 'summary'.
    wall_time: seconds since 1970, UTC.
    step: number of completed steps; None before the run has its state.
    process: index of the process.
    seconds: phase, one of `PHASES`, to the seconds that the process spent in it since its previous event.
    details: further JSON values by name, which depend on the kind.
  """

  kind: str
  wall_time: float
  step: int | None = None
  process: int = 0
  seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def to_line(self) -> str:
    """Return the line of the event in the file."""
    return json_lines.to_line(
      {
        'event': self.kind,
        'wall_time': round(self.wall_time, 3),
        'step': self.step,
        'process': self.process,
        'seconds': {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
        **self.details,
      }
    )


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
  """Yield the events of a file in order; a line that is not an event, such as one cut off by a kill, is omitted."""
  for _, row in json_lines.read(path):
    if row is not None and {'event', 'wall_time', 'step', 'process', 'seconds'} <= row.keys():
      yield Event(
        kind=row.pop('event'),
        wall_time=row.pop('wall_time'),
        step=row.pop('step'),
        process=row.pop('process'),
        seconds=row.pop('seconds'),
        details=row,
      )
