"""Runs with trackers: these get what the files of the run have, and never stop or delay the run."""

import dataclasses
import functools
import pathlib
import time

import pytest

from t5x_lite import trackers
from t5x_lite.apps.train.config import TrainConfig
from t5x_lite.errors import ConfigError
from t5x_lite.trackers import threads
from t5x_lite.trainer import actions
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run
from tests.trackers.tracker_cases import FileTracker
from tests.trackers.tracker_cases import read


class _StopAt(actions.BaseAction):
  """Ends the run as a failure of its data does."""

  def __init__(self, step):
    self._step = step

  def run(self, train_state, metrics_by_task):
    if int(train_state.step) == self._step:
      raise RuntimeError('stopped')
    return False


def _sent(tracker):
  """Returns step to the metrics that a tracker has; each step must be there once."""
  rows = [row for row in read(tracker.path) if 'step' in row]
  assert len({row['step'] for row in rows}) == len(rows)
  return {row['step']: row['values'] for row in rows}


def _of_files(model_dir):
  """Returns step to the metrics of all files of a run."""
  found = {}
  for writer, rows in toy_run.lines(model_dir).items():
    for row in rows:
      for name, value in row.items():
        if name != 'step' and not isinstance(value, (list, str)):
          found.setdefault(row['step'], {})[f'{writer}/{name}'] = value
  return found


def _without_times(sent):
  return {
    step: {name: value for name, value in values.items() if '/timing/' not in name}
    for step, values in sent.items()
  }


def test_a_run_that_resumes_sends_what_its_files_have(tmp_path):
  tracker = FileTracker(tmp_path)
  model_dir = tmp_path / 'run'
  with pytest.raises(RuntimeError, match='stopped'):
    toy_run.train(model_dir, trackers=[tracker], actions={'TRAIN': [_StopAt(16)]})
  toy_run.train(model_dir, trackers=[tracker])
  assert _without_times(_sent(tracker)) == _of_files(model_dir)
  rows = read(tracker.path)
  assert [row['finish'] for row in rows if 'finish' in row] == ['failed', 'finished']
  assert len({row['start'] for row in rows if 'start' in row}) == 1
  tables = [(row['table'], row['at']) for row in rows if 'table' in row]
  assert tables == [('inference_eval/letters', 10), ('inference_eval/letters', 20)]
  facts = tracker.run_info.facts
  assert facts['num_parameters'] > 0 and facts['data/batch_size'] == toy_run.BATCH_SIZE


def test_a_tracker_that_blocks_delays_the_end_of_a_run_by_a_limited_time(
  tmp_path, monkeypatch, caplog
):
  class Blocking(FileTracker):
    def start(self, run_info):
      time.sleep(3600)

  short = functools.partial(threads.FollowerThreads, end_seconds=0.5)
  monkeypatch.setattr(trackers, 'FollowerThreads', short)
  start = time.monotonic()
  step, _ = toy_run.train(tmp_path / 'run', trackers=[Blocking(tmp_path)])
  assert step == 20
  assert time.monotonic() - start < 60
  messages = [record.getMessage() for record in caplog.records if 'tracker' in record.getMessage()]
  assert len(messages) == 1
  assert f't5x_lite track {tmp_path}/run --once' in messages[0]


def test_a_dry_run_starts_no_tracker(tmp_path):
  tracker = FileTracker(tmp_path)
  toy_run.train(tmp_path / 'run', trackers=[tracker], dry_run=True)
  assert read(tracker.path) == []


def test_names_and_objects_may_be_mixed(tmp_path):
  @dataclasses.dataclass
  class Mine(FileTracker):
    path: pathlib.Path
    run_info: trackers.RunInfo | None = None
    knows_last_step: bool = True
    name = 'mine'

  tracker = Mine(tmp_path / 'mine.jsonl')  # without a hash
  toy_run.train(tmp_path / 'run', trackers=[tracker, 'tensorboard'])
  events = summaries.read_metrics(tmp_path / 'run/trackers/run/metrics.jsonl')
  assert [row['step'] for row in events] == sorted(_sent(tracker))


@pytest.mark.parametrize('value', ['wandb', ['wandbb'], [5], ['wandb', 'wandb'], 5])
def test_invalid_trackers_are_errors_before_the_run(tmp_path, value):
  with pytest.raises(ConfigError, match=r"`train\.trackers` must be a list .* \['wandb'\]"):
    toy_run.train(tmp_path / 'run', trackers=value)
  assert TrainConfig.__dataclass_fields__['trackers'].default == ()
