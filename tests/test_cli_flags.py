"""Flags in absl's syntax, and those of T5X's programs."""

import logging
import sys

import jax
import pytest

from t5x_lite import cli
from t5x_lite import cli_flags
from t5x_lite.apps.common import flags as command_flags
from t5x_lite.errors import ConfigError

_RUN = ['train', '--gin_file=recipes/keyword_cloze.gin']


def _parse(*argv):
  return cli.parse(['train', *argv])


@pytest.mark.parametrize('argv, expected', [
    (['-gin_file=a.gin', '--gin_file', 'b.gin'], {'gin_file': ['a.gin', 'b.gin']}),
    (['--dry_run=TRUE'], {'dry_run': True}),
    (['--dry_run', '--nodry_run'], {'dry_run': False}),
    (['--nodry_run', '-dry_run=1'], {'dry_run': True}),
    (['--multiprocess_gpu=f'], {'multiprocess_gpu': False}),
    (['--process_count', '2', '-process_index=1'], {'process_count': 2, 'process_index': 1}),
    (['--alsologtostderr', '--nologtostderr'], {'log_level': 'info'}),
    (['-v', '1'], {'log_level': 'debug'}),
    (['--verbosity=-1'], {'log_level': 'warning'}),
    (['-v=-5'], {'log_level': 'error'}),
    (['--verbosity', 'FATAL'], {'log_level': 'error'}),
    (['--verbosity=1', '--log_level=error'], {'log_level': 'error'}),
    (['--jax_log_compiles', '--nojax_enable_checks', '-jax_platforms=cpu'],
     {'jax_flags': ['--jax_log_compiles', '--nojax_enable_checks', '-jax_platforms=cpu']}),
    (['--undefok=foo,bar', '--nofoo', '-bar=3'], {'dry_run': False}),
    # In T5X, both kinds of bindings apply in their order.
    (['--gin.A=1', '--gin_bindings', 'A = 2', '--gin_bindings=A=3', "--gin.B='x'"],
     {'gin_flags': ['--gin.A=1', '--gin_bindings=A = 2', '--gin_bindings=A=3', "--gin.B='x'"]}),
])
def test_flags_have_the_meaning_of_absl(argv, expected):
  arguments = vars(_parse(*argv))
  assert {name: arguments[name] for name in expected} == expected


def test_a_flag_with_only_the_prefix_of_negation_is_unknown():
  with pytest.raises(ConfigError, match='no flag --no'):
    _parse('--no')


def test_later_bindings_win_over_earlier_ones_of_both_kinds(tmp_path):
  arguments = _parse('--gin_file=recipes/keyword_cloze.gin', f'--gin.MODEL_DIR="{tmp_path}"', '--gin.TRAIN_STEPS=4',
                     '--gin_bindings=TRAIN_STEPS = 5', '--compilation_cache_dir=off', '--distributed=off')
  assert command_flags.load_configuration(arguments).argument('total_steps') == 5


def test_flags_of_files_replace_flagfile(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'outer').write_text('# T5X\n\n// run\n--gin_file=a.gin\n--flagfile=inner\n')
  (tmp_path / 'inner').write_text('--gin.MODEL_DIR="b c"\n')
  arguments = _parse('--dry_run', '--flagfile', 'outer', '-gin_file=d.gin')
  assert arguments.gin_file == ['a.gin', 'd.gin'] and arguments.gin_flags == ['--gin.MODEL_DIR="b c"']
  (tmp_path / 'inner').write_text('--flagfile=outer')
  for name, reason in (('outer', 'contains itself'), ('none', 'No such file')):
    with pytest.raises(ConfigError, match=f'--flagfile must .*{reason}'):
      _parse(f'--flagfile={name}')


@pytest.mark.parametrize('flag, fragments', [
    ('--dry_run=maybe', ['`--dry_run` must be true or false', "'maybe'"]),
    ('--nodry_run=true', ['`--dry_run` must be true or false']),
    ('--verbosity=loud', ['number from -2 (error) to 1 (debug)', "'loud'"]),
    ('--run_mode=train', ['train has no flag --run_mode', 't5x_lite train, eval, infer']),
    ('--module_import=tasks', ['--gin.MIXTURE_OR_TASK_MODULE=MODULE']),
    ('--pdb_post_mortem', ['python -m pdb']),
    ('--norun_with_profiling', ['cProfile']),
    ('--only_check_args', ['--dry_run']),
    ('--stderrthreshold=error', ['--log_level']),
    ('--logger_levels=jax:debug', ['--log_level']),
    ('--noshowprefixforinfo', ['--log_dir']),
    ('--fdl_config=base', ['gin file']),
    ('--xla_dump_to=a', ['XLA_FLAGS']),
    ('--jax_log_compile', ["no option jax_log_compile. Did you mean 'jax_log_compiles'?"]),
    ('--jax_log_compiles=maybe', ['`--jax_log_compiles` must be true or false', "'maybe'"]),
    ('--jax_default_matmul_precision=x', ['a value that JAX accepts', "'x'"]),
    ('--jax_num_cpu_devices=x', ['a value that JAX accepts', "'x'"]),
    ('--tfds_data_dir=data', ['`--tfds_data_dir` must be unset', 'no data of seqio', "'data'"]),
    ('--seqio_additional_cache_dirs=a', ['`--seqio_additional_cache_dirs` must be unset']),
    ('--log_dir=gs://bucket/logs', ['--log_dir must be a local folder', 'object store']),
    ('--gin_search_paths=/nope', ["`--gin_search_paths` must be existing folders", "'/nope'"]),
])
def test_other_flags_are_errors_with_the_alternative(capsys, monkeypatch, flag, fragments):
  monkeypatch.delitem(sys.modules, 'seqio', raising=False)
  assert cli.main([*_RUN, '--gin.MODEL_DIR=x', '--dry_run', flag]) == 2
  message = capsys.readouterr().err
  assert len(message.splitlines()) == 1 and all(fragment in message for fragment in fragments)


def test_only_commands_with_gin_have_these_flags(capsys):
  assert cli.main(['plot', 'run', '--alsologtostderr']) == 2 and cli.main(['plot', 'run', '--jax_log_compiles']) == 2
  assert capsys.readouterr().err.count('has no flag') == 2


def test_jax_options_are_set_before_the_run():
  before = {name: jax.config.values[name] for name in ('jax_log_compiles', 'jax_default_matmul_precision')}
  level = logging.getLogger('jax').level
  try:
    command_flags._set_jax_options(['--jax_log_compiles', '-jax_default_matmul_precision=highest'])
    assert jax.config.jax_log_compiles and jax.config.jax_default_matmul_precision == 'highest'
    assert logging.getLogger('jax').isEnabledFor(logging.WARNING)
    command_flags._set_jax_options(['--nojax_log_compiles'])
    assert not jax.config.jax_log_compiles
  finally:
    logging.getLogger('jax').setLevel(level)
    for name, value in before.items():
      jax.config.update(name, value)


def test_a_missing_folder_is_a_warning_if_files_of_t5x_are_replaced(caplog, tmp_path):
  argv = ['--gin_file=t5x/examples/t5/t5_1_1/tiny.gin', '--gin_file=t5x/configs/runs/pretrain.gin',
          '--gin.MIXTURE_OR_TASK_NAME="c"', "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
          '--gin.TRAIN_STEPS=1', '--gin.DROPOUT_RATE=0.0', f'--gin.MODEL_DIR={tmp_path}', '--distributed=off',
          '--compilation_cache_dir=off', f'--gin_search_paths={tmp_path}/t5x']
  command_flags.load_configuration(_parse(*argv))
  assert "/t5x'. All gin files were found without it." in caplog.text


def test_log_lines_and_errors_are_in_the_file_of_log_dir(capsys, tmp_path):
  argv = [*_RUN, f'--log_dir={tmp_path}/logs', '--gin.MODEL_DIR=x', '--gin.NO_SUCH=1']
  assert cli.main(argv) == 2
  text, = [path.read_text() for path in (tmp_path / 'logs').iterdir()]
  assert "ConfigError: --gin.NO_SUCH=1: the macro 'NO_SUCH' is not used" in text and ' ERROR ' in text
  assert not logging.getLogger('t5x_lite').handlers and 'NO_SUCH' in capsys.readouterr().err


def test_lists_of_folders_are_lines_of_csv():
  assert command_flags._folders(['a, b', '"gs://c/d"', '"e,f"', '']) == ['a', 'b', 'gs://c/d', 'e,f']


def test_sentences_do_not_catch_flags_that_exist():
  for command in ('train', 'eval', 'infer', 'chat', 'export', 'precompile', 'explain_sharding'):
    assert not [flag for flag in cli._options(cli._parser([command], cli.T5X_LITE), command) if cli_flags.remedy(flag)]
