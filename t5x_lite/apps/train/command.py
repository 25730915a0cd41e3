"""`t5x_lite train`: train a model, or resume training."""

import argparse
from typing import TYPE_CHECKING

from t5x_lite.apps.common.file_flags import add_file_arguments
from t5x_lite.apps.common.file_flags import file_bindings
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import add_seqio_arguments
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show
from t5x_lite.storage import files

if TYPE_CHECKING:
  from t5x_lite import gin_utils


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
    help='local folder outside of MODEL_DIR that keeps the newest checkpoint if it cannot be '
    'written to MODEL_DIR; the next run with this folder copies it there',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  defaults = file_bindings(flags)
  configuration = load_with_lengths(invocation, defaults)
  if flags.spool_dir is None:
    options = {}
  else:
    options = {'spool_dir': flags.spool_dir}
  if flags.dry_run:
    from t5x_lite import multihost

    if multihost.is_lead():
      show(configuration.text)
    configuration.call(dry_run=True, **options)
  else:
    configuration.call(**options)
  return ExitCode.OK


def load_with_lengths(invocation: Invocation, defaults: str) -> 'gin_utils.Configuration':
  """Return the configuration of a command line, with feature lengths from the training data if it has none.

  The lengths become a binding, so that `config.gin` of the run has them.

  Args:
    invocation: the command line.
    defaults: see `load_configuration`.
  """
  configuration = load_configuration(invocation, defaults=defaults)
  from t5x_lite import data

  datasets = configuration.arguments_of(data.DatasetConfig)
  if all(found.get('task_feature_lengths', '') is not None for found in datasets):
    return configuration
  cfg = configuration.argument('train_dataset_cfg')
  if cfg.task_feature_lengths is not None:
    return configuration
  model_dir = configuration.argument('model_dir')
  lengths = data.lengths_for_training(
    cfg,
    feature_converter=configuration.argument('model').FEATURE_CONVERTER,
    folder=model_dir if files.path(model_dir).is_dir() else None,
  )
  return load_configuration(
    invocation, overrides=f'TASK_FEATURE_LENGTHS = {lengths!r}\n', defaults=defaults
  )
