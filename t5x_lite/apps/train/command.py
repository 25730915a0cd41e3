"""`t5x_lite train`: trains a model, or goes on training it."""

import argparse

from t5x_lite.apps.common.flags import Command, add_gin_arguments, load_configuration
from t5x_lite.errors import ExitCode


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  add_gin_arguments(parser)
  parser.add_argument('--dry_run', action='store_true',
                      help='show the configuration, the parameters and how they are sharded, memory, batches and the '
                      'plan of the run; train nothing')


def _run(arguments: argparse.Namespace) -> int:
  configuration = load_configuration(arguments)
  if arguments.dry_run:
    print(configuration.text)
    configuration.call(dry_run=True)
  else:
    configuration.call()
  return ExitCode.OK


COMMAND = Command('train a model, or go on training it', _add_arguments, _run, entry='t5x_lite.apps.train.train')
