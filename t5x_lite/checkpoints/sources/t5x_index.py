"""Index of T5X's native format: the file `checkpoint`.

It is a msgpack map {'version', 'optimizer': nested dicts of the state}, serialised by Flax. A leaf is an array (if it
is small or no mesh axis divides it) or the TensorStore spec of a zarr array next to the index.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.formatting import printable
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

FILENAME = 'checkpoint'
VERSION = 3
# Arrays that T5X does not partition are in the index.
_MAX_BYTES = 2**30
# Version 2 writes bfloat16 as its bits, in uint16.
_VERSIONS_READ = (2, 3)
_SPEC_KEY = 'driver'
_KVSTORES = ('file', 'gcs', 'gfile')
_REMEDY = 'Copy the checkpoint again.'
# Only the first one is compared.
_FIRST_BYTES = 64


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """Description of an array that is stored next to the index.

  Attributes:
    folder: name of the array's folder in the checkpoint.
    shape: shape of the array.
    dtype: dtype of the array; bfloat16 for arrays written as uint16.
  """

  folder: str
  shape: tuple[int, ...]
  dtype: np.dtype


def begins_like_index(path: files.Path) -> bool:
  """Return True if a file begins like a msgpack map; TensorFlow's `checkpoint` files are text."""
  with untrusted.check_file(path.parent, path.name).open('rb', buffering=_FIRST_BYTES) as file:
    first = file.read(_FIRST_BYTES)
  return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def read(root: files.Path) -> dict[str, StoredArray | np.ndarray]:
  """Read the index of the checkpoint `root`.

  Returns:
    Name -> the array, or its description if it is stored next to the index.

  Raises:
    CheckpointDamagedError: the index is missing or damaged.
    CheckpointError: the version or an entry is not supported.
  """
  path = root / FILENAME
  try:
    content = untrusted.read_regular(untrusted.check_file(root, FILENAME), _MAX_BYTES)
    document: Any = flax.serialization.msgpack_restore(content)
    version = None
    if isinstance(document, Mapping) and 'optimizer' in document:
      version = document.get('version', 0)
    if isinstance(version, int) and version in _VERSIONS_READ:
      leaves = _leaves(document['optimizer'], path)
      return {name: _entry(name, leaf, path) for name, leaf in leaves.items() if leaf is not None}
  except errors.CheckpointError:
    raise
  except Exception as e:  # for damaged bytes, msgpack and NumPy raise exceptions of many types
    if isinstance(e, FileNotFoundError):
      problem = 'the file is missing'
    else:
      problem = f'{type(e).__name__}: {str(e)[:200]}'
    raise errors.CheckpointDamagedError(
      f'The index {str(path)!r} of a T5X checkpoint is damaged: it cannot be decoded ({problem}). {_REMEDY}'
    ) from e
  if version is not None:
    got = f'version {untrusted.shorten(version)}'
  elif isinstance(document, Mapping):
    got = f'{sorted(map(str, document))[:5]}'
  else:
    got = type(document).__name__
  raise errors.CheckpointError(
    f'{str(path)!r} must be an index of T5X, a map with the entries version (one of {_VERSIONS_READ}) and optimizer, '
    f'got {got}. Load the checkpoint with the program that wrote it and save it with T5X.'
  )


def _leaves(tree: Mapping[Any, Any], path: files.Path, prefix: str = '') -> dict[str, Any]:
  """Return the leaves by '/'-joined name; specs are leaves."""
  leaves = {}
  for key, value in tree.items():
    name = f'{prefix}{key}'
    problem = untrusted.name_problem(key) or ("must not contain '/'" if '/' in key else None)
    if problem is not None:
      raise errors.CheckpointError(
        f'The index {str(path)!r} cannot be read: the name {untrusted.shorten(name)} '
        f'{problem}. {_REMEDY}'
      )
    if isinstance(value, Mapping) and not isinstance(value.get(_SPEC_KEY), str):
      leaves |= _leaves(value, path, f'{name}/')
    else:
      leaves[name] = value
  return leaves


def _entry(name: str, leaf: Any, path: files.Path) -> StoredArray | np.ndarray:
  if isinstance(leaf, Mapping):
    return _stored_array(name, leaf, path)
  is_int = isinstance(leaf, int) and not isinstance(leaf, bool)
  try:
    array = np.asarray(leaf, np.int32 if is_int else None)
  except (ValueError, OverflowError):  # lists of unequal lengths, and integers of more than 32 bits
    array = np.asarray('')
  if array.dtype != np.bool_ and not jnp.issubdtype(array.dtype, jnp.number):
    raise errors.CheckpointError(
      f'{str(path)!r}: the entry {name} must be an array or the spec of an array, got {untrusted.shorten(leaf)}. '
      'Save the checkpoint again with T5X.'
    )
  return array


def _stored_array(name: str, spec: Mapping[str, Any], path: files.Path) -> StoredArray:
  problem = None
  kind = errors.CheckpointDamagedError
  try:
    kvstore = spec['kvstore']
    driver = spec[_SPEC_KEY]
    parts = [part for part in f'{kvstore["path"]}/{spec.get("path", "")}'.split('/') if part]
    shape = spec['metadata']['shape']
    dtype = untrusted.parse_dtype(spec['dtype'])
    if (shape_problem := untrusted.shape_problem(shape)) is not None:
      problem = f'shape {shape_problem}'
    elif dtype is None:
      problem = (
        f'dtype must be the name of a dtype of numbers, got {untrusted.shorten(spec["dtype"])}'
      )
    # Paths in published checkpoints are those of the original machine; only the folder in this checkpoint is read.
    elif (
      driver != 'zarr'
      or kvstore['driver'] not in _KVSTORES
      or '..' in parts
      or not parts
      or parts[-1] != folder_name(name)
    ):
      kind = errors.CheckpointError
      problem = (
        f'the drivers must be zarr and one of {", ".join(_KVSTORES)}, and the folder {folder_name(name)!r} of '
        f'this checkpoint, got {driver!r}, {kvstore["driver"]!r} and {kvstore["path"]!r}'
      )
  except (KeyError, TypeError, AttributeError) as e:
    problem = f'{type(e).__name__}: {e}'
  if problem is not None:
    raise kind(
      f'The index {str(path)!r} cannot be read: in the spec of {name}, {printable(problem)}. {_REMEDY}'
    )
  return StoredArray(
    parts[-1], tuple(shape), np.dtype(jnp.bfloat16) if dtype == np.uint16 else np.dtype(dtype)
  )


def folder_name(name: str) -> str:
  """Return the name that T5X gives the folder of an array.

  >>> folder_name('target/encoder/encoder_norm/scale')
  'target.encoder.encoder_norm.scale'
  """
  return name.replace('/', '.')


def chunk_shape(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> tuple[int, ...]:
  """Return a shape of chunks that divide an array of `shape` evenly.

  Args:
    shape: shape of the array.
    itemsize: bytes per element.
    max_bytes: limit for a chunk in bytes; exceeded only if the dims cannot be divided.

  >>> chunk_shape((64, 16), 4, 2048)
  (32, 16)
  """
  chunks = list(shape)
  while chunks and math.prod(chunks) * itemsize > max_bytes and max(chunks) > 1:
    dim = chunks.index(max(chunks))
    divisor = next(
      (d for d in range(2, math.isqrt(chunks[dim]) + 1) if chunks[dim] % d == 0), chunks[dim]
    )
    chunks[dim] //= divisor
  return tuple(chunks)


def write(
  root: files.Path,
  entries: Mapping[str, StoredArray | np.ndarray],
  chunks: Mapping[str, tuple[int, ...]],
  compressor: Mapping[str, Any],
) -> None:
  """Write the index of the checkpoint `root`, byte for byte like T5X.

  Args:
    root: folder of the checkpoint.
    entries: name -> the array, or its description if it is stored next to the index.
    chunks: name -> shape of the chunks, for arrays stored next to the index.
    compressor: zarr's description of the compressor of all chunks.
  """
  leaves = {}
  for name in sorted(entries, key=lambda name: name.split('/')):
    entry = entries[name]
    leaves[name] = (
      entry
      if isinstance(entry, np.ndarray)
      else {
        _SPEC_KEY: 'zarr',
        'dtype': np.dtype(entry.dtype).name,
        'kvstore': {'driver': 'file', 'path': f'{entry.folder}/'},
        'metadata': {
          'chunks': list(chunks[name]),
          'compressor': dict(compressor),
          'shape': list(entry.shape),
        },
      }
    )
  document = {'version': VERSION, 'optimizer': tree_utils.unflatten_dict(leaves)}
  files.write(
    root / FILENAME, flax.serialization.msgpack_serialize(document, in_place=True), durable=False
  )
