"""A trace of chosen steps, for TensorBoard's profiler or Perfetto."""

from collections.abc import Sequence
from typing import Any

import jax

from t5x_lite.errors import ConfigError


class StepProfiler:
  """Traces the steps of a run from one step count to another, where the loop pauses at both."""

  def __init__(self, steps: Sequence[int] | None, folder: str):
    """Configures the profiler.

    Args:
      steps: (first, last), the steps after `first` up to `last` are traced; None traces nothing.
      folder: where the trace goes, in its `plugins/profile`.

    Raises:
      ConfigError: `steps` is no such pair.
    """
    if steps is not None:
      if len(steps) != 2 or not all(isinstance(s, int) for s in steps) or not 0 <= steps[0] < steps[1]:
        raise ConfigError(f'profile_steps is {steps!r}; expected (first, last), such as (100, 105) for five steps, or '
                          'None.')
    self._steps = tuple(steps or ())
    self._folder = folder
    self._tracing = False

  def check(self, start_step: int, last_step: int) -> None:
    """Raises ConfigError if the run does not contain the steps to trace.

    Args:
      start_step: the step at which the run began, also where it is resumed later.
      last_step: its last step.
    """
    if self._steps and not start_step <= self._steps[0] < self._steps[1] <= last_step:
      raise ConfigError(f'`profile_steps` must be within the steps of the run, {start_step} to {last_step}, got '
                        f'{self._steps}. Set it to steps of the run, or to None.')

  @property
  def pause_steps(self) -> tuple[int, ...]:
    """Where the loop must pause."""
    return self._steps

  def before(self, step: int) -> None:
    """To be called before the steps after `step` are dispatched."""
    if self._steps and step == self._steps[0] and not self._tracing:
      jax.profiler.start_trace(self._folder)
      self._tracing = True

  def after(self, step: int, state: Any) -> None:
    """To be called after `step` was dispatched; `state` is waited for where the trace ends."""
    if self._tracing and step >= self._steps[1]:
      jax.block_until_ready(state)
      self.close()

  def close(self) -> None:
    """Ends a trace that is still going on."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
