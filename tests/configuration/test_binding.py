"""Binding a program: methods, macros, scopes, functions and modules of users."""

import gin
import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import checks as gin_check
from t5x_lite.errors import ConfigError
from tests.configuration import configuration_cases as cases
from tests.configuration.configuration_cases import program_files  # noqa: F401


def test_errors_of_the_program_lose_gins_lines_but_keep_the_scope():
  configuration = cases.load('eval/data.DatasetConfig.batch_size=0')
  with pytest.raises(ConfigError) as caught:
    configuration.call()
  assert gin_utils.plain_message(caught.value) == 'batch_size: got 0, expected at least 1. (in eval/DatasetConfig)'


def test_method_bindings_apply():
  assert cases.load('models.Model.predict.num_decodes=4').call()['model'].predict() == 4


def test_macros_may_be_chained_and_scopes_inherited(tmp_path):
  (tmp_path / 'more.gin').write_text(
      'from __gin__ import dynamic_registration\nfrom tests.configuration import gin_program as models\n'
      'WIDTH = %OTHER\nOTHER = 7\nMODEL/models.Model.rate = 0.5\n')
  model = cases.load(files=('run.gin', 'model.gin', 'more.gin')).call()['model']
  assert model.width == 7 and model.rate == 0.5  # a macro's name is the scope in which its value is made
  message = cases.error_of('OTHER=x', files=('run.gin', 'model.gin', 'more.gin'))
  assert message.startswith('`OTHER` must be int for ')


def test_reachable_follows_references_and_scopes():
  uses = [use for use in cases.load().uses if not use.configurable.selector.startswith('gin.')]
  found = {('/'.join(use.scope), use.configurable.name) for use in uses}
  assert found >= {('', 'train'), ('train', 'DatasetConfig'), ('eval', 'DatasetConfig'), ('MODEL', 'Model'),
                   ('', 'Trainer'), ('', 'schedule')}
  assert 'unused' not in {name for _, name in found}


def test_user_modules_may_register_while_the_program_runs(tmp_path, monkeypatch):
  """A task module that uses @gin.configurable is imported by the run, after the configuration is locked."""
  (tmp_path / 'late_module.py').write_text('import gin\n\n@gin.configurable\ndef late(x=1):\n  return x\n')
  monkeypatch.syspath_prepend(tmp_path)

  def imports_late():
    import late_module
    return late_module.late()

  configuration = cases.load()
  assert gin.config_is_locked()
  use = gin_check.Use(configuration.uses[0].configurable, (), True, {})
  assert gin_utils.Configuration(imports_late, '', [use]).call() == 1


def test_functions_that_users_decorate_are_bound_without_dynamic_registration(tmp_path, monkeypatch):
  (tmp_path / 'decorated_module.py').write_text(
      'import gin\n\n@gin.configurable\ndef decorated(x: int = 1):\n  return x\n')
  (tmp_path / 'old.gin').write_text('import decorated_module\ndecorated.x = 5\n')
  monkeypatch.syspath_prepend(tmp_path)
  cases.load('decorated.x=6', files=('run.gin', 'model.gin', 'old.gin'))
  import decorated_module
  assert decorated_module.decorated() == 6
