"""`t5x_lite jsonl_to_array_record`: convert JSONL files to an array record file."""

import argparse

from t5x_lite.apps.common.flags import Command
from t5x_lite.errors import ExitCode


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('inputs', nargs='+', metavar='INPUT', help='JSONL files, read in this order')
  parser.add_argument('output', metavar='OUTPUT', help='array record file to write; it must not exist')


def _run(arguments: argparse.Namespace) -> int:
  from t5x_lite.data import grain_records, records
  lines = records.JsonLines(arguments.inputs)
  num_records = grain_records.write_array_records(arguments.output, records.checked_objects(lines))
  print(f'Wrote {num_records:,} records to {arguments.output}.')
  return ExitCode.OK


COMMAND = Command('convert JSONL files to an array record file', _add_arguments, _run)
