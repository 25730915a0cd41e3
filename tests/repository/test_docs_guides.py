"""The guides for beginners are true: messages of mistakes in gin, scripts in Python, options of other trainers."""

import os
import pathlib
import re
import runpy
import sys

import gin
import pytest

from t5x_lite.command_line import cli
from tests.data import registries

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
