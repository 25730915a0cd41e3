"""Flags for a user's own files, which set the options of `data.FileTask` by gin text."""

import argparse
from collections.abc import Sequence
from typing import Any

from t5x_lite.errors import ConfigError

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
_LISTS = ('columns',)
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
  'cache_dir': {
    'metavar': 'FOLDER',
    'help': 'folder of this machine for decompressed files and converted tables; default: ~/.cache/t5x_lite/data',
  },
}


def add_file_arguments(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(_FLAGS)) -> None:
  """Add the flags of files.

  Args:
    parser: parser of the command.
    names: names of the flags; by default all.
  """
  group = parser.add_argument_group('your own files')
  for name in names:
    group.add_argument(f'--{name}', **_FLAGS[name])


def file_bindings(flags: Any) -> str:
  """Return gin text with the options that the flags set; '' without any.

  Raises:
    ConfigError: there are flags for a task of files, but no file or no targets.
  """
  given = {name: getattr(flags, name, None) for name in _FLAGS}
  given = {name: value for name, value in given.items() if value is not None}
  if not given:
    return ''
  lines = [_HEADER]
  if 'train_file' in given:
    if 'targets' not in given:
      raise ConfigError(
        f'--targets is missing. Name the column of the targets of {given["train_file"]}, e.g. --targets=answer, or a '
        'template.'
      )
    lines.append(_TASK)
  for name, value in given.items():
    if name in _LISTS:
      value = [each.strip() for each in value.split(',')]
    lines.append(f'data.FileTask.{name} = {value!r}\n')
  return ''.join(lines)
