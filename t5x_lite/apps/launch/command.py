"""`t5x_lite launch`: start several processes of one run on this machine."""

import argparse

from t5x_lite.errors import ConfigError

_EXAMPLE = (
  'Write it after --, e.g. `t5x_lite launch -n 2 -- train --gin_file=recipes/keyword_cloze.gin`.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.usage = '%(prog)s -n N [--devices_per_process K] -- COMMAND ...'
  parser.epilog = (
    'example:\n'
    '  t5x_lite launch -n 2 -- train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/two'
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
    'others',
    nargs='*',
    metavar='COMMAND',
    help='command of t5x_lite with its flags, or another program',
  )


def run_command(arguments: argparse.Namespace) -> int:
  """Run the command and return its exit status."""
  from t5x_lite.apps.launch import run as launch

  if not arguments.others:
    raise ConfigError(f'launch requires a command. {_EXAMPLE}')
  return launch.launch(
    arguments.others,
    arguments.num_processes,
    devices_per_process=arguments.devices_per_process,
    port=arguments.port,
  )
