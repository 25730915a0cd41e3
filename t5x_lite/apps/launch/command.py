"""`t5x_lite launch`: start several processes of one run on this machine."""

import argparse

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ConfigError

_EXAMPLE = (
  'Write it after --, e.g. `t5x_lite launch -n 2 -- train --gin_file=recipes/keyword_cloze.gin`.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.usage = '%(prog)s -n N [--devices_per_process K] -- COMMAND ...'
  parser.epilog = (
    'example:\n'
    '  t5x_lite launch -n 2 -- train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/two\n'
    '  t5x_lite launch -n 2 --max_restarts=3 -- train --gin_file=recipes/keyword_cloze.gin '
    '--gin.MODEL_DIR=runs/two'
  )
  parser.add_argument(
    '-n', '--num_processes', type=int, required=True, metavar='N', help='number of processes'
  )
  parser.add_argument(
    '--devices_per_process',
    type=int,
    default=1,
    metavar='K',
    help='GPUs of each process, or virtual devices on a CPU; default: 1',
  )
  parser.add_argument(
    '--port', type=int, metavar='PORT', help='port at which the processes meet; default: a free one'
  )
  parser.add_argument(
    '--max_restarts',
    type=int,
    default=0,
    metavar='N',
    help='restart all processes at most N times in a row without a new checkpoint in between, after status 4, 74 or '
    '75 or a death by a signal; default: 0',
  )
  parser.add_argument(
    '--restart_seconds',
    type=float,
    default=10.0,
    metavar='SECONDS',
    help='wait before the first of these restarts; each further wait is twice as long, up to 300; default: 10',
  )
  parser.add_argument(
    'others',
    nargs='*',
    metavar='COMMAND',
    help='command of t5x_lite with its flags, or another program',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  from t5x_lite.apps.launch import run as launch

  if not flags.others:
    raise ConfigError(f'launch requires a command. {_EXAMPLE}')
  return launch.launch(
    flags.others,
    flags.num_processes,
    devices_per_process=flags.devices_per_process,
    port=flags.port,
    max_restarts=flags.max_restarts,
    restart_seconds=flags.restart_seconds,
  )
