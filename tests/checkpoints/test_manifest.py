"""Damage is found by the manifest, whatever bit of whatever file it is in."""

import dataclasses
import errno
import hashlib
import random
import re
import shutil

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints import manifest
from t5x_lite.storage import untrusted
from tests.checkpoints import checkpoint_states as states


@pytest.fixture
def run_dir(tmp_path):
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for step in (1, 2, 3):
      manager.save(
        step,
        states.state(step),
        data_state={'position': b'%d' % step, 'shuffle_buffer': bytes(300)},
      )
  return tmp_path


def files_of(checkpoint_dir):
  return sorted(path for path in checkpoint_dir.rglob('*') if path.is_file())


def assert_damaged(checkpoint_dir, name):
  with pytest.raises(
    errors.CheckpointDamagedError, match=f'is damaged: .*{name}.* Restore another checkpoint'
  ) as e:
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
  assert len(files) >= 6 and {'manifest.json', '_METADATA', 'position.bin'} <= {
    path.name for path in files
  }
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
  # The outer object, and samples of its contents.
  for position in {*range(110), *inside, len(data) - 1, len(data) - 2}:
    for bit in range(8):
      flipped = bytearray(data)
      flipped[position] ^= 1 << bit
      path.write_bytes(flipped)
      with pytest.raises(
        errors.CheckpointDamagedError, match='manifest.json (differs from|cannot be read)'
      ):
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
    assert_damaged(
      run_dir / 'checkpoint_3', f'{path.name} has {len(data) + 1} bytes instead of {len(data)}'
    )
    path.write_bytes(data)
  (run_dir / 'checkpoint_3/state/d/extra').write_text('')
  assert_damaged(run_dir / 'checkpoint_3', 'state/d/extra is not in the manifest')
  # Other files outside of the state are allowed.
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
    assert f"checkpoint_{step}' is damaged: state/_METADATA has changed contents" in caplog.text
  restored = checkpoints.CheckpointManager(run_dir).restore(None, states.target())
  assert restored.step == 1 and restored.data_state['position'] == b'1'
  assert_damaged(
    run_dir / 'checkpoint_3', '_METADATA'
  )  # Asked for by name, it is not replaced by another.
  flip_bit(run_dir / 'checkpoint_1/manifest.json', 5, 1)
  with pytest.raises(
    errors.CheckpointDamagedError, match=r'All 3 checkpoint\(s\) .* damaged .*The newest: .*_3'
  ):
    checkpoints.newest_sound_step(run_dir)


@pytest.mark.parametrize('name', ['manifest.json', 'state/_METADATA'])
def test_a_file_that_the_disk_does_not_give_back_is_damage_too(run_dir, monkeypatch, name, caplog):
  # A bad sector: the file exists and opens, but reading it fails.
  unreadable = run_dir / 'checkpoint_3' / name

  def fail(path):
    if str(path) == str(unreadable):
      raise OSError(errno.EIO, 'Input/output error')

  file_digest = hashlib.file_digest
  read_regular = untrusted.read_regular

  def digest_or_fail(file, *args):
    fail(file.name)
    return file_digest(file, *args)

  def read_or_fail(path, *args):
    fail(path)
    return read_regular(path, *args)

  monkeypatch.setattr(hashlib, 'file_digest', digest_or_fail)
  monkeypatch.setattr(untrusted, 'read_regular', read_or_fail)
  with caplog.at_level('WARNING'):
    assert checkpoints.newest_sound_step(run_dir) == 2
  assert re.search(
    rf"checkpoint_3' is damaged: {name} cannot be read \(Input/output error\)", caplog.text
  )
  with pytest.raises(
    errors.CheckpointDamagedError, match=f'{name} cannot be read .*Restore another checkpoint'
  ):
    checkpoints.restore_checkpoint(run_dir / 'checkpoint_3', states.target())


def test_a_renamed_checkpoint_is_not_taken_for_a_later_one(run_dir, caplog):
  shutil.copytree(run_dir / 'checkpoint_1', run_dir / 'checkpoint_40')
  with caplog.at_level('WARNING'):
    assert checkpoints.newest_sound_step(run_dir) == 3
  assert "checkpoint_40' is that of step 1: it was renamed or copied" in caplog.text
  assert (
    checkpoints.restore_checkpoint(run_dir / 'checkpoint_40', states.target()).step == 1
  )  # Named, it is taken.


@pytest.mark.parametrize('step', [2**31, 10**200])
def test_a_step_that_no_counter_holds_is_passed_over(run_dir, caplog, step):
  shutil.copytree(run_dir / 'checkpoint_1', run_dir / f'checkpoint_{step}')
  assert checkpoints.newest_sound_step(run_dir) == 3
  (record,) = caplog.records
  assert f'checkpoint_{step}: steps must be at most 2147483647' in record.getMessage()


def test_damage_after_a_first_check_is_found_too(run_dir):
  # A second check in one process may skip files that have not changed, but not changed ones.
  checkpoint_dir = run_dir / 'checkpoint_3'
  checkpoints.verify_checkpoint(checkpoint_dir)
  flip_bit(next((checkpoint_dir / 'state/d').iterdir()), 0, 0)
  with pytest.raises(errors.CheckpointDamagedError, match='state/d/.* has changed contents'):
    checkpoints.verify_checkpoint(checkpoint_dir)


def test_a_manifest_of_another_format(run_dir):
  root = run_dir / 'checkpoint_3'
  manifest.write(root, dataclasses.replace(manifest.read(root), format_version=99))
  with pytest.raises(
    errors.CheckpointError, match='`format_version` must be 1, got 99; it was written with'
  ):
    checkpoints.restore_checkpoint(root, states.target())


def _saved_equal_numbers(folder, size):
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  state = {
    'target': {str(i): np.ones(size, np.float32) for i in range(200)},
    'state': {'step': np.int32(1), 'v': jax.device_put(np.ones([16, 32], np.float32), sharding)},
  }
  with checkpoints.CheckpointManager(
    folder, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(1, state)
  return folder / 'checkpoint_1'


def test_equal_numbers_are_saved_in_parts_of_any_size(tmp_path):
  folder = _saved_equal_numbers(tmp_path, 250)
  files = [path for path in (folder / 'state').rglob('*') if path.is_file()]
  # Nothing is compressed, also the index, in which small parts of arrays are.
  assert sum(path.stat().st_size for path in files) > 200 * 1000 + 16 * 32 * 4
  found = checkpoints.load(folder)
  assert found['target']['199'].sum() == 250 and found['state']['v'].sum() == 16 * 32


@pytest.mark.parametrize('size, is_small', [(256, True), (257, False)])
def test_the_index_of_an_earlier_checkpoint_may_be_compressed(tmp_path, size, is_small):
  folder = _saved_equal_numbers(tmp_path, size)
  found = manifest.read(folder)
  arrays = {name: entry for name, entry in found.arrays.items() if name != 'state/v'}
  files = {name: {**entry, 'bytes': 5} for name, entry in found.files.items()}
  earlier = dataclasses.replace(found, arrays=arrays, files=files)
  if is_small:
    manifest.write(folder, earlier)
    assert manifest.read(folder) == earlier
  else:
    with pytest.raises(errors.CheckpointError, match='must fit into the .* bytes of the files'):
      manifest.write(folder, earlier)
