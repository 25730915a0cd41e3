"""T5X's native format: a msgpack index `checkpoint`, and a zarr 2 folder for each array that is not in the index."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
import functools
import json
import math
import os
from typing import Any
import uuid

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors
from t5x_lite import files
from t5x_lite import multihost
from t5x_lite import untrusted
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.sources import base
from t5x_lite.checkpoints.sources import t5x_index
from t5x_lite.formatting import printable

_COMPRESSOR = {'id': 'gzip', 'level': 1}
_MAX_CHUNK_BYTES = 64 * 2**20
_STATE_IN_INDEX = ('v_row', 'v_col')
_NUM_PROBLEMS_SHOWN = 3


class T5xNativeSource(base.StateSource):
  """A checkpoint of T5X in its native format, read with TensorStore.

  zarr reads a missing chunk as zeros; here a missing chunk is an error.
  """

  format = 't5x'
  title = 'T5X checkpoint'
  description = 'a checkpoint of T5X (a file `checkpoint` with folders target.*)'
  index_files = (t5x_index.FILENAME,)

  @classmethod
  def is_stored_in(cls, root: files.Path) -> bool:
    """See `StateSource.is_stored_in`."""
    index = root / t5x_index.FILENAME
    if index.is_file() and t5x_index.begins_like_index(index):
      return True
    return any(root.glob('target.*/.zarray'))

  def __init__(self, path: str | os.PathLike[str]):
    super().__init__(path)
    self._root = files.path(path).absolute()
    self._context = array_io.context_of(self._root)
    self._problems: dict[str, str | None] = {}
    self._entries = t5x_index.read(self._root)
    self._shapes = {
      name: jax.ShapeDtypeStruct(tuple(entry.shape), entry.dtype)
      for name, entry in self._entries.items()
    }

  def shapes(self) -> base.Shapes:
    """See `StateSource.shapes`."""
    return self._shapes

  @functools.cached_property
  def _sizes_in_store(self) -> dict[str, dict[str, int]]:
    """Folder -> name -> size of each file, from a single listing."""
    sizes: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for path, size in untrusted.walk(self._root).items():
      folder, _, name = path.partition('/')
      sizes[folder][name] = size
    return sizes

  def verify(self) -> bool:
    """Check that the folder, the description and all chunks of every array exist; reads no values."""
    stored = {
      entry.folder: entry for entry in self._entries.values() if not isinstance(entry, np.ndarray)
    }
    folders = [self._root / name for name in stored]
    found = files.each(lambda folder: self._problem(stored[folder.name]), folders)
    problems = [problem for problem in found if problem is not None]
    if multihost.any_process(bool(problems)):
      if not problems:
        raise errors.of_other_process(self._damaged('see the message of another process'))
      shown = '; '.join(map(printable, problems[:_NUM_PROBLEMS_SHOWN]))
      more = len(problems) - _NUM_PROBLEMS_SHOWN
      if more > 0:
        shown += f'; and {more} more'
      raise self._damaged(shown)
    return super().verify()

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource.read_array`."""
    entry = self._entries[name]
    if isinstance(entry, np.ndarray):
      return entry
    import tensorstore  # takes 0.1 s

    spec = {
      'driver': 'zarr',
      'kvstore': array_io.kvstore(self._root / entry.folder),
      'fill_missing_data_reads': False,
    }
    problem = self._problem(entry)
    if problem is not None:
      raise self._damaged(problem)
    try:
      array = tensorstore.open(spec, open=True, read=True, context=self._context).result()
      value = np.asarray(array.read().result())
    except Exception as e:  # for damaged files, TensorStore raises ValueError and other exceptions
      problem = f'{entry.folder} cannot be read ({str(e)[:300]})'
      raise self._damaged(problem) from e
    if value.dtype == np.uint16:
      return value.view(jnp.bfloat16)
    return value

  def _problem(self, entry: t5x_index.StoredArray) -> str | None:
    """Return the first problem of an array's files, or None; reads no values. In a store it is found once."""
    if not files.is_remote(self._root):
      return self._find_problem(entry)
    if entry.folder not in self._problems:
      self._problems[entry.folder] = self._find_problem(entry)
    return self._problems[entry.folder]

  def _find_problem(self, entry: t5x_index.StoredArray) -> str | None:
    folder = self._root / entry.folder
    link = untrusted.tree_problem(self._root, entry.folder)
    if link is not None:
      return link
    try:
      described = json.loads(untrusted.read_limited(folder, '.zarray'))
      shape = described['shape']
      chunks = described['chunks']
      compressor = described.get('compressor')
      separator = described.get('dimension_separator', '.')
      codec = None if compressor is None else compressor['id']
      max_compression = untrusted.MAX_COMPRESSION[codec]
    except FileNotFoundError:
      return f'{entry.folder}/.zarray is missing'
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
      return f'{entry.folder}/.zarray cannot be read ({type(e).__name__}: {str(e)[:100]})'
    for field, value in (('shape', shape), ('chunks', chunks)):
      if (problem := untrusted.shape_problem(value)) is not None:
        return f'in {entry.folder}/.zarray, {field} {problem}'
    if len(chunks) != len(shape) or 0 in chunks or separator not in ('.', '/'):
      return (
        f'in {entry.folder}/.zarray, chunks must be a size above 0 for each dim of {shape}, and '
        f"dimension_separator '.' or '/', got {chunks} and {untrusted.shorten(separator)}"
      )
    dtype = _dtype(described)
    if dtype is None or tuple(shape) != entry.shape or dtype != entry.dtype:
      return (
        f'{entry.folder} holds {described.get("dtype")} of shape {tuple(shape)}, but the index has {entry.dtype} '
        f'of shape {entry.shape}'
      )
    if files.is_remote(self._root):
      sizes = self._sizes_in_store[entry.folder]
    else:
      found = untrusted.walk(self._root, entry.folder)
      sizes = {name.removeprefix(f'{entry.folder}/'): size for name, size in found.items()}
    num_bytes = untrusted.num_bytes(chunks, dtype)
    for name in _chunk_names(shape, chunks, separator):
      if name not in sizes:
        return f'the chunk {entry.folder}/{name} is missing'
      if num_bytes > sizes[name] * max_compression:
        return (
          f'{entry.folder} cannot be read (chunks in .zarray must fit into the files, got {chunks} and a file '
          f'{name} of {sizes[name]} bytes)'
        )
    return None

  def _damaged(self, what: str) -> errors.CheckpointDamagedError:
    return errors.CheckpointDamagedError(
      f'The checkpoint {self.path!r} is damaged: {what}. Copy it again, or restore another checkpoint.'
    )


class T5xNativeWriter:
  """Writer of a checkpoint in T5X's native format, one array at a time.

  Used as a context manager: the folder gets its name, by an atomic rename, when the block ends without an error. In an
  object store, which has no rename, the index is written last: without it, the folder is not a checkpoint.

      with T5xNativeWriter('converted/checkpoint_1000') as writer:
        for name in source.shapes():
          writer.write(name, source.read_array(name))
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Begin a checkpoint.

    Args:
      path: path of the new folder; T5X expects the name `checkpoint_<step>`.

    Raises:
      CheckpointError: the path exists.
      ConfigError: the path is neither local nor in an object store.
    """
    discovery.check_path(path, 'checkpoint to write')
    self._final = files.path(path).absolute()
    discovery.check_free(self._final)
    self._is_remote = files.is_remote(self._final)
    self._context = array_io.context_of(self._final)
    self._root = self._final
    if not self._is_remote:
      name = f'{self._final.name}{discovery.WRITING_INFIX}{uuid.uuid4().hex[:8]}'
      self._root = self._final.with_name(name)
    self._entries: dict[str, t5x_index.StoredArray | np.ndarray] = {}
    self._chunks: dict[str, tuple[int, ...]] = {}

  def __enter__(self) -> T5xNativeWriter:
    self._root.mkdir(parents=True)
    return self

  def write(self, name: str, array: Any) -> None:
    """Write one array.

    Args:
      name: '/'-joined name, such as `target/encoder/encoder_norm/scale`.
      array: array of any shape and a dtype that T5X supports: float32, bfloat16, float16, or integers except uint16.

    Raises:
      CheckpointError: the name was written before or is invalid, or the dtype is not supported.
      OSError: the array cannot be written.
    """
    array = np.asarray(array)
    folder = t5x_index.folder_name(name)
    is_number = jnp.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, np.floating)
    if name in self._entries or '..' in name or folder.startswith('.') or not all(name.split('/')):
      raise errors.CheckpointError(
        "The name of each array in a T5X checkpoint must be unique and have parts joined by '/', such as "
        f"'target/encoder/encoder_norm/scale', got {name!r}."
      )
    if not is_number or array.dtype == np.uint16:
      raise errors.CheckpointError(
        f'The array {name!r} of a T5X checkpoint must have a float or integer dtype other than uint16, which T5X '
        f'reads as bfloat16, got {array.dtype}. Convert the array to another dtype.'
      )
    if _is_in_index(name, array):
      self._entries[name] = array.copy()
      return
    self._chunks[name] = t5x_index.chunk_shape(array.shape, array.dtype.itemsize, _MAX_CHUNK_BYTES)
    spec = {
      'driver': 'zarr',
      'dtype': array.dtype.name,
      'store_data_equal_to_fill_value': True,
      'kvstore': array_io.kvstore(self._root / folder),
      'metadata': {'shape': array.shape, 'chunks': self._chunks[name], 'compressor': _COMPRESSOR},
    }
    import tensorstore  # see T5xNativeSource.read_array

    try:
      tensorstore.open(spec, create=True, context=self._context).result().write(array).result()
    except ValueError as e:
      raise OSError(f'{folder} could not be written: {e}') from e
    self._entries[name] = t5x_index.StoredArray(folder, array.shape, array.dtype)

  def __exit__(self, error_type, error, traceback) -> None:
    is_complete = False
    try:
      if error_type is None:
        t5x_index.write(self._root, self._entries, self._chunks, _COMPRESSOR)
        if not self._is_remote:
          files.fsync_tree(self._root)
          discovery.check_free(self._final)
          self._root.rename(self._final)
          files.fsync(self._final.parent)
        is_complete = True
    finally:
      if not is_complete:
        files.remove_tree(self._root, ignore_errors=True)


def _is_in_index(name: str, array: np.ndarray) -> bool:
  """Return True if T5X stores an array in its index.

  These are the arrays without axes: single numbers, placeholders, and the factors of Adafactor's statistics. zarr does
  not support arrays without elements.
  """
  if array.ndim == 0 or array.size == 0:
    return True
  if not name.startswith('state/'):
    return False
  return array.size == 1 or name.rsplit('/', 1)[-1] in _STATE_IN_INDEX


def _chunk_names(shape: Sequence[int], chunks: Sequence[int], separator: str) -> Iterator[str]:
  """Yield the names of the chunk files of an array, without a list of all of them."""
  counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
  for number in range(math.prod(counts)):
    index = []
    for count in reversed(counts):
      number, part = divmod(number, count)
      index.insert(0, str(part))
    yield separator.join(index) or '0'


def _dtype(described: Mapping[str, Any]) -> np.dtype | None:
  """Return the dtype in a .zarray file, bfloat16 for uint16."""
  dtype = untrusted.parse_dtype(described.get('dtype'))
  if dtype == np.uint16:
    return np.dtype(jnp.bfloat16)
  return dtype
