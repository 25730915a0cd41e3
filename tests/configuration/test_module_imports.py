"""Modules that options name are imported, or the message says what is missing; tests/apps has their restriction."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import flax
import pytest

from t5x_lite import compat
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


def test_what_is_logged_exists_and_does_not_run_before(tmp_path, monkeypatch, caplog):
  (tmp_path / 'package_for_import').mkdir()
  (tmp_path / 'package_for_import' / '__init__.py').write_text('import sys; sys.has_run = True')
  (tmp_path / 'package_for_import' / 'tasks.py').write_text('')
  monkeypatch.syspath_prepend(tmp_path)
  caplog.set_level('INFO')
  for module in ('package_for_import.other.part', 'package_for_import.tasks', 'missing.part'):
    module_imports.check_import(module, 'a.gin:1')
  assert caplog.messages == [
    'a.gin:1: importing package_for_import, which runs its code.',
    'a.gin:1: importing package_for_import.tasks, which runs its code.',
  ]
  assert not hasattr(sys, 'has_run')


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


_FLAX = f'Change this line for flax {flax.__version__}, which is installed.'


@pytest.mark.parametrize(
  'line, message',
  [
    ('from flax import optim', f"ImportError: cannot import name 'optim' .* {_FLAX}"),
    ('import flax.optim', f"ModuleNotFoundError: No module named 'flax.optim'. {_FLAX}"),
    ('adam = flax.optim.Adam', f"AttributeError: .* has no attribute 'optim'. {_FLAX}"),
    ('made = flax.linen.Made', f"AttributeError: .* has no attribute 'Made'. {_FLAX}"),
    ('none = dict.none', "AttributeError: .* has no attribute 'none'. Change this line.$"),
    (
      'from t5x.utils import FLAGS',
      "ImportError: .* from 't5x.utils' .*no equivalent.*flags of your own.$",
    ),
    ('flags = t5x.utils.FLAGS', 'AttributeError: .*no equivalent.* flags of your own.$'),
  ],
)
def test_a_file_for_another_version_of_a_package_is_named(tmp_path, monkeypatch, line, message):
  """flax removed `optim`, which projects for T5X of 2022 import; t5x_lite has no `FLAGS`."""
  (tmp_path / 'former_base.py').write_text(f'import flax\nimport t5x\n{line}\n')
  (tmp_path / 'former_layers.py').write_text('import former_base')
  (tmp_path / 'base.gin').write_text('\nimport former_layers')
  (tmp_path / 'a.gin').write_text("include 'base.gin'")
  monkeypatch.syspath_prepend(tmp_path)
  for name in [name for name in sys.modules if name.partition('.')[0] == 't5x']:
    monkeypatch.delitem(sys.modules, name)
  compat.install()
  place = re.escape(f'{tmp_path}/former_base.py:3 raises ')
  try:
    with pytest.raises(
      ConfigError, match=f'base.gin:2: importing former_layers failed: {place}{message}'
    ) as found:
      gin_utils.load('t5x_lite.apps.train.train', gin_utils.read([str(tmp_path / 'a.gin')]))
    assert isinstance(found.value.__cause__, (ImportError, AttributeError))
    with pytest.raises(
      ConfigError, match=f"Module 'former_layers' cannot be imported: {place}{message}"
    ):
      module_imports.import_module('former_layers')
  finally:
    for name in [name for name in sys.modules if name.partition('.')[0] == 't5x']:
      del sys.modules[name]


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
