"""Checkpoints that are written array by array are like any other: read, verified, restored, and whole or not there."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.checkpoints.saving import streaming
from t5x_lite.errors import CheckpointError

_RNG = np.random.default_rng(0)
_STATE = {
  'state/step': np.asarray(5, np.int32),
  'state/param_states/0/mu/dense/kernel': _RNG.standard_normal((3, 4)).astype(np.float16),
  'target/dense/kernel': _RNG.standard_normal((3, 4)).astype(np.float32),
  'target/dense/bias': _RNG.standard_normal(4).astype(ml_dtypes.bfloat16),
  'target/empty': np.zeros((0, 3), np.float32),
  'flax_mutables/seen': np.asarray([True, False]),
  'flax_mutables/keys': np.asarray([1, 2], np.uint32),
} | {f'target/many_{i}': np.full(2, i, np.int8) for i in range(40)}


def _write(directory, state=None, step=5, read_fn=None, **kwargs):
  state = _STATE if state is None else state
  return streaming.write_checkpoint(directory, step, state, read_fn or state.__getitem__, **kwargs)


def _assert_equal(found, expected):
  assert set(found) == set(expected)
  for name, value in expected.items():
    assert np.asarray(found[name]).dtype == value.dtype and np.shape(found[name]) == value.shape, (
      name
    )
    np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_it_reads_like_any_other(tmp_path):
  path = _write(tmp_path / 'run', metadata={'param_layout': 't5'})
  assert path == str(tmp_path / 'run' / 'checkpoint_5')
  assert checkpoints.verify_checkpoint(path).metadata == {'param_layout': 't5'}
  assert checkpoints.newest_sound_step(tmp_path / 'run') == 5
  _assert_equal(tree_utils.flatten_dict(checkpoints.load(path)), _STATE)
  with checkpoints.CheckpointManager(
    tmp_path / 'saved', save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(5, tree_utils.unflatten_dict(_STATE))
  saved = checkpoints.read_manifest(manager.checkpoint_path(5))
  written = checkpoints.read_manifest(path)
  # A manager saves parameters in one dtype.
  assert {**written.arrays, 'target/dense/bias': None} == {
    **saved.arrays,
    'target/dense/bias': None,
  }
  assert (written.step, written.num_data_processes) == (saved.step, saved.num_data_processes)


def test_it_is_restored_onto_devices_while_training_continues(tmp_path):
  _write(tmp_path)
  mesh = jax.make_mesh((len(jax.devices()),), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  target = tree_utils.unflatten_dict(
    {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in _STATE.items()}
  )
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig(keep=5)
  ) as manager:
    restored = manager.restore(None, target, shardings=sharding)
    assert (restored.step, restored.is_verified, restored.is_resuming) == (5, True, True)
    _assert_equal(tree_utils.flatten_dict(restored.state), _STATE)
    assert restored.state['target']['dense']['kernel'].sharding == sharding
    manager.save(
      6,
      jax.tree.map(
        lambda leaf: leaf + 0 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, restored.state
      ),
    )
  assert checkpoints.all_steps(tmp_path) == [5, 6]


def test_plain_orbax_reads_it(tmp_path):
  _write(tmp_path)
  with ocp.StandardCheckpointer() as checkpointer:
    found = tree_utils.flatten_dict(checkpointer.restore(tmp_path / 'checkpoint_5' / 'state'))
  _assert_equal(found, {name: value for name, value in _STATE.items() if value.size})


def test_arrays_are_asked_for_once_and_in_order(tmp_path):
  asked = []
  names = list(_STATE)
  np.random.default_rng(1).shuffle(names)

  def read(name):
    asked.append(name)
    return np.array(_STATE[name], order='F')

  path = _write(tmp_path, {name: _STATE[name] for name in names}, read_fn=read)
  assert asked == [name for name in names if _STATE[name].size]
  _assert_equal(tree_utils.flatten_dict(checkpoints.load(path)), _STATE)


@pytest.mark.parametrize(
  'wrong, error, words',
  [
    (
      lambda value: value.astype(np.float64),
      CheckpointError,
      r'target/dense/kernel must be float32 .*, got float64',
    ),
    (lambda value: value[:2], CheckpointError, r'must be float32 \(3, 4\), got float32 \(2, 4\)'),
    (lambda value: 1 // 0, ZeroDivisionError, 'by zero'),
  ],
)
def test_failed_writes_leave_no_files(tmp_path, wrong, error, words):
  def read(name):
    return wrong(_STATE[name]) if name == 'target/dense/kernel' else _STATE[name]

  with pytest.raises(error, match=words):
    _write(tmp_path / 'run', read_fn=read)
  assert not (tmp_path / 'run').exists()


def test_nothing_is_replaced(tmp_path):
  path = _write(tmp_path)
  before = checkpoints.read_manifest(path)
  with pytest.raises(CheckpointError, match='must be a new folder'):
    _write(tmp_path)
  assert checkpoints.verify_checkpoint(path) == before
  _write(tmp_path, step=6)
  assert checkpoints.all_steps(tmp_path) == [5, 6]
