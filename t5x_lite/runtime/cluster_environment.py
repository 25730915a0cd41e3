"""Environment variables that give a process its place in a cluster, and the command that it belongs to."""

import os
import shlex
import sys

# Host and port of process 0, number of processes, and index of this process.
ADDRESS, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
# The devices of the machine that the process uses, separated by commas.
LOCAL_DEVICES = 'JAX_LOCAL_DEVICE_IDS'
# Id of the process of `t5x_lite launch` that has started this one.
LAUNCHED = 'T5X_LITE_LAUNCHED'
# Command line of `t5x_lite launch`.
COMMAND = 'T5X_LITE_LAUNCH_COMMAND'


def command_line() -> str:
  """Return the command that starts the run of this process again, for a shell."""
  if os.environ.get(LAUNCHED) == str(os.getppid()) and COMMAND in os.environ:
    return os.environ[COMMAND]
  return shlex.join(sys.orig_argv)
