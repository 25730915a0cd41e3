"""`t5x_lite export`: a model's predictions and scores as programs that run without this package."""

import argparse

from t5x_lite.commands.common import Command, add_gin_arguments, load_configuration, put_run_file_first
from t5x_lite.errors import ExitCode

_RUN_FILE = 'runs/export.gin'
# Required values of a recipe that decide nothing about an export.
_STAND_INS = {'MODEL_DIR': "'none'", 'TRAIN_STEPS': '1', 'DROPOUT_RATE': '0.0', 'INITIAL_CHECKPOINT_PATH': "'none'",
              'MIXTURE_OR_TASK_NAME': "'none'"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  add_gin_arguments(parser, compiles=False)
  parser.add_argument('--saved_model', action='store_true', help='also write a SavedModel, where TensorFlow is installed')
  parser.add_argument('--overwrite', action='store_true', help='replace an export of that name, once the new one is whole')


def _run(arguments: argparse.Namespace) -> int:
  put_run_file_first(arguments, _RUN_FILE, 'save')
  configuration = load_configuration(arguments, _STAND_INS)
  flags = {name: True for name in ('saved_model', 'overwrite') if getattr(arguments, name)}
  folder = configuration.call(**flags)
  from t5x_lite.apps import export
  print(export.describe(folder))
  return ExitCode.OK


COMMAND = Command('write a trained model as programs that run without this package', _add_arguments, _run,
                  entry='t5x_lite.apps.export.save')
