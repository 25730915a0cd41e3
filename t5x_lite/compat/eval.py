"""`python -m t5x_lite.compat.eval`: `t5x_lite eval`, for scripts that run T5X's program `t5x.eval`."""

import sys

from t5x_lite.command_line import cli

if __name__ == '__main__':
  sys.argv.insert(1, 'eval')
  cli.run_program(may_restart=True)
