"""The moments of the faults of `make soak`, for any number of steps and faults."""

import random
import subprocess
import sys

import pytest

from tests import soak


@pytest.mark.parametrize('steps', [1, 2, 7, 40, 150, 600, 2000])
@pytest.mark.parametrize('num_faults', [1, 12, 100])
def test_there_is_a_moment_for_every_fault(steps, num_faults):
  plan = soak.Plan(steps)
  rng = random.Random(steps)
  num_left = num_faults
  num_runs = 0
  while num_left:
    num_runs += 1
    newest = 0
    taken = plan.num_faults(num_left)
    for number in range(1, taken + 1):
      fault = rng.choice(['SIGKILL', 'full disk to the end', 'error of the data'])
      at = plan.moment(fault, newest, number / (taken + 1), rng)
      if at is None:
        break
      assert newest < at <= steps and at >= 1
      assert not fault.startswith('full') or at % plan.stats_period == 0 or at == plan.last
      newest = at - at % plan.saving_period
      num_left -= 1
    assert number > 1 or at is not None  # a new run has a moment
  assert num_runs <= num_faults
  if steps == 2000 and num_faults == 12:
    assert num_runs == 1


def test_the_periods_of_a_long_run():
  plan = soak.Plan(2000)
  assert (plan.saving_period, plan.stats_period, plan.last) == (50, 10, 1850)


@pytest.mark.parametrize('flag', ['--steps=0', '--faults=-3', '--steps=x'])
def test_invalid_numbers(flag):
  command = [sys.executable, '-m', 'tests.soak', flag]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 2 and 'expected an integer of at least 1' in done.stderr
