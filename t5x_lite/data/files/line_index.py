"""Places of the records of a text file, in 8 bytes a record, which can be kept in a file for the next opening."""

import array
from collections.abc import Callable, Iterable, Iterator
import contextlib
import os
import pathlib
from typing import NamedTuple

import numpy as np

from t5x_lite.storage import files

NEWLINE, RETURN = b'\n\r'
# Bytes of a file that are scanned together. Arrays about a chunk are small next to the memory of a process.
CHUNK = 1 << 22
# Bytes of the hash at the beginning of a kept index.
_HASH_BYTES = 32


class LineIndex(NamedTuple):
  """Index of a file.

  Attributes:
    starts: int64[records + 1], the beginnings of the records, and the size of the file. After a record there may be
      line ends and empty lines.
    content_hash: SHA-256 of the file, 32 bytes.
  """

  starts: np.ndarray
  content_hash: bytes


def joined(pieces: Iterable[np.ndarray], size: int) -> np.ndarray:
  """Return the beginnings of records, and the size of the file, int64[records + 1].

  Args:
    pieces: int64[n] each, the beginnings in order.
    size: bytes of the file.
  """
  found = array.array(
    'q'
  )  # grows in place; parts of an array of NumPy would be copied to join them
  for piece in pieces:
    found.frombytes(np.asarray(piece, np.int64).tobytes())
  found.append(size)
  return np.frombuffer(found, np.int64)


def line_spans(
  content: np.ndarray,
  are_breaks: Callable[[int, np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yield the starts and ends of lines, int64[n] each, without their line ends, chunk by chunk of a file.

  Args:
    content: uint8[bytes] of a file.
    are_breaks: `fn(offset, chunk, places)` that returns which line feeds of a chunk end a line, bool[n]; None for all.
      It is called once for each chunk, in order.
  """
  size = len(content)
  start = 0
  for offset in range(0, size, CHUNK):
    chunk = content[offset : offset + CHUNK]
    ends = np.flatnonzero(chunk == NEWLINE)
    ends += offset
    if are_breaks is not None:
      ends = ends[are_breaks(offset, chunk, ends)]
    if offset + CHUNK >= size and content[-1] != NEWLINE:  # The last line lacks a line feed.
      ends = np.append(ends, size)
    if not len(ends):
      continue
    starts = np.empty_like(ends)
    starts[0] = start
    np.add(ends[:-1], 1, out=starts[1:])
    start = int(ends[-1]) + 1
    has_return = (ends > starts) & (content[ends - 1] == RETURN)
    yield starts, ends - has_return


def without_line_ends(content: bytes) -> bytes:
  """Return a record without the line end and the empty lines after it.

  >>> without_line_ends(b'a\\r\\n\\n')
  b'a'
  """
  end = len(content)
  if not content.endswith(b'\n'):  # the last line of a file
    return content.removesuffix(b'\r')
  while end and content[end - 1] == NEWLINE:
    end -= 1
    if end and content[end - 1] == RETURN:
      end -= 1
  return content[:end]


def longest(starts: np.ndarray) -> tuple[int, int]:
  """Return (number, bytes) of the longest record of a file, with the lines after it; (0, 0) without records.

  Args:
    starts: int64[records + 1], see `LineIndex`.
  """
  found = (0, 0)
  for first in range(0, len(starts) - 1, CHUNK):
    sizes = np.diff(starts[first : first + CHUNK + 1])
    number = int(np.argmax(sizes))
    if sizes[number] > found[1]:
      found = (first + number, int(sizes[number]))
  return found


def keep(path: pathlib.Path, index: LineIndex) -> None:
  """Write an index to a file, if its folder can be written."""
  with contextlib.suppress(OSError):
    for left in path.parent.glob(f'{path.name}{files.WRITING_INFIX}*'):  # of killed processes
      files.remove(left)

    def write(unfinished: pathlib.Path) -> None:
      with unfinished.open('wb') as stream:
        stream.write(index.content_hash)
        index.starts.astype('<i8', copy=False).tofile(stream)

    files.write(path, write)


def load(path: pathlib.Path, size: int) -> LineIndex | None:
  """Return the index that `keep` wrote, mapped into memory, or None without one for a file of this size.

  Args:
    path: see `keep`.
    size: bytes of the file of the records.
  """
  try:
    with path.open('rb') as stream:
      content_hash = stream.read(_HASH_BYTES)
      num_bytes = os.fstat(stream.fileno()).st_size - _HASH_BYTES
    if num_bytes <= 0 or num_bytes % 8:
      return None
    starts = np.asarray(np.memmap(path, '<i8', mode='r', offset=_HASH_BYTES))
  except OSError:
    return None
  if starts[-1] != size:
    return None
  return LineIndex(starts, content_hash)
