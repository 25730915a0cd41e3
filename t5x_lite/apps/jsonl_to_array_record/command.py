"""`t5x_lite jsonl_to_array_record`: convert JSONL files to an array record file."""

import argparse

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument('inputs', nargs='+', metavar='INPUT', help='JSONL files, read in this order')
  parser.add_argument(
    'output', metavar='OUTPUT', help='array record file to write; it must not exist'
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  from t5x_lite.data.files import grain_records
  from t5x_lite.data.files import records

  lines = records.JsonLines(flags.inputs)
  num_records = grain_records.write_array_records(flags.output, records.checked_objects(lines))
  show(f'Wrote {num_records:,} records to {flags.output}.')
  return ExitCode.OK
