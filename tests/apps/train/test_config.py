"""The arguments of train, checked before anything is computed."""

import pytest

from t5x_lite import adafactor
from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import trainer as trainer_lib
from t5x_lite.errors import CheckpointError, ConfigError, DataError, T5xLiteError
from tests.apps.train import toy_run


@pytest.mark.parametrize(
  'kwargs, error, message',
  [
    ({'relative_steps': 0}, ConfigError, 'relative_steps` must be an integer .* or None, got 0'),
    ({'total_steps': 0.5}, ConfigError, 'total_steps` must be an integer .* or None, got 0.5'),
    ({'use_orbax': False}, ConfigError, 'use_orbax` must be True, since .* not written, got False'),
    (
      {'event_fns': [print, 1]},
      ConfigError,
      r'event_fns` must be a function of an Event.*without parentheses',
    ),
    (
      {'train_eval_dataset_cfg': toy_run.dataset('validation', num_epochs=1)},
      ConfigError,
      'num_epochs` must be None',
    ),
    ({'total_steps': -1}, ConfigError, 'total_steps` must be .* got -1'),
    ({'eval_period': -1}, ConfigError, 'eval_period` must be .* got -1'),
    ({'stats_period': -1}, ConfigError, 'stats_period` must be .* got -1'),
    ({'gc_period': -1}, ConfigError, 'gc_period` must be .* got -1'),
    ({'eval_steps': 0}, ConfigError, 'eval_steps` must be .* got 0'),
    ({'random_seed': -1}, ConfigError, 'random_seed` must be .* got -1'),
    ({'profile_steps': (5, 5)}, ConfigError, 'profile_steps'),
    (
      {'profile_steps': (15, 21)},
      ConfigError,
      r'profile_steps` must be within the steps of the run, 0 to 20, got .15',
    ),
    ({'profile_steps': (30, 40)}, ConfigError, 'within the steps of the run'),
    (
      {'max_batch_seconds': 0},
      ConfigError,
      'max_batch_seconds` must be a number > 0 or None, got 0',
    ),
    # The default is 'auto'.
    (
      {'max_step_seconds': 0},
      ConfigError,
      "max_step_seconds` must be a number > 0, 'auto' or None, got 0",
    ),
    ({'inference_evaluator_cls': object}, ConfigError, 'inference_evaluator_cls'),
    ({'actions': {'TRIAN': []}}, ConfigError, "Did you mean 'TRAIN'"),
    (
      {'num_prefetched_batches': 0},
      ConfigError,
      r'prefetch` must be an integer in \[1, 64\], got 0',
    ),
    (
      {
        'run_eval_before_training': True,
        'train_eval_dataset_cfg': None,
        'infer_eval_dataset_cfg': None,
      },
      ConfigError,
      'must be unset without `train_eval_dataset_cfg` or `infer_eval_dataset_cfg`',
    ),
    ({'train_dataset_cfg': toy_run.dataset('train', batch_size=7)}, ConfigError, '7'),
    (
      {'train_eval_dataset_cfg': toy_run.dataset('validation', batch_size=7)},
      ConfigError,
      '7 rows cannot be divided',
    ),
    (
      {'trainer_kwargs': {'num_microbatches': 3}},
      ConfigError,
      '8 rows cannot be divided into 3 micro-batches',
    ),
    ({'trainer_kwargs': {'learning_rate_fn': None}}, ConfigError, 'learning_rate_fn'),
    (
      {'model': toy_run.model(optimizers.sgd(0.1))},
      ConfigError,
      'must have a learning rate, got both',
    ),
    (
      {'model': toy_run.model(adafactor.Adafactor(0.1))},
      ConfigError,
      'must have a learning rate, got both',
    ),
    (
      {'restore': checkpoints.RestoreCheckpointConfig('/nowhere/at/all')},
      CheckpointError,
      '/nowhere/at/all',
    ),
    (
      {'restore': checkpoints.RestoreCheckpointConfig('/nowhere', 'specific')},
      CheckpointError,
      '/nowhere',
    ),
    ({'restore': checkpoints.RestoreCheckpointConfig('/nowhere', 'all')}, CheckpointError, "'all'"),
    ({'train_dataset_cfg': toy_run.dataset('trian')}, DataError, "Did you mean 'train'"),
    ({'infer_eval_dataset_cfg': toy_run.dataset('validation', pack=True)}, ConfigError, 'pack'),
  ],
)
def test_rejected(tmp_path, kwargs, error, message, monkeypatch):
  monkeypatch.setattr(
    trainer_lib.Trainer, 'compile_train', lambda *a: pytest.fail('it was compiled')
  )
  with pytest.raises(error, match=message) as raised:
    toy_run.train(tmp_path, **{'total_steps': 20, **kwargs})
  assert isinstance(raised.value, T5xLiteError) and raised.value.exit_code == 2
  assert {path.name for path in tmp_path.iterdir()} <= {'.lock'}
