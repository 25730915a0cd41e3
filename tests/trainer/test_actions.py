"""Actions: when they stop a run, how requests combine, and what survives a restart."""

import clu.values
import pytest

from t5x_lite.errors import ConfigError
from t5x_lite.trainer import actions as actions_lib
from t5x_lite.trainer.actions import ActionMode
from t5x_lite.trainer.actions import EarlyStoppingAction
from t5x_lite.trainer.actions import Stop
from t5x_lite.trainer.actions import TerminateOnNanAction


def _metrics(value, task='train', metric='loss'):
  return {task: {metric: clu.values.Scalar(value)}}


@pytest.mark.parametrize(
  'mode, kwargs, values, stops_at',
  [
    ('min', {}, [1.0, 0.9, 0.8, 0.7], None),
    ('min', {}, [1.0, 1.0, 1.0, 0.7], 2),
    ('min', {}, [1.0, 1.1, 0.9, 1.0, 1.1], 4),
    ('min', {'atol': 0.2}, [1.0, 0.9, 0.8], 2),
    ('min', {'atol': 0.05}, [1.0, 0.9, 0.8], None),
    ('min', {'rtol': 0.2}, [1.0, 0.9, 0.8], 2),
    ('min', {'patience': 2}, [1.0, 0.9, 0.9], 2),
    ('max', {}, [0.1, 0.2, 0.3], None),
    ('max', {}, [0.3, 0.2, 0.1], 2),
    ('max', {'atol': 0.15}, [0.1, 0.2, 0.3], 2),
    ('max', {'patience': 4}, [0.3, 0.3, 0.3, 0.3], 3),
    ('min', {}, [1.0, float('nan'), float('nan')], 2),
  ],
)
def test_early_stopping(mode, kwargs, values, stops_at):
  action = EarlyStoppingAction(('train', 'loss'), mode, **kwargs)
  stopped = [bool(action.run(None, _metrics(v))) for v in values]
  assert (stopped.index(True) if True in stopped else None) == stops_at


def test_early_stopping_continues_after_a_restart():
  first = EarlyStoppingAction(('train', 'loss'), 'min')
  assert [first.run(None, _metrics(v)) for v in (1.0, 1.0)] == [Stop.CONTINUE] * 2
  state = actions_lib.get_actions_state({ActionMode.TRAIN: [first]})
  second = EarlyStoppingAction(('train', 'loss'), 'min')
  actions_lib.set_actions_state({ActionMode.TRAIN: [second]}, state)
  assert second.run(None, _metrics(1.0)) == Stop.EARLY


@pytest.mark.parametrize(
  'args, kwargs, message',
  [
    ((('a', 'b'), 'least'), {}, "one of 'min', 'max'"),
    ((('a', 'b'), 'min'), {'patience': 1}, 'patience'),
    ((('a', 'b'), 'min'), {'atol': -1.0}, 'atol` must be a number >= 0, got -1.0'),
  ],
)
def test_early_stopping_rejects(args, kwargs, message):
  with pytest.raises(ConfigError, match=message):
    EarlyStoppingAction(*args, **kwargs)


@pytest.mark.parametrize(
  'value, expected',
  [(1.0, Stop.CONTINUE), (float('nan'), Stop.NON_FINITE), (float('inf'), Stop.NON_FINITE)],
)
def test_terminate_on_nan(value, expected):
  assert TerminateOnNanAction('train').run(None, _metrics(value)) == expected


def test_absent_metrics_are_named_not_fatal(caplog):
  assert TerminateOnNanAction('trian').run(None, _metrics(1.0)) == Stop.CONTINUE
  assert TerminateOnNanAction('train', 'los').run(None, _metrics(1.0)) == Stop.CONTINUE
  assert "Did you mean 'train'?" in caplog.text and "Did you mean 'loss'?" in caplog.text


class _Recorder(actions_lib.BaseAction):
  def __init__(self, answer):
    self.answer = answer
    self.calls = 0

  def run(self, train_state, metrics_by_task):
    self.calls += 1
    return self.answer


def test_requests_are_ored_and_all_actions_run():
  members = [_Recorder(True), _Recorder(False), _Recorder(Stop.NON_FINITE), _Recorder(None)]
  actions = actions_lib.resolve_actions({'TRAIN': members, 'INFER_EVAL': [_Recorder(False)]})
  assert actions_lib.run_actions(ActionMode.TRAIN, actions, None, {}) == Stop.NON_FINITE
  assert [m.calls for m in members] == [1, 1, 1, 1]
  assert not actions_lib.run_actions(ActionMode.INFER_EVAL, actions, None, {})
  assert not actions_lib.run_actions(ActionMode.TRAIN_EVAL, actions, None, {})


def test_a_state_is_made_only_for_actions_that_read_it():
  class Reads(EarlyStoppingAction):
    def run(self, train_state, metrics_by_task):
      return train_state == 'state'

  watches, reads = (cls(('train', 'loss'), 'min') for cls in (EarlyStoppingAction, Reads))
  calls = []

  def make():
    return calls.append(1) or 'state'

  assert (
    not actions_lib.run_actions(ActionMode.TRAIN, {ActionMode.TRAIN: [watches]}, make, {})
    and not calls
  )
  assert actions_lib.run_actions(
    ActionMode.TRAIN, {ActionMode.TRAIN: [watches, reads]}, make, {}
  ) and calls == [1]


def test_modes_and_members_are_checked():
  with pytest.raises(ConfigError, match="TRIAN.*Did you mean 'TRAIN'"):
    actions_lib.resolve_actions({'TRIAN': []})
  with pytest.raises(ConfigError, match='parentheses'):
    actions_lib.resolve_actions({'TRAIN': [TerminateOnNanAction]})
