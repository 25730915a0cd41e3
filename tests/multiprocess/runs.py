"""Commands in several processes, started by `t5x_lite launch` or one by one, whose output is read as it comes."""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from tests import processes

ROOT = pathlib.Path(__file__).parents[2]
_GIN_FILE = str(pathlib.Path(__file__).with_name('letters.gin'))
# For what should happen within seconds, on a machine that is busy with other tests.
_SECONDS = 120


def train(model_dir: pathlib.Path, *flags: str) -> list[str]:
  """Return the command that trains in `model_dir`, with further flags."""
  return ['train', f'--gin_file={_GIN_FILE}', f'--gin.MODEL_DIR={model_dir}', *flags]


class Run:
  """Processes of one run. A context that ends them.

  Attributes:
    lines: the lines of the output with their times; those of process i begin with '[process i] '.
    statuses: of the launcher, or of each process; set by `end`.
  """

  def __init__(
    self,
    command: Sequence[str],
    num_processes: int = 2,
    *,
    launched: bool = True,
    num_devices: int = 1,
    faults: Sequence[Mapping[str, Any]] = (),
    seconds: float = 0.0,
    environment: Mapping[str, str] = {},
    flags: Sequence[str] = (),
    launch_flags: Sequence[str] = (),
  ):
    """Start the processes.

    Args:
      command: a command of t5x_lite with its flags; for the launcher also a program.
      num_processes: how many.
      launched: False to start them without the launcher, which would end the others itself.
      num_devices: number of devices of each process; without the launcher 1.
      faults: see `letters`.
      seconds: time that the source takes for a batch.
      environment: further variables.
      flags: further flags.
      launch_flags: further flags of the launcher.
    """
    self.lines: list[tuple[float, str]] = []
    self.statuses: list[int] = []
    self._changed = threading.Condition()
    env = os.environ | {
      'PYTHONPATH': str(ROOT),
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': processes.xla_flags(1),
      'FAULTS': json.dumps(list(faults)),
      'SECONDS': str(seconds),
      **environment,
    }
    program = [sys.executable, '-m', 't5x_lite']
    if launched:
      commands = [
        [
          *program,
          'launch',
          '-n',
          str(num_processes),
          f'--devices_per_process={num_devices}',
          *launch_flags,
          '--',
          *command,
          *flags,
        ]
      ]
    else:
      with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{s.getsockname()[1]}'
      commands = [
        [
          *program,
          *command,
          *flags,
          f'--coordinator_address={address}',
          f'--process_count={num_processes}',
          f'--process_index={i}',
        ]
        for i in range(num_processes)
      ]
    self._started = [
      subprocess.Popen(line, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
      for line in commands
    ]
    self._readers = [
      threading.Thread(target=self._read, args=(process, '' if launched else f'[process {i}] '))
      for i, process in enumerate(self._started)
    ]
    for reader in self._readers:
      reader.start()

  def _read(self, process: subprocess.Popen, prefix: str) -> None:
    with process.stdout:
      for line in process.stdout:
        text = line.decode(errors='replace').rstrip('\n')
        with self._changed:
          self.lines.append((time.monotonic(), text if text.startswith(prefix) else prefix + text))
          self._changed.notify_all()
    with self._changed:
      self._changed.notify_all()

  @property
  def output(self) -> str:
    """The output until now."""
    return '\n'.join(line for _, line in self.lines)

  def output_of(self, process: int) -> str:
    """Return the output of one process."""
    return '\n'.join(line for _, line in self.lines if line.startswith(f'[process {process}] '))

  def wait_for(self, pattern: str, after: float = 0.0) -> float:
    """Wait for a line with `pattern` (a regular expression) and return its time.

    Args:
      pattern: the pattern.
      after: time before which lines do not count.
    """
    deadline = time.monotonic() + _SECONDS
    with self._changed:
      while True:
        for at, line in self.lines:
          if at > after and re.search(pattern, line):
            return at
        assert any(reader.is_alive() for reader in self._readers), (pattern, self.output[-5000:])
        assert self._changed.wait(max(deadline - time.monotonic(), 0)), (
          pattern,
          self.output[-5000:],
        )

  def pid(self, process: int) -> int:
    """Return the id of a process that has read its configuration."""
    self.wait_for(rf'^\[process {process}\] pid \d+')
    return int(re.search(rf'^\[process {process}\] pid (\d+)', self.output, re.MULTILINE)[1])

  def send(self, process: int, number: signal.Signals) -> float:
    """Send a signal to one process, and return the time."""
    os.kill(self.pid(process), number)
    return time.monotonic()

  def wait_until_stopped(self, process: int) -> None:
    """Wait until SIGSTOP has stopped a process that runs without the launcher; its threads run on after 'FAULT'."""
    os.waitid(os.P_PID, self.pid(process), os.WSTOPPED)

  def end(self) -> float:
    """Wait until all processes have ended, set `statuses`, and return the time."""
    deadline = time.monotonic() + _SECONDS
    for process in self._started:
      try:
        process.wait(max(deadline - time.monotonic(), 0))
      except subprocess.TimeoutExpired:
        raise AssertionError(f'The processes did not end: {self.output[-5000:]}') from None
    at = time.monotonic()
    for reader in self._readers:
      reader.join()
    self.statuses = [process.returncode for process in self._started]
    return at

  def seconds_to_end(self) -> float:
    """Return the time from the first fault until all processes have ended."""
    at = self.wait_for('FAULT')
    return self.end() - at

  def __enter__(self) -> 'Run':
    return self

  def __exit__(self, *exc_info) -> None:
    for _, line in list(self.lines):
      if (found := re.fullmatch(r'\[process \d+\] pid (\d+)', line)) and self._started[
        0
      ].poll() is None:
        with contextlib.suppress(ProcessLookupError):
          os.kill(int(found[1]), signal.SIGKILL)
    for process in self._started:
      process.kill()
      process.wait()
    for reader in self._readers:
      reader.join()


def run(command: Sequence[str], num_processes: int = 2, **options: Any) -> Run:
  """Run a command until its end, which must be status 0, and return the run."""
  with Run(command, num_processes, **options) as started:
    started.end()
    assert started.statuses == [0] * len(started.statuses), started.output[-5000:]
  return started
