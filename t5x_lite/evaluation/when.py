"""Policies of when a run evaluates."""

from collections.abc import Callable, Collection, Mapping
import dataclasses

from t5x_lite import checks

_STEP = checks.number(at_least=0, integer=True)
_BOOL = checks.instance(bool, 'True or False')


@dataclasses.dataclass(frozen=True, kw_only=True)
class When:
  """Steps after which a run does something.

  Attributes:
    period: number of steps between two times, counted from step 0 of the model; None or 0 for no period.
    steps: additional steps.
    from_step: first step at which `period`, `steps` and `condition` apply.
    at_start: also before the first step of a new run.
    at_end: also after the last step.
    condition: function of (step, means of the training metrics since the last summary, by name). Where `period` or
      `steps` apply, it must return true; without both it is called after every training summary, every
      `train.stats_period` steps and at each other pause. `at_start` and `at_end` do not need it.

  Raises:
    ConfigError: an option is out of range.
  """

  period: int | None = None
  steps: Collection[int] = ()
  from_step: int = 0
  at_start: bool = False
  at_end: bool = False
  condition: Callable[[int, Mapping[str, float]], bool] | None = None

  def __post_init__(self):
    checks.check(
      'When',
      vars(self),
      period=checks.number(at_least=0, integer=True).or_none(),
      from_step=_STEP,
      steps=checks.Expectation('steps, integers >= 0', lambda steps: all(map(_STEP.holds, steps))),
      at_start=_BOOL,
      at_end=_BOOL,
      condition=checks.Expectation(
        'None or a function of (step, metrics)',
        lambda condition: condition is None or callable(condition),
      ),
    )

  @property
  def is_never(self) -> bool:
    """True if it is due at no step."""
    return not (self.period or self.steps or self.at_start or self.at_end or self.condition)

  def is_due(self, step: int, last_step: int | None) -> bool:
    """Return whether it is due after `step` of a run that ends at `last_step`, if the condition holds."""
    return self.is_due_at_end(step, last_step) or (
      step >= self.from_step
      and (
        bool(self.period)
        and step % self.period == 0
        or step in self.steps
        or self.condition is not None
        and not self.period
        and not self.steps
      )
    )

  def is_due_at_end(self, step: int, last_step: int | None) -> bool:
    """Return whether it is due at `step` because the run ends there."""
    return self.at_end and step == last_step

  def next_step(self, step: int) -> int | None:
    """Return the first step after `step` of `period` and `steps`, or None."""
    after = max(step, self.from_step - 1)
    steps = [s for s in self.steps if s > after]
    if self.period:
      steps.append((after // self.period + 1) * self.period)
    return min(steps, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
  """Condition for `When`: a training metric is below or above a number.

  Attributes:
    metric: name of a training metric, e.g. 'loss'; a summary without it does not satisfy the condition.
    below: upper bound, exclusive; None for none.
    above: lower bound, exclusive; None for none.

  Raises:
    ConfigError: both bounds are None, a bound is not a number, or no number satisfies both.
  """

  metric: str
  below: float | None = None
  above: float | None = None

  def __post_init__(self):
    checks.check(
      'Threshold',
      vars(self),
      metric=checks.instance(str, 'the name of a metric'),
      below=checks.number().or_none(),
      above=checks.number(below=self.below).or_none(),
    )
    if self.below is None and self.above is None:
      raise checks.invalid(
        'Threshold', 'below', 'a number if `above` is None', None, 'Set one of them.'
      )

  def __call__(self, step: int, metrics: Mapping[str, float]) -> bool:
    """Return whether the condition holds for these training metrics."""
    del step
    value = metrics.get(self.metric)
    return (
      value is not None
      and (self.below is None or value < self.below)
      and (self.above is None or value > self.above)
    )
