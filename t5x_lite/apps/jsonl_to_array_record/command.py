"""`t5x_lite jsonl_to_array_record`: convert JSONL files to an array record file."""

import argparse

from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument('inputs', nargs='+', metavar='INPUT', help='JSONL files, read in this order')
  parser.add_argument(
    'output', metavar='OUTPUT', help='array record file to write; it must not exist'
  )


def run_command(arguments: argparse.Namespace) -> int:
  """Run the command and return its exit status."""
  from t5x_lite.data import grain_records
  from t5x_lite.data import records

  lines = records.JsonLines(arguments.inputs)
  num_records = grain_records.write_array_records(arguments.output, records.checked_objects(lines))
  show(f'Wrote {num_records:,} records to {arguments.output}.')
  return ExitCode.OK
