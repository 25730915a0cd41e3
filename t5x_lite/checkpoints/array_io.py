"""Writing arrays, and reading them in object stores, with TensorStore in the format of Orbax, which reads them too.

Orbax itself has no driver for s3://, and lists and renames folders where a store has none. After a failed write its
threads keep a process alive for minutes. With several processes each writes a separate database (OCDBT), and `merge`
combines them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import errno
import json
import math
import os
import pathlib
import re
import time
from typing import Any

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite.storage import files
from t5x_lite.storage import plain_paths
from t5x_lite.storage import untrusted

_INDEX = '_METADATA'
_DATABASE = 'manifest.ocdbt'
# Orbax takes a folder on gs:// for incomplete without it.
_COMMITTED = 'commit_success.txt'
# Larger arrays are divided into chunks, so that a process that needs a part of an array reads little more.
_MAX_CHUNK_BYTES = 2**26
# Arrays that are read or copied to the host at a time.
_GROUP_BYTES = 2**30
# Links to the open files and folders of this process; Linux only.
_OPEN_FILES = pathlib.Path('/proc/self/fd')
# Orbax's options of a database: metadata of arrays, and small parts of them, are in the index, which has few nodes. The
# index is not compressed, so that the files of a state have at least the bytes of its arrays, as its manifest expects.
_DATABASE_OPTIONS = {
  'max_inline_value_bytes': 1024,
  'max_decoded_node_bytes': 100_000_000,
  'compression': None,
}
# Time between two looks at whether a store is in an outage.
_POLL_SECONDS = 1.0
# Types of keys in Orbax's index.
_KEY_OF_DICT = 2


@dataclasses.dataclass(frozen=True)
class HostParts:
  """The arrays of a state, and the parts of them that this process writes.

  Attributes:
    arrays: name -> (shape, dtype, shape of chunks) of each array.
    parts: name -> (index, values in host memory) of each part.
  """

  arrays: Mapping[str, tuple[tuple[int, ...], np.dtype, tuple[int, ...]]]
  parts: Mapping[str, list[tuple[Any, np.ndarray]]]


def host_parts(flat_state: Mapping[str, jax.Array | np.ndarray]) -> HostParts:
  """Return copies, in host memory, of what this process writes of a state.

  The buffers of the state may be donated to the next training step while the copies are written.
  """
  copies = {name: _begin_copies(leaf) for name, leaf in flat_state.items()}  # all in parallel
  jax.block_until_ready(copies)
  arrays = {}
  parts = {}
  for name, leaf in flat_state.items():
    arrays[name] = (tuple(leaf.shape), np.dtype(leaf.dtype), _chunk_shape(leaf))
    parts[name] = [(index, np.asarray(copy)) for index, copy in copies[name]]
  return HostParts(arrays, parts)


def _begin_copies(leaf: jax.Array | np.ndarray) -> list[tuple[Any, jax.Array | np.ndarray]]:
  """Return (index, copy) of the parts of an array that this process writes, one of each replicated part."""
  if not isinstance(leaf, jax.Array):
    if jax.process_index() == 0:
      return [((), np.array(leaf))]
    return []
  copies = []
  for shard in leaf.addressable_shards:
    if shard.replica_id:
      continue
    if shard.device.platform == 'cpu':
      copy = jax.device_put(shard.data, shard.data.sharding, may_alias=False)
    else:
      copy = shard.data
      copy.copy_to_host_async()
    copies.append((shard.index, copy))
  return copies


def write_parts(directory: files.Path, state: HostParts) -> None:
  """Write the parts of this process, and in the lead process the index; with several processes `merge` follows.

  Raises:
    OSError: they cannot be written, e.g. because the disk is full. On a disk nothing is written any more; requests to a
      store in an outage may still be repeated.
  """
  import tensorstore  # takes 0.1 s

  context = context_of(directory)  # one, so that the writes of all arrays are committed together
  transaction = None
  if not files.is_remote(directory):  # a store gets several files at a time
    transaction = tensorstore.Transaction()  # each commit writes the index
  with _fixed(directory) as fixed:
    base = _new_database(fixed, jax.process_index(), jax.process_count())
    arrays = {
      name: _opened(base, name, *state.arrays[name], context, transaction)
      for name, parts in state.parts.items()
      if parts
    }
    arrays = _results(arrays, directory)
    writes = [
      (array[index] if index else array).write(values, can_reference_source_data_indefinitely=True)
      for name, array in arrays.items()
      for index, values in state.parts[name]
    ]
    _wait_for(writes, directory)
    if transaction is not None:
      _wait_for([transaction.commit_async()], directory)
  if jax.process_index() == 0:
    _write_index(directory, state.arrays)


@contextlib.contextmanager
def _fixed(directory: files.Path) -> Iterator[files.Path]:
  """Yield a path of a folder that leads to the same folder if one above it is renamed meanwhile.

  TensorStore makes missing folders. After a rename it would make them again under the former path, or write below
  another run's folder that has taken the path.
  """
  if files.is_remote(directory) or not _OPEN_FILES.is_dir():
    yield directory
    return
  fd = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    yield _OPEN_FILES / str(fd) / directory.name
  finally:
    os.close(fd)


def _results(opened: Mapping[str, Any], directory: files.Path) -> dict[str, Any]:
  _wait_for(list(opened.values()), directory)
  return {name: future.result() for name, future in opened.items()}


def _wait_for(writes: Sequence[Any], directory: files.Path) -> None:
  with _explained(directory):
    failed = [error for write in writes if (error := _error_of(write, directory)) is not None]
    if failed:  # all have ended
      raise failed[0]


def _error_of(write: Any, directory: files.Path) -> BaseException | None:
  """Return the error of a finished write, or None; raise OSError in an outage of the store that is too long."""
  if not files.is_remote(directory):
    return write.exception()
  from t5x_lite.storage import object_store

  while True:
    try:
      return write.exception(timeout=_POLL_SECONDS)
    except TimeoutError:
      # The limit may be shorter than when TensorStore, which keeps its own, began to repeat the request.
      if object_store.is_in_outage(directory):
        raise object_store.StoreUnavailableError(
          errno.EIO, 'the store did not answer', str(directory)
        ) from None


def write_one_by_one(
  directory: files.Path, arrays: Mapping[str, Any], read_fn: Callable[[str], np.ndarray]
) -> None:
  """Write arrays that are read when their turn comes.

  Args:
    directory: folder of the state.
    arrays: name -> object with `shape` and `dtype`.
    read_fn: function from a name to the array.
  """
  shapes = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in arrays.items()}
  context = context_of(directory)
  with _fixed(directory) as fixed:
    base = _new_database(fixed, 0, 1)
    # Together, because each commit of the database takes several requests.
    opened = _results(
      {
        name: _opened(base, name, shape, dtype, _halved(shape, dtype), context)
        for name, (shape, dtype) in shapes.items()
      },
      directory,
    )
    writes = []
    num_bytes = 0
    try:
      for name, array in opened.items():
        values = read_fn(name)
        writes.append(array.write(values))
        num_bytes += values.nbytes
        if num_bytes > _MAX_CHUNK_BYTES:
          _wait_for(writes, directory)
          writes = []
          num_bytes = 0
    finally:  # nothing is written after an error
      for write in writes:
        write.exception()
    _wait_for(writes, directory)
  _write_index(directory, shapes)


def part_of(directory: files.Path, process_index: int) -> files.Path:
  """Return the folder of the arrays of a process."""
  return directory / f'ocdbt.process_{process_index}'


def merge(directory: files.Path) -> None:
  """Make one database of those that all processes wrote by `write_parts`; only in the lead process."""
  num_processes = jax.process_count()
  if num_processes == 1:
    return
  import tensorstore  # takes 0.1 s

  context = context_of(directory)  # only databases of one context can be copied to each other
  with _fixed(directory) as fixed, _explained(directory):
    target = tensorstore.KvStore.open(_new_database(fixed, 0, 1), context=context).result()
    with tensorstore.Transaction() as transaction:
      copies = [
        tensorstore.KvStore.open(_database(fixed, i, num_processes), context=context)
        .result()
        .experimental_copy_range_to(target.with_transaction(transaction))
        for i in range(num_processes)
      ]
      for copy in copies:
        copy.result()


def list_complete(root: files.Path, state: files.Path) -> list[str]:
  """Return the names of the files below the folder of a checkpoint, when the listing has those of its arrays.

  Args:
    root: the folder, in a store.
    state: folder of the arrays below it.

  Raises:
    CheckpointError: for `object_store.retry_seconds(root)` the listing lacked a file that the database names.
  """
  from t5x_lite.storage import object_store

  assert files.is_remote(root)
  folder = state.relative_to(root)
  names = (_INDEX, _DATABASE, *_files_of_database(state))
  needed = {f'{folder}/{name}' for name in names}
  deadline = time.monotonic() + object_store.retry_seconds(root)
  pause = 0.5
  while True:
    found = root.find()
    missing = sorted(needed - found.keys())
    if not missing:
      return list(found)
    if time.monotonic() > deadline:
      raise errors.CheckpointError(
        f'the list of files below {str(root)!r} lacks {missing[0]!r}, which was written'
      )
    time.sleep(pause)
    pause = min(2 * pause, 10)


def read_shapes(
  directory: files.Path, names: Iterable[str] | None = None
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, dict[str, Sequence[int]]]]:
  """Return the shape and dtype of stored arrays by name, and the shapes of their chunks by name.

  Args:
    directory: folder with an Orbax PyTree.
    names: names to look up, which need not exist; None for all names in the index.

  Raises:
    Exception: of many types, for damaged files.
  """
  stored = _Stored(directory)
  names = list(stored.names if names is None else names)
  found = {
    name: entry
    for name, entry in zip(names, stored.entries(names), strict=True)
    if entry is not None
  }
  shapes = {
    name: jax.ShapeDtypeStruct(
      checked_shape(entry['shape']),
      checked_dtype(entry['data_type'] if stored.is_zarr3 else entry['dtype']),
    )
    for name, entry in found.items()
  }
  return shapes, {
    name: chunks_of(entry) if stored.is_zarr3 else {'chunks': checked_shape(entry['chunks'])}
    for name, entry in found.items()
  }


def read_arrays(
  directory: files.Path,
  wanted: Mapping[str, tuple[Any, jax.sharding.Sharding | None]],
) -> dict[str, jax.Array | np.ndarray]:
  """Read the named arrays; see `state_io.read_arrays`."""
  stored = _Stored(directory)
  arrays = {name: stored.open(name) for name in wanted}
  result = {}
  group = {}
  num_bytes = 0
  for name, (dtype, sharding) in wanted.items():
    array = arrays[name].result()
    group[name] = _Read(array, np.dtype(dtype), sharding)
    num_bytes += group[name].num_bytes
    if num_bytes > _GROUP_BYTES:
      result |= {name: read.result() for name, read in group.items()}
      group = {}
      num_bytes = 0
  return result | {name: read.result() for name, read in group.items()}


def checked_shape(value: Any) -> tuple[int, ...]:
  """Return a shape from a file as a tuple; raises ValueError if it is invalid."""
  if problem := untrusted.shape_problem(value):
    raise ValueError(f'a shape {problem}')
  return tuple(value)


def checked_dtype(value: Any) -> np.dtype:
  """Return the dtype that a file names; raises ValueError if it is not numeric."""
  if (dtype := untrusted.parse_dtype(value)) is None:
    raise ValueError(
      f'data_type must be the name of a numeric dtype, got {untrusted.shorten(value)}'
    )
  return dtype


def chunks_of(entry: Mapping[str, Any]) -> dict[str, Sequence[int]]:
  """Return the shapes of chunks in the metadata of an array of zarr 3, by name."""
  # A chunk of the grid is divided into smaller ones by the codec 'sharding_indexed'.
  return {
    f'chunk_shape {i}': checked_shape(part['configuration']['chunk_shape'])
    for i, part in enumerate([entry['chunk_grid'], *entry['codecs']])
    if 'chunk_shape' in part.get('configuration', {})
  }


class _Stored:
  """Arrays of a folder in any of Orbax's forms: one database or a folder for each array, zarr 2 or 3."""

  def __init__(self, directory: files.Path):
    import tensorstore

    self._index = json.loads(untrusted.read_limited(directory, _INDEX))
    self.is_zarr3 = bool(self._index.get('use_zarr3', False))
    has_database = (directory / _DATABASE).is_file()
    if has_database:
      self._base = _database(directory, 0, 1)
    else:
      self._base = kvstore(directory)
    self._context = context_of(directory)
    self._kvstore = tensorstore.KvStore.open(self._base, context=self._context).result()

  @property
  def names(self) -> list[str]:
    """'/'-joined names of all arrays."""
    return [
      '/'.join(str(key['key']) for key in entry['key_metadata'])
      for entry in self._index['tree_metadata'].values()
      if not entry.get('value_metadata', {}).get('skip_deserialize', False)
    ]

  def entries(self, names: Sequence[str]) -> list[dict[str, Any] | None]:
    """Return the metadata of each array; None for one that does not exist."""
    file = 'zarr.json' if self.is_zarr3 else '.zarray'
    reads = [self._kvstore.read(f'{_key(name)}/{file}') for name in names]
    return [
      json.loads(read.value) if read.state == 'value' else None
      for read in (r.result() for r in reads)
    ]

  def open(self, name: str) -> Any:
    """Return the future of an array."""
    import tensorstore

    return tensorstore.open(
      {
        'driver': 'zarr3' if self.is_zarr3 else 'zarr',
        'kvstore': self._kvstore.spec().to_json() | {'path': f'{_key(name)}/'}
        if 'base' in self._base
        else self._base | {'path': f'{self._base["path"]}{_key(name)}/'},
      },
      context=self._context,
      read=True,
      open=True,
    )


class _Read:
  """Parts of an array for the devices of this process, being read."""

  def __init__(self, array: Any, dtype: np.dtype, sharding: jax.sharding.Sharding | None):
    self._shape = tuple(array.shape)
    self._dtype = dtype
    self._sharding = sharding
    self._parts: dict[str, Any] = {}
    if sharding is None:
      indices = [()]
    else:
      indices = sharding.addressable_devices_indices_map(self._shape).values()
    for index in indices:
      if str(index) not in self._parts:
        self._parts[str(index)] = array[index].read() if index else array.read()
    if sharding is None:
      share = 1
    else:
      share = math.prod(sharding.shard_shape(self._shape)) / max(1, math.prod(self._shape))
    self.num_bytes = int(math.prod(self._shape) * dtype.itemsize * share * len(self._parts))

  def result(self) -> jax.Array | np.ndarray:
    """Wait for the parts and return the array."""
    values = {
      key: np.asarray(part.result()).astype(self._dtype, copy=False)
      for key, part in self._parts.items()
    }
    if self._sharding is None:
      return values['()']
    return jax.make_array_from_callback(
      self._shape, self._sharding, lambda index: values[str(index)]
    )


def _chunk_shape(leaf: jax.Array | np.ndarray) -> tuple[int, ...]:
  if isinstance(leaf, jax.Array):
    shape = leaf.sharding.shard_shape(leaf.shape)
  else:
    shape = leaf.shape
  return _halved(tuple(shape), np.dtype(leaf.dtype))


def _halved(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
  """Return the shape of chunks of at most `_MAX_CHUNK_BYTES`, as far as halving the first even dims gives one."""
  chunk = list(shape)
  while untrusted.num_bytes(chunk, dtype) > _MAX_CHUNK_BYTES and (
    even := [i for i, n in enumerate(chunk) if not n % 2]
  ):
    chunk[even[0]] //= 2
  return tuple(chunk)


def _write_index(directory: files.Path, names: Iterable[str]) -> None:
  tree = {}
  for name in names:
    keys = name.split('/')
    tree[str(tuple(keys))] = {
      'key_metadata': [{'key': key, 'key_type': _KEY_OF_DICT} for key in keys],
      'value_metadata': {'value_type': 'np.ndarray', 'skip_deserialize': False},
    }
  files.write(
    directory / _INDEX,
    json.dumps(
      {
        'tree_metadata': tree,
        'use_ocdbt': True,
        'use_zarr3': True,
        'store_array_data_equal_to_fill_value': True,
        'custom_metadata': None,
      },
      separators=(',', ':'),
    ),
  )
  files.write(
    directory / _COMMITTED,
    'The arrays are complete; manifest.json of the checkpoint is written last.\n',
  )


def _opened(
  base: Mapping[str, Any],
  name: str,
  shape: Sequence[int],
  dtype: np.dtype,
  chunk: Sequence[int],
  context: Any,
  transaction: Any = None,
) -> Any:
  """Return the future of a new array, as Orbax stores it without compression."""
  import tensorstore

  return tensorstore.open(
    {
      'driver': 'zarr3',
      'kvstore': {**base, 'path': f'{_key(name)}/'},
      'store_data_equal_to_fill_value': True,
      'metadata': {
        'shape': list(shape),
        'data_type': np.dtype(dtype).name,
        'fill_value': False if dtype == np.bool_ else 0,
        'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': list(chunk)}},
        'codecs': [
          {'name': 'bytes', 'configuration': {'endian': 'little'}}
          if dtype.itemsize > 1
          else {'name': 'bytes'}
        ],
      },
    },
    context=context,
    transaction=transaction,
    create=True,
    open=True,
  )


def _files_of_database(directory: files.Path) -> set[str]:
  """Return the names of the files below `directory` to which its database refers."""
  import tensorstore

  found = set()
  with _explained(directory):
    base = tensorstore.KvStore.open(kvstore(directory), context=context_of(directory)).result()
    newest = tensorstore.ocdbt.dump(base).result()['versions'][-1]
    if 'location' in newest['root']:
      nodes = [newest['root']['location']]
    else:
      nodes = []
    while nodes:
      place = nodes.pop()
      found.add(_file_of(place))
      for entry in tensorstore.ocdbt.dump(base, place).result()['entries']:
        if 'indirect_value' in entry:
          found.add(_file_of(entry['indirect_value']))
        elif 'location' in entry:
          nodes.append(entry['location'])
  return found


def _file_of(place: str) -> str:
  """Return the file of a place in a database, '<kind>:<prefix>:<name>:<offset>:<length>'."""
  _, prefix, name, _, _ = place.split(':')
  return prefix + name


def _key(name: str) -> str:
  """Return the name of an array in Orbax's format."""
  return name.replace('/', '.')


def kvstore(directory: files.Path) -> dict[str, Any]:
  """Return TensorStore's specification of the store of a folder's files."""
  if _OPEN_FILES in directory.parents:  # see `_fixed`
    return {'driver': 'file', 'path': f'{directory}/'}
  if not files.is_remote(directory):
    # TensorStore rejects '..'.
    resolved = plain_paths.plain_path(os.path.realpath(directory))
    return {'driver': 'file', 'path': f'{resolved}/'}
  from t5x_lite.storage import object_store

  return object_store.kvstore_spec(directory)


def _database(directory: files.Path, process_index: int, num_processes: int) -> dict[str, Any]:
  if num_processes == 1:
    folder = directory
  else:
    folder = part_of(directory, process_index)
  return {'driver': 'ocdbt', 'base': kvstore(folder)}


def _new_database(directory: files.Path, process_index: int, num_processes: int) -> dict[str, Any]:
  return {**_database(directory, process_index, num_processes), 'config': _DATABASE_OPTIONS}


def context_of(directory: files.Path) -> Any:
  """Return a context of TensorStore that repeats requests, if the folder is in an object store."""
  import tensorstore

  if not files.is_remote(directory):
    return tensorstore.Context()
  from t5x_lite.storage import object_store

  return tensorstore.Context(object_store.kvstore_context(directory))


class _explained:
  """Raises OSError instead of the exceptions of TensorStore, which are ValueErrors of many meanings."""

  def __init__(self, directory: files.Path):
    self._directory = directory

  def __enter__(self) -> None:
    return None

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if isinstance(error, ValueError | RuntimeError | NotImplementedError):
      text = ' '.join(str(error).partition('[tensorstore_spec')[0].split())[:500]
      # A path of `_fixed` says nothing to a reader.
      text = re.sub(rf'{_OPEN_FILES}/\d+', lambda _: str(self._directory.parent), text)
      raise OSError(errno.EIO, text, str(self._directory)) from error
