"""Names that packages promise exist, those that are imported when they are first asked for included, and old ones."""

import importlib
import pathlib
import pkgutil

import pytest

import moe
import t5x_lite

_MODULES = [
  info.name
  for package in (t5x_lite, moe)
  for info in pkgutil.walk_packages(package.__path__, f'{package.__name__}.')
  if not info.name.endswith('__main__')
]


@pytest.mark.parametrize('name', _MODULES)
def test_every_name_of_all_exists(name):
  module = importlib.import_module(name)
  lost = [public for public in getattr(module, '__all__', ()) if not hasattr(module, public)]
  assert not lost


def test_names_of_earlier_versions_are_importable():
  """The file has `module:name` of each `__all__` of commit cfdc05c, and of its documentation and gin files."""
  lost = []
  for line in (
    (pathlib.Path(__file__).parents[1] / 'golden' / 'public_names.txt').read_text().splitlines()
  ):
    module, _, name = line.partition(':')
    try:
      exec(f'from {module} import {name}' if name else f'import {module}', {})
    except ImportError:
      lost.append(line)
  assert not lost


@pytest.mark.parametrize('name', ['planner', 'report', 'surgery'])
def test_tools_have_one_module_under_both_names(name):
  assert (
    importlib.import_module(f'moe.{name}')
    is importlib.import_module(f'moe.tools.{name}')
    is getattr(moe, name)
  )
