"""Reading, applying, checking and writing gin configurations, on a small program."""

import subprocess
import sys
import textwrap

import gin
import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError
from tests.configuration import configuration_cases as cases
from tests.configuration import gin_program
from tests.configuration.configuration_cases import program_files  # noqa: F401


def test_files_and_flags_reach_the_program():
  result = cases.load(
    'BATCH_SIZE=4', 'models.Model.rate=1e-4', 'eval/data.DatasetConfig.batch_size=2'
  ).call()
  assert result['total_steps'] == 10 and result['model_dir'] == 'runs/a'
  assert result['model'].width == 32 and result['model'].rate == 1e-4
  assert (result['train_cfg'].batch_size, result['eval_cfg'].batch_size) == (4, 2)
  assert result['train_cfg'].shuffle and not result['eval_cfg'].shuffle
  assert result['rate'] == 0.5


# The written configuration


def test_written_configuration_repeats_itself(tmp_path):
  first = cases.load(
    'BATCH_SIZE=4',
    "data.DatasetConfig.lengths={'targets': 2, 'inputs': 1}",
    'models.Model.predict.num_decodes=2',
  )
  path = gin_utils.write_config(tmp_path / 'run', first.text, 0)
  second = gin_utils.load(cases.ENTRY, gin_utils.read([str(path)]))
  assert second.text == first.text == path.read_text()
  one, two = first.call(), second.call()
  assert one['train_cfg'] == two['train_cfg'] and one['total_steps'] == two['total_steps'] == 10
  assert two['model'].predict() == 2
  # and it can be changed by the same macros
  flag = gin_syntax.read_flag('STEPS', '11', '--gin.STEPS=11')
  changed = gin_utils.load(cases.ENTRY, gin_utils.read([str(path)], [flag]))
  assert changed.call()['total_steps'] == 11


def test_configuration_of_a_former_run_is_kept(tmp_path):
  path = gin_utils.write_config(tmp_path, 'A = 1\n', 0)
  gin_utils.write_config(tmp_path, 'A = 1\n', 5)
  assert [p.name for p in tmp_path.glob('config*')] == ['config.gin']
  gin_utils.write_config(tmp_path, 'A = 2\n', 10)
  assert (
    path.read_text() == 'A = 2\n' and (tmp_path / 'config-until-10.gin').read_text() == 'A = 1\n'
  )
  gin_utils.write_config(tmp_path, 'A = 3\n', 10)
  assert (tmp_path / 'config-until-10-2.gin').read_text() == 'A = 2\n'
  assert sorted(p.name for p in tmp_path.glob('config*')) == [
    'config-until-10-2.gin',
    'config-until-10.gin',
    'config.gin',
  ]


def test_summarize_gin_config_writes_file_and_text(tmp_path):
  written = {}

  class Writer:
    def write_text(self, step, texts):
      written.update(texts, step=step)

  configuration = cases.load()
  gin_utils.summarize_gin_config(str(tmp_path / 'run'), Writer(), 3)
  assert (tmp_path / 'run/config.gin').read_text() == configuration.text
  assert written['step'] == 3 and 'STEPS = 10' in written['config']


# T5X's functions


def test_parse_gin_flags_and_helpers(tmp_path):
  (tmp_path / 'sum.gin').write_text(
    textwrap.dedent("""\
      from __gin__ import dynamic_registration
      from t5x_lite import gin_utils
      from tests.configuration import gin_program as script
      TOTAL = @gin_utils.sum_fn()
      gin_utils.sum_fn:
        var1 = 3
        var2 = 4
      script.unused.value = %TOTAL
      """)
  )
  gin_utils.parse_gin_flags([str(tmp_path)], ['sum.gin'], ['gin_utils.sum_fn.var2 = 5'])
  assert gin.get_configurable(gin_program.unused)() == 8
  assert 'gin_utils.sum_fn.var1 = 3' in gin_utils.get_gin_config_str()
  with pytest.raises(ConfigError, match="existing folders, .* got 'no/such/folder'"):
    gin_utils.parse_gin_flags(['no/such/folder', str(tmp_path)], ['sum.gin'], [])
  with pytest.raises(ConfigError, match='show_provenance. must be False'):
    gin_utils.get_gin_config_str(show_provenance=True)
  assert gin_utils.bool_fn([]) is False
  assert gin_utils.string_split_fn('a/b/c', '/', index=-1) == 'c'


def test_unknown_names_are_skipped_on_request(tmp_path, caplog):
  (tmp_path / 'a.gin').write_text(
    textwrap.dedent("""\
      from __gin__ import dynamic_registration
      import no_such_package
      from t5x_lite import gin_utils
      no_such_package.fn.value = 1
      gin_utils.no_such_fn:
        value = %NUMBER
      gin_utils.sum_fn.var1 = %NUMBER
      NUMBER = 3
      """)
  )

  def parse(**options):
    gin_utils.parse_gin_flags(
      [str(tmp_path)], ['a.gin'], ['gin_utils.other_fn.value = 4'], **options
    )

  with pytest.raises(ConfigError, match='no_such_package'):
    parse()
  with caplog.at_level('INFO'):
    parse(skip_unknown=True)
  text = gin_utils.get_gin_config_str()
  assert (
    'gin_utils.sum_fn.var1 = %NUMBER' in text and 'no_such' not in text and 'other_fn' not in text
  )
  assert (
    'a.gin:2: skipped' in caplog.text and 'gin_utils.other_fn.value = 4: skipped' in caplog.text
  )
  parse(skip_unknown=['no_such_package.fn', 'gin_utils.no_such_fn', 'gin_utils.other_fn'])
  with pytest.raises(ConfigError, match='no_such_fn'):
    parse(skip_unknown=['no_such_package.fn'])
  with pytest.raises(ConfigError, match=r'`parse_gin_flags.skip_unknown` must be .*, got 3'):
    parse(skip_unknown=3)


def test_configurations_are_finalized_unless_declined(tmp_path):
  (tmp_path / 'a.gin').write_text('A = 1\n')
  gin_utils.parse_gin_flags([str(tmp_path)], ['a.gin'], ['gin.macro.value = %A'], False, False)
  assert not gin.config_is_locked()


def test_bindings_made_before_are_kept_until_the_configuration_is_finalized():
  gin.clear_config()
  gin_utils.parse_gin_flags([], [], ['gin.macro.value = 1'], False, False)
  gin_utils.parse_gin_flags([], [], ['other/gin.macro.value = 2'])
  assert gin.query_parameter('gin.macro.value') == 1
  gin_utils.parse_gin_flags([], [], ['other/gin.macro.value = 2'])  # Another configuration.
  with pytest.raises(ValueError, match='no bound parameters'):
    gin.query_parameter('gin.macro.value')


def test_a_program_of_absl_reads_gin_flags():
  program = """
      import sys
      from absl import flags
      from t5x_lite import gin_utils
      bindings = flags.DEFINE_multi_string('gin_bindings', [], 'Bindings.')
      gin_utils.run(lambda argv: print(argv[1:], bindings.value))
      """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(program), 'x', '--gin.A=runs/a', '--gin_bindings=B = 2'],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.stdout == """['x'] ["A = 'runs/a'", 'B = 2']\n""", done.stderr


@pytest.mark.parametrize(
  'call',
  [
    lambda: gin_utils.sum_fn(1),
    gin_utils.bool_fn,
    lambda: gin_utils.string_split_fn('a'),
    lambda: gin_utils.get_gin_config_str(show_provenance=True),
  ],
)
def test_missing_and_unsupported_arguments_are_errors(call):
  with pytest.raises(ConfigError, match=r'_(fn|str)\.(var.|separator|show_provenance)` must be'):
    call()


def test_required_of_gin_is_checked_when_the_configuration_is_loaded(tmp_path):
  (tmp_path / 'a.gin').write_text(
    textwrap.dedent("""\
      from __gin__ import dynamic_registration
      from t5x_lite import gin_utils
      from tests.configuration import gin_program as script
      script.unused.value = @gin_utils.sum_fn()
      gin_utils.sum_fn.var1 = 1
      """)
  )
  with pytest.raises(ConfigError, match='gin_utils.sum_fn requires var2'):
    gin_utils.load(
      'tests.configuration.gin_program.unused', gin_utils.read([str(tmp_path / 'a.gin')])
    )
