"""The command and the function that send a run to a tracker."""

import json
import shutil
import threading
import time

import pytest

from t5x_lite import trackers
from t5x_lite.apps import track as track_script
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError, DataError, DirectoryInUseError, T5xLiteError
from t5x_lite.trackers import threads
from tests.trackers.tracker_cases import FileTracker
from tests.trackers.tracker_cases import GrowingRun
from tests.trackers.tracker_cases import read
from tests.trackers.tracker_cases import steps


@pytest.fixture
def run(tmp_path):
  made = GrowingRun(tmp_path / 'runs/mine')
  made.start()
  return made


def test_once_sends_what_is_final_and_says_what_waits(run, tmp_path):
  tracker = FileTracker(tmp_path)
  for step in (10, 20, 30):
    run.line(step)
  run.checkpoint(20)
  text = track_script.track(run.path, tracker, once=True)
  assert text == (
    f'Sent 2 steps of {run.path} to file, which has the run up to step 20; the run is running. Later steps, up to '
    '30, are sent when the run has saved a checkpoint after them.'
  )
  run.stop()
  text = track_script.track(run.path, tracker, once=True)
  assert (
    text
    == f'Sent 1 steps of {run.path} to file, which has the run up to step 30; the run is finished.'
  )
  assert steps(tracker) == [10, 20, 30]


def test_a_run_is_followed_until_it_ends_also_through_errors(run, tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(threads, 'delay', lambda num_errors: 0.01)

  class Failing(FileTracker):
    num_calls = 0

    def log(self, step, values, wall_time):
      self.num_calls += 1
      if self.num_calls in (2, 3):
        raise RuntimeError('no connection')
      super().log(step, values, wall_time)

  tracker = Failing(tmp_path)

  def train():
    for step in (10, 20, 30):
      run.line(step)
      run.checkpoint(step)
      time.sleep(0.05)
    run.stop()

  thread = threading.Thread(target=train)
  thread.start()
  track_script.track(run.path, tracker)
  thread.join()
  assert steps(tracker) == [10, 20, 30]
  assert read(tracker.path)[-1] == {'finish': 'finished'}
  (record,) = caplog.records
  assert 'RuntimeError: no connection' in record.getMessage()


def test_errors_of_the_run_the_tracker_and_its_start(run, tmp_path):
  tracker = FileTracker(tmp_path)
  with pytest.raises(DataError, match='got no directory'):
    track_script.track(tmp_path / 'none', tracker)
  with pytest.raises(DataError, match='a directory without metrics'):
    track_script.track(run.path, tracker, once=True)
  with pytest.raises(ConfigError, match='must be a trackers.Tracker'):
    track_script.track(run.path, 'file')

  class Failing(FileTracker):
    def start(self, run_info):
      raise RuntimeError('no key')

  with pytest.raises(T5xLiteError, match=r'file has failed \(RuntimeError: no key\)'):
    track_script.track(run.path, Failing(tmp_path))


def test_the_call_ends_when_the_run_is_deleted(run, tmp_path, monkeypatch):
  run.line(10)
  monkeypatch.setattr(threads, 'delay', lambda num_errors: shutil.rmtree(run.path) or 0.0)
  with pytest.raises(DataError, match='was deleted'):
    track_script.track(run.path, FileTracker(tmp_path))


def test_two_calls_at_once_send_no_step_twice(run, tmp_path):
  run.line(10)
  run.stop()
  tracker = FileTracker(tmp_path)
  with trackers.Follower(run.path, tracker).alone():
    with pytest.raises(DirectoryInUseError):
      track_script.track(run.path, tracker)
  assert not steps(tracker)
  track_script.track(run.path, tracker)
  assert steps(tracker) == [10]


@pytest.mark.parametrize(
  'flags, expected',
  [
    ([], 'Exactly one of --to and --gin.TRACKER must choose a tracker, got neither'),
    (['--to=tensorboard', '--gin.TRACKER=@trackers.TensorBoard()'], 'got --gin.TRACKER='),
    (['--to=tensorboard', '--gin.trackers.TensorBoard.folder=a'], 'folder'),
  ],
)
def test_flags_that_choose_no_tracker(run, capsys, flags, expected):
  assert cli.main(['track', str(run.path), *flags]) == 2
  assert expected in capsys.readouterr().err


def test_the_command_sends_to_a_tracker_with_options(run, tmp_path, capsys):
  run.line(10)
  run.stop()
  flags = [
    '--to=tensorboard',
    f'--gin.trackers.TensorBoard.log_dir={tmp_path}/shared',
    f'--state_dir={tmp_path}/state',
    '--once',
  ]
  assert cli.main(['track', str(run.path), *flags]) == 0
  assert 'Sent 1 steps' in capsys.readouterr().out
  (line,) = read(tmp_path / 'shared/mine/metrics.jsonl')
  assert line['train/loss'] == 1 / 11
  assert json.loads((tmp_path / 'state/tensorboard.json').read_text())['step'] == 10
  assert not (run.path / 'trackers').exists()
