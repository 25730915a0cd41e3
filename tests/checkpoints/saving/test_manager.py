"""Saving: asynchronous, atomic, with the values of the moment; retention; errors of the background."""

import errno
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints.folders import disk
from t5x_lite.storage import files
from tests.checkpoints import checkpoint_states as states

Cfg = checkpoints.SaveCheckpointConfig


def save(directory, steps, cfg=None, seed=0, **kwargs):
  with checkpoints.CheckpointManager(directory, save_cfg=cfg or Cfg()) as manager:
    for step in steps:
      manager.save(step, states.state(step, seed), **kwargs)


@pytest.mark.parametrize('with_shardings', [True, False])
def test_round_trip_from_step_0(tmp_path, with_shardings):
  data_state = {'iterator/position': b'\x00\xff' * 50, '..': b'', 'ü': b'x'}
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    assert manager.latest_step() is None
    assert manager.save(
      0,
      states.state(0),
      data_state=data_state,
      metadata={'param_layout': 't5'},
      metrics={'loss': 2.5},
    )
    restored_shardings = states.shardings() if with_shardings else None
    restored = manager.restore(None, states.target(), shardings=restored_shardings)
    assert manager.all_steps() == [0] and manager.latest_step() == 0
  states.assert_same(restored.state, states.flat_numpy(0))
  assert (restored.step, restored.path) == (0, str(tmp_path / 'checkpoint_0'))
  assert restored.data_state == data_state and restored.num_data_processes == 1
  assert restored.metadata == {'param_layout': 't5'} and restored.metrics == {'loss': 2.5}
  assert restored.is_resuming and restored.is_verified
  for name, leaf in tree_utils.flatten_dict(restored.state).items():
    if with_shardings:
      assert leaf.sharding == states.sharding(states.flat_specs()[name]), name
    else:
      assert isinstance(leaf, np.ndarray), name


def test_values_are_those_of_the_call_though_buffers_are_donated(tmp_path):
  state = states.big_state(1)
  step_fn = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    for step in range(1, 4):
      manager.save(step, state)
      for _ in range(10):
        state = step_fn(state)
      jax.block_until_ready(state)
      manager.wait()
    for step in range(1, 4):
      loaded = checkpoints.load(manager.checkpoint_path(step))
      for leaf in jax.tree.leaves(loaded):
        np.testing.assert_array_equal(leaf, np.full_like(leaf, 1 + 10 * (step - 1)))
  host = {'target': {'w': np.zeros(1000, np.float32)}, 'state': {'step': 5}}
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    manager.save(5, host)
    host['target']['w'] += 1
    manager.wait()
  assert not checkpoints.load(tmp_path / 'checkpoint_5')['target']['w'].any()


def test_save_returns_before_the_commit(tmp_path, monkeypatch):
  let_go = threading.Event()
  hash_files = manifest.hash_files

  def slow_hash_files(*args):
    assert let_go.wait(20)
    return hash_files(*args)

  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    manager.save(1, states.state(1))
    manager.wait()
    monkeypatch.setattr(manifest, 'hash_files', slow_hash_files)
    manager.save(2, states.state(2))
    assert manager.all_steps() == [1]  # Not whole yet, so not there.
    assert checkpoints.latest_step(tmp_path) == 1
    let_go.set()
    manager.wait()
    assert manager.all_steps() == [1, 2]


def test_save_does_not_wait_for_the_disk(tmp_path, monkeypatch):
  # A save takes a copy and returns; not even the folder of the checkpoint is waited for.
  let_go = threading.Event()
  begin = disk.DiskFolder.begin

  def slow_begin(*args):
    assert let_go.wait(20)
    begin(*args)

  monkeypatch.setattr(disk.DiskFolder, 'begin', slow_begin)
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    state = states.state(1)
    assert manager.save(1, state)
    jax.tree.map(lambda leaf: leaf.delete(), state)  # As a step does that is given the buffers.
    let_go.set()
  states.assert_same(checkpoints.load(tmp_path / 'checkpoint_1'), states.flat_numpy(1))


def test_dtype_takes_effect_on_parameters_only(tmp_path):
  state = states.state(1) | {'param_average': {'w': jnp.ones((4,), jnp.float32), 'n': jnp.int32(1)}}
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg(dtype='bfloat16')) as manager:
    manager.save(1, state)
    restored = manager.restore(1, states.shapes(state))
  loaded = tree_utils.flatten_dict(checkpoints.load(tmp_path / 'checkpoint_1'))
  for name, leaf in loaded.items():
    params = name.startswith(('target/', 'param_average/w'))
    assert leaf.dtype == (jnp.bfloat16 if params else state_leaf(state, name).dtype), name
  for name, leaf in tree_utils.flatten_dict(restored.state).items():
    assert leaf.dtype == state_leaf(state, name).dtype
    expected = np.asarray(state_leaf(state, name))
    if name.startswith('target/'):
      assert not np.array_equal(leaf, expected)
      expected = expected.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(leaf, expected)
  assert (
    checkpoints.load(tmp_path / 'checkpoint_1', dtype='float32')['param_average']['w'].dtype
    == np.float32
  )


def state_leaf(state, name):
  return tree_utils.flatten_dict(state)[name]


def test_dataset_state_options(tmp_path):
  save(tmp_path / 'a', [1], Cfg(save_dataset=False), data_state={'position': b'1'})
  restored = checkpoints.restore_checkpoint(tmp_path / 'a/checkpoint_1', states.target())
  assert restored.data_state is None and restored.num_data_processes == 0

  save(tmp_path / 'b', [1, 2, 3], Cfg(keep_dataset_checkpoints=2), data_state={'position': b'1'})
  assert checkpoints.all_dataset_checkpoint_steps(tmp_path / 'b') == [2, 3]
  assert checkpoints.all_steps(tmp_path / 'b') == [1, 2, 3]
  for step, data_state in ((1, None), (2, {'position': b'1'})):
    restored = checkpoints.restore_checkpoint(tmp_path / f'b/checkpoint_{step}', states.target())
    assert restored.data_state == data_state and restored.is_verified
  cfg = checkpoints.RestoreCheckpointConfig('b', restore_dataset=False)
  restored = checkpoints.restore_checkpoint(
    tmp_path / 'b/checkpoint_3', states.target(), restore_cfg=cfg
  )
  assert restored.data_state is None


def test_a_commit_that_fails_at_its_last_step_keeps_the_old_checkpoint(tmp_path, monkeypatch):
  save(tmp_path, [10])
  rename = pathlib.Path.rename

  def fail(path, target):
    if path.name.startswith('checkpoint_10.tmp-'):
      raise OSError(errno.EIO, 'Input/output error')
    return rename(path, target)

  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    with monkeypatch.context() as patch:
      patch.setattr(pathlib.Path, 'rename', fail)
      manager.save(10, states.state(10, seed=1))
      with pytest.raises(errors.CheckpointError, match='step 10 could not be written'):
        manager.wait()
    assert sorted(os.listdir(tmp_path)) == ['.lock', 'checkpoint_10']
    states.assert_same(checkpoints.load(tmp_path / 'checkpoint_10'), states.flat_numpy(10))


def test_same_step_twice(tmp_path):
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    assert manager.save(1, states.state(1))
    assert not manager.save(1, states.state(1, seed=1))
  states.assert_same(checkpoints.load(tmp_path / 'checkpoint_1'), states.flat_numpy(1))
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    manager.restore(1, states.target())
    assert not manager.save(1, states.state(1))  # The run was restored from it.


def test_save_transformation(tmp_path):
  def drop_moments(state_dict, infos):
    assert infos['target']['decoder']['decoder_norm']['scale'].shape == (8,)
    assert infos['state']['step'].name == 'state/step'
    return {**state_dict, 'state': {'step': state_dict['state']['step']}}, infos

  save(tmp_path, [1], Cfg(state_transformation_fns=[drop_moments]))
  loaded = checkpoints.load(tmp_path / 'checkpoint_1')
  assert set(loaded['state']) == {'step'} and set(loaded['target']) == {
    'decoder',
    'encoder',
    'token_embedder',
  }


def test_empty_nodes_and_none_come_back_from_the_target(tmp_path):
  state = {
    'target': {'w': jnp.ones(3)},
    'state': {'step': jnp.int32(1), 'param_states': {'0': {}, '1': None}},
  }
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    manager.save(1, state)
    restored = manager.restore(1, state)
  assert restored.state['state']['param_states'] == {'0': {}, '1': None}


def test_a_failed_write_does_not_affect_later_ones(tmp_path, monkeypatch):
  def disk_full(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')

  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    with monkeypatch.context() as patch:
      patch.setattr(array_io, 'write_parts', disk_full)
      manager.save(1, states.state(1))
      with pytest.raises(errors.SaveError, match='step 1 could not be written'):
        manager.wait()
    for step in (2, 3):
      manager.save(step, states.state(step))
      manager.wait()
  assert checkpoints.all_steps(tmp_path) == [2, 3]


@pytest.mark.parametrize(
  'where',
  [
    pytest.param((manifest, 'hash_files'), marks=pytest.mark.full),
    (files, 'fsync_tree'),
    pytest.param((manifest, 'write'), marks=pytest.mark.full),
  ],
)
def test_background_errors_surface_with_their_step(tmp_path, monkeypatch, where):
  def disk_full(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')

  manager = checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg(keep=1))
  manager.save(1, states.state(1))
  manager.wait()
  with monkeypatch.context() as patch:
    patch.setattr(*where, disk_full)
    manager.save(2, states.state(2))
    with pytest.raises(
      errors.CheckpointError, match='step 2 could not be written .*disk is full.* free disk space'
    ):
      manager.save(3, states.state(3))
  # The older one is untouched, nothing half-written is left, and the next save works.
  assert manager.all_steps() == [1] and sorted(os.listdir(tmp_path)) == ['.lock', 'checkpoint_1']
  manager.save(4, states.state(4))
  manager.close()
  assert checkpoints.all_steps(tmp_path) == [4]
  with monkeypatch.context() as patch:
    patch.setattr(*where, disk_full)
    manager = checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg())
    manager.save(5, states.state(5))
    with pytest.raises(errors.CheckpointError, match='step 5'):
      manager.close()
  checkpoints.lock_model_dir(tmp_path).release()  # Released although `close` raised.


def test_a_full_disk(tmp_path):
  # The kernel limits the size of files, which fails like a full disk while TensorStore writes.
  script = textwrap.dedent("""
    import resource, sys, threading
    import jax.numpy as jnp
    from t5x_lite import checkpoints, errors
    manager = checkpoints.CheckpointManager(sys.argv[1], save_cfg=checkpoints.SaveCheckpointConfig(keep=1))
    state = {'target': {f'w{i}': jnp.arange(20_000.) for i in range(9)}, 'state': {'step': jnp.int32(1)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    def fail(step, size):
      resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
      try:
        manager.save(step, state); manager.wait()
      except errors.CheckpointError as e:
        print('failed:', e)
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for size in (0, 20_000, 0):
      fail(0, size)
    manager.save(1, state); manager.wait()
    fail(2, 20_000)
    print(manager.all_steps())
    manager.save(3, state)
    manager.close()
    assert threading.active_count() == 1  # none keeps the process alive
  """)
  done = subprocess.run(
    [sys.executable, '-W', 'error', '-c', script, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=120,
    env=os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parents[3])},
  )
  assert done.returncode == 0, done.stderr
  assert re.search(
    r'failed: The checkpoint of step 2 could not be .*complete\.\n\[1\]', done.stdout
  ), done.stdout
  assert sorted(os.listdir(tmp_path)) == ['.lock', 'checkpoint_3']
  assert checkpoints.newest_sound_step(tmp_path) == 3
  # The log has one line with the error, and no lines of libraries.
  assert [line for line in done.stderr.splitlines() if 'could not be written' not in line] == []


def test_a_directory_that_is_moved_away_is_a_failed_save(tmp_path):
  run = tmp_path / 'run'
  with checkpoints.CheckpointManager(run, save_cfg=Cfg()) as manager:
    manager.save(1, states.state(1))
    manager.wait()
    run.rename(tmp_path / 'away')
    for taken in (False, True):
      if taken:
        run.mkdir()
      with pytest.raises(OSError, match='No such file|is another folder'):
        manager.check_directory()
      manager.save(2, states.state(2))
      with pytest.raises(
        errors.SaveError, match='step 2 could not be written.*(No such|another folder)'
      ):
        manager.wait()
      assert manager.mark_unsound(1, 1, 'reason') == []
    assert not os.listdir(run)
    run.rmdir()
    (tmp_path / 'away').rename(run)
    manager.check_directory()
    manager.save(3, states.state(3))
  assert checkpoints.all_steps(run) == [1, 3] and not list(run.glob('*.tmp-*'))


def test_a_folder_that_is_renamed_while_it_is_written_is_not_made_again(tmp_path, monkeypatch):
  run = tmp_path / 'run'
  opened = array_io._opened

  def rename_first(*args):
    if run.exists():
      run.rename(tmp_path / 'away')
    return opened(*args)

  monkeypatch.setattr(array_io, '_opened', rename_first)
  with checkpoints.CheckpointManager(run, save_cfg=Cfg()) as manager:
    manager.save(1, states.state(1))
    with pytest.raises(errors.SaveError, match='step 1 could not be written'):
      manager.wait()
  assert os.listdir(tmp_path) == ['away']


def test_a_link_that_is_switched_leads_no_save_elsewhere(tmp_path):
  for name in ('first', 'other'):
    (tmp_path / name).mkdir()
  link = tmp_path / 'link'
  link.symlink_to('first')
  with checkpoints.CheckpointManager(link, save_cfg=Cfg(keep=1)) as manager:
    link.unlink()
    link.symlink_to('other')
    for step in (1, 2):
      manager.save(step, states.state(step))
  assert checkpoints.all_steps(tmp_path / 'first') == [2] and not os.listdir(tmp_path / 'other')


def test_arrays_without_elements(tmp_path):
  state = {
    'target': {'w': jnp.ones((2, 3)), 'void': jnp.zeros((0, 3), jnp.bfloat16)},
    'state': {'step': np.int32(1)},
  }
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    manager.save(1, state)
  path = checkpoints.get_checkpoint_dir(str(tmp_path), 1)
  restored = checkpoints.restore_checkpoint(path, jax.eval_shape(lambda: state)).state
  for tree in (restored, checkpoints.load(path)):
    assert tree['target']['void'].shape == (0, 3)
    np.testing.assert_array_equal(tree['target']['w'], state['target']['w'])
  assert restored['target']['void'].dtype == jnp.bfloat16
  other = {
    'target': {'w': jnp.ones((2, 3)), 'void': jnp.zeros((0, 4), jnp.bfloat16)},
    'state': {'step': np.int32(1)},
  }
  with pytest.raises(errors.CheckpointError, match='target/void'):
    checkpoints.restore_checkpoint(path, jax.eval_shape(lambda: other))


def test_bad_calls(tmp_path):
  with checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg()) as manager:
    for step, error, message in (
      (-1, errors.ConfigError, 'integer >= 0, got -1'),
      (1.5, TypeError, "'float' object"),
    ):
      with pytest.raises(error, match=message):
        manager.save(step, states.state(1))
    with pytest.raises(TypeError, match='not JSON serializable'):
      manager.save(1, states.state(1), metadata={'layout': object()})
    with pytest.raises(
      errors.DirectoryInUseError, match='Another CheckpointManager of this process'
    ):
      checkpoints.CheckpointManager(tmp_path, save_cfg=Cfg())
    assert sorted(os.listdir(tmp_path)) == ['.lock']
    with pytest.raises(errors.CheckpointError, match='There is no checkpoint in'):
      manager.restore(None, states.target())
  with pytest.raises(errors.ConfigError, match='cannot save: it is closed'):
    manager.save(1, states.state(1))
  with pytest.raises(errors.ConfigError, match='cannot save: it is closed'):
    checkpoints.CheckpointManager(tmp_path).save(1, states.state(1))
  with pytest.raises(errors.ConfigError, match='must be a path on a disk or in an object store'):
    checkpoints.CheckpointManager('az://bucket/run')
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.CheckpointError, match='cannot be written'):
    checkpoints.CheckpointManager(tmp_path / 'file/run', save_cfg=Cfg())
