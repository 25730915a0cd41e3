"""What may stop a run between steps: hooks that see the metrics after training and evaluation."""

import abc
import enum
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import clu.values
import numpy as np

from t5x_lite import multihost
from t5x_lite.errors import ConfigError, did_you_mean

TRAIN_METRIC_KEY = 'train'

MetricsByTask = Mapping[str, Mapping[str, clu.values.Value]]


class ActionMode(enum.Enum):
  """After what an action runs; values and names are T5X's."""

  # After every summary of training; the metrics stand under the task name 'train'.
  TRAIN = 1
  # After teacher-forced evaluation, by task.
  TRAIN_EVAL = 2
  # After evaluation by decoding, by task.
  INFER_EVAL = 3


class Stop(enum.IntEnum):
  """What an action asks for; true if the run is to stop, so `bool` works in its place. The greatest request wins."""

  CONTINUE = 0
  # A normal end: save, exit status 0.
  EARLY = 1
  # A metric is not finite: do not save the spoilt state, exit status 3.
  NON_FINITE = 2


class BaseAction(abc.ABC):
  """A hook that may stop the run.

  An action with memory returns it from `get_state`, so that a resumed run decides as an uninterrupted one would.
  """

  @abc.abstractmethod
  def run(self, train_state: Any, metrics_by_task: MetricsByTask) -> bool | Stop:
    """Looks at the metrics and returns whether to stop: a bool, or a `Stop` to say why."""

  def get_state(self) -> Any:
    """Returns what to remember across a restart, as JSON values; None for nothing."""
    return None

  def set_state(self, state: Any) -> None:
    """Takes back what `get_state` returned; called once, before the first `run`."""
    del state


class EarlyStoppingAction(BaseAction):
  """Stops when each of `patience` values of a metric in a row is no improvement on the value before it.

  As in T5X, the first value of the row counts: patience 3 means two comparisons.
  """

  def __init__(self, metric: tuple[str, str], mode: str, patience: int = 3, atol: float = 0.0, rtol: float = 0.0):
    """Validates the options.

    Args:
      metric: (task, metric) to watch.
      mode: 'max' or 'min': which value is better.
      patience: number of compared values; 3 means two comparisons in a row without improvement.
      atol: an improvement must exceed `atol + rtol * abs(previous value)`.
      rtol: see `atol`.

    Raises:
      ConfigError: an option is out of range.
    """
    if mode not in ('min', 'max'):
      raise ConfigError(f"EarlyStoppingAction: mode is {mode!r}; expected 'min' or 'max'.")
    if patience < 2 or atol < 0 or rtol < 0:
      raise ConfigError(f'EarlyStoppingAction: got patience={patience}, atol={atol}, rtol={rtol}; expected patience of '
                        'at least 2 (a single value improves on nothing) and tolerances of at least 0.')
    self._task, self._metric = metric
    self._mode = mode
    self._patience = patience
    self._atol, self._rtol = atol, rtol
    self._history: list[float] = []

  def run(self, train_state: Any, metrics_by_task: MetricsByTask) -> Stop:
    """Remembers the value and looks at the last `patience` of them; an absent metric is passed over."""
    del train_state
    value = _scalar(metrics_by_task, self._task, self._metric)
    if value is None:
      return Stop.CONTINUE
    self._history = [*self._history, value][-self._patience:]
    if len(self._history) < self._patience or any(map(self._improves, self._history[1:], self._history)):
      return Stop.CONTINUE
    logging.getLogger(__name__).warning('%s/%s has stopped improving (last values %s): stopping.', self._task,
                                        self._metric, self._history)
    return Stop.EARLY

  def get_state(self) -> Any:
    """Returns the values remembered."""
    return self._history

  def set_state(self, state: Any) -> None:
    """Takes back the values remembered."""
    self._history = list(state)

  def _improves(self, value: float, previous: float) -> bool:
    margin = self._atol + self._rtol * abs(previous)
    return value > previous + margin if self._mode == 'max' else value < previous - margin


class TerminateOnNanAction(BaseAction):
  """Stops the run, with exit status 3, when a metric is NaN or infinite."""

  def __init__(self, task: str, metric: str = 'loss'):
    """Select the metric to watch.

    Args:
      task: name of the task; 'train' for training itself.
      metric: name of the metric.
    """
    self._task = task
    self._metric = metric

  def run(self, train_state: Any, metrics_by_task: MetricsByTask) -> Stop:
    """Asks to stop if the metric is present and not finite."""
    del train_state
    value = _scalar(metrics_by_task, self._task, self._metric)
    if value is None or math.isfinite(value):
      return Stop.CONTINUE
    logging.getLogger(__name__).warning('%s/%s is %s: stopping.', self._task, self._metric, value)
    return Stop.NON_FINITE


def resolve_actions(actions: Mapping[str | ActionMode, Sequence[BaseAction]] | None
                    ) -> dict[ActionMode, list[BaseAction]]:
  """Returns actions by mode from a mapping whose keys may be names of modes, as gin files write them.

  Raises:
    ConfigError: a name is not that of an `ActionMode`, or a value is not a `BaseAction`.
  """
  resolved = {}
  for key, members in (actions or {}).items():
    if not isinstance(key, ActionMode) and key not in ActionMode.__members__:
      raise ConfigError(f'actions: got the mode {key!r}; expected one of {", ".join(ActionMode.__members__)}.'
                        f'{did_you_mean(str(key), ActionMode.__members__)}')
    mode = key if isinstance(key, ActionMode) else ActionMode[key]
    for member in members:
      if not isinstance(member, BaseAction):
        raise ConfigError(f'actions[{mode.name}]: got {member!r}; expected instances of BaseAction. In gin, write '
                          '@trainer.TerminateOnNanAction() with parentheses.')
    resolved[mode] = list(members)
  return resolved


def run_actions(mode: ActionMode, actions: Mapping[ActionMode, Sequence[BaseAction]], train_state: Any,
                metrics_by_task: MetricsByTask) -> Stop:
  """Runs every action of `mode`, on the lead process, and returns the greatest request on all processes.

  Args:
    mode: what has just happened.
    actions: actions by mode.
    train_state: the current state.
    metrics_by_task: task to metric name to value.

  Returns:
    `Stop.CONTINUE` (false) or why to stop (true).
  """
  members = actions.get(mode, ())
  if not members:
    return Stop.CONTINUE
  request = Stop.CONTINUE
  if multihost.is_lead():
    # All of them run, whatever the others say: each may keep count.
    request = max(Stop(int(action.run(train_state, metrics_by_task) or 0)) for action in members)
  return Stop(int(multihost.broadcast_from_lead(np.int32(request))))


def get_actions_state(actions: Mapping[ActionMode, Sequence[BaseAction]]) -> dict[str, list[Any]]:
  """Returns what the actions remember, as JSON values by mode name."""
  state = {mode.name: [action.get_state() for action in members] for mode, members in actions.items()}
  json.dumps(state)  # An action of a user that remembers something else shall fail here, not at the next resume.
  return state


def set_actions_state(actions: Mapping[ActionMode, Sequence[BaseAction]], state: Mapping[str, Sequence[Any]]) -> None:
  """Gives the actions back what they remembered, where the list of a mode is as long as it was."""
  for mode, members in actions.items():
    remembered = state.get(mode.name, ())
    if len(remembered) == len(members):
      for action, memory in zip(members, remembered, strict=True):
        if memory is not None:
          action.set_state(memory)


def _scalar(metrics_by_task: MetricsByTask, task: str, metric: str) -> float | None:
  """Returns a metric as a float, or None with a warning if it is absent or not a scalar."""
  values = metrics_by_task.get(task)
  value = None if values is None else values.get(metric)
  if isinstance(value, clu.values.Scalar):
    return float(np.asarray(value.value))
  if isinstance(value, (int, float)):
    return float(value)
  missing, known = (task, metrics_by_task) if values is None else (metric, values)
  logging.getLogger(__name__).warning('There is no scalar %r to act on.%s', missing, did_you_mean(missing, known))
  return None
