"""The command that starts a run again, and what a run tells its launcher."""

import os
import shlex
import sys

from t5x_lite.runtime import cluster_environment as names


def test_a_launched_process_names_the_command_of_all(monkeypatch):
  own = shlex.join(sys.orig_argv)
  assert names.command_line() == own
  monkeypatch.setenv(names.COMMAND, 't5x_lite launch -n 2 -- train')
  monkeypatch.setenv(names.LAUNCHED, '1')  # an outer launch
  assert names.command_line() == own
  monkeypatch.setenv(names.LAUNCHED, str(os.getppid()))
  assert names.command_line() == 't5x_lite launch -n 2 -- train'


def test_a_launcher_learns_where_a_run_begins_and_what_it_saves(tmp_path):
  steps = names.StepsFile(tmp_path / 'steps')
  assert not steps.has_saved() and steps.step is None
  environment = steps.environment
  assert names.tells_launcher(environment) and not names.tells_launcher({})
  names.tell_launcher('restored', 100, environment)
  assert not steps.has_saved() and steps.step == 100
  names.tell_launcher('saved', 150, environment)
  names.tell_launcher('restored', 50, environment)  # another run of the same script
  assert steps.has_saved() and steps.step == 50
  assert not steps.has_saved() and steps.step == 50
  with steps.path.open('ab') as file:
    file.write(b'saved x\n\xff\nsaved\nsaved None\n')
  assert not steps.has_saved() and steps.step == 50


def test_a_launcher_that_cannot_be_told_costs_nothing(tmp_path):
  steps = names.StepsFile(tmp_path / 'missing' / 'steps')
  names.tell_launcher('saved', 1, steps.environment)
  victim = tmp_path / 'file'
  victim.write_text('mine')
  steps = names.StepsFile(tmp_path / 'link')
  steps.path.symlink_to(victim)
  names.tell_launcher('saved', 1, steps.environment)
  assert victim.read_text() == 'mine'
