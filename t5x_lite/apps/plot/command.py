"""`t5x_lite plot`: draw the metrics of runs."""

import argparse

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'runs',
    nargs='+',
    metavar='RUN',
    help='model directory; several runs are drawn in the same panels',
  )
  parser.add_argument(
    '--out', metavar='FILE', help='file to write (.png, .svg or .pdf); default: RUN/metrics.png'
  )
  parser.add_argument(
    '--metric',
    action='append',
    metavar='NAME',
    help='a name as in metrics.jsonl; may be repeated. Default: loss, accuracy, learning '
    'rate and the metrics of inference',
  )
  parser.add_argument(
    '--from_start',
    action='store_true',
    help='count the steps of each run from the checkpoint that it started from, to compare '
    'fine-tuning with training from new parameters',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  from t5x_lite.apps.plot import run as plot

  path = plot.plot(flags.runs, flags.out, flags.metric, from_start=flags.from_start)
  show(str(path))
  return ExitCode.OK
