"""Facts of a run for a report, read from its files; nothing that the run names is imported."""

import ast
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import os
import time
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import runtime
from t5x_lite.apps.common import metric_points
from t5x_lite.apps.common import run_files
from t5x_lite.runtime import goodput
from t5x_lite.storage import files
from t5x_lite.trainer import summaries

# A run whose newest event is older has probably ended without a trace.
_SILENT_SECONDS = 600.0
# Cause of the end of a run to its status in words.
_ENDS = {
  'completed': 'finished',
  'data_ended': 'ended with its data',
  'action': 'ended by an action',
  'signal': 'stopped by a signal',
  'other_process': 'stopped by another process',
  'non_finite': 'failed: not finite',
  'error': 'failed',
}
_GOOD_ENDS = ('completed', 'action')
# Details of the event 'data_sampled' that are numbers by feature.
_SAMPLED = ('lengths', 'num_cut', 'num_tokens', 'num_lost')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
  """Facts of a run, as its files have them.

  Attributes:
    name: name of the run on the page.
    path: run directory.
    metrics: metrics by writer.
    events: valid events.
    status: how the run ended, if it has.
    configuration: values of config.gin as text, by name, without secrets and paths.
    facts: see `run_files.facts`.
    steps_saved: steps of the checkpoints.
    read_at: when the files were read, in seconds since 1970.
  """

  name: str
  path: files.Path
  metrics: Mapping[str, metric_points.WriterMetrics]
  events: Sequence[runtime.Event]
  status: run_files.RunStatus
  configuration: Mapping[str, str]
  facts: Mapping[str, Any]
  steps_saved: Sequence[int]
  read_at: float

  @property
  def step(self) -> int:
    """The last step that the run has recorded."""
    steps = [event.step for event in self.events if event.step is not None][-1:]
    if 'train' in self.metrics:
      steps += [int(points[-1, 0]) for points in self.metrics['train'].points.values()]
    return max(steps, default=0)

  @property
  def last_step(self) -> str:
    """The step at which the run ends by its configuration, as text; '' if it is unknown."""
    return self.configuration.get('TRAIN_STEPS', '')

  @property
  def newest(self) -> float:
    """Time of the newest line of any file; NaN if unknown."""
    times = [event.wall_time for event in self.events]
    times += [metrics.wall_time for metrics in self.metrics.values()]
    return max((each for each in times if math.isfinite(each)), default=math.nan)

  @property
  def state(self) -> str:
    """The status in words."""
    if self.status.has_ended:
      return _ENDS.get(self.status.cause, 'failed')
    if self.status.status == 'unknown':
      return 'unknown'
    if self.read_at - self.newest > _SILENT_SECONDS:
      return 'no end recorded'
    return 'running'

  @property
  def is_good(self) -> bool | None:
    """True for a run that has ended as planned, False for one that has not; None if it is running or unknown."""
    if self.status.cause == 'data_ended':  # as NUM_EPOCHS wants it, or too early
      return None
    if self.status.has_ended:
      return self.status.cause in _GOOD_ENDS
    if self.state == 'no end recorded':
      return False
    return None

  @functools.cached_property
  def goodput(self) -> goodput.Goodput | None:
    """Goodput of the run; None if the events do not tell it."""
    try:
      measured = goodput.measure(self.events)
    except (KeyError, TypeError):  # e.g. a rollback without a step, after a change by hand
      return None
    if not measured.num_starts:
      return None
    return measured

  @property
  def sample(self) -> Mapping[str, Any] | None:
    """Details of the first examples, of the event 'data_sampled'; None if the run has no such event."""
    for event in self.events:
      if event.kind == 'data_sampled':
        return event.details
    return None

  @property
  def lengths(self) -> Mapping[str, Any]:
    """Feature lengths of the training data by feature; empty if they are unknown."""
    if self.sample is not None:
      return self.sample.get('lengths', {})
    with contextlib.suppress(ValueError, SyntaxError):
      found = ast.literal_eval(self.configuration.get('TASK_FEATURE_LENGTHS', ''))
      if isinstance(found, dict):
        return found
    return {}


def read(name: str, model_dir: str | os.PathLike[str]) -> RunRecord:
  """Read the files of a run, which may still be training.

  Raises:
    DataError: the run has no metrics, or a file is not a regular file.
  """
  path = files.path(model_dir)
  metrics = metric_points.read_run(path)
  events = []
  if (path / runtime.EVENTS_FILE).is_file():
    events = [
      event for event in runtime.read_events(path / runtime.EVENTS_FILE) if _is_valid(event)
    ]
  return RunRecord(
    name=name,
    path=path,
    metrics=metrics,
    events=events,
    status=run_files.StatusReader(path).read(),
    configuration=run_files.configuration(path),
    facts=run_files.facts(path),
    steps_saved=checkpoints.all_steps(path),
    read_at=time.time(),
  )


def _is_valid(event: runtime.Event) -> bool:
  """Return whether the fields of an event, which a user may have changed, have their types."""
  mappings = [event.seconds]
  numbers = []
  if event.kind == 'data_sampled':
    mappings += [event.details.get(name) for name in _SAMPLED]
    numbers.append(event.details.get('num_examples'))
  return (
    isinstance(event.kind, str)
    and summaries.is_wall_time(event.wall_time)
    and (event.step is None or type(event.step) is int)
    and all(map(_has_numbers, mappings))
    and all(map(_is_number, numbers))
  )


def _has_numbers(value: Any) -> bool:
  return isinstance(value, Mapping) and all(map(_is_number, value.values()))


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
