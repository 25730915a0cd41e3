"""`python -m t5x_lite.compat.train`: `t5x_lite train`, for scripts that run T5X's program `t5x.train`."""

import sys

from t5x_lite.command_line import cli

if __name__ == '__main__':
  sys.argv.insert(1, 'train')
  cli.run_program(may_restart=True)
