"""JSONL files of this package; `data` reads those of users, with messages about invalid lines."""

from collections.abc import Iterator, Mapping
import functools
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from t5x_lite.storage import files

# Largest size of a file, and characters that are read as one line; a longer line is invalid.
_MAX_BYTES = 2**31
_MAX_LINE = 2**26
# Characters that JSON strings may contain, but that are line breaks for Python and other programs, or that control the
# terminal or the direction of texts.
_CONTROLS = (
  *range(0x7F, 0xA0),
  0x061C,
  0x200E,
  0x200F,
  *range(0x2028, 0x202F),
  *range(0x2066, 0x206A),
)
_ESCAPES = {code: f'\\u{code:04x}' for code in _CONTROLS}


class JsonEncoder(json.JSONEncoder):
  """Encodes arrays as lists, bytes as text, and other unsupported types as `str`."""

  def default(self, o: Any) -> Any:
    """See base class."""
    if isinstance(o, (np.ndarray, np.generic, jax.Array)):
      array = np.asarray(o)
      if array.dtype.kind in 'biufSUO':
        return array.tolist()
      return array.astype(np.float32).tolist()  # E.g. bfloat16.
    if isinstance(o, bytes):
      return o.decode('utf-8', errors='replace')
    return str(o)


def to_line(row: Mapping[str, Any], **options: Any) -> str:
  r"""Return an object as one line of JSON, with '\n' as its only line break.

  >>> to_line({'text': 'a\u2028é', 'ids': np.arange(2)})
  '{"text": "a\\u2028é", "ids": [0, 1]}\n'

  Args:
    row: the object.
    **options: arguments of `json.dumps` that override `cls=JsonEncoder` and `ensure_ascii=False`.
  """
  options = {'cls': JsonEncoder, 'ensure_ascii': False, **options}
  text = json.dumps(row, **options)
  try:
    text.encode('utf-8')
  except UnicodeEncodeError:  # Half of a surrogate pair in user data.
    text = json.dumps(row, **{**options, 'ensure_ascii': True})
  return text.translate(_ESCAPES) + '\n'


def read(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
  """Yield the text of each line and its object; None for an invalid line, e.g. one truncated by a kill."""
  for part in files.parts(path):
    yield from read_file(part)


_open = functools.partial(files.open_to_read, max_bytes=_MAX_BYTES)


def read_file(path: files.Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
  """Do what `read` does with a single file, which may be a part of one.

  Raises:
    InvalidFileError: it is not a regular file, or has more than 2 GiB.
    OSError: it cannot be read.
  """
  # A machine that crashed may leave invalid bytes at the end.
  how: dict[str, Any] = {'encoding': 'utf-8', 'errors': 'replace', 'newline': '\n'}
  if isinstance(path, pathlib.Path):
    opened = open(path, opener=_open, **how)  # noqa: SIM115  # The context is below.
  else:
    opened = path.open(**how)
  with opened as lines:
    while line := lines.readline(_MAX_LINE):
      try:
        row = json.loads(line)
      except (ValueError, RecursionError):
        row = None
      if not isinstance(row, dict):
        row = None
      yield line.removesuffix('\n'), row
