"""Writing of safetensors, compared with the reference implementation."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from t5x_lite.checkpoints.hugging_face import SafetensorsFolder
from t5x_lite.checkpoints.hugging_face.tensor_files import INDEX_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import SINGLE_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import read_entries
from t5x_lite.checkpoints.hugging_face.tensor_writer import SafetensorsWriter
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import tensor_cases


@pytest.mark.parametrize('seed, max_shard_bytes', [(0, 10**9), (1, 200), (2, 1), (3, 10**9)])
def test_the_reference_implementation_reads_written_files(tmp_path, seed, max_shard_bytes):
  tensors = tensor_cases.tensors(seed, tensor_cases.DTYPES if seed < 3 else ('float32',))
  tensor_cases.write(tmp_path, tensors, max_shard_bytes)
  files = sorted(tmp_path.glob('*.safetensors'))
  loaded = {}
  for file in files:
    with safetensors.safe_open(file, 'np') as opened:
      assert opened.metadata() == {'format': 'pt'}
    one = safetensors.numpy.load_file(file)
    assert len(one) == 1 or sum(tensor.nbytes for tensor in one.values()) <= max_shard_bytes
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in read_entries(file).values())
    loaded |= one
  assert set(loaded) == set(tensors)
  folder = SafetensorsFolder(tmp_path)
  for name, tensor in tensors.items():
    tensor_cases.assert_same(loaded[name], tensor)
    tensor_cases.assert_same(folder.read(name), tensor)
  if max_shard_bytes == 1:
    assert [file.name for file in files] == [
      f'model-{i:05d}-of-00009.safetensors' for i in range(1, 10)
    ]
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index['metadata'] == {'total_size': sum(tensor.nbytes for tensor in tensors.values())}
    assert list(index['weight_map']) == sorted(tensors)
  assert {file.suffix for file in tmp_path.iterdir()} <= {'.safetensors', '.json'}


def test_a_tensor_that_cannot_be_mapped_at_its_offset_begins_a_shard(tmp_path):
  tensor_cases.write(
    tmp_path,
    {'a': np.ones([3], ml_dtypes.bfloat16), 'b': np.ones([2], np.float32), 'c': np.ones([1], 'f4')},
  )
  index = json.loads((tmp_path / INDEX_FILE).read_text())['weight_map']
  assert index['a'] != index['b'] == index['c']


def test_written_tensors_are_the_announced_ones(tmp_path):
  with pytest.raises(CheckpointError, match="2 tensors were not written, e.g. 'a'"):
    with SafetensorsWriter(tmp_path, ['a', 'b', 'c'], 10**9) as writer:
      writer.write('c', np.ones([1], np.float32))
  assert not (tmp_path / SINGLE_FILE).exists()
  (tmp_path / 'other').mkdir()
  with SafetensorsWriter(tmp_path / 'other', ['a'], 10**9) as writer:
    writer.write('a', np.ones([1], np.float32))
    for name in ('a', 'd'):
      with pytest.raises(KeyError, match=repr(name)):
        writer.write(name, np.ones([1], np.float32))
  with (
    pytest.raises(KeyError, match='complex64'),
    SafetensorsWriter(tmp_path / 'third', ['a'], 10**9) as writer,
  ):
    writer.write('a', np.ones([1], np.complex64))
