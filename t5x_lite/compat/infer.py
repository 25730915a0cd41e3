"""`python -m t5x_lite.compat.infer`: `t5x_lite infer`, for scripts that run T5X's program `t5x.infer`."""

import sys

from t5x_lite.command_line import cli

if __name__ == '__main__':
  sys.argv.insert(1, 'infer')
  cli.run_program(may_restart=True)
