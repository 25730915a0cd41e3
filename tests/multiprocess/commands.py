"""Several commands of t5x_lite one after the other in the same processes, which saves their start.

    python -m tests.multiprocess.commands COMMANDS

COMMANDS is JSON, a list of (command with its flags, its exit status).
"""

import json
import sys

import gin

from t5x_lite.command_line import cli
from t5x_lite.runtime import cluster


def run_all(commands):
  """Run the commands; return the status of the last one."""
  for command, expected in commands:
    gin.clear_config()
    status = cli.main(command)
    assert status == expected, (command, status)
  return status


if __name__ == '__main__':
  last_status = run_all(json.loads(sys.argv[1]))
  cluster.end(last_status)
  sys.exit(last_status)
