"""Python programs in processes: one alone, or several of one JAX computation, each with its own virtual CPU devices."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import time
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
_SECONDS = 300


def xla_flags(num_devices: int) -> str:
  """Returns the flags that tests compile with, for another number of virtual devices."""
  return re.sub(r'(device_count)=\d+', rf'\1={num_devices}', os.environ['XLA_FLAGS'])


def run(program: str, folder: pathlib.Path, *arguments: object, num_devices: int, num_processes: int = 2) -> list[str]:
  """Runs `program` in every process, and checks that all end well and say 'process <i> is done'.

  Args:
    program: Python; its arguments are the number of the process, a free port, and `arguments`.
    folder: where its output is kept meanwhile.
    *arguments: further ones.
    num_devices: of a process.
    num_processes: how many.

  Returns:
    What each has written.
  """
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = s.getsockname()[1]
  env = os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags(num_devices)}
  logs = [folder / f'log_{i}' for i in range(num_processes)]
  processes = []
  deadline = time.monotonic() + _SECONDS
  try:
    for i, log in enumerate(logs):
      with open(log, 'w') as f:
        processes.append(subprocess.Popen(
            [sys.executable, '-c', textwrap.dedent(program), str(i), str(port), *map(str, arguments)],
            cwd=_ROOT, env=env, stdout=f, stderr=f))
    # When one fails, the others wait for it in some collective: they are not waited for.
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
      assert time.monotonic() < deadline, [log.read_text()[-3000:] for log in logs]
      time.sleep(0.1)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  outputs = [log.read_text() for log in logs]
  for i, (process, output) in enumerate(zip(processes, outputs, strict=True)):
    assert process.returncode == 0, [output[-3000:] for output in outputs]
    assert f'process {i} is done' in output, output[-3000:]
  return outputs


def start(program: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
  """Return a started process of `program` (Python) whose standard output can be read as text.

  Args:
    program: Python; may be indented.
    *arguments: arguments of the program.
    **options: further arguments of `subprocess.Popen`.
  """
  return subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(program), *map(str, arguments)], cwd=_ROOT, stdout=subprocess.PIPE,
      text=True, **{'env': os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}, **options})
