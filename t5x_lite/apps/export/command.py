"""`t5x_lite export`: write predictions and scores of a model as programs that run without this package."""

import argparse
import os

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import join_cluster
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.apps.common.flags import with_run_file
from t5x_lite.apps.common.runs import resolve_run
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show
from t5x_lite.storage import files

_RUN_FILE = 'runs/export.gin'
# Values of required macros that do not affect an export.
_PLACEHOLDERS = {
  'MODEL_DIR': "'none'",
  'TRAIN_STEPS': '1',
  'DROPOUT_RATE': '0.0',
  'INITIAL_CHECKPOINT_PATH': "'none'",
  'MIXTURE_OR_TASK_NAME': "'none'",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'run',
    nargs='?',
    metavar='RUN',
    help='run directory, whose newest checkpoint is used, or path of one checkpoint. The config.gin '
    'of the run defines the model; each --gin_file is read after it. Replaces CHECKPOINT_PATH. '
    'Default of MODEL_OUTPUT_DIR/MODEL_NAME: RUN/exports/checkpoint_<step>',
  )
  add_gin_arguments(parser, compiles=False)
  parser.add_argument(
    '--saved_model', action='store_true', help='also write a TensorFlow SavedModel'
  )
  parser.add_argument(
    '--overwrite', action='store_true', help='replace an existing export after writing the new one'
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  if flags.run is None and not invocation.gin_files:
    raise ConfigError(
      'RUN is missing. Pass a run directory, e.g. `t5x_lite export runs/my_run`, or --gin_file, '
      '--gin.CHECKPOINT_PATH, --gin.MODEL_OUTPUT_DIR and --gin.MODEL_NAME.'
    )
  placeholders = dict(_PLACEHOLDERS)
  overrides = ''
  if flags.run is not None:
    run, invocation = resolve_run(invocation)
    path = run.checkpoint
    if run.mode == 'latest':
      invocation = join_cluster(invocation)  # before JAX is used
      from t5x_lite import checkpoints

      path = str(checkpoints.get_checkpoint_dir(path, checkpoints.newest_sound_step(path)))
    folder, name = os.path.split(
      path.rstrip('/') if files.is_remote(path) else os.path.normpath(path)
    )
    placeholders |= {
      'CHECKPOINT_PATH': 'None',
      'MODEL_NAME': repr(name),
      'MODEL_OUTPUT_DIR': repr(os.path.join(folder, 'exports')),
    }
    overrides = f'CHECKPOINT_PATH = {path!r}\n'
  invocation = with_run_file(invocation, _RUN_FILE, 'save')
  configuration = load_configuration(invocation, placeholders, overrides)
  options = {name: True for name in ('saved_model', 'overwrite') if getattr(flags, name)}
  folder = configuration.call(**options)
  from t5x_lite.apps.export import run as export

  show(export.describe(folder))
  return ExitCode.OK
