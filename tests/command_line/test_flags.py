"""Flags in absl's syntax, and those of T5X's programs."""

import logging
import sys

import jax
import pytest

from t5x_lite import runtime
from t5x_lite.apps import commands
from t5x_lite.apps.common import flags as command_flags
from t5x_lite.command_line import cli
from t5x_lite.command_line import flags as cli_flags
from t5x_lite.errors import ConfigError

_RUN = ['train', '--gin_file=recipes/keyword_cloze.gin']


def _parse(*argv):
  return cli.parse(['train', *argv])


@pytest.mark.parametrize(
  'argv, expected',
  [
    (['-gin_file=a.gin', '--gin_file', 'b.gin'], {'gin_files': ['a.gin', 'b.gin']}),
    (['--dry_run=TRUE'], {'dry_run': True}),
    (['--dry_run', '--nodry_run'], {'dry_run': False}),
    (['--nodry_run', '-dry_run=1'], {'dry_run': True}),
    ([], {'multiprocess_gpu': None}),
    (['--multiprocess_gpu=f'], {'multiprocess_gpu': False}),
    (['--multiprocess_gpu=false', '-multiprocess_gpu'], {'multiprocess_gpu': True}),
    (['--multiprocess_gpu=true', '-nomultiprocess_gpu'], {'multiprocess_gpu': False}),
    (['--process_count', '2', '-process_index=1'], {'process_count': 2, 'process_index': 1}),
    (['--alsologtostderr', '--nologtostderr'], {'log_level': 'info'}),
    (['-v', '1'], {'log_level': 'debug'}),
    (['--verbosity=-1'], {'log_level': 'warning'}),
    (['-v=-5'], {'log_level': 'error'}),
    (['--verbosity', 'FATAL'], {'log_level': 'error'}),
    (['--verbosity=1', '--log_level=error'], {'log_level': 'error'}),
    (['--stderrthreshold=1'], {'stderrthreshold': logging.WARNING}),
    (['--stderrthreshold', 'Debug'], {'stderrthreshold': logging.DEBUG}),
    (['--stderrthreshold=3'], {'stderrthreshold': logging.ERROR}),
    (
      ['--logger_levels=jax:debug, a.b : WARN,'],
      {'logger_levels': {'jax': logging.DEBUG, 'a.b': logging.WARNING}},
    ),
    (['--logger_levels=a:INFO', '--logger_levels='], {'logger_levels': {}}),
    (['--showprefixforinfo', '--noshowprefixforinfo'], {'showprefixforinfo': False}),
    (
      ['--jax_log_compiles', '--nojax_enable_checks', '-jax_platforms=cpu'],
      {'jax_flags': ['--jax_log_compiles', '--nojax_enable_checks', '-jax_platforms=cpu']},
    ),
    (['--undefok=foo,bar', '--nofoo', '-bar=3'], {'dry_run': False}),
    # In T5X, both kinds of bindings apply in their order.
    (
      ['--gin.A=1', '--gin_bindings', 'A = 2', '--gin_bindings=A=3', "--gin.B='x'"],
      {'gin_flags': ['--gin.A=1', '--gin_bindings=A = 2', '--gin_bindings=A=3', "--gin.B='x'"]},
    ),
  ],
)
def test_flags_have_the_meaning_of_absl(argv, expected):
  invocation = _parse(*argv)
  values = invocation.flags._asdict() | invocation._asdict()
  assert {name: values[name] for name in expected} == expected


def test_nothing_changes_an_invocation():
  invocation = _parse('--gin_file=a.gin', '--distributed=off')
  with pytest.raises(AttributeError):
    invocation.distributed = 'on'
  with pytest.raises(AttributeError):
    invocation.flags.distributed = 'on'
  changed = command_flags.with_run_file(
    invocation._replace(gin_files=[]), 'runs/eval.gin', 'evaluate'
  )
  assert changed.gin_files == [] and invocation.gin_files == ['a.gin']


def test_a_flag_with_only_the_prefix_of_negation_is_unknown():
  with pytest.raises(ConfigError, match='no flag --no'):
    _parse('--no')


def test_later_bindings_win_over_earlier_ones_of_both_kinds(tmp_path):
  arguments = _parse(
    '--gin_file=recipes/keyword_cloze.gin',
    f'--gin.MODEL_DIR="{tmp_path}"',
    '--gin.TRAIN_STEPS=4',
    '--gin_bindings=TRAIN_STEPS = 5',
    '--compilation_cache_dir=off',
    '--distributed=off',
  )
  assert command_flags.load_configuration(arguments).argument('total_steps') == 5


def test_flags_of_files_replace_flagfile(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'outer').write_text('# T5X\n\n// run\n--gin_file=a.gin\n--flagfile=inner\n')
  (tmp_path / 'inner').write_text('--gin.MODEL_DIR="b c"\n')
  arguments = _parse('--dry_run', '--flagfile', 'outer', '-gin_file=d.gin')
  assert arguments.gin_files == ['a.gin', 'd.gin'] and arguments.gin_flags == [
    '--gin.MODEL_DIR="b c"'
  ]
  (tmp_path / 'inner').write_text('--flagfile=outer')
  for name, reason in (('outer', 'contains itself'), ('none', 'No such file')):
    with pytest.raises(ConfigError, match=f'--flagfile must .*{reason}'):
      _parse(f'--flagfile={name}')


@pytest.mark.parametrize(
  'flag, fragments',
  [
    ('--dry_run=maybe', ['`--dry_run` must be true or false', "'maybe'"]),
    ('--nodry_run=true', ['`--dry_run` must be true or false']),
    ('--verbosity=loud', ['number from -2 (error) to 1 (debug)', "'loud'"]),
    ('--run_mode=train', ['train has no flag --run_mode', 't5x_lite train, eval, infer']),
    ('--module_import=tasks', ['--gin.MIXTURE_OR_TASK_MODULE=MODULE']),
    ('--pdb_post_mortem', ['python -m pdb']),
    ('--norun_with_profiling', ['cProfile']),
    ('--only_check_args', ['--dry_run']),
    ('--num_devices=8', ['explain_sharding and precompile', 'host_platform_device_count=N']),
    (
      '--stderrthreshold=loud',
      ['--stderrthreshold: must be debug, info, warning, error', "'loud'"],
    ),
    ('--stderrthreshold=4', ['number from 0 (info) to 3 (fatal)', "'4'"]),
    ('--logger_levels=jax:DEBUG,orbax', ['--logger_levels: must be NAME:LEVEL', "'orbax'"]),
    ('--logger_levels=jax:loud', ["'jax:loud'"]),
    ('--showprefixforinfo', ['--showprefixforinfo must be false', '--log_dir']),
    ('--fdl_config=base', ['gin file']),
    ('--xla_dump_to=a', ['XLA_FLAGS']),
    ('--jax_log_compile', ["no option jax_log_compile. Did you mean 'jax_log_compiles'?"]),
    ('--jax_log_compiles=maybe', ['`--jax_log_compiles` must be true or false', "'maybe'"]),
    ('--jax_default_matmul_precision=x', ['a value that JAX accepts', "'x'"]),
    ('--jax_num_cpu_devices=x', ['a value that JAX accepts', "'x'"]),
    ('--tfds_data_dir=data', ['`--tfds_data_dir` must be unset', 'no data of seqio', "'data'"]),
    ('--seqio_additional_cache_dirs=a', ['`--seqio_additional_cache_dirs` must be unset']),
    ('--log_dir=gs://bucket/logs', ['--log_dir must be a local folder', 'object store']),
    ('--gin_search_paths=/nope', ['`--gin_search_paths` must be existing folders', "'/nope'"]),
  ],
)
def test_other_flags_are_errors_with_the_alternative(capsys, monkeypatch, flag, fragments):
  monkeypatch.delitem(sys.modules, 'seqio', raising=False)
  assert cli.main([*_RUN, '--gin.MODEL_DIR=x', '--dry_run', flag]) == 2
  message = capsys.readouterr().err
  assert len(message.splitlines()) == 1 and all(fragment in message for fragment in fragments)


def test_only_commands_with_gin_have_these_flags(capsys):
  assert (
    cli.main(['plot', 'run', '--alsologtostderr']) == 2
    and cli.main(['plot', 'run', '--jax_log_compiles']) == 2
  )
  assert capsys.readouterr().err.count('has no flag') == 2


def test_jax_options_are_set_before_the_run():
  before = {
    name: jax.config.values[name] for name in ('jax_log_compiles', 'jax_default_matmul_precision')
  }
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
  argv = [
    '--gin_file=t5x/examples/t5/t5_1_1/tiny.gin',
    '--gin_file=t5x/configs/runs/pretrain.gin',
    '--gin.MIXTURE_OR_TASK_NAME="c"',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    '--gin.TRAIN_STEPS=1',
    '--gin.DROPOUT_RATE=0.0',
    f'--gin.MODEL_DIR={tmp_path}',
    '--distributed=off',
    '--compilation_cache_dir=off',
    f'--gin_search_paths={tmp_path}/t5x',
  ]
  command_flags.load_configuration(_parse(*argv))
  assert "/t5x'. All gin files were found without it." in caplog.text


def test_log_lines_and_errors_are_in_the_file_of_log_dir(capsys, tmp_path):
  argv = [*_RUN, f'--log_dir={tmp_path}/logs', '--gin.MODEL_DIR=x', '--gin.NO_SUCH=1']
  assert cli.main(argv) == 2
  (text,) = [path.read_text() for path in (tmp_path / 'logs').iterdir()]
  assert (
    "ConfigError: --gin.NO_SUCH=1: the macro 'NO_SUCH' is not used" in text and ' ERROR ' in text
  )
  assert not logging.getLogger('t5x_lite').handlers and 'NO_SUCH' in capsys.readouterr().err


@pytest.fixture
def log(capsys, monkeypatch, tmp_path):
  """Return a function that returns what a command with flags shows on standard error and writes to its file."""

  def run(arguments):
    for name in ('t5x_lite.part', 'jax.part', 'other'):
      for level in ('debug', 'info', 'warning', 'error'):
        getattr(logging.getLogger(name), level)('%s of %s', level, name)
    return runtime.Progress().log('progress') or 0

  monkeypatch.setitem(
    commands.COMMANDS,
    'fake',
    commands.Command('do something', command_flags.add_gin_arguments, run),
  )

  def main(*argv):
    assert cli.main(['fake', f'--log_dir={tmp_path}', *argv]) == 0
    (path,) = tmp_path.iterdir()
    written = path.read_text().splitlines()
    path.unlink()
    return capsys.readouterr().err.splitlines(), [line.partition('] ')[2] for line in written]

  return main


_OURS = [
  'info of t5x_lite.part',
  'warning: warning of t5x_lite.part',
  'error: error of t5x_lite.part',
]


@pytest.mark.parametrize(
  'argv, first, progress',
  [
    (['--stderrthreshold=info'], 0, True),
    (['--stderrthreshold=debug'], 0, True),
    (['--stderrthreshold=warning'], 1, False),
    (['--stderrthreshold=fatal'], 2, False),
    (['--stderrthreshold=error', '--alsologtostderr'], 0, True),
    (['--stderrthreshold=error', '--logtostderr'], 0, True),
  ],
)
def test_stderrthreshold_hides_lines_but_not_in_the_file(log, argv, first, progress):
  shown, written = log(*argv)
  assert shown == [*_OURS[first:], *(['progress'] * progress)]
  assert written == [line.rpartition(': ')[2] for line in _OURS]


def test_levels_of_loggers_decide_what_is_shown(log):
  before = logging.root.level, logging.root.handlers[:], logging.getLogger('jax').level
  shown, written = log(
    '--logger_levels=jax:INFO,other:debug,t5x_lite.part:ERROR', '--log_level=debug'
  )
  assert shown == [
    _OURS[2],
    'info of jax.part',
    'warning: warning of jax.part',
    'error: error of jax.part',
    'debug of other',
    'info of other',
    'warning: warning of other',
    'error: error of other',
    'progress',
  ]
  assert written == [line.rpartition(': ')[2] for line in shown[:-1]]
  assert 'info of other' in log('--logger_levels=root:INFO')[0]
  assert (logging.root.level, logging.root.handlers, logging.getLogger('jax').level) == before
  assert log('--logger_levels=t5x_lite:WARNING')[0][:2] == _OURS[1:]


def test_lines_have_no_prefix(log):
  for flag in ('--showprefixforinfo=false', '--noshowprefixforinfo'):
    assert log(flag)[0][:3] == _OURS


def test_levels_of_loggers_last_while_packages_hide_their_lines(monkeypatch):
  logging_of_absl = pytest.importorskip('absl.logging')
  pytest.importorskip('seqio')
  from t5x_lite.data.seqio import evaluator as seqio_evaluator
  from t5x_lite.data.seqio import packages as seqio_import

  logger = logging_of_absl.get_absl_logger()
  monkeypatch.setattr(logger, 'level', logging.INFO)
  with seqio_import.quiet():
    assert logger.level == logging.ERROR
  assert logger.level == logging.INFO
  logger.setLevel(logging.DEBUG)
  with seqio_evaluator._LogRelay():
    assert logger.level == logging.INFO
  assert logger.level == logging.DEBUG
  jax_logger = logging.getLogger('jax')
  monkeypatch.setattr(jax_logger, 'level', logging.CRITICAL)
  command_flags._set_jax_options(['--nojax_log_compiles'], shows_warnings=False)
  assert jax_logger.level == logging.CRITICAL


_PLACE = ['--coordinator_address=host:99', '--process_count=2', '--process_index=1']


@pytest.mark.parametrize(
  'argv, expected',
  [
    (_PLACE, ('auto', 'host:99', 2, 1)),
    (['--multiprocess_gpu', *_PLACE], ('on', 'host:99', 2, 1)),
    (['--multiprocess_gpu=false', *_PLACE], ('off', None, None, None)),
    (['--nomultiprocess_gpu', '--process_index=0'], ('off', None, None, None)),
    (
      ['--nomultiprocess_gpu', '--distributed=off', '--coordinator_address='],
      ('off', None, None, None),
    ),
    (['--coordinator_address='], ('auto', None, None, None)),
  ],
)
def test_multiprocess_gpu_decides_whether_a_process_is_alone(monkeypatch, caplog, argv, expected):
  joined = []
  monkeypatch.setattr(runtime, 'join', joined.append)
  invocation = _parse(*argv)
  with caplog.at_level(logging.INFO, 't5x_lite'):
    for _ in range(2):  # Some commands call it twice.
      invocation = command_flags.join_cluster(invocation)
  (cfg,) = joined
  assert (cfg.mode, cfg.coordinator_address, cfg.process_count, cfg.process_index) == expected
  ignored = [flag.partition('=')[0] for flag in argv if flag in (*_PLACE, '--process_index=0')]
  assert [record.getMessage() for record in caplog.records] == [
    f'No effect of {", ".join(ignored)}: --multiprocess_gpu=false starts one process.'
  ] * (bool(ignored) and expected[0] == 'off')


@pytest.mark.parametrize(
  'argv, message',
  [
    (
      ['--multiprocess_gpu', '--distributed=off'],
      '--distributed=off starts one process, and --multiprocess_gpu asks',
    ),
    (
      ['--nomultiprocess_gpu', '--distributed=on'],
      '--distributed=on asks for several processes, and --multiproc',
    ),
  ],
)
def test_modes_that_contradict_each_other(argv, message):
  with pytest.raises(ConfigError, match=message):
    command_flags.join_cluster(_parse(*argv))


def test_lists_of_folders_are_lines_of_csv():
  assert command_flags._folders(['a, b', '"gs://c/d"', '"e,f"', '']) == [
    'a',
    'b',
    'gs://c/d',
    'e,f',
  ]


def test_sentences_do_not_catch_flags_that_exist():
  for command in ('train', 'eval', 'infer', 'chat', 'export', 'precompile', 'explain_sharding'):
    assert not [
      flag
      for flag in cli._options(cli._parser([command], cli.T5X_LITE), command)
      if flag != '--num_devices' and cli_flags.remedy(flag)
    ]
