"""Names of trackers, and packages that are missing."""

import pytest

from t5x_lite import trackers
from t5x_lite.errors import ConfigError
from t5x_lite.trackers import base
from tests.trackers import tracker_cases


def test_trackers_have_the_names_of_the_table():
  for name in trackers.TRACKERS:
    assert getattr(trackers, trackers.TRACKERS[name]).name == name
  assert isinstance(trackers.make_tracker('tensorboard'), trackers.TensorBoard)
  tracker = trackers.TensorBoard(log_dir='a')
  assert trackers.make_tracker(tracker) is tracker


def test_an_unknown_name_and_a_missing_package_are_errors_with_a_remedy():
  with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
    trackers.make_tracker('wandbb')
  with pytest.raises(
    ConfigError, match=r'`Wandb` needs wandb_2, .*Install with `pip install .*wandb'
  ):
    base.check_installed('`Wandb`', 'wandb_2', 'wandb')


@pytest.mark.parametrize('name', ['', 'a/b', 'zwei wörter', None, 5])
def test_a_name_that_cannot_be_a_file_is_an_error_before_the_run_starts(name, tmp_path):
  tracker = tracker_cases.FileTracker(tmp_path)
  tracker.name = name
  with pytest.raises(ConfigError, match=r"`FileTracker.name` must be letters, digits, '-' and '_'"):
    trackers.make_tracker(tracker)


def test_a_tracker_that_cannot_overwrite_says_so():
  class Mine(trackers.Tracker):
    def start(self, run_info):
      pass

    log = table = finish = flush = start

  assert Mine().last_step() is None
  with pytest.raises(NotImplementedError, match='Mine cannot overwrite'):
    Mine().discard_after(3)


@pytest.mark.parametrize('options', [{'project': 5}, {'tags': 'one'}, {'tags': [1]}])
def test_options_of_the_wrong_type_are_errors(options):
  with pytest.raises(ConfigError, match=r'`Wandb\.\w+` must be'):
    trackers.Wandb(**options)
  with pytest.raises(ConfigError, match=r'`Mlflow.experiment` must be'):
    trackers.Mlflow(experiment=5)
  with pytest.raises(ConfigError, match=r'`TensorBoard.log_dir` must be'):
    trackers.TensorBoard(log_dir=5)
