"""Followers: each step reaches a tracker once, and those that cannot overwrite get no line that is written again."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from t5x_lite import trackers
from t5x_lite.checkpoints import discovery
from t5x_lite.errors import ConfigError, DataError, DirectoryInUseError
from t5x_lite.trackers import follower as follower_lib
from t5x_lite.trainer import summaries
from tests.trackers.tracker_cases import FileTracker
from tests.trackers.tracker_cases import GrowingRun
from tests.trackers.tracker_cases import OverwritingTracker
from tests.trackers.tracker_cases import losses
from tests.trackers.tracker_cases import read
from tests.trackers.tracker_cases import steps


@pytest.fixture
def run(tmp_path):
  made = GrowingRun(tmp_path / 'runs/mine')
  made.start()
  return made


@pytest.fixture
def tracker(tmp_path):
  return FileTracker(tmp_path)


def _follower(run, tracker):
  return trackers.Follower(run.path, tracker)


def test_lines_wait_for_a_checkpoint_and_a_finite_step_after_it(run, tracker):
  follower = _follower(run, tracker)
  for step in (10, 20, 30):
    run.line(step)
  assert follower.send().status == 'running'
  assert steps(tracker) == []
  run.checkpoint(20)
  follower.send()
  assert steps(tracker) == [10, 20]
  run.checkpoint(30)
  follower.send()
  assert steps(tracker) == [10, 20]  # step 31 may show that the state of step 30 is not finite
  run.line(40)
  follower.send()
  assert steps(tracker) == [10, 20, 30]
  run.stop()
  assert follower.send().status == 'finished'
  assert steps(tracker) == [10, 20, 30, 40]
  assert losses(tracker) == {step: {1.0 / (1 + step)} for step in (10, 20, 30, 40)}


def test_a_line_that_is_not_finite_confirms_no_checkpoint(run, tracker):
  for step in (10, 20):
    run.line(step)
    run.checkpoint(step)
  run.line(30, loss='NaN')
  _follower(run, tracker).send()
  assert steps(tracker) == []
  discovery.mark_unsound(run.path / 'checkpoint_20', 'bad')
  run.line(40)
  _follower(run, tracker).send()
  assert steps(tracker) == [10]


def test_evaluations_that_are_due_after_a_restart_hold_their_step_back(run, tracker):
  run.line(10)
  run.line(20)
  run.checkpoint(20, evaluation_due=['inference_eval'])
  run.line(30)
  _follower(run, tracker).send()
  assert steps(tracker) == [10]


@pytest.mark.parametrize(
  'cause, expected',
  [
    ('completed', [10, 20, 30]),
    ('data_ended', [10, 20, 30]),
    ('action', [10, 20, 30]),
    ('error', [10, 20, 30]),
    ('non_finite', [10, 20, 30]),
    # The run continues from its last checkpoint.
    ('signal', [10, 20]),
    ('other_process', [10, 20]),
  ],
)
def test_a_run_that_ends_sends_all_unless_it_was_interrupted(run, tracker, cause, expected):
  for step in (10, 20, 30):
    run.line(step)
  run.checkpoint(20)
  run.stop(cause)
  _follower(run, tracker).send()
  assert steps(tracker) == expected


def test_a_killed_run_that_resumes_with_other_values_sends_no_line_that_it_discarded(run, tracker):
  follower = _follower(run, tracker)
  for step in (10, 20, 30, 40):
    run.line(step, loss=1.0)
  run.checkpoint(20)
  follower.send()
  # The process is killed, the next one resumes from step 20.
  run.start()
  summaries.discard_after(run.path, 20)
  follower.send()
  for step in (30, 40, 50):
    run.line(step, loss=2.0)
    follower.send()
  run.checkpoint(50)
  run.stop()
  follower.send()
  assert losses(tracker) == {10: {1.0}, 20: {1.0}, 30: {2.0}, 40: {2.0}, 50: {2.0}}
  assert steps(tracker) == [10, 20, 30, 40, 50]


def test_a_failed_run_that_starts_again_keeps_the_values_that_were_sent(run, tracker):
  run.line(10, loss=1.0)
  run.checkpoint(10)
  run.line(20, loss=1.0)
  run.stop('error')
  _follower(run, tracker).send()
  run.start()
  summaries.discard_after(run.path, 10)
  run.line(20, loss=2.0)
  run.line(30, loss=2.0)
  run.stop()
  _follower(run, tracker).send()
  assert losses(tracker) == {10: {1.0}, 20: {1.0}, 30: {2.0}}


def test_a_tracker_that_can_overwrite_has_lines_at_once_and_the_new_values_of_repeated_steps(
  run, tmp_path
):
  tracker = OverwritingTracker(tmp_path)
  follower = _follower(run, tracker)
  for step in (10, 20, 30):
    run.line(step, loss=1.0)
    follower.send()
    assert steps(tracker)[-1] == step
  run.checkpoint(20)
  run.line(40, loss=1.0)
  follower.send()
  run.start()
  summaries.discard_after(run.path, 20)
  run.line(30, loss=2.0)
  follower.send()
  assert losses(tracker) == {10: {1.0}, 20: {1.0}, 30: {2.0}}
  assert steps(tracker) == [10, 20, 30]
  # A new follower begins again after the newest final step.
  run.line(40, loss=2.0)
  trackers.Follower(run.path, tracker).send()
  assert steps(tracker) == [10, 20, 30, 40]


def test_writers_are_merged_in_the_order_of_steps_and_named(run, tracker):
  run.line(10)
  run.line(20)
  run.line(10, 'training_eval/a', loss=3.0)
  run.line(20, 'inference_eval/a', bleu=4.0, bleu_signature='text')
  rows = [{'index': i, 'inputs': 'x', 'targets': 'y', 'prediction': '<b>'} for i in range(150)]
  run.predictions(20, 'a', rows)
  run.stop()
  _follower(run, tracker).send()
  found = read(tracker.path)
  assert [row.get('step', row.get('at')) for row in found] == [None, 10, 20, 20]
  assert found[1]['values'] == {'train/loss': 1 / 11, 'training_eval/a/loss': 3.0}
  assert found[2]['values'] == {'train/loss': 1 / 21, 'inference_eval/a/bleu': 4.0}
  assert found[3]['table'] == 'inference_eval/a'
  assert found[3]['rows'] == rows[:100]


def test_columns_of_tables_have_numbers_or_texts(run, tracker):
  run.line(10, 'inference_eval/a', bleu=2.0)
  rows = [
    {'index': 0, 'targets': ['a', 'é'], 'prediction': '\ud83d!', 'score': 1},
    {'index': 1, 'targets': 'b', 'prediction': None, 'score': True, 'more': 2.5},
  ]
  run.predictions(10, 'a', rows)
  run.stop()
  _follower(run, tracker).send()
  (table,) = (row['rows'] for row in read(tracker.path) if 'table' in row)
  assert table == [
    {'index': 0, 'targets': '["a", "é"]', 'prediction': '?!', 'score': '1', 'more': ''},
    {'index': 1, 'targets': 'b', 'prediction': '', 'score': 'true', 'more': '2.5'},
  ]


def test_numbers_that_are_not_finite_are_sent_as_such(run, tracker):
  run.line(10, loss='NaN', norm='-Infinity', load=[1.0, 2.0])
  run.stop('non_finite')
  _follower(run, tracker).send()
  (values,) = [row['values'] for row in read(tracker.path) if 'step' in row]
  assert math.isnan(values['train/loss'])
  assert values['train/norm'] == -math.inf
  assert len(values) == 2


def test_damaged_lines_are_named_and_skipped(run, tracker, caplog):
  run.line(10)
  path = run.path / 'train/metrics.jsonl'
  path.write_text(path.read_text() + '{"step": 20, "lo\n' + '{"missing": {"after_step": 20}}\n')
  run.line(30)
  run.line(25)
  path.write_text(path.read_text() + '{"step": 40, "loss"')
  run.stop()
  _follower(run, tracker).send()
  assert steps(tracker) == [10, 30]
  assert f'{path}:2 is damaged' in caplog.text
  assert f'{path}:6 is damaged' in caplog.text
  assert 'step 25 follows one of step 30' in caplog.text
  assert len(caplog.records) == 3


def test_a_follower_continues_behind_the_newest_step_that_the_tracker_has(run, tracker):
  for step in (10, 20, 30):
    run.line(step)
  run.stop()
  _follower(run, tracker).send()
  position = run.path / 'trackers/file.json'
  row = json.loads(position.read_text())
  # Killed after the tracker had the batch, before the position was written.
  position.write_text(json.dumps({**row, 'step': 10}))
  _follower(run, tracker).send()
  assert steps(tracker) == [10, 20, 30]
  tracker.knows_last_step = False
  _follower(run, tracker).send()
  assert steps(tracker) == [10, 20, 30, 20, 30]
  assert losses(tracker) == {step: {1.0 / (1 + step)} for step in (10, 20, 30)}
  # The tracker has lost a part.
  tracker.knows_last_step = True
  rows = read(tracker.path)[:2]
  tracker.path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
  _follower(run, tracker).send()
  assert steps(tracker) == [10, 20, 30]


def test_the_run_of_the_tracker_is_the_same_after_a_restart(run, tracker):
  run.line(10)
  run.stop()
  for _ in range(2):
    _follower(run, tracker).send()
  ids = [row['start'] for row in read(tracker.path) if 'start' in row]
  assert len(ids) == 2 and len(set(ids)) == 1
  assert tracker.run_info.name == 'mine'


def test_an_error_of_the_tracker_loses_and_repeats_nothing(run, tracker):
  class Failing(FileTracker):
    num_calls = 0

    def log(self, step, values, wall_time):
      self.num_calls += 1
      if self.num_calls == 2:
        raise RuntimeError('no connection')
      super().log(step, values, wall_time)

  failing = Failing(tracker.path.parent)
  for step in (10, 20, 30):
    run.line(step)
  run.stop()
  follower = _follower(run, failing)
  with pytest.raises(RuntimeError, match='no connection'):
    follower.send()
  follower.send()
  assert steps(failing) == [10, 20, 30]


def test_the_position_follows_each_batch(run, tracker, monkeypatch):
  monkeypatch.setattr(follower_lib, '_BATCH_LINES', 2)
  positions = []

  class Flushing(FileTracker):
    def flush(self):
      positions.append(json.loads((run.path / 'trackers/file.json').read_text())['step'])

  for step in range(1, 6):
    run.line(step)
  run.stop()
  _follower(run, Flushing(tracker.path.parent)).send()
  assert positions == [-1, 2, 4]
  assert json.loads((run.path / 'trackers/file.json').read_text())['step'] == 5


def test_a_run_that_starts_again_while_it_is_sent_is_looked_at_again(run, tracker, monkeypatch):
  """A finished run without checkpoints begins from scratch while its lines are sent."""
  monkeypatch.setattr(follower_lib, '_BATCH_LINES', 1)

  class Slow(FileTracker):
    def log(self, step, values, wall_time):
      super().log(step, values, wall_time)
      if step == 10:
        run.start()
        summaries.discard_after(run.path, -1)
        run.line(20, loss=5.0)

  run.line(10)
  run.line(20)
  run.stop()
  slow = Slow(tracker.path.parent)
  _follower(run, slow).send()
  assert steps(slow) == [10]


def test_positions_of_other_runs_and_invalid_ones_are_errors_with_a_remedy(run, tracker, tmp_path):
  state_dir = tmp_path / 'state'
  run.line(10)
  run.stop()
  trackers.Follower(run.path, tracker, state_dir).send()
  assert not (run.path / 'trackers').exists()
  other = GrowingRun(tmp_path / 'runs/other')
  other.event('nothing')
  other.start()
  with pytest.raises(ConfigError, match='must be the position in .*other.*Delete it'):
    trackers.Follower(other.path, tracker, state_dir)
  (state_dir / 'file.json').write_text('{"version": 1, "run_id": "../a", "step": 3}')
  with pytest.raises(ConfigError, match='position of version 1'):
    trackers.Follower(run.path, tracker, state_dir)


@pytest.mark.parametrize('begins_again', [False, True])
def test_a_run_that_is_deleted_or_replaced_ends_the_follower_and_changes_nothing_of_the_tracker(
  run, tmp_path, begins_again
):
  tracker = OverwritingTracker(tmp_path)
  follower = trackers.Follower(run.path, tracker)
  for step in (10, 20):
    run.line(step)
  run.checkpoint(10)
  follower.send()
  shutil.rmtree(run.path)
  if begins_again:
    other = GrowingRun(run.path)
    other.event('nothing')
    other.start()
    other.line(5)
  with pytest.raises(DataError, match='was deleted, or another run began there'):
    follower.send()
  assert steps(tracker) == [10, 20]


def test_a_run_whose_events_are_deleted_is_followed_further(run, tracker):
  follower = _follower(run, tracker)
  run.line(10)
  run.checkpoint(10)
  run.line(20)
  follower.send()
  (run.path / 'events.jsonl').unlink()
  assert follower.send().status == 'unknown'
  run.stop()
  assert follower.send().status == 'finished'
  assert steps(tracker) == [10, 20]


def test_one_follower_at_a_time_sends_a_run_to_a_tracker(run, tracker, tmp_path):
  tracker.knows_last_step = False
  run.line(10)
  run.stop()
  first = _follower(run, tracker)
  waits = _follower(run, tracker)
  other = trackers.Follower(run.path, OverwritingTracker(tmp_path))
  with first.alone(), other.alone():
    with pytest.raises(DirectoryInUseError, match='file.lock.* is locked. Wait until it ends'):
      with waits.alone():
        pass
    first.send()
  with waits.alone():
    waits.send()
  assert steps(tracker) == [10]


def test_a_directory_that_cannot_be_written_names_state_dir(run, tracker, tmp_path):
  (run.path / 'trackers').write_text('not a folder')
  run.line(10)
  run.stop()
  with pytest.raises(ConfigError, match='--state_dir'):
    _follower(run, tracker).send()
  trackers.Follower(run.path, tracker, tmp_path / 'state').send()
  assert steps(tracker) == [10]


def test_the_configuration_and_facts_are_sent_again_after_the_first_checkpoint(run, tracker):
  text = "TRAIN_STEPS = 5\nmine.load.api_key = 'secret'\n"
  (run.path / 'config.gin').write_text(text)
  follower = _follower(run, tracker)
  run.line(10)
  follower.send()
  assert tracker.run_info.configuration == {'TRAIN_STEPS': '5', 'mine.load.api_key': '***'}
  assert tracker.run_info.facts['hardware'] == 'cpu-1'
  assert 'random_seed' not in tracker.run_info.facts
  run.checkpoint(10, random_seed=7)
  run.line(20)
  follower.send()
  assert tracker.run_info.facts['random_seed'] == 7
  assert 'machine' not in str(tracker.run_info)
  assert [list(row) for row in read(tracker.path)][:2] == [['start'], ['start']]


_FOLLOW = textwrap.dedent("""
  import sys, time
  from t5x_lite import trackers
  from t5x_lite.trackers import follower
  from tests.trackers.tracker_cases import FileTracker

  follower._BATCH_LINES = 3
  tracker = FileTracker(sys.argv[2])
  tracker.knows_last_step = sys.argv[3] == 'yes'
  following = trackers.Follower(sys.argv[1], tracker)
  print('ready', flush=True)
  while not following.send().has_ended:
    time.sleep(0.002)
""")


@pytest.mark.parametrize('num_kills', [3, pytest.param(20, marks=pytest.mark.full, id='20 kills')])
@pytest.mark.parametrize('knows_last_step', ['yes', 'no'])
def test_a_follower_that_is_killed_at_random_points_loses_nothing(
  run, tracker, knows_last_step, num_kills
):
  """The run grows meanwhile: no step is missing or has two values, and only last batches are there twice."""
  command = [sys.executable, '-c', _FOLLOW, run.path, tracker.path.parent, knows_last_step]
  draw = random.Random(0)
  step = 0
  for _ in range(num_kills):
    process = subprocess.Popen(
      command, stdout=subprocess.PIPE, env={**os.environ, 'JAX_PLATFORMS': 'cpu'}
    )
    assert process.stdout is not None and process.stdout.readline()
    deadline = time.monotonic() + draw.uniform(0.0, 0.05)
    while time.monotonic() < deadline:
      step += 1
      run.line(step)
      if step % 5 == 0:
        run.checkpoint(step)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
  run.stop()
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
  found = steps(tracker)
  assert sorted(set(found)) == list(range(1, step + 1))
  assert losses(tracker) == {n: {1.0 / (1 + n)} for n in range(1, step + 1)}
  if knows_last_step == 'yes':
    assert found == sorted(set(found))
  else:
    # A batch has 3 lines here.
    assert len(found) - len(set(found)) <= num_kills * 3
