"""Two processes use one directory at a time: what reliability.md promises for shared file systems."""

import errno
import fcntl
import json
import pathlib
import subprocess
import time

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import sources
from tests import processes

# Saves a state of equal numbers, the step, until its standard input ends. The arrays are in several files.
_SAVER = """
    import fcntl, sys
    import jax.numpy as jnp
    from t5x_lite import checkpoints

    if sys.argv[2] == 'without locks':
      fcntl.flock = lambda fd, operation: None  # as where locks are local to a host
    state = lambda value: {'target': {f'w{i}': jnp.full((64, 1024), value, jnp.float32) for i in range(6)}}
    manager = checkpoints.CheckpointManager(sys.argv[1], save_cfg=checkpoints.SaveCheckpointConfig(keep=2))
    step = int(sys.argv[3])
    print('ready', flush=True)
    for line in sys.stdin:
      if line == 'end\\n':
        manager.close()
        break
      step += 1
      manager.save(step, state(step))
      manager.wait()
      print(step, flush=True)
    """


def _state(value):
  return {'target': {f'w{i}': jnp.full((64, 1024), value, jnp.float32) for i in range(6)}}


def _start(directory, locks='with locks', step=0):
  saver = processes.start(_SAVER, directory, locks, step, stdin=subprocess.PIPE, bufsize=1)
  assert saver.stdout.readline() == 'ready\n'
  return saver


def _end(saver):
  saver.kill()
  saver.communicate()


def _manager(directory):
  return checkpoints.CheckpointManager(directory, save_cfg=checkpoints.SaveCheckpointConfig(keep=2))


def test_a_second_run_is_rejected_and_nothing_changes(tmp_path):
  run = tmp_path / 'run'
  saver = _start(run)
  try:
    saver.stdin.write('save\n')
    assert saver.stdout.readline() == '1\n'
    (run / 'checkpoint_2.tmp-unfinished').mkdir()
    with pytest.raises(
      errors.DirectoryInUseError,
      match=(
        f'is in use by process {saver.pid} on host .*Wait for that run or stop it, or choose another MODEL_DIR'
      ),
    ):
      _manager(run)
    assert (run / 'checkpoint_2.tmp-unfinished').exists() and checkpoints.newest_sound_step(
      run
    ) == 1
  finally:
    _end(saver)
  with _manager(run):  # the lock has ended with its process
    assert not (run / 'checkpoint_2.tmp-unfinished').exists()


def test_a_reader_sees_complete_checkpoints_only(tmp_path):
  """While another process saves and deletes: each listed checkpoint is complete, or gone when it is looked at again."""
  run = tmp_path / 'run'
  saver, read = _start(run), set()
  try:
    saver.stdin.write('save\n' * 4)
    deadline = time.monotonic() + 60
    while len(read) < 8:
      assert time.monotonic() < deadline, read
      for step in checkpoints.all_steps(run):
        path = run / f'checkpoint_{step}'
        try:
          checkpoints.verify_checkpoint(path)
          state = checkpoints.load(path)
        except (errors.CheckpointError, OSError):
          assert not path.exists(), step
          continue
        assert len(state['target']) == 6
        for array in state['target'].values():
          np.testing.assert_array_equal(array, np.full((64, 1024), step, np.float32))
        if step not in read:
          saver.stdin.write('save\n')  # so that it always saves during the next reads
        read.add(step)
    saver.stdin.write('end\n')
    assert saver.wait(timeout=60) == 0
  finally:
    _end(saver)
  assert len(checkpoints.all_steps(run)) == 2


def test_a_checkpoint_that_is_deleted_while_it_is_opened(tmp_path):
  with _manager(tmp_path) as manager:
    manager.save(1, _state(1))
  path = tmp_path / 'checkpoint_1'
  opened = sources.open_source(path)
  (path / 'manifest.json').unlink()
  for read in (opened.verify, lambda: sources.OwnSource(path)):
    with pytest.raises(
      errors.CheckpointDamagedError, match='checkpoint_1. was deleted while it was read'
    ):
      read()


def test_damage_by_another_process_is_found(tmp_path, caplog):
  run = tmp_path / 'run'
  saver = _start(run)
  saver.stdin.write('save\n' * 2 + 'end\n')
  assert saver.wait(timeout=60) == 0
  _end(saver)
  assert checkpoints.newest_sound_step(run) == 2
  largest = max(
    (path for path in (run / 'checkpoint_2').rglob('*') if path.is_file()),
    key=lambda p: p.stat().st_size,
  )
  subprocess.run(
    [
      'python3',
      '-c',
      """if True:
      import sys
      with open(sys.argv[1], 'r+b') as f:
        f.seek(-1, 2); byte = f.read(1); f.seek(-1, 2); f.write(bytes([byte[0] ^ 1]))
      """,
      str(largest),
    ],
    check=True,
  )
  assert checkpoints.newest_sound_step(run) == 1
  assert f'{largest.relative_to(run / "checkpoint_2")} has changed contents' in caplog.text


def test_a_run_that_lost_its_lock_ends_at_its_next_save(tmp_path):
  """Locks that other hosts do not see: the run that was there first notices the other one, and does not write."""
  run = tmp_path / 'run'
  manager = _manager(run)
  manager.save(1, _state(1))
  manager.wait()
  other = _start(run, 'without locks', 1)
  try:
    other.stdin.write('save\n')
    assert other.stdout.readline() == '2\n'
    with pytest.raises(
      errors.DirectoryInUseError,
      match=(
        f'is also in use by process {other.pid} on host .* did not keep the lock .*Stop one of the runs'
      ),
    ) as error:
      manager.save(3, _state(3))
    assert error.value.exit_code == 5
    with pytest.raises(errors.DirectoryInUseError, match='is also in use'):
      manager.save(3, _state(3))
    manager.close()
    other.stdin.write('save\n')
    assert other.stdout.readline() == '3\n'
  finally:
    _end(other)
  assert sorted(path.name for path in run.iterdir()) == ['.lock', 'checkpoint_2', 'checkpoint_3']
  assert checkpoints.load(run / 'checkpoint_3')['target']['w0'][0, 0] == 3


def test_a_lock_that_is_lost_while_a_save_is_written(tmp_path, monkeypatch):
  run = tmp_path / 'run'
  manager = _manager(run)
  write_parts = array_io.write_parts

  def lose_lock(*args):
    write_parts(*args)
    (run / discovery.LOCK_FILENAME).write_text(
      json.dumps({'pid': 7, 'host': 'elsewhere', 'since': 'today'})
    )

  monkeypatch.setattr(array_io, 'write_parts', lose_lock)
  manager.save(1, _state(1))
  with pytest.raises(
    errors.DirectoryInUseError, match='also in use by process 7 on host elsewhere, since today'
  ):
    manager.wait()
  manager.close()
  assert checkpoints.all_steps(run) == []


def test_a_deleted_lock_file_is_not_a_second_run(tmp_path):
  with _manager(tmp_path) as manager:
    (tmp_path / discovery.LOCK_FILENAME).unlink()
    manager.save(1, _state(1))
  assert list(checkpoints.all_steps(tmp_path)) == [1]


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
  def flock(fd, operation):
    raise OSError(number, 'No locks available')

  monkeypatch.setattr(fcntl, 'flock', flock)
  with pytest.raises(
    errors.CheckpointError,
    match=(
      "The model directory '.*run' cannot be locked: No locks available. Mount its file system with locks .*without "
      'nolock, .*or choose another MODEL_DIR.'
    ),
  ):
    checkpoints.lock_model_dir(tmp_path / 'run')


def test_locks_are_of_byte_ranges_on_a_server(tmp_path, monkeypatch):
  """NFS clients send `flock` as a lock of the bytes of a file, which needs a file that is open for writing."""
  monkeypatch.setattr(fcntl, 'flock', fcntl.lockf)
  with checkpoints.lock_model_dir(tmp_path / 'run'):
    probe = processes.start(
      """
        import fcntl, sys
        from t5x_lite import checkpoints
        fcntl.flock = fcntl.lockf
        checkpoints.lock_model_dir(sys.argv[1])
        """,
      tmp_path / 'run',
      stderr=subprocess.PIPE,
    )
    assert 'is in use by process' in probe.communicate(timeout=60)[1]
  assert not pathlib.Path(tmp_path / 'run').exists()
