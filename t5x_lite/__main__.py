"""Makes `python -m t5x_lite` the same program as the `t5x_lite` command."""

import sys

from t5x_lite import cli

if __name__ == '__main__':
  sys.exit(cli.main())
