"""Arrays in object stores have Orbax's format and are the ones that were saved."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.saving import streaming
from t5x_lite.storage import files
from t5x_lite.storage import object_store

_SAVE = checkpoints.SaveCheckpointConfig(keep=2)


def _mesh(*shape):
  return jax.sharding.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ('a', 'b'))


def _state(mesh):
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('a', 'b'))
  return {
    'target': {
      'w': jax.device_put(jnp.arange(64 * 128.0).reshape(64, 128), sharding),
      'b': jnp.asarray([1.5, -2, 3], jnp.bfloat16),
      'mask': np.array([True, False]),
      'byte': np.arange(5, dtype=np.int8),
    },
    'state': {'step': np.int32(5), 'none': np.zeros((0, 3), np.float32)},
  }


def _shapes(state, sharding=None):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def _check_equal(found, state):
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, state
  )


def test_round_trip_onto_other_meshes(store):
  state = _state(_mesh(4, 2))
  with checkpoints.CheckpointManager(store.root, save_cfg=_SAVE) as manager:
    manager.save(5, state, data_state={'position': b'\0x'}, metrics={'loss': 1.5})
    manager.wait()
    assert manager.all_steps() == [5]
  assert re.fullmatch(
    r'checkpoint_5/dataset/process_0-of-1/attempt-\w+-1/position.bin', store.names()[0]
  )  # no mark
  replicated = jax.sharding.NamedSharding(_mesh(1, 2), jax.sharding.PartitionSpec())
  for shardings in (None, replicated):
    with checkpoints.CheckpointManager(store.root) as manager:
      restored = manager.restore(None, _shapes(state), shardings=shardings)
    assert (restored.step, restored.data_state, restored.is_verified) == (
      5,
      {'position': b'\0x'},
      True,
    )
    _check_equal(restored.state, state)


def test_orbax_reads_the_arrays(s3_store, tmp_path):
  state = _state(_mesh(2, 2))
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_SAVE) as manager:
    manager.save(5, state)
  root = state_io.state_dir(f'{s3_store.root}/checkpoint_5')
  for name in root.find():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes((root / name).read_bytes())
  ocp = state_io.orbax()
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    found = checkpointer.restore(tmp_path)
  del state['state']['none']  # Orbax does not store arrays without elements
  _check_equal(found, state)


def test_orbax_arrays_in_folders_are_read(s3_store, tmp_path):
  ocp = state_io.orbax()
  tree = {
    'target': {'w': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.ones(3, jnp.bfloat16)}
  }
  for zarr3 in (False, True):
    with ocp.Checkpointer(
      ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
    ) as checkpointer:
      checkpointer.save(tmp_path / f'{zarr3}', args=ocp.args.PyTreeSave(tree))
    root = files.path(s3_store.root) / f'{zarr3}'
    for path in (tmp_path / f'{zarr3}').rglob('*'):
      if path.is_file():
        (root / path.relative_to(tmp_path / f'{zarr3}')).upload(path)
    shapes = state_io.read_shapes(root)
    assert shapes['target/b'].dtype == jnp.bfloat16 and shapes['target/w'].shape == (2, 3)
    found = state_io.read_arrays(root, {name: (leaf.dtype, None) for name, leaf in shapes.items()})
    np.testing.assert_array_equal(found['target/w'], tree['target']['w'])
    np.testing.assert_array_equal(found['target/b'], tree['target']['b'])


@pytest.mark.parametrize(
  'shape, dtype, chunk',
  [
    ((8, 4), 'float32', (8, 4)),
    ((2**14, 2**12), 'float32', (2**12, 2**12)),
    ((3, 2**25), 'bfloat16', (3, 2**23)),
    ((3 * 7**9,), 'float32', (3 * 7**9,)),
    ((), 'int32', ()),
  ],
)
def test_chunks_are_halves_of_a_limited_size(shape, dtype, chunk):
  assert array_io._halved(shape, np.dtype(dtype)) == chunk


def test_a_listing_that_is_behind(s3_store, monkeypatch):
  state = _state(_mesh(1, 1))
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_SAVE) as manager:
    with s3_store.proxy.fault(listing_lag=2.0):
      manager.save(5, state)
      manager.wait()
    names = set(manifest.read(files.path(s3_store.root) / 'checkpoint_5').files)
    written = {
      name.removeprefix('checkpoint_5/')
      for name in s3_store.names()
      if name.startswith('checkpoint_5/')
    }
    assert names == written - {'manifest.json'}
    monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.5)
    with s3_store.proxy.fault(listing_lag=60.0):
      manager.save(6, state)
      with pytest.raises(errors.SaveError, match="lacks 'state/"):
        manager.wait()
  assert discovery.all_steps(s3_store.root) == [5]


@pytest.mark.parametrize('damage', ['flip', 'surplus', 'missing'])
def test_hashes_are_verified(s3_store, damage):
  state = _state(_mesh(1, 1))
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_SAVE) as manager:
    manager.save(5, state)
    manager.wait()
    manager.save(6, state)
  root = state_io.state_dir(f'{s3_store.root}/checkpoint_6')
  path = root / max(root.find().items(), key=lambda item: item[1])[0]
  content = bytearray(path.read_bytes())
  content[100] ^= 1
  {
    'flip': lambda: path.write_bytes(bytes(content)),
    'surplus': lambda: (root / 'd' / 'other').write_bytes(b'x'),
    'missing': path.unlink,
  }[damage]()
  with pytest.raises(errors.CheckpointDamagedError, match='is damaged: state/attempt-.*/d/'):
    manifest.verify(f'{s3_store.root}/checkpoint_6')
  with checkpoints.CheckpointManager(s3_store.root) as manager:
    assert manager.restore(None, _shapes(state)).step == 5


def test_one_by_one(store):
  state = {f'target/{i}': np.full((i + 1, 3), i, np.float32) for i in range(3)}
  path = streaming.write_checkpoint(store.root, 7, state, state.__getitem__, metadata={'a': 1})
  assert path == f'{store.root}/checkpoint_7'
  with pytest.raises(errors.CheckpointError, match='must be a new folder'):
    streaming.write_checkpoint(store.root, 7, state, state.__getitem__)
  found = state_io.read_arrays(state_io.state_dir(path), dict.fromkeys(state, (np.float32, None)))
  _check_equal(found, state)

  def fails(name):
    raise ValueError(name)

  with pytest.raises(ValueError, match='target/0'):
    streaming.write_checkpoint(store.root, 8, state, fails)
  assert not [name for name in store.names() if '_8/' in name]


def test_late_writes_of_another_attempt_are_harmless(s3_store, tmp_path):
  state = _state(_mesh(1, 1))
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_SAVE) as manager:
    manager.save(5, state, data_state={'position': b'x'})
  root = files.path(s3_store.root) / 'checkpoint_5'
  late = {
    name.replace('attempt-', 'attempt-0'): b'late' for name in root.find() if 'attempt-' in name
  }
  assert len(late) > 4
  for name, content in late.items():
    (root / name).write_bytes(content)
  with checkpoints.CheckpointManager(s3_store.root) as manager:
    restored = manager.restore(5, _shapes(state))
  assert restored.is_verified and restored.data_state == {'position': b'x'}
  _check_equal(restored.state, state)
  # Copied to a disk, it is a checkpoint too.
  for name in root.find():
    (tmp_path / 'checkpoint_5' / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / 'checkpoint_5' / name).write_bytes((root / name).read_bytes())
  with checkpoints.CheckpointManager(tmp_path) as manager:
    copied = manager.restore(None, _shapes(state))
  assert copied.is_verified
  _check_equal(copied.state, state)


def test_each_attempt_has_separate_folders(s3_store):
  folders = []
  for _ in range(2):
    with checkpoints.CheckpointManager(s3_store.root, save_cfg=_SAVE) as manager:
      for _ in range(2):
        manager.forget_after(0)
        manager.save(1, _state(_mesh(1, 1)))
        manager.wait()
        folders.append(state_io.state_dir(manager.checkpoint_path(1)).name)
  assert len(set(folders)) == 4


def test_errors_of_a_disk_name_the_path_that_the_user_knows(tmp_path):
  directory = tmp_path / 'state'
  directory.write_text('in the way of the folder', encoding='utf-8')
  parts = array_io.host_parts({'target/w': np.ones(3, np.float32)})
  with pytest.raises(OSError, match=re.escape(str(tmp_path))) as caught:
    array_io.write_parts(directory, parts)
  assert '/proc/' not in str(caught.value)


def test_copies_of_a_state_share_no_memory_and_replicas_are_copied_once():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  values = np.arange(32, dtype=np.float32).reshape(8, 4)
  state = {
    'replicated': jax.device_put(values, jax.NamedSharding(mesh, jax.P())),
    'sharded': jax.device_put(values, jax.NamedSharding(mesh, jax.P('data'))),
    'single': jnp.asarray(values),
    'numpy': values.copy(),
    'bfloat16': jnp.asarray(values, jnp.bfloat16),
  }
  found = array_io.host_parts(state)
  for name, parts in found.parts.items():
    assert len(parts) == (8 if name == 'sharded' else 1)
    assert found.arrays[name] == ((8, 4), state[name].dtype, parts[0][1].shape)
  state['numpy'][:] = 0
  pointers = {
    shard.data.unsafe_buffer_pointer()
    for leaf in state.values()
    if isinstance(leaf, jax.Array)
    for shard in leaf.addressable_shards
  }
  jax.tree.map(lambda leaf: leaf.delete(), {**state, 'numpy': None})
  for name, parts in found.parts.items():
    copied = np.zeros((8, 4), np.float32)
    for index, part in parts:
      assert isinstance(part, np.ndarray) and part.ctypes.data not in pointers
      copied[index] = part
    np.testing.assert_array_equal(copied, values, err_msg=name)
