"""Policies of saving and keeping checkpoints.

A save policy decides whether a step is saved; a retention policy selects the checkpoints to keep. A checkpoint is kept
if any policy selects it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, final

from t5x_lite import checks
from t5x_lite.checkpoints import config as config_lib


class SavePolicy(Protocol):
  """Policy that decides whether a step is saved."""

  def should_save(self, step: int) -> bool:
    """Return True if the state after `step` steps should be saved."""

  def next_step(self, step: int) -> int | None:
    """Return the first step after `step` that should be saved, or None if unknown."""


@final
@dataclasses.dataclass(frozen=True)
class EveryNSteps:
  """Policy that saves each step > 0 that `period` divides; use `AtSteps` for step 0."""

  period: int

  def __post_init__(self):
    checks.check('EveryNSteps', vars(self), period=checks.number(at_least=1, integer=True))

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    return step > 0 and step % self.period == 0

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    return (step // self.period + 1) * self.period


@final
@dataclasses.dataclass(frozen=True)
class AtSteps:
  """Policy that saves the given steps."""

  steps: Collection[int]

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    return step in self.steps

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    return min((s for s in self.steps if s > step), default=None)


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

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    del step
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

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    return any(policy.should_save(step) for policy in self.policies)

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    steps = [policy.next_step(step) for policy in self.policies]
    return min((s for s in steps if s is not None), default=None)


class RetentionPolicy(Protocol):
  """Policy that selects the checkpoints to keep."""

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """Return the subset of the ascending `steps` to keep, given the known metrics by step."""


@final
@dataclasses.dataclass(frozen=True)
class KeepLast:
  """Policy that keeps the newest `count` checkpoints."""

  count: int

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return set(steps[-self.count:])


@final
@dataclasses.dataclass(frozen=True)
class KeepEvery:
  """Policy that keeps each checkpoint whose step `period` divides."""

  period: int

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
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

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """See `RetentionPolicy`."""
    values = {step: metrics.get(step, {}).get(self.metric_name, math.nan) for step in steps}
    known = [step for step in steps if math.isfinite(values[step])]
    sign = 1 if self.mode == 'max' else -1
    best = sorted(known, key=lambda step: (sign * values[step], step))[-self.count:]
    unknown = [step for step in steps if step not in known]
    return set(best) | (set(unknown) if self.keep_without_metrics else set())


@final
@dataclasses.dataclass(frozen=True)
class KeepAll:
  """Policy that keeps all checkpoints."""

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return set(steps)


def save_policies_from_config(cfg: config_lib.SaveCheckpointConfig) -> AnySavePolicy:
  """Return the save policy for `cfg`."""
  policies: list[SavePolicy] = []
  if cfg.period is not None:
    policies.append(EveryNSteps(cfg.period))
  if cfg.checkpoint_steps:
    policies.append(AtSteps(frozenset(cfg.checkpoint_steps)))
  return AnySavePolicy(tuple(policies))


def retention_policies_from_config(cfg: config_lib.SaveCheckpointConfig) -> tuple[RetentionPolicy, ...]:
  """Return the retention policies for `cfg`; a checkpoint is kept if any of them selects it."""
  policies: list[RetentionPolicy] = []
  if cfg.keep is not None:
    policies.append(KeepLast(cfg.keep))
  if cfg.keep_period is not None:
    policies.append(KeepEvery(cfg.keep_period))
  if cfg.keep_best is not None:
    policies.append(KeepBest(cfg.keep_best, cfg.metric_name_to_monitor, cfg.metric_mode,
                             cfg.keep_checkpoints_without_metrics))
  return tuple(policies) or (KeepAll(),)


def steps_to_delete(policies: Sequence[RetentionPolicy], steps: Sequence[int],
                    metrics: Mapping[int, Mapping[str, float]], pinned: Collection[int]) -> list[int]:
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
