"""Start several processes of one run on this machine, end all of them when one fails, and start them again.

Each process finds its place in environment variables, see `runtime.cluster`.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from t5x_lite import checks
from t5x_lite.command_line.standard_streams import write_without_waiting
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.runtime import cluster_environment as names

# After the failure of a process, the others have this time to end, and the same time again after SIGTERM.
_END_SECONDS = 15.0
# The same if the process was killed, so that it could not tell the others.
_KILLED_SECONDS = 1.0
_POLL_SECONDS = 0.05
# Longest wait before a restart.
_MAX_RESTART_SECONDS = 300.0
# Lines of JAX's collectives on CPUs, which cannot be turned off.
_NOISE = b'[Gloo] Rank '
# Of statuses after which a restart follows.
_CAUSES: Mapping[int, str] = {
  ExitCode.WATCHDOG: ' (no progress)',
  ExitCode.SAVE_FAILED: ' (a file could not be written)',
  ExitCode.RESTART: ' (stopped by a signal, or another process was lost)',
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
  command: Sequence[str],
  num_processes: int,
  *,
  devices_per_process: int = 1,
  port: int | None = None,
  max_restarts: int = 0,
  restart_seconds: float = 10.0,
) -> int:
  """Run a program in several processes that form a cluster, and return the exit status of the first that failed.

  Signals are passed on to all processes, and end the restarts. Lines of the output begin with the process.

  Args:
    command: the program and its arguments.
    num_processes: number of processes.
    devices_per_process: number of GPUs of each process, or of virtual devices on a CPU.
    port: port at which they meet; None for a free one, another one after each restart.
    max_restarts: number of restarts in a row without a new checkpoint in between; see `is_mendable`.
    restart_seconds: wait before the first of these restarts; each further wait is twice as long, up to 300 s if it is
      not longer from the start.

  Returns:
    The status of the last start; 128 + the number of the signal for a process that was killed.

  Raises:
    ConfigError: the machine has too few GPUs, or the program does not exist.
  """
  positive = checks.number(at_least=1, integer=True)
  checks.check(
    '',
    {
      '-n': num_processes,
      '--devices_per_process': devices_per_process,
      '--port': port,
      '--max_restarts': max_restarts,
      '--restart_seconds': restart_seconds,
    },
    **{
      '-n': positive,
      '--devices_per_process': positive,
      '--port': checks.number(at_least=1, below=2**16, integer=True).or_none(),
      '--max_restarts': checks.number(at_least=0, integer=True),
      '--restart_seconds': checks.number(at_least=0),
    },
  )
  if shutil.which(command[0]) is None:
    raise ConfigError(
      f'{command[0]!r} is neither a command of t5x_lite nor a program. See t5x_lite --help.'
    )
  devices = _devices(num_processes, devices_per_process, os.environ)
  with contextlib.ExitStack() as stack:
    processes: list[subprocess.Popen] = []
    received = stack.enter_context(_passing_on(processes))
    stack.callback(_end_all, processes)
    steps = None
    environment = {**os.environ}
    if max_restarts:
      folder = stack.enter_context(tempfile.TemporaryDirectory(prefix='t5x_lite-launch-'))
      steps = names.StepsFile(pathlib.Path(folder, 'steps'))
      environment |= steps.environment
    num_restarts = 0
    while True:
      # Nothing that a process of an earlier start may still know is used again.
      shared = {
        **environment,
        names.ADDRESS: f'127.0.0.1:{port or _free_port()}',
        names.COUNT: str(num_processes),
        names.LAUNCHED: str(os.getpid()),
        names.SECRET: secrets.token_hex(32),
        names.COMMAND: names.own_command_line(),
        'PYTHONUNBUFFERED': '1',
      }
      processes.clear()
      first = _run(command, [shared | each for each in devices], processes, received)
      status = _status(processes[first])
      if steps is None or received or not is_mendable(status):
        return status
      if steps.has_saved():
        num_restarts = 0
      what = f'{time.strftime("%Y-%m-%d %H:%M:%S")}: {_describe_end(first, processes[first])}'
      if num_restarts >= max_restarts:
        _say(f'{what}; no restart after {num_restarts} without a new checkpoint (--max_restarts)')
        return status
      seconds = min(
        restart_seconds * 2.0 ** min(num_restarts, 99), max(restart_seconds, _MAX_RESTART_SECONDS)
      )
      num_restarts += 1
      where = ''
      if steps.step is not None:
        where = f' from step {steps.step:,}'
      _say(f'{what}; restart {num_restarts} of at most {max_restarts}{where} in {seconds:g} s')
      deadline = time.monotonic() + seconds
      while not received and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
      if received:
        return status


def is_mendable(status: int) -> bool:
  """Return whether a restart can mend what ended a run with this exit status.

  These are no progress, a failed save, a state that was saved on a signal or a lost process, and 128 + a signal, except
  for SIGINT, which a person sends. The scripts in `examples/cluster` restart on the same statuses.
  """
  if status in (ExitCode.WATCHDOG, ExitCode.SAVE_FAILED, ExitCode.RESTART):
    return True
  return 0 < status - 128 < signal.NSIG and status - 128 != signal.SIGINT


def _run(
  command: Sequence[str],
  environments: Sequence[Mapping[str, str]],
  processes: list[subprocess.Popen],
  received: Sequence[int],
) -> int:
  """Run the processes until all have ended.

  Args:
    command: the program and its arguments.
    environments: variables of each process, without its index.
    processes: empty list that gets the processes.
    received: signals to this process, which grows.

  Returns:
    The index of the process that failed first; 0 if none failed.
  """
  for index, environment in enumerate(environments):
    # Another session, so that Ctrl-C reaches them once, through this process.
    process = subprocess.Popen(
      command,
      env={**environment, names.INDEX: str(index)},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,
    )
    processes.append(process)
    for number in tuple(received):  # The handler did not know this process.
      _send_to_group(process, number)
  copies = []
  for index, process in enumerate(processes):
    copies.append(_copy(index, process.stdout, sys.stdout))
    copies.append(_copy(index, process.stderr, sys.stderr))
  first = _wait(processes)
  if processes[first].returncode:  # The children of a script that failed may still run.
    for process in processes:
      _send_to_group(process, signal.SIGKILL)
  deadline = time.monotonic() + _END_SECONDS  # A child may keep the pipes open.
  for copy in copies:
    copy.join(max(deadline - time.monotonic(), 0))
  return first


def _wait(processes: Sequence[subprocess.Popen]) -> int:
  """Wait for all processes; end the others when one fails. Return the index of the first that failed, or 0."""
  first = None
  failed_at = 0.0
  sent = None
  while any(process.poll() is None for process in processes):
    time.sleep(_POLL_SECONDS)
    now = time.monotonic()
    if first is None:
      first = next((index for index, process in enumerate(processes) if process.poll()), None)
      failed_at = now
      if first is not None and processes[first].returncode < 0:  # It could not tell why.
        _say(f'{_describe_end(first, processes[first])}; the others end')
      continue
    if processes[first].returncode < 0:
      limit = _KILLED_SECONDS
    else:
      limit = _END_SECONDS
    for number, seconds in ((signal.SIGKILL, limit + _END_SECONDS), (signal.SIGTERM, limit)):
      if now - failed_at > seconds and sent not in (number, signal.SIGKILL):
        sent = number
        _send(processes, number)
        break
  if first is None:
    first = next((index for index, process in enumerate(processes) if process.returncode), 0)
  return first


def _status(process: subprocess.Popen) -> int:
  """Return the exit status of an ended process, as a shell has it."""
  if process.returncode < 0:
    return 128 - process.returncode
  return process.returncode


def _describe_end(index: int, process: subprocess.Popen) -> str:
  if process.returncode >= 0:
    return (
      f'process {index} ended with status {process.returncode}{_CAUSES.get(process.returncode, "")}'
    )
  number = -process.returncode
  name = f'signal {number}'
  with contextlib.suppress(ValueError):  # a real-time signal
    name = signal.Signals(number).name
  return f'process {index} was killed by {name}'


def _say(text: str) -> None:
  write_without_waiting(f't5x_lite launch: {text}.\n')


def _send(processes: Sequence[subprocess.Popen], number: int) -> None:
  """Send a signal to all processes that still run, and to those that they have started."""
  for process in processes:
    if process.poll() is None:
      _send_to_group(process, number)


def _send_to_group(process: subprocess.Popen, number: int) -> None:
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, number)


def _end_all(processes: Sequence[subprocess.Popen]) -> None:
  _send(processes, signal.SIGKILL)
  for process in processes:
    process.wait()


@contextlib.contextmanager
def _passing_on(processes: Sequence[subprocess.Popen]) -> Iterator[Sequence[int]]:
  """Context in which signals to this process are passed on; its value is the list of them, which grows."""
  received: list[int] = []

  def handle(number: int, frame: object) -> None:
    del frame
    _send(processes, number)
    received.append(number)

  before = {
    number: signal.signal(number, handle)
    for number in _SIGNALS
    if signal.getsignal(number) is not signal.SIG_IGN
  }
  try:
    yield received
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _copy(index: int, source: IO[bytes] | None, target) -> threading.Thread:
  """Start a thread that copies lines, each with the process in front unless it has that already."""
  assert source is not None  # a pipe
  prefix = f'[process {index}] '.encode()
  descriptor = None
  with contextlib.suppress(OSError, ValueError, AttributeError):
    descriptor = target.fileno()

  def run() -> None:
    with source:
      for line in source:
        if line.startswith(_NOISE):
          continue
        text = line.removesuffix(b'\n') + b'\n'
        if not text.startswith(prefix):
          text = prefix + text
        with contextlib.suppress(OSError):  # the reader is gone; the processes continue
          if descriptor is None:
            target.write(text.decode(errors='replace'))
          while text and descriptor is not None:
            text = text[os.write(descriptor, text) :]

  thread = threading.Thread(target=run, name=f'output-{index}', daemon=True)
  thread.start()
  return thread


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def _devices(
  num_processes: int, per_process: int, environment: Mapping[str, str]
) -> list[dict[str, str]]:
  """Return the environment variables that give each process its devices.

  Raises:
    ConfigError: there are too few GPUs, or the devices are TPUs.
  """
  platforms = environment.get('JAX_PLATFORMS', '')
  if platforms.startswith('tpu') or (not platforms and pathlib.Path('/dev/accel0').exists()):
    raise ConfigError(
      'launch cannot divide the TPUs of a machine: one process uses all of them. Start the command '
      'without launch, once on each machine of the pod.'
    )
  if platforms.startswith('cpu'):
    gpus = []
  else:
    gpus = names.gpus(environment)
  if not gpus:
    flags = re.sub(
      r'--xla_force_host_platform_device_count=\d+', '', environment.get('XLA_FLAGS', '')
    ).strip()
    return [{'JAX_NUM_CPU_DEVICES': str(per_process), 'XLA_FLAGS': flags}] * num_processes
  if num_processes * per_process > len(gpus):
    raise ConfigError(
      f'launch -n {num_processes} with --devices_per_process={per_process} must have '
      f'{num_processes * per_process} GPUs, got {len(gpus)}. Reduce a number, or set JAX_PLATFORMS=cpu '
      'to try it on virtual devices.'
    )
  return [
    {'CUDA_VISIBLE_DEVICES': ','.join(gpus[i * per_process : (i + 1) * per_process])}
    for i in range(num_processes)
  ]
