"""Checkpoint configs and policies: what is refused, when a save is due, what is kept."""

import inspect

import pytest

from t5x_lite import checkpoints, errors


def test_t5x_positional_order():
  # Gin files and code written for T5X pass these by position; what follows them is keyword-only.
  def positional(cls):
    return [p.name for p in inspect.signature(cls).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]

  assert positional(checkpoints.SaveCheckpointConfig) == [
      'dtype', 'period', 'checkpoint_steps', 'keep', 'keep_dataset_checkpoints', 'save_dataset', 'checkpointer_cls',
      'state_transformation_fns', 'checkpoint_manager_cls']
  assert positional(checkpoints.RestoreCheckpointConfig) == [
      'path', 'mode', 'assignment_map', 'strict', 'fallback_to_scratch', 'dtype', 'restore_dataset',
      'checkpointer_cls', 'state_transformation_fns', 'checkpoint_manager_cls']
  assert positional(checkpoints.CheckpointConfig) == ['save', 'restore']


def test_changed_defaults():
  assert checkpoints.SaveCheckpointConfig().save_dataset
  assert checkpoints.RestoreCheckpointConfig('somewhere').restore_dataset


@pytest.mark.parametrize('kwargs, message', [
    ({'dtype': 'int32'}, "dtype: got 'int32', expected the name of a floating dtype"),
    ({'dtype': 'flot32'}, "dtype: got 'flot32'"),
    ({'period': 0}, 'period: got 0, expected a whole number above 0'),
    ({'period': True}, 'period: got True'),
    ({'keep': -1}, 'keep: got -1'),
    ({'checkpoint_steps': [10, -1]}, 'checkpoint_steps: got -1'),
    ({'checkpointer_cls': object}, 'checkpointer_cls: got .* leave it out'),
    ({'checkpoint_manager_cls': object}, 'checkpoint_manager_cls: got'),
    ({'state_transformation_fns': ['f']}, 'state_transformation_fns: got'),
    ({'keep_best': 2}, 'have an effect only together'),
    ({'metric_name_to_monitor': 'accuracy'}, 'have an effect only together'),
    ({'metric_mode': 'maximum'}, 'metric_mode: got'),
    ({'save_dataset': False, 'keep_dataset_checkpoints': 1}, 'has no effect with save_dataset=False'),
])
def test_save_config_refuses(kwargs, message):
  with pytest.raises(errors.ConfigError, match=message):
    checkpoints.SaveCheckpointConfig(**kwargs)


@pytest.mark.parametrize('kwargs, message', [
    ({'path': ''}, 'path: got'),
    ({'path': None}, 'path: got'),
    ({'path': 'gs://bucket/run'}, 'remote path .* expected a local one'),
    ({'path': ['a', 's3://bucket/run']}, 'remote path'),
    ({'path': 'a', 'mode': 'latst'}, "mode: got 'latst'.* Did you mean 'latest'"),
    ({'path': 'a', 'dtype': 'int8'}, 'dtype: got'),
    ({'path': 'a', 'assignment_map': [('a',)]}, 'expected a pair'),
    ({'path': 'a', 'assignment_map': ['ab']}, 'expected a pair'),
    ({'path': 'a', 'assignment_map': [('a(', None)]}, 'is not a regular expression'),
    ({'path': 'a', 'checkpointer_cls': object}, 'checkpointer_cls: got'),
])
def test_restore_config_refuses(kwargs, message):
  with pytest.raises(errors.ConfigError, match=message):
    checkpoints.RestoreCheckpointConfig(**kwargs)
