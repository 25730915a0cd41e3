"""Goodput from events: restarts, rollbacks, and shares that add up."""

import random

import pytest

from t5x_lite import runtime
from t5x_lite.runtime import goodput


class _Run:
  """Writes events of processes on a simulated clock."""

  def __init__(self):
    self.now = 0.0
    self.events = []

  def add(self, kind, step=None, details=None, /, **seconds):
    self.now += sum(seconds.values())
    self.events.append(
      runtime.Event(
        kind=kind, wall_time=self.now, step=step, seconds=seconds, details=details or {}
      )
    )

  def shares(self):
    measured = goodput.measure(self.events)
    assert measured.total_seconds == pytest.approx(sum(measured.seconds.values()))
    return {name: seconds for name, seconds in measured.seconds.items() if seconds}


def _killed_run():
  """Checkpoint at step 10; killed after step 14; 5 s without a process."""
  run = _Run()
  run.add('start')
  run.add('restored', 0, starting=3)
  run.add('first_step', 1, compiling=4, step=1)
  run.add('save_begun', 10, step=9)
  run.add('evaluation_begun', 12, saving=2, step=2)
  run.add('progress', 14, evaluation=6, data=1, step=2)
  run.now += 5
  run.add('start')
  run.add('warning', starting=1)
  run.add('restored', 10, starting=1)
  return run


def test_work_after_the_checkpoint_of_a_killed_process_is_repeated_work():
  run = _killed_run()
  run.add('stop', 20, {'cause': 'completed'}, step=10)
  assert run.shares() == {
    'step': 20.0,
    'compiling': 4.0,
    'starting': 5.0,
    'repeated': 13.0,
    'down': 5.0,
  }
  assert goodput.measure(run.events).num_starts == 2


def test_a_run_without_a_checkpoint_repeats_everything():
  run = _killed_run()
  run.events[-1] = runtime.Event(
    kind='restored', wall_time=run.now, step=0, seconds={'starting': 1.0}
  )
  assert run.shares() == {'starting': 5.0, 'repeated': 27.0, 'down': 5.0}


def test_a_second_restart_repeats_work_of_both_processes_once():
  run = _killed_run()
  run.add('progress', 13, step=3)
  run.now += 2
  run.add('start')
  run.add('restored', 5)  # the checkpoint of step 10 is damaged
  assert run.shares() == {
    'step': 1.0,
    'compiling': 4.0,
    'starting': 5.0,
    'repeated': 13.0 + 9.0 + 3.0,
    'down': 7.0,
  }


def test_the_time_after_a_complete_run_does_not_count_and_that_after_a_signal_does():
  for cause, down in (
    ('completed', 0),
    ('action', 0),
    ('signal', 3600),
    ('error', 3600),
    ('non_finite', 3600),
  ):
    run = _Run()
    run.add('start')
    run.add('restored', 0, starting=1)
    run.add('stop', 5, {'cause': cause}, step=5)
    run.add('summary', 5, {'goodput': 1.0})
    run.now += 3600
    run.add('start')
    run.add('restored', 5, starting=1)
    assert run.shares() == {'step': 5.0, 'starting': 2.0} | ({'down': down} if down else {})


def test_a_command_that_fails_before_its_first_step_leaves_a_complete_run_complete():
  for kind, down in (('warning', 0), ('first_step', 3600)):
    run = _Run()
    for cause in ('completed', 'error', 'error'):
      run.add('start')
      if cause == 'error':
        run.add(kind, 1, starting=1)
      run.add('stop', 1, {'cause': cause}, step=1)
      run.now += 3600 if cause == 'error' else 0
    run.add('start')
    assert run.shares().get('down', 0) == 2 * down


def test_a_rollback_repeats_the_steps_after_its_checkpoint():
  run = _Run()
  run.add('start')
  run.add('restored', 0, starting=1)
  run.add('save_begun', 6, step=6)
  run.add('rollback', 9, {'to_step': 6}, step=3, other=1)
  run.add('stop', 12, {'cause': 'completed'}, step=6)
  assert run.shares() == {'step': 12.0, 'starting': 1.0, 'repeated': 4.0}


def test_a_clock_that_was_set_back_and_phases_of_later_versions_change_no_sum():
  run = _Run()
  run.add('start')
  run.add('restored', 0, dreaming=2)
  run.now -= 100
  run.add('start')
  run.add('restored', 0, starting=1)
  assert run.shares() == {'other': 2.0, 'starting': 1.0}


def test_the_shares_of_random_runs_are_all_of_their_time():
  rng = random.Random(0)
  for _ in range(50):
    run, step, total = _Run(), 0, 0.0
    for _ in range(rng.randrange(1, 5)):
      run.add('start')
      step = rng.randint(0, step)
      run.add('restored', step, starting=1.0)
      total += 1
      for _ in range(rng.randrange(6)):
        step += rng.randrange(4)
        seconds = {phase: rng.uniform(0, 9) for phase in rng.sample(('step', 'data', 'saving'), 2)}
        total += sum(seconds.values())
        run.add('progress', step, **seconds)
        if rng.random() < 0.3:
          to_step = rng.randint(0, step)
          run.add('rollback', step, {'to_step': to_step}, other=1.0)
          step, total = to_step, total + 1
      last = run.now
      run.now += rng.uniform(0, 100)
      total += run.now - last
    total -= run.now - last
    assert goodput.measure(run.events).total_seconds == pytest.approx(total)
    line = goodput.measure(run.events).describe()
    percentages = [
      float(part.split('%')[0].split()[-1]) for part in line.split(': ')[1].split(', ')
    ]
    assert sum(percentages) == pytest.approx(100)
