"""Reading of gin: values of flags, file search, and syntax errors."""

import re
import sys

import pytest

from t5x_lite import gin_utils
from t5x_lite.compat import views
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError
from t5x_lite.storage import files
from tests.configuration import configuration_cases as cases
from tests.configuration.configuration_cases import program_files  # noqa: F401


@pytest.mark.parametrize(
  'written, value',
  [
    ('runs/a', 'runs/a'),
    ('"runs/a"', 'runs/a'),
    ("'runs/a'", 'runs/a'),
    (r'\"runs/a\"', 'runs/a'),
    ('/tmp/with space/x', '/tmp/with space/x'),
    ('gs://bucket/x', 'gs://bucket/x'),
    ('~/a/2026-01-02', '~/a/2026-01-02'),
    ('runs/x=1', 'runs/x=1'),
    ("it's", "it's"),
    ('a.b', 'a.b'),
    ('Trueish', 'Trueish'),
    ('10k', '10k'),
  ],
)
def test_strings_need_no_quotes(written, value):
  assert cases.load(defaults=('STEPS=1', f'MODEL_DIR={written}')).call()['model_dir'] == value


@pytest.mark.parametrize(
  'written, value',
  [
    ('5', 5),
    ('-2', -2),
    ('1_000', 1000),
    ('1e-4', 1e-4),
    ('True', True),
    ('None', None),
    ('(1, 2)', (1, 2)),
    ("{'a': [1, 'x']}", {'a': [1, 'x']}),
    ('%OTHER', gin_syntax.Macro('OTHER')),
    ('@a/b.c()', gin_syntax.Reference('a/b.c', True)),
  ],
)
def test_values_of_flags(written, value):
  (binding,) = gin_syntax.read_flag('X', written, '--gin.X').statements
  assert binding.value == value and type(binding.value) is type(value)


@pytest.mark.parametrize(
  'word, remedy', [('true', 'True'), ('false', 'False'), ('none', 'None'), ('null', 'None')]
)
def test_bare_lower_case_constants_are_rejected(word, remedy):
  message = cases.error_of(f'data.DatasetConfig.shuffle={word}')
  assert f'--gin.data.DatasetConfig.shuffle={remedy}' in message and f'"{word}"' in message


@pytest.mark.parametrize(
  'flags, fragments',
  [
    # Misspelt names, each with the suggestion.
    (['STEPS={inputs:8}'], ['not gin syntax: names in values need quotes. Failed to parse token']),
    (['STPES=5'], ['--gin.STPES=5', "macro 'STPES' is not used", "Did you mean 'STEPS'?"]),
    (
      ['data.DatasetConfig.batch_sise=5'],
      ["DatasetConfig has no parameter 'batch_sise'", "Did you mean 'batch_size'?"],
    ),
    (
      ['data.DatasetConfg.batch_size=5'],
      ["data has no 'DatasetConfg'", "Did you mean 'DatasetConfig'?"],
    ),
    (
      ['dta.DatasetConfig.batch_size=5'],
      ["nothing is called 'dta.DatasetConfig'", "DatasetConfig'?"],
    ),
    (['script.train.model=@models.Modl()'], ["models has no 'Modl'", "Did you mean 'Model'?"]),
    (['models.Model.width=%WIDHT'], ["macro 'WIDHT' is not defined", "Did you mean 'WIDTH'?"]),
    (['script.NOT_CALLABLE.x=1'], ['script.NOT_CALLABLE must be a function or a class, got a int']),
    # Flags without effect.
    (['script.unused.value=3'], ['no effect', 'script.unused is not used']),
    (
      ['data.DatasetConfig.name=x'],
      ['no effect', "train/data.DatasetConfig.name = 'rows' (run.gin:21) has priority"],
    ),
    (
      ['other/data.DatasetConfig.batch_size=1'],
      ["the scope 'other' is not used", 'Set train/data.DatasetConfig.batch_size or eval/'],
    ),
    (
      ['script.train.model=@models.Model()', 'models.Model.width=3', 'WIDTH=1'],
      ['--gin.WIDTH=1 has no effect'],
    ),
    # Types.
    (['STEPS=abc'], ["`STEPS` must be int for script.train.total_steps, got 'abc' of type str."]),
    (['STEPS=2.5'], ['`STEPS` must be int', 'got 2.5 of type float']),
    (['STEPS=1e3'], ['must be int', 'Write 1000.']),
    (['STEPS=True'], ['must be int', 'got True of type bool']),
    (['MODEL_DIR=2026'], ['must be str', 'Write --gin.MODEL_DIR=\'"2026"\'.']),
    (
      ['data.DatasetConfig.shuffle=1'],
      ['`train/data.DatasetConfig.shuffle` must be bool, got 1 of type int'],
    ),
    (['data.DatasetConfig.seed=x'], ["must be int or None, got 'x' of type str"]),
    (['data.DatasetConfig.mode=slow'], ["must be 'fast' or 'exact', got 'slow' of type str"]),
    (["data.DatasetConfig.lengths={'inputs': 'long'}"], ['must be Mapping[str, int], got ']),
    (['models.Model.names=abc'], ['must be Sequence[str], got ']),
    (['models.Model.rate=fast'], ['must be float, got ']),
    (
      ['script.train.model=@models.Model'],
      [
        'script.train.model must be an instance, got a factory of it',
        "Write --gin.script.train.model='@models.Model()'.",
      ],
    ),
    # Syntax of flags.
    (['STEPS='], ['the value is missing']),
    (['STEPS=(1'], ['not gin syntax', 'not closed']),
    (['STEPS={inputs: 3}'], ['not gin syntax']),
    (['ST EPS=3'], ["'ST EPS' is not the name"]),
    (['STEPS="abc'], ['not gin syntax']),
    ([f'STEPS={"[" * 3000}{"]" * 3000}'], ['nested too deeply. Close brackets earlier.']),
    # Not tokens of Python, but text all the same.
    (['STEPS=5abc'], ["must be int for script.train.total_steps, got '5abc' of type str."]),
  ],
)
def test_rejected_flags(flags, fragments):
  message = cases.error_of(*flags)
  for fragment in fragments:
    assert fragment in message
  assert len(message.splitlines()) == 1 and 'Traceback' not in message


@pytest.mark.parametrize(
  'text, fragments',
  [
    ('a.b = ', ['bad.gin:1: not gin syntax', 'Unable to parse value']),
    ('x.y:\n  z = (1,\n', ['bad.gin:', 'not closed']),
    ('STEPS = true', ['bad.gin:1: not gin syntax', 'Write True.']),
    ('MODEL_DIR = runs/a', ['bad.gin:1', "Strings need quotes: 'runs/a'"]),
    (
      'a.B:\n  c = CLIP_NORM_2',
      ['bad.gin:2', "Write c = %CLIP_NORM_2 for the macro, or 'CLIP_NORM_2' for a string."],
    ),
    ('MODEL_DIR = CLIP_norm', ["Strings need quotes: 'CLIP_norm'."]),
    (
      "include 'mdel.gin'",
      ["bad.gin:1: The gin file 'mdel.gin' does not exist", "Did you mean 'model.gin'?"],
    ),
    ("include 'bad.gin'", ['includes itself']),
    (
      '@dynamic\nfrom t5x_lite import schdules',
      ["bad.gin:2: no module 'schdules' in t5x_lite", "Did you mean 'schedules'?"],
    ),
    ('@dynamic\nimport no_such_module', ["bad.gin:2: no module 'no_such_module'. Install it"]),
    (
      '@dynamic\nimport tests.configuration.needs_missing',
      ["bad.gin:2: no module 'needs_missing' in tests.configuration"],
    ),
    (
      '@dynamic\nscript.train.total_steps = 1',
      ["bad.gin:2: 'script' in 'script.train' is not imported by this file"],
    ),
    (
      '@dynamic\nfrom tests.configuration import gin_program as script\nscript.trian:\n  x = 1',
      ["bad.gin:3: script has no 'trian'", "Did you mean 'train'?"],
    ),
    (
      'some_function.x = 1',
      ["bad.gin:1: nothing is called 'some_function'", 'dynamic_registration'],
    ),
    (
      'MODEL = %MODELS\nMODELS2 = 1',
      ["bad.gin:1: the macro 'MODELS' is not defined", "'MODELS2'?"],
    ),
  ],
)
def test_rejected_files(tmp_path, text, fragments):
  (tmp_path / 'bad.gin').write_text(
    text.replace('@dynamic', 'from __gin__ import dynamic_registration')
  )
  message = cases.error_of(files=('run.gin', 'model.gin', 'bad.gin'))
  for fragment in fragments:
    assert fragment in message


def test_syntax_error_in_included_file_names_that_file(tmp_path):
  (tmp_path / 'outer.gin').write_text("include 'inner.gin'\n")
  (tmp_path / 'inner.gin').write_text('A = 1\nB = = 2\n')
  assert 'inner.gin:2: not gin syntax' in cases.error_of(files=('outer.gin',))


# Files


def test_search_order(tmp_path):
  for folder in ('here', 'extra'):
    (tmp_path / folder).mkdir()
  (tmp_path / 'extra' / 'model.gin').write_text(cases.MODEL.replace('32', '64'))
  (tmp_path / 'here' / 'outer.gin').write_text("include 'sibling.gin'\n")
  (tmp_path / 'here' / 'sibling.gin').write_text('STEPS = 3\n')
  assert gin_syntax.find_file('model.gin', ['extra']).resolve() == tmp_path / 'model.gin'
  (tmp_path / 'model.gin').unlink()
  assert gin_syntax.find_file('model.gin', ['extra']) == (tmp_path / 'extra/model.gin').relative_to(
    tmp_path
  )
  loaded = cases.load(
    defaults=('MODEL_DIR=x',),
    files=('run.gin', 'model.gin', 'here/outer.gin'),
    search_paths=['extra'],
  )
  assert loaded.call()['model'].width == 64 and loaded.call()['total_steps'] == 3


def test_packaged_files_are_found_from_anywhere():
  names = gin_syntax.packaged_files()
  assert names
  for name in names:
    assert gin_syntax.find_file(name) == gin_syntax.packaged_folder() / name
    assert gin_syntax.find_file(f'gin/{name}') == gin_syntax.packaged_folder() / name


def test_files_of_python_packages_are_found_last(tmp_path, monkeypatch):
  (tmp_path / 'site/some_package/configs').mkdir(parents=True)
  (tmp_path / 'site/some_package/configs/a.gin').write_text('A = 1')
  with pytest.raises(
    ConfigError, match='install the package some_package, or add its parent folder'
  ):
    gin_syntax.find_file('some_package/configs/a.gin')
  monkeypatch.syspath_prepend(tmp_path / 'site')
  assert (
    gin_syntax.find_file('some_package/configs/a.gin')
    == tmp_path / 'site/some_package/configs/a.gin'
  )
  with pytest.raises(ConfigError, match="'some_package/configs/b.gin' does not exist"):
    gin_syntax.find_file('some_package/configs/b.gin')
  assert 'some_package' not in sys.modules
  # An installed T5X, of which only views are imported.
  monkeypatch.setitem(sys.modules, 'some_package', views.View('t5x'))
  assert gin_syntax.find_file('some_package/configs/a.gin').is_file()


def test_missing_file_lists_where_and_suggests():
  with pytest.raises(
    ConfigError, match=re.escape("The gin file 'modl.gin' does not exist")
  ) as caught:
    gin_syntax.find_file('modl.gin', ['extra'])
  assert 'extra' in str(caught.value)


def test_files_in_stores(store):
  for name, text in {
    'outer.gin': "include 'sibling.gin'\ninclude '../base.gin'\ninclude 'model.gin'\n",
    'sibling.gin': 'STEPS = 3\n',
    '../base.gin': 'WIDTH = 4\n',
  }.items():
    files.write((files.path(store.root) / 'gin' / name).resolve(), text)
  loaded = cases.load(defaults=('MODEL_DIR=x',), files=('run.gin', f'{store.root}/gin/outer.gin'))
  assert loaded.call()['total_steps'] == 3
  gin_syntax.check_search_paths([f'{store.root}/gin'])
  assert (
    str(gin_syntax.find_file('sibling.gin', [f'{store.root}/gin']))
    == f'{store.root}/gin/sibling.gin'
  )
  with pytest.raises(
    ConfigError, match="/siblin.gin' does not exist in .*/gin. Did you mean 'sibling.gin'"
  ):
    gin_syntax.find_file(f'{store.root}/gin/siblin.gin')
  with pytest.raises(ConfigError, match='must be existing folders'):
    gin_syntax.check_search_paths([f'{store.root}/none'])
  files.write(f'{store.root}/loop.gin', "include 'loop.gin'")
  with pytest.raises(ConfigError, match='includes itself'):
    gin_syntax.read_file(f'{store.root}/loop.gin')


def test_rewrite_gin_args_text_is_gin():
  rewritten = gin_utils.rewrite_gin_args(['p', '--gin.A=runs/a', '--gin.b.c={"x": 1}', '--other=1'])
  assert rewritten == [
    'p',
    "--gin_bindings=A = 'runs/a'",
    '--gin_bindings=b.c = {"x": 1}',
    '--other=1',
  ]


def test_a_file_of_this_package_is_one_in_the_checkout_too(monkeypatch):
  """There `gin/` is a folder in the current folder."""
  monkeypatch.chdir(gin_syntax.packaged_folder().parent)
  folder = gin_syntax.packaged_folder().name
  assert gin_syntax.read_file(f'{folder}/t5x/training.gin').is_packaged(gin_syntax.T5X_FILES)
