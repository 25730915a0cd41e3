"""Files of records, read by number: JSON lines, and the formats of a record.

JSON lines are text files with one JSON object per line. Opening a file scans it once (about a second per gigabyte): it
finds the starts of the lines, hashes the content, and checks the first and last byte of each line, so that truncated
lines and other kinds of files are errors before any computation. The starts are in memory, 8 bytes a record. Array
records have an index and need no scan; see `grain_records`.
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
import pathlib
import stat
import sys
from typing import Any

import numpy as np

from t5x_lite.data.files import line_index
from t5x_lite.data.files.line_index import CHUNK
from t5x_lite.data.files.local_copies import local_paths
from t5x_lite.data.text import formats as text_formats
from t5x_lite.errors import DataError, needs_packages
from t5x_lite.storage import files

_OPENING, _CLOSING = b'{}'
# The largest share of NUL bytes in a text with errors; one in another encoding has more.
_NUL_SHARE = 0.25


class Records(abc.ABC):
  """Records by number, over all files of a split; may be shared by threads and pickled."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Return the number of records."""

  @abc.abstractmethod
  def read(self, numbers: Sequence[int]) -> list[Any]:
    """Return the records with the given numbers as they are stored, e.g. their bytes.

    Raises:
      DataError: a file cannot be read or is damaged.
    """

  @abc.abstractmethod
  def parse(self, content: Any, where: object) -> dict[str, Any]:
    """Return the names and values of a record.

    Args:
      content: one result of `read`.
      where: location of the record, for messages.

    Raises:
      DataError: the record is invalid.
    """

  @property
  def columns(self) -> list[str] | None:
    """Names of the values of each record; None if records may have different ones."""
    return None

  @property
  def num_bytes(self) -> int:
    """Bytes of all records; `sys.maxsize` if unknown."""
    return sys.maxsize

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


class BadRecordError(DataError):
  """A record is invalid; the others may be read."""


class LineRecords(Records):
  """Records of one or several text files, each at a known place of its file; empty lines are no records.

  Opening a file scans it once. A subclass says where records begin, and makes a mapping of each.
  """

  def __init__(
    self,
    paths: Sequence[str],
    copies: Sequence[str] | None = None,
    index_paths: Sequence[pathlib.Path | None] | None = None,
  ):
    """Args:
      paths: files in the order of their records, for messages.
      copies: files that are read, e.g. decompressed ones; by default `paths`, and local copies of remote ones.
      index_paths: where the index of each file is kept for later openings; None for nowhere. The content of a file with
        such a path must be determined by its name.

    Raises:
      DataError: a file cannot be read, or is not of this format.
    """
    if copies is None:
      copies = local_paths(paths)
    if index_paths is None:
      index_paths = [None] * len(paths)
    self._names = list(paths)
    self._paths = list(copies)
    self._index_paths = list(index_paths)
    self._versions = self._current_versions()
    digest = hashlib.sha256()
    # int64[records + 1] of each file, see `line_index.LineIndex`.
    self._starts: list[np.ndarray] = []
    for file in range(len(paths)):
      content = self._open(file)
      starts = self._indexed(content, file, digest)
      self._starts.append(self.without_header(content, starts, file))
    self._firsts = np.cumsum([0, *(len(starts) - 1 for starts in self._starts)])
    self._fingerprint = digest.hexdigest()[:16]

  @abc.abstractmethod
  def index(self, content: np.ndarray, file: int) -> Iterator[np.ndarray]:
    """Yield the starts of the records of a file in order, also those of a header, int64[n] each.

    Args:
      content: uint8[bytes], the file.
      file: number of the file.
    """

  def without_header(self, content: np.ndarray, starts: np.ndarray, file: int) -> np.ndarray:
    """Return `starts`, int64[records + 1], without that of a header, which a subclass reads here.

    Args:
      content: see `index`.
      starts: see `line_index.LineIndex`.
      file: see `index`.
    """
    del content, file
    return starts

  def _indexed(self, content: np.ndarray, file: int, digest: Any) -> np.ndarray:
    """Return the starts of a file, int64[records + 1], and update the hash of all files."""
    path = self._index_paths[file]
    if path is None:
      _hash(content, digest)
      return line_index.joined(self.index(content, file), len(content))
    found = line_index.load(path, len(content))
    if found is None:
      starts = line_index.joined(self.index(content, file), len(content))
      found = line_index.LineIndex(starts, _hash_of(content))
      line_index.keep(path, found)
    digest.update(found.content_hash)
    return found.starts

  def name(self, file: int) -> str:
    """Return the name of a file for messages."""
    return self._names[file]

  def _open(self, file: int) -> np.ndarray:
    """Return the bytes of a file, uint8[bytes]."""
    name, path = self._names[file], self._paths[file]
    with reading(name):
      status = os.stat(path)
      if not stat.S_ISREG(status.st_mode):
        raise DataError(
          f'{name} must be a file on a disk, since records are read by their place, got a pipe or another device. '
          'Write its content to a file first.'
        )
      with open(path, 'rb') as stream:
        problem = self.problem(name, stream.read(text_formats.HEAD_SIZE))
      if problem is not None:
        raise DataError(f'{name} must be {self.form}, but it {problem}')
      if not status.st_size:
        return np.zeros(0, np.uint8)
      return np.asarray(np.memmap(path, np.uint8, mode='r'))

  def problem(self, name: str, head: bytes) -> str | None:
    """Return why a file is not of this format, with the remedy; None if it may be.

    Args:
      name: name of the file.
      head: its first bytes.
    """
    if head.count(b'\0') < _NUL_SHARE * len(head):
      head = head.replace(b'\0', b'')  # The error of the record with such a byte has the line.
    return text_formats.content_problem(name, head)

  @property
  def form(self) -> str:
    """Form of the files, a noun phrase for messages."""
    return 'text in UTF-8'

  def __len__(self) -> int:
    return int(self._firsts[-1])

  def read(self, numbers: Sequence[int]) -> list[Any]:
    """See base class; each file is opened once."""
    found: list[bytes] = [b''] * len(numbers)
    wanted = np.asarray(numbers, np.int64)
    of_file = np.searchsorted(self._firsts, wanted, side='right') - 1
    for file in np.unique(of_file).tolist():
      starts = self._starts[file]
      first = int(self._firsts[file])
      with reading(self._names[file]), open(self._paths[file], 'rb') as stream:
        if version_of(os.fstat(stream.fileno())) != self._versions[file]:
          self._check_content()
        for place in np.flatnonzero(of_file == file).tolist():
          number = int(wanted[place]) - first
          start = int(starts[number])
          stream.seek(start)
          found[place] = self.trimmed(stream.read(int(starts[number + 1]) - start))
    return found

  def trimmed(self, content: bytes) -> bytes:
    """Return a record without the lines after it that are no records."""
    return line_index.without_line_ends(content)

  def _check_content(self) -> None:
    """Raise if the files have another content than when they were opened; written again with the same one, they may."""
    versions = self._current_versions()
    digest = hashlib.sha256()
    for file, index_path in enumerate(self._index_paths):
      content = self._open(file)
      if index_path is None:
        _hash(content, digest)
      else:
        digest.update(_hash_of(content))
    if digest.hexdigest()[:16] != self._fingerprint:
      raise DataError(
        f'{", ".join(self._names)} must not change during a run, got another content than when they were opened. '
        'Restore the content and continue the run, or start a new run.'
      )
    self._versions = versions

  def _current_versions(self) -> list[tuple[int, ...]]:
    versions = []
    for path, name in zip(self._paths, self._names, strict=True):
      with reading(name):
        versions.append(version_of(os.stat(path)))
    return versions

  def where(self, number: int) -> str:
    """See base class."""
    file = self.file_of(number)
    start = int(self._starts[file][number - int(self._firsts[file])])
    return f'{self._names[file]}, line {self.line_at(file, start)}'

  def line_at(self, file: int, offset: int) -> int:
    """Return the number of the line, from 1, at an offset of a file; counted on demand, with empty lines."""
    with open(self._paths[file], 'rb') as stream:
      return 1 + sum(
        stream.read(min(CHUNK, offset - first)).count(b'\n') for first in range(0, offset, CHUNK)
      )

  @property
  def fingerprint(self) -> str:
    """See base class."""
    return self._fingerprint

  @property
  def num_bytes(self) -> int:
    """See base class; with line ends."""
    return sum(int(starts[-1] - starts[0]) for starts in self._starts)

  @property
  def longest(self) -> int | None:
    """See base class."""
    if not len(self):
      return None
    found = [line_index.longest(starts) for starts in self._starts]
    file = max(range(len(found)), key=lambda file: found[file][1])
    return int(self._firsts[file]) + found[file][0]

  def file_of(self, number: int) -> int:
    """Return the number of the file of a record."""
    return int(np.searchsorted(self._firsts, number, side='right')) - 1


class JsonLines(LineRecords):
  """Lines of one or several files, without empty lines."""

  def __init__(
    self,
    paths: Sequence[str],
    copies: Sequence[str] | None = None,
    index_paths: Sequence[pathlib.Path | None] | None = None,
    *,
    checks_lines: bool = True,
  ):
    """Args:
      paths: see base class.
      copies: see base class.
      index_paths: see base class.
      checks_lines: whether a line that is no object, such as the first part of one, is an error now; otherwise it is
        one when it is parsed.

    Raises:
      DataError: see base class.
      BadRecordError: a line is not a JSON object.
    """
    self._checks_lines = checks_lines
    super().__init__(paths, copies, index_paths)

  @property
  def form(self) -> str:
    """See base class."""
    return 'JSON lines in UTF-8'

  def problem(self, name: str, head: bytes) -> str | None:
    """See base class."""
    return super().problem(name, head) or text_formats.document_problem(name, head)

  def index(self, content: np.ndarray, file: int) -> Iterator[np.ndarray]:
    """See base class; also checks the first and last byte of each line.

    Raises:
      BadRecordError: a line is not a JSON object.
    """
    num_before = 0  # lines of former chunks
    for starts, ends in line_index.line_spans(content):
      # A line between braces is parsed when it is read; any other line is parsed now.
      is_kept = (
        (ends - starts > 1) & (content[starts] == _OPENING) & (content[ends - 1] == _CLOSING)
      )
      for line in np.flatnonzero(~is_kept).tolist():
        text = content[starts[line] : ends[line]].tobytes()
        if text.strip():
          if self._checks_lines:
            parse_json(text, f'{self.name(file)}, line {num_before + line + 1}')
          is_kept[line] = True
      num_before += len(starts)
      yield starts[is_kept]

  def trimmed(self, content: bytes) -> bytes:
    """See base class; lines of spaces are no records."""
    return content.rstrip()

  def parse(self, content: Any, where: object) -> dict[str, Any]:
    """See base class."""
    return parse_json(content, where)


def _hash(content: np.ndarray, digest: Any) -> None:
  """Update a hash with the bytes of a file, uint8[bytes], and their number."""
  for offset in range(0, len(content), CHUNK):
    digest.update(content[offset : offset + CHUNK])
  digest.update(f' {len(content)} '.encode())


def _hash_of(content: np.ndarray) -> bytes:
  """Return the hash of a file, uint8[bytes]."""
  digest = hashlib.sha256()
  _hash(content, digest)
  return digest.digest()


def version_of(status: os.stat_result) -> tuple[int, ...]:
  """Return what changes when a file is written or replaced."""
  return status.st_ino, status.st_size, status.st_mtime_ns


class Subset(Records):
  """Some of other records."""

  def __init__(self, records: Records, numbers: np.ndarray, remark: str):
    """Args:
    records: the others.
    numbers: int64[n], ascending numbers of these records.
    remark: how they were chosen, a part of the hash.
    """
    self._records = records
    self._numbers = numbers
    self._remark = remark

  def __len__(self) -> int:
    return len(self._numbers)

  def read(self, numbers: Sequence[int]) -> list[Any]:
    """See base class."""
    return self._records.read([int(self._numbers[number]) for number in numbers])

  def parse(self, content: Any, where: object) -> dict[str, Any]:
    """See base class."""
    return self._records.parse(content, where)

  @property
  def columns(self) -> list[str] | None:
    """See base class."""
    return self._records.columns

  def where(self, number: int) -> str:
    """See base class."""
    return self._records.where(int(self._numbers[number]))

  @property
  def fingerprint(self) -> str:
    """See base class."""
    return f'{self._records.fingerprint} {len(self)} {self._remark}'

  @property
  def num_bytes(self) -> int:
    """See base class."""
    return self._records.num_bytes


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
    BadRecordError: the text is not a JSON object; the message has its location `where`.
  """
  try:
    record = json.loads(text)
    problem = 'not an object'
  except (ValueError, RecursionError) as error:
    record = None
    problem = f'not JSON ({error})'
  if not isinstance(record, dict):
    raise BadRecordError(
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
    DataError: a pattern matches no file or a link without a target, or two of the names are those of one file.
  """
  found: dict[str, str] = {}  # path without links to path
  if isinstance(patterns, str):
    patterns = [patterns]
  for pattern in patterns:
    paths = _matches(pattern)
    if not paths:
      at = f' in {os.getcwd()!r}'
      if os.path.isabs(pattern) or files.is_remote(pattern):
        at = ''
      raise DataError(
        f'{what}: no file matches {pattern!r}{at}. Write the files first, or correct the pattern.'
      )
    for path in paths:
      broken = files.broken_link(path)
      if broken is not None:
        raise DataError(f'{what}: {broken}. Replace the link.')
      real = files.real_path(path)
      if real in found:
        problem = f'two patterns match {path!r}'
        if found[real] != path:
          problem = f'{found[real]!r} and {path!r} are one file'
        raise DataError(f'{what}: {problem}, so its records would be read twice. Omit one of them.')
      found[real] = path
  return list(found.values())


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
