"""The index of T5X's native form: other forms of it, and damage."""

import os

import flax.serialization
import ml_dtypes
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors


def write_index(root, tree, version=3):
  (root / 'checkpoint').write_bytes(
    flax.serialization.msgpack_serialize({'version': version, 'optimizer': tree})
  )


def _random(*shape, dtype=np.float32):
  return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def test_values_in_the_index_itself(tmp_path):
  half = _random(3, dtype=ml_dtypes.bfloat16)
  chunked = {
    '__msgpack_chunked_array__': True,
    'shape': {'0': 2, '1': 3},
    'chunks': {'0': np.arange(4.0), '1': np.arange(4.0, 6.0)},
  }
  write_index(
    tmp_path,
    {
      'target': {'half': half, 'big': chunked, 'driver': np.ones(2, np.float32)},
      'state': {'step': np.int32(4), 'param_states': None},
      'flax_mutables': {'r': {'b': half}},
    },
  )
  source = checkpoints.open_source(tmp_path)
  assert set(source.shapes()) == {
    'target/half',
    'target/big',
    'target/driver',
    'state/step',
    'flax_mutables/r/b',
  }
  assert source.step == 4 and not source.has_optimizer_state and source.metadata == {}
  np.testing.assert_array_equal(source.read_array('target/big'), np.arange(6.0).reshape(2, 3))
  np.testing.assert_array_equal(source.read_array('flax_mutables/r/b'), half)


@pytest.mark.parametrize(
  'tree, version, message',
  [
    ({'target': {'w': np.ones(2)}}, 1, 'must be an index of T5X.*got version 1'),
    (
      {'target': {'w': 'PLACEHOLDER://target.w'}},
      3,
      "target/w must be an array .*got 'PLACEHOLDER",
    ),
    ([np.ones(2)], 3, 'damaged'),
    (
      {'target': {'w': np.ones(2)}},
      None,
      r"must be an index of T5X.*got \['optimizer', 'version'\]",
    ),
  ],
)
def test_indexes_that_are_rejected(tmp_path, tree, version, message):
  write_index(tmp_path, tree, version)
  with pytest.raises(errors.CheckpointError, match=message):
    checkpoints.open_source(tmp_path)


@pytest.mark.parametrize('part', [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_index(copy, part):
  data = (copy / 'checkpoint').read_bytes()
  (copy / 'checkpoint').write_bytes(data[: int(len(data) * part)])
  with pytest.raises(
    errors.CheckpointDamagedError, match='index .* is damaged.*Copy the checkpoint again'
  ):
    checkpoints.load(copy)


def test_no_other_kind_of_error_comes_of_a_spoilt_index(copy):
  data, rng = (copy / 'checkpoint').read_bytes(), np.random.default_rng(1)
  num_rejected = 0
  for _ in range(200):
    spoilt = bytearray(data)
    for position in rng.integers(0, len(data), 3):
      spoilt[position] = rng.integers(256)
    (copy / 'checkpoint').write_bytes(spoilt)
    try:
      source = checkpoints.open_source(copy)
      source.verify()
    except errors.CheckpointError:
      num_rejected += 1
  assert num_rejected > 100


def test_a_missing_index(copy):
  os.remove(copy / 'checkpoint')
  with pytest.raises(
    errors.CheckpointDamagedError, match="index '.*checkpoint' .*the file is missing"
  ):
    checkpoints.open_source(copy)


def test_factors_of_statistics_are_in_the_index_as_in_t5x(tmp_path):
  arrays = {
    'state/param_states/w/v_row': _random(16),
    'state/param_states/w/v_col': _random(3, 16),
    'state/param_states/w/v': np.zeros(1, np.float32),
    'state/param_states/w/m': _random(16, 3),
    'target/w': _random(1),
  }
  with checkpoints.T5xNativeWriter(tmp_path / 'new/checkpoint_1') as writer:
    for name, array in arrays.items():
      writer.write(name, array)
  folders = [path.name for path in (tmp_path / 'new/checkpoint_1').iterdir() if path.is_dir()]
  assert sorted(folders) == ['state.param_states.w.m', 'target.w']
  source = checkpoints.open_source(tmp_path / 'new/checkpoint_1')
  for name, array in arrays.items():
    np.testing.assert_array_equal(source.read_array(name), array)
