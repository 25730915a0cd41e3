"""`t5x_lite infer`: predictions or scores of every example of a task, a file or standard input."""

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile

from t5x_lite.apps.common.flags import Command, add_gin_arguments, load_configuration, put_run_file_first
from t5x_lite.apps.common.runs import take_run
from t5x_lite.errors import ConfigError, ExitCode

_RUN_FILE = 'runs/infer.gin'
_STANDARD = '-'
# Required values of a recipe that decide nothing about inference.
_STAND_INS = {'MODEL_DIR': "'none'", 'TRAIN_STEPS': '1', 'DROPOUT_RATE': '0.0', 'INITIAL_CHECKPOINT_PATH': "'none'"}
_HEADER = """
from __gin__ import dynamic_registration
from t5x_lite import data
from t5x_lite.apps import infer as infer_script
"""
# Modules of what changes no result, or is compared in another form when a run goes on.
_NOT_SETTINGS = ('t5x_lite.apps.infer.run', 't5x_lite.data.config', 't5x_lite.data.text_sources',
                 't5x_lite.partitioning', 't5x_lite.checkpoints', 't5x_lite.optimizers', 't5x_lite.schedules',
                 't5x_lite.gin_utils', 'gin')


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('run', nargs='?', metavar='RUN',
                      help="a training run's directory, for its newest checkpoint, or one of its checkpoints; its "
                      'config.gin says what the model is, and each --gin_file is read on top of it. In the place of '
                      'CHECKPOINT_PATH')
  texts = parser.add_argument_group('texts')
  texts.add_argument('--input', metavar='FILE',
                     help='infer from the lines of a file, in the place of a task: an input a line, or a JSON object a '
                     "line with a text under 'inputs' (and 'targets', to score them); - is standard input. A line that "
                     'cannot be read is named and left out, which changes no exit status')
  texts.add_argument('--input_format', choices=('auto', 'text', 'jsonl'),
                     help='what the lines are; by default JSON if the name ends in .jsonl, .json or .ndjson')
  texts.add_argument('--output', metavar='FILE',
                     help='write the results to this file of JSON lines, in the place of INFER_OUTPUT_DIR; - is '
                     'standard output')
  shards = parser.add_argument_group('several workers, each started with the same flags but for --shard_id')
  shards.add_argument('--num_shards', type=int, metavar='N', help='how many workers share the input')
  shards.add_argument('--shard_id', type=int, metavar='I', help="this worker's number, from 0")
  add_gin_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
  if arguments.input_format is not None and arguments.input is None:
    raise ConfigError(f'--input_format={arguments.input_format} says what --input is, which is not given. Add it, or '
                      'leave the format out.')
  if arguments.output != _STANDARD:
    folder, name = os.path.split(arguments.output or '')
    if arguments.output is not None and not name:
      raise ConfigError(f'--output={arguments.output}: expected the name of a file; a directory for results is '
                        f'--gin.INFER_OUTPUT_DIR={arguments.output or "FOLDER"}.')
    _infer(arguments, folder or '.', name)
    return ExitCode.OK
  if sys.stdout is None:
    raise ConfigError('--output=- writes to standard output, which is closed. Name a file, or open it.')
  # Nobody can go on with these results, so that they may stay in memory or on a temporary disk until all are there.
  with tempfile.TemporaryDirectory(prefix='t5x_lite_infer_') as temporary:
    with contextlib.redirect_stdout(io.StringIO()) as report:
      paths = _infer(arguments, temporary, 'results.jsonl')
    for path in paths:
      with open(path, encoding='utf-8', newline='') as results:
        shutil.copyfileobj(results, sys.stdout)
      sys.stdout.flush()
      print(report.getvalue().replace(path, 'standard output'), end='', file=sys.stderr)
  return ExitCode.OK


def _infer(arguments: argparse.Namespace, folder: str, name: str) -> list[str]:
  """Runs inference; results go to `folder/name` where --output was given."""
  stand_ins, words = dict(_STAND_INS), [_HEADER]
  if arguments.run is None and not arguments.gin_file:
    raise ConfigError('Nothing says what to infer with. Name a training run, e.g. `t5x_lite infer runs/my_run '
                      '--input=questions.txt --output=answers.jsonl`, or give a --gin_file and --gin.CHECKPOINT_PATH.')
  if arguments.run is not None:
    run = take_run(arguments)
    stand_ins['CHECKPOINT_PATH'] = 'None'
    words.append(f'CHECKPOINT_PATH = {run.checkpoint!r}\nCHECKPOINT_MODE = {run.mode!r}\n')
  put_run_file_first(arguments, _RUN_FILE, 'infer')
  if arguments.input is not None:
    stand_ins['MIXTURE_OR_TASK_NAME'] = 'None'
    words.append(f'infer_script.infer.dataset_cfg = @data.TextFileConfig()\ndata.TextFileConfig.path = '
                 f'{arguments.input!r}\n')
    if arguments.input_format is not None:
      words.append(f'data.TextFileConfig.file_format = {arguments.input_format!r}\n')
  if arguments.output is not None:
    stand_ins['INFER_OUTPUT_DIR'] = 'None'
    words.append(f'infer_script.infer.output_dir = {folder!r}\ninfer_script.infer.output_file = {name!r}\n')
  words += [f'infer_script.infer.{flag} = {value}\n' for flag in ('num_shards', 'shard_id')
            if (value := getattr(arguments, flag)) is not None]
  configuration = load_configuration(arguments, stand_ins, ''.join(words))
  num_shards = configuration.argument('num_shards') if 'num_shards' in configuration.uses[0].bound else 1
  if arguments.output == _STANDARD and num_shards != 1:
    raise ConfigError(f'num_shards={num_shards} and --output=- exclude each other: the results of several workers are '
                      'put together in a file. Name one.')
  settings = {f'--gin.{name}': value for name, value in configuration.settings(_NOT_SETTINGS).items()}
  return configuration.call(settings=settings)


COMMAND = Command('predict, or score, every example of a task, a file or standard input', _add_arguments, _run,
                  entry='t5x_lite.apps.infer.infer')
