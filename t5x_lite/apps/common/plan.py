"""The plan of a run: between which steps it trains, and what it does where it pauses. Pure functions of numbers."""

from collections.abc import Collection, Iterator, Sequence
import dataclasses

from t5x_lite.errors import ConfigError
from t5x_lite.evaluation import INFERENCE_EVAL, TRAINING_EVAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
  """Steps that are trained without a pause, and what follows. A summary is written at the end of every stretch.

  Attributes:
    first: number of steps taken before.
    last: number of steps taken at its end.
    evaluate: evaluate with given targets at its end.
    infer: evaluate by decoding at its end.
    save: save a checkpoint at its end, after evaluating.
    collect_garbage: collect garbage at its end.
  """

  first: int
  last: int
  evaluate: bool = False
  infer: bool = False
  save: bool = False
  collect_garbage: bool = False

  @property
  def num_steps(self) -> int:
    """Number of steps in the stretch."""
    return self.last - self.first

  @property
  def evaluations(self) -> tuple[str, ...]:
    """The kinds of evaluation at its end."""
    return (TRAINING_EVAL,) * self.evaluate + (INFERENCE_EVAL,) * self.infer


@dataclasses.dataclass(frozen=True, kw_only=True)
class When:
  """When a run does something.

  Attributes:
    period: every so many steps, counted from step 0 of the model.
    steps: further steps.
    at_end: after the last step.
  """

  period: int | None = None
  steps: Collection[int] = ()
  at_end: bool = False

  def is_due(self, step: int, last_step: int) -> bool:
    """Returns whether it is done after `step` of a run that ends at `last_step`."""
    return (self.at_end and step == last_step) or _is_due(step, self.period) or step in self.steps


def plan_steps(
    first_step: int, last_step: int, *, evaluate: When = When(at_end=True), infer: When = When(),
    save: When = When(at_end=True), collect_garbage: When = When(), pause: When = When()) -> Iterator[Stretch]:
  """Yields the stretches of a run.

  Periods count from step 0 of the model, not from the start of this process, so that a resumed run pauses exactly where
  an uninterrupted one does. They need not divide each other.

  Args:
    first_step: steps taken before.
    last_step: steps taken at the end.
    evaluate: when to evaluate with given targets.
    infer: when to evaluate by decoding.
    save: when to save.
    collect_garbage: when to collect garbage.
    pause: when to pause for a summary alone.

  >>> [(s.last, s.evaluate, s.save)
  ...  for s in plan_steps(0, 10, evaluate=When(period=4, at_end=True), save=When(period=6, at_end=True))]
  [(4, True, False), (6, False, True), (8, True, False), (10, True, True)]
  """
  actions = {'evaluate': evaluate, 'infer': infer, 'save': save, 'collect_garbage': collect_garbage}
  whens = (*actions.values(), pause)
  explicit = sorted({s for when in whens for s in when.steps if first_step < s <= last_step}, reverse=True)
  periods = [when.period for when in whens if when.period]
  step = first_step
  while step < last_step:
    while explicit and explicit[-1] <= step:
      explicit.pop()
    stop = min([last_step, *((step // p + 1) * p for p in periods), *explicit[-1:]])
    yield Stretch(first=step, last=stop, **{name: when.is_due(stop, last_step) for name, when in actions.items()})
    step = stop


def total_steps_of_run(total_steps: int | None, relative_steps: int | None, start_step: int) -> int:
  """Returns the step at which a run ends.

  Args:
    total_steps: counted from the model's first step.
    relative_steps: counted from `start_step`; exactly one of the two is given.
    start_step: the step at which the run first started, which a restart does not change.

  Raises:
    ConfigError: both or neither are given, or one is out of range.
  """
  if (total_steps is None) == (relative_steps is None):
    raise ConfigError(f'total_steps={total_steps} and relative_steps={relative_steps}: expected exactly one of them. '
                      'total_steps counts from the first step of the model, relative_steps from the checkpoint that '
                      'the run starts from. Set the other to None.')
  name, value = ('total_steps', total_steps) if relative_steps is None else ('relative_steps', relative_steps)
  if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
    raise ConfigError(f'{name} is {value!r}; expected a whole number from 1 to 2**31 - 1, since steps are int32.')
  return total_steps if relative_steps is None else start_step + relative_steps


def check_period(name: str, value: int | None, *, zero_is_never: bool = False) -> None:
  """Refuses a period that is no positive number.

  Raises:
    ConfigError: see above.
  """
  lowest = 0 if zero_is_never else 1
  if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < lowest):
    raise ConfigError(f'{name} is {value!r}; expected a whole number of at least {lowest}, or None.')


def describe_plan(stretches: Sequence[Stretch]) -> str:
  """Returns the plan as text for people: how many pauses of each kind, and where.

  >>> print(describe_plan(list(plan_steps(0, 10, evaluate=When(period=5, at_end=True), pause=When(period=2)))))
  steps        1 to 10
  summaries    6: 2, 4, 5, 6, 8, 10
  evaluations  2: 5, 10
  checkpoints  1: 10
  """
  if not stretches:
    return 'steps        none: the run is complete'
  evaluations, decodings = ([s.last for s in stretches if s.evaluate], [s.last for s in stretches if s.infer])
  if not evaluations or not decodings or evaluations == decodings:
    evaluations, decodings = evaluations or decodings, []
  rows = [('summaries', [s.last for s in stretches]), ('evaluations', evaluations), ('decodings', decodings),
          ('checkpoints', [s.last for s in stretches if s.save]),
          ('collections', [s.last for s in stretches if s.collect_garbage])]
  lines = [f'{"steps":<13}{stretches[0].first + 1:,} to {stretches[-1].last:,}']
  lines += [f'{name:<13}{len(steps):,}: {_shortened(steps)}' for name, steps in rows if steps]
  return '\n'.join(lines)


def _is_due(step: int, period: int | None) -> bool:
  return bool(period) and step % period == 0


def _shortened(steps: Sequence[int], limit: int = 8) -> str:
  if len(steps) <= limit:
    return ', '.join(f'{step:,}' for step in steps)
  return f'{", ".join(f"{step:,}" for step in steps[:limit - 2])}, ..., {steps[-1]:,}'
