"""Converts files of JSON lines to an array record file: `t5x_lite jsonl_to_array_record` as a script.

  python scripts/jsonl_to_array_record.py data/train-0.jsonl data/train-1.jsonl data/train.array_record

Needs the extra `[grain]`; runs from a checkout without installation as well. `--help` lists the arguments.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from t5x_lite.command_line import cli  # noqa: E402  (the checkout comes first)

if __name__ == '__main__':
  sys.exit(cli.main(['jsonl_to_array_record', *sys.argv[1:]]))
