"""`t5x_lite infer`: predict or score every example of a task, a file or standard input."""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from typing import Any

from t5x_lite.apps.common.constraints import add_constraint_arguments
from t5x_lite.apps.common.constraints import constrained_model
from t5x_lite.apps.common.constraints import given_constraints
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_decode_argument
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import add_seqio_arguments
from t5x_lite.apps.common.flags import join_cluster
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.apps.common.flags import with_run_file
from t5x_lite.apps.common.labels import add_labels_argument
from t5x_lite.apps.common.labels import decode_bindings
from t5x_lite.apps.common.runs import resolve_run
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show
from t5x_lite.storage import files

_RUN_FILE = 'runs/infer.gin'
_STANDARD = '-'
# Values of required macros that do not affect inference.
_PLACEHOLDERS = {
  'MODEL_DIR': "'none'",
  'TRAIN_STEPS': '1',
  'DROPOUT_RATE': '0.0',
  'INITIAL_CHECKPOINT_PATH': "'none'",
}
# Sources whose tasks may have files of records, see `data.file_task`.
_SOURCES_OF_FILES = ('builtin', 'grain')
_HEADER = """
from __gin__ import dynamic_registration
from t5x_lite import data
from t5x_lite import decoding
from t5x_lite.apps import infer as infer_script
"""
# Modules that change no result, or whose values are compared in another way when a run resumes.
_NOT_SETTINGS = (
  't5x_lite.apps.infer.run',
  't5x_lite.data.config',
  't5x_lite.data.text.sources',
  't5x_lite.partitioning',
  't5x_lite.checkpoints',
  't5x_lite.optimizers',
  't5x_lite.schedules',
  't5x_lite.gin_utils',
  'gin',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'run',
    nargs='?',
    metavar='RUN',
    help='run directory, whose newest checkpoint is used, or path of one checkpoint. The config.gin '
    'of the run defines the model; each --gin_file is read after it. Replaces CHECKPOINT_PATH',
  )
  texts = parser.add_argument_group('texts')
  texts.add_argument(
    '--input',
    metavar='FILE',
    help='read inputs from this file instead of a task: a table (CSV, TSV, Parquet, Arrow) or JSON lines whose columns '
    "the templates of the run name ('inputs' and 'targets' if it has none), or one input per line; text files also "
    'as .gz; - is standard input. Records that cannot be read are skipped with a warning',
  )
  texts.add_argument(
    '--input_format',
    choices=('auto', 'text', 'jsonl', 'csv', 'tsv', 'parquet', 'arrow'),
    help="format of the input; default: what the file's name says, otherwise text",
  )
  texts.add_argument(
    '--input_template',
    metavar='TEMPLATE',
    help="template of the inputs instead of the run's, e.g. 'summarize: {body}'; see train --inputs",
  )
  texts.add_argument(
    '--target_template',
    metavar='TEMPLATE',
    help="template of the targets to score, instead of the run's",
  )
  texts.add_argument(
    '--columns',
    metavar='NAMES',
    help='names of the columns of an input without a header, separated by commas',
  )
  texts.add_argument(
    '--keep_fields',
    metavar='NAMES',
    help="write these fields of a record next to its prediction: names separated by commas, or 'all'",
  )
  texts.add_argument(
    '--output',
    metavar='FILE',
    help='write the results to this JSONL file instead of INFER_OUTPUT_DIR, or as a table if its name ends in .csv; '
    '- is standard output',
  )
  decoding = parser.add_argument_group('decoding')
  add_decode_argument(decoding)
  add_labels_argument(decoding)
  shards = parser.add_argument_group(
    'several workers, each started with the same flags except --shard_id'
  )
  shards.add_argument(
    '--num_shards', type=int, metavar='N', help='number of workers that share the input'
  )
  shards.add_argument('--shard_id', type=int, metavar='I', help='index of this worker, from 0')
  add_constraint_arguments(parser)
  add_gin_arguments(parser)
  add_seqio_arguments(parser)


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  from t5x_lite.data.files import opening

  flags = invocation.flags
  folder, name = os.path.split(flags.output or '')
  if files.is_remote(flags.output or '') and not files.is_remote(folder):  # A bucket.
    name = ''
  problem = ''
  if flags.run is None and not invocation.gin_files:
    problem = (
      'RUN is missing. Pass a run directory, e.g. `t5x_lite infer runs/my_run --input=questions.txt '
      '--output=answers.jsonl`, or --gin_file and --gin.CHECKPOINT_PATH.'
    )
  elif flags.input_format is not None and flags.input is None:
    problem = f'--input_format={flags.input_format} requires --input. Add --input, or remove --input_format.'
  elif flags.output is not None and not name:
    problem = (
      f'--output must be the path of a file, got {flags.output!r}. To choose a folder, set '
      f'--gin.INFER_OUTPUT_DIR={flags.output or "FOLDER"}.'
    )
  elif not name.lower().endswith('.csv') and opening.is_table(name):
    problem = f'--output={flags.output}: results are JSON lines, or a table if the name ends in .csv. Rename it.'
  elif flags.output == _STANDARD and sys.stdout is None:
    problem = '--output=- writes to standard output, which is closed. Pass the path of a file.'
  if problem:
    raise ConfigError(problem)
  if flags.output != _STANDARD:
    _infer(invocation, folder or '.', name)
    return ExitCode.OK
  invocation = join_cluster(invocation)
  _check_alone()
  # Standard output cannot be resumed, so that the results are kept in a temporary folder until they are complete.
  with tempfile.TemporaryDirectory(prefix='t5x_lite_infer_') as temporary:
    with contextlib.redirect_stdout(io.StringIO()) as report:
      paths = _infer(invocation, temporary, 'results.jsonl')
    out: Any = sys.stdout
    for path in paths:
      with open(path, encoding='utf-8', newline='') as results:
        shutil.copyfileobj(results, out)
      out.flush()
      show(report.getvalue().replace(path, 'standard output').rstrip('\n'), file=sys.stderr)
  return ExitCode.OK


def _check_alone() -> None:
  """Raise if several processes would write to standard output."""
  from t5x_lite import runtime

  if runtime.current_monitor() is not None:
    raise ConfigError(
      '--output=- must be used with one process, since all processes and their libraries write to '
      'standard output. Pass the path of a file, or --distributed=off.'
    )


def _infer(invocation: Invocation, folder: str, name: str) -> list[str]:
  """Run inference; with --output, results go to `folder/name`."""
  flags = invocation.flags
  placeholders = dict(_PLACEHOLDERS)
  overrides = [_HEADER]
  if flags.run is not None:
    run, invocation = resolve_run(invocation)
    placeholders['CHECKPOINT_PATH'] = 'None'
    overrides.append(f'CHECKPOINT_PATH = {run.checkpoint!r}\nCHECKPOINT_MODE = {run.mode!r}\n')
  invocation = with_run_file(invocation, _RUN_FILE, 'infer')
  if flags.input is not None:
    placeholders['MIXTURE_OR_TASK_NAME'] = 'None'
    overrides.append(
      f'infer_script.infer.dataset_cfg = @data.TextFileConfig()\ndata.TextFileConfig.path = '
      f'{flags.input!r}\n'
    )
    if flags.input_format in ('auto', 'text', 'jsonl'):  # The others are read by `input_file`.
      overrides.append(f'data.TextFileConfig.file_format = {flags.input_format!r}\n')
  is_table = name.lower().endswith('.csv')
  if is_table:
    overrides.append('infer_script.infer.merge_fn = @infer_script.merge_chunks_to_table\n')
  if flags.output is not None:
    placeholders['INFER_OUTPUT_DIR'] = 'None'
    overrides.append(
      f'infer_script.infer.output_dir = {folder!r}\ninfer_script.infer.output_file = {name!r}\n'
    )
  overrides.append(decode_bindings(flags, 'infer_script.infer.decode_fn'))
  overrides += [
    f'infer_script.infer.{flag} = {value}\n'
    for flag in ('num_shards', 'shard_id')
    if (value := getattr(flags, flag)) is not None
  ]
  configuration = load_configuration(invocation, placeholders, ''.join(overrides))
  if 'num_shards' in configuration.uses[0].bound:
    num_shards = configuration.argument('num_shards')
  else:
    num_shards = 1
  if flags.output == _STANDARD and num_shards != 1:
    raise ConfigError(
      f'num_shards={num_shards} and --output=- cannot be combined: results of several workers are '
      'merged in a file. Pass the path of a file.'
    )
  if is_table and num_shards != 1:
    raise ConfigError(
      f'num_shards={num_shards} and --output={flags.output} cannot be combined: results of several workers are merged '
      'as lines. Choose a name that ends in .jsonl.'
    )
  settings = {
    f'--gin.{name}': value for name, value in configuration.settings(_NOT_SETTINGS).items()
  }
  arguments = {'model': constrained_model(configuration, flags)}
  only_predictions = list(given_constraints(flags))
  if flags.labels_file is not None:
    only_predictions.append('labels_file')
  if only_predictions and configuration.argument('mode') == 'score':
    raise ConfigError(
      f"--{only_predictions[0]} must be used with predictions, got mode='score'. Remove the flag, or set "
      "--gin.infer_script.infer.mode='predict'."
    )
  if flags.labels_file is not None:
    arguments['mode'] = 'predict_with_aux'  # with the scores
  if flags.input is None:
    return configuration.call(settings=settings, **arguments)
  from t5x_lite.apps.infer import input_file

  task = input_file.task_of_run(configuration)
  if not input_file.reads_records(task, flags):
    return configuration.call(
      settings=settings, **arguments, dataset_cfg=_with_keys_of_task(configuration)
    )
  for flag in ('input_template', 'target_template', 'keep_fields', 'columns'):
    if (value := getattr(flags, flag)) is not None:
      settings[f'--{flag}'] = value
  with input_file.local_input(flags) as path:
    dataset_cfg = input_file.dataset_of_records(
      task, configuration, flags, path, _kept_fields(flags.keep_fields)
    )
    return configuration.call(settings=settings, **arguments, dataset_cfg=dataset_cfg)


def _kept_fields(names: str | None) -> list[str] | None:
  """Return the fields that results keep, see `data.FileTask`."""
  if names is None:
    return []
  if names.strip() == 'all':
    return None
  from t5x_lite.data.file_tasks import RESULT_NAMES

  found = [name.strip() for name in names.split(',')]
  for name in found:
    if name in RESULT_NAMES:
      raise ConfigError(
        f'--keep_fields={names}: {name!r} is the name of a part of the results. Rename the column of the input.'
      )
  return found


def _with_keys_of_task(configuration: Any) -> Any:
  """Return the options of the input, with the keys of JSON lines that the task of the training has.

  Raises:
    ConfigError: only some processes can read the task, so that they would read other inputs.
  """
  from t5x_lite import data

  cfg = configuration.argument('dataset_cfg')
  if not isinstance(cfg, data.TextFileConfig) or not cfg.is_jsonl:
    return cfg
  if cfg.inputs_key is not None and cfg.targets_key is not None:
    return cfg
  keys = None
  problem = ''
  try:
    keys = _keys_of_task(configuration)
  except Exception as error:  # the module of a task is any code, and may be absent on this machine
    first_line = str(error).partition('\n')[0]
    problem = f'{type(error).__name__}: {first_line.rstrip(".")}'
  _check_same_keys(keys, problem)
  if keys is None:
    logging.getLogger(__name__).warning(
      'The keys of JSON lines in the task of the run are unknown, so that inputs have the key %r and targets %r (%s). '
      'For other keys, set --gin.data.TextFileConfig.inputs_key and --gin.data.TextFileConfig.targets_key.',
      cfg.keys_of('inputs')[0],
      cfg.keys_of('targets')[0],
      problem,
    )
    return cfg
  return dataclasses.replace(cfg, task_keys=keys)


def _keys_of_task(configuration: Any) -> dict[str, tuple[str, ...]]:
  """Return the keys of JSON lines in the task of the training by feature; {} for tasks without records."""
  from t5x_lite import data

  found = configuration.bound_in_scopes(data.DatasetConfig, ('', 'train'))
  # Tasks of other sources have no files of records, and their modules may import TensorFlow.
  if found.get('source') not in _SOURCES_OF_FILES:
    return {}
  return data.record_keys(found.get('mixture_or_task_name'), found.get('module'))


def _check_same_keys(keys: dict[str, tuple[str, ...]] | None, problem: str) -> None:
  """Raise if the lead process has other keys of JSON lines than this one; every process must call this.

  Args:
    keys: keys by feature; None if they are unknown.
    problem: why they are unknown.
  """
  from t5x_lite import runtime

  monitor = runtime.current_monitor()
  if monitor is None:
    return
  own = [keys and {name: list(found) for name, found in keys.items()}, problem]
  lead = json.loads(monitor.value_of_lead(json.dumps(own)))
  if own[0] == lead[0]:
    return
  raise ConfigError(
    'The keys of JSON lines in the task of the run must be the same on all processes, got '
    f'{own[0] or problem} in process {monitor.process} and {lead[0] or lead[1]} in process 0. Install the module of '
    'the task on all machines, or set --gin.data.TextFileConfig.inputs_key and --gin.data.TextFileConfig.targets_key.'
  )
