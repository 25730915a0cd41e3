"""Tables in text files: comma-separated values, tab-separated values, and lines with another separator.

Quotes are those of RFC 4180: a field that begins with a double quote ends at the next single one. It may contain
separators and line breaks, and two quotes for one. In another field a quote is an ordinary character, as in Python's
`csv`.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
import csv
import itertools
from typing import Any

import numpy as np

from t5x_lite.data.files.records import CHUNK
from t5x_lite.data.files.records import LineRecords
from t5x_lite.data.files.records import line_spans
from t5x_lite.data.files.records import places
from t5x_lite.errors import DataError
from t5x_lite.formatting import short_repr

_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
# Quotes that are examined together, an even number.
_PIECE = 1 << 16


class Table(LineRecords):
  """Rows of one or several files, as mappings of the names of columns to texts."""

  def __init__(
    self,
    paths: Sequence[str],
    copies: Sequence[str] | None = None,
    *,
    separator: str = ',',
    has_quotes: bool = True,
    columns: Sequence[str] | None = None,
  ):
    """Args:
      paths: see base class.
      copies: see base class.
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
    super().__init__(paths, copies)

  @property
  def columns(self) -> list[str]:
    """Names of the columns, in the order of the first file."""
    return self._headers[0]

  def index(self, content: np.ndarray, file: int) -> tuple[np.ndarray, np.ndarray]:
    """See base class; also reads the header."""
    self._check_characters(content, file)
    begin = len(codecs.BOM_UTF8) * (content[:3].tobytes() == codecs.BOM_UTF8)
    quotes = None
    if self._has_quotes:
      quotes = self._quotes_of_fields(content, places(content, _QUOTE), begin)
      self._check_last_quote(quotes, file)
    ends = places(content, _NEWLINE)
    if quotes is not None and len(quotes):
      # A line break ends a row if the number of quotes before it is even.
      ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    del quotes
    starts, ends = line_spans(content, ends)
    if len(starts):
      starts[0] = begin
    is_kept = ends > starts
    lengths = ends - starts
    del ends
    starts, lengths = starts[is_kept], lengths[is_kept]
    if self._given is not None:
      self._headers.append(list(self._given))
      return starts, lengths
    if not len(starts):
      raise DataError(
        f'{self.name(file)} must begin with the names of its columns, got an empty file. Write the file again, or '
        'name the columns with --columns.'
      )
    first = content[starts[0] : starts[0] + lengths[0]].tobytes()
    self._add_header(self._fields(first, f'{self.name(file)}, line 1'), file)
    return starts[1:], lengths[1:]

  def _check_characters(self, content: np.ndarray, file: int) -> None:
    for offset in range(0, len(content), CHUNK):
      chunk = content[offset : offset + CHUNK]
      if not chunk.all():
        line = self.line_at(file, offset + int(np.argmin(chunk)))
        raise DataError(
          f'{self.name(file)}, line {line} must be text, got a NUL byte. Remove it, or write the file again in UTF-8.'
        )

  def _check_last_quote(self, quotes: np.ndarray, file: int) -> None:
    """Raise if the last quoted field of a file does not end."""
    if len(quotes) % 2 == 0:
      return
    first = len(quotes) - 1
    while first and quotes[first - 1] == quotes[first] - 1:  # Two quotes within the field.
      first -= 2
    line = self.line_at(file, int(quotes[first]))
    raise DataError(
      f'{self.name(file)}, line {line}: the quoted field that begins here must end with a quote, and the file ends '
      'first. Add the quote, or enclose the field in quotes and double those in it.'
    )

  def _quotes_of_fields(self, content: np.ndarray, quotes: np.ndarray, begin: int) -> np.ndarray:
    """Return those quotes, int64[n], that begin and end fields or are one of two within a quoted field."""
    last = len(content) - 1
    borders = [ord(self._separator), _NEWLINE, _RETURN]

    def can_open(found: np.ndarray) -> np.ndarray:
      return np.isin(content[np.maximum(found - 1, 0)], borders) | (found == begin)

    pieces = [quotes[first : first + _PIECE] for first in range(0, len(quotes), _PIECE)]
    for piece in pieces:
      # Of two quotes within a quoted field the first closes it for this purpose, and the second opens it again.
      opening, closing = piece[::2], piece[1::2]
      opens = can_open(opening) | (content[np.maximum(opening - 1, 0)] == _QUOTE)
      after = content[np.minimum(closing + 1, last)]
      closes = np.isin(after, borders) | (closing == last) | (after == _QUOTE)
      if not (opens.all() and closes.all()):
        break
    else:
      return quotes
    flags = (zip(piece.tolist(), can_open(piece).tolist(), strict=True) for piece in pieces)
    return np.fromiter(_quotes_in_order(itertools.chain.from_iterable(flags)), np.int64)

  def _fields(self, content: bytes, where: object) -> list[str]:
    try:
      text = content.decode('utf-8')
    except UnicodeDecodeError as error:
      raise DataError(
        f'{where} must be UTF-8, got {error.reason} at byte {error.start + 1} of the row. Convert the file.'
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

  def _add_header(self, names: list[str], file: int) -> None:
    """Check the names of the columns of a file, and keep them."""
    for name in names:
      if '\r' in name and '\n' not in name:
        raise DataError(
          f'{self.name(file)} must have lines that end with a line feed, got only carriage returns. Convert it: '
          f"`tr '\\r' '\\n' < {self.name(file)} > NEW_FILE`."
        )
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


def _quotes_in_order(quotes: Iterable[tuple[int, bool]]) -> Iterator[int]:
  """Yield the places of quotes that are not ordinary characters, one after the other.

  Args:
    quotes: places of all quotes, and whether a field begins at the quote.
  """
  is_open = False
  closed_at = -2
  for place, can_open in quotes:
    if is_open:
      is_open = False
      closed_at = place
      yield place
    elif can_open or place == closed_at + 1:  # Or two quotes within a field.
      is_open = True
      yield place
