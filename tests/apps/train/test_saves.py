"""Log of saves, and dtypes of a restore. Failed and unsound saves: test_full_disk.py, trainer/test_non_finite.py."""

import os
import re
import signal
import types

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import multihost
from t5x_lite import optimizers
from t5x_lite.apps.train import saves
from t5x_lite.checkpoints.folders import disk
from t5x_lite.errors import ConfigError, SaveError, StoppedOnSignalError
from t5x_lite.trainer.actions import BaseAction
from tests.apps.train import toy_run


def _saved(capsys):
  """Return the (checkpoint, reasons) of the lines of the log."""
  lines = [line for line in capsys.readouterr().err.splitlines() if ' Saved ' in line]
  pattern = re.compile(r'\[process 0\] step (\d+)  Saved checkpoint_(\d+) in \d+\.\d s: (.*)\.')
  found = list(map(pattern.fullmatch, lines))
  assert all(found), lines
  assert all(match[1] == match[2] for match in found)
  return [(int(match[1]), match[3]) for match in found]


def _train(model_dir, total_steps, policies=(), **kwargs):
  toy_run.train(
    model_dir,
    total_steps,
    save={'period': 4, 'policies': policies},
    infer_eval_dataset_cfg=None,
    **kwargs,
  )


class _EvenSteps:
  """A custom policy."""

  def should_save(self, step, point=None):
    return step in (2, 4)

  def next_step(self, step):
    return next((s for s in (2, 4) if s > step), None)


class _Stop(BaseAction):
  """An action that ends the run after step 8."""

  def run(self, train_state, metrics_by_task):
    return int(train_state.step) == 8


def test_each_save_has_one_line_with_all_its_reasons(tmp_path, capsys):
  best = checkpoints.WhenBest('training_eval/letters/loss', 'min', from_step=6)
  policies = [checkpoints.AtSteps([0]), best, _EvenSteps()]
  _train(tmp_path, 10, policies, eval_period=6)
  assert _saved(capsys) == [
    (0, 'AtSteps'),
    (2, '_EvenSteps'),
    (4, 'EveryNSteps, _EvenSteps'),
    (6, 'WhenBest training_eval/letters/loss'),
    (8, 'EveryNSteps'),
    (10, 'WhenBest training_eval/letters/loss, end of the run'),
  ]
  assert checkpoints.all_steps(tmp_path) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
  'of_lead, requested_elsewhere, expected',
  [
    ([True, False, False], False, ['AtSteps']),
    ([False, True, False], False, ['_EvenSteps']),
    ([False, False, False], True, ['OnRequest']),
  ],
)
def test_several_processes_save_what_the_lead_decides_and_what_any_requests(
  monkeypatch, of_lead, requested_elsewhere, expected
):
  monkeypatch.setattr(multihost, 'broadcast_from_lead', lambda mine: np.array(of_lead))
  monkeypatch.setattr(multihost, 'any_process', lambda mine: mine or requested_elsewhere)
  policies = [checkpoints.AtSteps([4]), _EvenSteps(), checkpoints.OnRequest()]
  process = types.SimpleNamespace(_policy=checkpoints.AnySavePolicy(policies))
  assert [type(policy).__name__ for policy in saves.TrainSaves._due(process, 4, None)] == expected


def test_a_run_that_ends_early_says_why_it_saved(tmp_path, capsys):
  _train(tmp_path / 'action', 20, actions={'TRAIN': [_Stop()]})
  assert _saved(capsys) == [(4, 'EveryNSteps'), (8, 'EveryNSteps, action')]

  def open_iterator(*args, **kwargs):
    iterator = data.open_train_iterator(*args, **kwargs)
    start, numbers = type(iterator).__next__, iter(range(100))

    class Signalling(type(iterator)):
      def __next__(self):
        if next(numbers) == 3:
          os.kill(os.getpid(), signal.SIGTERM)
        return start(self)

    iterator.__class__ = Signalling
    return iterator

  with pytest.raises(StoppedOnSignalError):
    _train(tmp_path / 'signal', 20, get_dataset_fn=open_iterator, num_prefetched_batches=1)
  ((step, reason),) = _saved(capsys)
  assert step < 6 and reason.endswith('SIGTERM')


def test_a_failed_save_has_no_line(tmp_path, capsys, monkeypatch):
  def fail(*args):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(disk.DiskFolder, 'commit', fail)
  with pytest.raises(SaveError, match='last save'):
    _train(tmp_path, 4)
  assert not _saved(capsys)


@pytest.mark.parametrize(
  'dtype, optimizer',
  [
    ('bfloat16', None),
    ('float32', optimizers.with_update_options(optimizers.adamw(), param_dtype='bfloat16')),
  ],
)
def test_restored_parameters_keep_the_dtype_of_the_training_step(tmp_path, dtype, optimizer):
  _train(tmp_path / 'first', 2)
  options = {} if optimizer is None else {'model': toy_run.model(optimizer)}

  def restore(dtype):
    return checkpoints.RestoreCheckpointConfig(str(tmp_path / 'first'), dtype=dtype)

  for dry_run in (True, False):
    with pytest.raises(
      ConfigError,
      match=r'^`RestoreCheckpointConfig.dtype` must be None or .* in training, the dtype '
      f"of target/embedding, got '{dtype}'. Set it to None; ",
    ):
      _train(tmp_path / 'second', 4, restore=restore(dtype), dry_run=dry_run, **options)
  _train(tmp_path / 'second', 4, restore=restore(None), **options)
