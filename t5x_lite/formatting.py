"""Formatting of numbers, sizes and tables for people."""

from collections.abc import Iterable, Sequence
import itertools
import math
import re
import shlex
from typing import Any, TextIO
import unicodedata

# Number at the end of a component of a name, such as that of a layer.
_NUMBER = re.compile(r'(?<=_)\d+(?=/|$)')
# Format characters that scripts and emoji are written with.
_JOINERS = '\u200c\u200d'
# Maximum number of characters of a table cell with user text.
_MAX_CELL = 56


def capitalized(text: str) -> str:
  """Return a text with a capital first letter.

  >>> capitalized('loss of step 3')
  'Loss of step 3'
  """
  return text[:1].upper() + text[1:]


def format_duration(seconds: float) -> str:
  """Return a duration in seconds as text.

  >>> format_duration(7), format_duration(75), format_duration(3725), format_duration(200000)
  ('0:07', '1:15', '1:02:05', '2d 07:33')
  """
  seconds = int(seconds)
  days, rest = divmod(seconds, 86400)
  hours = rest // 3600
  minutes = rest // 60 % 60
  seconds = rest % 60
  if days:
    return f'{days}d {hours:02d}:{minutes:02d}'
  if hours:
    return f'{hours}:{minutes:02d}:{seconds:02d}'
  return f'{minutes}:{seconds:02d}'


def format_number(value: float) -> str:
  """Return a number with three or four significant digits.

  >>> [format_number(v) for v in (0.12345, 2.3456, 41234.0, 1.2e7, 0.00001, 1e38)]
  ['0.1235', '2.346', '41.2k', '12.0M', '1e-05', '1e+38']
  """
  if not 1e4 <= abs(value) < 1e12:
    return f'{value:.4g}'
  for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
    if abs(value) >= size:
      return f'{value / size:.1f}{unit}'
  return f'{value:.4g}'


def format_percent(share: float) -> str:
  """Return a fraction as a percentage with at most three digits; small fractions do not become 0%.

  >>> format_percent(0.1234), format_percent(0.0), format_percent(0.00001), format_percent(float('nan'))
  ('12.3%', '0%', '<0.01%', 'unknown')
  """
  if math.isnan(share):
    return 'unknown'
  if 0 < share < 1e-4:
    return '<0.01%'
  return f'{100 * share:.3g}%'


def format_bytes(num_bytes: int) -> str:
  """Return a byte count with a binary unit and three digits.

  >>> format_bytes(512), format_bytes(65_798_144), format_bytes(3 * 2**30)
  ('512 B', '62.8 MiB', '3.00 GiB')
  """
  if num_bytes < 1024:
    return f'{num_bytes} B'
  size = num_bytes / 1024
  unit = 'KiB'
  for larger in ('MiB', 'GiB', 'TiB'):
    # 999.5 would be printed as 1000, with four digits: use the next unit instead.
    if size < 999.5:
      break
    size /= 1024
    unit = larger
  if size < 9.995:
    return f'{size:.2f} {unit}'
  if size < 99.95:
    return f'{size:.1f} {unit}'
  return f'{size:.0f} {unit}'


def gin_flag(name: str, value: str) -> str:
  """Return the flag that sets a name of gin, quoted for a shell.

  Args:
    name: name of a macro or parameter.
    value: gin text, or a string without quotation marks.

  >>> gin_flag('TRAIN_STEPS', '5'), gin_flag('OPTIMIZER', '@optimizers.sgd()')
  ('--gin.TRAIN_STEPS=5', "--gin.OPTIMIZER='@optimizers.sgd()'")
  >>> print(gin_flag('TASK_FEATURE_LENGTHS', "{'inputs': 64}"))
  --gin.TASK_FEATURE_LENGTHS="{'inputs': 64}"
  """
  quoted = shlex.quote(value)
  # Gin text with ' is easier to read in ", unless a shell replaces a part of it there.
  if "'" in value and not set(value) & set('"$`\\!'):
    quoted = f'"{value}"'
  return f'--gin.{name}={quoted}'


def short_repr(value: Any, limit: int = 60) -> str:
  """Return `repr(value)`, cut to `limit` characters.

  >>> short_repr('abcdefgh', limit=8)
  "'abcd..."
  """
  text = repr(value)
  if len(text) <= limit:
    return text
  return f'{text[: limit - 3]}...'


def first_names(names: Sequence[str], limit: int = 3) -> str:
  """Return the first names, each on one line, and the number of the others.

  >>> first_names(['a', 'b', 'c', 'd', 'e'])
  'a, b, c and 2 more'
  """
  more = len(names) - limit
  text = ', '.join(map(printable, names[:limit]))
  if more > 0:
    text += f' and {more} more'
  return text


def group_names(names: Iterable[str]) -> list[str]:
  """Return names with the numbers of layers as ranges, and the number of names in a range.

  >>> group_names(['a/layers_0/w', 'a/layers_1/w', 'a/layers_3/w', 'b'])
  ['a/layers_{0-1,3}/w (3)', 'b']
  """
  groups: dict[str, list[list[int]]] = {}
  for name in map(printable, names):
    key = _NUMBER.sub('#', name)
    groups.setdefault(key, []).append([int(number) for number in _NUMBER.findall(name)])
  found = []
  for key, numbers in groups.items():
    parts = key.split('#')
    text = parts[0]
    for part, column in zip(parts[1:], zip(*numbers, strict=True), strict=True):
      ranges = _ranges(sorted(set(column)))
      text += ranges if len(set(column)) == 1 else f'{{{ranges}}}'
      text += part
    found.append(text if len(numbers) == 1 else f'{text} ({len(numbers)})')
  return found


def _ranges(numbers: Sequence[int]) -> str:
  """Return ascending numbers as text, such as '0-2,5'."""
  texts = []
  for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
    members = [number for _, number in group]
    texts.append(str(members[0]) if len(members) == 1 else f'{members[0]}-{members[-1]}')
  return ','.join(texts)


def format_table(lines: Sequence[Sequence[str]], right_aligned: Iterable[str] = ()) -> str:
  """Return rows of cells as aligned columns, two spaces apart, with a rule below the first row, the header.

  Args:
    lines: rows of cells; the first row is the header.
    right_aligned: headings of right-aligned columns.
  """
  right = set(right_aligned)
  lines = [[printable(cell) for cell in line] for line in lines]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

  def render(line):
    cells = []
    for cell, width, heading in zip(line, widths, lines[0], strict=True):
      if heading in right:
        cells.append(cell.rjust(width))
      else:
        cells.append(cell.ljust(width))
    return '  '.join(cells).rstrip()

  rule = '  '.join('-' * width for width in widths)
  return '\n'.join([render(lines[0]), rule, *map(render, lines[1:])])


def printable(text: str, *, keeps_lines: bool = False) -> str:
  r"""Return a text with escapes for all characters that are not shown as themselves.

  Names, messages and texts of files and other processes are untrusted. Control characters would move the cursor, change
  the terminal or begin a line that seems to be another message; bidirectional controls change the order of what is
  read; a lone surrogate cannot be printed at all. All other Unicode stays, with joiners and wide spaces.

  Args:
    text: the text.
    keeps_lines: keep line breaks and tabs, for a text whose untrusted parts are already on one line.

  >>> printable('a\tb'), printable('\x1b[2J \u202e\x9b é\n')
  ('a\\tb', '\\x1b[2J \\u202e\\x9b é\\n')
  """
  if text.isprintable():
    return text
  return ''.join(c if _is_shown(c, keeps_lines) else _escaped(c) for c in text)


def _is_shown(c: str, keeps_lines: bool) -> bool:
  if keeps_lines and c in '\n\t':
    return True
  return c.isprintable() or c in _JOINERS or unicodedata.category(c) == 'Zs'


def _escaped(c: str) -> str:
  return c.encode('unicode_escape').decode('ascii')


def show(text: str, *, file: TextIO | None = None, flush: bool = False) -> None:
  """Print lines, as `print` does, with escapes for control characters; see `printable`.

  Args:
    text: the lines.
    file: output stream; default: standard output.
    flush: whether to flush the stream.
  """
  print(printable(text, keeps_lines=True), file=file, flush=flush)


def format_cell(value: Any) -> str:
  """Return a value on one line, truncated for a table cell."""
  if isinstance(value, float):
    text = format_number(value)
  else:
    text = printable(str(value))
  if len(text) <= _MAX_CELL:
    return text
  return text[: _MAX_CELL - 1] + '…'
