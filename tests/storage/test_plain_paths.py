"""Checkpoints below folders whose names Orbax and TensorStore misread: saved, written, read and restored."""

import pathlib
import shutil
import tempfile

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.saving import streaming
from t5x_lite.storage import plain_paths
from tests.checkpoints.sources import t5x_samples

_NAMES = ('run[1]', 'lr=[0.1]', '[!a]', 'a\\b', 'C:\\x', '*', 'a?b', '%5B#{a,b} ü\n', '-x')
_STATE = {'target': {'w': np.arange(6.0).reshape(2, 3)}, 'state': {'step': np.int32(3)}}


@pytest.mark.parametrize('name', _NAMES)
def test_a_checkpoint_is_restored_from_a_folder_of_any_name(name, tmp_path, monkeypatch):
  (tmp_path / 'runa').mkdir()  # What `run[1]` and `a?b` would match.
  monkeypatch.chdir(tmp_path)
  for root in (
    tmp_path / name / 'inner',
    pathlib.Path(name),
  ):  # `-x` and `*` relative to the folder.
    root.mkdir(parents=True, exist_ok=True)
    with checkpoints.CheckpointManager(
      root, save_cfg=checkpoints.SaveCheckpointConfig()
    ) as manager:
      manager.save(3, _STATE)
      manager.wait()
    found = checkpoints.load(root / 'checkpoint_3')
    np.testing.assert_array_equal(found['target']['w'], _STATE['target']['w'])
    assert checkpoints.restore_checkpoint(root / 'checkpoint_3', _STATE).step == 3
    (root / 'checkpoint_3').rename(root / 'moved')
  assert {path.name for path in tmp_path.iterdir()} == {
    'runa',
    name,
  }  # Nothing is written elsewhere.


@pytest.mark.parametrize('name', ['run[1]', 'a\\b'])
def test_other_writers_and_formats(name, tmp_path):
  root = tmp_path / name
  root.mkdir()
  flat = {'target/w': _STATE['target']['w']}
  streaming.write_checkpoint(root, 4, flat, flat.__getitem__)
  with checkpoints.T5xNativeWriter(root / 'checkpoint_5') as writer:
    writer.write('target/w', flat['target/w'])
    writer.write('state/step', np.int32(5))
  for step in (4, 5):
    found = checkpoints.load(root / f'checkpoint_{step}')['target']['w']
    np.testing.assert_array_equal(found, flat['target/w'])
  sample = t5x_samples.unpack(tmp_path / 'samples')['t5x_orbax'] / 'checkpoint_7'
  copy = shutil.copytree(sample, root / 'checkpoint_7')
  assert checkpoints.read_shapes(copy) == checkpoints.read_shapes(sample)
  assert not checkpoints.get_restore_parameters(copy, {'a': 1})['a'].is_ocdbt_checkpoint


def test_a_plain_path_stays_and_a_deleted_link_is_made_again(tmp_path, monkeypatch):
  assert plain_paths.plain_path('runs/a b%#{}') == pathlib.Path('runs/a b%#{}')
  inner = tmp_path / 'x[1]' / 'y[2]'
  inner.mkdir(parents=True)
  found = plain_paths.plain_path(inner / 'checkpoint_1')
  assert found.parent.resolve() == inner.resolve() and found.name == 'checkpoint_1'
  shutil.rmtree(found.parent.parent)
  assert plain_paths.plain_path(inner) == found.parent and found.parent.is_dir()


def test_the_folder_for_temporary_files_may_have_such_a_name(tmp_path, monkeypatch):
  folder = tmp_path / 't[1]'
  folder.mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(folder))
  found = plain_paths.plain_path(folder / 'run')
  assert found.parent.resolve() == folder.resolve() and not set('[\\') & set(str(found))


@pytest.mark.parametrize('name', ['run[1]', 'a\\b'])
def test_a_save_that_cannot_be_opened_fails(name, tmp_path, monkeypatch):
  (tmp_path / name).mkdir()
  write_parts = array_io.write_parts

  def write_elsewhere(directory, state):  # as a library does that misreads a name
    write_parts(directory.with_name('misread'), state)

  monkeypatch.setattr(array_io, 'write_parts', write_elsewhere)
  with checkpoints.CheckpointManager(
    tmp_path / name, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(3, _STATE)
    with pytest.raises(errors.SaveError, match='step 3 could not be written.*state'):
      manager.wait()
  assert not list((tmp_path / name).glob('checkpoint_*'))


@pytest.mark.parametrize(
  'change, got',
  [
    ({'shape': [3, 2]}, r'\[3, 2\] float32, got \[2, 3\] float32'),
    ({'dtype': 'int32'}, r'\[2, 3\] int32, got \[2, 3\] float32'),
    (None, r'target/v of shape and dtype \[1\] int32, got none'),
  ],
)
def test_arrays_that_were_written_are_compared(change, got, tmp_path):
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(3, {'target': {**_STATE['target'], 'none': np.zeros((0, 2))}})
  arrays = dict(manifest.read(tmp_path / 'checkpoint_3').arrays)
  folder = state_io.state_dir(tmp_path / 'checkpoint_3')
  state_io.check_written(folder, arrays)
  if change is None:
    arrays['target/v'] = {'shape': [1], 'dtype': 'int32'}
  else:
    arrays['target/w'] = arrays['target/w'] | change
  with pytest.raises(errors.CheckpointError, match=got):
    state_io.check_written(folder, arrays)
