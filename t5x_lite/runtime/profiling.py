"""Profile of chosen steps, for TensorBoard's profiler or Perfetto."""

from collections.abc import Callable, Sequence

import jax

from t5x_lite import checks

_STEPS = checks.Expectation(
    '(first, last), such as (100, 105) for five steps, or None',
    lambda steps: steps is None or (isinstance(steps, (list, tuple)) and len(steps) == 2
                                    and all(isinstance(s, int) for s in steps) and 0 <= steps[0] < steps[1]))


class StepProfiler:
  """Profiles the steps of a run between two step counts; the loop pauses at both."""

  def __init__(self, steps: Sequence[int] | None, folder: str):
    """Configure the profiler.

    Args:
      steps: (first, last); the steps after `first` up to `last` are profiled; None profiles nothing.
      folder: folder of the profile, which is written to its `plugins/profile`.

    Raises:
      ConfigError: `steps` is not such a pair.
    """
    checks.check('train', {'profile_steps': steps}, profile_steps=_STEPS)
    self._steps = tuple(steps or ())
    self._folder = folder
    self._tracing = False

  def check(self, start_step: int, last_step: float) -> None:
    """Raise ConfigError if the run does not contain the steps to profile.

    Args:
      start_step: step at which the run first started.
      last_step: last step of the run; `math.inf` if it is unknown.
    """
    if self._steps and not start_step <= self._steps[0] < self._steps[1] <= last_step:
      raise checks.invalid('train', 'profile_steps', f'within the steps of the run, {start_step} to {last_step}',
                           self._steps)

  @property
  def pause_steps(self) -> tuple[int, ...]:
    """Steps at which the loop must pause."""
    return self._steps

  def before(self, step: int) -> None:
    """Start the profile if it begins after `step`; call this before the next step is dispatched."""
    if self._steps and step == self._steps[0] and not self._tracing:
      jax.profiler.start_trace(self._folder)
      self._tracing = True

  def after(self, step: int, wait_fn: Callable[[], None]) -> None:
    """End the profile if it ends at `step`, which was dispatched, after `wait_fn` has waited for it."""
    if self._tracing and step >= self._steps[1]:
      wait_fn()
      self.close()

  def close(self) -> None:
    """End a running profile."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
