"""Tables in text files: comma-separated values, tab-separated values, and lines with another separator.

Quotes are those of RFC 4180: a field that begins with a double quote ends at the next single one. It may contain
separators and line breaks, and two quotes for one. In another field a quote is an ordinary character, as in Python's
`csv`.
"""

import codecs
from collections.abc import Iterator, Sequence
import contextlib
import csv
import pathlib
from typing import Any

import numpy as np

from t5x_lite.data.files import line_index
from t5x_lite.data.files.line_index import NEWLINE
from t5x_lite.data.files.line_index import RETURN
from t5x_lite.data.files.records import LineRecords
from t5x_lite.errors import DataError
from t5x_lite.formatting import short_repr

_QUOTE = ord('"')
# Quotes that are examined together.
_PIECE = 1 << 16


class Table(LineRecords):
  """Rows of one or several files, as mappings of the names of columns to texts."""

  def __init__(
    self,
    paths: Sequence[str],
    copies: Sequence[str] | None = None,
    index_paths: Sequence[pathlib.Path | None] | None = None,
    *,
    separator: str = ',',
    has_quotes: bool = True,
    columns: Sequence[str] | None = None,
  ):
    """Args:
      paths: see base class.
      copies: see base class.
      index_paths: see base class.
      separator: text between two fields, one character if there are quotes; '' for lines that are one field.
      has_quotes: whether fields may be in quotes.
      columns: names of the columns of files without a header; None for files whose first row has the names.

    Raises:
      DataError: see base class; a quoted field does not end, or the names of columns are invalid or differ.
    """
    # A field of a table may be a document. The limit of the module is a fixed number of characters.
    csv.field_size_limit(max(csv.field_size_limit(), (1 << 31) - 1))
    self._separator = separator
    self._has_quotes = has_quotes
    self._given = columns
    self._headers: list[list[str]] = []
    super().__init__(paths, copies, index_paths)

  @property
  def columns(self) -> list[str]:
    """Names of the columns, in the order of the first file."""
    return self._headers[0]

  def index(self, content: np.ndarray, file: int) -> Iterator[np.ndarray]:
    """See base class; also checks that all characters are text, and that quoted fields end."""
    begin = len(codecs.BOM_UTF8) * (content[:3].tobytes() == codecs.BOM_UTF8)
    quotes = None
    if self._has_quotes:
      quotes = _Quotes(content, self._separator, begin)

    def are_breaks(offset: int, chunk: np.ndarray, places: np.ndarray) -> np.ndarray:
      if not chunk.all():
        line = self.line_at(file, offset + int(np.argmin(chunk)))
        raise DataError(
          f'{self.name(file)}, line {line} must be text, got a NUL byte. Remove it, or write the file again in UTF-8.'
        )
      if quotes is None:
        return np.ones(len(places), bool)
      return quotes.are_outside(offset, chunk, places)

    for starts, ends in line_index.line_spans(content, are_breaks):
      if not starts[0]:
        starts[0] = begin
      yield starts[ends > starts]
    if quotes is not None and quotes.is_open:
      line = self.line_at(file, quotes.opened_at)
      raise DataError(
        f'{self.name(file)}, line {line}: the quoted field that begins here must end with a quote, and the file ends '
        'first. Add the quote, or enclose the field in quotes and double those in it.'
      )

  def without_header(self, content: np.ndarray, starts: np.ndarray, file: int) -> np.ndarray:
    """See base class."""
    where = f'{self.name(file)}, line 1'
    first = None
    if len(starts) > 1:
      first = self.trimmed(content[starts[0] : starts[1]].tobytes())
    if self._given is not None:
      names = list(self._given)
      fields = []
      with contextlib.suppress(DataError):  # A bad record, which may be skipped.
        fields = self._fields(first or b'', where)
      # One name may also be the value of a record.
      if len(names) > 1 and fields == names:
        raise DataError(
          f'{where} has the names of the columns, so the file has a header. Remove --columns (in a run that has them: '
          '--gin.data.FileTask.columns=None).'
        )
      if len(starts) == 2:
        self._check_line_feeds(fields, file)
      self._headers.append(names)
      return starts
    if first is None:
      raise DataError(
        f'{self.name(file)} must begin with the names of its columns, got an empty file. Write the file again, or '
        'name the columns with --columns.'
      )
    self._add_header(self._fields(first, where), file)
    return starts[1:]

  def _fields(self, content: bytes, where: object) -> list[str]:
    try:
      text = content.decode('utf-8')
    except UnicodeDecodeError as error:
      raise DataError(
        f'{where} must be UTF-8, got {error.reason} at byte {error.start + 1} of the row. Write the file again in '
        'UTF-8, e.g. with `iconv -f WINDOWS-1252 -t UTF-8`.'
      ) from error
    if not self._separator:
      return [text]
    if not self._has_quotes or '"' not in text:
      return text.split(self._separator)
    try:
      (fields,) = csv.reader([text], delimiter=self._separator)
    except csv.Error as error:
      raise DataError(
        f'{where} must be a row of fields, got an error: {error}. Correct the row.'
      ) from error
    return fields

  def _check_line_feeds(self, fields: Sequence[str], file: int) -> None:
    """Raise if the fields of a first row have the line ends of former Macs."""
    for field in fields:
      if '\r' in field and '\n' not in field:
        raise DataError(
          f'{self.name(file)} must have lines that end with a line feed, got only carriage returns. Convert it: '
          f"`tr '\\r' '\\n' < {self.name(file)} > NEW_FILE`."
        )

  def _add_header(self, names: list[str], file: int) -> None:
    """Check the names of the columns of a file, and keep them."""
    self._check_line_feeds(names, file)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
      raise DataError(
        f'{self.name(file)}: the names of columns must differ, got {min(twice)!r} twice. Rename one of them, or, if '
        'the first row is no header, name the columns with --columns.'
      )
    if self._headers and sorted(names) != sorted(self._headers[0]):
      raise DataError(
        f'All files must have the same columns, got {self._headers[0]} in {self.name(0)} and {names} in '
        f'{self.name(file)}. Correct one of them.'
      )
    self._headers.append(names)

  def parse(self, content: Any, where: object) -> dict[str, Any]:
    """See base class."""
    raw, file = content
    fields = self._fields(raw, where)
    header = self._headers[file]
    if len(fields) != len(header):
      raise DataError(
        f'{where} must have {len(header)} fields, as the columns {", ".join(header)}, got {len(fields)}: '
        f'{short_repr(raw.decode("utf-8"))}. Correct the row.'
      )
    return dict(zip(header, fields, strict=True))

  def read(self, numbers: Sequence[int]) -> list[Any]:
    """See base class; each record is its bytes and the number of its file, whose header it follows."""
    rows = super().read(numbers)
    return [(row, self.file_of(number)) for row, number in zip(rows, numbers, strict=True)]


class _Quotes:
  """Quotes of a file, chunk by chunk: which of them begin and end fields, and are not ordinary characters.

  Attributes:
    is_open: whether the bytes so far end within a quoted field.
    opened_at: place of the quote at which the last quoted field begins.
  """

  def __init__(self, content: np.ndarray, separator: str, begin: int):
    """Args:
    content: uint8[bytes], the file.
    separator: character between two fields.
    begin: place of the first field.
    """
    self.is_open = False
    self.opened_at = -1
    self._closed_at = -2
    self._content = content
    self._borders = [ord(separator), NEWLINE, RETURN]
    self._begin = begin

  def are_outside(self, offset: int, chunk: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return which places of the next chunk are in no quoted field, bool[n].

    Args:
      offset: place of the chunk in the file.
      chunk: uint8[bytes], the chunk.
      places: int64[n], ascending places in the file.
    """
    was_open = self.is_open
    found = np.flatnonzero(chunk == _QUOTE)
    found += offset
    if not len(found):
      return np.full(len(places), not was_open)
    pieces = [found[first : first + _PIECE] for first in range(0, len(found), _PIECE)]
    quotes = np.concatenate([self._of_fields(piece) for piece in pieces])
    # A place is outside if the number of quotes before it is even.
    return (np.searchsorted(quotes, places) + was_open) % 2 == 0

  def _of_fields(self, quotes: np.ndarray) -> np.ndarray:
    """Return the next quotes, int64[n], without ordinary characters."""
    content = self._content
    last = len(content) - 1
    can_open = np.isin(content[np.maximum(quotes - 1, 0)], self._borders) | (quotes == self._begin)
    first = int(self.is_open)  # of the quotes that open a field, if all quotes are of fields
    opening = quotes[first::2]
    closing = quotes[1 - first :: 2]
    closed = closing
    if not first:
      closed = np.append(self._closed_at, closing)
    # Of two quotes within a quoted field the first closes it for this purpose, and the second opens it again.
    is_doubled = opening == closed[: len(opening)] + 1
    after = content[np.minimum(closing + 1, last)]
    closes = np.isin(after, self._borders) | (closing == last) | (after == _QUOTE)
    if not ((can_open[first::2] | is_doubled).all() and closes.all()):
      return np.fromiter(self._in_order(quotes, can_open), np.int64)
    begins = opening[~is_doubled]
    if len(begins):
      self.opened_at = int(begins[-1])
    if len(closing):
      self._closed_at = int(closing[-1])
    self.is_open ^= bool(len(quotes) % 2)
    return quotes

  def _in_order(self, quotes: np.ndarray, can_open: np.ndarray) -> Iterator[int]:
    """Yield the same as `_of_fields`, one quote after the other.

    Args:
      quotes: int64[n], the next quotes.
      can_open: bool[n], whether a field begins at the quote.
    """
    for place, begins in zip(quotes.tolist(), can_open.tolist(), strict=True):
      if self.is_open:
        self.is_open = False
        self._closed_at = place
        yield place
      elif begins or place == self._closed_at + 1:  # Or two quotes within a field.
        if place != self._closed_at + 1:
          self.opened_at = place
        self.is_open = True
        yield place
