"""Binding a program: methods, macros, scopes, functions and modules of users."""

import dataclasses

import gin
import pytest

from t5x_lite import checks
from t5x_lite import gin_utils
from t5x_lite.configuration import binding
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.configuration import validation as gin_check
from t5x_lite.errors import ConfigError
from tests.configuration import configuration_cases as cases
from tests.configuration.configuration_cases import program_files  # noqa: F401


def test_errors_of_the_program_lose_gins_lines_but_keep_the_scope():
  configuration = cases.load('eval/data.DatasetConfig.batch_size=0')
  with pytest.raises(ConfigError) as caught:
    configuration.call()
  assert (
    gin_utils.plain_message(caught.value)
    == 'batch_size: got 0, expected at least 1. (in eval/DatasetConfig)'
  )


_MORE = (
  'from __gin__ import dynamic_registration\nfrom tests.configuration import gin_program as data\n'
)


@pytest.mark.parametrize(
  'text, flags, end',
  [
    ('data.DatasetConfig.seed = -1', (), '-1 (more.gin:3). Omit it. (in train/DatasetConfig)'),
    (
      'train/data.DatasetConfig.seed = 5\neval/data.DatasetConfig.seed = -1',
      (),
      '-1 (more.gin:4). Omit it. (in eval/',
    ),
    (
      'train/data.DatasetConfig.seed = -1\neval/data.DatasetConfig.seed = -1',
      (),
      '-1 (more.gin:3). Omit it. (in ',
    ),
    (
      'data.DatasetConfig.seed = -2\neval/data.DatasetConfig:\n  seed = -1\ntrain/data.DatasetConfig.seed = 5',
      (),
      '-1 (more.gin:5). Omit it. (in eval/',
    ),
    ('data.DatasetConfig.seed = %A\nA = %B\nB = -1', (), '-1 (more.gin:5). Omit it.'),
    ('', ('data.DatasetConfig.seed=-1',), '-1. Omit it.'),  # the user sees a flag
    ('data.DatasetConfig.seed = %A\nA = 1', ('A=-1',), '-1. Omit it.'),
  ],
)
def test_errors_of_options_name_the_line_of_the_binding(tmp_path, text, flags, end):
  (tmp_path / 'more.gin').write_text(_MORE + text)
  with pytest.raises(ConfigError) as caught:
    cases.load(*flags, files=('run.gin', 'model.gin', 'more.gin')).call()
  assert (
    f'`DatasetConfig.seed` must be a number >= 0 or None, got {end}'
    in gin_utils.plain_message(caught.value)
  )


def test_text_of_a_command_is_no_file():
  texts = gin_utils.read(['run.gin', 'model.gin'], placeholders={'STEPS': '10', 'MODEL_DIR': "'a'"})
  texts.append(gin_syntax.read_text('train/data.DatasetConfig.seed = -1', 'eval', is_flag=False))
  with pytest.raises(ConfigError, match=r'got -1\. Omit it\.'):
    gin_utils.load(cases.ENTRY, texts).call()


@pytest.mark.parametrize(
  'owner, values, argument, lines',
  [
    ('DatasetConfig', {'seed': 1}, '', ''),  # of train or of eval
    ('DatasetConfig', {'seed': 1}, 'eval_cfg', 'more.gin:5'),
    ('DatasetConfig', {'seed': 1}, 'model', ''),
    ('gin_program.DatasetConfig', {'name': 'cols'}, '', 'more.gin:3'),
    ('Config', {'name': 'cols'}, '', ''),
    ('', {'name': 'cols'}, '', 'more.gin:3'),
    ('', {'name': 'col'}, '', ''),  # another option of this name may be meant
    ('DatasetConfig', {'name': 'col'}, '', 'more.gin:3'),  # a part of the value
    ('DatasetConfig', {'mode': 'fast'}, '', ''),  # bound for train, the default for eval
    ('DatasetConfig', {'mode': 'slow'}, '', ''),  # bound nowhere
    ('train', {'seed': 1}, '', ''),
    ('DatasetConfig', {'name': 'cols', 'shuffle': False}, 'eval_cfg', 'run.gin:24'),
    ('DatasetConfig', {'name': 'rows', 'shuffle': False}, 'eval_cfg', 'run.gin:23, run.gin:24'),
  ],
)
def test_a_line_is_only_named_if_one_binding_can_be_meant(tmp_path, owner, values, argument, lines):
  (tmp_path / 'more.gin').write_text(
    _MORE
    + """\
train/data.DatasetConfig.name = 'cols'
train/data.DatasetConfig.seed = 1
eval/data.DatasetConfig.seed = 1
train/data.DatasetConfig.mode = 'fast'
"""
  )

  def raises(**kwargs):
    error = checks.about(owner, values, 'Wrong', 'Change it.')
    error.options.argument = argument
    raise error

  configuration = cases.load(files=('run.gin', 'model.gin', 'more.gin'))
  with pytest.raises(ConfigError) as caught:
    dataclasses.replace(configuration, entry=raises).call()
  assert str(caught.value) == (f'Wrong ({lines}). Change it.' if lines else 'Wrong. Change it.')


def test_method_bindings_apply():
  assert cases.load('models.Model.predict.num_decodes=4').call()['model'].predict() == 4


def test_macros_may_be_chained_and_scopes_inherited(tmp_path):
  (tmp_path / 'more.gin').write_text(
    'from __gin__ import dynamic_registration\nfrom tests.configuration import gin_program as models\n'
    'WIDTH = %OTHER\nOTHER = 7\nMODEL/models.Model.rate = 0.5\n'
  )
  model = cases.load(files=('run.gin', 'model.gin', 'more.gin')).call()['model']
  assert (
    model.width == 7 and model.rate == 0.5
  )  # a macro's name is the scope in which its value is made
  message = cases.error_of('OTHER=x', files=('run.gin', 'model.gin', 'more.gin'))
  assert message.startswith('`OTHER` must be int for ')


def test_reachable_follows_references_and_scopes():
  uses = [use for use in cases.load().uses if not use.configurable.selector.startswith('gin.')]
  found = {('/'.join(use.scope), use.configurable.name) for use in uses}
  assert found >= {
    ('', 'train'),
    ('train', 'DatasetConfig'),
    ('eval', 'DatasetConfig'),
    ('MODEL', 'Model'),
    ('', 'Trainer'),
    ('', 'schedule'),
  }
  assert 'unused' not in {name for _, name in found}


def test_user_modules_may_register_while_the_program_runs(tmp_path, monkeypatch):
  """A task module that uses @gin.configurable is imported by the run, after the configuration is locked."""
  (tmp_path / 'late_module.py').write_text(
    'import gin\n\n@gin.configurable\ndef late(x=1):\n  return x\n'
  )
  monkeypatch.syspath_prepend(tmp_path)

  def imports_late():
    import late_module

    return late_module.late()

  configuration = cases.load()
  assert gin.config_is_locked()
  use = gin_check.Use(configuration.uses[0].configurable, (), True, {})
  assert gin_utils.Configuration(imports_late, '', [use]).call() == 1


def test_functions_that_users_decorate_are_bound_without_dynamic_registration(
  tmp_path, monkeypatch
):
  (tmp_path / 'decorated_module.py').write_text(
    'import gin\n\n@gin.configurable\ndef decorated(x: int = 1):\n  return x\n'
  )
  (tmp_path / 'old.gin').write_text('import decorated_module\ndecorated.x = 5\n')
  monkeypatch.syspath_prepend(tmp_path)
  cases.load('decorated.x=6', files=('run.gin', 'model.gin', 'old.gin'))
  import decorated_module

  assert decorated_module.decorated() == 6


def test_of_several_imports_of_a_module_the_first_is_recorded():
  lines = [line for line in cases.load().text.splitlines() if 'import gin_program' in line]
  assert lines == ['from tests.configuration import gin_program as script']


@pytest.mark.parametrize(
  'statements',
  [
    'import t5x_lite.averaging\nt5x_lite.averaging.ParamEma.decay = 0.5',
    'import t5x_lite.models\nimport t5x_lite.averaging\nt5x_lite.averaging.ParamEma.decay = 0.5',
    'import t5x_lite.averaging as of_params\nof_params.ParamEma.decay = 0.5',
    'from t5x_lite import averaging\naveraging.ParamEma.decay = 0.5',
    "from t5x_lite import module_imports\nmodule_imports.import_module.module = 'letters'",
  ],
)
def test_modules_that_are_in_a_package_now_keep_their_names_in_recorded_configurations(statements):
  def bind(text):
    binder = binding.Binder()
    binder.resolve([gin_syntax.read_text(text, 'config.gin', [], is_flag=False)])
    binding.bind(binder.table.values(), binder.import_statements.values())
    ((_, _, parameter), row) = next(iter(binder.table.items()))
    return parameter, row.value, binding.configuration_text()

  *first, text = bind(f'from __gin__ import dynamic_registration\n{statements}\n')
  *again, _ = bind(text)
  assert again == first
