"""safetensors, read and written: against the reference implementation, and every way in which a file can be bad."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from t5x_lite.checkpoints.hugging_face import SafetensorsFolder
from t5x_lite.checkpoints.hugging_face.tensor_files import INDEX_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import SINGLE_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import SafetensorsWriter
from t5x_lite.checkpoints.hugging_face.tensor_files import read_entries
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import hugging_face_cases as cases
from tests.checkpoints.hugging_face import tensor_cases


@pytest.mark.parametrize('seed', range(5))
def test_files_of_the_reference_implementation_are_read(tmp_path, seed):
  tensors = tensor_cases.tensors(seed) | {
    'empty': np.zeros([0, 3], np.float32),
    'one': np.ones([1], np.float16),
  }
  safetensors.numpy.save_file(tensors, tmp_path / SINGLE_FILE, {'format': 'pt'})
  folder = SafetensorsFolder(tmp_path)
  assert set(folder.entries) == set(tensors)
  for name, tensor in tensors.items():
    tensor_cases.assert_same(folder.read(name), tensor)


def test_equality_is_bitwise(tmp_path):
  nan = np.array([np.nan, 1.0], np.float32)
  tensors = {
    'a': nan,
    'b': nan.copy(),
    'c': np.array([np.nan, -1.0], np.float32),
    'd': nan.reshape(1, 2),
    'e': nan.astype(np.float16),
    'zero': np.zeros([2], 'f4'),
    'minus': -np.zeros([2], 'f4'),
  }
  cases.write_safetensors(tmp_path / SINGLE_FILE, tensors)
  folder = SafetensorsFolder(tmp_path)
  assert folder.equal('a', 'b')
  assert not any(folder.equal('a', other) for other in 'cde') and not folder.equal('zero', 'minus')


def _raw(header, values=b'', length=None):
  encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
  return (len(encoded) if length is None else length).to_bytes(8, 'little') + encoded + values


def _entry(begin=0, end=8, shape=(2,), dtype='F32'):
  return {'dtype': dtype, 'shape': list(shape), 'data_offsets': [begin, end]}


@pytest.mark.parametrize(
  'content, match',
  [
    (b'', 'not a complete safetensors'),
    (b'\x10\0\0', 'not a complete safetensors'),
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n', 'git lfs pull'),
    (_raw({}, length=10**6), '1000000 bytes of header'),
    (_raw({}, length=2**62), 'not a complete safetensors'),
    (_raw(b'{"a": '), 'header cannot be read'),
    (_raw(b'[1, 2]'), 'not a JSON object'),
    (_raw(b'\xff\xfe\xff'), 'header cannot be read'),
    (_raw(b'[' * 100_000), 'header cannot be read'),
    (_raw(b'{"a": {}, "a": {}}'), 'occurs twice'),
    (_raw({'a': 5}), "'a': must be an object"),
    (_raw({'a': {'dtype': 'F32'}}), "'a': must be an object"),
    (_raw({'a': _entry(shape=(-2,))}, bytes(8)), r'shape must be .*got \[-2\]'),
    (_raw({'a': _entry(shape=(2.0,))}, bytes(8)), r'shape must be .*got \[2.0\]'),
    (_raw({'a': _entry(begin=-8, end=0)}), '8 bytes apart'),
    (_raw({'a': _entry(end=4)}, bytes(4)), '8 bytes apart'),
    (_raw({'a': _entry(begin=8, end=0)}), '8 bytes apart'),
    (_raw({'a': _entry(shape=(2**40, 2**40))}, bytes(8)), 'fewer than 2'),
    (_raw({'a': _entry(dtype='F8_E4M3', end=2)}, bytes(2)), "'F8_E4M3'.*dequantize"),
    (_raw({'a': _entry(dtype='C64', end=16)}, bytes(16)), "'C64'.*again"),
    (_raw({'a': _entry()}, bytes(7)), 'must have 8 bytes, got 7'),
    (_raw({'a': _entry()}, bytes(9)), 'must have 8 bytes, got 9'),
    (
      _raw({'a': _entry(), 'b': _entry(4, 12)}, bytes(12)),
      "'b' must begin at byte 8, where 'a' ends, got 4",
    ),
    (
      _raw({'a': _entry(), 'b': _entry(12, 20)}, bytes(20)),
      "'b' must begin at byte 8, where 'a' ends, got 12",
    ),
    (
      _raw({'a': _entry(4, 12)}, bytes(12)),
      "'a' must begin at byte 0, where the header ends, got 4",
    ),
    (
      _raw({'a': _entry(), 'b': _entry()}, bytes(8)),
      "must begin at byte 8, where '[ab]' ends, got 0",
    ),
  ],
)
def test_bad_files_are_rejected_before_anything_is_read(tmp_path, content, match):
  (tmp_path / SINGLE_FILE).write_bytes(content)
  with pytest.raises(CheckpointError, match=match) as error:
    SafetensorsFolder(tmp_path)
  assert SINGLE_FILE in str(error.value)


@pytest.mark.parametrize('cut', [1, 9, 50])
def test_every_truncation_is_noticed(tmp_path, cut):
  cases.write_safetensors(tmp_path / SINGLE_FILE, tensor_cases.tensors())
  content = (tmp_path / SINGLE_FILE).read_bytes()
  for size in range(0, len(content), cut):
    (tmp_path / SINGLE_FILE).write_bytes(content[:size])
    with pytest.raises(
      CheckpointError, match=r'not a complete safetensors file|must have \d+ bytes, got .* Download'
    ):
      SafetensorsFolder(tmp_path)


def _shards(tmp_path):
  tensor_cases.write(
    tmp_path, {'a': np.ones([2], 'f4'), 'b': np.ones([3], 'f4'), 'c': np.ones([4], 'f4')}, 20
  )
  return json.loads((tmp_path / INDEX_FILE).read_text())


@pytest.mark.parametrize(
  'change, match',
  [
    (
      lambda index: index['weight_map'].update(a='../elsewhere.safetensors'),
      "'../elsewhere.safetensors' must be in the",
    ),
    (
      lambda index: index['weight_map'].update(a='/tmp/elsewhere.safetensors'),
      'must be in the folder itself',
    ),
    (lambda index: index['weight_map'].update(a='..'), 'must be in the folder itself'),
    (lambda index: index['weight_map'].update(a='sub\\x'), 'must be in the folder itself'),
    (
      lambda index: index['weight_map'].update(a='model-00009-of-00002.safetensors'),
      'model-00009.* is missing',
    ),
    (
      lambda index: index['weight_map'].update(d='model-00001-of-00002.safetensors'),
      r"lacks the tensors \['d'\]",
    ),
    (lambda index: index['weight_map'].pop('b'), r"\['b'\], which are not in the index"),
    (lambda index: index.pop('weight_map'), 'weight_map must be an object'),
    (lambda index: index.update(weight_map=[1]), 'weight_map must be an object'),
  ],
)
def test_an_index_that_does_not_fit_is_rejected(tmp_path, change, match):
  index = _shards(tmp_path)
  SafetensorsFolder(tmp_path)
  change(index)
  (tmp_path / INDEX_FILE).write_text(json.dumps(index))
  with pytest.raises(CheckpointError, match=match):
    SafetensorsFolder(tmp_path)


def test_an_index_may_name_shared_tensors_that_no_file_holds(tmp_path):
  index = _shards(tmp_path)
  first, second = sorted(set(index['weight_map'].values()))[:2]
  index['weight_map'].update(tied=first, shared=second)
  (tmp_path / INDEX_FILE).write_text(json.dumps(index))
  with pytest.raises(CheckpointError, match=r"lacks the tensors \['tied'\]"):
    SafetensorsFolder(tmp_path, tied=('shared',))
  assert set(SafetensorsFolder(tmp_path, tied=('tied', 'shared')).entries) == set('abc')
  stored = safetensors.numpy.load_file(tmp_path / first)
  held = next(iter(stored))
  # Values of the metadata are texts.
  metadata = {'format': 'pt', 'tied': held, 'shared': 'none', 'other': held}
  safetensors.numpy.save_file(stored, tmp_path / first, metadata)
  folder = SafetensorsFolder(tmp_path, tied=('tied', 'shared'))
  assert set(folder.entries) == {*'abc', 'tied'} and folder.equal('tied', held)
  np.testing.assert_array_equal(folder.read('tied'), stored[held])


def test_an_index_that_is_not_json_is_rejected(tmp_path):
  _shards(tmp_path)
  for content in (b'{', b'[]', b'\xff\xff'):
    (tmp_path / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(INDEX_FILE)):
      SafetensorsFolder(tmp_path)


def test_links_to_files_elsewhere_are_followed(tmp_path):
  # The cache of the hub is made of such.
  (tmp_path / 'blobs').mkdir()
  (tmp_path / 'snapshot').mkdir()
  cases.write_safetensors(tmp_path / 'blobs' / '0a1b', {'a': np.ones([2], 'f4')})
  (tmp_path / 'snapshot' / SINGLE_FILE).symlink_to(tmp_path / 'blobs' / '0a1b')
  assert set(SafetensorsFolder(tmp_path / 'snapshot').entries) == {'a'}


@pytest.mark.parametrize(
  'files, match',
  [
    ((), 'neither model.safetensors nor'),
    (('pytorch_model.bin',), 'safe_serialization=True'),
    (('pytorch_model.bin.index.json',), 'safe_serialization=True'),
    (('flax_model.msgpack',), 'from_flax=True'),
    (('tf_model.h5',), 'from_tf=True'),
    (('adapter_config.json', 'adapter_model.safetensors'), '--base=MODEL'),
  ],
)
def test_weights_in_other_formats_are_rejected_with_the_remedy(tmp_path, files, match):
  for name in files:
    (tmp_path / name).write_bytes(b'x')
  with pytest.raises(CheckpointError, match=match):
    SafetensorsFolder(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path):
  cases.write_safetensors(tmp_path / SINGLE_FILE, {'a': np.ones([100], 'f4')})
  folder = SafetensorsFolder(tmp_path)
  (tmp_path / SINGLE_FILE).write_bytes((tmp_path / SINGLE_FILE).read_bytes()[:-4])
  with pytest.raises(CheckpointError, match='became shorter'):
    folder.read('a')


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
