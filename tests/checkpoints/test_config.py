"""Options of checkpoints: T5X's argument order, defaults and invalid values."""

import inspect

import pytest

from t5x_lite import checkpoints, errors


def test_t5x_positional_order():
  # Gin files and code written for T5X pass these by position; further options are keyword-only.
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
    ({'dtype': 'int32'}, "dtype` must be a floating dtype such as .*, got 'int32'"),
    ({'dtype': 'flot32'}, "dtype` must .*, got 'flot32'"),
    ({'period': 0}, 'period` must be an integer >= 1 or None, got 0'),
    ({'period': True}, 'period` must .*got True'),
    ({'keep': -1}, 'keep` must .*got -1'),
    ({'max_failures_in_a_row': None}, 'max_failures_in_a_row` must be an integer >= 1, got None'),
    ({'checkpoint_steps': [10, -1]}, r'checkpoint_steps` must be integers >= 0, got \[10, -1\]'),
    ({'checkpointer_cls': object}, 'checkpointer_cls` must be a class with the method save, .*object'),
    ({'checkpoint_manager_cls': 3}, 'checkpoint_manager_cls` must be a class with the method save, .*got 3'),
    ({'checkpointer_cls': checkpoints.SaveBestCheckpointer, 'keep': 2, 'keep_best': 3, 'metric_name_to_monitor': 'a'},
     'keep_best` must be None with this checkpointer_cls, got 3. Set keep'),
    ({'state_transformation_fns': ['f']}, r"state_transformation_fns` must be a sequence of functions, got \['f'\]"),
    ({'keep_best': 2}, r'keep_best` must be None with metric_name_to_monitor=None, got 2. Set both'),
    ({'metric_name_to_monitor': 'accuracy'},
     "keep_best` must be an integer >= 1 with metric_name_to_monitor='accuracy', got None. Set both"),
    ({'metric_mode': 'maximum'}, "metric_mode` must be one of 'max', 'min', got"),
    ({'save_dataset': False, 'keep_dataset_checkpoints': 1}, 'must be None with save_dataset=False, got 1'),
])
def test_invalid_save_configs(kwargs, message):
  with pytest.raises(errors.ConfigError, match=f'SaveCheckpointConfig.*{message}'):
    checkpoints.SaveCheckpointConfig(**kwargs)


@pytest.mark.parametrize('kwargs, message', [
    ({'path': ''}, "path` must be the path of .*got ''"),
    ({'path': None}, 'path` must be the path of .*got None'),
    ({'path': 'az://bucket/run'}, "path` must be a path on a disk or in an object store, got 'az:"),
    ({'path': ['a', 'az://bucket/run']}, "path` must be a path on a disk or in an object store, got 'az:"),
    ({'path': 'a', 'mode': 'latst'}, "mode` must be one of .*got 'latst'.* Did you mean 'latest'"),
    ({'path': 'a', 'dtype': 'int8'}, "dtype` must .*got 'int8'"),
    ({'path': 'a', 'assignment_map': [('a',)]}, r"The rule \('a',\) is not a pair"),
    ({'path': 'a', 'assignment_map': ['ab']}, "The rule 'ab' is not a pair"),
    ({'path': 'a', 'assignment_map': [('a(', None)]}, r"'a\(' is not a regular expression: missing \)"),
    ({'path': 'a', 'checkpointer_cls': object}, 'checkpointer_cls` must be a class with the method restore'),
])
def test_invalid_restore_configs(kwargs, message):
  with pytest.raises(errors.ConfigError, match=f'RestoreCheckpointConfig.*{message}'):
    checkpoints.RestoreCheckpointConfig(**kwargs)
