"""Modules that options name are imported, or the message says what is missing; tests/apps has their restriction."""

import sys

import pytest

from t5x_lite import gin_utils
from t5x_lite import module_imports
from t5x_lite.errors import ConfigError


def test_a_module_is_imported_by_name(tmp_path, monkeypatch):
  (tmp_path / 'tasks_for_import.py').write_text('VALUE = 1')
  (tmp_path / 'broken_for_import.py').write_text('import module_that_is_missing')
  monkeypatch.syspath_prepend(tmp_path)
  module_imports.import_module('tasks_for_import')
  assert sys.modules.pop('tasks_for_import').VALUE == 1
  with pytest.raises(
    ConfigError,
    match="'broken_for_import' cannot be imported: there is no module 'module_that_is_mi"
    "ssing'. Install it, or correct the import",
  ):
    module_imports.import_module('broken_for_import')
  with pytest.raises(ConfigError, match='or add the folder to PYTHONPATH. Omit the suffix .py'):
    module_imports.import_module('missing_for_import.py')


@pytest.mark.parametrize('line', ['from t5x import metrics', 'import t5x.metrics'])
def test_a_folder_t5x_is_not_t5x(tmp_path, monkeypatch, line):
  (tmp_path / 't5x').mkdir()
  (tmp_path / 'tasks_with_t5x.py').write_text(line)
  monkeypatch.syspath_prepend(tmp_path)
  for name in [name for name in sys.modules if name.partition('.')[0] == 't5x']:
    monkeypatch.delitem(sys.modules, name)
  with pytest.raises(ConfigError, match=r'After t5x_lite.compat.install\(\), t5x means'):
    module_imports.import_module('tasks_with_t5x')
  (tmp_path / 'a.gin').write_text('import tasks_with_t5x')
  with pytest.raises(
    ConfigError, match='a.gin:1: importing tasks_with_t5x failed.*After t5x_lite.compat.install'
  ):
    gin_utils.load('t5x_lite.apps.train.train', gin_utils.read([str(tmp_path / 'a.gin')]))
  sys.modules.pop('t5x', None)
