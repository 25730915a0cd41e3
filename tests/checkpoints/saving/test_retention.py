"""Retention: which checkpoints are kept, set aside and deleted."""

import json
import os

import pytest

from t5x_lite import checkpoints
from t5x_lite.checkpoints import folders
from tests.checkpoints import checkpoint_states as states

Cfg = checkpoints.SaveCheckpointConfig


def flip_bit(path, bit=3, position=0):
  data = bytearray(path.read_bytes())
  data[position] ^= 1 << bit
  path.write_bytes(data)


def save(directory, steps, cfg=None, seed=0, **kwargs):
  with checkpoints.CheckpointManager(directory, save_cfg=cfg or Cfg()) as manager:
    for step in steps:
      manager.save(step, states.state(step, seed), **kwargs)


def test_retention(tmp_path):
  cfg = Cfg(
    keep=2,
    keep_period=4,
    keep_best=1,
    metric_name_to_monitor='acc',
    keep_checkpoints_without_metrics=False,
  )
  with checkpoints.CheckpointManager(tmp_path, save_cfg=cfg) as manager:
    for step in range(1, 9):
      manager.save(step, states.state(step), metrics={'acc': 1.0 if step == 2 else 0.0})
      if step == 3:
        manager.wait()
        checkpoints.pin_checkpoint(manager.checkpoint_path(3), 'keep for the paper')
    manager.wait()
    assert manager.all_steps() == [2, 3, 4, 7, 8]  # Best; pinned; every 4; last two.
    # Metrics may come later than the save; they count from the next commit on.
    manager.record_metrics(7, {'acc': 2.0})
    checkpoints.unpin_checkpoint(manager.checkpoint_path(3))
    for step in (9, 10):
      manager.save(step, states.state(step))
    manager.wait()
    assert manager.all_steps() == [4, 7, 8, 9, 10]
  # The record outlives the run.
  with checkpoints.CheckpointManager(tmp_path, save_cfg=cfg) as manager:
    manager.save(11, states.state(11), metrics={'acc': 1.5})
    manager.wait()
    assert manager.all_steps() == [4, 7, 8, 10, 11]
  checkpoints.remove_checkpoint_dir(tmp_path / 'checkpoint_4')
  checkpoints.pin_checkpoint(tmp_path / 'checkpoint_7')
  checkpoints.remove_checkpoint_dir(tmp_path / 'checkpoint_7')
  assert checkpoints.all_steps(tmp_path) == [7, 8, 10, 11]
  assert checkpoints.is_pinned_checkpoint(tmp_path / 'checkpoint_7')
  assert checkpoints.verify_checkpoint(tmp_path / 'checkpoint_7').step == 7


def test_metrics_of_an_earlier_checkpoint_of_the_step_do_not_count(tmp_path):
  cfg = Cfg(keep_best=1, metric_name_to_monitor='acc', keep_checkpoints_without_metrics=False)
  with checkpoints.CheckpointManager(tmp_path, save_cfg=cfg) as manager:
    manager.save(1, states.state(1), metrics={'acc': 0.5})
    manager.save(2, states.state(2))
    manager.wait()
    manager.record_metrics(2, {'acc': 0.9})
  flip_bit(tmp_path / 'checkpoint_2/state/_METADATA')
  with checkpoints.CheckpointManager(tmp_path, save_cfg=cfg) as manager:
    assert manager.restore(None, states.target()).step == 1
    manager.save(
      2, states.state(2, seed=1), metrics={'acc': 0.1}
    )  # The run went another way this time.
    manager.save(3, states.state(3), metrics={'acc': 0.2})
  assert checkpoints.all_steps(tmp_path) == [1, 3]


def test_a_metric_that_is_not_reported_is_logged(tmp_path, caplog):
  cfg = Cfg(keep_best=1, metric_name_to_monitor='training_eval/task/acuracy')
  with caplog.at_level('WARNING'):
    save(tmp_path, [1], cfg)
    assert 'metric_name_to_monitor' not in caplog.text  # No evaluation yet.
    save(tmp_path, [2], cfg, metrics={'training_eval/task/accuracy': 0.5})
  assert (
    "no checkpoint has a metric of that name. Did you mean 'training_eval/task/accuracy'?"
    in caplog.text
  )


def test_the_new_checkpoint_is_kept_with_damaged_newer_ones(tmp_path):
  save(tmp_path, [10, 30])
  flip_bit(tmp_path / 'checkpoint_30/state/_METADATA')
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg(keep=1)) as manager:
    assert manager.restore(None, states.target()).step == 10
    manager.save(20, states.state(20))
    manager.wait()
    assert manager.all_steps() == [20, 30]
    assert checkpoints.newest_sound_step(tmp_path) == 20
    assert manager.save(30, states.state(30, seed=1))  # Takes the place of the damaged one.
  assert checkpoints.all_steps(tmp_path) == [30]
  states.assert_same(checkpoints.load(tmp_path / 'checkpoint_30'), states.flat_numpy(30, seed=1))
  assert sorted(os.listdir(tmp_path)) == ['.lock', 'checkpoint_30']


@pytest.mark.parametrize('why', ['pinned', 'of another program'])
def test_a_kept_checkpoint_is_renamed_when_its_step_is_saved_again(tmp_path, why, caplog):
  # The run goes from another point than this checkpoint, and comes to its step.
  save(tmp_path, [10])
  if why == 'pinned':
    checkpoints.pin_checkpoint(tmp_path / 'checkpoint_10')
  else:
    (tmp_path / 'checkpoint_10/manifest.json').unlink()
  with caplog.at_level('WARNING'):
    save(tmp_path, [10], seed=1)
  states.assert_same(checkpoints.load(tmp_path / 'checkpoint_10'), states.flat_numpy(10, seed=1))
  for _ in range(2):
    (aside,) = tmp_path.glob('checkpoint_10.replaced-*')
    states.assert_same(checkpoints.load(aside), states.flat_numpy(10))
    assert f'was renamed to {aside.name} and kept' in caplog.text and checkpoints.all_steps(
      tmp_path
    ) == [10]
    checkpoints.lock_model_dir(tmp_path).release()  # Tidying up leaves it there, too.


def test_an_unreadable_record_of_metrics_is_not_fatal(tmp_path):
  (tmp_path / 'checkpoint_metrics.json').write_text('{"1": ')
  save(
    tmp_path,
    [1, 2],
    Cfg(keep_best=1, metric_name_to_monitor='acc', keep_checkpoints_without_metrics=False),
    metrics={'acc': 1.0},
  )
  assert checkpoints.all_steps(tmp_path) == [2]
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    manager.record_metrics(2, {'acc': 3})
  assert json.loads((tmp_path / 'checkpoint_metrics.json').read_text()) == {'2': {'acc': 3.0}}


def test_a_checkpoint_that_cannot_be_deleted_does_not_fail_a_save(tmp_path, monkeypatch, caplog):
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg(keep=1)) as manager:
    manager.save(1, states.state(1))
    manager.wait()
    with monkeypatch.context() as patch:
      patch.setattr(
        folders, 'remove_checkpoint_dir', lambda path: (_ for _ in ()).throw(OSError('busy'))
      )
      with caplog.at_level('WARNING'):
        manager.save(2, states.state(2))
        manager.wait()
    assert 'Deleting old checkpoints' in caplog.text and manager.all_steps() == [1, 2]
    manager.save(3, states.state(3))
    manager.wait()
    assert manager.all_steps() == [3]
