"""`kill -9` at random moments, in a step or in a save: the resumed run equals an uninterrupted one, bitwise."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from t5x_lite import checkpoints
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]
_SAVE_PERIOD = 5


def _options(num_steps):
  return {
    'total_steps': num_steps,
    'save': {'period': _SAVE_PERIOD, 'keep': 3, 'keep_period': num_steps // 2},
    'eval_period': 30,
  }


def _start(model_dir, num_steps):
  """Start the run in a separate process."""
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT)}
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      'tests.apps.train.toy_run',
      str(model_dir),
      *(f'{name}={value}' for name, value in _options(num_steps).items()),
    ],
    cwd=_ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _num_rows(model_dir):
  path = pathlib.Path(model_dir) / 'train/metrics.jsonl'
  return len(summaries.read_metrics(path)) if path.exists() else 0


def _finish(process):
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output


def _kill_at_random(process, model_dir, rng, num_steps):
  """Let the run write a random number of summaries, wait a little, and kills it; return whether it still ran."""
  # A resumed run first deletes the lines after its checkpoint, hence "another number" instead of "more".
  before = _num_rows(model_dir)
  while process.poll() is None and _num_rows(model_dir) == before:
    time.sleep(0.01)
  # Summaries every 4 steps and at every save, on average one in two and a half steps.
  goal = _num_rows(model_dir) + rng.randrange(num_steps * 2 // 5 // 5)
  while process.poll() is None and _num_rows(model_dir) < goal:
    time.sleep(0.002)
  time.sleep(rng.uniform(0.0, 0.05))
  alive = process.poll() is None
  process.send_signal(signal.SIGKILL)
  output, _ = process.communicate()
  assert process.returncode in (0, -signal.SIGKILL), output
  return alive


def _check_killed_runs(tmp_path, num_kills, num_steps):
  seed = int(os.environ.get('T5X_LITE_TEST_SEED', random.SystemRandom().randrange(2**31)))
  print(f'T5X_LITE_TEST_SEED={seed} chooses the moments of the kills.')
  rng = random.Random(seed)
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  toy_run.train(whole, **_options(num_steps))
  kills, newest = 0, -1
  while kills < num_kills:
    kills += _kill_at_random(_start(killed, num_steps), killed, rng, num_steps)
    steps = checkpoints.all_steps(killed)
    for (
      step
    ) in steps:  # Whatever has the name of a checkpoint is one, and none that was there is lost.
      assert checkpoints.verify_checkpoint(killed / f'checkpoint_{step}') is not None
    assert not newest > max(steps, default=-1)
    newest = max(steps, default=-1)
    print(f'kill {kills}: newest checkpoint {newest}')
    if newest == num_steps:
      break
  _finish(_start(killed, num_steps))
  toy_run.assert_same_run(whole, killed, num_steps)
  assert checkpoints.all_steps(killed) == checkpoints.all_steps(whole)
  leftovers = [
    path.name for path in killed.iterdir() if '.tmp-' in path.name or '.deleted-' in path.name
  ]
  assert not leftovers
  assert kills, 'the run ended before it could be killed'


def test_a_kill(tmp_path):
  _check_killed_runs(tmp_path, 1, num_steps=60)


@pytest.mark.full
def test_ten_kills(tmp_path):
  _check_killed_runs(tmp_path, 10, num_steps=120)
