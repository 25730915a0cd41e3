"""Tables of Parquet and Arrow files, read with pyarrow; the only module that imports it.

An Arrow file is mapped into memory, and its rows are read by number. A Parquet file can only be decompressed in large
groups of rows, so it is converted to an Arrow file first.
"""

from collections.abc import Collection, Iterator, Sequence
import contextlib
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from t5x_lite.data.files import conversion
from t5x_lite.data.files.line_index import CHUNK
from t5x_lite.data.files.local_copies import local_paths
from t5x_lite.data.files.records import Records
from t5x_lite.data.files.records import reading
from t5x_lite.data.files.records import version_of
from t5x_lite.errors import DataError, did_you_mean, needs_packages
from t5x_lite.storage import files

with needs_packages(
  'A Parquet or Arrow file',
  'the package pyarrow',
  extra='parquet',
  otherwise='write JSON lines or CSV',
):
  import pyarrow as pa
  import pyarrow.parquet as pq

# File of a folder that the library datasets has saved, with the names of its Arrow files.
STATE_FILE = 'state.json'
_ROWS = 4096


class ArrowRecords(Records):
  """Rows of one or several Parquet or Arrow files, as mappings of the names of columns to values."""

  def __init__(
    self,
    paths: Sequence[str],
    needed: Collection[str] | None = None,
    texts: Collection[str] = (),
    cache_dir: str | None = None,
    *,
    is_parquet: bool,
  ):
    """Args:
      paths: files in the order of their rows.
      needed: names of the columns to read, which may also have lists and structures; None for all.
      texts: names of columns of templates, which are also read if a file has them.
      cache_dir: folder of converted Parquet files, see `conversion.converted`.
      is_parquet: whether these are Parquet files, or Arrow files of the form of files or of streams.

    Raises:
      DataError: a file cannot be read or is damaged, or a column is missing or has a type that cannot be read.
    """
    self._arguments = {
      'paths': list(paths),
      'needed': needed,
      'texts': texts,
      'cache_dir': cache_dir,
      'is_parquet': is_parquet,
    }
    digest = hashlib.sha256()
    self._names = list(paths)
    # (path, version, hash) of each Arrow file, which could be written in place; nothing else writes converted files.
    self._originals: dict[int, tuple[str, tuple[int, ...], bytes]] = {}
    self._batches: list[pa.RecordBatch] = []
    self._files: list[int] = []
    self._columns: list[str] = []
    for file, path in enumerate(paths):
      if is_parquet:
        local = _converted(path, needed, texts, cache_dir)
        # The name of a converted file is the hash of the original.
        digest.update(os.path.basename(local).encode())
      else:
        (local,) = local_paths([path])
        self._originals[file] = _described(local, path)
        digest.update(self._originals[file][-1])
      schema, batches = _open(local, path)
      columns = _checked_columns(schema, needed, texts, path)
      if file == 0:
        self._columns = columns
      elif sorted(columns) != sorted(self._columns):
        raise DataError(
          f'All files must have the same columns, got {self._columns} in {paths[0]} and {columns} in {path}. Correct '
          'one of them.'
        )
      # Files may have their columns in another order.
      self._batches += [batch.select(self._columns) for batch in batches]
      self._files += [file] * len(batches)
    self._firsts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
    self._fingerprint = digest.hexdigest()[:16]

  def __reduce__(self) -> tuple[Any, ...]:
    """Another process maps the files itself."""
    return functools.partial(ArrowRecords, **self._arguments), ()

  def __len__(self) -> int:
    return int(self._firsts[-1])

  @property
  def columns(self) -> list[str]:
    """See base class; those that are read."""
    return self._columns

  @property
  def num_bytes(self) -> int:
    """See base class."""
    return sum(batch.nbytes for batch in self._batches)

  @property
  def fingerprint(self) -> str:
    """See base class."""
    return self._fingerprint

  def read(self, numbers: Sequence[int]) -> list[Any]:
    """See base class; each record is the mapping itself."""
    for file in {self._files[self._batch_of(number)] for number in numbers}:
      self._check_content(file)
    return [self._read(number) for number in numbers]

  def _check_content(self, file: int) -> None:
    """Raise if an Arrow file has another content than when it was opened."""
    if file not in self._originals:
      return
    local, version, content_hash = self._originals[file]
    name = self._names[file]
    with reading(name):
      if version_of(os.stat(local)) == version:
        return
    self._originals[file] = _described(local, name)
    if self._originals[file][-1] != content_hash:
      raise DataError(
        f'{name} must not change during a run, got another content than when it was opened. Restore the content and '
        'continue the run, or start a new run.'
      )

  def _read(self, number: int) -> dict[str, Any]:
    batch = self._batch_of(number)
    row = number - int(self._firsts[batch])
    arrays = zip(self._columns, self._batches[batch].columns, strict=True)
    return {name: array[row].as_py() for name, array in arrays}

  def parse(self, content: Any, where: object) -> dict[str, Any]:
    """See base class."""
    return content

  def where(self, number: int) -> str:
    """See base class."""
    batch = self._batch_of(number)
    file = self._files[batch]
    first = int(self._firsts[self._files.index(file)])
    return f'{self._names[file]}, row {number - first + 1}'

  def _batch_of(self, number: int) -> int:
    return int(np.searchsorted(self._firsts, number, side='right')) - 1


def _open(local: str, path: str) -> tuple[pa.Schema, list[pa.RecordBatch]]:
  """Return the schema and the batches of an Arrow file, which is mapped into memory.

  Raises:
    DataError: the file is damaged, or no Arrow file.
  """
  with reading(path), _damage_of(path, 'Arrow'):
    mapped = pa.memory_map(local)
    try:
      reader = pa.ipc.open_file(mapped)
      batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except pa.ArrowInvalid:  # a stream, as the library datasets writes it
      mapped.seek(0)
      reader = pa.ipc.open_stream(mapped)
      batches = list(reader)
  return reader.schema, batches


def _checked_columns(
  schema: pa.Schema, needed: Collection[str] | None, texts: Collection[str], path: str
) -> list[str]:
  """Return the names of the columns to read, in the order of the file.

  Raises:
    DataError: a column is missing, occurs twice, or has a type that cannot be read.
  """
  for name in needed or ():
    if name not in schema.names:
      raise DataError(f'{path} has no column {name!r}.{did_you_mean(name, schema.names)}')
  columns = []
  problems = {}
  for field in schema:
    if needed is not None and field.name not in needed and field.name not in texts:
      continue
    if schema.names.count(field.name) > 1:
      raise DataError(
        f'{path}: the names of columns must differ, got {field.name!r} twice. Rename one of them.'
      )
    if field.name in texts and not _is_readable(field.type):
      raise DataError(
        f'{path}, column {field.name!r} must have texts, numbers, truth values or lists of texts, got the type '
        f'{field.type}. Write it as text, or its parts as columns of their own.'
      )
    columns.append(field.name)
    if not _is_json(field.type):
      problems[field.name] = field.type
  if problems:
    name = next(iter(problems))
    others = ','.join(column for column in columns if column not in problems) or 'NAMES'
    raise DataError(
      f'{path}, column {name!r} must have texts, numbers, truth values, or lists or structures of them, got the type '
      f'{problems[name]}. Write it as text, or read other columns alone (infer: --keep_fields={others}).'
    )
  return columns


def _is_readable(kind: pa.DataType) -> bool:
  """Return whether a template can have the values of a column."""
  types = pa.types
  if types.is_list(kind) or types.is_large_list(kind):
    return _is_text(kind.value_type)
  return _is_value(kind)


def _is_json(kind: pa.DataType) -> bool:
  """Return whether results can have the values of a column."""
  types = pa.types
  if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
    return _is_json(kind.value_type)
  if types.is_struct(kind):
    return all(_is_json(kind.field(number).type) for number in range(kind.num_fields))
  return _is_value(kind)


def _is_value(kind: pa.DataType) -> bool:
  types = pa.types
  if types.is_dictionary(kind):
    kind = kind.value_type
  return (
    _is_text(kind)
    or types.is_integer(kind)
    or types.is_floating(kind)
    or types.is_boolean(kind)
    or types.is_null(kind)
  )


def _is_text(kind: pa.DataType) -> bool:
  types = pa.types
  return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _converted(
  path: str, needed: Collection[str] | None, texts: Collection[str], cache_dir: str | None
) -> str:
  """Return the path of those columns of a Parquet file that are read, as an Arrow file."""
  (local,) = local_paths([path])
  with reading(path), _damage_of(path, 'Parquet'):
    columns = _checked_columns(pq.read_schema(local), needed, texts, path)

  def convert(local: str, target: pathlib.Path) -> None:
    with _damage_of(path, 'Parquet'):
      table = pq.ParquetFile(local, memory_map=True)
      groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
      conversion.check_space(target.parent, sum(group.total_byte_size for group in groups), path)
      schema = pa.schema([table.schema_arrow.field(name) for name in columns])
      # A stream, since groups of rows may have different dictionaries.
      with pa.OSFile(str(target), 'wb') as sink, pa.ipc.new_stream(sink, schema) as writer:
        # The reader keeps one group of rows in memory.
        for batch in table.iter_batches(_ROWS, columns=columns):
          writer.write_batch(batch.select(columns))

  return conversion.converted(
    path, '.arrow', convert, cache_dir=cache_dir, variant=json.dumps(columns)
  )


@contextlib.contextmanager
def _damage_of(path: str, kind: str) -> Iterator[None]:
  try:
    yield
  except (pa.ArrowException, OSError) as error:
    # pyarrow also raises OSError for damaged content, without a number of the system.
    if isinstance(error, OSError) and error.errno is not None:
      raise
    problem = str(error).rstrip('.')
    raise DataError(
      f'{path} must be a complete {kind} file, got a damaged or another one: {problem}. Write it again.'
    ) from error


def _described(local: str, path: str) -> tuple[str, tuple[int, ...], bytes]:
  """Return path, version and hash of a file."""
  digest = hashlib.sha256()
  with reading(path), open(local, 'rb') as stream:
    version = version_of(os.fstat(stream.fileno()))
    while chunk := stream.read(CHUNK):
      digest.update(chunk)
  return local, version, digest.digest()


def saved_files(folder: str) -> list[str] | None:
  """Return the Arrow files of a folder that the library datasets has saved, in order; None for other folders.

  Raises:
    DataError: the folder has several splits, or its state is damaged.
  """
  root = files.path(folder)
  if (root / 'dataset_dict.json').is_file():
    raise DataError(
      f'{folder} must be the folder of one split, got that of all: choose one of its folders, such as {folder}/train.'
    )
  if not (root / STATE_FILE).is_file():
    return None
  try:
    state = json.loads((root / STATE_FILE).read_bytes())
    found = [str(root / entry['filename']) for entry in state['_data_files']]
    problem = '' if found else 'no files'
    if state.get('_indices_data_files'):
      problem = 'a choice of rows in _indices_data_files'
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    problem = f'{type(error).__name__}: {error}'
  if problem:
    raise DataError(
      f'{root / STATE_FILE} must name the Arrow files of a folder that datasets has saved, got {problem}. Save the '
      'folder again with save_to_disk of a current version.'
    )
  return found
