"""A disk that fills up during a run: training continues, no partial files remain, and the exit status says the rest."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]
# Each run is undisturbed but for `fills_at` and `empties_at`, between whose steps no file may grow past a size.
_SCRIPT = """
import pathlib, resource, sys, threading
from t5x_lite.trainer.actions import BaseAction
from t5x_lite.errors import SaveError
from tests.apps.train import toy_run

class Disk(BaseAction):
  def __init__(self, fills_at=None, empties_at=None, size=2500):
    self.limits = {fills_at: size, empties_at: resource.RLIM_INFINITY}
  def run(self, train_state, metrics_by_task):
    limit = self.limits.get(int(train_state.step))
    if limit is not None:
      for thread in threading.enumerate():  # the save of an earlier step meets the disk of that step
        if thread.name.startswith('checkpoint-'):
          thread.join()
      resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

def train(name, disk, save, **kwargs):
  try:
    toy_run.train(pathlib.Path(sys.argv[1]) / name, 12, save={'period': 3, **save}, actions={'TRAIN': [disk]}, **{
        'stats_period': 1, 'eval_period': None, 'train_eval_dataset_cfg': None, 'infer_eval_dataset_cfg': None,
        **kwargs})
  except SaveError as error:
    print(name, int(error.exit_code), error)
  resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

evaluation = {'infer_eval_dataset_cfg': toy_run.dataset('validation'), 'infer_eval_period': 5}
train('undisturbed', Disk(), {}, **evaluation)
train('refilled', Disk(4, 8, size=100), {'keep': 1}, **evaluation)
train('last', Disk(10), {})
train('in_a_row', Disk(2), {'max_failures_in_a_row': 2})
"""


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  root = tmp_path_factory.mktemp('full_disk')
  done = subprocess.run(
    [sys.executable, '-c', _SCRIPT, str(root)],
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(_ROOT)},
  )
  assert done.returncode == 0, done.stderr
  return root, done.stdout, done.stderr


def _files(root):
  return sorted(path.name for path in root.iterdir() if path.name.startswith('checkpoint'))


def test_a_save_that_fails_is_warned_of_and_tried_again(runs):
  root, out, err = runs
  assert 'refilled 74' not in out
  assert 'step 6 could not be written' in err and 'the next save tries again' in err
  # Step 6 is missing and nothing partial with it; step 3 stayed, with keep=1, until a later one was sound.
  assert _files(root / 'refilled') == ['checkpoint_12', 'checkpoint_9']
  for step in (9, 12):
    expected, found = (
      checkpoints.load(checkpoints.get_checkpoint_dir(root / name, step))['target']
      for name in ('undisturbed', 'refilled')
    )
    jax.tree.map(np.testing.assert_array_equal, expected, found)
  # The lines that the disk would not take were written later, in order.
  lines = [
    [
      (row['step'], row['loss'])
      for row in summaries.read_metrics(root / name / 'train/metrics.jsonl')
    ]
    for name in ('undisturbed', 'refilled')
  ]
  assert lines[0] == lines[1] and len(lines[0]) == 12
  # So were the results of an evaluation at step 5, which did not end the run.
  expected, found = (
    toy_run.lines(root / name)['inference_eval/letters'] for name in ('undisturbed', 'refilled')
  )
  assert expected == found and [row['step'] for row in found] == [5, 10, 12]
  for step in (5, 10, 12):
    expected, found = (
      (root / name / f'inference_eval/letters/predictions-{step}.jsonl').read_bytes()
      for name in ('undisturbed', 'refilled')
    )
    assert expected == found and len(found) > 100


def test_a_last_save_that_fails_has_its_exit_status(runs):
  root, out, _ = runs
  line = next(line for line in out.splitlines() if line.startswith('last '))
  assert re.match('last 74 The last save of the run failed: The .* step 12 could not be', line), (
    line
  )
  assert _files(root / 'last')[:2] == [
    'checkpoint_3',
    'checkpoint_6',
  ]  # 9 may not have been on the disk at step 10
  assert not list((root / 'last').glob('*.tmp-*'))


def test_saves_that_fail_in_a_row_end_the_run(runs):
  root, out, _ = runs
  line = next(line for line in out.splitlines() if line.startswith('in_a_row '))
  assert line.startswith('in_a_row 74 2 saves in a row failed'), line
  assert _files(root / 'in_a_row') == []


@pytest.mark.full
def test_one_inode_is_left(tmp_path):
  """The folder of a save gets it, and nothing in it can be made: the process ends at once, without waiting threads."""
  if os.geteuid() != 0 or shutil.which('unshare') is None:
    pytest.skip('Mounting a small file system takes root and unshare.')
  program = """
import os, pathlib
from t5x_lite.trainer.actions import BaseAction
from tests.apps.train import toy_run

class Fill(BaseAction):
  def run(self, train_state, metrics_by_task):
    if int(train_state.step) == 4:
      try:
        for i in range(1000):
          pathlib.Path(f'disk/{i}').touch()
      except OSError:
        os.unlink('disk/0')

toy_run.train('disk/run', 6, save={'period': 6}, actions={'TRAIN': [Fill()]}, train_eval_dataset_cfg=None,
              infer_eval_dataset_cfg=None, eval_period=None)
"""
  mount = 'mkdir disk && mount -t tmpfs -o size=64m,nr_inodes=100 tmpfs disk && exec "$@"'
  done = subprocess.run(
    ['unshare', '-m', 'sh', '-c', mount, 'sh', sys.executable, '-c', program],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(_ROOT)},
  )
  if 'unshare failed' in done.stderr or 'permission denied' in done.stderr.lower():
    pytest.skip('This machine does not let root mount a file system.')
  assert 'The last save of the run failed' in done.stderr and 'No space left' in done.stderr


@pytest.mark.full
def test_a_real_full_disk(tmp_path):
  """A file system of 2 MB, filled and freed while the command runs in it."""
  if os.geteuid() != 0 or shutil.which('unshare') is None:
    pytest.skip('Mounting a small file system takes root and unshare.')
  command = (
    f'{sys.executable} -m t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.DATA_SOURCE=builtin '
    '--gin.MODEL_DIR=disk/run --gin.TRAIN_STEPS=60 --gin.EVAL_PERIOD=60 --gin.SAVING_PERIOD=10 '
    '--gin.checkpoints.SaveCheckpointConfig.keep=1 --gin.checkpoints.SaveCheckpointConfig'
    '.max_failures_in_a_row=100'
  )
  script = f"""set -e
mkdir -p disk && mount -t tmpfs -o size=16m tmpfs disk
{command} & pid=$!
until [ -d disk/run/checkpoint_10 ]; do sleep 0.2; done
dd if=/dev/zero of=disk/filler bs=64k 2>/dev/null || true
until grep -q 'next save tries again' log; do sleep 0.2; kill -0 $pid; done
rm disk/filler
wait $pid
ls disk/run; cp -r disk/run kept
"""
  with open(tmp_path / 'log', 'w', encoding='utf-8') as log:
    done = subprocess.run(
      ['unshare', '-m', 'bash', '-c', script],
      cwd=tmp_path,
      stdout=log,
      stderr=log,
      timeout=300,
      check=False,
      env={**os.environ, 'PYTHONPATH': str(_ROOT)},
    )
  text = (tmp_path / 'log').read_text()
  if 'unshare failed' in text or 'permission denied' in text.lower():
    pytest.skip('This machine does not let root mount a file system.')
  assert done.returncode == 0, text
  assert 'No space left' in text or 'disk is full' in text
  assert checkpoints.newest_sound_step(tmp_path / 'kept') == 60
  assert not list((tmp_path / 'kept').glob('*.tmp-*'))
