"""Modules of a fork of T5X, in Python."""

import pathlib
import sys

import pytest

from t5x_lite import compat
from t5x_lite.compat import forks
from t5x_lite.compat import names
from t5x_lite.compat import views


@pytest.fixture
def fork(tmp_path, monkeypatch):
  """Return a function that writes a file of a fork, of which this process finds the modules."""
  before = {*sys.modules}
  finder = forks.LastFolder(str(tmp_path))
  monkeypatch.setattr(sys, 'meta_path', [*sys.meta_path, finder])
  compat.install()

  def write(path, text):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return finder

  yield write
  for name in {*sys.modules} - before:
    if name.partition('.')[0] == 't5x':
      del sys.modules[name]


def test_own_modules_and_packages_are_imported_with_our_names_inside(fork):
  fork('t5x/mine_1.py', 'from t5x import losses\nfrom t5x.own_1.deep import part\n')
  fork('t5x/own_1/deep/part.py', 'VALUE = 3\n')
  fork('t5x/contrib/moe/mine_2.py', 'import t5x.mine_1\n')
  from t5x import mine_1  # pylint: disable=import-error
  import t5x.contrib.moe.mine_2  # pylint: disable=import-error

  assert mine_1.losses is views.module('t5x.losses') and mine_1.part.VALUE == 3
  assert t5x.mine_1 is mine_1
  compat.install()  # as a second command of the process


@pytest.mark.parametrize('module', ['utils', 'config_utils', 'contrib.gpu.layers'])
def test_files_with_names_of_t5x_are_not_run(fork, module):
  fork(f't5x/{module.replace(".", "/")}.py', 'raise AssertionError\n')
  if module == 'utils':
    from t5x import utils

    assert isinstance(utils, views.View)
  else:
    with pytest.raises(ImportError):
      __import__(f't5x.{module}')
  assert not forks.has_module(f't5x.{module}')


def test_a_finder_that_is_not_used_finds_nothing(fork):
  finder = fork('t5x/mine_3.py', '')
  assert finder.find_spec('t5x.mine_3', []) is not None and forks.has_module('t5x.mine_3')
  # Packages of others have a path.
  assert finder.find_spec('t5x.mine_3', ['/somewhere']) is None
  finder.is_used = False
  assert finder.find_spec('t5x.mine_3', []) is None and finder.find_spec('t5x') is None
  assert forks.has_module('t5x.mine_3') and finder.folder not in forks.folders()


def test_definitions_are_read_and_not_run(fork):
  fork(
    't5x/models.py', 'raise AssertionError\nclass A: pass\ndef b(): pass\ndef _c(): pass\nD = 1\n'
  )
  fork('t5x/losses.py', 'def broken(:\n')
  assert forks.definitions('t5x.models') == {pathlib.Path('t5x/models.py'): ['A', 'b']}
  assert forks.definitions('t5x.losses') == {pathlib.Path('t5x/losses.py'): []}
  assert [*forks.modules()] == ['t5x.losses', 't5x.models']
  assert 't5x/models.py (A, b)' in views.names_of_forks() and 'losses' not in views.names_of_forks()


def test_every_module_of_the_table_is_one_of_t5x():
  assert all(map(names.has_module, [*names.MODULES, *names.LEFT_OUT_MODULES, 't5x']))
  assert not names.has_module('t5x.standard_tasks') and not names.has_module('t5x.mainly')
