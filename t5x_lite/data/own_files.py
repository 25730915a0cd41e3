"""Task from a user's own files: tables and JSON lines, with templates for inputs and targets.

The flags of `t5x_lite train` (`--train_file`, `--inputs`, `--targets` ...) set the options of `FileTask`, so that the
configuration of a run has them all.
"""

import array
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from t5x_lite import checks
from t5x_lite.data.builtin_tasks import BuiltinTask
from t5x_lite.data.builtin_tasks import TaskDescription
from t5x_lite.data.file_tasks import FileExamples
from t5x_lite.data.file_tasks import RecordContext
from t5x_lite.data.file_tasks import kept_fields
from t5x_lite.data.file_tasks import located
from t5x_lite.data.files import opening
from t5x_lite.data.files.records import BadRecordError
from t5x_lite.data.files.records import Records
from t5x_lite.data.files.records import Subset
from t5x_lite.data.files.records import Where
from t5x_lite.data.files.records import find_files
from t5x_lite.data.interfaces import REFERENCES
from t5x_lite.data.interfaces import MetricFn
from t5x_lite.data.text.templates import Template
from t5x_lite.data.text.templates import parse_template
from t5x_lite.data.text_metrics import exact_match
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.errors import DataError, did_you_mean
from t5x_lite.storage import files

# All records of files up to this size are read when they are opened, to find bad ones before the first step.
_CHECKED_BYTES = 100_000_000
# Number of skipped records that are named in the log.
_MAX_NAMED = 20
# Number of scanned files that are kept for the next opening.
_NUM_SCANS = 4
# Number of records that are read together.
_NUM_READ = 1024
# Remedy of an error about a bad record.
_SKIP_HINT = 'To leave out such records, set --bad_records=skip.'
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask(TaskDescription):
  """Task from files of records: CSV, TSV, JSON lines, text, Parquet, Arrow or array records.

  A template is the name of a column, or a text with names of columns in braces, such as 'summarize: {title}. {body}'.

  Attributes:
    vocabulary: vocabulary of inputs and targets, or task feature name to vocabulary.
    targets: template of the targets; required. If it is the name of a column with lists of texts, the first of them is
      the target in training, and metrics compare with all of them.
    inputs: template of the inputs; None for a language model, which has only targets.
    train_file: file of the split 'train': a path, or a pattern such as `data/train-*.csv`, or several separated by
      commas; local or in an object store. None for no such split.
    validation_file: the same for the split 'validation'.
    validation_fraction: part of the records of `train_file`, between 0 and 1, that is the split 'validation' instead; a
      hash of inputs and targets chooses them, so equal records are in the same split. None for no such part.
    file_format: one of `opening.FORMATS`; 'auto' for what the names of the files say.
    columns: names of the columns of tables without a header; None for tables with one.
    separator: text between two fields of a line; None for that of the format.
    bad_records: 'stop' raises an error for a record without a text for a template: before the first step for files up
      to 100 MB, otherwise when it is read. 'skip' reads all records first, and leaves bad ones out.
    needs_targets: whether a record without a value for the targets is bad; otherwise it has no target, and can be
      predicted.
    metrics: functions of (targets, predictions) or (targets, scores) for evaluation by decoding; `data.metrics` has
      them by name.
    keep_fields: names of further columns that results of `infer` keep; None for all.
    cache_dir: folder of this machine for decompressed files and converted tables.
    literal_sentinels: see `file_task`.
    name: name of the task in the log and in the names of metrics; None for that of the first file.
  """

  vocabulary: Vocabulary | Mapping[str, Vocabulary]
  targets: str | None = None
  inputs: str | None = None
  train_file: str | None = None
  validation_file: str | None = None
  validation_fraction: float | None = None
  file_format: str = 'auto'
  columns: Sequence[str] | None = None
  separator: str | None = None
  bad_records: str = 'stop'
  needs_targets: bool = True
  metrics: Sequence[MetricFn] = (exact_match,)
  keep_fields: Sequence[str] | None = ()
  cache_dir: str | None = None
  literal_sentinels: bool = False
  name: str | None = None

  def __post_init__(self) -> None:
    checks.check(
      'FileTask',
      vars(self),
      targets=checks.Expectation(
        "the name of a column, or a text such as 'summarize: {title}'",
        lambda given: isinstance(given, str) and bool(given),
        'Set it with --targets=answer, or in gin with data.FileTask.targets.',
      ),
      file_format=checks.one_of(('auto', *opening.FORMATS)),
      bad_records=checks.one_of(('stop', 'skip')),
      validation_fraction=checks.number(above=0, below=1).or_none(),
      cache_dir=checks.Expectation(
        'a folder of this machine',
        lambda given: bool(given) and not files.is_remote(given),
        'Name one on a local disk.',
      ).or_none(),
      columns=checks.Expectation(
        "different names such as ['question', 'answer']",
        lambda names: not isinstance(names, str) and len(set(names)) == len(names) > 0,
      ).or_none(),
    )
    checks.check(
      'FileTask',
      vars(self),
      train_file=checks.Expectation(
        'a file if there is no validation_file', lambda given: bool(given or self.validation_file)
      ),
      validation_fraction=checks.Expectation(
        'None with a validation_file, or without a train_file',
        lambda given: given is None or bool(self.train_file and not self.validation_file),
      ),
    )
    if self.name is None:
      object.__setattr__(self, 'name', _name_of(self.train_file or self.validation_file or ''))
    _ = self.templates

  @functools.cached_property
  def templates(self) -> dict[str, Template]:
    """Task feature name to template."""
    given = {'inputs': self.inputs, 'targets': self.targets}
    return {
      feature: parse_template(text, 'FileTask', feature)
      for feature, text in given.items()
      if text is not None
    }

  @property
  def vocabularies(self) -> dict[str, Vocabulary]:
    """Task feature name to vocabulary."""
    if isinstance(self.vocabulary, Mapping):
      return {feature: self.vocabulary[feature] for feature in self.templates}
    return dict.fromkeys(self.templates, self.vocabulary)

  def builtin_task(self) -> BuiltinTask:
    """See base class."""
    splits = []
    if self.train_file:
      splits.append('train')
    if self.validation_file or self.validation_fraction:
      splits.append('validation')
    assert self.name is not None  # set in `__post_init__`
    return BuiltinTask(
      name=self.name,
      splits=tuple(splits),
      vocabularies=self.vocabularies,
      table_fn=self._table,
      metric_fns=self.metrics,
      postprocess_fn=_with_references,
      record_keys={feature: feature for feature in self.templates},
    )

  def _table(self, split: str, lengths: Mapping[str, int]) -> FileExamples:
    """Return the examples of a split.

    Raises:
      DataError: a file cannot be read, or a record is bad.
    """
    records, skipped = self._records(split)
    assert self.name is not None
    return FileExamples(
      self.name,
      records,
      {feature: feature for feature in self.templates},
      self.vocabularies,
      {feature: vocabulary.eos_id is not None for feature, vocabulary in self.vocabularies.items()},
      (self._render,),
      lengths,
      self.literal_sentinels,
      num_skipped=skipped,
      keep_fields=self.keep_fields,
    )

  def _render(
    self, record: Mapping[str, Any], context: RecordContext | None = None
  ) -> dict[str, Any]:
    """Preprocessor that adds the texts of the templates to a record."""
    del context
    return _rendered(record, self.templates, self.needs_targets)

  def _records(self, split: str) -> tuple[Records, int]:
    """Return the records of a split, and the number of those that are skipped.

    Raises:
      DataError: a file cannot be read, lacks a column, or has no records.
    """
    paths, file_format = opening.with_format(self._paths(split), self.file_format)
    columns = self.columns
    if columns is not None:
      columns = tuple(columns)
    keep_fields = self.keep_fields
    if keep_fields is not None:
      keep_fields = tuple(keep_fields)
    scan = _scanned(
      _Source(
        paths=tuple(paths),
        versions=opening.versions_of(paths),
        file_format=file_format,
        columns=columns,
        separator=self.separator,
        cache_dir=self.cache_dir,
        templates=tuple(self.templates.items()),
        needs_targets=self.needs_targets,
        keep_fields=keep_fields,
        validation_fraction=self.validation_fraction,
        bad_records=self.bad_records,
      )
    )
    records = scan.records
    skipped = 0
    if scan.numbers is not None:
      _log_skipped(scan.problems, scan.num_bad)
      numbers = scan.numbers
      if scan.is_validation is not None:
        numbers = numbers[scan.is_validation == (split == 'validation')]
      if not len(numbers):
        raise DataError(
          f'{", ".join(paths)}: the split {split!r} must have records, but validation_fraction='
          f'{self.validation_fraction} leaves none. Choose another fraction.'
        )
      if len(numbers) < len(records):
        remark = (
          f'bad_records={self.bad_records} validation_fraction={self.validation_fraction} {split}'
        )
        records = Subset(records, numbers, remark)
        skipped = scan.num_bad
    _log_once(self._describe(split, paths, records.columns, len(records), skipped))
    return records, skipped

  def _paths(self, split: str) -> list[str]:
    """Return the files of a split.

    Raises:
      DataError: no file matches, or a file belongs to both splits.
    """
    pattern = self.validation_file if split == 'validation' else self.train_file
    paths = find_listed_files(pattern or self.train_file or '', f'The split {split!r} of the files')
    if self.train_file and self.validation_file:
      other = []
      with contextlib.suppress(DataError):  # For an evaluation the training files may be gone.
        patterns = self.train_file if split == 'validation' else self.validation_file
        other = find_listed_files(patterns, 'other')
      same = {files.real_path(path) for path in other}.intersection(map(files.real_path, paths))
      if same:
        raise DataError(
          f'{min(same)} must be the file of one split, got it as train_file and validation_file: results on the '
          'examples of the training say nothing. Name another file, or set --validation_fraction=0.1 instead.'
        )
    return paths

  def _describe(
    self, split: str, paths: Sequence[str], columns: Sequence[str] | None, count: int, skipped: int
  ) -> str:
    """Return the line of the log about a split."""
    what = paths[0]
    if len(paths) > 1:
      what += f' and {len(paths) - 1} more'
    noun = 'record' if count == 1 else 'records'
    line = f'Data  {what}: {count:,} {noun}'
    if self.validation_fraction is not None:
      line += f' for the split {split!r}'
    if skipped:
      line += f', skipped {skipped:,} bad'
    if columns is not None:
      line += f', columns {", ".join(columns)}'
    texts = []
    for feature, template in self.templates.items():
      if feature == 'inputs' or self.needs_targets:
        texts.append(f'{feature} {template.text!r}')
    return f'{line}; {", ".join(texts)}'


def find_listed_files(patterns: str, what: str) -> list[str]:
  """Return the files of patterns that commas separate; see `find_files`."""
  names = [name.strip() for name in patterns.split(',')]
  if not files.is_remote(patterns) and os.path.exists(os.path.expanduser(patterns)):
    names = [patterns]  # The name of a file may have a comma.
  return find_files(names, what)


def _name_of(patterns: str) -> str:
  """Return the name of a task with these files.

  >>> _name_of('data/train-*.csv.gz,more/b.csv')
  'train'
  """
  name = pathlib.PurePath(patterns.split(',')[0]).name
  return re.sub(r'\W+', '_', name.partition('.')[0]).strip('_') or 'files'


class _Source(NamedTuple):
  """Everything that decides which records files have: files of one split, with the options of `FileTask`.

  Attributes:
    versions: result of `opening.versions_of`.
    templates: (task feature name, template) of each feature.
  """

  paths: tuple[str, ...]
  versions: tuple[tuple[int, ...], ...]
  file_format: str
  columns: tuple[str, ...] | None
  separator: str | None
  cache_dir: str | None
  templates: tuple[tuple[str, Template], ...]
  needs_targets: bool
  keep_fields: tuple[str, ...] | None
  validation_fraction: float | None
  bad_records: str


class _Scan(NamedTuple):
  """Records of files, and which of them are good.

  Attributes:
    records: all records.
    numbers: int64[n], numbers of the good ones; None if not all records were read.
    is_validation: bool[n], whether these are for validation; None without `validation_fraction`.
    problems: messages about the first bad records.
    num_bad: number of bad records.
  """

  records: Records
  numbers: np.ndarray | None = None
  is_validation: np.ndarray | None = None
  problems: tuple[str, ...] = ()
  num_bad: int = 0


# A start opens a split several times: for lengths, for training, and for each kind of evaluation.
@functools.lru_cache(maxsize=_NUM_SCANS)
def _scanned(source: _Source) -> _Scan:
  """Open files, and read their records if they are few, or if some of them may be left out.

  Raises:
    DataError: a file cannot be read, lacks a column, or has no records, or a bad record is not skipped.
  """
  skips = source.bad_records == 'skip'
  used = set()  # columns that all records need
  texts = set()
  for feature, template in source.templates:
    texts.update(template.columns)
    if source.needs_targets or feature == 'inputs':
      used.update(template.columns)
  needed = None
  if source.keep_fields is not None:
    needed = used.union(source.keep_fields)
  try:
    records = opening.open_records(
      source.paths,
      source.file_format,
      columns=source.columns,
      separator=source.separator,
      needed=needed,
      texts=texts,
      cache_dir=source.cache_dir,
      checks_lines=not skips,
    )
  except BadRecordError as error:
    raise DataError(f'{error} {_SKIP_HINT}') from error
  for name in sorted(used):
    if records.columns is not None and name not in records.columns:
      raise DataError(f'{source.paths[0]} {_missing(name, records.columns)}')
  if not len(records):
    raise DataError(
      f'{", ".join(source.paths)} must have records, got none. Write them, or name another file.'
    )
  has_all = not skips and source.validation_fraction is None
  if has_all and records.num_bytes > _CHECKED_BYTES:
    return _Scan(records)
  return _scan(records, source, skips)


def _missing(name: str, known: Sequence[str]) -> str:
  """Return the end of an error about a column of a template that files lack.

  Args:
    name: name of the column.
    known: names of the columns.
  """
  remedy = (
    'Correct the template, or, if the file has no header, name its columns with --columns; --separator is the text '
    'between two columns.'
  )
  if f'{{{name}}}' in known:
    remedy = f'A template cannot name the column {{{name}}}: rename it without braces.'
  elif any(each in name.split() for each in known):
    remedy = f'A template with other text has the columns in braces, e.g. {{{known[0]}}}. {remedy}'
  return f'has no column {name!r}.{did_you_mean(name, known)} {remedy}'


def _scan(records: Records, source: _Source, skips: bool) -> _Scan:
  """Read all records.

  Args:
    records: the records.
    source: files and options.
    skips: whether bad records are left out.

  Raises:
    DataError: a bad record is not skipped, or all are bad.
  """
  templates = dict(source.templates)
  numbers = array.array('q')  # a list would take five times the memory
  is_validation = array.array('b')
  problems: list[str] = []
  num_bad = 0
  for first in range(0, len(records), _NUM_READ):
    together = range(first, min(first + _NUM_READ, len(records)))
    for number, content in zip(together, records.read(together), strict=True):
      # Finding a line takes time, so only the bad records that are named have it.
      is_named = num_bad < _MAX_NAMED
      where = Where(records, number) if is_named else f'record {number}'
      try:
        record = records.parse(content, where)
        with located(where, 'the template'):
          rendered = _rendered(record, templates, source.needs_targets)
      except DataError as error:
        if not skips:
          raise DataError(f'{error} {_SKIP_HINT}') from error
        num_bad += 1
        if is_named:
          problems.append(str(error))
        continue
      if source.keep_fields != ():
        kept_fields(record, source.keep_fields, Where(records, number))
      numbers.append(number)
      if source.validation_fraction is not None:
        is_validation.append(_is_validation(rendered, source.validation_fraction))
  if not numbers:
    raise DataError(
      f'{", ".join(source.paths)} must have good records, but all records are bad. {problems[0]}'
    )
  chosen = None
  if source.validation_fraction is not None:
    chosen = np.asarray(is_validation, bool)
  return _Scan(records, np.asarray(numbers, np.int64), chosen, tuple(problems), num_bad)


def _rendered(
  record: Mapping[str, Any], templates: Mapping[str, Template], needs_targets: bool
) -> dict[str, Any]:
  """Return a record with the texts of templates by feature; see `FileTask`."""
  rendered = dict(record)
  for feature, template in templates.items():
    is_needed = needs_targets or feature == 'inputs'
    if not is_needed and any(record.get(name) is None for name in template.columns):
      rendered[feature] = []  # no ids
      continue
    references = None
    if feature == 'targets':
      references = template.references(record)
    if references is None:
      rendered[feature] = template.render(record)
    else:
      rendered[feature] = references[0]
      rendered[REFERENCES] = references
  return rendered


def _is_validation(rendered: Mapping[str, Any], fraction: float) -> bool:
  """Return whether a record with these texts belongs to the validation split."""
  texts = '\0'.join((rendered.get('inputs', ''), rendered['targets']))
  digest = hashlib.blake2b(texts.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'big') < fraction * 2**64


def _with_references(text: Any, *, example: Mapping[str, Any], is_target: bool) -> Any:
  """Postprocessor: a target that has several texts is the list of them."""
  if is_target:
    return example.get(REFERENCES, text)
  return text


@functools.cache
def _log_once(line: str) -> None:
  _logger.info('%s', line)


@functools.cache
def _log_skipped(problems: tuple[str, ...], num_bad: int) -> None:
  """Warn of skipped records, once in a process; only the first ones are named."""
  for problem in problems:
    _logger.warning('A record is skipped: %s', problem)
  if num_bad > len(problems):
    _logger.warning('%s more records are skipped.', f'{num_bad - len(problems):,}')
