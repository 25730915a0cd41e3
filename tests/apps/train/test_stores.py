"""Runs in object stores equal runs on a disk, bitwise, also after kills and while the store fails."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.apps import evaluate
from t5x_lite.errors import ExitCode, SaveError
from t5x_lite.storage import files
from t5x_lite.storage import object_store
from tests import processes
from tests import stores
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]
_OPTIONS = {'save': {'period': 5, 'keep': 2}, 'stats_period': 2, 'eval_period': 5}


def _check_equal(model_dir, on_disk):
  toy_run.assert_same_run(on_disk, model_dir, 20)
  root = files.path(model_dir)
  assert checkpoints.all_steps(model_dir) == checkpoints.all_steps(on_disk) == [15, 20]
  assert (root / 'model-info.txt').read_text() == (on_disk / 'model-info.txt').read_text()
  assert any(root.rglob('events.out.tfevents.*'))


@pytest.fixture(scope='module')
def on_disk(tmp_path_factory):
  model_dir = tmp_path_factory.mktemp('run')
  toy_run.train(model_dir, 20, **_OPTIONS)
  return model_dir


@stores.mostly('s3')
def test_a_killed_and_resumed_run_equals_one_on_a_disk(store, on_disk):
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'tests.apps.train.toy_run',
      store.root,
      'total_steps=20',
      *(f'{name}={value}' for name, value in _OPTIONS.items()),
    ],
    cwd=_ROOT,
    env={**os.environ, **store.env},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  deadline = time.monotonic() + 120
  while (
    not checkpoints.all_steps(store.root) and time.monotonic() < deadline and process.poll() is None
  ):
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  output, _ = process.communicate()
  assert checkpoints.all_steps(store.root), output
  toy_run.train(store.root, 20, **_OPTIONS)
  _check_equal(store.root, on_disk)
  config = checkpoints.RestoreCheckpointConfig(store.root, mode='all')
  arguments = {
    'model': toy_run.model(),
    'dataset_cfg': toy_run.dataset('validation'),
    'partitioner': toy_run.partitioner(),
    'restore_checkpoint_cfg': config,
  }
  results = evaluate.evaluate(**arguments, output_dir=f'{store.root}/eval')
  assert list(results) == list(checkpoints.all_steps(store.root)) == [15, 20]
  assert evaluate.evaluate(**arguments, output_dir=f'{store.root}/eval') == results
  assert not [name for name in store.names() if name.endswith(('.lock', 'INCOMPLETE'))]


def test_training_continues_while_a_store_fails(s3_store, on_disk, monkeypatch):
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.05)
  with (
    s3_store.proxy.fault(method='PUT', status=503, times=10),
    s3_store.proxy.fault(operation='write', name='checkpoint_', cut_upload=500, times=3),
  ):
    toy_run.train(s3_store.root, 20, max_store_seconds=20.0, **_OPTIONS)
  _check_equal(s3_store.root, on_disk)


def test_a_store_that_is_lost_in_the_middle(s3_store, on_disk, tmp_path, monkeypatch):
  spool = str(tmp_path / 'spool')
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.05)
  toy_run.train(s3_store.root, 10, **_OPTIONS)
  options = {**_OPTIONS, 'max_store_seconds': 1.0, 'spool_dir': spool}
  with s3_store.proxy.fault(operation='write', unreachable=True, skip=12):
    with pytest.raises(SaveError, match='kept in .*--spool_dir'):
      toy_run.train(s3_store.root, 20, **options)
  assert list(checkpoints.all_steps(s3_store.root)) == [5, 10]
  toy_run.train(s3_store.root, 20, **options)
  assert list(checkpoints.all_steps(s3_store.root)) == [5, 10, 20]
  toy_run.assert_same_run(on_disk, s3_store.root, 20)


_TWO = """
    import sys
    from t5x_lite import runtime
    runtime.join(runtime.ClusterConfig())
    from t5x_lite import partitioning
    from tests.apps.train import toy_run
    model_dir, steps, spool = sys.argv[1:]
    options = {'save': {'period': 4}, 'eval_period': None, 'train_eval_dataset_cfg': None,
               'infer_eval_dataset_cfg': None}
    toy_run.train(model_dir, int(steps), spool_dir=spool, partitioner=partitioning.PjitPartitioner(num_partitions=4),
                  max_store_seconds=20.0, **options)
"""


@stores.mostly('gcs')
def test_two_processes_write_below_one_prefix(store, tmp_path):
  options = {
    'save': {'period': 4},
    'eval_period': None,
    'train_eval_dataset_cfg': None,
    'infer_eval_dataset_cfg': None,
  }
  toy_run.train(tmp_path / 'one', 12, **options)
  spool = tmp_path / 'spool'
  with store.proxy.fault(operation='write', name='checkpoint_8/dataset/process_1', status=403):
    outputs = processes.run(_TWO, store.root, 8, spool, num_devices=2, status=ExitCode.SAVE_FAILED)
  assert 'kept in' in ''.join(outputs) and 'of step 8 could not be written' in ''.join(outputs), (
    outputs
  )
  assert list(checkpoints.all_steps(store.root)) == [4]
  # Copied to the store, and continued by one process.
  toy_run.train(store.root, 12, spool_dir=str(spool), **options)
  assert list(checkpoints.all_steps(store.root)) == [4, 8, 12]
  found, expected = (
    checkpoints.load(checkpoints.get_checkpoint_dir(folder, 12))
    for folder in (store.root, tmp_path / 'one')
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
  assert any(
    'ocdbt.process_1/' in name for name in store.names() if name.startswith('checkpoint_4')
  )


_JOINED = """
import sys
from t5x_lite import runtime
runtime.join(runtime.ClusterConfig())
from tests.apps.train import toy_run
toy_run.main()
"""


@pytest.mark.parametrize(
  'fault, num_processes',
  [('unreachable', 1), ('silent', 1), pytest.param('silent', 2, marks=pytest.mark.full)],
)
def test_a_signal_while_a_save_is_repeated(s3_store, tmp_path, fault, num_processes):
  """The run waits for a save that the store does not take; a signal brings the newest state to the spool folder.

  The previous save of a store that is unreachable ends soon after the signal, that of a silent one after minutes.
  """
  # A save takes less time than the steps between two saves.
  options = {
    'save': {'period': 10},
    'stats_period': 10,
    'eval_period': 10000,
    'train_eval_dataset_cfg': None,
    'infer_eval_dataset_cfg': None,
    'spool_dir': str(tmp_path),
    'step_seconds': {1: 0.2, 2: 0.0}[num_processes],
  }
  command = [sys.executable, '-m', 'tests.apps.train.toy_run']
  if num_processes > 1:
    launch = ['t5x_lite', 'launch', '-n', str(num_processes), '--devices_per_process=2', '--']
    command = [sys.executable, '-m', *launch, sys.executable, '-c', _JOINED]
  process = subprocess.Popen(
    [
      *command,
      s3_store.root,
      'total_steps=1000000',
      *(f'{name}={value!r}' for name, value in options.items()),
    ],
    cwd=_ROOT,
    env={**os.environ, **s3_store.env, 'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  try:
    while 'Saved checkpoint_' not in (line := process.stdout.readline()):
      assert line
    with s3_store.proxy.fault(**{fault: True}):
      while 'Waiting for the previous save' not in (line := process.stdout.readline()):
        assert line
      step = int(line.split('step ')[1].split()[0].replace(',', ''))
      process.send_signal(signal.SIGTERM)
      deadline = time.monotonic() + 30
      while not list(tmp_path.glob(f'*/checkpoint_{step}/manifest.json')):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
  finally:
    for _ in range(num_processes):  # The second one ends the processes of `launch`.
      process.send_signal(signal.SIGTERM)
      time.sleep(1.1)
    process.kill()
    process.communicate()


@pytest.mark.full
def test_a_signal_while_a_store_does_not_answer(s3_store, tmp_path):
  options = {
    'save': {'period': 10000},
    'stats_period': 5000,
    'eval_period': 10000,
    'spool_dir': str(tmp_path),
  }
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'tests.apps.train.toy_run',
      s3_store.root,
      'total_steps=1000000',
      *(f'{name}={value!r}' for name, value in options.items()),
    ],
    cwd=_ROOT,
    env={**os.environ, **s3_store.env},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  while process.poll() is None and 'step 3 ' not in process.stdout.readline():
    pass
  with s3_store.proxy.fault(unreachable=True):
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
  assert time.monotonic() - start < 60 and list(tmp_path.glob('*/checkpoint_*/manifest.json')), (
    output
  )
