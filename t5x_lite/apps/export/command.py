"""`t5x_lite export`: a model's predictions and scores as programs that run without this package."""

import argparse
import os

from t5x_lite.apps.common.flags import Command, add_gin_arguments, load_configuration, put_run_file_first
from t5x_lite.apps.common.runs import take_run
from t5x_lite.errors import ConfigError, ExitCode

_RUN_FILE = 'runs/export.gin'
# Required values of a recipe that decide nothing about an export.
_STAND_INS = {'MODEL_DIR': "'none'", 'TRAIN_STEPS': '1', 'DROPOUT_RATE': '0.0', 'INITIAL_CHECKPOINT_PATH': "'none'",
              'MIXTURE_OR_TASK_NAME': "'none'"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('run', nargs='?', metavar='RUN',
                      help="a training run's directory, for its newest checkpoint, or one of its checkpoints; its "
                      'config.gin says what the model is, and each --gin_file is read on top of it. In the place of '
                      'CHECKPOINT_PATH; the export is RUN/exports/checkpoint_<step> unless MODEL_OUTPUT_DIR and '
                      'MODEL_NAME are given')
  add_gin_arguments(parser, compiles=False)
  parser.add_argument('--saved_model', action='store_true', help='also write a SavedModel, where TensorFlow is installed')
  parser.add_argument('--overwrite', action='store_true', help='replace an export of that name, once the new one is whole')


def _run(arguments: argparse.Namespace) -> int:
  if arguments.run is None and not arguments.gin_file:
    raise ConfigError('Nothing says what to export. Name a training run, e.g. `t5x_lite export runs/my_run`, or give a '
                      '--gin_file, --gin.CHECKPOINT_PATH, --gin.MODEL_OUTPUT_DIR and --gin.MODEL_NAME.')
  stand_ins, last_words = dict(_STAND_INS), ''
  if arguments.run is not None:
    run = take_run(arguments)
    path = run.checkpoint
    if run.mode == 'latest':
      from t5x_lite import checkpoints
      path = str(checkpoints.get_checkpoint_dir(path, checkpoints.newest_sound_step(path)))
    folder, name = os.path.split(os.path.normpath(path))
    stand_ins |= {'CHECKPOINT_PATH': 'None', 'MODEL_NAME': repr(name),
                  'MODEL_OUTPUT_DIR': repr(os.path.join(folder, 'exports'))}
    last_words = f'CHECKPOINT_PATH = {path!r}\n'
  put_run_file_first(arguments, _RUN_FILE, 'save')
  configuration = load_configuration(arguments, stand_ins, last_words)
  flags = {name: True for name in ('saved_model', 'overwrite') if getattr(arguments, name)}
  folder = configuration.call(**flags)
  from t5x_lite.apps.export import run as export
  print(export.describe(folder))
  return ExitCode.OK


COMMAND = Command('write a trained model as programs that run without this package', _add_arguments, _run,
                  entry='t5x_lite.apps.export.save')
