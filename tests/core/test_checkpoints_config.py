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


@pytest.mark.parametrize('period, at, saved, next_after_3', [
    (4, None, [4, 8], 4),
    (None, [0, 3, 7], [0, 3, 7], 7),
    (4, [5], [4, 5, 8], 4),
    (None, [], [], None),
    (None, None, [], None),
])
def test_schedule(tmp_path, period, at, saved, next_after_3):
  with checkpoints.CheckpointManager(
      tmp_path, save_cfg=checkpoints.SaveCheckpointConfig(period=period, checkpoint_steps=at)) as manager:
    assert [step for step in range(10) if manager.should_save(step)] == saved
    assert manager.next_save_step(3) == next_after_3


def test_policies_compose():
  request = checkpoints.OnRequest()
  policy = checkpoints.AnySavePolicy((checkpoints.EveryNSteps(10), request))
  assert not policy.should_save(7)
  request.request()
  assert policy.should_save(7)
  request.done()
  assert not policy.should_save(7) and policy.should_save(20)
  assert policy.next_step(0) == 10


def test_retention_against_brute_force():
  steps = [0, 10, 20, 30, 40, 50]
  metrics = {0: {'acc': .5}, 10: {'acc': .9}, 20: {'acc': float('nan')}, 30: {'acc': .9}, 40: {'loss': 1.}}
  best = lambda count, mode='max', spare=False: checkpoints.KeepBest(count, 'acc', mode, spare)
  cases = [
      ([checkpoints.KeepAll()], [], []),
      ([checkpoints.KeepLast(2)], [], [0, 10, 20, 30]),
      ([checkpoints.KeepLast(10)], [], []),
      ([checkpoints.KeepEvery(20)], [], [10, 30]),
      ([checkpoints.KeepLast(1), checkpoints.KeepEvery(30)], [], [10, 20, 40]),
      ([checkpoints.KeepLast(1)], [10], [0, 20, 30, 40]),
      # Of equal values the newer one is better; the newest checkpoint stays whatever its metric.
      ([best(1)], [], [0, 10, 20, 40]),
      ([best(2)], [], [0, 20, 40]),
      ([best(1, 'min')], [], [10, 20, 30, 40]),
      ([best(1, spare=True)], [], [0, 10]),
  ]
  for policies, pinned, deleted in cases:
    assert checkpoints.steps_to_delete(policies, steps, metrics, pinned) == deleted, policies
  assert checkpoints.steps_to_delete([checkpoints.KeepLast(1)], [], {}, []) == []
