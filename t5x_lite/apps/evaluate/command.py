"""`t5x_lite eval`: evaluates one, the newest or all checkpoints."""

import argparse
import os

from t5x_lite.apps.common.flags import Command, add_gin_arguments, load_configuration, put_run_file_first
from t5x_lite.apps.common.runs import take_run
from t5x_lite.errors import ConfigError, ExitCode

_RUN_FILE = 'runs/eval.gin'
# Required values of a recipe that decide nothing about evaluation.
_STAND_INS = {'MODEL_DIR': "'none'", 'TRAIN_STEPS': '1', 'DROPOUT_RATE': '0.0', 'INITIAL_CHECKPOINT_PATH': "'none'"}
# Modules of what changes no result, or is compared in another form with former results.
_NOT_SETTINGS = ('t5x_lite.apps.evaluate', 't5x_lite.data.config', 't5x_lite.evaluation', 't5x_lite.partitioning',
                 't5x_lite.checkpoints', 't5x_lite.optimizers', 't5x_lite.schedules', 't5x_lite.trainer',
                 't5x_lite.gin_utils', 'gin')


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('run', nargs='?', metavar='RUN',
                      help="a training run's directory, for its newest checkpoint, or one of its checkpoints; its "
                      'config.gin says what the model and the task are, and each --gin_file is read on top of it. In '
                      'the place of CHECKPOINT_PATH; EVAL_OUTPUT_DIR is RUN/eval unless given')
  parser.add_argument('--all', action='store_true', help='evaluate all checkpoints of RUN, in ascending order of step')
  parser.add_argument('--dry_run', action='store_true',
                      help='show the configuration and which checkpoints would be evaluated; evaluate nothing')
  add_gin_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
  stand_ins, last_words = dict(_STAND_INS), ''
  if arguments.all and arguments.run is None:
    raise ConfigError('--all is about the checkpoints of RUN, and no run is named. Name one, e.g. `t5x_lite eval '
                      'runs/my_run --all`, or set --gin.CHECKPOINT_MODE=all.')
  if arguments.run is None and not arguments.gin_file:
    raise ConfigError('Nothing says what to evaluate. Name a training run, e.g. `t5x_lite eval runs/my_run`, or give a '
                      '--gin_file, --gin.CHECKPOINT_PATH and --gin.EVAL_OUTPUT_DIR.')
  if arguments.run is not None:
    last_words = _use_run(arguments, stand_ins)
  put_run_file_first(arguments, _RUN_FILE, 'evaluate')
  configuration = load_configuration(arguments, stand_ins, last_words)
  if arguments.dry_run:
    print(configuration.text)
  configuration.call(dry_run=arguments.dry_run, settings=configuration.settings(_NOT_SETTINGS))
  return ExitCode.OK


def _use_run(arguments: argparse.Namespace, stand_ins: dict[str, str]) -> str:
  """Takes model, task and checkpoints from a run; returns gin text."""
  run = take_run(arguments)
  if arguments.all and run.mode == 'specific':
    raise ConfigError(f'--all is about the checkpoints of a run, but {arguments.run!r} is one of them: name the '
                      'directory above it, or leave --all out.')
  is_in_run = run.mode == 'specific' and os.path.abspath(run.checkpoint) != run.model_dir
  folder = os.path.dirname(os.path.normpath(arguments.run)) if is_in_run else arguments.run
  stand_ins |= {'CHECKPOINT_PATH': 'None', 'EVAL_OUTPUT_DIR': repr(os.path.join(folder, 'eval'))}
  mode = 'all' if arguments.all else run.mode
  return f'CHECKPOINT_PATH = {run.checkpoint!r}\nCHECKPOINT_MODE = {mode!r}\n'


COMMAND = Command('evaluate checkpoints by decoding, one, the newest or all', _add_arguments, _run,
                  entry='t5x_lite.apps.evaluate.evaluate')
