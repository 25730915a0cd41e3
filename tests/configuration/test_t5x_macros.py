"""A project's macros mean what they mean in T5X: our files under T5X's paths do not read those that T5X's lack."""

import logging
import re
import shlex

import gin
import pytest

from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.configuration import t5x_macros
from tests.compat import t5x_gin

# Macros that our files read and T5X's files of the same paths do not, each with a file, a value for a flag, and a
# setting that the flag changes.
_OURS = {
  'BATCH_SIZE': ('configs/runs/eval.gin', '7', 'data.DatasetConfig.batch_size'),
  'CHECKPOINT_MODE': (
    'configs/runs/infer.gin',
    "'latest'",
    'checkpoints.RestoreCheckpointConfig.mode',
  ),
  'CHECKPOINT_PATH': (
    'examples/t5/t5_1_1/examples/base_wmt14enfr_eval.gin',
    "'x'",
    'checkpoints.RestoreCheckpointConfig.path',
  ),
  'CHECKPOINT_PERIOD': (
    'configs/runs/finetune.gin',
    '7',
    'checkpoints.SaveCheckpointConfig.period',
  ),
  'DATA_SOURCE': ('configs/runs/pretrain.gin', "'builtin'", 'train/data.DatasetConfig.source'),
  'EVALUATOR_NUM_EXAMPLES': ('configs/runs/eval.gin', '7', 'seqio.Evaluator.num_examples'),
  'EVALUATOR_USE_MEMORY_CACHE': (
    'configs/runs/eval.gin',
    'False',
    'seqio.Evaluator.use_memory_cache',
  ),
  'EVAL_BATCH_SIZE': ('configs/runs/pretrain.gin', '7', 'train_eval/data.DatasetConfig.batch_size'),
  'EVAL_DECODE_FN': (
    'configs/runs/finetune.gin',
    '@decoding.temperature_sample',
    'evaluation.InferenceEvalConfig.decode_fn',
  ),
  'EVAL_PERIOD': ('configs/runs/pretrain.gin', '7', 'train_script.train.eval_period'),
  'EVAL_STEPS': ('configs/runs/pretrain.gin', '7', 'train_script.train.eval_steps'),
  'GRADIENT_CLIP_NORM': ('configs/runs/finetune.gin', '7.0', 'trainer.Trainer.gradient_clip_norm'),
  'INFERENCE_EVALUATOR': (
    'configs/runs/finetune.gin',
    'None',
    'train_script.train.inference_evaluator_cls',
  ),
  'JSON_WRITE_N_RESULTS': ('configs/runs/eval.gin', '7', 'seqio.JSONLogger.write_n_results'),
  'MIXTURE_OR_TASK_MODULE': (
    'configs/runs/precompile.gin',
    "'x'",
    'train/data.DatasetConfig.module',
  ),
  'MIXTURE_OR_TASK_SPLIT': ('configs/runs/infer.gin', "'train'", 'data.DatasetConfig.split'),
  'NON_FINITE_POLICY': ('configs/runs/finetune.gin', "'skip'", 'trainer.NonFinitePolicy.action'),
  'NUM_EPOCHS': ('configs/runs/finetune.gin', '7', 'train/data.DatasetConfig.num_epochs'),
  'PACK': ('configs/runs/pretrain.gin', 'False', 'train/data.DatasetConfig.pack'),
  'RANDOM_SEED': ('configs/runs/infer.gin', '7', 'infer_script.infer.random_seed'),
  'SAVING_PERIOD': ('configs/runs/finetune.gin', '7', 'checkpoints.SaveCheckpointConfig.period'),
  'SHUFFLE_TRAIN_EXAMPLES': (
    'configs/runs/finetune.gin',
    'False',
    'train/data.DatasetConfig.shuffle',
  ),
  'TASK_FEATURE_LENGTHS': (
    'examples/t5/t5_1_1/examples/base_wmt14enfr_eval.gin',
    "{'inputs': 3, 'targets': 3}",
    'data.DatasetConfig.task_feature_lengths',
  ),
  'TRACKERS': ('configs/runs/finetune.gin', "['wandb']", 'train_script.train.trackers'),
  'TRAINING_EVALUATOR': (
    'configs/runs/eval.gin',
    '@trainer.Trainer',
    'eval_script.evaluate.training_evaluator_cls',
  ),
  'USE_CACHED_TASKS': ('configs/runs/eval.gin', 'True', 'data.DatasetConfig.use_cached'),
  'VOCABULARY_FILE': (
    'examples/t5/t5_1_1/tiny.gin',
    "'x'",
    'seqio.SentencePieceVocabulary.sentencepiece_model_file',
  ),
}
# Macros that our files read, T5X's do not, and which have no value in ours, or one that nothing reads.
_WITHOUT_EFFECT = {'MIXTURE_OR_TASK_NAME', 'NUM_EXPERTS'}


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _read_by(path):
  text = gin_syntax.read_file(f't5x/{path}')
  return gin_syntax.mentioned_macros([text]) - {gin_syntax.REQUIRED}


def test_the_list_is_complete():
  found = set()
  for path in t5x_gin.t5x_paths():
    found |= _read_by(path) - t5x_macros.macros_of_t5x()[f't5x/{path}']
  assert found == _OURS.keys() | _WITHOUT_EFFECT
  for name, (path, *_) in _OURS.items():
    assert name in _read_by(path) - t5x_macros.macros_of_t5x()[f't5x/{path}'], name


def _settings(tmp_path, path, head='', body='', flags=()):
  """Return the settings of a project that includes a file of T5X."""
  names = [f't5x/{each}'.replace('t5x/models/', 'models/') for each in t5x_gin.companions(path)]
  includes = '\n'.join(f"include '{each}'" for each in names)
  (tmp_path / 'mine.gin').write_text(
    'from __gin__ import dynamic_registration\nfrom t5x import losses\nfrom t5x_lite import decoding\n'
    f'from t5x_lite import trainer\n{head}\n{includes}\n{body}\n'
  )
  flags = [gin_syntax.read_flag(name, value, f'--gin.{name}') for name, value in flags]
  entry = t5x_gin.ENTRIES[t5x_gin.command(path)]
  try:
    texts = gin_utils.read([str(tmp_path / 'mine.gin')], flags, placeholders=t5x_gin.VALUES)
    return gin_utils.load(entry, texts).settings(())
  finally:
    gin.clear_config()


@pytest.mark.parametrize('is_before', [True, False], ids=['before', 'after'])
@pytest.mark.parametrize('name', _OURS)
def test_a_macro_of_a_project_is_its_own(tmp_path, name, is_before, caplog):
  path, value, setting = _OURS[name]
  default = _settings(tmp_path, path)
  own = {'head' if is_before else 'body': f"{name} = 'of the project'"}
  with caplog.at_level(logging.WARNING):
    assert _settings(tmp_path, path, **own) == default
  line = 5 if is_before else 6 + len(t5x_gin.companions(path))
  assert f"mine.gin:{line}: the macro '{name}' has no effect" in caplog.text
  caplog.clear()
  # What the project itself binds to its macro has its value.
  reader = 'schedules.create_learning_rate_scheduler.factors'
  if t5x_gin.command(path) == 'train':
    own['head'] = own.get('head', '') + '\nfrom t5x import utils'
    body = f'{own.get("body", "")}\nutils.create_learning_rate_scheduler.factors = %{name}'
    changed = _settings(tmp_path, path, own['head'], body)
    assert changed == default | {reader: "'of the project'"}
    assert not caplog.text


@pytest.mark.parametrize('name', _OURS)
def test_a_flag_still_sets_a_macro_of_ours(tmp_path, name):
  path, value, setting = _OURS[name]
  default = _settings(tmp_path, path)
  changed = _settings(tmp_path, path, flags=[(name, value)])
  assert changed[setting] != default.get(setting)
  # Also if a file of the project defines it, for nothing.
  assert _settings(tmp_path, path, body=f"{name} = 'of x'", flags=[(name, value)]) == changed


@pytest.mark.parametrize('name', _OURS)
def test_the_remedy_for_a_macro_without_effect_has_the_effect(tmp_path, name, caplog):
  path, value, setting = _OURS[name]
  with caplog.at_level(logging.WARNING):
    _settings(tmp_path, path, body=f'{name} = {value}')
  pass_flag, bind = re.search(r'Pass (.*), or bind (.*) after the include', caplog.text).groups()
  if value.startswith('@'):
    pass_flag = pass_flag.replace('VALUE', value)
  (flag,) = shlex.split(pass_flag)
  macro, _, text = flag.removeprefix('--gin.').partition('=')
  changed = _settings(tmp_path, path, flags=[(macro, text)])
  assert changed[setting] != _settings(tmp_path, path).get(setting)
  # The parameters are those that the flag changes.
  assert setting.rpartition('.')[2] in {
    each.split(' ')[0].rpartition('.')[2] for each in bind.split(' and ')
  }


def test_a_parameter_that_a_warning_names_may_be_bound(tmp_path, caplog):
  path = 'configs/runs/finetune.gin'
  with caplog.at_level(logging.WARNING):
    _settings(tmp_path, path, body='SAVING_PERIOD = 7')
  found = re.search(r"the macro 'SAVING_PERIOD' .* or bind (\S+) \(runs/train.gin:", caplog.text)
  # Without the import, the error names it.
  with pytest.raises(errors.ConfigError, match='Add `from t5x import checkpoints`'):
    _settings(tmp_path, path, body=f'{found[1]} = 7')
  body = f'from t5x import checkpoints\n{found[1]} = 7'
  assert _settings(tmp_path, path, body=body) == _settings(
    tmp_path, path, flags=[('SAVING_PERIOD', '7')]
  )


def test_a_flag_means_the_macro_that_the_project_reads(tmp_path):
  """And ours has another name."""
  path = 'configs/runs/pretrain.gin'
  body = 'from t5x import utils\nEVAL_BATCH_SIZE = 6\ntrain/utils.DatasetConfig.batch_size = %EVAL_BATCH_SIZE'
  flags = [('EVAL_BATCH_SIZE', '7')]
  settings = _settings(tmp_path, path, body=body, flags=flags)
  assert settings['train/data.DatasetConfig.batch_size'] == '7'
  assert settings['train_eval/data.DatasetConfig.batch_size'] == '128'
  flags.append(('T5X_LITE_EVAL_BATCH_SIZE', '8'))
  settings = _settings(tmp_path, path, body=body, flags=flags)
  assert settings['train/data.DatasetConfig.batch_size'] == '7'
  assert settings['train_eval/data.DatasetConfig.batch_size'] == '8'


def test_evaluations_have_32_rows_next_to_the_batch_size_of_training(tmp_path):
  """As T5X's eval.gin, which sets 32; that for sparse models reads BATCH_SIZE."""
  training = "include 't5x/configs/runs/finetune.gin'\nBATCH_SIZE = 512"
  for path, size in (('configs/runs/eval.gin', '32'), ('contrib/moe/configs/runs/eval.gin', '512')):
    body = training
    if 'moe' in path:
      body = 'BATCH_SIZE = 512\nNUM_MODEL_PARTITIONS = 1'
    assert _settings(tmp_path, path, head=body)['data.DatasetConfig.batch_size'] == size
