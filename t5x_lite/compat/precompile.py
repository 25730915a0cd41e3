"""`python -m t5x_lite.compat.precompile`: `t5x_lite precompile`, for scripts that run the program `t5x.precompile`."""

import sys

from t5x_lite.command_line import cli

if __name__ == '__main__':
  sys.argv.insert(1, 'precompile')
  cli.run_program(may_restart=True)
