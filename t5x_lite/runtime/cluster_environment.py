"""Environment variables that give a process its place in a cluster, and the command that it belongs to."""

from collections.abc import Mapping
import contextlib
import os
import pathlib
import shlex
import sys

from t5x_lite.configuration import masking
from t5x_lite.runtime import xla_options

# Values of --distributed.
MODES = ('auto', 'on', 'off')
# Defaults of flags, in seconds.
INITIALIZATION_TIMEOUT = 300
HEARTBEAT_TIMEOUT = 30

# Host and port of process 0, number of processes, and index of this process.
ADDRESS = 'JAX_COORDINATOR_ADDRESS'
COUNT = 'JAX_NUM_PROCESSES'
INDEX = 'JAX_PROCESS_ID'
# The devices of the machine that the process uses, separated by commas.
LOCAL_DEVICES = 'JAX_LOCAL_DEVICE_IDS'
# Variables that give each process its place.
_PLACES = (ADDRESS, COUNT, INDEX, LOCAL_DEVICES)
# Variables of XLA, next to those of JAX.
_VARIABLES = ('LIBTPU_INIT_ARGS', 'XLA_FLAGS')
# Id of the process of `t5x_lite launch` that has started this one.
LAUNCHED = 'T5X_LITE_LAUNCHED'
# Secret with which the processes of a run sign what they tell each other.
SECRET = 'T5X_LITE_CLUSTER_SECRET'
# Command line of `t5x_lite launch`.
COMMAND = 'T5X_LITE_LAUNCH_COMMAND'
# File to which process 0 appends 'restored STEP' and 'saved STEP' for a launcher that restarts runs.
_STEPS_FILE = 'T5X_LITE_LAUNCH_STEPS'


def command_line() -> str:
  """Return the command that starts the run of this process again, for a shell, with what JAX reads, without secrets."""
  if os.environ.get(LAUNCHED) == str(os.getppid()) and COMMAND in os.environ:
    return os.environ[COMMAND]
  command = own_command_line()
  if any('--process_index' in word for word in sys.orig_argv):
    command += ' # for each process, with its --process_index'
  return command


def own_command_line() -> str:
  """Return the command of this process, for a shell, with the variables that change what JAX computes and where.

  Secrets are masked.
  """
  variables = []
  for name, value in sorted(os.environ.items()):
    if name == 'XLA_FLAGS':
      value = value.replace(xla_options.FAST_COMPILATION_FLAG, '').strip()
    is_read = name in _VARIABLES or name.startswith('JAX_')
    if is_read and value and name not in _PLACES:
      variables.append(f'{name}={shlex.quote(masking.masked_value(name, value))}')
  return ' '.join([*variables, masking.masked_command(sys.orig_argv)])


class StepsFile:
  """File in which a run tells its launcher where it begins and what it saves; the side of the launcher.

  Attributes:
    path: path of the file.
    step: newest step from which the run can continue; None if it has told none.
  """

  def __init__(self, path: pathlib.Path):
    """Store the path of a file that does not exist yet."""
    self.path = path
    self.step: int | None = None
    self._num_read = 0

  @property
  def environment(self) -> dict[str, str]:
    """Variables for the processes."""
    return {_STEPS_FILE: str(self.path)}

  def has_saved(self) -> bool:
    """Read what was added to the file since the last call; return whether there is a new checkpoint."""
    lines = []
    with contextlib.suppress(OSError):
      lines = self.path.read_text(errors='replace').splitlines()
    added = [line.split() for line in lines[self._num_read :]]
    self._num_read = len(lines)
    has_saved = False
    for words in added:
      if len(words) == 2 and words[1].isdecimal():
        self.step = int(words[1])
        has_saved |= words[0] == 'saved'
    return has_saved


def tells_launcher(environment: Mapping[str, str] = os.environ) -> bool:
  """Return whether the launcher of this process asks for its steps."""
  return bool(environment.get(_STEPS_FILE))


def tell_launcher(kind: str, step: int | None, environment: Mapping[str, str] = os.environ) -> None:
  """Append a line to the file of the launcher. Never raises OSError: a full disk costs the run nothing.

  Args:
    kind: 'restored' or 'saved'.
    step: number of completed steps.
    environment: environment variables.
  """
  with contextlib.suppress(OSError):
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    file = os.open(environment[_STEPS_FILE], flags, 0o600)
    try:
      os.write(file, f'{kind} {step}\n'.encode())
    finally:
      os.close(file)


def gpus(environment: Mapping[str, str]) -> list[str]:
  """Return the names of the NVIDIA GPUs that a process with this environment may use."""
  visible = environment.get('CUDA_VISIBLE_DEVICES')
  if visible is not None:
    return [name for name in visible.split(',') if name and name != '-1']
  folder = pathlib.Path('/proc/driver/nvidia/gpus')
  if folder.is_dir():
    return [str(i) for i in range(len(list(folder.iterdir())))]
  return []
