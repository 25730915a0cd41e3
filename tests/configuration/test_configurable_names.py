"""With `--allowed_modules`, a configuration reaches the functions and classes of the list, and nothing else."""

import functools
import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import moe
import t5x_lite
from t5x_lite.configuration import binding
from t5x_lite.configuration import configurable_names
from t5x_lite.configuration import module_imports
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError

_ROOT = pathlib.Path(__file__).parents[2]
# What recipes need; the names below other packages are listed one by one.
_PACKAGES = (
  'moe',
  'optax',
  'seqio',
  't5x_lite.adapters',
  't5x_lite.trainer.actions',
  't5x_lite.apps.evaluate',
  't5x_lite.apps.export',
  't5x_lite.apps.infer',
  't5x_lite.apps.precompile',
  't5x_lite.apps.track',
  't5x_lite.apps.train',
  't5x_lite.trackers',
  't5x_lite.trainer.averaging',
  't5x_lite.checkpoints',
  't5x_lite.data',
  't5x_lite.decoding',
  't5x_lite.evaluation',
  't5x_lite.gin_utils',
  't5x_lite.layers',
  't5x_lite.losses',
  't5x_lite.metrics',
  't5x_lite.models',
  't5x_lite.networks',
  't5x_lite.trainer.non_finite',
  't5x_lite.optimizers',
  't5x_lite.partitioning',
  't5x_lite.runtime.profiling',
  't5x_lite.schedules',
  't5x_lite.trainer.state_init',
  't5x_lite.trainer.step_params',
  't5x_lite.trainer',
  't5x_lite.trainer.weight_metrics',
)


@pytest.fixture(autouse=True)
def unrestricted():
  """Other tests are not restricted."""
  yield
  module_imports.restrict(None)


def _bind(path, text, allowed):
  """Bind a gin file with dynamic registration, as a command with `--allowed_modules` does."""
  path.write_text(f'from __gin__ import dynamic_registration\n{text}\n')
  module_imports.restrict(allowed)
  binding.Binder().resolve([gin_syntax.read_file(str(path), [])])


# ---- The list --------------------------------------------------------------------------------------------------------


def _listed(table):
  """Return the objects of a table by (module, name)."""
  found = {}
  for module, names in table.items():
    for name in names.split():
      value = importlib.import_module(module)
      for part in name.split('.'):
        value = getattr(value, part)
      found[module, name] = value
  return found


def test_each_name_is_that_of_a_function_or_class_of_its_module():
  listed = _listed(configurable_names.CALLED) | _listed(configurable_names.PASSED)
  for (module, name), found in listed.items():
    assert callable(found)
    if module.split('.')[0] not in ('optax', 'seqio'):
      assert (found.__module__, found.__qualname__) == (module, name)
    assert any(module == package or module.startswith(f'{package}.') for package in _PACKAGES)


@pytest.mark.parametrize('package', ['t5x_lite.optimizers', 'moe.routing'])
def test_optimizers_and_routers_are_exported_by_being_listed(package):
  exporting = importlib.import_module(package)
  listed = configurable_names.called_in(package)
  assert len(listed) > 4
  for module, names in listed.items():
    assert module.startswith(f'{package}.')
    for name in names:
      assert name in exporting.__all__
      assert getattr(exporting, name) is getattr(importlib.import_module(module), name)
      assert package != 'moe.routing' or name in moe.__all__


def _callables():
  """Yield all functions, classes and methods that are attributes of modules of the trusted packages and of gin."""
  for package in (t5x_lite, moe):
    for found in pkgutil.walk_packages(package.__path__, f'{package.__name__}.'):
      if not found.name.endswith('__main__'):
        importlib.import_module(found.name)
  seen = set()
  for name, module in list(sys.modules.items()):
    if name.split('.')[0] not in (*module_imports.TRUSTED, 'gin'):
      continue
    for value in list(vars(module).values()):
      owned = vars(value).values() if inspect.isclass(value) else ()
      for each in (value, *owned, *(vars(value).values() if inspect.ismodule(value) else ())):
        if callable(each) and id(each) not in seen:
          seen.add(id(each))
          yield each


def test_no_callable_is_reachable_that_is_not_listed():
  called = set(map(id, _listed(configurable_names.CALLED).values()))
  passed = set(map(id, _listed(configurable_names.PASSED).values()))
  module_imports.restrict('')
  number = 0
  for found in _callables():
    number += 1
    assert _is_allowed(found, is_called=False) == (id(found) in called | passed), found
    if id(found) in called | passed:
      assert _is_allowed(found, is_called=True) == (id(found) in called), found
  assert number > 5000


def _is_allowed(found, is_called):
  try:
    module_imports.check_configurable(found, 'name', 'a.gin:1', is_called=is_called)
  except ConfigError:
    return False
  return True


# ---- What recipes need -----------------------------------------------------------------------------------------------


def test_recipes_and_recorded_configurations_need_no_other_module():
  files = [
    *_ROOT.glob('gin/**/*.gin'),
    *_ROOT.glob('tests/golden/**/*.gin'),
    *_ROOT.glob('tests/compat/samples/*.gin'),
    *_ROOT.glob('tests/multiprocess/*.gin'),
  ]
  assert len(files) > 200
  for path in files:
    text = path.read_text()
    # T5X's files for data of the package t5, and two tests with their own modules.
    module_imports.restrict('t5,tests' if 't5.data' in text or 'letters' in text else '')
    try:
      read = gin_syntax.read_file(str(path), [str(_ROOT / 'gin'), str(path.parent)])
      binding.Binder().resolve([read])
    except ConfigError as error:
      assert "'t5.data.mixtures' to import it" in str(error), path


def test_objects_that_an_allowed_module_defines(tmp_path, monkeypatch):
  (tmp_path / 'mine_for_names.py').write_text(
    """
import functools
import os
import optax
from os import system
from t5x_lite import models, optimizers
from t5x_lite.storage.files import remove_tree as clean

class Model(models.EncoderDecoderModel):
  @classmethod
  def small(cls): ...

@functools.lru_cache
def schedule(): ...

def _steps(rate=0.1):
  return optax.sgd(rate)

steps = optimizers.wrap_optax_optimizer(_steps)
part = functools.partial(system, 'touch x')
run = os.system
"""
  )
  monkeypatch.syspath_prepend(tmp_path)
  for name in ('Model', 'Model.small', 'Model.predict_batch_with_aux', 'schedule', 'steps'):
    _bind(tmp_path / 'a.gin', f'import mine_for_names as m\nX = @m.{name}', 'mine_for_names')
  for name in ('system', 'run', 'clean', 'part', 'part.func', 'os.remove', 'functools.partial'):
    with pytest.raises(ConfigError, match='must contain .*, where'):
      _bind(tmp_path / 'a.gin', f'import mine_for_names as m\nX = @m.{name}()', 'mine_for_names')


# ---- Attacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'text, needed',
  [
    # These gave access to everything by one line.
    (
      'from t5x_lite.apps import launch\nX = @launch.launch()\nlaunch.launch.command = ("touch",)',
      't5x_lite.apps.launch.run',
    ),
    ('from t5x_lite import cli\nX = @cli.main()\ncli.main.argv = ["launch", "--", "touch"]', None),
    ('from t5x_lite import files\nX = @files.write()\nfiles.write.path = "x"', None),
    ('from t5x_lite import files\nX = @files.remove_tree()', None),
    ('from jax._src import pickle_util\nX = @pickle_util.loads()', None),
    ('from t5x_lite import gin_utils\nX = @gin_utils.gin_config.parse_config()', 'gin.config'),
    # Imports of a trusted module, its attributes, and their methods.
    ('from t5x_lite.storage import untrusted\nX = @untrusted.files.os.system()', 'posix'),
    ('import t5x_lite.storage.files as data\nX = @data.remove_tree()', 't5x_lite.storage.files'),
    ('from t5x_lite import files\nX = @files.Path.unlink()', 'pathlib'),
    ('from t5x_lite import files\nX = @files.os.PathLike.register()', 'abc'),
    ('from t5x_lite import cli\nX = @cli.logging.FileHandler()', 'logging'),
    ('from t5x_lite.optimizers import base\nX = @base.__loader__.get_data()', None),
    ('from t5x_lite.data import config\nX = @config.DatasetConfig.mro()', 'builtins'),
    (
      'from t5x_lite.data import config\nX = @config.DatasetConfig.__init__.__globals__.get()',
      None,
    ),
    ('from t5x_lite import cli\nX = @cli.__builtins__.get()', 'builtins'),
    # What calls, imports, reads or writes what its arguments say.
    ('import functools\nX = @functools.partial()', 'functools'),
    ('from t5x_lite.checkpoints import config\nX = @config.dataclasses.make_dataclass()', None),
    ('import jax\nX = @jax.tree.map()', 'jax._src.tree'),
    ('import optax\nX = @optax.inject_hyperparams()', None),
    ('from jax import numpy\nX = @numpy.load()\nnumpy.load.allow_pickle = True', None),
    ('from flax.training import checkpoints\nX = @checkpoints.save_checkpoint()', None),
    ('from t5x_lite.configuration import module_imports\nX = @module_imports.restrict()', None),
    (
      'from t5x_lite.configuration import module_imports\nX = @module_imports.import_module()',
      None,
    ),
    ('from t5x import utils\nX = @utils.import_module()', 't5x_lite.configuration.module_imports'),
    ('import t5x\nX = @t5x.gin_utils.run_main()', 't5x_lite.gin_utils'),
    (
      'import __main__ as infer\nX = @infer.write_inferences_to_file()',
      't5x_lite.apps.infer.jsonl',
    ),
    ('from t5x_lite.checkpoints.locks import lock\nX = @lock.ModelDirLock()', None),
    # Other places in a file.
    ('from t5x_lite import files\nX = {"a": [(1, {@a/b/files.os.getcwd(): 2})]}', 'posix'),
    ('from t5x_lite import files\nfiles.remove_tree.path = "x"', 't5x_lite.storage.files'),
    ('from t5x_lite import files\ns/files.remove_tree:\n  path = "x"', 't5x_lite.storage.files'),
    ('from t5x_lite import files\nX = @files.os.system', 'posix'),
  ],
)
def test_attacks(tmp_path, text, needed):
  with pytest.raises(ConfigError, match='`--allowed_modules` must contain ') as caught:
    _bind(tmp_path / 'a.gin', text, '')
  assert needed is None or f"must contain '{needed}'" in str(caught.value)


@pytest.mark.parametrize('name', ['gin.singleton', 'singleton', 'gin.constant', 'gin.macro'])
def test_functions_of_gin_without_dynamic_registration(tmp_path, name):
  (tmp_path / 'a.gin').write_text(f'X = @{name}()\n')
  module_imports.restrict('')
  with pytest.raises(ConfigError, match="must contain 'gin.config'|nothing is called"):
    binding.Binder().resolve([gin_syntax.read_file(str(tmp_path / 'a.gin'), [])])


def test_the_remedy_of_an_attack_is_one_for_a_user_who_means_it(tmp_path):
  text = 'from t5x_lite import files\nX = @files.os.getcwd()'
  with pytest.raises(ConfigError, match="must contain 'posix'.*Add it if you trust its code"):
    _bind(tmp_path / 'a.gin', text, '')
  _bind(tmp_path / 'a.gin', text, 'posix')


def test_an_object_does_not_pretend_to_be_a_listed_one():
  @functools.wraps(_listed(configurable_names.CALLED)['t5x_lite.data.config', 'DatasetConfig'])
  def pretending(): ...

  assert pretending.__module__ == 't5x_lite.data.config'
  module_imports.restrict('')
  with pytest.raises(ConfigError, match="must contain 't5x_lite.data.config'"):
    module_imports.check_configurable(pretending, 'name', 'a.gin:1')


_PLANTED = 'open("touched", "w")'


def test_a_command_imports_nothing_from_the_current_folder(tmp_path):
  (tmp_path / 'jax_plugins' / 'planted').mkdir(parents=True)
  (tmp_path / 'jax_plugins' / 'planted' / '__init__.py').write_text(_PLANTED)
  argv = [sys.executable, '-m', 't5x_lite', 'train', '--gin_file=recipes/keyword_cloze.gin']
  env = {'PYTHONPATH': str(_ROOT), 'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(
    [*argv, '--gin.MODEL_DIR=run', '--dry_run', '--allowed_modules='],
    cwd=tmp_path,
    env=env,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert not (tmp_path / 'touched').exists()


@pytest.mark.parametrize(
  'allowed, is_found', [(None, True), ('', False), ('other', False), ('mine.tasks', True)]
)
def test_the_current_folder_is_searched_for_allowed_modules(tmp_path, allowed, is_found):
  (tmp_path / 'planted.py').write_text(_PLANTED)
  (tmp_path / 'mine.py').write_text('import planted')
  program = f"""
import contextlib
from t5x_lite import compat
from t5x_lite.configuration import module_imports
compat.set_up_process({str(tmp_path)!r})
module_imports.restrict({allowed!r})
with contextlib.suppress(ImportError):
  import planted
"""
  env = {'PYTHONPATH': str(_ROOT), 'PATH': '/usr/bin:/bin'}
  subprocess.run([sys.executable, '-P', '-c', program], cwd=tmp_path, env=env, check=True)
  assert (tmp_path / 'touched').exists() == is_found
