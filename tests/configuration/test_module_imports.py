"""Modules that options name are imported, or the message says what is missing; tests/apps has their restriction."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import module_imports
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


# A module that imports PyTorch after TensorFlow, as tasks of seqio do.
_TASK = """
import tensorflow
import triton._C.libtriton
"""
_TENSORFLOW = """
import types
config = types.SimpleNamespace(set_visible_devices=lambda *arguments: None)
errors = types.SimpleNamespace(OpError=RuntimeError)
"""
# The real library ends the process by a segmentation fault.
_TRITON = """
import os
import sys
if 'tensorflow' in sys.modules:
  os._exit(139)
"""


@pytest.mark.parametrize(
  'code',
  [
    """
    from t5x_lite.data.seqio import packages as seqio_import
    import triton._C.libtriton
    """,
    """
    from t5x_lite.apps.export import saved_model
    saved_model._import()
    import triton._C.libtriton
    """,
    """
    from t5x_lite.configuration import module_imports
    module_imports.import_module('task_with_triton')
    """,
    """
    import pathlib
    import sys
    from t5x_lite import gin_utils
    pathlib.Path('a.gin').write_text('import task_with_triton')
    try:
      gin_utils.load('t5x_lite.apps.train.train', gin_utils.read(['a.gin']))
    except gin_utils.ConfigError:  # nothing else is configured
      assert 'task_with_triton' in sys.modules
    """,
  ],
  ids=['seqio', 'saved_model', 'module', 'gin'],
)
def test_triton_is_imported_before_tensorflow(code, tmp_path):
  """Fake packages stand for the real ones, of which triton (and PyTorch) is not in the tests' environment."""
  files = {
    'tensorflow/__init__.py': _TENSORFLOW,
    'tensorflow/compiler/tf2xla/python/xla.py': '',
    'seqio.py': 'import tensorflow',
    'triton/_C/libtriton.py': _TRITON,
    'task_with_triton.py': _TASK,
  }
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  root = pathlib.Path(__file__).parents[2]
  ended = subprocess.run(
    [sys.executable, '-c', f'{textwrap.dedent(code)}\nprint("imported")'],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{root}'},
    capture_output=True,
    text=True,
  )
  assert (ended.returncode, ended.stdout) == (0, 'imported\n'), ended.stderr


def test_a_triton_that_cannot_be_imported_is_ignored(tmp_path, monkeypatch):
  (tmp_path / 'triton' / '_C').mkdir(parents=True)
  (tmp_path / 'triton' / '_C' / 'libtriton.py').write_text('raise OSError("no driver")')
  monkeypatch.syspath_prepend(tmp_path)
  for name in ('tensorflow', 'triton', 'triton._C', 'triton._C.libtriton'):
    monkeypatch.delitem(sys.modules, name, raising=False)
  module_imports.import_triton_first()
  assert 'triton._C.libtriton' not in sys.modules
