"""Names that packages promise exist, those that are imported when they are first asked for included."""

import importlib
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
