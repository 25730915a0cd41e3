"""`t5x_lite train`: train a model, or resume training."""

import argparse

from t5x_lite.apps.common.file_flags import add_file_arguments
from t5x_lite.apps.common.file_flags import load_for_training
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import add_seqio_arguments
from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  add_file_arguments(parser)
  add_gin_arguments(parser)
  add_seqio_arguments(parser)
  parser.add_argument(
    '--dry_run',
    action='store_true',
    help='print the configuration, the parameters and their sharding, memory, batches and the '
    'plan of the run, without training',
  )
  parser.add_argument(
    '--spool_dir',
    metavar='FOLDER',
    help='local folder outside of MODEL_DIR that keeps the newest checkpoint if it cannot be '
    'written to MODEL_DIR; the next run with this folder copies it there',
  )
  parser.add_argument(
    '--verify_base',
    action='store_true',
    help='when a run with an adapter resumes, compare all bytes of the base with those that it was first trained with',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  configuration = load_for_training(invocation)
  options = {}
  if flags.spool_dir is not None:
    options['spool_dir'] = flags.spool_dir
  if flags.verify_base:
    options['verify_base'] = True
  if flags.dry_run:
    from t5x_lite import multihost

    if multihost.is_lead():
      show(configuration.text)
    configuration.call(dry_run=True, **options)
  else:
    configuration.call(**options)
  return ExitCode.OK
