"""Validation of checkpoint metadata before anything is allocated, opened or read because of it.

A checkpoint may come from an untrusted source, or from a defective disk: its names, sizes, dtypes and links are input.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from typing import Any

import jax.numpy as jnp
import numpy as np

from t5x_lite import errors
from t5x_lite.formatting import short_repr
from t5x_lite.storage import files

# Maximum size of files that are parsed at once; 100,000 arrays need a quarter of it.
MAX_TEXT_BYTES = 2**26
# Steps are 32-bit integers in T5X and JAX.
MAX_STEP = 2**31 - 1
# Limits of TensorStore.
_MAX_RANK = 32
_MAX_ARRAY_BYTES = 2**63 - 1
# Maximum ratio of compression. Orbax uses zstd, whose longest runs have 128 KiB.
MAX_COMPRESSION = {None: 1, 'gzip': 1032, 'zlib': 1032, 'zstd': 2**15, 'blosc': 2**15, 'bz2': 2**20}
_DTYPE_RE = re.compile(r'[<>|=]?[a-z]+\d*(_[a-z0-9]+)*')


# ---- Numbers and names -----------------------------------------------------------------------------------------------


def is_count(value: Any, at_most: int | None = None) -> bool:
  """Return True if `value` is an integer >= 0 and, if given, <= `at_most`; bools are invalid."""
  return type(value) is int and value >= 0 and (at_most is None or value <= at_most)


def shape_problem(value: Any) -> str | None:
  """Return why `value` from a file is not a valid shape of an array, or None."""
  if not isinstance(value, list | tuple) or not all(map(is_count, value)):
    return f'must be a list of integers >= 0, got {shorten(value)}'
  if len(value) > _MAX_RANK:
    return f'must have at most {_MAX_RANK} dims, got {len(value)}'
  if math.prod(size or 1 for size in value) > _MAX_ARRAY_BYTES // 16:
    return f'must be that of an array of fewer than 2**63 bytes, got {shorten(value)}'
  return None


def parse_dtype(value: Any) -> np.dtype | None:
  """Return the numeric dtype with the name `value`, in the byte order of this machine, or None."""
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
  """Return why `value` is not a valid relative path of a file, or None."""
  if not isinstance(value, str) or not value:
    return f'must be a relative path, got {shorten(value)}'
  has_dots = any(part in ('', '.', '..') for part in value.split('/'))
  if has_dots or '\\' in value or not value.isprintable():
    return f"must be a relative path without '..', '.', '\\' and control characters, got {shorten(value)}"
  return None


def shorten(value: Any) -> str:
  """Return a short text of a value, for a message."""
  if isinstance(value, int) and abs(value) >= 10**30:
    return 'a number of more than 30 digits'
  return short_repr(value, limit=80)


# ---- Files -----------------------------------------------------------------------------------------------------------


def file_problem(root: files.Path, name: str) -> str | None:
  """Return why the file `name` of the folder `root` must not be opened, or None.

  It must not be outside of the folder, a device or a pipe. Links of a Hugging Face cache are allowed: the folder may be
  a snapshot, whose files link to `blobs`.
  """
  if files.is_remote(root):  # a store has neither links nor devices
    return None
  path = root / name
  base = os.path.realpath(root)
  real = os.path.realpath(path)
  parent = os.path.dirname(base)
  grandparent = os.path.dirname(parent)
  allowed = (base, os.path.join(parent, 'blobs'), os.path.join(grandparent, 'blobs'))
  is_inside = any(real == folder or real.startswith(folder + os.sep) for folder in allowed)
  if not is_inside:
    return f'{name} is a link to a file outside of the folder, {real!r}'
  try:
    mode = os.stat(path).st_mode
  except OSError:
    return None
  if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
    return None
  return f'{name} is neither a file nor a folder'


def check_file(root: files.Path, name: str) -> files.Path:
  """Return the path of the file `name` of the folder `root`.

  Raises:
    CheckpointError: see `file_problem`.
  """
  problem = file_problem(root, name)
  if problem is not None:
    raise errors.CheckpointError(
      f'{str(root)!r} is invalid: {problem}. Replace it by a copy of the file.'
    )
  return root / name


def read_regular(path: files.Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
  """Return the content of a file of at most `max_bytes`.

  Raises:
    InvalidFileError: it is larger, or not a regular file; a link to a regular file is valid.
    OSError: it cannot be read.
  """
  if files.is_remote(path):
    files.check_size(path, path.stat().st_size, max_bytes)
    return path.read_bytes()
  opener = functools.partial(files.open_to_read, max_bytes=max_bytes)
  with open(path, 'rb', opener=opener) as file:
    return file.read(os.fstat(file.fileno()).st_size)


def read_limited(root: files.Path, name: str) -> bytes:
  """Return the content of the file `name` of the folder `root`.

  Raises:
    CheckpointError: see `read_regular` and `check_file`.
    OSError: it cannot be read.
  """
  return read_regular(check_file(root, name))


def parse_object(content: bytes, path: str, remedy: str = 'Download it again.') -> dict[str, Any]:
  """Return the JSON object in `content`, the bytes of the file `path`.

  Args:
    content: the bytes.
    path: name of the file, for the error message.
    remedy: sentence at the end of the error message.

  Raises:
    CheckpointError: the bytes are not a JSON object in UTF-8.
  """
  try:
    value = json.loads(content.decode('utf-8', errors='replace'))
  except (ValueError, RecursionError) as error:
    problem = f'invalid JSON ({error})'
  else:
    if isinstance(value, dict):
      return value
    problem = f'a {type(value).__name__}'
  raise errors.CheckpointError(f'{path} must hold a JSON object, got {problem}. {remedy}')


def walk(root: files.Path, folder: str = '') -> dict[str, int]:
  """Return path relative to `root` -> size in bytes, of each file, link and special file below `root / folder`.

  Links to folders are not followed; a link to a file has the size of the file, or 0 if there is none. A missing folder
  yields an empty result.
  """
  if files.is_remote(root):
    objects = (root / folder).find()
    if not folder:
      return objects
    return {f'{folder}/{name}': size for name, size in objects.items()}
  found = {}
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
        try:
          found[name] = entry.stat().st_size
        except OSError:
          found[name] = 0
  return found


def tree_problem(root: files.Path, folder: str) -> str | None:
  """Return the first problem, see `file_problem`, of `folder` in `root` and of all files below it, or None."""
  if files.is_remote(root):
    return None
  if folder:
    problem = file_problem(root, folder)
    if problem is not None:
      return problem
  for name in walk(root, folder):
    if not stat.S_ISREG(os.lstat(root / name).st_mode):
      problem = file_problem(root, name)
      if problem is not None:
        return problem
  return None


def tree_bytes(root: files.Path) -> int:
  """Return the number of bytes of all files below `root`."""
  return sum(walk(root).values())


def num_bytes(shape: Any, dtype: np.dtype) -> int:
  """Return the size of an array in bytes, however large."""
  return math.prod(shape) * dtype.itemsize
