"""Followers in threads: nothing that a tracker does stops or delays the run, and its end has a limited time."""

import dataclasses
import shlex
import subprocess
import threading
import time

import pytest

from t5x_lite import trackers
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


def _records(caplog):
  """Returns the records of t5x_lite: threads that other tests have left behind may log too."""
  return [record for record in caplog.records if record.name.startswith('t5x_lite')]


def _follow(run, *given, end_seconds=10.0, before_end=0.1):
  with trackers.FollowerThreads(
    run.path, given, poll_seconds=0.01, end_seconds=end_seconds
  ) as followers:
    followers.start()
    time.sleep(before_end)
    run.line(10)
    run.stop()
    start = time.monotonic()
  return time.monotonic() - start


def test_the_rest_is_sent_at_the_end_of_the_run(run, tmp_path, caplog):
  tracker = FileTracker(tmp_path)
  _follow(run, tracker)
  assert steps(tracker) == [10]
  assert read(tracker.path)[-1] == {'finish': 'finished'}
  assert not _records(caplog)


def test_a_run_that_another_process_sends_is_sent_by_it_alone(run, tmp_path, caplog):
  tracker = FileTracker(tmp_path)
  with trackers.Follower(run.path, tracker).alone():
    _follow(run, tracker, end_seconds=0.5)
  assert not steps(tracker)
  first, last = _records(caplog)
  assert 'DirectoryInUseError' in first.getMessage()
  assert 't5x_lite track' in last.getMessage()
  with trackers.Follower(run.path, tracker).alone() as _:
    pass  # the thread has left no lock behind


class _Blocking(FileTracker):
  def __init__(self, folder, method):
    super().__init__(folder)
    self._method = method
    setattr(self, method, lambda *args: threading.Event().wait())


@pytest.mark.parametrize('method', ['start', 'last_step', 'log', 'flush', 'finish'])
def test_a_tracker_that_blocks_has_a_limited_time_and_one_warning(run, tmp_path, caplog, method):
  seconds = _follow(run, _Blocking(tmp_path, method), end_seconds=0.5)
  assert 0.5 <= seconds < 2.0
  (record,) = _records(caplog)
  assert 'it had 0.5 s after the end' in record.getMessage()
  assert f't5x_lite track {run.path} --once' in record.getMessage()


@pytest.mark.parametrize(
  'error', [RuntimeError('no connection'), SystemExit(3), KeyboardInterrupt()]
)
def test_a_tracker_that_fails_is_tried_again_with_one_warning(run, tmp_path, caplog, error):
  class Failing(FileTracker):
    num_calls = 0

    def start(self, run_info):
      self.num_calls += 1
      if self.num_calls < 4:
        raise error
      super().start(run_info)

  tracker = Failing(tmp_path)
  _follow(run, tracker, before_end=1.0)
  assert steps(tracker) == [10]
  (record,) = _records(caplog)
  assert type(error).__name__ in record.getMessage()
  assert 'Training continues' in record.getMessage()


def test_a_tracker_that_always_fails_ends_at_once_with_the_command_that_sends_the_rest(
  run, tmp_path, caplog
):
  @dataclasses.dataclass
  class Wandb(trackers.Tracker):
    project: str | None = None
    name = 'wandb'

    def start(self, run_info):
      raise RuntimeError('no connection.')

    log = table = finish = flush = start

  seconds = _follow(run, Wandb(project='mine'), FileTracker(tmp_path), end_seconds=20.0)
  assert seconds < 5.0
  assert steps(FileTracker(tmp_path)) == [10]
  first, last = (record.getMessage() for record in _records(caplog))
  assert 'The tracker wandb has failed: RuntimeError: no connection.' in first
  assert last == (
    'The tracker wandb does not have all results of the run: RuntimeError: no connection. To send the rest:\n'
    f'  t5x_lite track {run.path} --once --to=wandb --gin.trackers.Wandb.project="\'mine\'"'
  )


@dataclasses.dataclass
class _Own(trackers.Tracker):
  path: str = 'a.csv'
  name = 'own'

  def start(self, run_info):
    raise RuntimeError('no disk')

  log = table = finish = flush = start


def test_a_shell_reads_the_command_of_an_own_tracker_with_all_its_options(run, caplog):
  _follow(run, _Own(path='my file.csv'))
  command = _records(caplog)[-1].getMessage().splitlines()[-1]
  selector = 'tests.trackers.test_threads._Own'
  assert shlex.split(command.strip(), comments=True) == [
    *['t5x_lite', 'track', str(run.path), '--once', '--gin_file=FILE'],
    *[f'--gin.TRACKER=@{selector}()', f"--gin.{selector}.path='my file.csv'"],
  ]
  checked = subprocess.run(['bash', '-n', '-c', command], capture_output=True, text=True)
  assert checked.stderr == ''
  assert command.endswith('  # FILE imports the module of the tracker')


def test_nothing_follows_before_the_start(run, tmp_path):
  tracker = FileTracker(tmp_path)
  with trackers.FollowerThreads(run.path, [tracker]):
    run.stop()
  assert read(tracker.path) == []


def test_attempts_become_rare_after_errors():
  assert [threads.delay(n) for n in (0, 1, 2, 5, 100)] == [10.0, 20.0, 40.0, 300.0, 300.0]
