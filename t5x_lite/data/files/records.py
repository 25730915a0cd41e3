"""Files of records, read by number: JSON lines, and the formats of a record.

JSON lines are text files with one JSON object per line. Opening a file scans it once (about a second per gigabyte): it
finds the starts of the lines, hashes the content, and checks the first and last byte of each line, so that truncated
lines and other kinds of files are errors before any computation. Array records have an index and need no scan; see
`grain_records`.
"""

import abc
import codecs
from collections.abc import Iterator, Sequence
import contextlib
import glob
import hashlib
import itertools
import json
import os
from typing import Any

import numpy as np

from t5x_lite.data.files.local_copies import local_paths
from t5x_lite.data.text import formats as text_formats
from t5x_lite.errors import DataError, needs_packages
from t5x_lite.storage import files

_NEWLINE, _RETURN, _OPENING, _CLOSING = b'\n\r{}'
# Bytes of a file that are scanned together.
_CHUNK = 1 << 24


class Records(abc.ABC):
  """Records by number, over all files of a split; may be shared by threads and pickled."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Return the number of records."""

  @abc.abstractmethod
  def read(self, numbers: Sequence[int]) -> list[bytes]:
    """Return the records with the given numbers.

    Raises:
      DataError: a file cannot be read or is damaged.
    """

  @property
  def longest(self) -> int | None:
    """Number of the record with the most bytes; None if unknown or without records."""
    return None

  @abc.abstractmethod
  def where(self, number: int) -> str:
    """Return the file of a record and its location in the file, for messages."""

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Hash of the content."""


class JsonLines(Records):
  """Lines of one or several files, without empty lines."""

  def __init__(self, paths: Sequence[str]):
    """Args:
      paths: files in the order of their records.

    Raises:
      DataError: a file cannot be read, or a line is not a JSON object.
    """
    digest = hashlib.sha256()
    copies = local_paths(paths)
    indices = [_index_lines(copy, path, digest) for copy, path in zip(copies, paths, strict=True)]
    self._names = list(paths)
    self._paths = copies
    self._firsts = np.cumsum([0, *(len(starts) for starts, _ in indices)])
    self._starts, self._lengths = (
      np.concatenate([np.zeros(0, np.int64), *column]) for column in zip(*indices, strict=True)
    )
    self._fingerprint = digest.hexdigest()[:16]

  def __len__(self) -> int:
    return len(self._starts)

  def read(self, numbers: Sequence[int]) -> list[bytes]:
    """See base class."""
    return [self._read(number) for number in numbers]

  def _read(self, number: int) -> bytes:
    file, start, length = self._locate(number)
    path = self._names[file]
    with reading(path), open(self._paths[file], 'rb') as stream:
      stream.seek(start)
      line = stream.read(length)
    if len(line) < length:
      raise DataError(
        f'{path} has become shorter since it was opened: do not change the files during a run.'
      )
    return line

  def where(self, number: int) -> str:
    """See base class."""
    file, start, _ = self._locate(number)
    # Count on demand, with empty lines.
    with open(self._paths[file], 'rb') as stream:
      line = 1 + sum(
        stream.read(min(_CHUNK, start - offset)).count(b'\n') for offset in range(0, start, _CHUNK)
      )
    return f'{self._names[file]}, line {line}'

  @property
  def fingerprint(self) -> str:
    """See base class."""
    return self._fingerprint

  @property
  def longest(self) -> int | None:
    """See base class."""
    if not len(self):
      return None
    return int(np.argmax(self._lengths))

  def _locate(self, number: int) -> tuple[int, int, int]:
    file = int(np.searchsorted(self._firsts, number, side='right')) - 1
    return file, int(self._starts[number]), int(self._lengths[number])


class Where:
  """Location of a record, determined when it is printed, since counting lines takes time."""

  def __init__(self, records: Records, number: int):
    """Args:
    records: all records.
    number: number of the record.
    """
    self._records = records
    self._number = number

  def __str__(self) -> str:
    return self._records.where(self._number)


def checked_objects(lines: Records) -> Iterator[bytes]:
  """Yield the JSON objects of `lines`, as bytes, in order.

  Raises:
    DataError: a line is not a JSON object; the message has its location.
  """
  for number in range(len(lines)):
    (content,) = lines.read([number])
    parse_json(content, Where(lines, number))
    # Remove a byte order mark or spaces before the object.
    yield content[content.index(b'{') :]


def _index_lines(path: str, name: str, digest: Any) -> tuple[np.ndarray, np.ndarray]:
  """Return the starts and lengths, without line ends, of the lines of a file, int64[lines] each; hashes the file.

  Args:
    path: path of the file on this machine.
    name: path of the original, for messages.
    digest: hash, which is updated.
  """
  with reading(name):
    size = os.path.getsize(path)
    with open(path, 'rb') as stream:
      problem = text_formats.content_problem(name, stream.read(text_formats.HEAD_SIZE))
    if problem is not None:
      raise DataError(f'{name} must be JSON lines in UTF-8, but it {problem}')
    if size:
      content = np.memmap(path, np.uint8, mode='r')
    else:
      content = np.zeros(0, np.uint8)
  ends = []
  for offset in range(0, size, _CHUNK):
    chunk = content[offset : offset + _CHUNK]
    digest.update(chunk)
    ends.append(np.flatnonzero(chunk == _NEWLINE) + offset)
  digest.update(f' {size} '.encode())
  ends = np.concatenate([np.zeros(0, np.int64), *ends])
  if size and content[-1] != _NEWLINE:
    ends = np.append(ends, size)
  if len(ends):
    starts = np.concatenate([[0], ends[:-1] + 1])
  else:
    starts = ends
  if size:
    ends = np.where((ends > starts) & (content[ends - 1] == _RETURN), ends - 1, ends)
  else:
    ends = ends
  lengths = ends - starts
  # A line between braces is parsed when it is read; any other line is parsed now.
  is_plain = (
    (lengths > 1)
    & (content[np.minimum(starts, size - 1)] == _OPENING)
    & (content[ends - 1] == _CLOSING)
  )
  is_kept = is_plain.copy()
  for line in np.flatnonzero(~is_plain):
    text = content[starts[line] : ends[line]].tobytes()
    if text.strip():
      parse_json(text, f'{name}, line {line + 1}')
      is_kept[line] = True
  return starts[is_kept], lengths[is_kept]


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
  """Raise DataError instead of OSError for a file that cannot be read."""
  try:
    yield
  except OSError as error:
    raise DataError(f'Cannot read {os.fspath(path)!r}: {error.strerror or error}.') from error


def parse_json(text: bytes, where: object) -> dict[str, Any]:
  """Return the JSON object `text`.

  Raises:
    DataError: the text is not a JSON object; the message has its location `where`.
  """
  try:
    record = json.loads(text)
    problem = 'not an object'
  except (ValueError, RecursionError) as error:
    record = None
    problem = f'not JSON ({error})'
  if not isinstance(record, dict):
    raise DataError(
      f'{where} must be one JSON object, such as {{"inputs": "a text", "targets": "another"}}, '
      f'got {_shown(text)}, which is {problem}.'
    )
  return record


def read_tsv(path: str | os.PathLike[str], num_fields: int = 2) -> list[tuple[str, ...]]:
  """Return the fields of each line of a file of tab-separated values, e.g. for the `texts_fn` of `data.text_task`.

  Quotation marks are ordinary characters; empty lines are ignored.

  Args:
    path: a UTF-8 file.
    num_fields: number of fields in each line.

  Returns:
    One tuple of `num_fields` texts for each line, in the file's order.

  Raises:
    DataError: the file cannot be read, or a line is not UTF-8 or has another number of fields; the message has file and
      line.
  """
  rows = []
  with reading(path), files.path(path).open('rb') as stream:
    lines = stream.read().removeprefix(codecs.BOM_UTF8).split(b'\n')
  for number, line in enumerate(lines, start=1):
    try:
      text = line.decode('utf-8').removesuffix('\r')
      fields = tuple(text.split('\t'))
      if not text or len(fields) == num_fields:
        problem = None
      else:
        problem = (
          f'must have {num_fields} fields separated by tabs, got {len(fields)}: {_shown(line)}'
        )
    except UnicodeDecodeError as error:
      problem = f'must be UTF-8, got {error.reason} at byte {error.start + 1} of the line'
    if problem is not None:
      raise DataError(f'{os.fspath(path)}, line {number} {problem}. Correct the file.')
    if text:
      rows.append(fields)
  return rows


def parse_record(content: bytes, where: object) -> dict[str, Any]:
  """Return the record in `content`, a JSON object or a msgpack map.

  JSON objects begin with `{`, and no msgpack map does.

  >>> import msgpack
  >>> parse_record(b'{"inputs": "a"}', 'here') == parse_record(msgpack.packb({'inputs': 'a'}), 'here')
  True

  Raises:
    DataError: the content is neither; the message has its location `where`.
    ConfigError: the package msgpack is not installed.
  """
  if content[:1] == b'{':
    return parse_json(content, where)
  with needs_packages(
    f'{where}: a record that is not JSON',
    'the package msgpack',
    command='pip install msgpack',
    otherwise='write JSON',
  ):
    import msgpack
  try:
    record = msgpack.unpackb(content)
    problem = f'a {type(record).__name__}'
  except (ValueError, msgpack.UnpackException) as error:
    record = None
    problem = f'invalid msgpack ({error or type(error).__name__})'
  if not isinstance(record, dict):
    raise DataError(
      f'{where} must be a JSON object or a msgpack map, got {problem}: {_shown(content)}.'
    )
  return record


def _shown(content: bytes) -> str:
  text = content.decode('utf-8', errors='replace')
  if len(text) > 60:
    text = f'{text[:57]}...'
  return repr(text)


def find_files(patterns: str | Sequence[str], what: str) -> list[str]:
  """Return the files that patterns such as `data/train-*.jsonl` match, sorted within each pattern.

  `[` is a character of a name if such a file or folder exists (`run[1]/train-*.jsonl`), otherwise it begins a set of
  characters (`train-[0-4].jsonl`).

  Args:
    patterns: one or several patterns, relative to the current folder or in an object store; `~` is the home folder.
    what: owner of the files, for messages.

  Raises:
    DataError: a pattern matches no file, or two patterns match the same file.
  """
  found: list[str] = []
  if isinstance(patterns, str):
    patterns = [patterns]
  for pattern in patterns:
    paths = _matches(pattern)
    twice = set(paths).intersection(found)
    if twice:
      raise DataError(
        f'{what}: two patterns match {min(twice)!r}, so its records would be read twice. Omit one of them.'
      )
    if not paths:
      at = f' in {os.getcwd()!r}'
      if os.path.isabs(pattern) or files.is_remote(pattern):
        at = ''
      raise DataError(
        f'{what}: no file matches {pattern!r}{at}. Write the files first, or correct the pattern.'
      )
    found.extend(paths)
  return found


def _matches(pattern: str) -> list[str]:
  """Return the sorted paths that a pattern matches in the first of its readings that matches any."""
  if not files.is_remote(pattern):
    readings = _readings(os.path.expanduser(pattern))
    return next(filter(None, (sorted(glob.glob(each, recursive=True)) for each in readings)), [])
  *bucket, name = pattern.split('/', 3)
  root = files.path('/'.join(bucket))
  with reading(pattern):
    return next(filter(None, (sorted(map(str, root.glob(each))) for each in _readings(name))), [])


def _readings(pattern: str) -> Iterator[str]:
  """Yield a pattern with `[` as a character of names, then with sets of characters in more and more components.

  >>> list(_readings('a[1]/b-[0-4]'))
  ['a[[]1]/b-[[]0-4]', 'a[[]1]/b-[0-4]', 'a[1]/b-[[]0-4]', 'a[1]/b-[0-4]']
  """
  components = [dict.fromkeys([each.replace('[', '[[]'), each]) for each in pattern.split('/')]
  return map('/'.join, itertools.product(*components))
