"""A commit is whole or not there, whenever the process is killed."""

import os
import random
import re
import shutil
import signal
import sys
import threading
import time

import numpy as np
import pytest

from t5x_lite import checkpoints
from tests import processes
from tests.checkpoints import checkpoint_states as states


def test_at_every_time_of_a_commit_the_old_or_the_new_checkpoint_is_complete(tmp_path):
  # Python announces each rename, removal, creation and opening before it happens: the files on disk at that moment are
  # those that a kill at that moment would leave. Only the thread that commits is watched.
  run, snapshots = tmp_path / 'run', []
  watching = threading.Event()

  def hook(event, args):
    if (
      watching.is_set()
      and event in ('os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'open')
      and (str(run) in str(args[0]) or event in ('os.remove', 'os.rmdir'))
      and re.fullmatch(r'checkpoint-\d+', threading.current_thread().name)
    ):
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
    seed = int(
      not np.array_equal(
        loaded['target']['decoder']['decoder_norm']['scale'],
        states.flat_numpy(newest)['target/decoder/decoder_norm/scale'],
      )
    )
    states.assert_same(loaded, states.flat_numpy(newest, seed))
    seen.add((newest, seed))
    shutil.rmtree(copy)
  assert seen == {(1, 0), (2, 0), (2, 1), (3, 0)}


SAVER = """
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
      # Each third step is saved a second time, as a run does that replaces another run's checkpoints.
      if step % 3 == 0:
        manager.forget_after(step - 1)
        manager.save(step, state(step), data_state={'position': b'%d' % step})
      step += 1
    """


def kill_at_random_moments(directory, num_kills, caplog):
  seed = random.randrange(2**32)
  print('seed', seed)
  rng = random.Random(seed)
  newest = -1
  for number in range(num_kills):
    saver = processes.start(SAVER, directory)
    assert saver.stdout.readline() == 'ready\n'
    if (
      newest < 0 and number == num_kills - 1
    ):  # A slow machine may have committed nothing before any kill.
      newest = int(saver.stdout.readline())
    time.sleep(rng.uniform(0.0, 0.8))
    saver.kill()
    output = saver.communicate()[0].splitlines()
    assert saver.returncode == -signal.SIGKILL
    committed = max([newest, *(int(line) for line in output if line.isdigit())])
    copy = directory.parent / 'copy'
    shutil.copytree(directory, copy, symlinks=True)
    # Run the first steps of the next run on a copy, so that the next saver uses the original.
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
          copy / f'checkpoint_{step}', checkpoints.load(copy / f'checkpoint_{step}')
        )
        assert restored.is_verified and restored.step == step == restored.state['state']['step']
        for leaf in restored.state['target'].values():
          np.testing.assert_array_equal(leaf, np.full((256, 1024), step, np.float32))
        if step == newest:
          assert restored.data_state == {'position': b'%d' % step}
      leftover = [n for n in os.listdir(copy) if n != '.lock' and not checkpoints.all_steps(copy)]
      assert leftover == []
    assert all(n == '.lock' or n.removeprefix('checkpoint_').isdigit() for n in os.listdir(copy)), (
      os.listdir(copy)
    )
    shutil.rmtree(copy)
  assert newest >= 0
  return newest


def test_kill(tmp_path, caplog):
  (tmp_path / 'run').mkdir()
  kill_at_random_moments(tmp_path / 'run', 2, caplog)


@pytest.mark.full
def test_kill_many_times(tmp_path, caplog):
  (tmp_path / 'run').mkdir()
  assert kill_at_random_moments(tmp_path / 'run', 60, caplog) >= 20
