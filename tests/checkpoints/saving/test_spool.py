"""A checkpoint that an object store does not take is kept on a disk, and copied to the store by the next run."""

import errno
import os
import shutil

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints.saving import retention
from t5x_lite.checkpoints.saving import spool
from t5x_lite.storage import files
from t5x_lite.storage import object_store
from t5x_lite.storage import open_folders

_CFG = checkpoints.SaveCheckpointConfig()


def _state(value):
  return {'w': np.full((300, 300), value, np.float32)}


def _keep(store, folder, step, monkeypatch):
  """Save `step`, which the store does not take; return the folder of the run in the spool folder."""
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.02)
  monkeypatch.setattr(object_store, '_LEAST_SECONDS', 0.2)
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.2)
  with checkpoints.CheckpointManager(store.root, save_cfg=_CFG, spool_dir=str(folder)) as manager:
    with store.proxy.fault(name='checkpoint_', method='P', status=503):
      manager.save(step, _state(step))
      with pytest.raises(
        errors.SaveError, match=rf'step {step} .* kept in .*checkpoint_{step}.*--spool_dir'
      ):
        manager.wait()
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 20.0)
  return folder / os.listdir(folder)[0]


def _value(root, step):
  with checkpoints.CheckpointManager(root) as manager:
    return manager.restore(step, _state(0)).state['w'][0, 0]


def test_the_newest_is_kept_and_copied(s3_store, tmp_path, monkeypatch):
  for step in (2, 3):
    folder = _keep(s3_store, tmp_path / 'spool', step, monkeypatch)
  assert sorted(os.listdir(folder)) == ['checkpoint_3'] and _value(folder, 3) == 3
  checkpoints.recover_spooled(str(tmp_path / 'spool'), s3_store.root)
  assert _value(s3_store.root, 3) == 3 and os.listdir(folder) == []
  checkpoints.recover_spooled(str(tmp_path / 'spool'), s3_store.root)  # nothing is left
  _keep(s3_store, tmp_path / 'spool', 4, monkeypatch)
  with checkpoints.CheckpointManager(
    s3_store.root, save_cfg=_CFG, spool_dir=str(tmp_path / 'spool')
  ) as manager:
    manager.save(5, _state(5))  # replaces what was kept
  assert os.listdir(folder) == [] and _value(s3_store.root, 5) == 5


def test_metrics_that_were_not_written(s3_store, tmp_path, monkeypatch):
  lines = files.appended(f'{s3_store.root}/train/metrics.jsonl')
  with s3_store.proxy.fault(method='PUT', name='metrics|predictions', status=503):
    lines.append(b'{"step": 1}\n', at_once=True)
    files.write(f'{s3_store.root}/predictions-1.jsonl', 'text', behind=True)
    _keep(s3_store, tmp_path, 2, monkeypatch)
    monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.2)
    with pytest.raises(OSError):
      lines.close()
    open_folders.clear()  # the process ends
  checkpoints.recover_spooled(str(tmp_path), s3_store.root)
  assert (files.path(s3_store.root) / 'train/metrics.jsonl').read_bytes() == b'{"step": 1}\n'
  assert (files.path(s3_store.root) / 'predictions-1.jsonl').read_text() == 'text'


def test_an_old_or_a_damaged_one_is_not_copied(s3_store, tmp_path, monkeypatch, caplog):
  folder = _keep(s3_store, tmp_path, 2, monkeypatch)
  path = max(
    (folder / 'checkpoint_2/state').rglob('*'),
    key=lambda path: path.stat().st_size * path.is_file(),
  )
  content = bytearray(path.read_bytes())
  content[50] ^= 1
  path.write_bytes(content)
  with pytest.raises(errors.CheckpointDamagedError, match='has changed contents'):
    checkpoints.recover_spooled(str(tmp_path), s3_store.root)
  assert s3_store.names() == [] and (folder / 'checkpoint_2').exists()
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    manager.save(7, _state(7))
  caplog.set_level('INFO')
  checkpoints.recover_spooled(str(tmp_path), s3_store.root)
  assert 'step 2 in' in caplog.text and 'is not newer than that of step 7' in caplog.text
  assert os.listdir(folder) == ['checkpoint_2'] and list(checkpoints.all_steps(s3_store.root)) == [
    7
  ]


def test_a_copy_that_fails_is_tried_again(s3_store, tmp_path, monkeypatch):
  _keep(s3_store, tmp_path, 2, monkeypatch)
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.2)
  with (
    s3_store.proxy.fault(name='manifest', method='P', status=503),
    pytest.raises(errors.CheckpointError, match='could not be copied .* Run the command again'),
  ):
    checkpoints.recover_spooled(str(tmp_path), s3_store.root)
  assert list(checkpoints.all_steps(s3_store.root)) == []
  checkpoints.recover_spooled(str(tmp_path), s3_store.root)
  assert _value(s3_store.root, 2) == 2


@pytest.mark.parametrize(
  'spool_dir, model_dir',
  [
    ('s3://bucket/spool', 's3://bucket/run'),
    ('run/spool', 'run'),
    ('run', 'run'),
    ('', 's3://b/r'),
  ],
)
def test_invalid_folders(tmp_path, monkeypatch, spool_dir, model_dir):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(
    errors.ConfigError,
    match='`train.spool_dir` must be a local folder outside of MODEL_DIR, got',
  ):
    spool.Spool(spool_dir, model_dir)
  assert not os.listdir(tmp_path)


def _write(kept, model_dir, number, check_fn=lambda: None):
  """Keep the save `number`, of step 10 * number; return its name there, and the save."""
  arrays = _state(number)
  pending = folders.model_folder(model_dir).new_save(
    10 * number,
    f'0000abcd-{number}',
    arrays={'w': {'shape': [300, 300], 'dtype': 'float32'}},
    metadata={},
    metrics={},
    has_data_state=False,
  )

  def write(here):
    array_io.write_one_by_one(here.state, arrays, arrays.__getitem__)
    check_fn()

  return kept.write(pending, write, lambda name: None).name, pending


def test_an_earlier_save_does_not_replace_a_later_one(tmp_path):
  kept = spool.Spool(str(tmp_path / 'spool'), tmp_path / 'run')
  written = [_write(kept, tmp_path / 'run', number) for number in (2, 1, 2)]
  assert [name for name, _ in written] == ['checkpoint_20'] * 3
  assert os.listdir(kept.folder) == ['checkpoint_20']
  kept.clear(written[1][1])
  assert os.listdir(kept.folder) == ['checkpoint_20']
  kept.clear(written[2][1])
  assert os.listdir(kept.folder) == []


def test_a_folder_that_is_moved_is_made_again(tmp_path, caplog):
  kept = spool.Spool(str(tmp_path / 'spool'), tmp_path / 'run')
  _write(kept, tmp_path / 'run', 1)
  (tmp_path / 'spool').rename(tmp_path / 'moved')
  assert _write(kept, tmp_path / 'run', 1)[0] == 'checkpoint_10'
  assert 'checkpoint_10 was moved or deleted' in caplog.text
  assert os.listdir(kept.folder) == ['checkpoint_10']
  shutil.rmtree(tmp_path / 'spool')
  assert _write(kept, tmp_path / 'run', 2)[0] == 'checkpoint_20'
  assert os.listdir(kept.folder) == ['checkpoint_20'] and _value(kept.folder, 20) == 2


def test_a_folder_that_is_moved_does_not_fail_the_saves_of_the_run_directory(tmp_path):
  folder = tmp_path / 'spool'
  with checkpoints.CheckpointManager(
    tmp_path / 'run', save_cfg=_CFG, spool_dir=str(folder)
  ) as manager:
    for step in (1, 2):
      shutil.rmtree(folder)
      folder.touch()  # not even a folder
      manager.save(step, _state(step))
      manager.wait()
      folder.unlink()
      folder.mkdir()
  assert list(checkpoints.all_steps(tmp_path / 'run')) == [1, 2]


def test_a_full_disk_keeps_the_former_copy_and_no_partial_files(tmp_path):
  kept = spool.Spool(str(tmp_path / 'spool'), tmp_path / 'run')
  _write(kept, tmp_path / 'run', 1)

  def full():
    raise OSError(errno.ENOSPC, 'No space left on device')

  with pytest.raises(OSError, match='No space left'):
    _write(kept, tmp_path / 'run', 2, full)
  assert os.listdir(kept.folder) == ['checkpoint_10'] and _value(kept.folder, 10) == 1
  assert _write(kept, tmp_path / 'run', 3)[0] == 'checkpoint_30'
  assert os.listdir(kept.folder) == ['checkpoint_30']


def test_a_copy_whose_save_was_committed_is_deleted(tmp_path, caplog):
  caplog.set_level('INFO')
  run, folder = tmp_path / 'run', str(tmp_path / 'spool')
  with checkpoints.CheckpointManager(run, save_cfg=_CFG) as manager:
    manager.save(10, _state(1))
  kept = spool.Spool(folder, run)
  _write(kept, run, 1)
  damaged = max((run / 'checkpoint_10/state').rglob('*'), key=lambda path: path.stat().st_size)
  content = damaged.read_bytes()
  damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  checkpoints.recover_spooled(folder, run)
  assert os.listdir(kept.folder) == ['checkpoint_10'] and 'is not used' in caplog.text
  damaged.write_bytes(content)
  checkpoints.recover_spooled(folder, run)
  assert os.listdir(kept.folder) == [] and 'where it is deleted' in caplog.text
  assert _value(run, 10) == 1
  with checkpoints.CheckpointManager(run, save_cfg=_CFG) as manager:
    manager.save(20, _state(5), metadata={'run': {'of': 'another one'}})
  _write(kept, run, 2)
  checkpoints.recover_spooled(folder, run)
  assert os.listdir(kept.folder) == ['checkpoint_20']


def test_a_checkpoint_that_is_not_saved_again_keeps_its_metrics(tmp_path):
  with checkpoints.CheckpointManager(
    tmp_path / 'run', save_cfg=_CFG, spool_dir=str(tmp_path / 'spool')
  ) as manager:
    manager.save(1, _state(1))
    manager.wait()
    manager.record_metrics(1, {'loss': 2.0})
    assert not manager.save(1, _state(1), keep_first=True)
    assert retention.metrics_by_step(tmp_path / 'run', [1]) == {1: {'loss': 2.0}}
    assert manager.save(2, _state(2), keep_first=True)
  (folder,) = (tmp_path / 'spool').iterdir()
  assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.ConfigError, match='must be a folder that can be written'):
    spool.Spool(str(tmp_path / 'file'), 's3://bucket/run')
