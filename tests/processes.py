"""Python programs in processes: one alone, or several of one cluster, each with its own virtual CPU devices."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
_SECONDS = 300


def xla_flags(num_devices: int) -> str:
  """Returns the flags that tests compile with, for another number of virtual devices."""
  return re.sub(r'(device_count)=\d+', rf'\1={num_devices}', os.environ['XLA_FLAGS'])


def run(
  program: str, *arguments: object, num_devices: int, num_processes: int = 2, status: int = 0
) -> list[str]:
  """Runs `program` in every process, by `t5x_lite launch`, and checks its status.

  Args:
    program: Python, which calls `runtime.join`; may be indented.
    *arguments: its arguments.
    num_devices: of a process.
    num_processes: how many.
    status: the expected status.

  Returns:
    What each has written, with '[process <i>] ' before each line.
  """
  command = [
    sys.executable,
    '-m',
    't5x_lite',
    'launch',
    '-n',
    str(num_processes),
    f'--devices_per_process={num_devices}',
    '--',
    sys.executable,
    '-c',
    textwrap.dedent(program),
    *map(str, arguments),
  ]
  done = subprocess.run(
    command,
    cwd=_ROOT,
    env=os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=_SECONDS,
  )
  assert done.returncode == status, done.stdout[-5000:]
  lines = done.stdout.splitlines(keepends=True)
  return [
    ''.join(line for line in lines if line.startswith(f'[process {i}] '))
    for i in range(num_processes)
  ]


def start(program: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
  """Return a started process of `program` (Python) whose standard output can be read as text.

  Args:
    program: Python; may be indented.
    *arguments: arguments of the program.
    **options: further arguments of `subprocess.Popen`.
  """
  return subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(program), *map(str, arguments)],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    text=True,
    **{'env': os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}, **options},
  )
