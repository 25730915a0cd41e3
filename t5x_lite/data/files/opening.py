"""Files of records by the name of their format, or by the end of their names."""

from collections.abc import Collection, Sequence
import os
import pathlib

from t5x_lite import checks
from t5x_lite.data.files import conversion
from t5x_lite.data.files.delimited import Table
from t5x_lite.data.files.local_copies import local_paths
from t5x_lite.data.files.records import JsonLines
from t5x_lite.data.files.records import Records
from t5x_lite.data.files.records import reading
from t5x_lite.data.files.records import version_of
from t5x_lite.errors import DataError
from t5x_lite.storage import files

_SUFFIXES = {
  '.jsonl': 'jsonl',
  '.ndjson': 'jsonl',
  '.json': 'jsonl',
  '.csv': 'csv',
  '.tsv': 'tsv',
  '.tab': 'tsv',
  '.txt': 'text',
  '.parquet': 'parquet',
  '.arrow': 'arrow',
  '.array_record': 'array_record',
}
FORMATS = tuple(dict.fromkeys(_SUFFIXES.values()))
# Formats whose files may be compressed by gzip.
_TEXTS = ('jsonl', 'csv', 'tsv', 'text')
# Separators of fields by format; '' for lines of one field.
_SEPARATORS = {'csv': ',', 'tsv': '\t', 'text': ''}
# Column of the lines of a text without a separator.
TEXT_COLUMN = 'text'


def format_of(path: str) -> str | None:
  """Return the format that the name of a file says, without .gz; None if it says none.

  >>> format_of('gs://bucket/train.csv.gz')
  'csv'
  """
  name = pathlib.PurePath(path)
  if conversion.is_compressed(path):
    name = name.with_suffix('')
  return _SUFFIXES.get(name.suffix.lower())


def has_separator(file_format: str, path: str) -> bool:
  """Return whether the lines of a file have fields with a separator between them.

  Args:
    file_format: see `open_records`.
    path: name of the file, for 'auto'.
  """
  if file_format == 'auto':
    return format_of(path) in _SEPARATORS
  return file_format in _SEPARATORS


def is_table(path: str) -> bool:
  """Return whether the name of a file says that its lines are no texts, such as x.csv or x.jsonl.gz."""
  return conversion.is_compressed(path) or format_of(path) not in (None, 'text', 'jsonl')


def open_records(
  paths: Sequence[str],
  file_format: str = 'auto',
  *,
  columns: Sequence[str] | None = None,
  separator: str | None = None,
  needed: Collection[str] | None = None,
  texts: Collection[str] = (),
  cache_dir: str | None = None,
  checks_lines: bool = True,
) -> Records:
  """Return the records of files of one format.

  Args:
    paths: files in the order of their records, local or in an object store; or folders that the library datasets saved.
    file_format: one of `FORMATS`, or 'auto' for what the names of the files say.
    columns: names of the columns of tables without a header; None for tables with one.
    separator: text between two fields of a line; None for that of the format: a comma, a tab, or none for 'text'.
    needed: names of the columns to read from Parquet and Arrow files; None for all.
    texts: see `columnar.ArrowRecords`.
    cache_dir: folder of decompressed files and converted tables, see `conversion.converted`.
    checks_lines: see `JsonLines`.

  Raises:
    ConfigError: an option is invalid, or a package for the format is not installed.
    DataError: a file cannot be read, or is not of its format.
  """
  paths, file_format = with_format(paths, file_format)
  checks.check(
    'FileTask',
    {'file_format': file_format, 'columns': columns, 'separator': separator},
    file_format=checks.one_of(FORMATS),
    columns=checks.Expectation(
      'None for a format other than csv, tsv and text',
      lambda given: given is None or file_format in _SEPARATORS,
    ),
    separator=checks.Expectation(
      "None for a format other than csv, tsv and text; one ASCII character that is no quote, except for 'text'",
      lambda given: given is None or file_format == 'text' or _separates(given, file_format),
    ),
  )
  if file_format not in _TEXTS:
    for path in filter(conversion.is_compressed, paths):
      raise DataError(
        f'{path} must not be compressed by gzip, since the format {file_format} is read by place. Decompress it: '
        f'`gunzip {path}`.'
      )
  if file_format == 'array_record':
    from t5x_lite.data.files import grain_records

    return grain_records.ArrayRecords(paths)
  if file_format in ('parquet', 'arrow'):
    from t5x_lite.data.files import columnar

    return columnar.ArrowRecords(
      paths, needed, texts, cache_dir, is_parquet=file_format == 'parquet'
    )
  copies = conversion.decompressed(paths, f'.{file_format}', cache_dir)
  if separator is None:
    separator = _SEPARATORS.get(file_format, '')
  options = {'separator': separator, 'checks_lines': file_format == 'jsonl' and checks_lines}
  index_paths = conversion.index_paths(paths, copies, f'{file_format} {options}')
  if file_format == 'jsonl':
    return JsonLines(paths, copies, index_paths, checks_lines=checks_lines)
  if file_format == 'text' and columns is None:
    columns = [TEXT_COLUMN]
  return Table(
    paths,
    copies,
    index_paths,
    separator=separator,
    has_quotes=file_format != 'text',
    columns=columns,
  )


def versions_of(paths: Sequence[str]) -> tuple[tuple[int, ...], ...]:
  """Return what changes when one of the files is written or replaced.

  Args:
    paths: files, local or in an object store.

  Raises:
    DataError: a file cannot be read.
  """
  versions = []
  for path, copy in zip(paths, local_paths(paths), strict=True):
    with reading(path):
      versions.append(version_of(os.stat(copy)))
  return tuple(versions)


def _separates(separator: str, file_format: str) -> bool:
  """Return whether a text can be the separator of a table with quotes."""
  is_character = len(separator) == 1 and separator.isascii()
  return file_format in _SEPARATORS and is_character and separator not in '"\r\n'


def with_format(paths: Sequence[str], file_format: str) -> tuple[list[str], str]:
  """Return the files, with those of folders, and their format, for 'auto' the one that all their names say.

  Args:
    paths: see `open_records`.
    file_format: see `open_records`.

  Raises:
    DataError: the names say none or several, or there is a folder of another program than datasets.
  """
  if file_format not in ('auto', 'arrow'):
    for path in paths:
      if not files.is_remote(path) and os.path.isdir(path):
        raise DataError(
          f'{path} must be a file of the format {file_format}, got a folder. Name its files, e.g. '
          f'{os.path.join(path, "*")}.'
        )
    return list(paths), file_format
  found: dict[str, str] = {}
  for path in paths:
    if files.path(path).is_dir():
      found |= dict.fromkeys(_files_of_folder(path), 'arrow')
      continue
    kind = file_format
    if kind == 'auto':
      kind = format_of(path)
    if kind is None:
      raise DataError(
        f'{path}: the name of the file does not say its format. Set --file_format to one of {", ".join(FORMATS)}.'
      )
    found[path] = kind
  kinds = sorted(set(found.values()))
  if len(kinds) > 1:
    raise DataError(
      f'The files of a split must have one format, got {" and ".join(kinds)} in {", ".join(found)}. Name files of '
      'one format, or convert the others.'
    )
  return list(found), kinds[0]


def _files_of_folder(path: str) -> list[str]:
  from t5x_lite.data.files import columnar

  found = columnar.saved_files(path)
  if found is None:
    raise DataError(
      f'{path} must be a file, or a folder that the library datasets has saved, got another folder. Name its files, '
      f'e.g. {os.path.join(path, "*.jsonl")}.'
    )
  return found
