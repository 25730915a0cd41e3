"""The command that starts a run again."""

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
