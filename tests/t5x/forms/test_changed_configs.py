"""A project whose configuration classes are derived from T5X's, and change their values."""

import dataclasses
import functools
import re

import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import errors
from tests.data import builtin_cases as cases


def test_a_run_reads_the_values_that_the_project_has_computed(run_form, tmp_path, capfd):
  assert run_form('changed_configs', 'train', 'run.gin', '--dry_run', MODEL_DIR=tmp_path) == 0
  captured = capfd.readouterr()
  # The task `reverse` and a batch of 0 rows, which the files bind, would be errors.
  assert re.search(r'^checkpoints +2: 2, 4$', captured.out, re.MULTILINE)


_DIRECT = {
  'train_script.train.train_dataset_cfg': '@train/language_configs.LanguageDatasetConfig()'
}


@pytest.mark.parametrize(
  'bindings, message',
  [
    ({'language_configs.with_rows.rows': 0}, r'DatasetConfig.batch_size` must .*, got 0\.'),
    (_DIRECT, r'DatasetConfig.batch_size` must be .*, got 0 \(run.gin:\d+\)\.'),
    (
      {**_DIRECT, 'train/language_configs.LanguageDatasetConfig.batch_size': -1},
      r'DatasetConfig.batch_size` must be .*, got -1 \(in train/DatasetConfig\)\.',
    ),
    (
      {'language_configs.often.period': 0},
      'SaveCheckpointConfig.period` must be an integer >= 1 or None, got 0',
    ),
  ],
)
def test_values_that_are_assigned_are_checked_before_the_run(
  run_form, tmp_path, capfd, bindings, message
):
  bindings = {'MODEL_DIR': tmp_path, **bindings}
  assert run_form('changed_configs', 'train', 'run.gin', '--dry_run', **bindings) == 2
  error = capfd.readouterr().err
  assert re.search(f'error: `{message}', error), error


@dataclasses.dataclass
class _Computed(checkpoints.RestoreCheckpointConfig):
  mode: str = dataclasses.field(default='specific', init=False)
  step: int = 0

  def __post_init__(self):
    super().__post_init__()
    self.path = f'{self.path}/checkpoint_{self.step}'


@dataclasses.dataclass
class _Named(data.DatasetConfig):
  language: str = ''

  def __post_init__(self):
    self.mixture_or_task_name = f'python_{self.mixture_or_task_name}'


def _dataset(cls=data.DatasetConfig, name='python_keyword_cloze', **options):
  values = {'batch_size': 8, **options}
  return cls(name, cases.LENGTHS, 'train', shuffle=False, seed=0, source='builtin', **values)


def test_derived_configurations_are_used_outside_of_runs():
  cfg = _dataset(_Named, 'keyword_cloze')
  first = next(data.open_train_iterator(cfg, cases.layout()))
  expected = next(data.open_train_iterator(_dataset(), cases.layout()))
  assert all((first[name] == expected[name]).all() for name in expected)
  # A copy with other values does not compute the name again.
  assert cfg.changed(seed=3).mixture_or_task_name == 'python_keyword_cloze'


def test_a_function_of_a_restore_is_given_the_computed_path(tmp_path):
  cfg = _Computed(str(tmp_path / 'run'), step=4, assignment_map=[('a', 'b')])
  assert len(cfg.state_transformation_fns) == 1
  with pytest.raises(errors.CheckpointError, match='run/checkpoint_4'):
    checkpoints.get_first_valid_restore_config_and_paths([cfg])


@pytest.mark.parametrize(
  'use',
  [
    lambda cfg: data.open_train_iterator(cfg, cases.layout()),
    lambda cfg: data.open_eval_iterators(cfg, cases.layout()),
    lambda cfg: data.open_eval_tasks(cfg, cases.layout()),
    lambda cfg: data.get_dataset(cfg, 0, 1, 'encoder_decoder'),
    lambda cfg: data.get_vocabulary(cfg),
    lambda cfg: data.read_task_texts(cfg),
  ],
)
@pytest.mark.parametrize('cls', [data.DatasetConfig, _Named])
def test_each_function_of_data_checks_assigned_values(cls, use):
  cfg = _dataset(cls, {data.DatasetConfig: 'python_keyword_cloze', _Named: 'keyword_cloze'}[cls])
  cfg.split = ''
  with pytest.raises(errors.ConfigError, match="DatasetConfig.split` must be a name .*got ''"):
    use(cfg)
  cfg.split = 'train'
  use(cfg)


def test_an_invalid_value_may_be_replaced_before_it_is_used():
  cfg = _dataset(batch_size=0)
  cfg.batch_size = 8
  assert next(data.open_train_iterator(cfg, cases.layout()))


def test_each_function_of_checkpoints_checks_assigned_values(tmp_path):
  save = checkpoints.SaveCheckpointConfig(keep=2)
  save.keep = 0
  restore = checkpoints.RestoreCheckpointConfig('a')
  restore.mode = 'newest'
  with pytest.raises(errors.ConfigError, match='keep` must be an integer >= 1 or None, got 0'):
    checkpoints.CheckpointManager(tmp_path, save_cfg=save)
  with pytest.raises(errors.ConfigError, match="mode` must be one of .*got 'newest'"):
    checkpoints.get_first_valid_restore_config_and_paths([restore])
  with pytest.raises(errors.ConfigError, match="mode` must be one of .*got 'newest'"):
    checkpoints.restore_checkpoint('a', {}, restore_cfg=restore)
  with pytest.raises(errors.ConfigError, match='keep` must be'):
    checkpoints.CheckpointConfig(save=save).validated()


def test_another_number_of_best_checkpoints_may_be_assigned():
  best = functools.partial(checkpoints.SaveBestCheckpointer, metric_name_to_monitor='train/loss')
  cfg = checkpoints.SaveCheckpointConfig(keep=3, checkpointer_cls=best)
  assert (cfg.keep, cfg.keep_best) == (None, 3)
  cfg.keep = 5
  assert (cfg.validated().keep, cfg.keep_best) == (None, 5)
  assert (cfg.validated().keep, cfg.keep_best) == (None, 5)  # the same as often as it is checked
  cfg.keep = None
  assert (cfg.validated().keep, cfg.keep_best, cfg.metric_name_to_monitor) == (None, None, None)
  cfg.checkpointer_cls = checkpoints.Checkpointer
  cfg.keep = 2
  assert (cfg.validated().keep, cfg.keep_best) == (2, None)


@pytest.mark.parametrize(
  'make',
  [
    lambda: _dataset(),
    lambda: _dataset(_Named),
    lambda: checkpoints.SaveCheckpointConfig(policies=[]),
    lambda: checkpoints.RestoreCheckpointConfig(['a']),
    lambda: _Computed(['a']),
    lambda: checkpoints.CheckpointConfig(),
  ],
)
def test_configurations_are_hashed_by_identity(make):
  first, second = make(), make()
  assert hash(first) != hash(second) and hash(first) == hash(first)
  assert first == second and {first, second} >= {first} and len({first, second}) == 2
