"""Input of `t5x_lite infer --input=FILE`: read as the files of a run's `data.FileTask`, or as lines of texts."""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
import shutil
import sys
import tempfile
from typing import Any

from t5x_lite import data
from t5x_lite.data import own_files
from t5x_lite.data.files import opening
from t5x_lite.errors import ConfigError

_STANDARD = '-'


def task_of_run(configuration: Any) -> data.FileTask | None:
  """Return the task of the training if it is one of files with templates; None for others.

  Args:
    configuration: the loaded configuration.
  """
  found = configuration.bound_in_scopes(data.DatasetConfig, ('', 'train'))
  task = found.get('mixture_or_task_name')
  if isinstance(task, data.FileTask):
    return task
  return None


def reads_records(task: data.FileTask | None, flags: Any) -> bool:
  """Return whether the input is read as records with templates, instead of lines of texts or of JSON.

  Args:
    task: task of the run.
    flags: flags of the command, with an input.
  """
  if task is not None or flags.input_template is not None or flags.target_template is not None:
    return True
  if flags.input_format in (None, 'auto'):
    return flags.input != _STANDARD and opening.is_table(flags.input)
  return flags.input_format not in ('text', 'jsonl')


@contextlib.contextmanager
def local_input(flags: Any) -> Iterator[str]:
  """Yield the path of the input; standard input is copied to a temporary file first."""
  if flags.input != _STANDARD:
    yield flags.input
    return
  with tempfile.TemporaryDirectory(prefix='t5x_lite_') as folder:
    path = pathlib.Path(folder) / 'stdin'
    with path.open('wb') as spooled:
      shutil.copyfileobj(sys.stdin.buffer, spooled)
    yield str(path)


def dataset_of_records(
  task: data.FileTask | None, configuration: Any, flags: Any, path: str, keep_fields: Any
) -> data.DatasetConfig:
  """Return the dataset of an input of records.

  Args:
    task: task of the run, whose templates are used.
    configuration: the loaded configuration, whose dataset is a file of texts.
    flags: flags of the command.
    path: result of `local_input`.
    keep_fields: see `data.FileTask`.

  Raises:
    ConfigError: a line of text cannot fill the template.
    DataError: the input does not exist.
  """
  own_files.find_listed_files(path, '--input')
  cfg = configuration.argument('dataset_cfg')
  model = configuration.argument('model')
  mode = configuration.argument('mode')
  if task is None:
    vocabularies = {'inputs': model.input_vocabulary, 'targets': model.output_vocabulary}
    names = {feature: cfg.keys_of(feature)[0] for feature in vocabularies}
    task = data.FileTask(vocabulary=vocabularies, train_file=path, **names)
  assert task is not None
  file_format = flags.input_format or 'auto'
  if file_format == 'auto' and flags.input == _STANDARD:
    file_format = 'text'
  separator = None
  if opening.has_separator(file_format, path):
    separator = task.separator
  chosen: data.FileTask = dataclasses.replace(
    task,
    train_file=None,
    validation_file=path,
    validation_fraction=None,
    file_format=file_format,
    separator=separator,
    # Not the run's columns: a header that is read as a record would shift the predictions.
    columns=flags.columns and [name.strip() for name in flags.columns.split(',')],
    inputs=flags.input_template or task.inputs,
    targets=flags.target_template or task.targets,
    bad_records='skip',
    needs_targets=mode == 'score',
    keep_fields=keep_fields,
    literal_sentinels=cfg.literal_sentinels or task.literal_sentinels,
    name=None,  # that of the input
  )
  is_text = file_format == 'text' or (file_format == 'auto' and opening.format_of(path) == 'text')
  if is_text and chosen.columns is None:
    chosen = dataclasses.replace(chosen, columns=[_column_of_lines(chosen, flags.input)])
  return data.DatasetConfig(
    chosen,
    cfg.task_feature_lengths,
    split='validation',
    batch_size=cfg.batch_size,
    shuffle=False,
    seed=0,
    source='builtin',
  )


def _column_of_lines(task: data.FileTask, path: str) -> str:
  """Return the column that a line of text is."""
  feature = 'targets' if task.inputs is None else 'inputs'
  names = set(task.templates[feature].columns)
  if len(names) != 1:
    raise ConfigError(
      f'A line of {path} is one text, and the template {task.templates[feature].text!r} of the {feature} has '
      f'{len(names)} columns. Use JSON lines or a table with these columns, or --input_template={{text}}.'
    )
  return names.pop()
