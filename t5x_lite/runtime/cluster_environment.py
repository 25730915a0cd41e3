"""Environment variables that give a process its place in a cluster, and the command that it belongs to."""

from collections.abc import Mapping
import os
import pathlib
import sys

from t5x_lite import masking

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
# Id of the process of `t5x_lite launch` that has started this one.
LAUNCHED = 'T5X_LITE_LAUNCHED'
# Secret with which the processes of a run sign what they tell each other.
SECRET = 'T5X_LITE_CLUSTER_SECRET'
# Command line of `t5x_lite launch`.
COMMAND = 'T5X_LITE_LAUNCH_COMMAND'


def command_line() -> str:
  """Return the command that starts the run of this process again, for a shell, without its secrets."""
  if os.environ.get(LAUNCHED) == str(os.getppid()) and COMMAND in os.environ:
    return os.environ[COMMAND]
  each = ' # for each process, with its --process_index'
  return masking.masked_command(sys.orig_argv) + (
    each if any('--process_index' in word for word in sys.orig_argv) else ''
  )


def gpus(environment: Mapping[str, str]) -> list[str]:
  """Return the names of the NVIDIA GPUs that a process with this environment may use."""
  visible = environment.get('CUDA_VISIBLE_DEVICES')
  if visible is not None:
    return [name for name in visible.split(',') if name and name != '-1']
  folder = pathlib.Path('/proc/driver/nvidia/gpus')
  if folder.is_dir():
    return [str(i) for i in range(len(list(folder.iterdir())))]
  return []
