"""Plan of a run: stretches of training steps and the work at each pause. Pure functions of numbers."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import logging
import math
import types
from typing import Any, Protocol

from t5x_lite import checkpoints
from t5x_lite.errors import ConfigError
from t5x_lite.evaluation import INFERENCE_EVAL
from t5x_lite.evaluation import TRAINING_EVAL
from t5x_lite.evaluation import When

# Maximum number of steps that the description of a plan shows of each kind.
_NUM_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
  """Training steps without a pause, and the work at the end. A summary is written after every stretch.

  Attributes:
    first: number of completed steps before the stretch.
    last: number of completed steps at its end.
    evaluations: names of the evaluations that follow.
    save: whether a checkpoint is saved, after evaluating.
    collect_garbage: whether garbage is collected.
  """

  first: int
  last: int
  evaluations: tuple[str, ...] = ()
  save: bool = False
  collect_garbage: bool = False

  @property
  def num_steps(self) -> int:
    """Number of steps in the stretch."""
    return self.last - self.first


class Times(Protocol):
  """Steps after which a run does something, such as `evaluation.When`."""

  def is_due(self, step: int, last_step: float) -> bool:
    """Return whether it is due after `step` of a run that ends at `last_step`, or never if that is `math.inf`."""
    ...

  def next_step(self, step: int) -> int | None:
    """Return the first step after `step` at which it may be due, or None."""
    ...


@dataclasses.dataclass(frozen=True)
class SaveTimes:
  """Steps at which the policy of a configuration saves, and the last step.

  Attributes:
    policy: the policy.
  """

  policy: checkpoints.SavePolicy

  def is_due(self, step: int, last_step: float) -> bool:
    """See `Times`."""
    return step == last_step or self.policy.should_save(step)

  def next_step(self, step: int) -> int | None:
    """See `Times`."""
    return self.policy.next_step(step)


def plan_steps(
  first_step: int,
  last_step: float,
  *,
  evaluations: Mapping[str, Times] = types.MappingProxyType({}),
  save: Times = When(at_end=True),
  collect_garbage: Times = When(),
  pause: Times = When(),
) -> Iterator[Stretch]:
  """Yield the stretches of a run.

  Periods count from step 0 of the model, not from the start of this process, so that a resumed run pauses at the same
  steps as an uninterrupted one. Periods need not divide each other.

  Args:
    first_step: number of completed steps at the start.
    last_step: number of completed steps at the end; `math.inf` for stretches without an end, for which a period must be
      set.
    evaluations: when to evaluate, by name.
    save: when to save.
    collect_garbage: when to collect garbage.
    pause: when to pause only for a summary.

  >>> [(s.last, s.evaluations, s.save) for s in plan_steps(
  ...     0, 10, evaluations={'a': When(period=4, at_end=True)}, save=When(period=6, at_end=True))]
  [(4, ('a',), False), (6, (), True), (8, ('a',), False), (10, ('a',), True)]
  """
  step = first_step
  while step < last_step:
    known: list[Any] = [last_step]
    for when in (*evaluations.values(), save, collect_garbage, pause):
      following = when.next_step(step)
      if following is not None:
        known.append(following)
    stop = min(known)
    if stop <= step:
      raise ConfigError(
        f'`next_step({step})` of a policy must be a later step or None, got {stop}. Correct the policy '
        'in `SaveCheckpointConfig.policies`.'
      )
    due = [name for name, when in evaluations.items() if when.is_due(stop, last_step)]
    yield Stretch(
      first=step,
      last=stop,
      save=save.is_due(stop, last_step),
      collect_garbage=collect_garbage.is_due(stop, last_step),
      evaluations=tuple(due),
    )
    step = stop


def warn_of_late_steps(whens: Mapping[str, When], last_step: float) -> None:
  """Warn of each evaluation whose `When.steps` are all after the end of the run.

  Args:
    whens: when each evaluation is due, by its name.
    last_step: see `last_step_of_run`.
  """
  for name, when in whens.items():
    if when.steps and min(when.steps) > last_step:
      logging.getLogger(__name__).warning(
        'No step of `When.steps` of the evaluation %r is within the run, which ends at step %s: the first one is %s.',
        name,
        f'{last_step:,}',
        f'{min(when.steps):,}',
      )


def last_step_of_run(total_steps: int | None, relative_steps: int | None, start_step: int) -> float:
  """Return the step at which a run ends; `math.inf` if no number of steps ends it.

  Args:
    total_steps: number of steps counted from the model's first step.
    relative_steps: number of steps counted from `start_step`; replaces `total_steps`.
    start_step: step at which the run first started; a restart does not change it.
  """
  if relative_steps is not None:
    return start_step + relative_steps
  if total_steps is None:
    return math.inf
  return total_steps


def describe_end(last_step: float, num_epochs: int | None) -> str:
  """Return when a run ends, as text.

  Args:
    last_step: see `last_step_of_run`.
    num_epochs: number of epochs after which the training data ends; None if it does not end.

  >>> describe_end(1000, None), describe_end(1000, 3)
  ('to step 1,000', 'to step 1,000 or the end of the data (num_epochs = 3)')
  >>> describe_end(math.inf, 3), describe_end(math.inf, None)
  ('to the end of the data (num_epochs = 3)', 'until the run is stopped')
  """
  ends = [f'step {last_step:,}'] * (last_step < math.inf)
  ends += [f'the end of the data (num_epochs = {num_epochs})'] * (num_epochs is not None)
  if ends:
    return f'to {" or ".join(ends)}'
  return 'until the run is stopped'


def list_stretches(
  stretches: Iterator[Stretch], last_step: float, longest_period: int
) -> list[Stretch]:
  """Return all stretches of a run; of one without a last step, those of the first eight of its longest periods.

  Args:
    stretches: the stretches of the run.
    last_step: see `last_step_of_run`.
    longest_period: the longest period of the run.
  """
  if last_step < math.inf:
    return list(stretches)
  first = next(stretches)
  end = first.first + _NUM_SHOWN * longest_period
  return [first, *itertools.takewhile(lambda stretch: stretch.last <= end, stretches)]


def describe_plan(
  stretches: Sequence[Stretch], last_step: float, num_epochs: int | None = None
) -> str:
  """Return the plan as text: number and steps of the pauses of each kind.

  Args:
    stretches: see `list_stretches`; the first may have no steps, with the work before the first step.
    last_step: see `last_step_of_run`.
    num_epochs: see `describe_end`.

  >>> whens = {'training_eval': When(period=5, at_end=True), 'inference_eval': When(at_end=True), 'held_out': When(
  ...     steps=[4])}
  >>> print(describe_plan(list(plan_steps(0, 10, evaluations=whens, pause=When(period=2))), 10))
  steps        1 to 10
  summaries    6: 2, 4, 5, 6, 8, 10
  evaluations  2: 5, 10
  decodings    1: 10
  held_out     1: 4
  checkpoints  1: 10
  """
  if not stretches:
    return 'steps        none: the run is complete'
  steps: dict[str, list[int]] = {TRAINING_EVAL: [], INFERENCE_EVAL: []}
  for stretch in stretches:
    for name in stretch.evaluations:
      steps.setdefault(name, []).append(stretch.last)
  evaluations = steps.pop(TRAINING_EVAL)
  decodings = steps.pop(INFERENCE_EVAL)
  if not evaluations or not decodings or evaluations == decodings:
    evaluations = evaluations or decodings
    decodings = []
  rows = [
    ('summaries', [s.last for s in stretches if s.num_steps]),
    ('evaluations', evaluations),
    ('decodings', decodings),
    *steps.items(),
    ('checkpoints', [s.last for s in stretches if s.save]),
    ('collections', [s.last for s in stretches if s.collect_garbage]),
  ]
  width = max(13, *(len(name) + 2 for name, _ in rows))
  end = describe_end(last_step, num_epochs).replace('to step ', 'to ')
  separator = ' ' if end.startswith('to ') else ', '
  lines = [f'{"steps":<{width}}{stretches[0].first + 1:,}{separator}{end}']
  is_endless = last_step == math.inf
  for name, numbers in rows:
    if numbers:
      lines.append(f'{name:<{width}}{_shortened(numbers, is_endless)}')
  return '\n'.join(lines)


def _shortened(steps: Sequence[int], is_endless: bool) -> str:
  first = ', '.join(f'{step:,}' for step in steps[: _NUM_SHOWN - 2])
  if is_endless:
    return f'{first}, ...'
  if len(steps) <= _NUM_SHOWN:
    shown = ', '.join(f'{step:,}' for step in steps)
    return f'{len(steps):,}: {shown}'
  return f'{len(steps):,}: {first}, ..., {steps[-1]:,}'
