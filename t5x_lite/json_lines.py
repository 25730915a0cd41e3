"""JSON lines as this package writes them and reads them back; `data` reads those of users, and says what is wrong."""

from collections.abc import Iterator, Mapping
import json
import os
from typing import Any

import jax
import numpy as np

# Python's, and some others', notion of lines; JSON itself may hold them as they are.
_LINE_BREAKS = str.maketrans({c: f'\\u{ord(c):04x}' for c in '\x85\u2028\u2029'})


class JsonEncoder(json.JSONEncoder):
  """Writes arrays as lists, bytes as text, and what JSON has no form for as Python shows it."""

  def default(self, o: Any) -> Any:
    """See base class."""
    if isinstance(o, (np.ndarray, np.generic, jax.Array)):
      array = np.asarray(o)
      if array.dtype.kind in 'biufSUO':
        return array.tolist()
      return array.astype(np.float32).tolist()  # bfloat16 and its like
    if isinstance(o, bytes):
      return o.decode('utf-8', errors='replace')
    return str(o)


def to_line(row: Mapping[str, Any], **options: Any) -> str:
  r"""Returns the line of an object, its end included; it holds nothing else that anything takes for the end of a line.

  >>> to_line({'text': 'a\u2028é', 'ids': np.arange(2)})
  '{"text": "a\\u2028é", "ids": [0, 1]}\n'

  Args:
    row: the object.
    **options: for `json.dumps`, in place of `cls=JsonEncoder` and `ensure_ascii=False`.
  """
  options = {'cls': JsonEncoder, 'ensure_ascii': False, **options}
  text = json.dumps(row, **options)
  try:
    text.encode('utf-8')
  except UnicodeEncodeError:  # half of a surrogate pair, in a field of the user's own
    text = json.dumps(row, **{**options, 'ensure_ascii': True})
  return text.translate(_LINE_BREAKS) + '\n'


def read(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
  """Yields the text of each line, and the object that it is; None for one that is none, such as one cut by a kill."""
  # A machine that went down may leave bytes at the end that are no text at all.
  with open(path, encoding='utf-8', errors='replace', newline='\n') as lines:
    for line in lines:
      try:
        row = json.loads(line)
      except ValueError:
        row = None
      yield line.removesuffix('\n'), row if isinstance(row, dict) else None
