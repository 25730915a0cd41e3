"""Command line of `t5x_lite launch`."""

import sys

import pytest

from t5x_lite.apps.launch import run
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError


@pytest.mark.parametrize(
  'others, program',
  [
    (
      ['train', '--gin_file=a.gin', '--gin.MODEL_DIR=b', '--debug'],
      [
        sys.executable,
        '-m',
        't5x_lite',
        'train',
        '--gin_file=a.gin',
        '--gin.MODEL_DIR=b',
        '--debug',
      ],
    ),
    (['python', '-c', 'pass', '--', 'x'], ['python', '-c', 'pass', '--', 'x']),
  ],
)
def test_everything_after_the_dashes_is_the_other_command(monkeypatch, others, program):
  called = []
  monkeypatch.setattr(run, 'launch', lambda *args, **kwargs: called.append((args, kwargs)) or 7)
  flags = ['--max_restarts=4', '--restart_seconds=0.5']
  assert cli.main(['launch', '-n', '3', '--devices_per_process=2', *flags, '--', *others]) == 7
  options = {'max_restarts': 4, 'restart_seconds': 0.5}
  assert called == [((program, 3), {'devices_per_process': 2, 'port': None, **options})]


@pytest.mark.parametrize(
  'argv, message',
  [
    (['launch', '-n', '2'], r'launch requires a command. Write it after --'),
    (
      ['launch', '-n', '2', 'train', '--gin_file=x'],
      r'--gin_file=x is not a flag of launch. Write -- before',
    ),
    (['launch', '--', 'train'], r'-n/--num_processes'),
    (['launch', '-n', '0', '--', 'train'], r'`-n` must be an integer >= 1, got 0'),
    (['launch', '-n', '2', '--port=70000', '--', 'train'], r'`--port` must be'),
    (
      ['launch', '-n', '2', '--max_restarts=-1', '--', 'train'],
      r'`--max_restarts` must be an integer >= 0',
    ),
    (
      ['launch', '-n', '2', '--restart_seconds=nan', '--', 'train'],
      r'`--restart_seconds` must be a number',
    ),
    (
      ['launch', '-n', '2', '--', 'trian'],
      r"'trian' is neither a command of t5x_lite nor a program",
    ),
  ],
)
def test_errors(argv, message):
  arguments = None
  with pytest.raises(ConfigError, match=message):
    arguments = cli.parse(argv)
    cli.T5X_LITE.commands['launch'].run(arguments)
