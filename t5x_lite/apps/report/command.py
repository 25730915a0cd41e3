"""`t5x_lite report`: write a page about runs."""

import argparse

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'runs', nargs='+', metavar='RUN', help='model directory; several runs are compared on one page'
  )
  parser.add_argument(
    '--out',
    metavar='FILE',
    help='page to write (.html), which needs no other file; default: RUN/report.html',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  from t5x_lite.apps.report import run as report

  path = report.report(flags.runs, flags.out)
  show(str(path))
  return ExitCode.OK
