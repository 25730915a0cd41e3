"""Writer of safetensors, one tensor at a time: one file, or shards of limited size with an index."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import BinaryIO

import numpy as np

from t5x_lite import files
from t5x_lite.checkpoints.hugging_face.tensor_files import INDEX_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import SINGLE_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import dtype_code
from t5x_lite.errors import CheckpointError

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

  def __init__(self, folder: pathlib.Path, names: Sequence[str], max_shard_bytes: int):
    """Prepare a writer.

    Args:
      folder: folder of the files.
      names: names of all tensors to write, in any order.
      max_shard_bytes: limit for the values of a shard in bytes; a larger tensor is the only one in its shard.
    """
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
      self._shards[0].path.rename(self._folder / SINGLE_FILE)
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
