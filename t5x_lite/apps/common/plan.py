"""Plan of a run: stretches of training steps and the work at each pause. Pure functions of numbers."""

from collections.abc import Collection, Iterator, Sequence
import dataclasses

from t5x_lite.evaluation import INFERENCE_EVAL, TRAINING_EVAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
  """Training steps without a pause, and the work at the end. A summary is written after every stretch.

  Attributes:
    first: number of completed steps before the stretch.
    last: number of completed steps at its end.
    evaluate: whether a teacher-forced evaluation follows.
    infer: whether an evaluation by decoding follows.
    save: whether a checkpoint is saved, after evaluating.
    collect_garbage: whether garbage is collected.
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
    """Kinds of evaluation at the end of the stretch."""
    return (TRAINING_EVAL,) * self.evaluate + (INFERENCE_EVAL,) * self.infer


@dataclasses.dataclass(frozen=True, kw_only=True)
class When:
  """Steps after which a run does something.

  Attributes:
    period: number of steps between two times, counted from step 0 of the model; None or 0 for no period.
    steps: additional steps.
    at_end: also after the last step.
  """

  period: int | None = None
  steps: Collection[int] = ()
  at_end: bool = False

  def is_due(self, step: int, last_step: int) -> bool:
    """Return whether it is due after `step` of a run that ends at `last_step`."""
    return (self.at_end and step == last_step) or _is_due(step, self.period) or step in self.steps


def plan_steps(
    first_step: int, last_step: int, *, evaluate: When = When(at_end=True), infer: When = When(),
    save: When = When(at_end=True), collect_garbage: When = When(), pause: When = When()) -> Iterator[Stretch]:
  """Yield the stretches of a run.

  Periods count from step 0 of the model, not from the start of this process, so that a resumed run pauses at the same
  steps as an uninterrupted one. Periods need not divide each other.

  Args:
    first_step: number of completed steps at the start.
    last_step: number of completed steps at the end.
    evaluate: when to compute teacher-forced evaluations.
    infer: when to evaluate by decoding.
    save: when to save.
    collect_garbage: when to collect garbage.
    pause: when to pause only for a summary.

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
  """Return the step at which a run ends.

  Args:
    total_steps: number of steps counted from the model's first step.
    relative_steps: number of steps counted from `start_step`; exactly one of the two is given.
    start_step: step at which the run first started; a restart does not change it.
  """
  return total_steps if relative_steps is None else start_step + relative_steps


def describe_plan(stretches: Sequence[Stretch]) -> str:
  """Return the plan as text: number and steps of the pauses of each kind.

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
