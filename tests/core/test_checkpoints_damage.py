"""Damage is found, whatever bit of whatever file it is in; the lock; and what a killed run leaves."""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from t5x_lite import checkpoints, errors
from t5x_lite.checkpoints import lock as lock_lib
from t5x_lite.checkpoints import manifest
from tests.core import checkpoint_states as states

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture
def run_dir(tmp_path):
  with checkpoints.CheckpointManager(tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()) as manager:
    for step in (1, 2, 3):
      manager.save(step, states.state(step), data_state={'position': b'%d' % step, 'shuffle_buffer': bytes(300)})
  return tmp_path


def files_of(checkpoint_dir):
  return sorted(path for path in checkpoint_dir.rglob('*') if path.is_file())


def assert_damaged(checkpoint_dir, name):
  with pytest.raises(errors.CheckpointDamagedError, match=f'is damaged: .*{name}.* Restore another checkpoint') as e:
    checkpoints.restore_checkpoint(checkpoint_dir, states.target())
  assert str(checkpoint_dir) in str(e.value)


def flip_bit(path, position, bit):
  data = bytearray(path.read_bytes())
  data[position] ^= 1 << bit
  path.write_bytes(data)


def test_one_flipped_bit_in_any_file(run_dir):
  seed = random.randrange(2**32)
  print('seed', seed)
  rng = random.Random(seed)
  checkpoint_dir = run_dir / 'checkpoint_3'
  files = [path for path in files_of(checkpoint_dir) if path.stat().st_size]
  assert len(files) >= 10 and {'manifest.json', '_METADATA', 'position.bin'} <= {path.name for path in files}
  for path in files:
    for position in {0, path.stat().st_size - 1, rng.randrange(path.stat().st_size)}:
      bit = rng.randrange(8)
      flip_bit(path, position, bit)
      assert_damaged(checkpoint_dir, path.name)
      flip_bit(path, position, bit)
  assert checkpoints.restore_checkpoint(checkpoint_dir, states.target()).is_verified


def test_any_bit_of_the_manifest(run_dir):
  path = run_dir / 'checkpoint_3/manifest.json'
  data = path.read_bytes()
  seed = random.randrange(2**32)
  print('seed', seed)
  inside = random.Random(seed).sample(range(len(data)), 50)
  for position in {*range(110), *inside, len(data) - 1, len(data) - 2}:  # The envelope, and samples of what is in it.
    for bit in range(8):
      flipped = bytearray(data)
      flipped[position] ^= 1 << bit
      path.write_bytes(flipped)
      with pytest.raises(errors.CheckpointDamagedError, match='manifest.json is not what was written'):
        checkpoints.read_manifest(path.parent)
  path.write_bytes(data)
  assert checkpoints.read_manifest(path.parent).step == 3


def test_missing_truncated_and_surplus_files(run_dir):
  for path in files_of(run_dir / 'checkpoint_3'):
    if path.name == 'manifest.json':
      continue  # Its absence is another case: a checkpoint without a manifest.
    data = path.read_bytes()
    path.unlink()
    assert_damaged(run_dir / 'checkpoint_3', f'{path.name} is missing')
    path.write_bytes(data + b'\0')
    assert_damaged(run_dir / 'checkpoint_3', f'{path.name} has {len(data) + 1} bytes instead of {len(data)}')
    path.write_bytes(data)
  (run_dir / 'checkpoint_3/state/d/extra').write_text('')
  assert_damaged(run_dir / 'checkpoint_3', 'state/d/extra was not there when it was written')
  # Beside the state people may leave what they like.
  (run_dir / 'checkpoint_2/notes.txt').write_text('the good one')
  checkpoints.pin_checkpoint(run_dir / 'checkpoint_2')
  assert checkpoints.restore_checkpoint(run_dir / 'checkpoint_2', states.target()).step == 2


def test_latest_takes_the_newest_sound_one_and_says_so(run_dir, caplog):
  for step in (2, 3):
    flip_bit(run_dir / f'checkpoint_{step}/state/_METADATA', 5, 1)
  cfg = checkpoints.RestoreCheckpointConfig(str(run_dir))
  with caplog.at_level('WARNING'):
    found = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  assert found == (cfg, [str(run_dir / 'checkpoint_1')])
  for step in (2, 3):
    assert f"checkpoint_{step}' is damaged: state/_METADATA has other contents than were written" in caplog.text
  restored = checkpoints.CheckpointManager(run_dir).restore(None, states.target())
  assert restored.step == 1 and restored.data_state['position'] == b'1'
  assert_damaged(run_dir / 'checkpoint_3', '_METADATA')  # Asked for by name, it is not replaced by another.
  flip_bit(run_dir / 'checkpoint_1/manifest.json', 5, 1)
  with pytest.raises(errors.CheckpointDamagedError, match=r'All 3 checkpoint\(s\) .* damaged .*; the newest: .*_3'):
    checkpoints.newest_sound_step(run_dir)


@pytest.mark.parametrize('name', ['manifest.json', 'state/_METADATA'])
def test_a_file_that_the_disk_does_not_give_back_is_damage_too(run_dir, monkeypatch, name, caplog):
  # What a bad sector looks like: the file is there and opens, and reading it fails.
  unreadable = run_dir / 'checkpoint_3' / name

  def refuse(path):
    if str(path) == str(unreadable):
      raise OSError(errno.EIO, 'Input/output error')

  file_digest, read_bytes = hashlib.file_digest, pathlib.Path.read_bytes
  monkeypatch.setattr(hashlib, 'file_digest', lambda f, *args: (refuse(f.name), file_digest(f, *args))[1])
  monkeypatch.setattr(pathlib.Path, 'read_bytes', lambda path: (refuse(path), read_bytes(path))[1])
  with caplog.at_level('WARNING'):
    assert checkpoints.newest_sound_step(run_dir) == 2
  assert re.search(rf"checkpoint_3' is damaged: {name} cannot be read \(Input/output error\)", caplog.text)
  with pytest.raises(errors.CheckpointDamagedError, match=f'{name} cannot be read .*Restore another checkpoint'):
    checkpoints.restore_checkpoint(run_dir / 'checkpoint_3', states.target())


def test_a_renamed_checkpoint_is_not_taken_for_a_later_one(run_dir, caplog):
  shutil.copytree(run_dir / 'checkpoint_1', run_dir / 'checkpoint_40')
  with caplog.at_level('WARNING'):
    assert checkpoints.newest_sound_step(run_dir) == 3
  assert "checkpoint_40' is that of step 1: it has been renamed or copied" in caplog.text
  assert checkpoints.restore_checkpoint(run_dir / 'checkpoint_40', states.target()).step == 1  # Named, it is taken.


@pytest.mark.parametrize('step', [2**31, 10**200])
def test_a_step_that_no_counter_holds_is_passed_over(run_dir, caplog, step):
  shutil.copytree(run_dir / 'checkpoint_1', run_dir / f'checkpoint_{step}')
  assert checkpoints.newest_sound_step(run_dir) == 3
  (record,) = caplog.records
  assert f'checkpoint_{step} is not looked at: steps must be at most 2147483647' in record.getMessage()


def test_damage_after_a_first_check_is_found_too(run_dir):
  # A second check in one process may skip files that have not changed, but not changed ones.
  checkpoint_dir = run_dir / 'checkpoint_3'
  checkpoints.verify_checkpoint(checkpoint_dir)
  flip_bit(next((checkpoint_dir / 'state/d').iterdir()), 0, 0)
  with pytest.raises(errors.CheckpointDamagedError):
    checkpoints.verify_checkpoint(checkpoint_dir)


def test_a_manifest_of_another_format(run_dir):
  root = run_dir / 'checkpoint_3'
  manifest.write(root, dataclasses.replace(manifest.read(root), format_version=99))
  with pytest.raises(errors.CheckpointError, match='is of format 99, and this version of t5x_lite reads format 1'):
    checkpoints.restore_checkpoint(root, states.target())


# ---- the lock ------------------------------------------------------------------------------------------------------


def start(script, *args):
  return subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(script), *map(str, args)], stdout=subprocess.PIPE, text=True,
      env=os.environ | {'PYTHONPATH': str(REPOSITORY), 'JAX_PLATFORMS': 'cpu'})


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path):
  # The holder has forked a child, which lives on with a copy of its open files: no reason to stay locked.
  holder = start('''
      import os, sys, time, warnings
      from t5x_lite import checkpoints
      warnings.simplefilter('ignore')
      lock = checkpoints.lock_model_dir(sys.argv[1])
      child = os.fork()
      if child:
        print(child, flush=True)
      time.sleep(120)
      ''', tmp_path / 'run')
  child = int(holder.stdout.readline())
  try:
    with pytest.raises(errors.DirectoryInUseError, match=f'in use by process {holder.pid} on host .* MODEL_DIR') as e:
      checkpoints.lock_model_dir(tmp_path / 'run')
    assert e.value.exit_code == 5
    with pytest.raises(errors.DirectoryInUseError):
      checkpoints.CheckpointManager(tmp_path / 'run', save_cfg=checkpoints.SaveCheckpointConfig())
    checkpoints.CheckpointManager(tmp_path / 'run')  # To look is allowed.
    holder.kill()
    holder.wait()
    os.kill(child, 0)  # The child lives.
    with checkpoints.lock_model_dir(tmp_path / 'run') as lock:
      assert lock.held
      assert json.loads((tmp_path / 'run' / lock_lib.LOCK_FILENAME).read_text())['pid'] == os.getpid()
  finally:
    holder.kill()
    holder.wait()
    holder.stdout.close()
    os.kill(child, signal.SIGKILL)


def test_a_directory_that_cannot_be_tidied_up_is_not_kept_locked(tmp_path, monkeypatch):
  (tmp_path / 'checkpoint_1.tmp-x').mkdir()
  with monkeypatch.context() as patch:
    patch.setattr(shutil, 'rmtree', lambda path: (_ for _ in ()).throw(PermissionError(13, 'Permission denied')))
    with pytest.raises(errors.CheckpointError, match='cannot be written'):
      checkpoints.lock_model_dir(tmp_path)
  lock = checkpoints.lock_model_dir(tmp_path)
  lock.release()
  assert not lock.held


def test_the_lock_may_be_taken_again_by_its_process(tmp_path):
  first = checkpoints.lock_model_dir(tmp_path)
  with checkpoints.lock_model_dir(str(tmp_path) + '/../' + tmp_path.name) as second:
    assert second is first
  assert first.held
  probe = '''
      import sys
      from t5x_lite import checkpoints, errors
      try:
        checkpoints.lock_model_dir(sys.argv[1])
        print('free')
      except errors.DirectoryInUseError:
        print('held')
      '''
  assert start(probe, tmp_path).communicate()[0] == 'held\n'
  first.release()
  first.release()
  assert not first.held and start(probe, tmp_path).communicate()[0] == 'free\n'
  with pytest.raises(errors.ConfigError, match='remote path'):
    checkpoints.lock_model_dir('s3://bucket/run')


# ---- kill -9 -------------------------------------------------------------------------------------------------------

def test_at_every_instant_of_a_commit_the_old_or_the_new_is_whole(tmp_path):
  # Python announces each rename, removal, creation and opening before it happens: what lies on disk at that moment is
  # what a kill at that moment would leave. Watched is the thread that commits.
  run, snapshots = tmp_path / 'run', []
  watching = threading.Event()

  def hook(event, args):
    if (watching.is_set() and event in ('os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'open')
        and (str(run) in str(args[0]) or event in ('os.remove', 'os.rmdir'))
        and re.fullmatch(r'checkpoint-\d+', threading.current_thread().name)):
      watching.clear()  # The copy itself is not to be watched.
      copy = tmp_path / f'copy_{len(snapshots)}'
      shutil.copytree(run, copy)
      snapshots.append((event, str(args[0]), copy, list(committed)))
      watching.set()

  sys.addaudithook(hook)
  committed = []
  cfg = checkpoints.SaveCheckpointConfig(keep=2, keep_dataset_checkpoints=1)

  def save(manager, step, seed):
    manager.save(step, states.state(step, seed), data_state={'position': b'%d' % step})
    manager.wait()
    committed.append(step)

  with checkpoints.CheckpointManager(run, save_cfg=cfg) as manager:
    save(manager, 1, 0)
    watching.set()
    save(manager, 2, 0)
  with checkpoints.CheckpointManager(run, save_cfg=cfg) as manager:
    save(manager, 2, 1)  # Takes the place of the one above.
    save(manager, 3, 0)  # Lets go of the first.
  watching.clear()

  assert len(snapshots) > 50
  seen = set()
  for event, path, copy, committed_then in snapshots:
    checkpoints.CheckpointManager(copy, save_cfg=cfg).close()
    newest = checkpoints.newest_sound_step(copy)
    assert newest is not None and newest >= max(committed_then), (event, path)
    for step in checkpoints.all_steps(copy):
      checkpoints.verify_checkpoint(copy / f'checkpoint_{step}')
    loaded = checkpoints.load(copy / f'checkpoint_{newest}')
    seed = int(not np.array_equal(loaded['target']['decoder']['decoder_norm']['scale'],
                                  states.flat_numpy(newest)['target/decoder/decoder_norm/scale']))
    states.assert_same(loaded, states.flat_numpy(newest, seed))
    seen.add((newest, seed))
    shutil.rmtree(copy)
  assert seen == {(1, 0), (2, 0), (2, 1), (3, 0)}


SAVER = '''
    import sys
    import jax.numpy as jnp, numpy as np
    from t5x_lite import checkpoints

    def state(value):
      return {'target': {f'w{i}': jnp.full((256, 1024), value, jnp.float32) for i in range(6)},
              'state': {'step': jnp.int32(value)}}

    manager = checkpoints.CheckpointManager(
        sys.argv[1], save_cfg=checkpoints.SaveCheckpointConfig(keep=2, keep_dataset_checkpoints=1))
    step = checkpoints.newest_sound_step(sys.argv[1])
    step = 0 if step is None else step + 1
    print('ready', flush=True)
    while True:
      manager.save(step, state(step), data_state={'position': b'%d' % step})
      manager.wait()
      print(step, flush=True)
      # Each third step is saved a second time, as a run does that takes the place of another's checkpoints.
      if step % 3 == 0:
        manager._own_steps.clear()
        manager.save(step, state(step), data_state={'position': b'%d' % step})
      step += 1
    '''


def kill_at_random_moments(directory, num_kills, caplog):
  seed = random.randrange(2**32)
  print('seed', seed)
  rng = random.Random(seed)
  newest = -1
  for number in range(num_kills):
    saver = start(SAVER, directory)
    assert saver.stdout.readline() == 'ready\n'
    if newest < 0 and number == num_kills - 1:  # A slow machine may have committed nothing before any kill.
      newest = int(saver.stdout.readline())
    time.sleep(rng.uniform(0.0, 0.8))
    saver.kill()
    output = saver.communicate()[0].splitlines()
    assert saver.returncode == -signal.SIGKILL
    committed = max([newest, *(int(line) for line in output if line.isdigit())])
    copy = directory.parent / 'copy'
    shutil.copytree(directory, copy, symlinks=True)
    # What the next run does first, on a copy, so that the next saver meets the original.
    checkpoints.CheckpointManager(copy, save_cfg=checkpoints.SaveCheckpointConfig()).close()
    caplog.clear()
    newest = checkpoints.newest_sound_step(copy)
    if newest is None:
      assert committed == -1 and checkpoints.all_steps(copy) == []
      newest = -1
    else:
      assert newest >= committed, 'a committed checkpoint was lost'
      assert 'damaged' not in caplog.text
      for step in checkpoints.all_steps(copy):
        restored = checkpoints.restore_checkpoint(
            copy / f'checkpoint_{step}', checkpoints.load(copy / f'checkpoint_{step}'))
        assert restored.is_verified and restored.step == step == restored.state['state']['step']
        for leaf in restored.state['target'].values():
          np.testing.assert_array_equal(leaf, np.full((256, 1024), step, np.float32))
        if step == newest:
          assert restored.data_state == {'position': b'%d' % step}
      leftover = [n for n in os.listdir(copy) if n != '.lock' and not checkpoints.all_steps(copy)]
      assert leftover == []
    assert all(n == '.lock' or n.removeprefix('checkpoint_').isdigit() for n in os.listdir(copy)), os.listdir(copy)
    shutil.rmtree(copy)
  assert newest >= 0
  return newest


def test_kill(tmp_path, caplog):
  (tmp_path / 'run').mkdir()
  kill_at_random_moments(tmp_path / 'run', 3, caplog)


@pytest.mark.full
def test_kill_many_times(tmp_path, caplog):
  (tmp_path / 'run').mkdir()
  assert kill_at_random_moments(tmp_path / 'run', 60, caplog) >= 20
