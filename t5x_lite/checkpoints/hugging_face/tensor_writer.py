"""Writing of safetensors, one tensor after the other: one file, or shards of limited size with an index."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import BinaryIO

import numpy as np

from t5x_lite import files
from t5x_lite.checkpoints.hugging_face.tensor_files import INDEX_FILE, SINGLE_FILE, dtype_code
from t5x_lite.errors import CheckpointError

_ALIGNMENT = 8
# Of a header's entry, beside the name: dtype, keys, offsets and dims of up to 20 digits.
_ENTRY_BYTES = 240
# What transformers asks for: tensors laid out as PyTorch's.
_METADATA = {'format': 'pt'}


class _File:
  """A safetensors file that is being written: its header, whose room is kept, comes last."""

  def __init__(self, path: pathlib.Path, names: Sequence[str]):
    self.path = path
    self.names: list[str] = []
    self.num_bytes = 0
    self._entries = {}
    room = sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names) + len(json.dumps(_METADATA)) + _ENTRY_BYTES
    self._room = -(-room // _ALIGNMENT) * _ALIGNMENT
    self._file: BinaryIO = path.open('xb')
    self._file.seek(8 + self._room)

  def add(self, name: str, tensor: np.ndarray) -> None:
    """Writes a tensor behind the others."""
    self._entries[name] = {'dtype': dtype_code(tensor.dtype), 'shape': list(tensor.shape),
                           'data_offsets': [self.num_bytes, self.num_bytes + tensor.nbytes]}
    # bfloat16 has no buffer protocol.
    self._file.write(memoryview(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)))
    self.num_bytes += tensor.nbytes
    self.names.append(name)

  def close(self) -> None:
    """Writes the header; blanks fill its room, as the format allows."""
    header = json.dumps({'__metadata__': _METADATA, **self._entries}, separators=(',', ':')).encode()
    self._file.seek(0)
    self._file.write(self._room.to_bytes(8, 'little') + header.ljust(self._room))
    self._file.close()

  def abandon(self) -> None:
    """Closes the file as it is."""
    self._file.close()


class SafetensorsWriter:
  """Writes tensors into `model.safetensors`, or into `model-00001-of-00002.safetensors` and so on with an index.

  A context manager; the files have their names when it is left without an error. The tensors of a file follow each
  other in the order of writing; one that its dtype does not let begin there (float32 behind an odd number of bfloat16)
  begins a new shard.
  """

  def __init__(self, folder: pathlib.Path, names: Sequence[str], max_shard_bytes: int):
    """Begins.

    Args:
      folder: where the files go.
      names: of all tensors there will be, in any order.
      max_shard_bytes: of the values of a shard; a larger tensor has a shard of its own.
    """
    self._folder, self._names, self._max_shard_bytes = folder, list(names), max_shard_bytes
    self._awaited = set(names)
    self._shards: list[_File] = []

  def __enter__(self) -> 'SafetensorsWriter':
    return self

  def __exit__(self, error_type, error, traceback) -> None:
    if error_type is None:
      self._finish()
    elif self._shards:
      self._shards[-1].abandon()

  def write(self, name: str, tensor: np.ndarray) -> None:
    """Writes a tensor.

    Raises:
      CheckpointError: a name that was not announced, or comes twice; or a dtype that the format does not have.
    """
    if name not in self._awaited:
      raise CheckpointError(f'got the tensor {name!r}, which was written already or is none of the model; expected one '
                            f'of {len(self._awaited)} others.')
    dtype_code(tensor.dtype)
    shard = self._shards[-1] if self._shards else None
    if shard is None or shard.num_bytes and (
        shard.num_bytes + tensor.nbytes > self._max_shard_bytes or shard.num_bytes % tensor.dtype.itemsize):
      if shard is not None:
        shard.close()
      rest = [name for name in self._names if name in self._awaited]
      shard = _File(self._folder / f'shard-{len(self._shards) + 1}.tmp', rest)
      self._shards.append(shard)
    shard.add(name, tensor)
    self._awaited.remove(name)

  def _finish(self) -> None:
    if self._awaited:
      self._shards[-1].abandon() if self._shards else None
      raise CheckpointError(f'{len(self._awaited)} tensors were not written, {sorted(self._awaited)[0]!r} among them.')
    self._shards[-1].close()
    if len(self._shards) == 1:
      self._shards[0].path.rename(self._folder / SINGLE_FILE)
      return
    weight_map = {}
    for i, shard in enumerate(self._shards, start=1):
      name = f'model-{i:05d}-of-{len(self._shards):05d}.safetensors'
      shard.path.rename(self._folder / name)
      weight_map |= dict.fromkeys(shard.names, name)
    write_json(self._folder / INDEX_FILE, {
        'metadata': {'total_size': sum(shard.num_bytes for shard in self._shards)},
        'weight_map': dict(sorted(weight_map.items()))})


def write_json(path: pathlib.Path, value: Mapping) -> None:
  """Writes `value` as transformers writes such files: indented, with a newline at the end."""
  files.write(path, json.dumps(value, indent=2) + '\n', durable=False)
