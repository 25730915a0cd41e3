"""Policies of saving and keeping checkpoints.

A save policy decides whether a step is saved. Policies of fixed steps say so in advance, and a run pauses at these
steps; others decide at each pause, from the facts at that time (`SavePoint`). A retention policy selects the
checkpoints to keep. A checkpoint is kept if any policy selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, Protocol, final

import numpy as np

from t5x_lite import checks
from t5x_lite.checkpoints import config

_COUNT = checks.number(at_least=1, integer=True)
_STEP = checks.number(at_least=0, integer=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavePoint:
  """Facts at a pause of a run, on which a policy may decide.

  Attributes:
    metrics_fn: returns the metrics of the evaluations of this step, by full name, and waits for them.
    best: best value of a metric in earlier evaluations of the run, by (full name, 'max' or 'min').
    seconds_since_save: seconds since the last save, or since the first step of the process.
  """

  metrics_fn: Callable[[], Mapping[str, float]] = dict
  best: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
  seconds_since_save: float = 0.0

  @functools.cached_property
  def metrics(self) -> Mapping[str, float]:
    """Result of `metrics_fn`."""
    return self.metrics_fn()


class SavePolicy(Protocol):
  """Policy that decides whether a step is saved."""

  def should_save(self, step: int, point: SavePoint | None = None) -> bool:
    """Return True if the state after `step` steps should be saved.

    Args:
      step: number of completed steps.
      point: facts at a pause; None asks for fixed steps only.
    """
    ...

  def next_step(self, step: int) -> int | None:
    """Return the first step after `step` that should be saved, or None if unknown."""


@final
@dataclasses.dataclass(frozen=True)
class EveryNSteps:
  """Policy that saves each step > 0 that `period` divides, from `from_step` on; use `AtSteps` for step 0."""

  period: int
  from_step: int = 0

  def __post_init__(self):
    checks.check('EveryNSteps', vars(self), period=_COUNT, from_step=_STEP)

  def should_save(self, step: int, point: SavePoint | None = None) -> bool:
    """See `SavePolicy`."""
    del point
    return step > 0 and step >= self.from_step and step % self.period == 0

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    return (max(step, self.from_step - 1) // self.period + 1) * self.period


@final
@dataclasses.dataclass(frozen=True)
class AtSteps:
  """Policy that saves the given steps; step 0 is saved before the first step of a new run."""

  steps: Collection[int]

  def __post_init__(self):
    checks.check(
      'AtSteps',
      vars(self),
      steps=checks.Expectation(
        'steps, integers >= 0',
        lambda steps: len(steps) > 0 and all(map(_STEP.holds, steps)),
        'For example [0, 1000].',
      ),
    )

  def should_save(self, step: int, point: SavePoint | None = None) -> bool:
    """See `SavePolicy`."""
    del point
    return step in self.steps

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    return min((s for s in self.steps if s > step), default=None)


@final
@dataclasses.dataclass(frozen=True)
class WhenBest:
  """Policy that saves a step whose evaluation has a better value of a metric than all earlier ones of the run.

  To keep these checkpoints, set `SaveCheckpointConfig.keep_best` for the same metric.

  Attributes:
    metric_name: full name of the metric, e.g. 'inference_eval/my_task/exact_match'.
    mode: 'max' if larger values are better, or 'min'.
    from_step: first step at which it applies.
  """

  metric_name: str
  mode: str = 'max'
  from_step: int = 0

  def __post_init__(self):
    checks.check(
      'WhenBest',
      vars(self),
      metric_name=checks.instance(str, 'the full name of a metric'),
      mode=checks.one_of(config.METRIC_MODES),
      from_step=_STEP,
    )

  @property
  def key(self) -> tuple[str, str]:
    """Key of the metric in `SavePoint.best`."""
    return self.metric_name, self.mode

  def is_better(self, value: float, than: float | None) -> bool:
    """Return whether a value is better than another one, of which None is the worst; only finite values are."""
    return math.isfinite(value) and (
      than is None or (value > than if self.mode == 'max' else value < than)
    )

  def should_save(self, step: int, point: SavePoint | None = None) -> bool:
    """See `SavePolicy`."""
    if point is None or step < self.from_step or self.metric_name not in point.metrics:
      return False
    return self.is_better(point.metrics[self.metric_name], point.best.get(self.key))

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`; the step of the next improvement is unknown."""
    del step
    return None


@final
@dataclasses.dataclass(frozen=True)
class EveryNMinutes:
  """Policy that saves at the first pause `minutes` after the last save; a run pauses after each training summary.

  A save that failed counts, so that a full disk does not end the run by `max_failures_in_a_row` saves within minutes.

  Attributes:
    minutes: minutes between two saves.
    from_step: first step at which it applies.
  """

  minutes: float
  from_step: int = 0

  def __post_init__(self):
    checks.check('EveryNMinutes', vars(self), minutes=checks.number(above=0), from_step=_STEP)

  def should_save(self, step: int, point: SavePoint | None = None) -> bool:
    """See `SavePolicy`."""
    return (
      point is not None and step >= self.from_step and point.seconds_since_save >= 60 * self.minutes
    )

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`; the step is unknown."""
    del step
    return None


@final
class OnRequest:
  """Policy that saves the next step after a call of `request`; `done` clears the request."""

  def __init__(self):
    self._requested = False

  def request(self) -> None:
    """Request a save of the next step; only sets a flag, so a signal handler may call it."""
    self._requested = True

  def done(self) -> None:
    """Clear the request after the save."""
    self._requested = False

  def should_save(self, step: int, point: SavePoint | None = None) -> bool:
    """See `SavePolicy`."""
    del step, point
    return self._requested

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`; the step of a request is unknown."""
    del step
    return None


@final
@dataclasses.dataclass(frozen=True)
class AnySavePolicy:
  """Policy that saves if one of `policies` saves; never without policies."""

  policies: Sequence[SavePolicy]

  def due(self, step: int, point: SavePoint | None = None) -> list[SavePolicy]:
    """Return the policies that save a step; see `SavePolicy.should_save`."""
    return [policy for policy in self.policies if _is_true(policy, policy.should_save(step, point))]

  def should_save(self, step: int, point: SavePoint | None = None) -> bool:
    """See `SavePolicy`."""
    return bool(self.due(step, point))

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    steps = [policy.next_step(step) for policy in self.policies]
    return min((s for s in steps if s is not None), default=None)


def _is_true(policy: SavePolicy, result: Any) -> bool:
  """Return the result of `SavePolicy.should_save`; raise if a custom policy returns something else than a bool."""
  if result is None or np.ndim(result):
    raise checks.invalid(
      type(policy).__name__,
      'should_save',
      'a method that returns True or False',
      result,
      'Return True to save.',
    )
  return bool(result)


class RetentionPolicy(Protocol):
  """Policy that selects the checkpoints to keep."""

  def steps_to_keep(
    self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]
  ) -> set[int]:
    """Return the subset of the ascending `steps` to keep, given the known metrics by step."""
    ...


@final
@dataclasses.dataclass(frozen=True)
class KeepLast:
  """Policy that keeps the newest `count` checkpoints."""

  count: int

  def steps_to_keep(
    self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]
  ) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return set(steps[-self.count :])


@final
@dataclasses.dataclass(frozen=True)
class KeepEvery:
  """Policy that keeps each checkpoint whose step `period` divides."""

  period: int

  def steps_to_keep(
    self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]
  ) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return {step for step in steps if step % self.period == 0}


@final
@dataclasses.dataclass(frozen=True)
class KeepBest:
  """Policy that keeps the `count` checkpoints with the best value of a metric, the newer ones of equal values.

  Attributes:
    count: number of checkpoints to keep.
    metric_name: name of the metric.
    mode: 'max' if larger values are better, or 'min'.
    keep_without_metrics: whether checkpoints without a finite value of the metric are kept too.
  """

  count: int
  metric_name: str
  mode: str = 'max'
  keep_without_metrics: bool = True

  def steps_to_keep(
    self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]
  ) -> set[int]:
    """See `RetentionPolicy`."""
    values = {step: metrics.get(step, {}).get(self.metric_name, math.nan) for step in steps}
    known = [step for step in steps if math.isfinite(values[step])]
    sign = 1 if self.mode == 'max' else -1
    in_order = sorted(known, key=lambda step: (sign * values[step], step))
    kept = set(in_order[-self.count :])
    if self.keep_without_metrics:
      kept |= set(steps) - set(known)
    return kept


@final
@dataclasses.dataclass(frozen=True)
class KeepAll:
  """Policy that keeps all checkpoints."""

  def steps_to_keep(
    self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]
  ) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return set(steps)


def save_policies_from_config(cfg: config.SaveCheckpointConfig) -> AnySavePolicy:
  """Return the save policy for `cfg`."""
  policies: list[SavePolicy] = []
  if cfg.period is not None:
    policies.append(EveryNSteps(cfg.period))
  if cfg.checkpoint_steps:
    policies.append(AtSteps(frozenset(cfg.checkpoint_steps)))
  return AnySavePolicy((*policies, *cfg.policies))


def metric_names(cfg: config.SaveCheckpointConfig) -> list[tuple[str, str]]:
  """Return (option, full name) of each metric on which saving or keeping depends."""
  names = []
  if cfg.keep_best is not None:
    names.append(('SaveCheckpointConfig.metric_name_to_monitor', cfg.metric_name_to_monitor))
  for policy in cfg.policies:
    if isinstance(policy, WhenBest):
      names.append(('WhenBest.metric_name', policy.metric_name))
  return names


def retention_policies_from_config(cfg: config.SaveCheckpointConfig) -> tuple[RetentionPolicy, ...]:
  """Return the retention policies for `cfg`; a checkpoint is kept if any of them selects it."""
  policies: list[RetentionPolicy] = []
  if cfg.keep is not None:
    policies.append(KeepLast(cfg.keep))
  if cfg.keep_period is not None:
    policies.append(KeepEvery(cfg.keep_period))
  if cfg.keep_best is not None:
    assert cfg.metric_name_to_monitor is not None  # the options have checked it
    policies.append(
      KeepBest(
        cfg.keep_best,
        cfg.metric_name_to_monitor,
        cfg.metric_mode,
        cfg.keep_checkpoints_without_metrics,
      )
    )
  return tuple(policies) or (KeepAll(),)


def steps_to_delete(
  policies: Sequence[RetentionPolicy],
  steps: Sequence[int],
  metrics: Mapping[int, Mapping[str, float]],
  pinned: Collection[int],
) -> list[int]:
  """Return the steps that no policy keeps.

  Args:
    policies: a checkpoint is kept if any policy selects it.
    steps: all committed steps, ascending.
    metrics: known metrics by step.
    pinned: steps that are never deleted.

  Returns:
    Steps to delete, ascending, without the newest step.

  >>> steps_to_delete([KeepLast(2), KeepEvery(100)], [100, 150, 200, 250, 300], {}, pinned=[])
  [150]
  >>> steps_to_delete([KeepBest(1, 'acc', keep_without_metrics=False)], [1, 2, 3], {1: {'acc': .9}, 2: {'acc': .5}}, [])
  [2]
  """
  kept = set(pinned) | set(steps[-1:])
  for policy in policies:
    kept |= policy.steps_to_keep(steps, metrics)
  return [step for step in steps if step not in kept]


def find_next_checkpoint_step(
  checkpoint_steps_index: int,
  inner_num_steps: int,
  is_checkpoint_step: bool,
  host_step: int,
  checkpoint_steps: Sequence[int],
  epoch_end_step: int,
  checkpoint_period: int,
  first_step: int,
) -> tuple[int, bool]:
  """Shorten a stretch of training so that it ends at the next of the further steps to save.

  For training loops written for T5X; `train` asks save policies.

  Args:
    checkpoint_steps_index: index in `checkpoint_steps` at which the search begins.
    inner_num_steps: number of steps of the stretch.
    is_checkpoint_step: whether the stretch already ends at such a step.
    host_step: step at which the stretch begins.
    checkpoint_steps: further steps to save, ascending.
    epoch_end_step: last step that may be returned.
    checkpoint_period: number of steps between regular saves, which need no further one.
    first_step: step at which training began.

  Returns:
    (number of steps of the stretch, whether it ends at one of `checkpoint_steps`).

  >>> find_next_checkpoint_step(0, 10, False, 0, [4, 8], 100, 5, 0)
  (4, True)
  """
  for step in checkpoint_steps[checkpoint_steps_index:]:
    if step > host_step + inner_num_steps:
      break
    if first_step < step <= epoch_end_step and (step - first_step) % checkpoint_period:
      return step - host_step, True
  return inner_num_steps, is_checkpoint_step


def find_first_checkpoint_step(
  checkpoint_steps_index: int, checkpoint_steps: Sequence[int], first_step: int, host_step: int
) -> int:
  """Return the index of the next of the further steps to save, from an index on, or of the last step.

  Args:
    checkpoint_steps_index: index in `checkpoint_steps` at which the search begins.
    checkpoint_steps: further steps to save, ascending.
    first_step: step at which training began.
    host_step: current step.

  >>> find_first_checkpoint_step(0, [4, 8, 12], first_step=4, host_step=4)
  1
  """
  for index in range(checkpoint_steps_index, len(checkpoint_steps)):
    if checkpoint_steps[index] >= host_step and checkpoint_steps[index] != first_step:
      return index
  return max(checkpoint_steps_index, len(checkpoint_steps) - 1)
