"""The command that starts a run again, and what a run tells its launcher."""

import os
import pathlib
import shlex
import subprocess
import sys

from t5x_lite.runtime import cluster_environment as names

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAM = """
import os, sys
from t5x_lite import runtime
from t5x_lite.runtime import cluster_environment

mine = {name: value for name, value in sorted(os.environ.items()) if name.startswith(('JAX_', 'XLA_'))}
print(mine, sys.argv)
runtime.compile_faster()  # adds a flag to XLA_FLAGS, as each run does
print(runtime.command_line())
"""


def test_a_launched_process_names_the_command_of_all(monkeypatch):
  own = names.own_command_line()
  assert own.endswith(shlex.join(sys.orig_argv))
  assert names.command_line() == own
  monkeypatch.setenv(names.COMMAND, 't5x_lite launch -n 2 -- train')
  monkeypatch.setenv(names.LAUNCHED, '1')  # an outer launch
  assert names.command_line() == own
  monkeypatch.setenv(names.LAUNCHED, str(os.getppid()))
  assert names.command_line() == 't5x_lite launch -n 2 -- train'


def test_the_printed_command_starts_the_same_run_in_another_shell(tmp_path):
  program = tmp_path / 'a program.py'
  program.write_text(_PROGRAM, encoding='utf-8')
  plain = {
    name: value for name, value in os.environ.items() if not name.startswith(('JAX_', 'XLA_'))
  } | {'PYTHONPATH': str(_ROOT)}

  def run(command, **variables):
    output = subprocess.run(
      command, env=plain | variables, capture_output=True, text=True, check=True
    ).stdout
    return output.splitlines()

  flags = '--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=false'
  seen, printed = run(
    [sys.executable, str(program), '--gin.NAME="a b"'], XLA_FLAGS=flags, JAX_PLATFORMS='cpu'
  )
  assert 'XLA_FLAGS' in seen and 'JAX_PLATFORMS' in seen
  assert run(['sh', '-c', printed]) == [seen, printed]
  # Without such variables the command has none, also after `compile_faster`; the place of a process is not its run's.
  seen, printed = run([sys.executable, str(program)], JAX_PROCESS_ID='1', JAX_NUM_PROCESSES='2')
  assert printed == shlex.join([sys.executable, str(program)])


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
