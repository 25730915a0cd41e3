"""The `t5x_lite` command, also as `python -m t5x_lite`."""

from typing import NoReturn

from t5x_lite.command_line import cli


def run() -> NoReturn:
  """Run the command line of this process and end the process."""
  cli.run_program(may_restart=True)


if __name__ == '__main__':
  run()
