"""T5X's interface to the checkpoints of a run."""

import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import partitioning
from tests.checkpoints.test_train_states import make_state

Interface = checkpoints.OrbaxCheckpointManagerInterface


def open_run(directory, **kwargs):
  return Interface(
    directory, make_state(0), partitioning.PjitPartitioner(num_partitions=2), **kwargs
  )


def test_saves_by_period_and_keeps_the_newest(tmp_path):
  manager = open_run(tmp_path, period=2, checkpoint_steps=[5], keep=2, force_keep_period=2)
  assert [step for step in range(7) if manager.should_save(step)] == [2, 4, 5, 6]
  assert [manager.save(make_state(step), force=False) for step in range(1, 7)] == [
    False,
    True,
    False,
    True,
    True,
    True,
  ]
  assert manager.all_steps() == [2, 4, 5, 6] and manager.latest_step() == 6
  assert manager.save(make_state(7)) and not manager.save(make_state(7))
  assert manager.all_steps() == [2, 4, 6, 7] and str(manager.directory) == str(tmp_path)
  manager.wait_until_finished()
  manager.close()
  assert int(manager.restore().step) == 7 and int(manager.restore(4).step) == 4
  # The directory of a checkpoint that is given.
  assert int(open_run(tmp_path / 'checkpoint_4').restore().step) == 7


def test_keeps_the_best(tmp_path):
  manager = open_run(
    tmp_path,
    keep=1,
    metric_name_to_monitor='train/loss',
    metric_mode='min',
    keep_checkpoints_without_metrics=False,
  )
  assert manager.retention['keep_best'] == 1 and manager.retention['metric_mode'] == 'min'
  with pytest.raises(errors.ConfigError, match='metric_mode'):
    open_run(tmp_path, keep=1, metric_name_to_monitor='train/loss', metric_mode='least')


def test_lazy_and_tensorflow_are_not_supported(tmp_path):
  with pytest.raises(errors.ConfigError, match='lazy_parameters` must be False'):
    open_run(tmp_path).restore(1, lazy_parameters=True)
  with pytest.raises(errors.CheckpointError, match='Mesh TensorFlow'):
    open_run(tmp_path).restore_from_tf_checkpoint('a')
