"""Plan of a run: stretches of training steps and the work at each pause. Pure functions of numbers."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import types
from typing import Protocol

from t5x_lite import checkpoints
from t5x_lite.evaluation import INFERENCE_EVAL, TRAINING_EVAL, When


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

  def is_due(self, step: int, last_step: int) -> bool:
    """Return whether it is due after `step` of a run that ends at `last_step`."""

  def next_step(self, step: int) -> int | None:
    """Return the first step after `step` at which it may be due, or None."""


@dataclasses.dataclass(frozen=True)
class SaveTimes:
  """Steps at which the policy of a configuration saves, and the last step.

  Attributes:
    policy: the policy.
  """

  policy: checkpoints.SavePolicy

  def is_due(self, step: int, last_step: int) -> bool:
    """See `Times`."""
    return step == last_step or self.policy.should_save(step)

  def next_step(self, step: int) -> int | None:
    """See `Times`."""
    return self.policy.next_step(step)


def plan_steps(
    first_step: int, last_step: int, *, evaluations: Mapping[str, Times] = types.MappingProxyType({}),
    save: Times = When(at_end=True), collect_garbage: Times = When(), pause: Times = When()) -> Iterator[Stretch]:
  """Yield the stretches of a run.

  Periods count from step 0 of the model, not from the start of this process, so that a resumed run pauses at the same
  steps as an uninterrupted one. Periods need not divide each other.

  Args:
    first_step: number of completed steps at the start.
    last_step: number of completed steps at the end.
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
    known = (when.next_step(step) for when in (*evaluations.values(), save, collect_garbage, pause))
    stop = min([last_step, *(each for each in known if each is not None)])
    yield Stretch(
        first=step, last=stop, save=save.is_due(stop, last_step),
        collect_garbage=collect_garbage.is_due(stop, last_step),
        evaluations=tuple(name for name, when in evaluations.items() if when.is_due(stop, last_step)))
    step = stop


def total_steps_of_run(total_steps: int | None, relative_steps: int | None, start_step: int) -> int:
  """Return the step at which a run ends.

  Args:
    total_steps: number of steps counted from the model's first step.
    relative_steps: number of steps counted from `start_step`; exactly one of the two is given.
    start_step: step at which the run first started; a restart does not change it.
  """
  return total_steps if relative_steps is None else start_step + relative_steps


def describe_plan(stretches: Sequence[Stretch]) -> str:
  """Return the plan as text: number and steps of the pauses of each kind.

  >>> whens = {'training_eval': When(period=5, at_end=True), 'inference_eval': When(at_end=True), 'held_out': When(
  ...     steps=[4])}
  >>> print(describe_plan(list(plan_steps(0, 10, evaluations=whens, pause=When(period=2)))))
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
  evaluations, decodings = steps.pop(TRAINING_EVAL), steps.pop(INFERENCE_EVAL)
  if not evaluations or not decodings or evaluations == decodings:
    evaluations, decodings = evaluations or decodings, []
  rows = [('summaries', [s.last for s in stretches]), ('evaluations', evaluations), ('decodings', decodings),
          *steps.items(), ('checkpoints', [s.last for s in stretches if s.save]),
          ('collections', [s.last for s in stretches if s.collect_garbage])]
  width = max(13, *(len(name) + 2 for name, _ in rows))
  lines = [f'{"steps":<{width}}{stretches[0].first + 1:,} to {stretches[-1].last:,}']
  lines += [f'{name:<{width}}{len(steps):,}: {_shortened(steps)}' for name, steps in rows if steps]
  return '\n'.join(lines)


def _shortened(steps: Sequence[int], limit: int = 8) -> str:
  if len(steps) <= limit:
    return ', '.join(f'{step:,}' for step in steps)
  return f'{", ".join(f"{step:,}" for step in steps[:limit - 2])}, ..., {steps[-1]:,}'
