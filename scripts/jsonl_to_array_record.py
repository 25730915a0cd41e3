"""Turns files of JSON lines into one array record file, whose records are found without going through it.

  python scripts/jsonl_to_array_record.py data/train-0.jsonl data/train-1.jsonl data/train.array_record

The last argument is the new file; an existing one is left as it is. A line that is no JSON object is named, and then
nothing is written. Needs the extra `[grain]`; runs from a checkout without installation as well.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from t5x_lite.errors import T5xLiteError  # noqa: E402  (the checkout comes first)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('inputs', nargs='+', help='files of JSON lines')
  parser.add_argument('output', help='the array record file to write')
  arguments = parser.parse_args()
  try:
    from t5x_lite.data import grain_records, records
    lines = records.JsonLines(arguments.inputs)
    num_records = grain_records.write_array_records(arguments.output, records.checked_objects(lines))
  except T5xLiteError as error:
    print(f'{type(error).__name__}: {error}', file=sys.stderr)
    return int(error.exit_code)
  print(f'Wrote {num_records:,} records to {arguments.output}.')
  return 0


if __name__ == '__main__':
  sys.exit(main())
