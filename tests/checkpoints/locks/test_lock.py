"""The lock of a model directory."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.locks import lock as lock_lib
from tests import processes


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path):
  # The holder has forked a child, which outlasts it with a copy of its open files. This must not keep the lock.
  holder = processes.start(
    """
      import os, sys, time, warnings
      from t5x_lite import checkpoints
      warnings.simplefilter('ignore')
      lock = checkpoints.lock_model_dir(sys.argv[1])
      child = os.fork()
      if not child:  # it has closed its copy
        print(os.getpid(), flush=True)
      time.sleep(120)
      """,
    tmp_path / 'run',
  )
  child = int(holder.stdout.readline())
  try:
    with pytest.raises(
      errors.DirectoryInUseError, match=f'in use by process {holder.pid} on host .* MODEL_DIR'
    ) as e:
      checkpoints.lock_model_dir(tmp_path / 'run')
    assert e.value.exit_code == 5
    with pytest.raises(errors.DirectoryInUseError, match=str(tmp_path / 'run')):
      checkpoints.CheckpointManager(tmp_path / 'run', save_cfg=checkpoints.SaveCheckpointConfig())
    checkpoints.CheckpointManager(tmp_path / 'run')  # Reading is allowed.
    holder.kill()
    holder.wait()
    os.kill(child, 0)  # The child is still running.
    with checkpoints.lock_model_dir(tmp_path / 'run') as lock:
      assert lock.held
      assert (
        json.loads((tmp_path / 'run' / discovery.LOCK_FILENAME).read_text())['pid'] == os.getpid()
      )
  finally:
    holder.kill()
    holder.wait()
    holder.stdout.close()
    os.kill(child, signal.SIGKILL)


def test_a_directory_that_cannot_be_tidied_up_is_not_kept_locked(tmp_path, monkeypatch):
  (tmp_path / 'checkpoint_1.tmp-x').mkdir()
  with monkeypatch.context() as patch:
    patch.setattr(
      shutil, 'rmtree', lambda path: (_ for _ in ()).throw(PermissionError(13, 'Permission denied'))
    )
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
  probe = """
      import sys
      from t5x_lite import checkpoints, errors
      for _ in range(2):
        try:
          checkpoints.lock_model_dir(sys.argv[1])
          print('free', flush=True)
        except errors.DirectoryInUseError:
          print('held', flush=True)
        sys.stdin.readline()
      """
  other = processes.start(probe, tmp_path, stdin=subprocess.PIPE)
  assert other.stdout.readline() == 'held\n'
  first.release()
  first.release()
  assert not first.held and other.communicate('\n\n')[0] == 'free\n'
  with pytest.raises(errors.ConfigError, match='must be a path on a disk or in an object store'):
    checkpoints.lock_model_dir('az://bucket/run')


@pytest.mark.parametrize(
  'target, problem',
  [('missing', "missing', which does not exist"), ('link', 'leads back to itself')],
)
def test_a_broken_link_is_named_and_its_replacement_works(tmp_path, target, problem):
  link = tmp_path / 'link'
  link.symlink_to(target)
  for path in (link, link / 'run'):
    for check in (lock_lib.check_model_dir, lock_lib.lock_model_dir):
      with pytest.raises(errors.CheckpointError) as caught:
        check(str(path))
      assert problem in str(caught.value) and 'Delete or replace the link' in str(caught.value)
  link.unlink()
  lock_lib.lock_model_dir(str(link / 'run')).release()


def test_links_of_a_path_are_resolved(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'real/run').mkdir(parents=True)
  (tmp_path / 'link').symlink_to('real')
  (tmp_path / 'dangling').symlink_to('nothing')
  for path, expected in {
    'link/run': f'{tmp_path}/real/run',
    'link/new': f'{tmp_path}/real/new',
    f'{tmp_path}/link': f'{tmp_path}/real',
    'real/run': 'real/run',
    'new': 'new',
    'dangling': 'dangling',
    'gs://bucket/run': 'gs://bucket/run',
  }.items():
    assert checkpoints.without_links(path) == expected
