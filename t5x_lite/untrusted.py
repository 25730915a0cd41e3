"""Checks of what a checkpoint says about itself, made before anything is allocated, opened or read because of it.

A checkpoint may come from anybody, or from a disk that flips bits: its names, sizes, dtypes and links are input.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from t5x_lite import errors

# Of files that are parsed as a whole; 100,000 arrays take a quarter of it.
MAX_TEXT_BYTES = 2**26
# T5X and JAX count steps in 32 bits.
MAX_STEP = 2**31 - 1
# Of TensorStore.
_MAX_RANK = 32
_MAX_ARRAY_BYTES = 2**63 - 1
# The most bytes that one byte on disk can stand for. Orbax compresses with zstd, whose longest runs are of 128 KiB.
MAX_COMPRESSION = {None: 1, 'gzip': 1032, 'zlib': 1032, 'zstd': 2**15, 'blosc': 2**15, 'bz2': 2**20}
_DTYPE_RE = re.compile(r'[<>|=]?[a-z]+\d*(_[a-z0-9]+)*')


# ---- Numbers and names -----------------------------------------------------------------------------------------------


def is_count(value: Any, at_most: int | None = None) -> bool:
  """Returns True if `value` is a whole number from 0 up to `at_most`; no bool."""
  return type(value) is int and value >= 0 and (at_most is None or value <= at_most)


def shape_problem(value: Any) -> str | None:
  """Returns why `value`, as read from a file, is not the shape of an array; None if it is."""
  if not isinstance(value, list | tuple) or not all(map(is_count, value)):
    return f'must be a list of whole numbers from 0 up, got {shorten(value)}'
  if len(value) > _MAX_RANK:
    return f'must have at most {_MAX_RANK} dims, got {len(value)}'
  if math.prod(size or 1 for size in value) > _MAX_ARRAY_BYTES // 16:
    return f'must be that of an array of fewer than 2**63 bytes, got {shorten(value)}'
  return None


def parse_dtype(value: Any) -> np.dtype | None:
  """Returns the dtype of numbers that `value` names, in the byte order of this machine; None if it names none."""
  if not isinstance(value, str) or len(value) > 40 or _DTYPE_RE.fullmatch(value) is None:
    return None
  try:
    dtype = jnp.dtype(value)
  except (TypeError, ValueError):
    return None
  if dtype != np.bool_ and not jnp.issubdtype(dtype, jnp.number):
    return None
  return dtype.newbyteorder('=')


def name_problem(value: Any) -> str | None:
  """Returns why `value` is not the path of a file below the folder that names it; None if it is."""
  if not isinstance(value, str) or not value:
    return f'must be a relative path, got {shorten(value)}'
  if '\\' in value or not value.isprintable() or any(part in ('', '.', '..') for part in value.split('/')):
    return f"must be a relative path without '..', '.', '\\' and control characters, got {shorten(value)}"
  return None


def shorten(value: Any) -> str:
  """Returns the text of a value for a message."""
  text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else 'a number of more than 30 digits'
  return text if len(text) <= 80 else f'{text[:77]}...'


# ---- Files -----------------------------------------------------------------------------------------------------------


def file_problem(root: pathlib.Path, name: str) -> str | None:
  """Returns why the file `name` of the folder `root` must not be opened; None if it may be, or does not exist.

  It must not lead out of the folder, nor be a device or a pipe. The one exception is a Hugging Face cache: the folder
  may be a snapshot of it, which links to its `blobs`.
  """
  path = root / name
  base, real = os.path.realpath(root), os.path.realpath(path)
  above = os.path.dirname(base)
  allowed = (base, os.path.join(above, 'blobs'), os.path.join(os.path.dirname(above), 'blobs'))
  if not any(real == folder or real.startswith(folder + os.sep) for folder in allowed):
    return f'{name} is a link that leads out of the folder, to {real!r}'
  try:
    mode = os.stat(path).st_mode
  except OSError:
    return None
  return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else f'{name} is neither a file nor a folder'


def check_file(root: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of the file `name` of the folder `root`.

  Raises:
    CheckpointError: see `file_problem`.
  """
  problem = file_problem(root, name)
  if problem is not None:
    raise errors.CheckpointError(f'{str(root)!r} is not read: {problem}. Put a copy of the file in its place.')
  return root / name


def read_limited(root: pathlib.Path, name: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
  """Returns the content of the file `name` of the folder `root`.

  Raises:
    CheckpointError: it is larger than `max_bytes`; see also `check_file`.
    OSError: it cannot be read.
  """
  path = check_file(root, name)
  size = path.stat().st_size
  if size > max_bytes:
    raise errors.CheckpointError(f'{str(path)!r} must have at most {max_bytes:,} bytes, got {size:,}. Restore another '
                                 'checkpoint.')
  return path.read_bytes()


def walk(root: pathlib.Path, folder: str) -> Iterator[tuple[str, os.DirEntry]]:
  """Yields (path relative to `root`, entry) of each file, link and special file below `root / folder`.

  Links are not followed. A folder that does not exist has none.
  """
  waiting = [folder]
  while waiting:
    below = waiting.pop()
    try:
      entries = sorted(os.scandir(root / below), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
      continue
    for entry in entries:
      name = f'{below}/{entry.name}' if below else entry.name
      if entry.is_dir(follow_symlinks=False):
        waiting.append(name)
      else:
        yield name, entry


def tree_problem(root: pathlib.Path, folder: str) -> str | None:
  """Returns the first problem, see `file_problem`, of `folder` in `root` and of all that lies below; None without one."""
  problem = file_problem(root, folder) if folder else None
  for name, entry in () if problem is not None else walk(root, folder):
    if not entry.is_file(follow_symlinks=False):
      problem = file_problem(root, name)
      if problem is not None:
        break
  return problem


def tree_bytes(root: pathlib.Path, folder: str = '') -> int:
  """Returns the number of bytes of all files below `root / folder`."""
  return sum(entry.stat(follow_symlinks=False).st_size for _, entry in walk(root, folder))


def num_bytes(shape: Any, dtype: np.dtype) -> int:
  """Returns the size of an array in bytes, however large."""
  return math.prod(shape) * dtype.itemsize
