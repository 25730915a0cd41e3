"""Reading, applying, checking and writing gin configurations, on a small stand-in program."""

import re
import textwrap

import gin
import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import checks as gin_check
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError
from tests.core import gin_stand_ins

_ENTRY = 'tests.core.gin_stand_ins.train'
_RUN = """\
from __gin__ import dynamic_registration

from tests.core import gin_stand_ins as script
from tests.core import gin_stand_ins as data

STEPS = %gin.REQUIRED
MODEL_DIR = %gin.REQUIRED
BATCH_SIZE = 8

script.train:
  model = %MODEL
  model_dir = %MODEL_DIR
  total_steps = %STEPS
  train_cfg = @train/data.DatasetConfig()
  eval_cfg = @eval/data.DatasetConfig()
  trainer_cls = @script.Trainer

script.Trainer.learning_rate_fn = @script.schedule()
data.DatasetConfig.lengths = {'inputs': 16, 'targets': 4}
data.DatasetConfig.batch_size = %BATCH_SIZE
train/data.DatasetConfig.name = 'rows'
eval/data.DatasetConfig:
  name = 'rows'
  shuffle = False
"""
_MODEL = """\
from __gin__ import dynamic_registration
from tests.core import gin_stand_ins as models
WIDTH = 32
MODEL = @models.Model()
models.Model:
  width = %WIDTH
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'run.gin').write_text(_RUN)
  (tmp_path / 'model.gin').write_text(_MODEL)
  yield
  gin.clear_config()


def _load(*flags, files=('run.gin', 'model.gin'), defaults=('STEPS=10', 'MODEL_DIR=runs/a'), search_paths=()):
  texts = []
  for flag in (*defaults, *flags):
    key, _, value = flag.partition('=')
    texts.append(gin_syntax.read_flag(key, value, f'--gin.{flag}'))
  return gin_utils.load(_ENTRY, gin_utils.read(files, texts, search_paths))


def _refused(*flags, **kwargs):
  with pytest.raises(ConfigError) as caught:
    _load(*flags, **kwargs)
  return str(caught.value)


def test_files_and_flags_reach_the_program():
  result = _load('BATCH_SIZE=4', 'models.Model.rate=1e-4', 'eval/data.DatasetConfig.batch_size=2').call()
  assert result['total_steps'] == 10 and result['model_dir'] == 'runs/a'
  assert result['model'].width == 32 and result['model'].rate == 1e-4
  assert (result['train_cfg'].batch_size, result['eval_cfg'].batch_size) == (4, 2)
  assert result['train_cfg'].shuffle and not result['eval_cfg'].shuffle
  assert result['rate'] == 0.5


@pytest.mark.parametrize('written, value', [
    ('runs/a', 'runs/a'), ('"runs/a"', 'runs/a'), ("'runs/a'", 'runs/a'), (r'\"runs/a\"', 'runs/a'),
    ('/tmp/with space/x', '/tmp/with space/x'), ('gs://bucket/x', 'gs://bucket/x'), ('~/a/2026-01-02', '~/a/2026-01-02'),
    ('runs/x=1', 'runs/x=1'), ("it's", "it's"), ('a.b', 'a.b'), ('Trueish', 'Trueish'), ('10k', '10k'),
])
def test_strings_need_no_quotes(written, value):
  assert _load(defaults=('STEPS=1', f'MODEL_DIR={written}')).call()['model_dir'] == value


@pytest.mark.parametrize('written, value', [
    ('5', 5), ('-2', -2), ('1_000', 1000), ('1e-4', 1e-4), ('True', True), ('None', None), ('(1, 2)', (1, 2)),
    ("{'a': [1, 'x']}", {'a': [1, 'x']}), ('%OTHER', gin_syntax.Macro('OTHER')),
    ('@a/b.c()', gin_syntax.Reference('a/b.c', True)),
])
def test_values_of_flags(written, value):
  (binding,) = gin_syntax.read_flag('X', written, '--gin.X').statements
  assert binding.value == value and type(binding.value) is type(value)


@pytest.mark.parametrize('word, remedy', [('true', 'True'), ('false', 'False'), ('none', 'None'), ('null', 'None')])
def test_bare_lower_case_constants_are_refused(word, remedy):
  message = _refused(f'data.DatasetConfig.shuffle={word}')
  assert f'--gin.data.DatasetConfig.shuffle={remedy}' in message and f'"{word}"' in message


@pytest.mark.parametrize('flags, fragments', [
    # Misspelt names, each with what was meant.
    (['STPES=5'], ["--gin.STPES=5", "reads a macro 'STPES'", "Did you mean 'STEPS'?"]),
    (['data.DatasetConfig.batch_sise=5'], ["DatasetConfig has no parameter 'batch_sise'", "Did you mean 'batch_size'?"]),
    (['data.DatasetConfg.batch_size=5'], ["data has no 'DatasetConfg'", "Did you mean 'DatasetConfig'?"]),
    (['dta.DatasetConfig.batch_size=5'], ["nothing is called 'dta.DatasetConfig'", "DatasetConfig'?"]),
    (['script.train.model=@models.Modl()'], ["models has no 'Modl'", "Did you mean 'Model'?"]),
    (['models.Model.width=%WIDHT'], ["macro 'WIDHT' is defined nowhere", "Did you mean 'WIDTH'?"]),
    (['script.NOT_CALLABLE.x=1'], ['script.NOT_CALLABLE is a int; expected a function or a class']),
    # Flags without effect.
    (['script.unused.value=3'], ['no effect', 'nothing that runs uses script.unused']),
    (['data.DatasetConfig.name=x'], ['no effect', "train/data.DatasetConfig.name = 'rows' (run.gin:21) wins"]),
    (['other/data.DatasetConfig.batch_size=1'], [
        "nothing runs in the scope 'other'", 'Set train/data.DatasetConfig.batch_size or eval/']),
    (['script.train.model=@models.Model()', 'models.Model.width=3', 'WIDTH=1'], ["--gin.WIDTH=1 has no effect"]),
    # Types.
    (['STEPS=abc'], ["STEPS = 'abc': expected int for script.train.total_steps, got str"]),
    (['STEPS=2.5'], ['STEPS = 2.5: expected int']),
    (['STEPS=1e3'], ['expected int', 'Write 1000.']),
    (['STEPS=True'], ['expected int', 'got bool']),
    (['MODEL_DIR=2026'], ['expected str', "Write --gin.MODEL_DIR='\"2026\"'."]),
    (['data.DatasetConfig.shuffle=1'], ['train/data.DatasetConfig.shuffle = 1: expected bool, got int']),
    (['data.DatasetConfig.seed=x'], ['expected int or None, got str']),
    (['data.DatasetConfig.mode=slow'], ["expected 'fast' or 'exact', got str"]),
    (["data.DatasetConfig.lengths={'inputs': 'long'}"], ['expected Mapping[str, int], got dict']),
    (['models.Model.names=abc'], ['expected Sequence[str], got str']),
    (['models.Model.rate=fast'], ['expected float, got str']),
    (['script.train.model=@models.Model'], ['script.train.model takes what @', 'Write @models.Model().']),
    # Syntax of flags.
    (['STEPS='], ['the value is missing']),
    (['STEPS=(1'], ['not gin syntax', 'not closed']),
    (['STEPS={inputs: 3}'], ['not gin syntax']),
    (['ST EPS=3'], ["'ST EPS' is not the name"]),
    (['STEPS="abc'], ['not gin syntax']),
])
def test_refused_flags(flags, fragments):
  message = _refused(*flags)
  for fragment in fragments:
    assert fragment in message
  assert len(message.splitlines()) == 1 and 'Traceback' not in message


@pytest.mark.parametrize('text, fragments', [
    ('a.b = ', ['bad.gin:1: not gin syntax', 'Unable to parse value']),
    ("x.y:\n  z = (1,\n", ['bad.gin:', 'not closed']),
    ('STEPS = true', ['bad.gin:1: not gin syntax', 'Write True.']),
    ('MODEL_DIR = runs/a', ['bad.gin:1', "A string stands in quotes: 'runs/a'"]),
    ("include 'mdel.gin'", ["bad.gin:1: No gin file 'mdel.gin'", "Did you mean 'model.gin'?"]),
    ("include 'bad.gin'", ['includes itself']),
    ('@dynamic\nfrom t5x_lite import schdules', [
        "bad.gin:2: no module 'schdules' in t5x_lite", "Did you mean 'schedules'?"]),
    ('@dynamic\nimport no_such_module', ["bad.gin:2: no module 'no_such_module'. Is it"]),
    ('@dynamic\nimport tests.core.needs_missing', [
        "bad.gin:2: no module 'needs_missing' in tests.core"]),
    ('import __main__ as train_script', ['bad.gin:1', 'from t5x_lite.apps import train as train_script']),
    ('@dynamic\nscript.train.total_steps = 1', [
        "bad.gin:2: 'script' in 'script.train' is not imported by this file"]),
    ('@dynamic\nfrom tests.core import gin_stand_ins as script\nscript.trian:\n  x = 1', [
        "bad.gin:3: script has no 'trian'", "Did you mean 'train'?"]),
    ('some_function.x = 1', ["bad.gin:1: nothing is called 'some_function'", 'dynamic_registration']),
    ('MODEL = %MODELS\nMODELS2 = 1', ["bad.gin:1: the macro 'MODELS' is defined nowhere", "'MODELS2'?"]),
])
def test_refused_files(tmp_path, text, fragments):
  (tmp_path / 'bad.gin').write_text(text.replace('@dynamic', 'from __gin__ import dynamic_registration'))
  message = _refused(files=('run.gin', 'model.gin', 'bad.gin'))
  for fragment in fragments:
    assert fragment in message


def test_syntax_error_in_included_file_names_that_file(tmp_path):
  (tmp_path / 'outer.gin').write_text("include 'inner.gin'\n")
  (tmp_path / 'inner.gin').write_text('A = 1\nB = = 2\n')
  assert 'inner.gin:2: not gin syntax' in _refused(files=('outer.gin',))


def test_all_missing_values_are_named_at_once():
  message = _refused(defaults=(), files=('run.gin',))
  assert message.startswith('3 required values are missing: MODEL, MODEL_DIR, STEPS.')
  assert '--gin.MODEL_DIR=runs/my_run (asked for in run.gin:7)' in message
  assert '--gin_file=models/' in message and '--gin.STEPS=VALUE (asked for in run.gin:6)' in message


def test_a_later_file_that_requires_a_value_anew_is_named(tmp_path):
  (tmp_path / 'mine.gin').write_text('STEPS = 7\n')
  message = _refused(defaults=('MODEL_DIR=x',), files=('mine.gin', 'run.gin', 'model.gin'))
  assert 'mine.gin:1 sets it, but run.gin:6, read later, requires it anew: give that file first' in message


def test_unbound_required_parameter_is_named_before_the_call(tmp_path):
  (tmp_path / 'run.gin').write_text(_RUN.replace("train/data.DatasetConfig.name = 'rows'\n", ''))
  message = _refused()
  assert message.startswith('train/data.DatasetConfig needs name, which nothing binds.')
  assert '--gin.train/data.DatasetConfig.name=VALUE' in message


def test_errors_of_the_program_lose_gins_lines_but_keep_the_scope():
  configuration = _load('eval/data.DatasetConfig.batch_size=0')
  with pytest.raises(ConfigError) as caught:
    configuration.call()
  assert gin_utils.plain_message(caught.value) == 'batch_size: got 0, expected at least 1. (in eval/DatasetConfig)'


def test_method_bindings_apply():
  assert _load('models.Model.predict.num_decodes=4').call()['model'].predict() == 4


def test_macros_may_be_chained_and_scopes_inherited(tmp_path):
  (tmp_path / 'more.gin').write_text(
      'from __gin__ import dynamic_registration\nfrom tests.core import gin_stand_ins as models\n'
      'WIDTH = %OTHER\nOTHER = 7\nMODEL/models.Model.rate = 0.5\n')
  model = _load(files=('run.gin', 'model.gin', 'more.gin')).call()['model']
  assert model.width == 7 and model.rate == 0.5  # a macro's name is the scope in which its value is made
  message = _refused('OTHER=x', files=('run.gin', 'model.gin', 'more.gin'))
  assert message.startswith("OTHER = 'x': expected int for ")


def test_reachable_follows_references_and_scopes():
  uses = [use for use in _load().uses if not use.configurable.selector.startswith('gin.')]
  found = {('/'.join(use.scope), use.configurable.name) for use in uses}
  assert found >= {('', 'train'), ('train', 'DatasetConfig'), ('eval', 'DatasetConfig'), ('MODEL', 'Model'),
                   ('', 'Trainer'), ('', 'schedule')}
  assert 'unused' not in {name for _, name in found}


# ----------------------------------------------------------------------------------------------------------------------
# Files


def test_search_order(tmp_path):
  for folder in ('here', 'extra'):
    (tmp_path / folder).mkdir()
  (tmp_path / 'extra' / 'model.gin').write_text(_MODEL.replace('32', '64'))
  (tmp_path / 'here' / 'outer.gin').write_text("include 'sibling.gin'\n")
  (tmp_path / 'here' / 'sibling.gin').write_text('STEPS = 3\n')
  assert gin_syntax.find_file('model.gin', ['extra']).resolve() == tmp_path / 'model.gin'
  (tmp_path / 'model.gin').unlink()
  assert gin_syntax.find_file('model.gin', ['extra']) == (tmp_path / 'extra/model.gin').relative_to(tmp_path)
  loaded = _load(defaults=('MODEL_DIR=x',), files=('run.gin', 'model.gin', 'here/outer.gin'), search_paths=['extra'])
  assert loaded.call()['model'].width == 64 and loaded.call()['total_steps'] == 3


def test_packaged_files_are_found_from_anywhere():
  files = gin_syntax.packaged_files()
  assert files
  for name in files:
    assert gin_syntax.find_file(name) == gin_syntax.packaged_folder() / name
    assert gin_syntax.find_file(f'gin/{name}') == gin_syntax.packaged_folder() / name


def test_missing_file_lists_where_and_suggests():
  with pytest.raises(ConfigError, match=re.escape("No gin file 'modl.gin'")) as caught:
    gin_syntax.find_file('modl.gin', ['extra'])
  assert 'extra' in str(caught.value)


# ----------------------------------------------------------------------------------------------------------------------
# The written configuration


def test_written_configuration_repeats_itself(tmp_path):
  first = _load('BATCH_SIZE=4', "data.DatasetConfig.lengths={'targets': 2, 'inputs': 1}",
                'models.Model.predict.num_decodes=2')
  path = gin_utils.write_config(tmp_path / 'run', first.text, 0)
  second = gin_utils.load(_ENTRY, gin_utils.read([str(path)]))
  assert second.text == first.text == path.read_text()
  one, two = first.call(), second.call()
  assert one['train_cfg'] == two['train_cfg'] and one['total_steps'] == two['total_steps'] == 10
  assert two['model'].predict() == 2
  # and it can be changed by the same macros
  flag = gin_syntax.read_flag('STEPS', '11', '--gin.STEPS=11')
  changed = gin_utils.load(_ENTRY, gin_utils.read([str(path)], [flag]))
  assert changed.call()['total_steps'] == 11


def test_configuration_of_a_former_run_is_kept(tmp_path):
  path = gin_utils.write_config(tmp_path, 'A = 1\n', 0)
  gin_utils.write_config(tmp_path, 'A = 1\n', 5)
  assert [p.name for p in tmp_path.glob('config*')] == ['config.gin']
  gin_utils.write_config(tmp_path, 'A = 2\n', 10)
  assert path.read_text() == 'A = 2\n' and (tmp_path / 'config-until-10.gin').read_text() == 'A = 1\n'
  gin_utils.write_config(tmp_path, 'A = 3\n', 10)
  assert (tmp_path / 'config-until-10-2.gin').read_text() == 'A = 2\n'
  assert sorted(p.name for p in tmp_path.glob('config*')) == [
      'config-until-10-2.gin', 'config-until-10.gin', 'config.gin']


def test_summarize_gin_config_writes_file_and_text(tmp_path):
  written = {}

  class Writer:
    def write_text(self, step, texts):
      written.update(texts, step=step)

  configuration = _load()
  gin_utils.summarize_gin_config(str(tmp_path / 'run'), Writer(), 3)
  assert (tmp_path / 'run/config.gin').read_text() == configuration.text
  assert written['step'] == 3 and 'STEPS = 10' in written['config']


def test_user_modules_may_register_while_the_program_runs(tmp_path, monkeypatch):
  """A task module that uses @gin.configurable is imported by the run, after the configuration is locked."""
  (tmp_path / 'late_module.py').write_text('import gin\n\n@gin.configurable\ndef late(x=1):\n  return x\n')
  monkeypatch.syspath_prepend(tmp_path)

  def imports_late():
    import late_module
    return late_module.late()

  configuration = _load()
  assert gin.config_is_locked()
  use = gin_check.Use(configuration.uses[0].configurable, (), True, {})
  assert gin_utils.Configuration(imports_late, '', [use]).call() == 1


def test_functions_that_users_decorate_are_bound_without_dynamic_registration(tmp_path, monkeypatch):
  (tmp_path / 'decorated_module.py').write_text(
      'import gin\n\n@gin.configurable\ndef decorated(x: int = 1):\n  return x\n')
  (tmp_path / 'old.gin').write_text('import decorated_module\ndecorated.x = 5\n')
  monkeypatch.syspath_prepend(tmp_path)
  _load('decorated.x=6', files=('run.gin', 'model.gin', 'old.gin'))
  import decorated_module
  assert decorated_module.decorated() == 6


# ----------------------------------------------------------------------------------------------------------------------
# T5X's functions


def test_parse_gin_flags_and_helpers(tmp_path):
  (tmp_path / 'sum.gin').write_text(textwrap.dedent("""\
      from __gin__ import dynamic_registration
      from t5x_lite import gin_utils
      from tests.core import gin_stand_ins as script
      TOTAL = @gin_utils.sum_fn()
      gin_utils.sum_fn:
        var1 = 3
        var2 = 4
      script.unused.value = %TOTAL
      """))
  gin_utils.parse_gin_flags([str(tmp_path)], ['sum.gin'], ['gin_utils.sum_fn.var2 = 5'])
  assert gin.get_configurable(gin_stand_ins.unused)() == 8
  assert 'gin_utils.sum_fn.var1 = 3' in gin_utils.get_gin_config_str()
  with pytest.raises(ConfigError, match="existing folders, .* got 'no/such/folder'"):
    gin_utils.parse_gin_flags(['no/such/folder', str(tmp_path)], ['sum.gin'], [])
  assert gin_utils.bool_fn([]) is False
  assert gin_utils.string_split_fn('a/b/c', '/', index=-1) == 'c'


def test_rewrite_gin_args_text_is_gin():
  rewritten = gin_utils.rewrite_gin_args(['p', '--gin.A=runs/a', '--gin.b.c={"x": 1}', '--other=1'])
  assert rewritten == ['p', "--gin_bindings=A = 'runs/a'", '--gin_bindings=b.c = {"x": 1}', '--other=1']


def test_checks_accept_what_annotations_leave_open():
  assert gin_check.fits('bfloat16', object) and gin_check.fits('x', 'unresolved')
  assert gin_check.fits((1, 2), tuple[int, int]) and not gin_check.fits((1,), tuple[int, int])
  assert gin_check.fits([1], tuple[int, ...]) and gin_check.fits(None, None)
