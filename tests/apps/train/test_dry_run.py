"""`--dry_run` rejects what the run rejects after its plan: positions in other data, no batch, damaged values, sizes."""

import logging
import os
import re

import numpy as np
import optax
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import errors
from t5x_lite import optimizers
from t5x_lite import schedules
from tests.apps.train import toy_run

_SAVE_ONLY = {'eval_period': 0, 'train_eval_dataset_cfg': None, 'infer_eval_dataset_cfg': None}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A run of 6 steps with AdamW."""
  model_dir = tmp_path_factory.mktemp('saved')
  toy_run.train(model_dir, 6, **_SAVE_ONLY)
  return model_dir


def _restore(path, **kwargs):
  return checkpoints.RestoreCheckpointConfig(str(path), **{'restore_dataset': False, **kwargs})


def _spoilt(saved, tmp_path, name, change):
  """Return a checkpoint with one array changed."""
  state = checkpoints.load(saved / 'checkpoint_6')
  state['target'][name] = change(np.asarray(state['target'][name]))
  metadata = checkpoints.read_metadata(saved / 'checkpoint_6')
  with checkpoints.CheckpointManager(
    tmp_path / 'spoilt', save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(6, state, metadata=metadata)
  return tmp_path / 'spoilt' / 'checkpoint_6'


@pytest.mark.parametrize('dry_run', [True, False])
def test_model_directories_that_a_run_rejects(tmp_path, dry_run):
  (tmp_path / 'file').write_text('mine')
  for name in ('file', 'file/run', 'file/a/run'):
    with pytest.raises(errors.CheckpointError, match='cannot be written: it is a file, or in one'):
      toy_run.train(tmp_path / name, 1, dry_run=dry_run, **_SAVE_ONLY)
  expected = f'write {os.path.expanduser("~/runs/x")!r}'
  with pytest.raises(errors.ConfigError, match=re.escape(expected)):
    toy_run.train('~/runs/x', 1, dry_run=dry_run, **_SAVE_ONLY)
  assert [path.name for path in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('dry_run', [True, False])
def test_what_a_run_rejects(saved, tmp_path, dry_run):
  def check(error, match, model_dir=tmp_path / 'new', **kwargs):
    with pytest.raises(error, match=match):
      toy_run.train(model_dir, 8, dry_run=dry_run, **{**_SAVE_ONLY, **kwargs})

  other = data.DatasetConfig(
    toy_run.TASK, {'inputs': 6, 'targets': 6}, 'train', 8, True, 5, source='builtin'
  )
  check(errors.DataError, 'position in other data.*seed', saved, train_dataset_cfg=other)
  check(
    errors.DataError,
    'at least one batch of 64 rows',
    train_dataset_cfg=toy_run.dataset('train', batch_size=64, num_epochs=1),
  )

  def ends(cfg, *args, **kwargs):
    cfg = toy_run.dataset('train', batch_size=64, num_epochs=1)
    return data.open_train_iterator(cfg, *args, **kwargs)

  config = toy_run.dataset('train', batch_size=64)
  check(errors.DataError, 'at least one batch', train_dataset_cfg=config, get_dataset_fn=ends)
  path = _spoilt(saved, tmp_path, 'embedding', lambda array: array * np.nan)
  check(
    errors.CheckpointError,
    'non-finite values in target/embedding',
    restore=_restore(path, mode='specific'),
  )
  file = next(found for found in (path / 'state/d').iterdir())
  content = file.read_bytes()
  file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  check(errors.CheckpointDamagedError, 'damaged', restore=_restore(path, mode='specific'))


def test_a_resumed_run_whose_data_has_ended_has_a_plan(tmp_path, capsys):
  options = {**_SAVE_ONLY, 'train_dataset_cfg': toy_run.dataset('train', num_epochs=1)}
  toy_run.train(tmp_path, 99, **options)
  assert toy_run.train(tmp_path, 99, dry_run=True, **options)[0] == 7
  assert 'Plan\nstart' in capsys.readouterr().out


def test_work_before_the_first_step_of_a_new_run_is_planned(tmp_path, capsys):
  options = {'run_eval_before_training': True, 'infer_eval_dataset_cfg': None}
  save = {'policies': [checkpoints.AtSteps([0, 5])]}
  lines = ['evaluations  2: 0, 6', 'checkpoints  3: 0, 5, 6', 'summaries    3: 4, 5, 6']
  toy_run.train(tmp_path, 6, save=save, dry_run=True, **options)
  plan = capsys.readouterr().out.splitlines()
  assert [line for line in lines if line not in plan] == []
  toy_run.train(tmp_path, 6, save=save, **options)
  evaluated = toy_run.lines(tmp_path)[f'training_eval/{toy_run.TASK.name}']
  assert [row['step'] for row in evaluated] == [0, 6]
  assert checkpoints.all_steps(tmp_path) == [0, 5, 6]
  capsys.readouterr()
  toy_run.train(tmp_path, 8, save=save, dry_run=True, **options)  # it resumes
  assert 'evaluations  1: 8' in capsys.readouterr().out


def test_another_optimizer_begins_anew(saved, tmp_path, caplog, capsys):
  """Lion after AdamW, whose first moments and count have the same names and shapes."""
  caplog.set_level(logging.INFO)
  lion = {'model': toy_run.model(optimizers.lion()), **_SAVE_ONLY}
  restore = _restore(saved, fallback_to_scratch=True)
  toy_run.train(tmp_path / 'dry', 8, restore=restore, dry_run=True, **lion)
  assert "the optimizer's state (" in capsys.readouterr().out
  # A rule for the optimizer's state says that it is meant to be kept; then moments and counts are those of AdamW.
  rule = ((r'(state/param_states/.*)', r'\1'),)
  for name, changed, count in (('new', {}, 0), ('kept', {'assignment_map': rule}, 6)):
    caplog.clear()
    options = {'restore': _restore(saved, fallback_to_scratch=True, **changed)}
    toy_run.train(
      tmp_path / name, 6, save={'period': 1}, **options, run_eval_before_training=False, **lion
    )
    found = checkpoints.load(tmp_path / name / 'checkpoint_6')['state']['param_states']['0']
    assert found['count'] == count
    assert np.any(found['mu']['embedding']) == (name == 'kept')
    assert ('was saved with adamw, and this run uses lion' in caplog.text) == (name == 'new')
  # Rules match the names of this run, here of an optimizer whose state has another place.
  caplog.clear()
  moved = {
    'restore': _restore(
      saved, fallback_to_scratch=True, assignment_map=[(r'(state/param_states)/1(/.*)', r'\1\2')]
    ),
    'model': toy_run.model(optimizers.chain([optax.clip(1.0), optimizers.lion()])),
  }
  toy_run.train(tmp_path / 'moved', 8, dry_run=True, **moved, **_SAVE_ONLY)
  assert 'The state of the optimizer is new' not in caplog.text
  # The same optimizer keeps its state.
  toy_run.train(tmp_path / 'same', 6, restore=restore, **_SAVE_ONLY)
  assert (
    checkpoints.load(tmp_path / 'same/checkpoint_6')['state']['param_states']['0']['count'] == 6
  )


def test_new_parameters_do_not_begin_the_schedule_of_an_optimizer(tmp_path, caplog):
  caplog.set_level(logging.INFO)
  schedule = schedules.create_learning_rate_scheduler(
    'constant * cosine_decay', base_learning_rate=0.2, warmup_steps=0, steps_per_cycle=8
  )
  options = {
    'model': toy_run.model(optimizers.adamw(schedule)),
    'trainer_kwargs': {'learning_rate_fn': None},
    **_SAVE_ONLY,
  }
  toy_run.train(tmp_path / 'first', 6, **options)

  def messages(*dropped):
    caplog.clear()
    restore = _restore(
      tmp_path / 'first', fallback_to_scratch=True, assignment_map=[(d, None) for d in dropped]
    )
    toy_run.train(tmp_path / 'run', 8, dry_run=True, restore=restore, **options)
    return caplog.text

  found = messages('target/embedding', 'state/param_states/.*/embedding')
  assert 'Learning rate: 0.02929 at the first step (7)' in found and 'at most' in found
  assert 'Learning rate: 0.2 at the first step (7)' in messages('state/param_states/.*')
  assert 'Learning rate: 0.2 at the first step (7)' in messages('state/param_states/2/count')


def test_learning_rates_of_a_run_from_a_checkpoint(saved, tmp_path, caplog):
  caplog.set_level(logging.INFO)

  def messages(**settings):
    schedule = schedules.create_learning_rate_scheduler(
      'constant * cosine_decay', base_learning_rate=0.2, warmup_steps=0, **settings
    )
    caplog.clear()
    options = {'restore': _restore(saved), 'trainer_kwargs': {'learning_rate_fn': schedule}}
    toy_run.train(tmp_path / 'run', 8, dry_run=True, **options, **_SAVE_ONLY)
    return caplog.text

  # 0.1 * (1 + cos(pi * n / 8)) for n = 6 and 7.
  found = messages(steps_per_cycle=8)
  assert 'Learning rate: 0.02929 at the first step (7), 0.007612 at the last (8).' in found
  assert 'at most 0.02929' in found and 'from step 0 on it reaches 0.2.' in found
  assert 'create_learning_rate_scheduler.step_offset=6.' in found
  found = messages(steps_per_cycle=8, step_offset=6)  # The remedy.
  assert '0.2 at the first step (7), 0.1924 at the last (8)' in found and 'at most' not in found
  assert 'at most' not in messages(steps_per_cycle=1000)
