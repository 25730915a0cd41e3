"""Options of checkpoints: T5X's argument order, defaults and invalid values."""

import dataclasses
import functools
import inspect
import logging
import typing

import jax.numpy as jnp
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import gin_utils


def test_t5x_positional_order():
  # Gin files and code written for T5X pass these by position; further options are keyword-only.
  def positional(cls):
    return [
      p.name
      for p in inspect.signature(cls).parameters.values()
      if p.kind == p.POSITIONAL_OR_KEYWORD
    ]

  assert positional(checkpoints.SaveCheckpointConfig) == [
    'dtype',
    'period',
    'checkpoint_steps',
    'keep',
    'keep_dataset_checkpoints',
    'save_dataset',
    'checkpointer_cls',
    'state_transformation_fns',
    'checkpoint_manager_cls',
  ]
  assert positional(checkpoints.RestoreCheckpointConfig) == [
    'path',
    'mode',
    'assignment_map',
    'strict',
    'fallback_to_scratch',
    'dtype',
    'restore_dataset',
    'checkpointer_cls',
    'state_transformation_fns',
    'checkpoint_manager_cls',
  ]
  assert positional(checkpoints.CheckpointConfig) == ['save', 'restore']


def test_changed_defaults():
  assert checkpoints.SaveCheckpointConfig().save_dataset
  assert checkpoints.RestoreCheckpointConfig('somewhere').restore_dataset


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'dtype': 'int32'}, "dtype` must be a floating dtype such as .*, got 'int32'"),
    ({'dtype': 'flot32'}, "dtype` must .*, got 'flot32'"),
    ({'period': 0}, 'period` must be an integer >= 1 or None, got 0'),
    ({'period': True}, 'period` must .*got True'),
    ({'keep': -1}, 'keep` must .*got -1'),
    ({'max_failures_in_a_row': None}, 'max_failures_in_a_row` must be an integer >= 1, got None'),
    ({'checkpoint_steps': [10, -1]}, r'checkpoint_steps` must be integers >= 0, got \[10, -1\]'),
    (
      {'checkpointer_cls': object},
      'checkpointer_cls` must be a class with the method save, .*object',
    ),
    (
      {'checkpoint_manager_cls': 3},
      'checkpoint_manager_cls` must be a class with the method save, .*got 3',
    ),
    (
      {
        'checkpointer_cls': checkpoints.SaveBestCheckpointer,
        'keep': 2,
        'keep_best': 3,
        'metric_name_to_monitor': 'a',
      },
      'keep_best` must be None with this checkpointer_cls, got 3. Set keep',
    ),
    (
      {'state_transformation_fns': ['f']},
      r"state_transformation_fns` must be a sequence of functions, got \['f'\]",
    ),
    (
      {'keep_best': 2},
      r'keep_best` must be None with metric_name_to_monitor=None, got 2. Set both',
    ),
    (
      {'metric_name_to_monitor': 'accuracy'},
      "keep_best` must be an integer >= 1 with metric_name_to_monitor='accuracy', got None. Set both",
    ),
    ({'metric_mode': 'maximum'}, "metric_mode` must be one of 'max', 'min', got"),
    (
      {'save_dataset': False, 'keep_dataset_checkpoints': 1},
      'must be None with save_dataset=False, got 1',
    ),
  ],
)
def test_invalid_save_configs(kwargs, message):
  with pytest.raises(errors.ConfigError, match=f'SaveCheckpointConfig.*{message}'):
    checkpoints.SaveCheckpointConfig(**kwargs).check()


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'path': ''}, "path` must be the path of .*got ''"),
    ({'path': None}, 'path` must be the path of .*got None'),
    ({'path': 'az://bucket/run'}, "path` must be a path on a disk or in an object store, got 'az:"),
    (
      {'path': ['a', 'az://bucket/run']},
      "path` must be a path on a disk or in an object store, got 'az:",
    ),
    ({'path': 'a', 'mode': 'latst'}, "mode` must be one of .*got 'latst'.* Did you mean 'latest'"),
    ({'path': 'a', 'strict': 'no'}, "strict` must be True or False, got 'no'"),
    ({'path': 'a', 'dtype': 'int8'}, "dtype` must .*got 'int8'"),
    ({'path': 'a', 'assignment_map': [('a',)]}, r"The rule \('a',\) is not a pair"),
    ({'path': 'a', 'assignment_map': ['ab']}, "The rule 'ab' is not a pair"),
    (
      {'path': 'a', 'assignment_map': [('a(', None)]},
      r"'a\(' is not a regular expression: missing \)",
    ),
    (
      {'path': 'a', 'checkpointer_cls': object},
      'checkpointer_cls` must be a class with the method restore',
    ),
  ],
)
def test_invalid_restore_configs(kwargs, message):
  with pytest.raises(errors.ConfigError, match=f'RestoreCheckpointConfig.*{message}'):
    checkpoints.RestoreCheckpointConfig(**kwargs).check()


def test_save_best_of_t5x_keeps_the_best_checkpoints():
  best = functools.partial(
    checkpoints.SaveBestCheckpointer,
    metric_name_to_monitor='train/loss',
    metric_mode='min',
    force_keep_period=20,
    keep_checkpoints_without_metrics=False,
  )
  cfg = checkpoints.SaveCheckpointConfig(keep=3, checkpointer_cls=best)
  expected = checkpoints.SaveCheckpointConfig(
    keep_best=3,
    metric_name_to_monitor='train/loss',
    metric_mode='min',
    keep_period=20,
    keep_checkpoints_without_metrics=False,
    checkpointer_cls=best,
  )
  assert cfg == expected == dataclasses.replace(cfg)
  manager = functools.partial(
    checkpoints.OrbaxCheckpointManagerInterface, metric_name_to_monitor='train/loss'
  )
  cfg = checkpoints.SaveCheckpointConfig(keep=3, keep_period=5, checkpoint_manager_cls=manager)
  assert (cfg.keep, cfg.keep_best, cfg.keep_period, cfg.metric_mode) == (None, 3, 5, 'max')
  assert (
    checkpoints.SaveCheckpointConfig(checkpointer_cls=best).keep_best is None
  )  # without `keep` all are kept


def test_a_checkpointer_that_decides_what_is_kept_can_be_copied():
  class Best(checkpoints.Checkpointer):
    @property
    def retention(self):
      return {'keep': None, 'keep_best': 2, 'metric_name_to_monitor': 'train/loss'}

  cfg = checkpoints.SaveCheckpointConfig(checkpointer_cls=Best)
  assert dataclasses.replace(cfg, period=5).keep_best == 2


_GIN = """
from __gin__ import dynamic_registration
from t5x import checkpoints
from t5x import utils
utils.CheckpointConfig.save = @utils.SaveCheckpointConfig()
utils.SaveCheckpointConfig:
  keep = 2
  checkpointer_cls = @checkpoints.SaveBestCheckpointer
checkpoints.SaveBestCheckpointer.metric_name_to_monitor = 'inference_eval/task/match'
{more}
"""


def _from_gin(tmp_path, more=''):
  (tmp_path / 'a.gin').write_text(_GIN.format(more=more))
  return gin_utils.load(
    't5x_lite.checkpoints.CheckpointConfig', gin_utils.read([str(tmp_path / 'a.gin')])
  ).call()


def test_the_checkpointer_of_a_gin_file_of_t5x_has_its_effect(tmp_path, caplog):
  save = _from_gin(tmp_path).save
  assert (save.keep_best, save.metric_name_to_monitor) == (2, 'inference_eval/task/match')
  checkpoints.check_supported(checkpoints.CheckpointConfig(save))
  # The configuration passes it, here and in T5X.
  with caplog.at_level(logging.INFO):
    save = _from_gin(tmp_path, 'checkpoints.SaveBestCheckpointer.keep = 3').save
  assert save.keep_best == 2
  assert 'SaveBestCheckpointer.keep has no effect' in caplog.text


def test_the_functions_of_a_restore_begin_with_the_assignment_map():
  def fn(state_dict, target_state_dict, *, is_resuming=False):
    return state_dict

  cfg = checkpoints.RestoreCheckpointConfig(
    'a', assignment_map=[('b', 'a'), ('c', None)], state_transformation_fns=[fn]
  )
  first, second = cfg.state_transformation_fns
  assert first({'a': 1, 'c': 2}, {'b': 0, 'c': 0}) == {'b': 1} and second is fn
  assert first({'a': 1}, {'b': 0}, is_resuming=True) == {'a': 1}
  assert dataclasses.replace(cfg) == cfg
  assert dataclasses.replace(cfg, assignment_map=None).state_transformation_fns == (fn,)


@pytest.mark.parametrize(
  'cls', [checkpoints.RestoreCheckpointConfig, checkpoints.SaveCheckpointConfig]
)
def test_types_of_options_can_be_resolved_for_gin(cls):
  assert {'dtype', 'checkpointer_cls'} <= {*typing.get_type_hints(cls.__init__)}


def test_a_dtype_that_is_a_class_is_kept_by_its_name():
  assert checkpoints.RestoreCheckpointConfig('a', dtype=jnp.bfloat16).dtype == 'bfloat16'
