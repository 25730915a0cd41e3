"""Array records, read with grain; the only module that imports grain.

An array record file holds compressed records of bytes with an index, so that records of large files are read by number.
Our records are mappings from names to values, as UTF-8 JSON or msgpack; `write_array_records` and
`t5x_lite jsonl_to_array_record` write JSON.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from t5x_lite.data.files.local_copies import local_paths
from t5x_lite.data.files.records import Records
from t5x_lite.data.files.records import parse_record
from t5x_lite.data.files.records import reading
from t5x_lite.errors import DataError, needs_packages
from t5x_lite.storage import files

with needs_packages(
  "DatasetConfig.source = 'grain' or a file of array records",
  'the package grain',
  extra='grain',
  otherwise='read JSON lines with --gin.DATA_SOURCE=builtin',
):
  # The module is compiled.
  from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
  import grain as grain

# Bytes at the beginning and at the end of a file, where the index is, for the fingerprint.
_HASHED_BYTES = 1 << 16


class ArrayRecords(Records):
  """Records of one or several array record files."""

  def __init__(self, paths: Sequence[str]):
    """Args:
      paths: files in the order of their records.

    Raises:
      DataError: a file cannot be read, or is not an array record file.
    """
    sources = []
    digest = hashlib.sha256()
    for path, copy in zip(paths, local_paths(paths), strict=True):
      _hash_ends(copy, digest)
      try:
        sources.append(grain.sources.ArrayRecordDataSource([copy]))
      except RuntimeError as error:
        raise DataError(
          f'{path!r} is not a complete array record file: {error}. Write it again, or set format = '
          "'jsonl' if its records are lines of text."
        ) from error
    self._paths = list(paths)
    self._sources = sources
    self._firsts = np.cumsum([0, *map(len, sources)])
    self._fingerprint = digest.hexdigest()[:16]

  def __len__(self) -> int:
    return int(self._firsts[-1])

  def read(self, numbers: Sequence[int]) -> list[bytes]:
    """See base class."""
    wanted = np.asarray(numbers, np.int64)
    files = np.searchsorted(self._firsts, wanted, side='right') - 1
    results: list[bytes] = [b''] * len(wanted)
    for file in np.unique(files).tolist():
      indices = np.flatnonzero(files == file).tolist()
      in_file = wanted[indices] - self._firsts[file]
      found = self._read_file(file, in_file.tolist())
      for index, content in zip(indices, found, strict=True):
        results[index] = content
    return results

  def _read_file(self, file: int, numbers: Sequence[int]) -> Sequence[bytes]:
    try:
      return self._sources[file].__getitems__(numbers)
    except RuntimeError:
      for number in numbers:  # find the damaged record
        try:
          self._sources[file][number]
        except RuntimeError as error:
          raise DataError(
            f'{self._paths[file]}, record {number}: cannot be read: {error}. Write the file again.'
          ) from error
      raise

  def parse(self, content: Any, where: object) -> dict[str, Any]:
    """See base class."""
    return parse_record(content, where)

  def where(self, number: int) -> str:
    """See base class."""
    file = int(np.searchsorted(self._firsts, number, side='right')) - 1
    return f'{self._paths[file]}, record {number - self._firsts[file]}'

  @property
  def fingerprint(self) -> str:
    """See base class."""
    return self._fingerprint


def _hash_ends(path: str, digest: Any) -> None:
  with reading(path), open(path, 'rb') as stream:
    size = stream.seek(0, os.SEEK_END)
    for offset in (0, max(0, size - _HASHED_BYTES)):
      stream.seek(offset)
      digest.update(stream.read(_HASHED_BYTES))
  digest.update(f' {size} '.encode())


def write_array_records(path: str, records: Iterable[Mapping[str, Any] | bytes]) -> int:
  """Write an array record file atomically.

  Args:
    path: path of the new file.
    records: mappings of texts and lists of ids, which are written as JSON, or bytes, which are written unchanged.

  Returns:
    The number of records.

  Raises:
    DataError: the file exists, or the writer failed.
    OSError: the file cannot be written.
  """
  if files.path(path).exists():
    raise DataError(
      f'{path!r} must be a new file, got an existing one. Delete it, or choose another name.'
    )
  count = 0

  def save(unfinished: pathlib.Path) -> None:
    nonlocal count
    # With groups of one record, each record can be read separately.
    writer = array_record_module.ArrayRecordWriter(str(unfinished), 'group_size:1')
    for record in records:
      if isinstance(record, bytes):
        content = record
      else:
        content = json.dumps(record, ensure_ascii=False).encode('utf-8')
      _checked(path, writer.write, content)
      count += 1
    _checked(path, writer.close)

  files.path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
  files.write(path, save, durable=False)
  return count


def _checked(path: str, write_fn: Callable[..., Any], *args: Any) -> None:
  try:
    write_fn(*args)
  except RuntimeError as error:
    raise DataError(f'Cannot write {path!r}: {error}.') from error
