"""Reading of safetensors: one file, or shards with an index, whose headers are checked before any value is read.

A file is a header's length (8 bytes, little endian), the header (JSON: name to dtype, shape and offsets), and the
values one after the other. https://huggingface.co/docs/safetensors
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from t5x_lite import untrusted
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.errors import CheckpointError

SINGLE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
_LENGTH_BYTES = 8
# The reference implementation's limit.
_MAX_HEADER = 100_000_000
_POINTER = b'version https://git-lfs'
_DTYPES: Mapping[str, np.dtype] = {
    'F64': np.dtype('<f8'), 'F32': np.dtype('<f4'), 'F16': np.dtype('<f2'), 'BF16': np.dtype(ml_dtypes.bfloat16),
    'I64': np.dtype('<i8'), 'I32': np.dtype('<i4'), 'I16': np.dtype('<i2'), 'I8': np.dtype('i1'),
    'U64': np.dtype('<u8'), 'U32': np.dtype('<u4'), 'U16': np.dtype('<u2'), 'U8': np.dtype('u1'),
    'BOOL': np.dtype('?'),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COMPARED_AT_ONCE = 1 << 24
# Weights in other formats, and what to do about them.
_OTHER_WEIGHTS = ('pytorch_model.bin', 'pytorch_model.bin.index.json', 'flax_model.msgpack', 'tf_model.h5',
                  'adapter_model.safetensors', 'adapter_config.json')


def dtype_code(dtype: Any) -> str:
  """Returns the name of `dtype` in safetensors.

  Raises:
    CheckpointError: it has none.

  >>> dtype_code('float32')
  'F32'
  """
  code = _CODES.get(np.dtype(dtype))
  if code is None:
    raise CheckpointError(f'got dtype {np.dtype(dtype).name}; expected one of '
                          f'{", ".join(each.name for each in _CODES)}.')
  return code


@dataclasses.dataclass(frozen=True)
class TensorEntry:
  """Where a tensor is.

  Attributes:
    path: file.
    dtype: of the values.
    shape: of the tensor.
    offset: of its first byte in the file.
  """

  path: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int

  @property
  def num_bytes(self) -> int:
    """Size of the values."""
    return math.prod(self.shape) * self.dtype.itemsize


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  result = dict(pairs)
  if len(result) != len(pairs):
    raise ValueError('a key stands twice in an object')
  return result


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
  """Returns (header, offset of the values)."""
  untrusted.check_file(path.parent, path.name)
  try:
    size, file = path.stat().st_size, path.open('rb')
  except OSError as error:
    raise CheckpointError(f'{path} cannot be opened: {error.strerror}.') from error
  with file:
    start = file.read(len(_POINTER))
    if start == _POINTER:
      raise CheckpointError(f'{path} is a pointer of git-lfs, not the file itself. Run `git lfs pull` in its folder, '
                            'or download the file.')
    length = int.from_bytes(start[:_LENGTH_BYTES], 'little')
    if len(start) < _LENGTH_BYTES or not 2 <= length <= min(_MAX_HEADER, size - _LENGTH_BYTES):
      raise CheckpointError(f'{path} ({size} bytes) is no whole safetensors file: it begins with a header of {length} '
                            'bytes. Download it again.')
    file.seek(_LENGTH_BYTES)
    raw = file.read(length)
  try:
    header = json.loads(raw.decode('utf-8'), object_pairs_hook=_no_duplicates)
    if not isinstance(header, dict):
      raise ValueError('it is no JSON object')
  except (ValueError, RecursionError) as error:
    raise CheckpointError(f'{path} has a header that cannot be read ({error}). Download it again.') from error
  return header, _LENGTH_BYTES + length


def _parse_entry(path: pathlib.Path, name: str, value: Any, data_offset: int) -> tuple[TensorEntry, int, int]:
  """Returns (entry, first and last offset as the header has them)."""
  try:
    code, shape, (begin, end) = value['dtype'], value['shape'], value['data_offsets']
    problem = untrusted.shape_problem(shape)
    if problem is not None:
      raise ValueError(f'expected other sizes: shape {problem}')
    if not untrusted.is_count(begin) or not untrusted.is_count(end) or not isinstance(code, str):
      raise ValueError('expected other sizes: data_offsets must be two whole numbers from 0 up, and dtype a name')
  except (TypeError, KeyError, ValueError) as error:
    raise CheckpointError(f'{path}: the header says {untrusted.shorten(value)} of {untrusted.shorten(name)}, which is no dtype, shape and data_offsets '
                          f'({error}). Download it again.') from error
  if code not in _DTYPES:
    remedy = ('Weights of 8 bits or fewer have scales beside them that only their own program knows: dequantize them '
              'with transformers first.' if str(code).startswith(('F8', 'F4', 'F6', 'E8'))
              else 'Save the model with transformers again.')
    raise CheckpointError(f'{path}: {name!r} has dtype {code!r}; expected one of {", ".join(_DTYPES)}. {remedy}')
  entry = TensorEntry(path, _DTYPES[code], tuple(shape), data_offset + begin)
  if entry.num_bytes != end - begin:
    raise CheckpointError(f'{path}: {name!r} of shape {entry.shape} and dtype {code} has data_offsets [{begin}, '
                          f'{end}]; expected {entry.num_bytes} bytes. Download it again.')
  return entry, begin, end


def read_entries(path: pathlib.Path) -> dict[str, TensorEntry]:
  """Returns the tensors of a safetensors file; reads no value.

  Raises:
    CheckpointError: a file that is damaged, cut off, or holds what we cannot read.
  """
  header, data_offset = _read_header(path)
  header.pop('__metadata__', None)
  parsed = {name: _parse_entry(path, name, value, data_offset) for name, value in header.items()}
  position, previous = 0, 'the header'
  for name, (_, begin, end) in sorted(parsed.items(), key=lambda item: item[1][1:]):
    if begin != position:
      raise CheckpointError(f'{path}: {name!r} begins at byte {begin}, but {previous} ends at {position}; expected the '
                            'values of one tensor behind those of another. Download it again.')
    position, previous = end, repr(name)
  size = path.stat().st_size
  if data_offset + position != size:
    raise CheckpointError(f'{path} has {size} bytes; expected {data_offset + position}, as its header says. Download '
                          'it again.')
  return {name: entry for name, (entry, _, _) in parsed.items()}


class SafetensorsFolder:
  """The tensors of a folder with `model.safetensors`, or with shards and their index.

  Attributes:
    entries: name to where the tensor is.
  """

  def __init__(self, path: pathlib.Path | str):
    """Reads and checks the headers.

    Args:
      path: of the folder.

    Raises:
      CheckpointError: no safetensors, damaged ones, or an index that does not fit its shards.
    """
    self._path = pathlib.Path(path)
    if (self._path / SINGLE_FILE).exists():
      self.entries = read_entries(self._path / SINGLE_FILE)
    elif (self._path / INDEX_FILE).exists():
      self.entries = self._read_shards()
    else:
      raise CheckpointError(self._explain_absence())

  def _read_shards(self) -> dict[str, TensorEntry]:
    index_path = self._path / INDEX_FILE
    index = config_json.read(self._path, INDEX_FILE)
    weight_map = index.get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise CheckpointError(f'{index_path} has no weight_map; expected tensor names to files. Download it again.')
    files = sorted(set(map(str, weight_map.values())))
    for file in files:
      if file in ('', '.', '..') or pathlib.PurePosixPath(file).name != file or '\\' in file:
        raise CheckpointError(f'{index_path} names the file {file!r}; expected one of the folder itself.')
      if not (self._path / file).is_file():
        raise CheckpointError(f'{self._path} has no {file}, which {INDEX_FILE} names. Download it.')
    result: dict[str, TensorEntry] = {}
    for file in files:
      entries = read_entries(self._path / file)
      said = {name for name, where in weight_map.items() if where == file}
      if said != set(entries):
        lacking, surplus = sorted(said - set(entries)), sorted(set(entries) - said)
        raise CheckpointError(f'{self._path / file} and {INDEX_FILE} disagree: the file lacks {lacking[:3]} and has '
                              f'{surplus[:3]} that the index does not say is there. Download both again.')
      result |= entries
    return result

  def _explain_absence(self) -> str:
    found = [name for name in _OTHER_WEIGHTS if (self._path / name).exists()]
    if not found:
      return (f'{self._path} has neither {SINGLE_FILE} nor {INDEX_FILE}; expected the weights of a model. Download '
              'them too.')
    if found[0].startswith('adapter'):
      return (f'{self._path} has an adapter alone ({found[0]}); expected the weights of a whole model. Merge it: '
              'model.merge_and_unload().save_pretrained(folder) with peft.')
    flag = {'flax_model.msgpack': ', from_flax=True', 'tf_model.h5': ', from_tf=True'}.get(found[0], '')
    return (f'{self._path} has its weights as {found[0]} alone; expected safetensors. Save them anew with transformers'
            f'{" 4" if flag else ""}:\n'
            f'  model = AutoModelForSeq2SeqLM.from_pretrained({str(self._path)!r}{flag})\n'
            '  model.save_pretrained(folder, safe_serialization=True)')

  def read(self, name: str) -> np.ndarray:
    """Returns the tensor called `name`, in its own dtype."""
    entry = self.entries[name]
    values = self._read_bytes(entry, 0, entry.num_bytes)
    return values.view(entry.dtype).reshape(entry.shape)

  def _read_bytes(self, entry: TensorEntry, begin: int, end: int) -> np.ndarray:
    values = np.fromfile(entry.path, np.uint8, end - begin, offset=entry.offset + begin)
    if values.size != end - begin:
      raise CheckpointError(f'{entry.path} became shorter while it was read. Download it again.')
    return values

  def equal(self, one: str, other: str) -> bool:
    """Returns whether two tensors are bitwise equal, their dtypes included; holds little of them at a time."""
    first, second = self.entries[one], self.entries[other]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
      return False
    for begin in range(0, first.num_bytes, _COMPARED_AT_ONCE):
      end = min(begin + _COMPARED_AT_ONCE, first.num_bytes)
      if not np.array_equal(self._read_bytes(first, begin, end), self._read_bytes(second, begin, end)):
        return False
    return True
