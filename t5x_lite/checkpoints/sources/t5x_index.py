"""The index of T5X's native form: what its file `checkpoint` says of each array.

It is a msgpack map {'version', 'optimizer': nested dicts of the state}, as Flax serialises it. A leaf is an array in
place (small ones, and those that no mesh axis divides) or a TensorStore spec of a zarr array beside the index.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors, tree_utils

FILENAME = 'checkpoint'
VERSION = 3
# Version 2 differs in how bfloat16 is written: as the bits, in uint16.
_VERSIONS_READ = (2, 3)
_SPEC_KEY = 'driver'
_KVSTORES = ('file', 'gcs', 'gfile')
_REMEDY = 'Copy the checkpoint anew from where it comes from.'


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """What the index says of an array that lies beside it.

  Attributes:
    folder: name of its folder in the checkpoint.
    shape: its dims.
    dtype: its dtype; bfloat16 for arrays that are written as uint16.
  """

  folder: str
  shape: tuple[int, ...]
  dtype: np.dtype


def begins_like_index(path: pathlib.Path) -> bool:
  """Returns whether a file begins like a msgpack map; TensorFlow's `checkpoint` files are text."""
  with path.open('rb') as file:
    first = file.read(1)
  return bool(first) and (0x80 <= first[0] <= 0x8f or first[0] in (0xde, 0xdf))


def read(root: pathlib.Path) -> dict[str, StoredArray | np.ndarray]:
  """Reads the index of the checkpoint `root`.

  Returns:
    Name -> the array, or where it lies.

  Raises:
    CheckpointDamagedError: the index is missing or is not what was written.
    CheckpointError: it is of a version, or has entries, that cannot be read.
  """
  path = root / FILENAME
  try:
    document = flax.serialization.msgpack_restore(path.read_bytes())
  except FileNotFoundError:
    raise errors.CheckpointDamagedError(
        f'{str(root)!r} has arrays in the form of T5X, but no index: its file {FILENAME!r} is missing. {_REMEDY}'
        ) from None
  except Exception as e:  # msgpack and NumPy raise many kinds for bytes that are not what they should be.
    raise errors.CheckpointDamagedError(
        f'The index {str(path)!r} is damaged: it cannot be decoded ({type(e).__name__}: {str(e)[:200]}). {_REMEDY}'
        ) from e
  if not isinstance(document, Mapping) or 'optimizer' not in document:
    raise errors.CheckpointError(
        f'{str(path)!r} is no index of T5X: expected a map with the entries version and optimizer, got '
        f'{sorted(map(str, document))[:5] if isinstance(document, Mapping) else type(document).__name__}. Checkpoints '
        'of Flax alone and those of Orbax before its file _METADATA have such files: load and save them with the '
        'program that wrote them.')
  version = document.get('version', 0)
  if version not in _VERSIONS_READ:
    raise errors.CheckpointError(
        f'{str(path)!r} is of version {version!r} of the form of T5X; expected one of {_VERSIONS_READ}. Save it anew '
        'with a T5X that reads it.')
  if not isinstance(document['optimizer'], Mapping):
    raise errors.CheckpointDamagedError(f"The index {str(path)!r} is damaged: its 'optimizer' is no map. {_REMEDY}")
  leaves = _leaves(document['optimizer'])
  return {name: _entry(name, leaf, path) for name, leaf in leaves.items() if leaf is not None}


def _leaves(tree: Mapping[Any, Any], prefix: str = '') -> dict[str, Any]:
  """Returns the leaves by '/'-joined name; specs are leaves."""
  leaves = {}
  for key, value in tree.items():
    name = f'{prefix}{key}'
    if isinstance(value, Mapping) and not isinstance(value.get(_SPEC_KEY), str):
      leaves |= _leaves(value, f'{name}/')
    else:
      leaves[name] = value
  return leaves


def _entry(name: str, leaf: Any, path: pathlib.Path) -> StoredArray | np.ndarray:
  if isinstance(leaf, Mapping):
    return _stored_array(name, leaf, path)
  array = np.asarray(leaf)
  if isinstance(leaf, int) and not isinstance(leaf, bool):
    array = array.astype(np.int32)
  if array.dtype.kind not in 'biufcV':
    raise errors.CheckpointError(
        f'{str(path)!r}: the entry {name} is {str(leaf)[:80]!r}; expected an array, or the spec of one that lies '
        'beside the index. Save the checkpoint anew with T5X.')
  return array


def _stored_array(name: str, spec: Mapping[str, Any], path: pathlib.Path) -> StoredArray:
  try:
    kvstore, driver = spec['kvstore'], spec[_SPEC_KEY]
    parts = [part for part in f'{kvstore["path"]}/{spec.get("path", "")}'.split('/') if part]
    shape = tuple(spec['metadata']['shape'])
    dtype = jnp.dtype(spec['dtype'])
    sound = (driver == 'zarr' and kvstore['driver'] in _KVSTORES
             and all(isinstance(size, int) and size >= 0 for size in shape))
  except (KeyError, TypeError, AttributeError) as e:
    raise errors.CheckpointDamagedError(
        f'The index {str(path)!r} is damaged: the spec of {name} cannot be read ({type(e).__name__}: {e}). {_REMEDY}'
        ) from e
  if not sound:
    raise errors.CheckpointError(
        f'{str(path)!r}: {name} is stored with the drivers {driver!r} and {kvstore["driver"]!r} in the shape {shape}; '
        f"expected zarr in one of {', '.join(_KVSTORES)}. Save the checkpoint anew with T5X.")
  # What was published from a bucket, or saved with its whole path, names the folder as it stood there; here it stands
  # in the checkpoint. No other folder is looked at.
  if '..' in parts or not parts or parts[-1] != folder_name(name):
    raise errors.CheckpointError(
        f'{str(path)!r}: {name} is said to lie in {kvstore["path"]!r}; expected a folder {folder_name(name)!r} of the '
        'checkpoint, and nothing outside of it is read. Save the checkpoint anew with T5X.')
  return StoredArray(parts[-1], shape, np.dtype(jnp.bfloat16) if dtype == np.uint16 else np.dtype(dtype))


def folder_name(name: str) -> str:
  """Returns the name that T5X gives the folder of an array.

  >>> folder_name('target/encoder/encoder_norm/scale')
  'target.encoder.encoder_norm.scale'
  """
  return name.replace('/', '.')


def chunk_shape(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> tuple[int, ...]:
  """Returns a shape of chunks that divide an array of `shape` evenly, of at most `max_bytes` where that can be.

  >>> chunk_shape((64, 16), 4, 2048)
  (32, 16)
  """
  chunks = list(shape)
  while chunks and math.prod(chunks) * itemsize > max_bytes and max(chunks) > 1:
    dim = chunks.index(max(chunks))
    divisor = next((d for d in range(2, math.isqrt(chunks[dim]) + 1) if chunks[dim] % d == 0), chunks[dim])
    chunks[dim] //= divisor
  return tuple(chunks)


def write(root: pathlib.Path, entries: Mapping[str, StoredArray | np.ndarray], chunks: Mapping[str, tuple[int, ...]],
          compressor: Mapping[str, Any]) -> None:
  """Writes the index of the checkpoint `root`, byte for byte as T5X does.

  Args:
    root: folder of the checkpoint.
    entries: name -> the array, or where it lies.
    chunks: name -> shape of the chunks, for those that lie beside the index.
    compressor: of all of them.
  """
  leaves = {}
  for name in sorted(entries, key=lambda name: name.split('/')):
    entry = entries[name]
    leaves[name] = entry if isinstance(entry, np.ndarray) else {
        _SPEC_KEY: 'zarr', 'dtype': np.dtype(entry.dtype).name,
        'kvstore': {'driver': 'file', 'path': f'{entry.folder}/'},
        'metadata': {'chunks': list(chunks[name]), 'compressor': dict(compressor), 'shape': list(entry.shape)}}
  document = {'version': VERSION, 'optimizer': tree_utils.unflatten_dict(leaves)}
  (root / FILENAME).write_bytes(flax.serialization.msgpack_serialize(document, in_place=True))
