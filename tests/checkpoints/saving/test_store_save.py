"""Saves to object stores under faults: nothing half-written is ever a checkpoint, and what was saved stays."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints.folders import store
from t5x_lite.storage import files
from t5x_lite.storage import object_store
from t5x_lite.storage import open_folders

_CFG = checkpoints.SaveCheckpointConfig()
_KILLED = """
import os, signal, sys
import numpy as np
from t5x_lite import checkpoints
from t5x_lite.checkpoints.folders import store
from t5x_lite.storage import files
root, place = sys.argv[1:]
kill = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
state = {'w': np.full((300, 300), 2, np.float32), 'b': np.full(3, 2, np.float32)}
if place == 'begin':
  real = store.StoreFolder.mark_incomplete
  store.StoreFolder.mark_incomplete = lambda *args: (real(*args), kill())
elif place == 'arrays':
  store.StoreFolder.mark_written = kill
elif place == 'manifest':
  real = files.remove
  is_committed = lambda path: path.parent.name == 'checkpoint_2' and (path.parent / 'manifest.json').is_file()
  files.remove = lambda path: kill() if path.name == 'INCOMPLETE' and is_committed(path) else real(path)
elif place == 'deletion':
  real = files.remove
  files.remove = lambda path: kill() if path.name == 'zarr.json' or 'state' in path.parts else real(path)
  checkpoints.remove_checkpoint_dir(root + '/checkpoint_1')
with checkpoints.CheckpointManager(root, save_cfg=checkpoints.SaveCheckpointConfig()) as manager:
  manager.save(2, state)
"""


def _state(value):
  return {'w': np.full((300, 300), value, np.float32), 'b': np.full(3, value, np.float32)}


def _value(root, step):
  with checkpoints.CheckpointManager(root) as manager:
    restored = manager.restore(step, _state(0))
  assert restored.is_verified
  return restored.state['w'][0, 0]


def _steps_of_any_kind(store):
  return sorted({name.split('/')[0] for name in store.names()})


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.05)
  monkeypatch.setattr(object_store, '_LEAST_SECONDS', 0.5)
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 20.0)


@pytest.mark.parametrize(
  'effects',
  [
    {'status': 503, 'times': 2},
    {'cut_upload': 1000, 'times': 2},
    {'lose_answer': True, 'times': 2},
    pytest.param({'status': 429, 'times': 2}, marks=pytest.mark.full),
    pytest.param({'unreachable': True, 'times': 3}, marks=pytest.mark.full),
    pytest.param({'delay': 0.3, 'times': 6}, marks=pytest.mark.full),
  ],
  ids=str,
)
def test_faults_that_pass(store, effects):
  with checkpoints.CheckpointManager(store.root, save_cfg=_CFG) as manager:
    with store.proxy.fault(method='P', name='checkpoint_1', **effects):
      start = time.monotonic()
      manager.save(1, _state(1))
      assert time.monotonic() - start < 1.0  # training continues
      manager.wait()
  assert _value(store.root, 1) == 1 and _steps_of_any_kind(store) == ['checkpoint_1']


def test_a_read_that_is_cut(store):
  with checkpoints.CheckpointManager(store.root, save_cfg=_CFG) as manager:
    manager.save(1, _state(1))
  with store.proxy.fault(method='GET', name='checkpoint_1', cut_download=100, times=3):
    assert _value(store.root, 1) == 1


@pytest.mark.parametrize(
  'place, value', [('begin', 1), ('arrays', 1), ('manifest', 2), ('deletion', None)]
)
@pytest.mark.parametrize('is_saved_before', [pytest.param(False, marks=pytest.mark.full), True])
def test_kill(s3_store, place, value, is_saved_before):
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    manager.save(1, _state(1))
    if is_saved_before:
      manager.wait()
      manager.save(2, _state(1))
  killed = subprocess.run(
    [sys.executable, '-c', _KILLED, s3_store.root, place],
    env={**os.environ, **s3_store.env},
    check=False,
    capture_output=True,
    text=True,
  )
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  if place == 'deletion':
    assert discovery.all_steps(s3_store.root, require_manifest=False) == (
      [2] if is_saved_before else []
    )
  with checkpoints.lock_model_dir(s3_store.root):  # which cleans up
    pass
  expected = {1: 1, 2: 1} if is_saved_before else {1: 1}
  if place == 'manifest':
    expected[2] = value
  if place == 'deletion':
    del expected[1]
  assert {
    step: _value(s3_store.root, step) for step in discovery.all_steps(s3_store.root)
  } == expected
  assert _steps_of_any_kind(s3_store) == [f'checkpoint_{step}' for step in expected]


def test_checkpoints_that_are_replaced(s3_store):
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    manager.save(1, _state(1))
    manager.wait()
    manager.forget_after(0)
    with s3_store.proxy.fault(name='checkpoint_1/state', operation='write', status=403):
      manager.save(1, _state(2))
      with pytest.raises(errors.SaveError, match='PERMISSION_DENIED'):
        manager.wait()
    assert _value(s3_store.root, 1) == 1  # back in its place
    manager.save(1, _state(3))
    manager.wait()
    assert _value(s3_store.root, 1) == 3
    checkpoints.pin_checkpoint(manager.checkpoint_path(1))
    manager.forget_after(0)
    manager.save(1, _state(4))
    manager.wait()
  assert _value(s3_store.root, 1) == 4
  (kept,) = [name for name in _steps_of_any_kind(s3_store) if 'replaced' in name]
  assert manifest.verify(files.path(s3_store.root) / kept).step == 1


def test_a_deletion_that_is_interrupted_has_a_mark(s3_store):
  folder = folders.model_folder(s3_store.root)
  path = folder.path / 'checkpoint_1'
  # No folder of an attempt, like an uploaded checkpoint: only the mark says that the deletion began.
  for name in ('dataset/position', 'manifest.json'):
    files.write(path / name, '{}')
  with s3_store.proxy.fault(name='position', operation='delete', status=403):
    with pytest.raises(OSError):
      folder.delete(path, path.name)
  assert discovery.is_incomplete(path)


def test_an_upload_that_is_interrupted(s3_store, tmp_path, monkeypatch):
  with checkpoints.CheckpointManager(tmp_path, save_cfg=_CFG) as manager:
    manager.save(1, _state(1))
  folder = folders.model_folder(s3_store.root)
  target = folder.path / 'checkpoint_1'
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.2)
  with s3_store.proxy.fault(name='manifest', method='P', status=503), pytest.raises(OSError):
    folder.upload(tmp_path / 'checkpoint_1', 'checkpoint_1')
  assert discovery.all_steps(
    s3_store.root, require_manifest=False
  ) == [] and discovery.is_incomplete(target)
  folder.upload(tmp_path / 'checkpoint_1', 'checkpoint_1')
  assert _value(s3_store.root, 1) == 1
  with pytest.raises(errors.CheckpointError, match='must be a new folder'):
    folder.upload(tmp_path / 'checkpoint_1', 'checkpoint_1')


def test_a_folder_of_another_program_is_not_taken_for_remains(s3_store):
  (files.path(s3_store.root) / 'checkpoint_3' / 'checkpoint').write_bytes(b'x')
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    assert discovery.all_steps(s3_store.root, require_manifest=False) == [3]
    manager.save(3, _state(3))
  assert _value(s3_store.root, 3) == 3
  (kept,) = [name for name in _steps_of_any_kind(s3_store) if 'replaced' in name]
  assert f'{kept}/checkpoint' in s3_store.names()


def test_metrics_of_a_resumed_run_that_the_store_did_not_take(s3_store, monkeypatch, tmp_path):
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.2)
  name = f'{s3_store.root}/train/metrics.jsonl'
  file = files.appended(name)
  file.append(b'1\n', at_once=True)
  file.close()
  resumed = files.appended(name)
  with (
    checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG, spool_dir=str(tmp_path)) as manager,
    s3_store.proxy.fault(name='checkpoint_|metrics', status=503),
  ):
    resumed.append(b'2\n', at_once=True)
    manager.save(1, _state(1))
    with pytest.raises(errors.SaveError, match='kept in'):
      manager.wait()
  open_folders.clear()  # as if the process had ended
  checkpoints.recover_spooled(str(tmp_path), s3_store.root)
  assert b''.join(part.read_bytes() for part in files.parts(name)) == b'1\n2\n'


def test_a_run_that_lost_its_lease_leaves_the_save_of_the_next_owner_alone(s3_store, monkeypatch):
  def lose(folder, pending, check_fn):
    del check_fn
    # the next owner removes remains, and saves the same step
    folder.delete(pending.final, pending.final.name)
    folder.mark_incomplete(pending.final, 'of another run')
    raise errors.DirectoryInUseError('lost')

  monkeypatch.setattr(store.StoreFolder, 'commit', lose)
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    manager.save(1, _state(1))
    with pytest.raises(errors.DirectoryInUseError):
      manager.wait()
  assert s3_store.names() == ['checkpoint_1/INCOMPLETE']


def test_a_lease_that_is_lost_while_the_manifest_is_written_again(s3_store, monkeypatch):
  is_lost = []

  def check():
    if is_lost:
      raise errors.DirectoryInUseError('lost')

  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    monkeypatch.setattr(manager._lock, 'check', check)
    with s3_store.proxy.fault(method='P', name='manifest.json', status=503) as fault:
      manager.save(1, _state(1))
      while not fault.hits:
        time.sleep(0.01)
      is_lost.append(True)
    with pytest.raises(errors.DirectoryInUseError):
      manager.wait()
    assert manager.all_steps() == []


def test_a_commit_whose_mark_cannot_be_removed(s3_store):
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    with s3_store.proxy.fault(method='DELETE', name='INCOMPLETE', status=403):
      manager.save(1, _state(1))
      manager.wait()
  assert _value(s3_store.root, 1) == 1
  with checkpoints.lock_model_dir(s3_store.root):
    pass
  assert 'checkpoint_1/INCOMPLETE' not in s3_store.names()


def test_a_spool_folder_that_is_broken_too(s3_store, monkeypatch, tmp_path):
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.2)
  with checkpoints.CheckpointManager(
    s3_store.root, save_cfg=_CFG, spool_dir=str(tmp_path)
  ) as manager:
    shutil.rmtree(manager._spool.folder)
    with s3_store.proxy.fault(name='checkpoint_', method='P', status=503):
      manager.save(1, _state(1))
      with pytest.raises(errors.SaveError, match='did not answer'):
        manager.wait()


def test_a_manifest_comes_after_all_that_was_written_before(s3_store, monkeypatch):
  lines = files.appended(f'{s3_store.root}/train/metrics.jsonl')
  write_parts = array_io.write_parts

  def write(*args):
    write_parts(*args)
    lines.append(b'{"step": 1}\n', at_once=True)
    files.write(f'{s3_store.root}/predictions-1.jsonl', 'text', behind=True)

  monkeypatch.setattr(array_io, 'write_parts', write)
  with s3_store.proxy.fault(name='metrics|predictions', method='PUT', delay=1.0):
    with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
      manager.save(1, _state(1))
      manager.wait()
      assert {'train/metrics.jsonl', 'predictions-1.jsonl', 'checkpoint_1/manifest.json'} <= set(
        s3_store.names()
      )
  lines.close()


def test_a_kept_checkpoint_that_is_damaged(s3_store, monkeypatch, tmp_path):
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.5)
  with (
    checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG, spool_dir=str(tmp_path)) as manager,
    s3_store.proxy.fault(name='checkpoint_', method='P', status=503),
  ):
    manager.save(3, _state(3))
    with pytest.raises(errors.SaveError):
      manager.wait()
  (next(tmp_path.glob('*/checkpoint_3')) / 'state/_METADATA').write_text('{}')
  with pytest.raises(
    errors.CheckpointDamagedError, match='To go on without it, from step 0 in .*, delete'
  ):
    checkpoints.recover_spooled(str(tmp_path), s3_store.root)
  assert discovery.all_steps(s3_store.root, require_manifest=False) == []


def test_late_writes_below_a_deleted_checkpoint(s3_store):
  with checkpoints.CheckpointManager(s3_store.root, save_cfg=_CFG) as manager:
    manager.save(1, _state(1))
  (files.path(s3_store.root) / 'checkpoint_2/state/attempt-x/d/late').write_bytes(b'x')
  assert list(discovery.all_steps(s3_store.root, require_manifest=False)) == [1]
  with checkpoints.lock_model_dir(s3_store.root):
    assert _steps_of_any_kind(s3_store) == ['.lock', 'checkpoint_1']
  assert _value(s3_store.root, 1) == 1
