"""Runs of one process share no state of files, requests, locks and manifests."""

import concurrent.futures
import contextlib
import threading

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.storage import files
from t5x_lite.storage import object_store
from t5x_lite.storage import open_folders

_CFG = checkpoints.SaveCheckpointConfig()


@pytest.fixture(autouse=True)
def new_table():
  open_folders.clear()
  yield
  open_folders.clear()


def test_the_nearest_folder_counts():
  run = open_folders.open_folder('s3://bucket/run')
  below = open_folders.open_folder('s3://bucket/run/eval')
  other = open_folders.open_folder('s3://bucket/runs')
  assert open_folders.open_folder('s3://bucket/run') is run
  assert open_folders.folder_of('s3://bucket/run') is run
  assert open_folders.folder_of('s3://bucket/run/train/x') is run
  assert open_folders.folder_of('s3://bucket/run/eval/x') is below
  bucket = open_folders.folder_of('s3://bucket/data/x')
  assert bucket.name == 's3://bucket' and open_folders.folder_of('s3://bucket/y') is bucket
  assert set(open_folders.folders_around('s3://bucket/run/x')) == {run, below, bucket}
  assert set(open_folders.folders_around('s3://bucket/runs/x')) == {other, bucket}
  disk = open_folders.folder_of('/data/x')
  assert disk.name == '/' and open_folders.folders_around('/') == [disk]


def test_limits_of_requests(s3_store, tmp_path):
  run = files.path(f'{s3_store.root}/run')
  other = files.path(f'{s3_store.root}/other')
  data = files.path('gs://data/x')

  def limits():
    return [object_store.retry_seconds(each / 'x') for each in (run, other, data)]

  assert limits() == [object_store.RETRY_SECONDS] * 3
  files.set_store_seconds(str(run), 5.0)
  assert limits() == [5.0, 5.0, 5.0]  # the data of the only run has its limit
  files.set_store_seconds(str(other), 7.0)
  assert limits() == [5.0, 7.0, 7.0]  # and no run's data is given up before its own limit
  with checkpoints.lock_model_dir(tmp_path):
    assert limits() == [5.0, 7.0, object_store.RETRY_SECONDS]
  with checkpoints.lock_model_dir(str(run)):
    pass
  assert limits() == [7.0, 7.0, 7.0]  # the run has ended


@pytest.mark.parametrize(
  'failing, surviving', [('disk', 'store'), ('store', 'disk'), ('store', 'other store')]
)
def test_a_run_that_fails_leaves_another_run_of_the_process_alone(
  s3_store, tmp_path, monkeypatch, failing, surviving
):
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.05)
  monkeypatch.setattr(object_store, '_LEAST_SECONDS', 0.2)
  roots = {
    'disk': str(tmp_path / 'run'),
    'store': f'{s3_store.root}/run',
    'other store': f'{s3_store.root}/other',
  }
  meeting = threading.Barrier(2, timeout=20)

  def failure():
    if failing == 'disk':
      return _moved(tmp_path / 'run', tmp_path / 'moved')
    return s3_store.proxy.fault(name='/run/', operation='write', unreachable=True)

  def train(name):
    root = roots[name]
    files.set_store_seconds(root, 0.5 if name == failing else 60.0)
    with (
      checkpoints.lock_model_dir(root) as lock,
      checkpoints.CheckpointManager(root, save_cfg=_CFG) as manager,
    ):
      lines = files.appended(f'{root}/metrics.jsonl')
      _save(manager, lines, 1)
      meeting.wait()
      if name == failing:
        with failure():
          _save(manager, lines, 2)
      else:
        _save(manager, lines, 2)
        meeting.wait()  # the other run has ended
        _save(manager, lines, 3)
        lock.check()
        with pytest.raises(errors.DirectoryInUseError, match='Another CheckpointManager'):
          checkpoints.CheckpointManager(root, save_cfg=_CFG)
        assert lock.held and files.unwritten(root) == {}
      lines.close()

  def end_other_run(future):
    del future
    meeting.wait()

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    failed = pool.submit(train, failing)
    failed.add_done_callback(end_other_run)
    pool.submit(train, surviving).result()
    with pytest.raises(errors.SaveError, match='step 2'):
      failed.result()
  root = roots[surviving]
  assert list(checkpoints.all_steps(root)) == [1, 2, 3]
  assert b''.join(part.read_bytes() for part in files.parts(f'{root}/metrics.jsonl')) == (
    b'1\n2\n3\n'
  )
  assert list(checkpoints.all_steps(roots[failing])) == [1]


@contextlib.contextmanager
def _moved(source, target):
  source.rename(target)
  try:
    yield
  finally:
    target.rename(source)


def _save(manager, lines, step):
  lines.append(b'%d\n' % step, at_once=True)
  manager.save(step, {'w': np.full((30, 30), step, np.float32)})
  manager.wait()
