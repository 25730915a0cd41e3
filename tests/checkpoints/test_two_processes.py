"""Two processes save and restore one state together, over gloo on CPU."""

import numpy as np

from t5x_lite import checkpoints
from tests import processes

PROGRAM = """
    import pathlib, sys
    import jax
    from t5x_lite import runtime
    process, directory = runtime.join(runtime.ClusterConfig()).process, pathlib.Path(sys.argv[1])

    import jax.numpy as jnp
    import numpy as np
    from t5x_lite import checkpoints, errors, multihost
    from t5x_lite.checkpoints import builders, manifest
    from t5x_lite.checkpoints.folders import disk

    P = jax.sharding.PartitionSpec
    auto = (jax.sharding.AxisType.Auto,)

    def shardings(*axes):
      mesh = jax.make_mesh((4,), ('x',), axis_types=auto)
      return {'target': {'w': jax.sharding.NamedSharding(mesh, P(*axes)), 'b': jax.sharding.NamedSharding(mesh, P())},
              'state': {'step': jax.sharding.NamedSharding(mesh, P())}}

    def host_state(step):
      return {'target': {'w': np.arange(64, dtype=np.float32).reshape(8, 8) + step, 'b': np.full(3, step, np.float32)},
              'state': {'step': np.int32(step)}}

    def state(step):
      return jax.tree.map(lambda value, sharding: jax.make_array_from_callback(
          value.shape, sharding, lambda index: value[index]), host_state(step), shardings('x'))

    def check(restored, step):
      jax.tree.map(lambda leaf, expected: [
          np.testing.assert_array_equal(shard.data, expected[shard.index]) for shard in leaf.addressable_shards],
          restored.state, host_state(step))
      assert restored.data_state == {'position': b'%d of process %d' % (step, process)}, restored.data_state
      assert restored.num_data_processes == 2 and restored.step == step

    def check_failure(step):
      manager.save(step, state(step))
      try:
        manager.wait()
        raise AssertionError('no error')
      except errors.CheckpointError as e:
        assert f'step {step} could not be written' in str(e), e

    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), host_state(0))
    manager = checkpoints.CheckpointManager(directory, save_cfg=checkpoints.SaveCheckpointConfig(keep=2))
    assert manager.latest_step() is None
    multihost.sync('looked')
    collective = jax.jit(lambda x: jnp.sum(x))
    for step in (1, 2, 3):
      array = state(step)
      manager.save(step, array, data_state={'position': b'%d of process %d' % (step, process)})
      for _ in range(20):  # Collectives of a training step during the barriers of the save.
        collective(array['target']['w']).block_until_ready()
    assert not manager.save(3, state(3))
    assert list(manager.all_steps()) == [2, 3]

    for axes in (('x',), (None, 'x'), ()):  # The same layout, another one, replicated.
      restored = manager.restore(None, target, shardings=shardings(*axes))
      check(restored, 3)
      assert restored.state['target']['w'].sharding == shardings(*axes)['target']['w']
    # Through whole arrays, as transforms need them.
    restored = manager.restore(2, target, shardings=shardings('x'),
                               transformation_fns=[lambda tree, target, *, is_resuming: tree])
    check(restored, 2)
    # Through builders: the mean of two checkpoints, with new rows of an initial state that both processes hold.
    larger = {**target, 'target': {**target['target'], 'w': jax.ShapeDtypeStruct((12, 8), np.float32)}}
    initial = jax.tree.map(lambda leaf, sharding: jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: np.full(leaf.shape, 7, leaf.dtype)[index]), larger, shardings('x'))
    cfg = checkpoints.RestoreCheckpointConfig(builders=[
        builders.Average(str(directory)), builders.NewVocabulary('initializer', params=['w'])])
    restored = checkpoints.restore_checkpoint(
        None, larger, shardings=shardings('x'), restore_cfg=cfg, initial_state_fn=lambda: initial)
    rows = np.concatenate([host_state(2.5)['target']['w'], np.full((4, 8), 7, np.float32)])
    assert restored.step == 3 and restored.state['target']['w'].sharding == shardings('x')['target']['w']
    for shard in restored.state['target']['w'].addressable_shards:
      np.testing.assert_array_equal(shard.data, rows[shard.index])

    # Whichever process reads the damaged file, both resume from the older checkpoint.
    multihost.sync('restored')
    for name, entry in sorted(manifest.read(directory / 'checkpoint_3').files.items()):
      path = directory / 'checkpoint_3' / name
      if not entry['bytes']:
        continue
      if process == 0:
        data = bytearray(path.read_bytes()); data[0] ^= 1; path.write_bytes(data)
      multihost.sync(f'damaged {name}')
      assert checkpoints.newest_sound_step(directory) == 2, name
      multihost.sync(f'seen {name}')
      if process == 0:
        data[0] ^= 1; path.write_bytes(data)
      multihost.sync(f'repaired {name}')

    # The lead fails to commit: both raise, and earlier checkpoints are still there.
    if process == 0:
      write, manifest.write = manifest.write, None
    check_failure(4)
    if process == 0:
      manifest.write = write
    # A process fails to write its part: likewise.
    mark_written = disk.DiskFolder.mark_written
    if process == 1:
      def fail(folder, pending):
        raise OSError('no part of mine')
      disk.DiskFolder.mark_written = fail
    check_failure(5)
    disk.DiskFolder.mark_written = mark_written
    multihost.sync('failed')
    assert list(manager.all_steps()) == [2, 3]
    assert sorted(p.name for p in directory.iterdir()) == ['.lock', 'checkpoint_2', 'checkpoint_3']
    multihost.sync('looked again')
    manager.save(6, state(6))
    manager.close()
    print('steps', list(checkpoints.all_steps(directory)))
"""


def test_two_processes(tmp_path):
  for output in processes.run(PROGRAM, tmp_path / 'run', num_devices=2):
    assert output.endswith('steps [3, 6]\n')
  # One process reads what two have written; the position of the data is then the lead's, and the count says so.
  root = tmp_path / 'run/checkpoint_3'
  assert (
    checkpoints.load(root)['target']['w'].tolist() == (np.arange(64.0).reshape(8, 8) + 3).tolist()
  )
  restored = checkpoints.restore_checkpoint(root, checkpoints.load(root))
  assert restored.num_data_processes == 2 and restored.data_state == {'position': b'3 of process 0'}
