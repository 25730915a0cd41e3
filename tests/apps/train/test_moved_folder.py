"""Run directories that are away for some steps or for good, links that are switched, and processes without free files.

Each fault happens to a real process, between two steps. The save of an earlier step is waited for before.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.errors import ExitCode
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]
_SCRIPT = """
import json, os, pathlib, resource, shutil, sys, threading
from t5x_lite.trainer.actions import BaseAction
from t5x_lite.errors import T5xLiteError
from tests.apps.train import toy_run

root, model_dir, faults, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
os.chdir(root)
held = []
limits = []

def rename(old, new):
  os.rename(old, new)

def replace_by_file(folder):
  os.rename(folder, folder + '_moved')
  pathlib.Path(folder).touch()

def delete(folder):
  shutil.rmtree(folder)

def make(folder):
  os.mkdir(folder)

def switch(link, target):
  os.symlink(target, 'new_link')
  os.rename('new_link', link)

def use_all_files():
  limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
  _, hard = limits[0]
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))) + 8, hard))
  try:
    while True:
      held.append(os.open('/dev/null', os.O_RDONLY))
  except OSError:
    pass

def free_files():
  while held:
    os.close(held.pop())
  resource.setrlimit(resource.RLIMIT_NOFILE, limits.pop())

class Fault(BaseAction):
  def run(self, train_state, metrics_by_task):
    for step, name, *arguments in faults:
      if step == int(train_state.step):
        for thread in threading.enumerate():
          if thread.name.startswith('checkpoint-'):
            thread.join()
        globals()[name](*arguments)

try:
  toy_run.train(model_dir, actions={'TRAIN': [Fault()]}, **{
      'save': {'period': 3}, 'stats_period': 1, 'eval_period': None, 'train_eval_dataset_cfg': None,
      'infer_eval_period': 5, **options})
except T5xLiteError as error:
  print(error)
  sys.exit(int(error.exit_code))
"""


def _run(root, model_dir, faults, status=0, **options):
  """Train in a process with faults, check its status, and return its output."""
  arguments = [str(root), str(model_dir), json.dumps(faults), json.dumps(options)]
  done = subprocess.run(
    [sys.executable, '-c', _SCRIPT, *arguments],
    env=os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == status, done.stdout[-5000:]
  return done.stdout


def _names(folder):
  return sorted(path.name for path in folder.iterdir() if path.name.startswith('checkpoint_'))


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """Return the directory of a run of 12 steps without a fault."""
  root = tmp_path_factory.mktemp('undisturbed')
  _run(root, 'run', [], total_steps=12)
  return root / 'run'


def _assert_equal(model_dir, undisturbed, step):
  found, expected = (
    checkpoints.load(folder / f'checkpoint_{step}') for folder in (model_dir, undisturbed)
  )
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
  'faults',
  [
    [(4, 'rename', 'run', 'away'), (8, 'rename', 'away', 'run')],
    [(4, 'use_all_files'), (8, 'free_files')],
  ],
)
def test_a_directory_that_is_away_for_some_steps_costs_a_save(tmp_path, undisturbed, faults):
  """Nothing is made under the path meanwhile; otherwise the folder could not be renamed back."""
  output = _run(tmp_path, 'run', faults, total_steps=12)
  assert 'step 6 could not be written' in output and 'the next save tries again' in output
  assert _names(tmp_path / 'run') == ['checkpoint_12', 'checkpoint_3', 'checkpoint_9']
  for step in (9, 12):
    _assert_equal(tmp_path / 'run', undisturbed, step)
  assert toy_run.lines(tmp_path / 'run') == toy_run.lines(undisturbed)


def test_a_directory_that_stays_away_ends_the_run_with_the_lost_steps(tmp_path):
  output = _run(
    tmp_path, 'run', [(4, 'rename', 'run', 'away')], ExitCode.SAVE_FAILED, total_steps=40
  )
  assert '3 saves in a row failed' in output, output
  assert 'it continues from step 3; steps 4 to 1' in output, output
  assert [path.name for path in tmp_path.iterdir()] == ['away']
  assert _names(tmp_path / 'away') == ['checkpoint_3']


def test_a_last_save_that_no_folder_takes_names_the_lost_steps(tmp_path):
  faults = [(11, 'rename', 'run', 'away'), (11, 'replace_by_file', 'spool')]
  output = _run(
    tmp_path, 'run', faults, ExitCode.SAVE_FAILED, total_steps=12, spool_dir=f'{tmp_path}/spool'
  )
  assert 'The last save of the run failed' in output and 'steps 10 to 12 are lost' in output


def test_a_spool_folder_that_is_moved_is_made_again(tmp_path):
  faults = [(4, 'rename', 'spool', 'moved'), (8, 'rename', 'run', 'away')]
  output = _run(
    tmp_path, 'run', faults, ExitCode.SAVE_FAILED, total_steps=12, spool_dir=f'{tmp_path}/spool'
  )
  assert 'step 6 could not be written' not in output and 'continues from step 12.' in output, output
  assert list((tmp_path / 'spool').glob('*/checkpoint_12'))


@pytest.mark.parametrize(
  'faults',
  [
    [(8, 'delete', 'run')],
    [(8, 'delete', 'run'), (8, 'make', 'run')],
    [
      (8, 'delete', 'run/checkpoint_3'),
      (8, 'delete', 'run/checkpoint_6'),
      (8, 'replace_by_file', 'run/train'),
    ],
  ],
)
def test_steps_of_deleted_checkpoints_are_lost(tmp_path, faults):
  output = _run(tmp_path, 'run', faults, ExitCode.SAVE_FAILED, total_steps=40)
  assert 'it continues from step 0; steps 1 to 1' in output, output


def test_a_file_in_place_of_a_folder_below_is_named(tmp_path):
  output = _run(
    tmp_path, 'run', [(4, 'replace_by_file', 'run/train')], ExitCode.SAVE_FAILED, total_steps=12
  )
  assert f"so its checkpoint was not: File exists: '{tmp_path}/run/train'." in output
  assert _names(tmp_path / 'run') == ['checkpoint_3']


def test_the_spool_folder_has_the_state_of_a_directory_that_stays_away(tmp_path, undisturbed):
  faults = [(4, 'rename', 'run', 'away')]
  options = {'spool_dir': 'spool', 'infer_eval_dataset_cfg': None, 'infer_eval_period': None}
  output = _run(tmp_path, 'run', faults, ExitCode.SAVE_FAILED, total_steps=12, **options)
  assert 'kept in ' in output and 'it continues from step 12.' in output, output
  os.rename(tmp_path / 'away', tmp_path / 'run')
  _run(tmp_path, 'run', [], total_steps=12, **options)
  assert _names(tmp_path / 'run') == ['checkpoint_12', 'checkpoint_3']
  assert not any((tmp_path / 'spool').rglob('checkpoint_*'))
  _assert_equal(tmp_path / 'run', undisturbed, 12)


def _other_run(folder):
  """Make the folder of another run that saves, and return its contents by path."""
  folder.mkdir(parents=True)
  with checkpoints.CheckpointManager(
    folder, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(1, {'target': {'w': np.ones(3, np.float32)}})
  (folder / 'checkpoint_6.tmp-0000abcd-1').mkdir()
  return _contents(folder)


def _contents(folder):
  return {
    path.relative_to(folder): path.read_bytes() if path.is_file() else None
    for path in folder.rglob('*')
  }


def test_a_link_that_is_switched_changes_nothing(tmp_path, undisturbed):
  (tmp_path / 'first').mkdir()
  (tmp_path / 'link').symlink_to('first')
  before = _other_run(tmp_path / 'other')
  output = _run(tmp_path, 'link', [(4, 'switch', 'link', 'other')], total_steps=12)
  assert f'MODEL_DIR link is a link or below one: the run uses {tmp_path}/first' in output
  assert _contents(tmp_path / 'other') == before
  assert _names(tmp_path / 'first') == _names(undisturbed)
  assert toy_run.lines(tmp_path / 'first') == toy_run.lines(undisturbed)


def test_nothing_is_written_to_a_folder_that_takes_the_path(tmp_path):
  (tmp_path / 'runs').mkdir()
  before = _other_run(tmp_path / 'others/run')
  faults = [(4, 'rename', 'runs', 'mine'), (4, 'rename', 'others', 'runs')]
  output = _run(tmp_path, 'runs/run', faults, ExitCode.SAVE_FAILED, total_steps=40)
  assert 'another folder than the one that the run has locked' in output, output
  assert _contents(tmp_path / 'runs/run') == before
  assert _names(tmp_path / 'mine/run') == ['checkpoint_3']
