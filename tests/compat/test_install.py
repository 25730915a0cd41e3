"""`compat.install()`: `import t5x` gives our objects, in a new process."""

import subprocess
import sys
import textwrap


def _python(code):
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_after_install_all_forms_of_import_give_our_objects():
  _python("""
      import sys
      from t5x_lite import compat
      assert not [name for name in sys.modules if name.partition('.')[0] == 't5x']
      compat.install()
      import t5x
      import t5x.utils
      from t5x import models
      from t5x.examples.t5 import network
      import t5x.contrib.moe.models as moe_models
      from t5x.utils import DatasetConfig
      import t5x_lite.data, t5x_lite.models, t5x_lite.networks.t5, moe.models
      assert t5x.utils.DatasetConfig is DatasetConfig is t5x_lite.data.DatasetConfig
      assert models.BaseModel is t5x_lite.models.BaseModel
      assert network.T5Config is t5x_lite.networks.t5.T5Config
      assert moe_models.MoeEncoderDecoderModel is moe.models.MoeEncoderDecoderModel
      compat.install()
      try:
        from t5x.utils import nothing
      except ImportError as error:
        assert 'nothing' in str(error) and 'compat/names.py' in str(error)
      else:
        raise AssertionError
      try:
        import t5x.main
      except ModuleNotFoundError as error:
        from t5x_lite.configuration import module_imports
        assert 't5x_lite train, eval, infer' in module_imports.remedy_for(error.name)
      else:
        raise AssertionError
      """)


def test_questions_about_all_modules_import_nothing():
  _python("""
      import importlib.util, inspect, sys
      from t5x_lite import compat
      compat.install()
      assert inspect.getmodule(sys._getframe().f_code) is None  # Asks all modules for __file__.
      assert importlib.util.find_spec('t5x.utils') is not None
      assert 'jax' not in sys.modules
      """)


def test_install_raises_where_t5x_itself_was_imported(tmp_path):
  (tmp_path / 't5x').mkdir()
  (tmp_path / 't5x' / '__init__.py').write_text('')
  assert 'must be called before T5X itself' in _python(f"""
      import sys
      sys.path.insert(0, {str(tmp_path)!r})
      import t5x
      from t5x_lite import compat
      try:
        compat.install()
      except compat.ConfigError as error:
        print(error)
      """)


def test_messages_of_imports_name_the_alternative(tmp_path):
  for number, line in enumerate(
    (
      'from t5x.optimizers import amos',
      'from t5x import test_utils',
      'import t5x.test_utils',
      'from t5x import mine',
      'import t5x.mine',
      'import t5x.contrib.mine',
    )
  ):
    (tmp_path / f'tasks_{number}.py').write_text(line)
  printed = _python(f"""
      import sys
      sys.path.insert(0, {str(tmp_path)!r})
      from t5x_lite import compat
      from t5x_lite.configuration import module_imports
      compat.install()
      for number in range(6):
        try:
          module_imports.import_module(f'tasks_{{number}}')
        except compat.ConfigError as error:
          print(error)
      """).splitlines()
  for message, text in zip(
    printed,
    (
      't5x.optimizers.amos has no equivalent',
      *['t5x.test_utils has no equivalent'] * 2,
      *['module of your own is found in the folder t5x of the current folder'] * 3,
    ),
    strict=True,
  ):
    assert text in message and 'Install it' not in message, printed


def test_all_names_of_a_module():
  _python("""
      from t5x_lite import compat
      compat.install()
      from t5x.utils import *
      from t5x import *
      assert DatasetConfig.__name__ == 'DatasetConfig' and models.BaseModel.__name__ == 'BaseModel'
      """)
