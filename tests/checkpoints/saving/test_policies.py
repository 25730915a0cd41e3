"""Policies of saving and keeping."""

import math
import types

import pytest

from t5x_lite import checkpoints
from t5x_lite import errors


@pytest.mark.parametrize(
  'period, at, saved, next_after_3',
  [
    (4, None, [4, 8], 4),
    (None, [0, 3, 7], [0, 3, 7], 7),
    (4, [5], [4, 5, 8], 4),
    (None, [], [], None),
    (None, None, [], None),
  ],
)
def test_schedule(tmp_path, period, at, saved, next_after_3):
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig(period=period, checkpoint_steps=at)
  ) as manager:
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


def test_policies_begin_at_a_step():
  every = checkpoints.EveryNSteps(3, from_step=5)
  assert [step for step in range(10) if every.should_save(step)] == [6, 9]
  assert [every.next_step(step) for step in (0, 5, 6)] == [6, 6, 9]
  late = checkpoints.EveryNMinutes(2, from_step=5)
  points = [checkpoints.SavePoint(seconds_since_save=seconds) for seconds in (119.9, 120)]
  assert [late.should_save(step, point) for step in (4, 5) for point in points] == [
    False,
    False,
    False,
    True,
  ]
  assert not late.should_save(9) and late.next_step(0) is None


def test_an_infinite_value_is_never_the_best():
  point = checkpoints.SavePoint(metrics_fn=lambda: {'f1': math.inf}, best={('f1', 'max'): 0.5})
  assert not checkpoints.WhenBest('f1').should_save(1, point)


def test_the_best_value():
  best = checkpoints.WhenBest('f1', 'max', from_step=2)

  def should_save(step, value, before=None):
    return best.should_save(
      step,
      checkpoints.SavePoint(
        metrics_fn=lambda: {'f1': value}, best={} if before is None else {('f1', 'max'): before}
      ),
    )

  assert should_save(2, 0.0) and should_save(2, 0.5, 0.4) and not should_save(1, 0.5)
  assert (
    not should_save(2, 0.4, 0.4)
    and not should_save(2, float('nan'))
    and not should_save(2, float('nan'), 0.1)
  )
  assert not should_save(2, float('inf'), 0.1)
  assert not best.should_save(2, checkpoints.SavePoint()) and not best.should_save(2)


@pytest.mark.parametrize('result', [None, [True, False]])
def test_results_of_custom_policies(result):
  policy = types.SimpleNamespace(
    should_save=lambda step, point: result, next_step=lambda step: None
  )
  policies = checkpoints.save_policies_from_config(
    checkpoints.SaveCheckpointConfig(policies=[policy])
  )
  with pytest.raises(
    errors.ConfigError, match='should_save` must be a method that returns True or False'
  ):
    policies.should_save(1)


@pytest.mark.parametrize(
  'make',
  [
    lambda: checkpoints.EveryNSteps(0),
    lambda: checkpoints.EveryNSteps(1, -1),
    lambda: checkpoints.EveryNMinutes(0),
    lambda: checkpoints.WhenBest('f1', 'largest'),
    lambda: checkpoints.SaveCheckpointConfig(policies=['best']).check(),
    lambda: checkpoints.WhenBest(None),
    lambda: checkpoints.AtSteps(5),
    lambda: checkpoints.AtSteps([]),
    lambda: checkpoints.AtSteps([-1]),
    lambda: checkpoints.SaveCheckpointConfig(policies=checkpoints.WhenBest('f1')).check(),
    lambda: checkpoints.SaveCheckpointConfig(policies=[checkpoints.WhenBest]).check(),
    lambda: checkpoints.SaveCheckpointConfig(checkpoint_steps=5).check(),
  ],
)
def test_errors(make):
  with pytest.raises(errors.ConfigError):
    make()


def test_retention_against_brute_force():
  steps = [0, 10, 20, 30, 40, 50]
  metrics = {
    0: {'acc': 0.5},
    10: {'acc': 0.9},
    20: {'acc': float('nan')},
    30: {'acc': 0.9},
    40: {'loss': 1.0},
  }

  def best(count, mode='max', spare=False):
    return checkpoints.KeepBest(count, 'acc', mode, spare)

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
