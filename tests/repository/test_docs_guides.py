"""The guides for beginners are true: messages of mistakes in gin, scripts in Python, options of other trainers."""

import os
import pathlib
import re
import runpy
import sys

import gin
import pytest

from t5x_lite import gin_utils
from t5x_lite.apps import commands
from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError
from tests.data import registries

# What a user must set for `recipes/finetune_files.gin`.
_REQUIRED = {
  'MODEL_DIR': "'runs/x'",
  'INITIAL_CHECKPOINT_PATH': "'base'",
  'MIXTURE_OR_TASK_NAME': "'x'",
  'TRAIN_STEPS': '10',
}
# Valid values of the parameters that the page about the Trainer names.
_VALUES = {
  'trainer.Trainer.num_microbatches': '2',
  'trainer.Trainer.learning_rate_fn': '@schedules.create_learning_rate_scheduler()',
  'optimizers.adamw.weight_decay': '0.01',
  'hugging_face.network_config.dtype': 'bfloat16',
  'hugging_face.network_config.remat_policy': 'full',
  'checkpoints.SaveCheckpointConfig.keep': '2',
  'checkpoints.SaveCheckpointConfig.metric_name_to_monitor': 'inference_eval/x/exact_match',
  'checkpoints.SaveCheckpointConfig.keep_best': '1',
  'models.EncoderDecoderModel.decode_fn': '@decoding.beam_search',
}
_DOCS = pathlib.Path(__file__).parents[2] / 'docs'


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _rows(page, kind):
  """Return the cells of the rows below the comment `<!-- kind -->` of a page."""
  text = (_DOCS / page).read_text(encoding='utf-8')
  rows = re.search(rf'<!-- {kind} -->\n\n((?:\|.*\n)+)', text)[1].splitlines()[2:]
  return [[cell.strip() for cell in row.strip('|').split(' | ')] for row in rows]


def _files(page):
  """Return the text of each Python file of a page, by name."""
  text = (_DOCS / page).read_text(encoding='utf-8')
  return dict(re.findall(r'`(\w+\.py)`:\n\n```python\n(.*?)```', text, re.DOTALL))


@pytest.mark.parametrize('flag, message', _rows('gin.md', 'gin mistakes'))
def test_mistakes_in_gin_have_the_messages_that_are_said(
  flag, message, capsys, monkeypatch, tmp_path
):
  monkeypatch.chdir(tmp_path)
  recipe = ['--gin_file=recipes/keyword_cloze.gin', '--gin.MODEL_DIR=runs/x']
  assert cli.main(['train', *recipe, flag.strip('`'), '--dry_run']) == 2
  begin, _, end = message.replace(r'\`', '`').partition(' ... ')
  error = capsys.readouterr().err.strip()
  assert error.startswith(f't5x_lite: error: {begin}') and error.endswith(end)
  assert end or error == f't5x_lite: error: {begin}'


@pytest.mark.full  # by default, `make test-docs` runs the scripts
def test_scripts_in_python_train_evaluate_and_predict(capsys, monkeypatch, tmp_path):
  """With 2 steps instead of 100."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(os.fspath(tmp_path))
  registries.isolate(monkeypatch)
  files = _files('python.md')
  assert list(files) == ['train_cloze.py', 'evaluate_cloze.py', 'predict_cloze.py']
  for name, text in files.items():
    (tmp_path / name).write_text(text.replace('total_steps=100', 'total_steps=2'))
  try:
    runpy.run_path('train_cloze.py', run_name='__main__')
    assert [path.name for path in (tmp_path / 'runs/python').glob('checkpoint_*')] == [
      'checkpoint_2'
    ]
    results = runpy.run_path('evaluate_cloze.py')['results']
    assert set(results[2]) >= {'inference_eval/python_keyword_cloze/exact_match'}
    capsys.readouterr()
    predicted = runpy.run_path('predict_cloze.py')
    assert [pair[0]['inputs_pretokenized'] for pair in predicted['pairs']] == predicted['inputs']
    assert capsys.readouterr().out.count(' -> ') == 2
  finally:
    sys.modules.pop('train_cloze', None)


@pytest.mark.parametrize(
  'argument, here', _rows('from_hugging_face_trainer.md', 'arguments of the Trainer'), ids=str
)
def test_options_of_the_trainer_have_an_equal_here(argument, here):
  """Each macro, parameter, file, flag and command of the second column exists and has an effect."""
  assert re.fullmatch(r'`\w+`', argument)
  for name in re.findall(r'`([^`]+)`', here):
    if name.startswith('--gin_file='):
      assert name.partition('=')[2] in gin_syntax.packaged_files()
    elif name.startswith('--'):
      assert any(_accepts(command, f'{name}=1') for command in ('train', 'infer')), name
    elif name in commands.COMMANDS:
      assert name == 'infer'
    else:
      flag = gin_syntax.read_flag(name, _VALUES.get(name, 'None'), f'--gin.{name}')
      texts = gin_utils.read(['recipes/finetune_files.gin'], [flag], placeholders=_REQUIRED)
      if '.' in name:  # `read` has checked macros
        assert gin_utils.load('t5x_lite.apps.train.train', texts).uses


def _accepts(command, flag):
  try:
    return cli.parse([command, '--gin_file=x.gin', flag]).command == command
  except ConfigError:
    return False
