"""A task without a validation split is trained without evaluation, unless an evaluation is asked for by name."""

import dataclasses

import pytest

from t5x_lite import evaluation
from t5x_lite.errors import ConfigError, DataError
from tests.apps.train import toy_run

_TRAIN_ONLY = dataclasses.replace(toy_run.TASK, name='train_only', splits=('train',))


def _train(tmp_path, **kwargs):
  def dataset(split):
    return dataclasses.replace(toy_run.dataset(split), mixture_or_task_name=_TRAIN_ONLY)

  arguments = {
    'train_dataset_cfg': dataset('train'),
    'train_eval_dataset_cfg': dataset('validation'),
    'infer_eval_dataset_cfg': dataset('validation'),
    **kwargs,
  }
  return toy_run.train(tmp_path, 2, **arguments)


def test_it_trains_with_one_log_line(tmp_path, caplog):
  with caplog.at_level('INFO'):
    step, _ = _train(tmp_path, run_eval_before_training=True, infer_eval_period=1)
  assert step == 2 and (tmp_path / 'checkpoint_2').is_dir()
  assert not (tmp_path / 'training_eval').exists() and not (tmp_path / 'inference_eval').exists()
  lines = [line for line in caplog.messages if 'validation' in line]
  assert lines == [
    "No training_eval and inference_eval during training: 'train_only' has no split 'validation'."
  ]


def test_what_is_asked_for_by_name_is_an_error(tmp_path):
  other = dataclasses.replace(toy_run.dataset('test'), mixture_or_task_name=_TRAIN_ONLY)
  with pytest.raises(DataError, match="'train_only' has no split 'test'. Known names: train"):
    _train(tmp_path, infer_eval_dataset_cfg=other)
  another = dataclasses.replace(
    toy_run.dataset('validation'),
    mixture_or_task_name=dataclasses.replace(_TRAIN_ONLY, name='another'),
  )
  with pytest.raises(DataError, match="'another' has no split 'validation'"):
    _train(tmp_path, train_eval_dataset_cfg=another)
  named = dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=_TRAIN_ONLY)
  with pytest.raises(DataError, match="no split 'validation'"):
    _train(tmp_path, evaluations=[evaluation.Evaluation(name='mine', dataset_cfg=named)])
  monitored = {
    'period': 1,
    'keep': 1,
    'metric_name_to_monitor': 'inference_eval/train_only/exact_match',
  }
  with pytest.raises(ConfigError, match='exact_match'):
    _train(tmp_path, save=monitored)
