"""Command line: help, commands, flags, exit statuses, and output."""

import errno
import gc
import importlib
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
import weakref

import jax
import pytest

import t5x_lite
from t5x_lite import __main__
from t5x_lite import errors
from t5x_lite import runtime
from t5x_lite.apps import commands
from t5x_lite.command_line import cli

_ROOT = pathlib.Path(__file__).parents[2]


def _main(capsys, *argv):
  """Return (exit status, standard output, standard error)."""
  status = cli.main(argv)
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def _command(run, entry=None):
  return commands.Command(
    'do something', lambda parser: parser.add_argument('--count', type=int, default=1), run, entry
  )


@pytest.fixture
def fake(monkeypatch):
  """Return a function that sets the function of `t5x_lite fake`."""

  def install(run, **kwargs):
    monkeypatch.setitem(commands.COMMANDS, 'fake', _command(run, **kwargs))

  return install


# ----------------------------------------------------------------------------------------------------------------------
# Help, and its time


def test_help_lists_commands_and_exit_statuses(capsys):
  status, out, err = _main(capsys, '--help')
  assert status == 0 and not err
  for name in commands.COMMANDS:
    assert f'\n  {name} ' in out
  for code in errors.ExitCode:
    assert f'{code.value} ' in out.partition('exit status:')[2]
  assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize('command', sorted(commands.COMMANDS))
def test_every_command_has_help(capsys, command):
  status, out, _ = _main(capsys, command, '--help')
  assert status == 0 and out.startswith(f'usage: t5x_lite {command}') and '--debug' in out


def test_version(capsys):
  status, out, _ = _main(capsys, '--version')
  assert status == 0 and out.splitlines()[0] == f't5x_lite {t5x_lite.__version__}'


def test_a_missing_command_shows_help_and_fails(capsys):
  status, out, _ = _main(capsys)
  assert status == 2 and 'commands ' in out


_IMPORTS_NOTHING_HEAVY = """
import runpy, sys
start, *sys.argv = {arguments!r}
try:
  if start == 'scripts':
    runpy.run_path(sys.argv[0], run_name='__main__')
  else:
    runpy.run_module(start, run_name='__main__', alter_sys=False)
except SystemExit as stop:
  assert not stop.code, stop.code
heavy = set(sys.modules) & {{'jax', 'numpy', 'flax', 'gin', 'tensorflow', 'absl'}}
assert not heavy, heavy
"""


@pytest.mark.parametrize(
  'arguments',
  [
    ['t5x_lite', 't5x_lite', '--help'],
    ['t5x_lite', 't5x_lite', 'train', '--help'],
    ['scripts', 'scripts/train.py', '--help'],
    ['scripts', 'scripts/explain_sharding.py', '--help'],
  ],
)
def test_help_imports_nothing_heavy(arguments):
  code = _IMPORTS_NOTHING_HEAVY.format(arguments=arguments)
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=_ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith('usage: t5x_lite') and not done.stderr


def test_script_and_command_are_one_program():
  flags = ['--gin_file=recipes/keyword_cloz.gin']
  runs = [
    subprocess.run(
      [sys.executable, *start, *flags], cwd=_ROOT, capture_output=True, text=True, timeout=60
    )
    for start in (['scripts/train.py'], ['-m', 't5x_lite', 'train'])
  ]
  assert runs[0].returncode == runs[1].returncode == 2
  assert (
    runs[0].stderr == runs[1].stderr
    and "Did you mean 'recipes/keyword_cloze.gin'?" in runs[0].stderr
  )


# ----------------------------------------------------------------------------------------------------------------------
# Misspelt commands and flags


@pytest.mark.parametrize(
  'argv, fragments',
  [
    (['tran'], ["'tran' is not a command", "Did you mean 'train'?"]),
    (['train', '--dry-run'], ['train has no flag --dry-run', "'--dry_run'"]),
    (['train', '--gin_fil=a.gin'], ['has no flag --gin_fil', "'--gin_file'"]),
    (['train', '--gin-file=a.gin'], ['has no flag --gin-file', '--gin_file']),
    (['train', '--gin'], ['train has no flag --gin.']),
    (
      ['train', '-gin.TRAIN_STEPS=3'],
      ['train has no flag -gin.TRAIN_STEPS', 'Did you mean --gin.TRAIN_STEPS=3?'],
    ),
    (
      ['train', 'recipes/keyword_cloze.gin'],
      ['Did you mean --gin_file=recipes/keyword_cloze.gin?'],
    ),
    (['train', 'TRAIN_STEPS=3'], ['Did you mean --gin.TRAIN_STEPS=3?']),
    (['train'], ['--gin_file is missing', 'recipes/keyword_cloze.gin']),
    (['train', '--gin_file'], ['expected one argument', '--help']),
    (
      ['train', '--gin_file=recipes/keyword_cloze.gin', '--gin.MODEL_DIR'],
      ['--gin.MODEL_DIR requires a value'],
    ),
    (['--dry_run'], ['arguments are required: COMMAND']),
    (
      ['--log_level=info', 'train', '--dry_run'],
      [
        '--log_level=info must be after the command train',
        'Did you mean `t5x_lite train --log_level=info --dry_run`?',
      ],
    ),
    (['-x', 'infer', 'runs/a b'], ["Did you mean `t5x_lite infer -x 'runs/a b'`?"]),
    (
      ['--gin_file=a.gin', 'train', '--gin.TRAIN_STEPS=3'],
      ['Did you mean `t5x_lite train --gin_file=a.gin --gin.TRAIN_STEPS=3`?'],
    ),
    (
      ['explain_sharding', '--gin_file=recipes/keyword_cloze.gin', '--num_devices=0'],
      ['must be an integer in [1, 2048]'],
    ),
    (['explain_sharding', '--log_level=loud'], ["invalid choice: 'loud'", 'debug']),
    (['explain_sharding', '--num_devices=x'], ["invalid int value: 'x'"]),
  ],
)
def test_misspelt_command_lines_are_rejected(capsys, argv, fragments):
  status, out, err = _main(capsys, *argv)
  assert status == 2 and not out
  assert err.startswith('t5x_lite: error: ') and len(err.splitlines()) == 1
  for fragment in fragments:
    assert fragment in err


def test_gin_flags_are_rejected_by_commands_without_gin(capsys, fake):
  fake(lambda arguments: 0)
  status, _, err = _main(capsys, 'fake', '--gin.X=1')
  assert status == 2 and '--gin.X=1: fake has no gin configuration' in err


@pytest.mark.parametrize(
  'flag', [f'--gin_bindings=NO_SUCH{value}' for value in (' = 3', '=3', '=abc')]
)
def test_gin_bindings_are_flags_too(capsys, flag):
  status, _, err = _main(
    capsys, 'train', '--gin_file=recipes/keyword_cloze.gin', '--gin.MODEL_DIR=x', flag
  )
  assert status == 2 and f"{flag}: the macro 'NO_SUCH' is not used" in err


# ----------------------------------------------------------------------------------------------------------------------
# Exit statuses


@pytest.mark.parametrize(
  'error, status',
  [
    (errors.ConfigError, 2),
    (errors.DataError, 2),
    (errors.CheckpointError, 2),
    (errors.CheckpointDamagedError, 2),
    (errors.NonFiniteMetricError, 3),
    (errors.DirectoryInUseError, 5),
  ],
)
def test_errors_on_purpose_become_a_message_and_a_status(capsys, fake, error, status):

  def run(arguments):
    raise error('got this; expected that.')

  fake(run)
  assert _main(capsys, 'fake') == (status, '', 't5x_lite: error: got this; expected that.\n')


def test_a_store_that_does_not_answer_is_not_a_fault_of_the_disk(capsys, fake):

  def run(arguments):
    raise OSError(errno.EIO, 'the store did not answer', 'gs://bucket/x')

  fake(run)
  assert _main(capsys, 'fake') == (
    74,
    '',
    "t5x_lite: error: 'gs://bucket/x': the store did not answer. Check the network, then rerun the command; "
    '--debug shows more.\n',
  )


@pytest.mark.parametrize(
  'cause, wrapper, status, fragment',
  [
    (errno.ENOSPC, None, 74, "'x.jsonl': No space left on device. Free disk space, then rerun"),
    (errno.EDQUOT, errors.ConfigError, 74, 'config.gin cannot be written'),
    (errno.EIO, None, 74, 'Check the disk'),
    (errno.EIO, errors.CheckpointDamagedError, 2, ''),
    (errno.EACCES, None, 2, 'Correct the path or its permissions'),
    (errno.ENOSPC, errors.NonFiniteMetricError, 3, ''),
  ],
)
def test_faults_of_the_disk_are_not_the_configuration(
  capsys, fake, cause, wrapper, status, fragment
):

  def run(arguments):
    try:
      raise OSError(cause, os.strerror(cause), 'x.jsonl')
    except OSError as error:
      if wrapper is None:
        raise
      raise wrapper('config.gin cannot be written.') from error

  fake(run)
  found, _, err = _main(capsys, 'fake')
  assert found == status and fragment in err and len(err.splitlines()) == 1


def test_other_errors_keep_their_traceback(fake):

  def run(arguments):
    raise ZeroDivisionError('a defect')

  fake(run)
  with pytest.raises(ZeroDivisionError, match='a defect'):
    cli.main(['fake'])


@pytest.mark.parametrize('flags, variable', [(['--debug'], '0'), ([], '1')])
def test_debug_shows_the_traceback(capsys, fake, monkeypatch, flags, variable):
  monkeypatch.setenv('T5X_LITE_DEBUG', variable)

  def run(arguments):
    raise errors.ConfigError('rejected.')

  fake(run)
  status, _, err = _main(capsys, 'fake', *flags)
  assert (
    status == 2 and err.startswith('Traceback') and err.endswith('t5x_lite: error: rejected.\n')
  )


def test_interrupt_is_reported_as_shells_do(capsys, fake):

  def run(arguments):
    raise KeyboardInterrupt

  fake(run)
  status, _, err = _main(capsys, 'fake')
  assert status == 130 and 'interrupted' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize('place', ['garbage collector', 'destructor', 'weak reference'])
def test_interrupt_in_a_callback_is_not_lost(capsys, fake, place):

  class Interrupts:
    def __del__(self):
      if place == 'destructor':
        interrupt()

  def interrupt(*_):
    if not sent:
      sent.append(place)
      os.kill(os.getpid(), signal.SIGINT)

  def run(arguments):
    thing = Interrupts()
    reference = weakref.ref(thing, interrupt if place == 'weak reference' else None)
    if place == 'garbage collector':
      gc.callbacks.append(interrupt)
    try:
      del thing
      gc.collect()
      sum(range(20_000_000))  # keeps Python's lock for longer than until the signal is sent again
      time.sleep(60)
    finally:
      del reference
      if place == 'garbage collector':
        gc.callbacks.remove(interrupt)

  sent = []
  fake(run)
  before = sys.unraisablehook
  handler = signal.getsignal(signal.SIGINT)
  start = time.monotonic()
  status, _, err = _main(capsys, 'fake')
  assert status == 130 and err == 't5x_lite: interrupted.\n' and time.monotonic() - start < 30
  assert sent == [place] and sys.unraisablehook is before
  assert signal.getsignal(signal.SIGINT) is handler


def test_status_of_a_command_is_returned(capsys, fake):
  fake(
    lambda invocation: (
      errors.ExitCode.SAVED_ON_SIGNAL if invocation.flags.count == 3 else errors.ExitCode.OK
    )
  )
  assert _main(capsys, 'fake', '--count=3')[0] == 75 and _main(capsys, 'fake')[0] == 0


# ----------------------------------------------------------------------------------------------------------------------
# Output


def test_our_messages_are_plain_and_others_are_silent(capsys, fake):

  def run(arguments):
    logging.getLogger('t5x_lite.some_module').info('saved step 3')
    logging.getLogger('t5x_lite.some_module').warning('disk nearly full')
    logging.getLogger('absl').warning('chatter')
    logging.getLogger('jax._src.xla_bridge').warning('No GPU/TPU found, falling back to CPU.')
    warnings.warn_explicit('deprecated', FutureWarning, 'x.py', 1, module='tensorflow.python.ops')
    warnings.warn_explicit('look here', UserWarning, '/far/away/y.py', 7, module='my_task')
    return 0

  fake(run)
  with warnings.catch_warnings():
    warnings.resetwarnings()
    status, out, err = _main(capsys, 'fake')
  assert status == 0 and not out
  assert err.splitlines() == [
    'saved step 3',
    'warning: disk nearly full',
    'warning: look here (y.py:7)',
  ]


@pytest.mark.parametrize(
  'level, shown',
  [
    ('debug', ['found', 'saved', 'warning: full', 'warning: look here (y.py:7)', 'error: lost']),
    ('info', ['saved', 'warning: full', 'warning: look here (y.py:7)', 'error: lost']),
    ('warning', ['warning: full', 'warning: look here (y.py:7)', 'error: lost']),
    ('error', ['error: lost']),
  ],
)
def test_level_of_log_lines(capsys, fake, level, shown):

  def run(arguments):
    log = logging.getLogger('t5x_lite.some_module')
    log.debug('found')
    log.info('saved')
    log.warning('full')
    warnings.warn_explicit('look here', UserWarning, '/far/away/y.py', 7, module='my_task')
    log.error('lost')
    return 0

  fake(run)
  with warnings.catch_warnings():
    warnings.resetwarnings()
    found = _main(capsys, 'fake', f'--log_level={level}')
  assert found == (0, '', ''.join(f'{line}\n' for line in shown))


def test_debug_level_names_compilations(capsys, fake):

  def run(arguments):
    jax.jit(lambda x: x * 0.125).lower(1.0).compile()
    return 0

  fake(run)
  assert 'lambda' in _main(capsys, 'fake', '--log_level=debug')[2]
  assert _main(capsys, 'fake') == (0, '', '')


def test_logging_is_as_before_afterwards(capsys, fake):
  before = {name: logging.getLogger(name).level for name in ('absl', 'jax', 't5x_lite')}
  fake(lambda arguments: 0)
  _main(capsys, 'fake')
  assert {name: logging.getLogger(name).level for name in before} == before
  assert logging.getLogger('t5x_lite').propagate and not logging.getLogger('t5x_lite').handlers


@pytest.mark.parametrize(
  'arguments, may_restart, restarts',
  [
    (['train', '--x=1'], True, True),
    (['eval', 'run'], True, True),
    (['--help'], True, False),
    (['chat', 'run'], True, False),
    ([], True, False),
    # A launcher may have done other work.
    (['train', '--x=1'], False, False),
  ],
)
def test_only_processes_of_commands_that_compute_restart(
  monkeypatch, arguments, may_restart, restarts
):
  monkeypatch.setattr(sys, 'argv', ['t5x_lite', *arguments])
  monkeypatch.setattr(cli, 'main', lambda: 0)
  monkeypatch.setattr(gc, 'set_threshold', lambda *args: None)
  called = []
  monkeypatch.setattr(runtime, 'restart_with_huge_pages', lambda: called.append(1))
  with pytest.raises(SystemExit):
    cli.run_program(may_restart=may_restart)
  assert called == [1] * restarts


@pytest.mark.parametrize('command, thresholds', [('train', [(50_000, 10, 10)]), ('convert', [])])
def test_garbage_is_collected_early_in_conversions_alone(monkeypatch, command, thresholds):
  found = []
  monkeypatch.setattr(sys, 'argv', ['t5x_lite', command])
  monkeypatch.setattr(cli, 'main', lambda: 0)
  monkeypatch.setattr(gc, 'set_threshold', lambda *args: found.append(args))
  with pytest.raises(SystemExit):
    cli.run_program()
  assert found == thresholds


def test_entry_point_of_the_installed_command():
  text = (_ROOT / 'setup.py').read_text()
  module, _, function = text.partition('t5x_lite = ')[2].partition("'")[0].partition(':')
  assert getattr(importlib.import_module(module), function) is __main__.run
