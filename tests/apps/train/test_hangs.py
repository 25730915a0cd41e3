"""Runs that hang: which activity is watched when, and the end of a run whose step hangs."""

import collections
import contextlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading

import pytest

from t5x_lite import checkpoints
from t5x_lite import runtime
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.train import run as train_app
from t5x_lite.apps.train.compilation import StepCompilation
from t5x_lite.trainer import non_finite
from tests import processes
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]


def test_each_activity_is_watched_as_itself(tmp_path, monkeypatch):
  activities, steps, limits, seen = [None], [], {}, {}

  class Recorder(runtime.Watchdog):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      limits.update(inspect.signature(super().__init__).bind(*args, **kwargs).arguments)

    @contextlib.contextmanager
    def watching(self, name='step'):
      activities.append(name)
      with super().watching(name):
        yield
      activities.pop()

    def beat(self, step=None):
      steps.append((activities[-1], step))
      super().beat(step)

  def record(owner, name):
    function = getattr(owner, name)

    def recorded(*args, **kwargs):
      seen.setdefault(name, set()).add(activities[-1])
      return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, recorded)

  monkeypatch.setattr(runtime, 'Watchdog', Recorder)
  record(checkpoints.CheckpointManager, 'save')
  record(checkpoints.CheckpointManager, 'wait')
  record(non_finite.Monitor, 'observe')
  record(trainer_lib.Trainer, 'eval')
  record(StepCompilation, 'finish')
  toy_run.train(
    tmp_path,
    4,
    save={'period': 2},
    eval_period=2,
    infer_eval_dataset_cfg=None,
    max_step_seconds=700,
    max_evaluation_seconds=800,
    max_saving_seconds=900,
    warn_every_seconds=950,
  )
  assert seen.pop('wait') <= {'saving', None}  # without a limit where nothing is left to wait for
  assert seen == {'observe': {'step'}, 'eval': {'evaluation'}, 'save': {'saving'}, 'finish': {None}}
  names = ('max_step_seconds', 'max_evaluation_seconds', 'max_saving_seconds', 'warn_every_seconds')
  assert [limits[name] for name in names] == [700, 800, 900, 950]
  completed = [(name, step) for name, step in steps if step is not None]
  assert activities == [None] and completed[-1][1] == 4
  assert 'watchdog' not in [thread.name for thread in threading.enumerate()]
  durations = collections.Counter(name for name, _ in completed)
  assert durations['step'] == 4 and durations['saving'] == 2 and durations['evaluation'] >= 2


_HANGS = """
    import sys, threading, time
    from t5x_lite import checkpoints
    from t5x_lite.trainer import non_finite
    from t5x_lite import trainer as trainer_lib
    from t5x_lite.data.batches import table_iterator
    from tests.apps.train import toy_run

    def slow(owner, name, delays):
      function = getattr(owner, name)

      def slowed(*args, **kwargs):
        time.sleep(delays.pop(0) if delays else 0)
        return function(*args, **kwargs)

      setattr(owner, name, slowed)

    def hangs_here():
      threading.Event().wait()

    def observe(self, step, metrics):
      if step == 5:
        hangs_here()
      return observes(self, step, metrics)

    observes, non_finite.Monitor.observe = non_finite.Monitor.observe, observe
    slow(trainer_lib.Trainer, 'eval', [12])
    slow(checkpoints.CheckpointManager, 'save', [12])
    slow(table_iterator.TableIterator, '__next__', [0, 0, 0, 12])
    toy_run.train(sys.argv[1], 8, save={'period': 2}, eval_period=4, infer_eval_dataset_cfg=None, max_step_seconds=8)
    """


def test_a_function_that_hangs_in_a_step_ends_the_run(tmp_path):
  program = """
      import sys, time
      from tests.apps.train import toy_run

      def sleeps_here(event):
        if event.kind == 'first_step':
          time.sleep(600)

      toy_run.train(
        sys.argv[1], 8, save=None, eval_period=None, event_fns=sleeps_here, max_step_seconds=2,
        train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None, warn_every_seconds=0.5,
      )
      """
  process = processes.start(program, tmp_path, stderr=subprocess.PIPE)
  _, err = process.communicate(timeout=100)
  assert process.returncode == 4, err
  assert re.search(r'^Watchdog: no step was completed within 2 seconds', err, re.MULTILINE), err
  assert ' in sleeps_here\n' in err.rpartition('\nWatchdog: ')[2]
  assert err.count('see `warn_every_seconds`. The run continues') >= 2, err


def test_a_step_has_an_automatic_limit_by_default():
  parameters = inspect.signature(train_app.train).parameters
  assert parameters['max_step_seconds'].default == 'auto'
  names = ('max_evaluation_seconds', 'max_saving_seconds', 'warn_every_seconds')
  assert [parameters[name].default for name in names] == [None] * 3


@pytest.mark.full
def test_a_run_whose_step_hangs_ends_and_keeps_its_checkpoints(tmp_path):
  environment = {**os.environ, 'PYTHONPATH': str(_ROOT)}
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_HANGS), str(tmp_path)],
    cwd=_ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 4, done.stderr
  assert (
    'no step was completed within 8 seconds after step 4' in done.stderr
    and ' in hangs_here\n' in done.stderr
  )
  for path in tmp_path.glob('checkpoint_*'):
    if '.tmp-' not in path.name:
      assert checkpoints.verify_checkpoint(path) is not None
  assert 2 in checkpoints.all_steps(tmp_path)
  toy_run.train(tmp_path, 8, save={'period': 2}, eval_period=4, infer_eval_dataset_cfg=None)
  toy_run.train(
    tmp_path / 'whole', 8, save={'period': 2}, eval_period=4, infer_eval_dataset_cfg=None
  )
  toy_run.assert_same_run(tmp_path / 'whole', tmp_path, 8)
