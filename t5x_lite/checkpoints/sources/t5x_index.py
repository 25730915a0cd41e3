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

from t5x_lite import errors, files, tree_utils, untrusted

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
  with untrusted.check_file(path.parent, path.name).open('rb') as file:
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
    document = flax.serialization.msgpack_restore(untrusted.check_file(root, FILENAME).read_bytes())
  except errors.CheckpointError:
    raise
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
  if not isinstance(version, int) or version not in _VERSIONS_READ:
    raise errors.CheckpointError(
        f'{str(path)!r} is of version {untrusted.shorten(version)} of the form of T5X; expected one of {_VERSIONS_READ}. Save it anew '
        'with a T5X that reads it.')
  if not isinstance(document['optimizer'], Mapping):
    raise errors.CheckpointDamagedError(f"The index {str(path)!r} is damaged: its 'optimizer' is no map. {_REMEDY}")
  try:
    leaves = _leaves(document['optimizer'], path)
  except RecursionError:
    raise errors.CheckpointDamagedError(f"The index {str(path)!r} is damaged: 'optimizer' is nested too deeply. "
                                        f'{_REMEDY}') from None
  return {name: _entry(name, leaf, path) for name, leaf in leaves.items() if leaf is not None}


def _leaves(tree: Mapping[Any, Any], path: pathlib.Path, prefix: str = '') -> dict[str, Any]:
  """Returns the leaves by '/'-joined name; specs are leaves."""
  leaves = {}
  for key, value in tree.items():
    name = f'{prefix}{key}'
    problem = untrusted.name_problem(key) or ("must not contain '/'" if '/' in key else None)
    if problem is not None:
      raise errors.CheckpointError(f'The index {str(path)!r} cannot be read: the name {untrusted.shorten(name)} '
                                   f'{problem}. {_REMEDY}')
    if isinstance(value, Mapping) and not isinstance(value.get(_SPEC_KEY), str):
      leaves |= _leaves(value, path, f'{name}/')
    else:
      leaves[name] = value
  return leaves


def _entry(name: str, leaf: Any, path: pathlib.Path) -> StoredArray | np.ndarray:
  if isinstance(leaf, Mapping):
    return _stored_array(name, leaf, path)
  is_int = isinstance(leaf, int) and not isinstance(leaf, bool)
  try:
    array = np.asarray(leaf, np.int32 if is_int else None)
  except (ValueError, OverflowError):  # lists of unequal lengths, and whole numbers beyond 32 bits
    array = np.asarray('')
  if array.dtype != np.bool_ and not jnp.issubdtype(array.dtype, jnp.number):
    raise errors.CheckpointError(
        f'{str(path)!r}: the entry {name} is {untrusted.shorten(leaf)}; expected an array, or the spec of one that lies '
        'beside the index. Save the checkpoint anew with T5X.')
  return array


def _stored_array(name: str, spec: Mapping[str, Any], path: pathlib.Path) -> StoredArray:
  try:
    kvstore, driver = spec['kvstore'], spec[_SPEC_KEY]
    parts = [part for part in f'{kvstore["path"]}/{spec.get("path", "")}'.split('/') if part]
    shape, dtype = spec['metadata']['shape'], untrusted.parse_dtype(spec['dtype'])
    sound = driver == 'zarr' and kvstore['driver'] in _KVSTORES
  except (KeyError, TypeError, AttributeError) as e:
    raise errors.CheckpointDamagedError(
        f'The index {str(path)!r} is damaged: the spec of {name} cannot be read ({type(e).__name__}: {e}). {_REMEDY}'
        ) from e
  if not sound:
    raise errors.CheckpointError(
        f'{str(path)!r}: {name} is stored with the drivers {driver!r} and {kvstore["driver"]!r}; expected zarr in one '
        f"of {', '.join(_KVSTORES)}. Save the checkpoint anew with T5X.")
  problem = untrusted.shape_problem(shape)
  if problem is not None or dtype is None:
    problem = f'shape, which {problem}' if problem is not None else (
        f"dtype, which must be the name of a dtype of numbers, got {untrusted.shorten(spec['dtype'])}")
    raise errors.CheckpointDamagedError(
        f'The index {str(path)!r} is damaged: the spec of {name} cannot be read (in the {problem}). {_REMEDY}')
  # What was published from a bucket, or saved with its whole path, names the folder as it stood there; here it stands
  # in the checkpoint. No other folder is looked at.
  if '..' in parts or not parts or parts[-1] != folder_name(name):
    raise errors.CheckpointError(
        f'{str(path)!r}: {name} is said to lie in {kvstore["path"]!r}; expected a folder {folder_name(name)!r} of the '
        'checkpoint, and nothing outside of it is read. Save the checkpoint anew with T5X.')
  return StoredArray(parts[-1], tuple(shape), np.dtype(jnp.bfloat16) if dtype == np.uint16 else np.dtype(dtype))


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
  files.write(root / FILENAME, flax.serialization.msgpack_serialize(document, in_place=True), durable=False)
