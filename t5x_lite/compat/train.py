"""`python -m t5x_lite.compat.train`: `t5x_lite train`, for scripts that run T5X's program `t5x.train`."""

import sys

from t5x_lite import cli
from t5x_lite import compat

if __name__ == '__main__':
  compat.install()  # Modules of the configuration may import t5x.
  sys.argv.insert(1, 'train')
  cli.run_program(may_restart=True)
