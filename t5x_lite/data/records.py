"""Files of records, read by number: JSON lines, and what a record's bytes may say.

JSON lines are text files with one JSON object a line. A file is gone through once when it is opened, which finds where
its lines start, hashes the content, and looks at the first and last byte of each line: a line that was cut off, an
empty file or a file of another kind is refused before anything is computed. For data whose scan takes long (a second
or so per gigabyte), array records have an index of their own; see `grain_records`.
"""

import abc
import codecs
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from t5x_lite.errors import ConfigError, DataError

_NEWLINE, _RETURN, _OPENING, _CLOSING = b'\n\r{}'
# Bytes of a file that are looked at together.
_CHUNK = 1 << 24


class Records(abc.ABC):
  """Records by number, over all files of a split. Threads may share them, and processes may be sent them."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """The number of records."""

  @abc.abstractmethod
  def read(self, numbers: Sequence[int]) -> list[bytes]:
    """Returns the records of these numbers.

    Raises:
      DataError: a file cannot be read any more, or is damaged there.
    """

  @abc.abstractmethod
  def where(self, number: int) -> str:
    """Returns the file and the place in it, for messages."""

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """A hash of the content."""


class JsonLines(Records):
  """The lines of one or several files; empty lines are passed over."""

  def __init__(self, paths: Sequence[str]):
    """Args:
      paths: the files, in the order of their records.

    Raises:
      DataError: a file cannot be read, or a line is no JSON object.
    """
    digest = hashlib.sha256()
    indices = [_index_lines(path, digest) for path in paths]
    self._paths = list(paths)
    self._firsts = np.cumsum([0, *(len(starts) for starts, _ in indices)])
    self._starts, self._lengths = (
        np.concatenate([np.zeros(0, np.int64), *column]) for column in zip(*indices, strict=True))
    self._fingerprint = digest.hexdigest()[:16]

  def __len__(self) -> int:
    return len(self._starts)

  def read(self, numbers: Sequence[int]) -> list[bytes]:
    return [self._read(number) for number in numbers]

  def _read(self, number: int) -> bytes:
    path, start, length = self._locate(number)
    try:
      with open(path, 'rb') as stream:
        stream.seek(start)
        line = stream.read(length)
    except OSError as error:
      raise unreadable(path, error) from error
    if len(line) < length:
      raise DataError(f'{path} has become shorter since it was opened: leave the files of a run as they are.')
    return line

  def where(self, number: int) -> str:
    path, start, _ = self._locate(number)
    # Counted when it is needed: empty lines count, too.
    with open(path, 'rb') as stream:
      line = 1 + sum(stream.read(min(_CHUNK, start - offset)).count(b'\n') for offset in range(0, start, _CHUNK))
    return f'{path}, line {line}'

  @property
  def fingerprint(self) -> str:
    return self._fingerprint

  def _locate(self, number: int) -> tuple[str, int, int]:
    file = int(np.searchsorted(self._firsts, number, side='right')) - 1
    return self._paths[file], int(self._starts[number]), int(self._lengths[number])


class Where:
  """Where a record stands; found out when it is printed, since counting lines takes time."""

  def __init__(self, records: Records, number: int):
    """Args:
      records: among these.
      number: the record's number.
    """
    self._records = records
    self._number = number

  def __str__(self) -> str:
    return self._records.where(self._number)


def checked_objects(lines: Records) -> Iterator[bytes]:
  """Yields the JSON objects of `lines` one after another, in the bytes that they stand in.

  Raises:
    DataError: one of them is none, naming where it stands.
  """
  for number in range(len(lines)):
    (content,) = lines.read([number])
    parse_json(content, Where(lines, number))
    # A byte order mark or spaces before the object are no part of it.
    yield content[content.index(b'{'):]


def _index_lines(path: str, digest: Any) -> tuple[np.ndarray, np.ndarray]:
  """Returns where the lines of a file start, and their lengths without line ends, int64[lines]; hashes the file."""
  try:
    size = os.path.getsize(path)
    content = np.memmap(path, np.uint8, mode='r') if size else np.zeros(0, np.uint8)
  except OSError as error:
    raise unreadable(path, error) from error
  ends = []
  for offset in range(0, size, _CHUNK):
    chunk = content[offset:offset + _CHUNK]
    digest.update(chunk)
    ends.append(np.flatnonzero(chunk == _NEWLINE) + offset)
  digest.update(f' {size} '.encode())
  ends = np.concatenate([np.zeros(0, np.int64), *ends])
  if size and content[-1] != _NEWLINE:
    ends = np.append(ends, size)
  starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
  ends = np.where((ends > starts) & (content[ends - 1] == _RETURN), ends - 1, ends) if size else ends
  lengths = ends - starts
  # A line between braces is taken for an object until it is read; any other is looked at now.
  is_plain = (lengths > 1) & (content[np.minimum(starts, size - 1)] == _OPENING) & (content[ends - 1] == _CLOSING)
  is_kept = is_plain.copy()
  for line in np.flatnonzero(~is_plain):
    text = content[starts[line]:ends[line]].tobytes()
    if text.strip():
      parse_json(text, f'{path}, line {line + 1}')
      is_kept[line] = True
  return starts[is_kept], lengths[is_kept]


def unreadable(path: str, error: OSError) -> DataError:
  """Returns the error for a file that cannot be read."""
  return DataError(f'Cannot read {path!r}: {error.strerror or error}.')


def parse_json(text: bytes, where: object) -> dict[str, Any]:
  """Returns the JSON object `text`.

  Raises:
    DataError: the record is invalid; the message names `where`.
  """
  try:
    record = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise DataError(f'{where}: not JSON ({error}): {_shown(text)}. Expected one JSON object in each line, such as '
                    '{"inputs": "a text", "targets": "another"}.') from error
  if not isinstance(record, dict):
    raise DataError(f'{where}: {_shown(text)} is not a JSON object, expected one such as {{"inputs": "a text", '
                    '"targets": "another"}.')
  return record


def read_tsv(path: str | os.PathLike[str], num_fields: int = 2) -> list[tuple[str, ...]]:
  """Return the fields of each line of a file of tab-separated values, e.g. for the `texts_fn` of `data.text_task`.

  Quotation marks have no meaning; empty lines are left out.

  Args:
    path: a UTF-8 file.
    num_fields: number of fields in each line.

  Returns:
    One tuple of `num_fields` texts for each line, in the file's order.

  Raises:
    DataError: the file cannot be read, or a line is not UTF-8 or has another number of fields; it names file and line.
  """
  rows = []
  try:
    with open(path, 'rb') as stream:
      lines = stream.read().removeprefix(codecs.BOM_UTF8).split(b'\n')
  except OSError as error:
    raise unreadable(os.fspath(path), error) from error
  for number, line in enumerate(lines, start=1):
    try:
      text = line.decode('utf-8').removesuffix('\r')
    except UnicodeDecodeError as error:
      raise DataError(f'{os.fspath(path)}, line {number}: expected UTF-8, got {error.reason} at byte {error.start + 1} '
                      'of the line. Convert the file.') from error
    fields = tuple(text.split('\t'))
    if text and len(fields) != num_fields:
      raise DataError(f'{os.fspath(path)}, line {number}: expected {num_fields} fields divided by tabs, got '
                      f'{len(fields)}: {_shown(line)}. Correct the line.')
    if text:
      rows.append(fields)
  return rows


def parse_record(content: bytes, where: object) -> dict[str, Any]:
  """Returns the record that `content` is: a JSON object, or a map of msgpack.

  The first byte tells: `{` is JSON's, and no map of msgpack starts with it.

  >>> import msgpack
  >>> parse_record(b'{"inputs": "a"}', 'here') == parse_record(msgpack.packb({'inputs': 'a'}), 'here')
  True

  Raises:
    DataError: it is neither, naming `where` it stands.
    ConfigError: it is msgpack's, and the package is not installed.
  """
  if content[:1] == b'{':
    return parse_json(content, where)
  try:
    import msgpack
  except ImportError as error:
    raise ConfigError(f'{where}: a record that is not JSON needs the package msgpack, but: {error}. Install it, or '
                      'write JSON.') from error
  try:
    record = msgpack.unpackb(content)
  except (ValueError, msgpack.UnpackException) as error:
    raise DataError(f'{where}: neither a JSON object nor a map of msgpack ({error or type(error).__name__}): '
                    f'{_shown(content)}.') from error
  if not isinstance(record, dict):
    raise DataError(f'{where}: {_shown(content)} is neither a JSON object nor a map of msgpack, but a '
                    f'{type(record).__name__}.')
  return record


def _shown(content: bytes) -> str:
  text = content.decode('utf-8', errors='replace')
  return repr(text if len(text) <= 60 else f'{text[:57]}...')


def find_files(patterns: str | Sequence[str], what: str) -> list[str]:
  """Returns the files that patterns such as `data/train-*.jsonl` match, sorted within each pattern.

  Args:
    patterns: one or several, relative to the current folder; `~` is the home folder.
    what: whose files they are, for messages.

  Raises:
    DataError: a pattern matches none, or a file is matched twice.
  """
  found: list[str] = []
  for pattern in [patterns] if isinstance(patterns, str) else patterns:
    paths = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    if not paths:
      at = '' if os.path.isabs(pattern) else f' in {os.getcwd()!r}'
      raise DataError(f'{what}: no file matches {pattern!r}{at}. Write the files first, or correct the pattern.')
    found.extend(paths)
  twice = sorted({path for path in found if found.count(path) > 1}) if len(set(found)) < len(found) else []
  if twice:
    raise DataError(f'{what}: {twice[0]!r} is matched by two patterns, so its records would be read twice. Leave one '
                    'of them out.')
  return found
