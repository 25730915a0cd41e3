"""When to save and what to keep: small objects, composed explicitly.

A save policy answers "save at this step?"; a retention policy names the checkpoints that it wants kept. Policies are
joined by union, so adding one never removes a checkpoint that another keeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, final

from t5x_lite import errors
from t5x_lite.checkpoints import config as config_lib


class SavePolicy(Protocol):
  """Decides whether a step is saved."""

  def should_save(self, step: int) -> bool:
    """Returns whether the state after `step` steps is to be saved."""

  def next_step(self, step: int) -> int | None:
    """Returns the first step after `step` that is to be saved, or None when there is none to foresee."""


@final
@dataclasses.dataclass(frozen=True)
class EveryNSteps:
  """Saves each step that `period` divides; step 0 is none of them (ask for it in `AtSteps`)."""

  period: int

  def __post_init__(self):
    if self.period < 1:
      raise errors.ConfigError(f'EveryNSteps.period: got {self.period}, expected a whole number above 0.')

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    return step > 0 and step % self.period == 0

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    return (step // self.period + 1) * self.period


@final
@dataclasses.dataclass(frozen=True)
class AtSteps:
  """Saves at the given steps."""

  steps: Collection[int]

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    return step in self.steps

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    return min((s for s in self.steps if s > step), default=None)


@final
class OnRequest:
  """Saves the next step after `request` was called, as a signal handler does; `done` clears the request."""

  def __init__(self):
    self._requested = False

  def request(self) -> None:
    """Asks for a save at the next opportunity; only sets a flag, so it is fit for a signal handler."""
    self._requested = True

  def done(self) -> None:
    """Forgets the request, because it has been served."""
    self._requested = False

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    del step
    return self._requested

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`; a request cannot be foreseen."""
    del step
    return None


@final
@dataclasses.dataclass(frozen=True)
class AnySavePolicy:
  """Saves when one of `policies` does; with none, never."""

  policies: Sequence[SavePolicy]

  def should_save(self, step: int) -> bool:
    """See `SavePolicy`."""
    return any(policy.should_save(step) for policy in self.policies)

  def next_step(self, step: int) -> int | None:
    """See `SavePolicy`."""
    steps = [policy.next_step(step) for policy in self.policies]
    return min((s for s in steps if s is not None), default=None)


class RetentionPolicy(Protocol):
  """Names the checkpoints to keep."""

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """Returns those of the ascending `steps` to keep, given the metrics known for some of them."""


@final
@dataclasses.dataclass(frozen=True)
class KeepLast:
  """Keeps the newest `count` checkpoints."""

  count: int

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return set(steps[-self.count:])


@final
@dataclasses.dataclass(frozen=True)
class KeepEvery:
  """Keeps each checkpoint whose step `period` divides."""

  period: int

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return {step for step in steps if step % self.period == 0}


@final
@dataclasses.dataclass(frozen=True)
class KeepBest:
  """Keeps the `count` checkpoints with the best value of a metric; of equal values the newer is the better one.

  Attributes:
    count: how many to keep.
    metric_name: name of the metric.
    mode: 'max' or 'min'.
    keep_without_metrics: whether checkpoints without a (finite) value of the metric are kept too.
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
  """Keeps everything."""

  def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    """See `RetentionPolicy`."""
    del metrics
    return set(steps)


def save_policies_from_config(cfg: config_lib.SaveCheckpointConfig) -> AnySavePolicy:
  """Returns the save policy that `cfg` describes."""
  policies: list[SavePolicy] = []
  if cfg.period is not None:
    policies.append(EveryNSteps(cfg.period))
  if cfg.checkpoint_steps:
    policies.append(AtSteps(frozenset(cfg.checkpoint_steps)))
  return AnySavePolicy(tuple(policies))


def retention_policies_from_config(cfg: config_lib.SaveCheckpointConfig) -> tuple[RetentionPolicy, ...]:
  """Returns the retention policies that `cfg` describes; their union is kept."""
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
  """Returns the steps that no policy keeps.

  Args:
    policies: their union is kept.
    steps: every committed step, ascending.
    metrics: metrics by step, for those steps where some are known.
    pinned: steps never to delete.

  Returns:
    Steps to delete, ascending. The newest step is never among them.

  >>> steps_to_delete([KeepLast(2), KeepEvery(100)], [100, 150, 200, 250, 300], {}, pinned=[])
  [150]
  >>> steps_to_delete([KeepBest(1, 'acc', keep_without_metrics=False)], [1, 2, 3], {1: {'acc': .9}, 2: {'acc': .5}}, [])
  [2]
  """
  kept = set(pinned) | set(steps[-1:])
  for policy in policies:
    kept |= policy.steps_to_keep(steps, metrics)
  return [step for step in steps if step not in kept]
