"""Why a run ends: of several reasons at once, the one that decides. Each by itself: the other files of this folder."""

import os
import signal

import pytest

from t5x_lite import runtime
from t5x_lite.actions import BaseAction
from t5x_lite.errors import StoppedOnSignalError
from tests.apps.train import toy_run


class _Signal(BaseAction):
  """Sends a signal after step `at`, and may ask for the end of the run."""

  def __init__(self, at, stop=False):
    self._at = at
    self._stop = stop

  def run(self, train_state, metrics_by_task):
    if int(train_state.step) != self._at:
      return False
    os.kill(os.getpid(), signal.SIGTERM)
    return self._stop


def _train(model_dir, **actions):
  toy_run.train(
    model_dir, 4, actions=actions, eval_period=None, stats_period=2, infer_eval_dataset_cfg=None
  )


def _cause(model_dir):
  events = runtime.read_events(model_dir / runtime.EVENTS_FILE)
  (stop,) = [event for event in events if event.kind == 'stop']
  return stop.details['cause']


def test_a_signal_after_the_last_evaluation_has_no_effect(tmp_path):
  _train(tmp_path, TRAIN_EVAL=[_Signal(at=4)])
  assert _cause(tmp_path) == 'completed'


@pytest.mark.parametrize(
  'action, steps',
  [
    (_Signal(at=4), '4 of 4'),  # before the last evaluation
    (_Signal(at=2, stop=True), '2 of 4'),
  ],
)
def test_a_signal_is_the_reason_for_what_is_left_to_do(tmp_path, action, steps):
  with pytest.raises(StoppedOnSignalError, match=f'Stopped after step {steps} by SIGTERM'):
    _train(tmp_path, TRAIN=[action])
  assert _cause(tmp_path) == 'signal'
