"""The notebooks open and run elsewhere: their format, addresses, installation, names and cells."""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys

import pytest

from tests.repository import docs_commands
from tests.repository import notebooks

_NOTEBOOKS = sorted(notebooks.FOLDER.glob('*.ipynb'))
_ROOT = notebooks.FOLDER.parents[1]
_URL = re.search(r"^_URL = '(.*)'$", (_ROOT / 'setup.py').read_text(), re.MULTILINE)[1]


def _code(path):
  return [source for kind, source in notebooks.cells(path) if kind == 'code']


@pytest.fixture(params=_NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
  return request.param


def test_files_have_no_outputs(path):
  """`make docs` adds outputs to the built page; those in the repository would become old."""
  text = path.read_text(encoding='utf-8')
  notebook = json.loads(text)
  assert notebook['nbformat'] == 4
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      assert (cell['outputs'], cell['execution_count']) == ([], None)
  assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + '\n'


def test_addresses_are_those_of_the_repository(path):
  """Colab and Kaggle open this file, and links work there, where there is no checkout."""
  text = notebooks.markdown(path)
  place = path.relative_to(_ROOT).as_posix()
  repository = _URL.removeprefix('https://github.com/')
  assert f'https://colab.research.google.com/github/{repository}/blob/main/{place}' in text
  assert f'https://kaggle.com/kernels/welcome?src={_URL}/blob/main/{place}' in text
  assert f"REPOSITORY = '{_URL}'" in text
  for target in re.findall(r'\]\(([^)\s]+)\)', text):
    if target.startswith(f'{_URL}/blob/main/'):
      assert (_ROOT / target.removeprefix(f'{_URL}/blob/main/').partition('#')[0]).exists(), target
    assert '://' in target, target


def test_the_first_cell_installs_what_is_missing(path, monkeypatch):
  """And puts the commands of the notebook's environment on the path."""
  commands = []
  monkeypatch.setattr(subprocess, 'run', lambda command, check: commands.append(command))
  monkeypatch.setenv('PATH', '/elsewhere')
  installation = _code(path)[0]
  exec(installation, {})  # pylint: disable=exec-used
  assert not commands
  assert os.environ['PATH'] == os.pathsep.join([os.path.dirname(sys.executable), '/elsewhere'])
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  exec(installation, {})  # pylint: disable=exec-used
  assert [command[:4] for command in commands] == [[sys.executable, '-m', 'pip', 'install']]
  assert commands[0][-1].endswith(f' @ git+{_URL}')


def test_names_exist(path):
  """Imports, and attributes of imported modules, of all cells in Python."""
  tree = ast.parse('\n'.join(cell for cell in _code(path) if not cell.startswith('%%')))
  modules = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      exec(ast.unparse(node), modules)  # pylint: disable=exec-used
  found = [
    node
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
    and isinstance(node.value, ast.Name)
    and inspect.ismodule(modules.get(node.value.id))
  ]
  assert found
  for node in found:
    assert hasattr(modules[node.value.id], node.attr), ast.unparse(node)


def test_commands_hide_no_failure(path):
  """By the rules of the pages' commands; the status of a pipe is that of the command that fails."""
  fences = docs_commands.read_fences(path.name, notebooks.markdown(path))
  shell = [fence for fence in fences if fence.language == 'sh']
  assert len(shell) == len([cell for cell in _code(path) if cell.startswith('%%')])


@pytest.mark.full
def test_cells_run(path, tmp_path, monkeypatch):
  """As `make docs` executes them, without a kernel."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('PYTHONPATH', str(_ROOT))
  monkeypatch.setenv('PATH', os.environ['PATH'])  # the first cell changes it
  monkeypatch.setenv('XLA_FLAGS', '')
  monkeypatch.setattr('matplotlib.pyplot.show', lambda: None)
  names = {}
  for cell in _code(path):
    if cell.startswith(notebooks.SHELL):
      script = cell.removeprefix(notebooks.SHELL)
      subprocess.run(['bash', '-eo', 'pipefail', '-c', script], check=True)
    else:
      exec(cell, names)  # pylint: disable=exec-used
