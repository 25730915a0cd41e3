"""Actions: hooks that get the metrics after training and evaluation, and may stop a run."""

import abc
from collections.abc import Mapping, Sequence
import enum
import json
import logging
import math
from typing import Any

import clu.values
import numpy as np

from t5x_lite import checks
from t5x_lite import multihost
from t5x_lite.errors import did_you_mean

TRAIN_METRIC_KEY = 'train'

MetricsByTask = Mapping[str, Mapping[str, clu.values.Value]]


class ActionMode(enum.Enum):
  """Event after which an action runs; values and names are T5X's."""

  # After every summary of training; the task name of the metrics is 'train'.
  TRAIN = 1
  # After teacher-forced evaluation, by task.
  TRAIN_EVAL = 2
  # After evaluation by decoding, by task.
  INFER_EVAL = 3


class Stop(enum.IntEnum):
  """Request of an action, true to stop, so that `bool` values are equivalent. The greatest request has priority."""

  CONTINUE = 0
  # End normally: save, exit status 0.
  EARLY = 1
  # A metric is not finite: do not save the state, exit status 3.
  NON_FINITE = 2


class BaseAction(abc.ABC):
  """Hook that may stop the run.

  An action with memory returns it from `get_state`, so that a resumed run behaves like an uninterrupted one.
  """

  # False in a class whose `run` ignores the state, which then may be None. A subclass must declare it again.
  reads_train_state: bool = True

  @abc.abstractmethod
  def run(self, train_state: Any, metrics_by_task: MetricsByTask) -> bool | Stop:
    """Return whether to stop, as a bool or a `Stop`."""

  def get_state(self) -> Any:
    """Return the memory of the action as JSON values; None without memory."""
    return None

  def set_state(self, state: Any) -> None:
    """Restore the result of `get_state`; called once, before the first `run`."""
    del state


class EarlyStoppingAction(BaseAction):
  """Stops if none of `patience` consecutive values of a metric improves on the previous value.

  As in T5X, `patience` includes the value that the others are compared with: patience 3 means two comparisons.
  """

  reads_train_state = False

  def __init__(
    self,
    metric: tuple[str, str],
    mode: str,
    patience: int = 3,
    atol: float = 0.0,
    rtol: float = 0.0,
  ):
    """Validate the options.

    Args:
      metric: (task, metric) to watch.
      mode: 'max' or 'min': which value is better.
      patience: number of compared values; 3 means two comparisons in a row without improvement.
      atol: an improvement must exceed `atol + rtol * abs(previous value)`.
      rtol: see `atol`.

    Raises:
      ConfigError: an option is out of range.
    """
    checks.check(
      'EarlyStoppingAction',
      locals(),
      mode=checks.one_of(('min', 'max')),
      patience=checks.number(at_least=2, integer=True),
      atol=checks.number(at_least=0),
      rtol=checks.number(at_least=0),
    )
    self._task, self._metric = metric
    self._mode = mode
    self._patience = patience
    self._atol = atol
    self._rtol = rtol
    self._history: list[float] = []

  def run(self, train_state: Any, metrics_by_task: MetricsByTask) -> Stop:
    """Append the value to the history and compare; a missing metric is ignored."""
    del train_state
    value = _scalar(metrics_by_task, self._task, self._metric)
    if value is None:
      return Stop.CONTINUE
    self._history = [*self._history, value][-self._patience :]
    if len(self._history) < self._patience or any(
      map(self._improves, self._history[1:], self._history)
    ):
      return Stop.CONTINUE
    logging.getLogger(__name__).warning(
      '%s/%s has stopped improving (last values %s): stopping.',
      self._task,
      self._metric,
      self._history,
    )
    return Stop.EARLY

  def get_state(self) -> Any:
    """Return the history of values."""
    return self._history

  def set_state(self, state: Any) -> None:
    """Restore the history of values."""
    self._history = list(state)

  def _improves(self, value: float, previous: float) -> bool:
    margin = self._atol + self._rtol * abs(previous)
    if self._mode == 'max':
      return value > previous + margin
    return value < previous - margin


class TerminateOnNanAction(BaseAction):
  """Stops the run, with exit status 3, when a metric is NaN or infinite."""

  reads_train_state = False

  def __init__(self, task: str, metric: str = 'loss'):
    """Select the metric to watch.

    Args:
      task: name of the task; 'train' for training itself.
      metric: name of the metric.
    """
    self._task = task
    self._metric = metric

  def run(self, train_state: Any, metrics_by_task: MetricsByTask) -> Stop:
    """Request to stop if the metric exists and is not finite."""
    del train_state
    value = _scalar(metrics_by_task, self._task, self._metric)
    if value is None or math.isfinite(value):
      return Stop.CONTINUE
    logging.getLogger(__name__).warning('%s/%s is %s: stopping.', self._task, self._metric, value)
    return Stop.NON_FINITE


def resolve_actions(
  actions: Mapping[str | ActionMode, Sequence[BaseAction]] | None,
) -> dict[ActionMode, list[BaseAction]]:
  """Return actions by mode; keys may be names of modes, as in gin files.

  Args:
    actions: actions by mode or its name, or None.

  Raises:
    ConfigError: a key is not an `ActionMode`, or a value is not a `BaseAction`.
  """
  resolved = {}
  for key, members in (actions or {}).items():
    name = key.name if isinstance(key, ActionMode) else key
    option = f'actions[{name!r}]'
    are_actions = checks.Expectation(
      'instances of BaseAction',
      lambda members: all(isinstance(member, BaseAction) for member in members),
      'In gin, write @trainer.TerminateOnNanAction() with parentheses.',
    )
    checks.check('train', {'actions': name}, actions=checks.one_of(list(ActionMode.__members__)))
    checks.check('train', {option: members}, **{option: are_actions})
    resolved[ActionMode[name]] = list(members)
  return resolved


def run_actions(
  mode: ActionMode,
  actions: Mapping[ActionMode, Sequence[BaseAction]],
  train_state: Any,
  metrics_by_task: MetricsByTask,
) -> Stop:
  """Run every action of `mode` on the lead process, and return the greatest request on all processes.

  Args:
    mode: the event.
    actions: actions by mode.
    train_state: the current state; or a function that returns it, which is called if an action reads it.
    metrics_by_task: metrics by task and name.

  Returns:
    `Stop.CONTINUE` (false) or the reason to stop (true).
  """
  members = actions.get(mode, ())
  if not members:
    return Stop.CONTINUE
  if callable(train_state):
    if any(map(_reads_train_state, members)):
      train_state = train_state()
    else:
      train_state = None
  request = Stop.CONTINUE
  if multihost.is_lead():
    # All actions run, since each may count steps.
    stops = [action.run(train_state, metrics_by_task) for action in members]
    request = max(Stop(int(stop or 0)) for stop in stops)
  return Stop(int(multihost.broadcast_from_lead(np.int32(request))))


def _reads_train_state(action: BaseAction) -> bool:
  return vars(type(action)).get('reads_train_state', True)


def get_actions_state(actions: Mapping[ActionMode, Sequence[BaseAction]]) -> dict[str, list[Any]]:
  """Return the memory of the actions, as JSON values by mode name."""
  state = {}
  for mode, members in actions.items():
    state[mode.name] = [action.get_state() for action in members]
  json.dumps(state)  # Memory that JSON does not support raises here instead of at the next resume.
  return state


def set_actions_state(
  actions: Mapping[ActionMode, Sequence[BaseAction]], state: Mapping[str, Sequence[Any]]
) -> None:
  """Restore the memory of the actions, if the number of actions of a mode is unchanged."""
  for mode, members in actions.items():
    remembered = state.get(mode.name, ())
    if len(remembered) == len(members):
      for action, memory in zip(members, remembered, strict=True):
        if memory is not None:
          action.set_state(memory)


def _scalar(metrics_by_task: MetricsByTask, task: str, metric: str) -> float | None:
  """Return a metric as a float, or None with a warning if it is absent or not a scalar."""
  values = metrics_by_task.get(task)
  if values is None:
    missing = task
    known = metrics_by_task
  else:
    value = values.get(metric)
    if isinstance(value, clu.values.Scalar):
      return float(np.asarray(value.value))
    if isinstance(value, (int, float)):
      return float(value)
    missing = metric
    known = values
  logging.getLogger(__name__).warning(
    'The metrics have no scalar %r for an action.%s', missing, did_you_mean(missing, known)
  )
  return None
