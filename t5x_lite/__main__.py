"""Makes `python -m t5x_lite` the same program as the `t5x_lite` command."""

from t5x_lite import cli

if __name__ == '__main__':
  cli.run_program()
