"""Flags for a user's own files, which set the options of `data.FileTask` by gin text."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.errors import ConfigError
from t5x_lite.storage import files

if TYPE_CHECKING:
  from t5x_lite import gin_utils

_HEADER = """
from __gin__ import dynamic_registration
from t5x_lite import data
"""
_TASK = """
MIXTURE_OR_TASK_NAME = @data.FileTask()
DATA_SOURCE = 'builtin'
data.FileTask.vocabulary = %VOCABULARY
"""
# Flags whose values are lists separated by commas.
_LISTS = ('columns', 'metrics')
# All flags by name of the option of `FileTask`.
_FLAGS: dict[str, dict[str, Any]] = {
  'train_file': {
    'metavar': 'FILES',
    'help': 'train on the records of this file, of a pattern such as "data/train-*.csv", or of several separated by '
    'commas: CSV, TSV, JSON lines, text (each also as .gz), Parquet or Arrow. Replaces the task of the gin files',
  },
  'validation_file': {
    'metavar': 'FILES',
    'help': 'evaluate on the records of these files',
  },
  'validation_fraction': {
    'metavar': 'F',
    'type': float,
    'help': 'evaluate on this part of the records of --train_file instead, e.g. 0.1; a hash of a record chooses it',
  },
  'inputs': {
    'metavar': 'TEMPLATE',
    'help': "inputs of the model: a column, or a text with columns in braces, e.g. 'summarize: {title}. {body}'",
  },
  'targets': {'metavar': 'TEMPLATE', 'help': 'targets of the model, as --inputs'},
  'file_format': {
    'metavar': 'FORMAT',
    'help': "csv, tsv, jsonl, text, parquet, arrow or array_record; default: what the file's name says",
  },
  'columns': {
    'metavar': 'NAMES',
    'help': 'names of the columns of files without a header, separated by commas',
  },
  'separator': {
    'metavar': 'TEXT',
    'help': "text between two fields of a line, e.g. ' ||| ' for --file_format=text",
  },
  'bad_records': {
    'choices': ('stop', 'skip'),
    'help': 'stop (default): a record without a text for a template is an error; skip: leave such records out',
  },
  'metrics': {
    'metavar': 'NAMES',
    'help': 'metrics of predictions, separated by commas, e.g. bleu,chrf,rougeL,exact_match (the default)',
  },
  'cache_dir': {
    'metavar': 'FOLDER',
    'help': 'folder of this machine for decompressed files and converted tables; default: ~/.cache/t5x_lite/data',
  },
}

# Names of the flags in `infer`, where they replace the templates of the run.
_OTHER_NAMES = {'inputs': ['--input_template'], 'targets': ['--target_template']}
# Flags of commands that evaluate a run, whose task has the other options.
EVAL_FLAGS = (
  'validation_file',
  'inputs',
  'targets',
  'file_format',
  'columns',
  'separator',
  'bad_records',
  'metrics',
  'cache_dir',
)


def add_file_arguments(
  parser: argparse.ArgumentParser, names: Sequence[str] = tuple(_FLAGS)
) -> None:
  """Add the flags of files.

  Args:
    parser: parser of the command.
    names: names of the flags; by default all.
  """
  group = parser.add_argument_group('your own files')
  for name in names:
    flags = [f'--{name}', *_OTHER_NAMES.get(name, ())]
    group.add_argument(*flags, dest=name, **_FLAGS[name])


def file_bindings(flags: Any) -> str:
  """Return gin text with the options that the flags set; '' without any.

  With `--train_file` or `--targets` the text also makes the task that of the run.

  Raises:
    ConfigError: there are flags for a task of files, but no file or no targets.
  """
  given = {name: getattr(flags, name, None) for name in _FLAGS}
  given = {name: value for name, value in given.items() if value is not None}
  if not given:
    return ''
  lines = [_HEADER]
  if 'train_file' in given or 'targets' in given:
    lines.append(_TASK)
  if 'validation_file' in given and 'validation_fraction' not in given:
    lines.append('data.FileTask.validation_fraction = None\n')
  for name, value in given.items():
    if name in _LISTS:
      value = [each.strip() for each in value.split(',')]
    if name == 'metrics':
      lines.append(f'data.FileTask.metrics = @data.metrics()\ndata.metrics.names = {value!r}\n')
    else:
      lines.append(f'data.FileTask.{name} = {value!r}\n')
  return ''.join(lines)


def check_reads_files(configuration: Any) -> None:
  """Raise if no dataset of a configuration reads files by `data.FileTask`, whose options the flags set.

  Raises:
    ConfigError: names the flags that choose the task.
  """
  from t5x_lite import data

  for found in configuration.arguments_of(data.DatasetConfig):
    task = found.get('mixture_or_task_name')
    if getattr(task, 'selector', '').endswith('FileTask'):
      return
  raise ConfigError(
    'The flags of files need a run whose task is data.FileTask, got another task. Add --targets=TEMPLATE (and '
    '--inputs=TEMPLATE; for training also --train_file=FILE) to use the columns of the files instead of its task.'
  )


def load_for_training(
  invocation: Invocation, placeholders: Mapping[str, str] | None = None
) -> 'gin_utils.Configuration':
  """Return the configuration of a command line with the flags of files, and with feature lengths.

  If the configuration has no lengths, those of the training data become a binding, which `config.gin` has too.

  Args:
    invocation: the command line.
    placeholders: see `load_configuration`.

  Raises:
    ConfigError: see `file_bindings` and `load_configuration`.
    DataError: the training data is needed for the lengths, and cannot be read.
  """
  defaults = file_bindings(invocation.flags)
  configuration = load_configuration(invocation, placeholders, defaults=defaults)
  if defaults:
    check_reads_files(configuration)
  from t5x_lite import data

  datasets = configuration.arguments_of(data.DatasetConfig)
  if all(found.get('task_feature_lengths', '') is not None for found in datasets):
    return configuration
  cfg = configuration.argument('train_dataset_cfg')
  if cfg.task_feature_lengths is not None:
    return configuration
  model_dir = configuration.argument('model_dir')
  with configuration.locating_errors():
    lengths = data.lengths_for_training(
      cfg,
      feature_converter=configuration.argument('model').FEATURE_CONVERTER,
      folder=model_dir if files.path(model_dir).is_dir() else None,
    )
  return load_configuration(
    invocation, placeholders, f'TASK_FEATURE_LENGTHS = {lengths!r}\n', defaults=defaults
  )
