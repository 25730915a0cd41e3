"""Checkpoints below folders whose names Orbax and TensorStore misread: saved, written, read and restored."""

import pathlib
import shutil
import tempfile

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.checkpoints import plain_paths
from t5x_lite.checkpoints import streaming
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
