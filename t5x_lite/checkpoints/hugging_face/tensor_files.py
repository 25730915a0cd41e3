"""Safetensors, in one file or in shards with an index: the reader, which checks headers before it reads values, and the
writer, which writes one tensor at a time.

A file consists of the length of the header (8 bytes, little endian), the header (JSON: name to dtype, shape and
offsets), and the values of all tensors without gaps. https://huggingface.co/docs/safetensors
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np

from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.errors import CheckpointError
from t5x_lite.formatting import printable
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

if TYPE_CHECKING:
  from t5x_lite.storage import object_store

SINGLE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
_LENGTH_BYTES = 8
# Of 100,000 tensors and more. The reference implementation allows 100 MB, which take a minute.
_MAX_HEADER_BYTES = 2**24
_POINTER = b'version https://git-lfs'
_DTYPES: Mapping[str, np.dtype] = {
  'F64': np.dtype('<f8'),
  'F32': np.dtype('<f4'),
  'F16': np.dtype('<f2'),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'I64': np.dtype('<i8'),
  'I32': np.dtype('<i4'),
  'I16': np.dtype('<i2'),
  'I8': np.dtype('i1'),
  'U64': np.dtype('<u8'),
  'U32': np.dtype('<u4'),
  'U16': np.dtype('<u2'),
  'U8': np.dtype('u1'),
  'BOOL': np.dtype('?'),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COMPARED_BYTES = 1 << 24
# Bytes that are read at a time from an object store: of a header, and of a tensor.
_HEADER_BUFFER_BYTES = 1 << 17
_PART_BYTES = 1 << 25
# For messages about a folder that holds only an adapter.
MERGE_COMMAND = 't5x_lite convert FOLDER OUTPUT --base=MODEL --to=hugging_face'
# Weights in formats that are not supported.
_OTHER_WEIGHTS = (
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
  'flax_model.msgpack',
  'tf_model.h5',
  'adapter_model.safetensors',
  'adapter_config.json',
)


def dtype_code(dtype: Any) -> str:
  """Return the name of `dtype` in safetensors.

  Raises:
    KeyError: safetensors does not support the dtype.

  >>> dtype_code('float32')
  'F32'
  """
  return _CODES[np.dtype(dtype)]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """Location and type of a tensor.

  Attributes:
    path: the file.
    dtype: dtype of the values.
    shape: shape of the tensor.
    offset: position of the first byte in the file.
  """

  path: files.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int

  @property
  def num_bytes(self) -> int:
    """Size of the values in bytes."""
    return math.prod(self.shape) * self.dtype.itemsize


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
  """Return the JSON object with these keys and values; None if a key occurs twice."""
  result = dict(pairs)
  if len(result) == len(pairs):
    return result
  return None


def _read_header(path: files.Path) -> tuple[dict[str, Any], int, dict[str, Any]]:
  """Return (header without metadata, offset of the values in bytes, metadata) of a valid file."""
  untrusted.check_file(path.parent, path.name)
  start = b''
  header = None
  try:
    with path.open('rb', buffering=_HEADER_BUFFER_BYTES) as file:
      start = file.read(len(_POINTER))
      size = path.stat().st_size
      length = int.from_bytes(start[:_LENGTH_BYTES], 'little')
      problem = (
        f'it is not a complete safetensors file: its {size} bytes are incomplete or begin with an invalid '
        f'length, {length} bytes of header'
      )
      if _MAX_HEADER_BYTES < length <= size - _LENGTH_BYTES:
        problem = f'its header must have at most {_MAX_HEADER_BYTES:,} bytes, got {length:,}'
      elif len(start) >= _LENGTH_BYTES and 2 <= length <= size - _LENGTH_BYTES:
        problem = 'its header is not a JSON object, or a key occurs twice'
        file.seek(_LENGTH_BYTES)
        header = json.loads(file.read(length).decode('utf-8'), object_pairs_hook=_unique_keys)
    if isinstance(header, dict):
      metadata = header.pop('__metadata__', None)
      problem = _header_problem(header, size - _LENGTH_BYTES - length)
      if problem is None:
        return header, _LENGTH_BYTES + length, metadata if isinstance(metadata, dict) else {}
  except (OSError, ValueError, RecursionError) as error:
    problem = f'its header cannot be read ({error})'
  if start == _POINTER:
    remedy = 'Run `git lfs pull` in its folder: it is a pointer of git-lfs.'
  else:
    remedy = 'Download it again, or save the model again with transformers.'
  raise CheckpointError(f'{path} cannot be read: {printable(problem)}. {remedy}')


def _entry_problem(value: Any) -> str | None:
  """Return the problem of a header's entry, which must have a dtype, a shape and two offsets; None if it is valid."""
  try:
    code = value['dtype']
    shape = value['shape']
    (begin, end) = value['data_offsets']
  except (TypeError, KeyError, ValueError) as error:
    return f'must be an object with dtype, shape and data_offsets, got {untrusted.shorten(value)} ({error!r})'
  problem = untrusted.shape_problem(shape)
  if problem is not None:
    return f'shape {problem}'
  if not isinstance(code, str) or code not in _DTYPES:
    if str(code).startswith(('F8', 'F4', 'F6', 'E8')):
      remedy = '; dequantize the weights with transformers'
    else:
      remedy = ''
    return f'dtype must be one of {", ".join(_DTYPES)}, got {untrusted.shorten(code)}{remedy}'
  num_bytes = untrusted.num_bytes(shape, _DTYPES[code])
  if not untrusted.is_count(begin) or not untrusted.is_count(end) or end - begin != num_bytes:
    return f'data_offsets must be {num_bytes} bytes apart, got {untrusted.shorten([begin, end])}'
  return None


def _header_problem(header: Mapping[str, Any], num_bytes: int) -> str | None:
  """Return the first problem of a header whose tensors must fill `num_bytes` without gaps; None if it is valid."""
  for name, value in header.items():
    problem = _entry_problem(value)
    if problem is not None:
      return f'in the header, {untrusted.shorten(name)}: {problem}'
  position = 0
  previous = None
  for name, value in sorted(header.items(), key=lambda item: item[1]['data_offsets']):
    begin, end = value['data_offsets']
    if begin != position:
      before = 'the header'
      if previous is not None:
        before = untrusted.shorten(previous)
      return (
        f'{untrusted.shorten(name)} must begin at byte {position}, where {before} ends, got {begin}'
      )
    position = end
    previous = name
  if position == num_bytes:
    return None
  return f'the values must have {position} bytes, got {num_bytes}'


def read_entries(path: files.Path) -> dict[str, TensorEntry]:
  """Return the tensors of a safetensors file by name; reads no values.

  Raises:
    CheckpointError: the file is damaged, incomplete, or has dtypes that are not supported.
  """
  return _read_file(path)[0]


def _read_file(path: files.Path) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
  """Return (tensors by name, metadata) of a safetensors file."""
  header, data_offset, metadata = _read_header(path)
  entries = {}
  for name, value in header.items():
    begin, _ = value['data_offsets']
    entries[name] = TensorEntry(
      path=path,
      dtype=_DTYPES[value['dtype']],
      shape=tuple(value['shape']),
      offset=data_offset + begin,
    )
  return entries, metadata


def _read_object(path: 'object_store.StorePath', begin: int, end: int) -> np.ndarray:
  """Return uint8[end - begin] of an object in a store, several parts at a time."""
  from t5x_lite.storage import object_store

  values = np.empty(end - begin, np.uint8)

  def read(start: int) -> None:
    stop = min(start + _PART_BYTES, end)
    part = path.read_range(start, stop)
    if len(part) != stop - start:
      raise CheckpointError(f'{path} became shorter while it was being read. Download it again.')
    values[start - begin : stop - begin] = np.frombuffer(part, np.uint8)

  starts = range(begin, end, _PART_BYTES)
  if len(starts) > 1:
    object_store.in_parallel(read, starts)
  else:
    for start in starts:
      read(start)
  return values


def _shared(
  names: Collection[str], stored: Mapping[str, TensorEntry], metadata: Mapping[str, Any]
) -> dict[str, TensorEntry]:
  """Return those of `names` that are not stored and by the metadata share the values of a stored tensor."""
  return {
    name: stored[metadata[name]]
    for name in set(metadata).intersection(names).difference(stored)
    if isinstance(metadata[name], str) and metadata[name] in stored
  }


class SafetensorsFolder:
  """The tensors of a folder with `model.safetensors`, or with shards and their index.

  Attributes:
    entries: location of each tensor by name.
    aliases: names in `entries` that no file holds; the metadata of a file name the tensor whose values they share.
  """

  def __init__(self, path: files.PathLike, tied: Collection[str] = (), file: str = SINGLE_FILE):
    """Read and check the headers.

    Args:
      path: path of the folder.
      tied: names of tensors that may share their values with another tensor. Such a tensor need not be stored although
        the index has its name.
      file: name of the file that has all tensors if there are no shards.

    Raises:
      CheckpointError: the safetensors are missing or damaged, or the index does not fit the shards.
    """
    self._path = files.path(path)
    self._tied = frozenset(tied)
    self._file = file
    if (self._path / file).exists():
      stored, shared = self._read_single()
    elif (self._path / INDEX_FILE).exists():
      stored, shared = self._read_shards()
    else:
      raise CheckpointError(self._explain_absence())
    self.entries = stored | shared
    self.aliases = frozenset(shared)

  def _read_single(self) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Return (stored tensors, shared tensors that are not stored)."""
    stored, metadata = _read_file(self._path / self._file)
    return stored, _shared(self._tied, stored, metadata)

  def _read_shards(self) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Return (stored tensors, shared tensors that are not stored)."""
    weight_map = config_json.read(self._path, INDEX_FILE).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise self._invalid_index('weight_map must be an object from tensor names to files')
    shards = sorted(set(map(str, weight_map.values())))
    for file in shards:
      if file in ('', '.', '..') or pathlib.PurePosixPath(file).name != file or '\\' in file:
        raise self._invalid_index(f'the file {file!r} must be in the folder itself')
    for file in shards:
      if not (self._path / file).is_file():
        raise self._invalid_index(f'the file {file} is missing')
    stored: dict[str, TensorEntry] = {}
    metadata: dict[str, Any] = {}
    contents = files.each(_read_file, [self._path / file for file in shards])
    for entries, own_metadata in contents:
      stored |= entries
      metadata |= own_metadata
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
      names.setdefault(str(file), set()).add(name)
    # The index that Hugging Face's conversion writes also has the names of shared tensors, which no file holds.
    absent = (self._tied | set(metadata)) - set(stored)
    for file, (entries, _) in zip(shards, contents, strict=True):
      listed = names[file] - absent
      if listed != set(entries):
        lacking = sorted(listed - set(entries))[:3]
        surplus = sorted(set(entries) - listed)[:3]
        raise self._invalid_index(
          f'{file} lacks the tensors {lacking} and has {surplus}, which are not in the index'
        )
    return stored, _shared(self._tied | set(weight_map), stored, metadata)

  def _invalid_index(self, problem: str) -> CheckpointError:
    return CheckpointError(
      f'{self._path / INDEX_FILE} is invalid: {printable(problem)}. Download the folder again.'
    )

  def _explain_absence(self) -> str:
    found = [name for name in _OTHER_WEIGHTS if (self._path / name).exists()]
    if not found:
      return f'{self._path} has neither {self._file} nor {INDEX_FILE}. Download the weights too.'
    if found[0].startswith('adapter'):
      return (
        f'{self._path} must hold all weights of a model, got only an adapter ({found[0]}). Merge it with its model: '
        f'{MERGE_COMMAND}.'
      )
    flag = {'flax_model.msgpack': ', from_flax=True', 'tf_model.h5': ', from_tf=True'}.get(
      found[0], ''
    )
    return (
      f'{self._path} must hold its weights as safetensors, got only {found[0]}. Save them again with '
      f'transformers{" 4" if flag else ""}:\n'
      f'  model = AutoModelForSeq2SeqLM.from_pretrained({str(self._path)!r}{flag})\n'
      '  model.save_pretrained(folder, safe_serialization=True)'
    )

  def read(self, name: str) -> np.ndarray:
    """Return the tensor with the given name, in its stored shape and dtype."""
    entry = self.entries[name]
    values = self._read_bytes(entry, 0, entry.num_bytes)
    return values.view(entry.dtype).reshape(entry.shape)

  def _read_bytes(self, entry: TensorEntry, begin: int, end: int) -> np.ndarray:
    if files.is_remote(entry.path):
      return _read_object(entry.path, entry.offset + begin, entry.offset + end)
    values = np.fromfile(entry.path, np.uint8, end - begin, offset=entry.offset + begin)
    if values.size != end - begin:
      raise CheckpointError(
        f'{entry.path} became shorter while it was being read. Download it again.'
      )
    return values

  def equal(self, one: str, other: str) -> bool:
    """Return True if two tensors have the same dtype, shape and bytes; reads small parts at a time."""
    first = self.entries[one]
    second = self.entries[other]
    if first == second:  # One is shared.
      return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
      return False
    for begin in range(0, first.num_bytes, _COMPARED_BYTES):
      end = min(begin + _COMPARED_BYTES, first.num_bytes)
      if not np.array_equal(
        self._read_bytes(first, begin, end), self._read_bytes(second, begin, end)
      ):
        return False
    return True


# ---- Writing ---------------------------------------------------------------------------------------------------------

_ALIGNMENT = 8
# Size of a header's entry without the name: dtype, keys, offsets and dims of up to 20 digits.
_ENTRY_BYTES = 240
# transformers requires this format: tensors with PyTorch's memory layout.
_METADATA = {'format': 'pt'}


class _File:
  """A safetensors file under construction; the header, whose size is reserved, is written last."""

  def __init__(self, path: pathlib.Path, names: Sequence[str]):
    self.path = path
    self.names: list[str] = []
    self.num_bytes = 0
    self._entries = {}
    size = (
      sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
      + len(json.dumps(_METADATA))
      + _ENTRY_BYTES
    )
    self._header_bytes = -(-size // _ALIGNMENT) * _ALIGNMENT
    self._file: BinaryIO = path.open('xb')
    self._file.seek(8 + self._header_bytes)

  def add(self, name: str, tensor: np.ndarray) -> None:
    """Append a tensor of any shape."""
    self._entries[name] = {
      'dtype': dtype_code(tensor.dtype),
      'shape': list(tensor.shape),
      'data_offsets': [self.num_bytes, self.num_bytes + tensor.nbytes],
    }
    # bfloat16 does not support the buffer protocol.
    content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    self._file.write(content.data)
    self.num_bytes += tensor.nbytes
    self.names.append(name)

  def close(self) -> None:
    """Write the header, padded with blanks as the format allows, and close the file."""
    header = json.dumps(
      {'__metadata__': _METADATA, **self._entries}, separators=(',', ':')
    ).encode()
    self._file.seek(0)
    self._file.write(self._header_bytes.to_bytes(8, 'little') + header.ljust(self._header_bytes))
    self._file.close()

  def abandon(self) -> None:
    """Close the file without a header."""
    self._file.close()


class SafetensorsWriter:
  """Writer of `model.safetensors`, or of `model-00001-of-00002.safetensors` and so on with an index.

  A context manager; the files get their names when the block ends without an error. The tensors of a file are in the
  order of writing. A tensor whose dtype would not be aligned (float32 after an odd number of bfloat16 values) begins a
  new shard.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    names: Sequence[str],
    max_shard_bytes: int,
    file: str = SINGLE_FILE,
  ):
    """Prepare a writer.

    Args:
      folder: folder of the files.
      names: names of all tensors to write, in any order.
      max_shard_bytes: limit for the values of a shard in bytes; a larger tensor is the only one in its shard.
      file: name of the file if there is one shard.
    """
    self._file = file
    self._folder, self._names, self._max_shard_bytes = folder, list(names), max_shard_bytes
    self._remaining = set(names)
    self._shards: list[_File] = []

  def __enter__(self) -> 'SafetensorsWriter':
    return self

  def __exit__(self, error_type, error, traceback) -> None:
    if error_type is None:
      self._finish()
    elif self._shards:
      self._shards[-1].abandon()

  def write(self, name: str, tensor: np.ndarray) -> None:
    """Write a tensor of any shape.

    Raises:
      KeyError: the tensor was written before, its name was not given to the constructor, or the format does not support
        the dtype.
    """
    dtype_code(tensor.dtype)
    self._remaining.remove(name)
    shard = self._shards[-1] if self._shards else None
    if (
      shard is None
      or shard.num_bytes
      and (
        shard.num_bytes + tensor.nbytes > self._max_shard_bytes
        or shard.num_bytes % tensor.dtype.itemsize
      )
    ):
      if shard is not None:
        shard.close()
      rest = [other for other in self._names if other == name or other in self._remaining]
      shard = _File(self._folder / f'shard-{len(self._shards) + 1}.tmp', rest)
      self._shards.append(shard)
    shard.add(name, tensor)

  def _finish(self) -> None:
    if self._remaining:
      self._shards[-1].abandon() if self._shards else None
      raise CheckpointError(
        f'{len(self._remaining)} tensors were not written, e.g. {min(self._remaining)!r}.'
      )
    self._shards[-1].close()
    if len(self._shards) == 1:
      self._shards[0].path.rename(self._folder / self._file)
      return
    weight_map = {}
    for i, shard in enumerate(self._shards, start=1):
      name = f'model-{i:05d}-of-{len(self._shards):05d}.safetensors'
      shard.path.rename(self._folder / name)
      weight_map |= dict.fromkeys(shard.names, name)
    write_json(
      self._folder / INDEX_FILE,
      {
        'metadata': {'total_size': sum(shard.num_bytes for shard in self._shards)},
        'weight_map': dict(sorted(weight_map.items())),
      },
    )


def write_json(path: pathlib.Path, value: Mapping) -> None:
  """Write `value` as JSON in the format of transformers: indented, with a newline at the end."""
  files.write(path, json.dumps(value, indent=2) + '\n', durable=False)
