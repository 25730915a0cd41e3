"""Lines of the log about batches and steps, the summary of the average time of a step, and memory of devices."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import time
from typing import Any

import jax

from t5x_lite import checks
from t5x_lite import metrics as metrics_lib
from t5x_lite import runtime
from t5x_lite import tree_utils
from t5x_lite.apps.common import report
from t5x_lite.formatting import format_number
from t5x_lite.trainer import summaries
from t5x_lite.trainer.non_finite import NON_FINITE_STEPS
from t5x_lite.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
  """Log of a run's batches and steps.

  Attributes:
    num_batches: number of batches whose shapes are logged at the start of a process.
    num_first_steps: number of steps whose metrics are logged at the start of a process.
    period: number of steps between later lines, which are counted from step 0 of the model. The average time of a step
      is then written too, as `timing/average_step_seconds` to the TensorBoard events. None for no such lines.
    device_memory: whether to log the memory of the devices, and to write it with the training metrics; None does so if
      the devices report it and are not CPUs.

  Raises:
    ConfigError: an option is out of range.
  """

  num_batches: int = 3
  num_first_steps: int = 5
  period: int | None = 100
  device_memory: bool | None = None

  def __post_init__(self):
    count = checks.number(at_least=0, integer=True)
    checks.check(
      'LogConfig',
      vars(self),
      num_batches=count,
      num_first_steps=count,
      period=checks.number(at_least=1, integer=True).or_none(),
      device_memory=checks.instance((bool, type(None)), 'True, False or None'),
    )


class StepLog:
  """Logs batches and steps. Nothing here waits for a device: the metrics that are passed are known."""

  def __init__(
    self,
    cfg: LogConfig,
    progress: runtime.Progress,
    memory: runtime.DeviceMemory,
    manager: summaries.MetricsManager,
    first_step: int,
    *,
    speed_fn: Callable[[float], str] = lambda seconds: '',
    clock=time.perf_counter,
  ):
    """Start the clock.

    Args:
      cfg: configuration.
      progress: log; its `step` is updated.
      memory: memory of the devices.
      manager: metrics manager of training.
      first_step: number of completed steps at the start of this process.
      speed_fn: describes the speed of steps of a duration in seconds.
      clock: returns seconds.
    """
    self._cfg = cfg
    self._progress = progress
    self._memory = memory
    self._manager = manager
    self._first_step = first_step
    self._speed_fn = speed_fn
    self._clock = clock
    self._num_batches = 0
    self._shapes = None
    # Seconds of the steps since the last line, and their number.
    self._seconds = 0.0
    self._num_steps = 0
    manager.host_metrics_fn = memory.metrics
    self.start_clock()

  def start_clock(self) -> None:
    """Exclude the time since the last step, such as that of an evaluation, from the average time of a step."""
    self._started = self._clock()

  def logged(self, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Return an iterator over `batches` that logs the shapes of the first ones."""
    if self._num_batches < self._cfg.num_batches:
      return self._log_shapes(batches)
    return batches

  def _log_shapes(self, batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
      if self._num_batches < self._cfg.num_batches:
        self._num_batches += 1
        before = self._shapes
        self._shapes = tree_utils.shapes_key(batch)
        text = 'the same shapes'
        if self._shapes != before:
          arrays = [f'{name} {dtype}{list(shape)}' for name, shape, dtype in self._shapes]
          text = '  '.join(arrays)
        self._progress.log(f'Batch {self._num_batches}: {text}')
      yield batch

  def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Log a completed step if a line is due.

    Args:
      step: number of completed steps.
      metrics: `clu.metrics.Metric`s of the last of them.
    """
    self._progress.step = step
    now = self._clock()
    self._seconds = self._seconds + now - self._started
    self._num_steps = self._num_steps + 1
    self._started = now
    is_periodic = self._cfg.period is not None and step % self._cfg.period == 0
    if not is_periodic and not 0 < step - self._first_step <= self._cfg.num_first_steps:
      return
    average = self._seconds / self._num_steps
    self._seconds = 0.0
    self._num_steps = 0
    if is_periodic:
      self._manager.write_scalars(step, {'timing/average_step_seconds': average}, events_only=True)
    if self._progress.enabled:
      parts = [
        f'step {step:,}',
        _describe(metrics),
        f'{format_number(average)} s/step',
        self._speed_fn(average),
        self._memory.describe(),
      ]
      self._progress.log('  '.join(part for part in parts if part))


def _describe(metrics: Mapping[str, Any]) -> str:
  """Return the metrics of one step as text, with the parts of the loss if it has several.

  Rates, statistics of single parameters and the number of non-finite steps, of which the trainer warns, are left out.
  """
  chosen = {
    name: metric
    for name, metric in metrics.items()
    if name != NON_FINITE_STEPS
    and not isinstance(metric, metrics_lib.OfLastStep)
    and not metrics_lib.is_time_metric(metric)
  }
  values = summaries.compute_values(jax.device_get(chosen), num_steps=1)
  text = report.format_metrics(values)
  parts = {}
  for name, value in values.items():
    if name.endswith('_loss') and name.count('/') < 2:
      number = float(value.value)
      if number:
        parts[name] = number
  if len(parts) < 2:
    return text
  shown = [text]
  for name, number in parts.items():
    if f'{name} ' not in text:
      shown.append(f'{name} {format_number(number)}')
  return '  '.join(shown)
