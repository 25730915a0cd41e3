"""Reading, applying, checking and writing gin configurations, on a small program."""

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
  result = cases.load('BATCH_SIZE=4', 'models.Model.rate=1e-4', 'eval/data.DatasetConfig.batch_size=2').call()
  assert result['total_steps'] == 10 and result['model_dir'] == 'runs/a'
  assert result['model'].width == 32 and result['model'].rate == 1e-4
  assert (result['train_cfg'].batch_size, result['eval_cfg'].batch_size) == (4, 2)
  assert result['train_cfg'].shuffle and not result['eval_cfg'].shuffle
  assert result['rate'] == 0.5


# The written configuration


def test_written_configuration_repeats_itself(tmp_path):
  first = cases.load('BATCH_SIZE=4', "data.DatasetConfig.lengths={'targets': 2, 'inputs': 1}",
                'models.Model.predict.num_decodes=2')
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

  configuration = cases.load()
  gin_utils.summarize_gin_config(str(tmp_path / 'run'), Writer(), 3)
  assert (tmp_path / 'run/config.gin').read_text() == configuration.text
  assert written['step'] == 3 and 'STEPS = 10' in written['config']


# T5X's functions


def test_parse_gin_flags_and_helpers(tmp_path):
  (tmp_path / 'sum.gin').write_text(textwrap.dedent("""\
      from __gin__ import dynamic_registration
      from t5x_lite import gin_utils
      from tests.configuration import gin_program as script
      TOTAL = @gin_utils.sum_fn()
      gin_utils.sum_fn:
        var1 = 3
        var2 = 4
      script.unused.value = %TOTAL
      """))
  gin_utils.parse_gin_flags([str(tmp_path)], ['sum.gin'], ['gin_utils.sum_fn.var2 = 5'])
  assert gin.get_configurable(gin_program.unused)() == 8
  assert 'gin_utils.sum_fn.var1 = 3' in gin_utils.get_gin_config_str()
  with pytest.raises(ConfigError, match="existing folders, .* got 'no/such/folder'"):
    gin_utils.parse_gin_flags(['no/such/folder', str(tmp_path)], ['sum.gin'], [])
  with pytest.raises(ConfigError, match='show_provenance. must be False'):
    gin_utils.get_gin_config_str(show_provenance=True)
  assert gin_utils.bool_fn([]) is False
  assert gin_utils.string_split_fn('a/b/c', '/', index=-1) == 'c'
