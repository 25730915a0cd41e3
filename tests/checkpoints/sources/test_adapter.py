"""Checkpoints of adapters and their bases as one state, and the identity of a base."""

import os
import pathlib
import shutil

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.sources import base_identity
from t5x_lite.errors import CheckpointDamagedError, CheckpointError, SaveError

KERNEL = np.arange(6, dtype=np.float32).reshape(3, 2)
NORM = np.full(3, 7, np.float32)
A = np.full((3, 1), 2, np.float32)


def _save(folder, target, *, step=0, metadata=None, **sections):
  state = {'target': target, 'state': {'step': np.int32(step)}, **sections}
  with checkpoints.CheckpointManager(
    folder, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(step, state, metadata=metadata)
  return str(folder / f'checkpoint_{step}')


def _compare_all_bytes(path):
  sources.check_base(sources.recorded_base(path), path, all_bytes=True)


def _base(tmp_path, kernel=KERNEL, name='model'):
  return _save(tmp_path / name, {'mlp': {'kernel': kernel}, 'norm': {'scale': NORM}})


def _adapter(tmp_path, base, *, norm=None, metadata=None):
  """Save an adapter of `base` and return its path."""
  target = {'mlp': {'lora_a': A}}
  if norm is not None:
    target['norm'] = {'scale': norm}
  recorded = {'base': base_identity.identify(checkpoints.open_source(base), base)}
  return _save(tmp_path / 'run', target, step=5, metadata=recorded | (metadata or {}))


def test_union(tmp_path):
  base = _base(tmp_path)
  opened = checkpoints.open_source(_adapter(tmp_path, base, norm=NORM + 1))
  assert isinstance(opened, sources.AdapterSource)
  names = {'target/mlp/kernel', 'target/mlp/lora_a', 'target/norm/scale', 'state/step'}
  assert set(opened.shapes()) == names
  assert (opened.step, opened.format) == (5, 't5x_lite')
  assert 'base' not in opened.metadata and opened.verify()
  read = opened.read({name: (np.float32, None) for name in names if name.startswith('target')})
  for name, expected in {
    'target/mlp/kernel': KERNEL,
    'target/mlp/lora_a': A,
    'target/norm/scale': NORM + 1,
  }.items():
    np.testing.assert_array_equal(opened.read_array(name), expected)
    np.testing.assert_array_equal(read[name], expected)
  own = sources.open_source(opened.path).own
  assert set(own.shapes()) == names - {'target/mlp/kernel'}


def test_a_base_that_is_an_adapter_too(tmp_path):
  first = _adapter(tmp_path, _base(tmp_path), norm=NORM + 1)
  recorded = {'base': base_identity.identify(checkpoints.open_source(first), first)}
  second = _save(tmp_path / 'second', {'mlp': {'lora_a': A + 1}}, step=9, metadata=recorded)
  opened = checkpoints.open_source(second)
  np.testing.assert_array_equal(opened.read_array('target/mlp/kernel'), KERNEL)
  np.testing.assert_array_equal(opened.read_array('target/norm/scale'), NORM + 1)
  np.testing.assert_array_equal(opened.read_array('target/mlp/lora_a'), A + 1)


def test_another_base(tmp_path):
  base = _base(tmp_path)
  path = _adapter(tmp_path, base)
  shutil.rmtree(base)
  _base(tmp_path, KERNEL + 1)
  opened = checkpoints.open_source(path)
  assert opened.step == 5  # without the base
  found = base_identity.identify(checkpoints.open_source(base), base)['index_sha256'][:16]
  recorded = sources.open_source(path).own.metadata['base']['index_sha256'][:16]
  with pytest.raises(CheckpointError) as error:
    opened.shapes()
  assert found in str(error.value) and recorded in str(error.value) and base in str(error.value)


def test_a_moved_base(tmp_path):
  base = _base(tmp_path)
  path = _adapter(tmp_path, base)
  moved = str(tmp_path / 'elsewhere')
  shutil.move(base, moved)
  for given in (None, base, str(tmp_path / 'missing')):
    with pytest.raises(
      CheckpointError, match=r'got a missing folder.*--gin\.INITIAL_CHECKPOINT_PATH=PATH'
    ):
      checkpoints.open_source(path, base_path=given).shapes()
  opened = checkpoints.open_source(path, base_path=moved)
  np.testing.assert_array_equal(opened.read_array('target/mlp/kernel'), KERNEL)
  assert sources.recorded_base(path, moved)['path'] == moved
  assert sources.recorded_base(path)['path'] == base


def test_a_base_that_lost_its_position_in_the_data(tmp_path):
  base = tmp_path / 'model'
  saved = checkpoints.SaveCheckpointConfig(keep_dataset_checkpoints=1)
  with checkpoints.CheckpointManager(base, save_cfg=saved) as manager:
    for step in (1, 2):
      state = {'target': {'mlp': {'kernel': KERNEL}}, 'state': {'step': np.int32(step)}}
      manager.save(step, state, data_state={'position': b'1'})
      if step == 1:
        manager.wait()
        path = _adapter(tmp_path, manager.checkpoint_path(1))
  assert not (base / 'checkpoint_1' / 'dataset').exists()
  np.testing.assert_array_equal(
    checkpoints.open_source(path).read_array('target/mlp/kernel'), KERNEL
  )


def test_damage_of_the_base(tmp_path):
  base = _base(tmp_path)
  path = _adapter(tmp_path, base)
  data = next(file for file in (tmp_path / 'model').rglob('d/*') if file.is_file())
  content = bytearray(data.read_bytes())
  content[len(content) // 2] ^= 1
  data.write_bytes(content)
  checkpoints.open_source(path).shapes()  # sizes and the manifest are equal
  with pytest.raises(CheckpointDamagedError, match='changed contents'):
    _compare_all_bytes(path)
  data.write_bytes(content[:-1])
  with pytest.raises(CheckpointError, match='If this base was changed, restore its former files'):
    checkpoints.open_source(path).shapes()


def test_a_base_of_another_program(tmp_path):
  """New values are noticed by some blocks of the files, and a single byte by comparing all bytes."""
  kernel = np.arange(2**21, dtype=np.float32).reshape(2**11, 2**10)
  folder = pathlib.Path(_base(tmp_path, kernel))
  os.remove(folder / 'manifest.json')
  path = _adapter(tmp_path, str(folder))
  assert sources.open_source(path).own.metadata['base']['format'] == 't5x_orbax'
  (folder / 'README.md').write_text('not a file of the arrays')
  _compare_all_bytes(path)
  data = max((f for f in folder.rglob('d/*') if f.is_file()), key=lambda f: f.stat().st_size)
  with data.open('r+b') as file:
    position = data.stat().st_size // 2 + 5000
    file.seek(position)
    byte = file.read(1)
    file.seek(position)
    file.write(bytes([byte[0] ^ 1]))
  checkpoints.open_source(path).shapes()
  with pytest.raises(CheckpointError, match='of sha256 '):
    _compare_all_bytes(path)
  content = np.frombuffer(data.read_bytes(), np.uint8).copy()
  content[len(content) // 4 : len(content) // 2] ^= 1
  data.write_bytes(content.tobytes())
  with pytest.raises(CheckpointError, match='of index_sha256 '):
    checkpoints.open_source(path).shapes()


def test_recorded_paths(tmp_path, monkeypatch):
  (tmp_path / 'real').mkdir()
  (tmp_path / 'link').symlink_to('real')
  monkeypatch.chdir(tmp_path)
  assert base_identity.recorded_path('link') == str(tmp_path / 'link')  # not resolved
  assert base_identity.recorded_path('gs://bucket/model') == 'gs://bucket/model'


@pytest.mark.parametrize(
  'changes', [{'path': ''}, {'path': 3}, {'sha256': 'ab'}, {'index_sha256': None}, {'format': ()}]
)
def test_invalid_records(tmp_path, changes):
  base = _base(tmp_path)
  recorded = base_identity.identify(checkpoints.open_source(base), base) | changes
  if changes == {'format': ()}:
    del recorded['format']
  with pytest.raises(SaveError, match='metadata.base'):
    _save(tmp_path / 'run', {'mlp': {'lora_a': A}}, metadata={'base': recorded})
