"""Compares T5X's names with our table, and runs its gin files and own tests; `T5X=PATH make test-t5x`.

    python -m tests.t5x PATH

PATH is a checkout of T5X, of which nothing is imported but its tests. Ends with status 1 if a public name is not in the
table of `t5x_lite.compat.names`, or if a file or a test fails that is not in `gin_files.txt` or `own_tests.txt`, which
give the reasons, or if one of these passes.
"""

import os
import pathlib
import sys

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def main(arguments: list[str]) -> int:
  """Run all checks; return the exit status."""
  if not arguments or not arguments[0]:
    print('Skipped: T5X=PATH names no checkout of T5X.')
    return 0
  checkout = pathlib.Path(arguments[0]).expanduser().resolve()
  if not (checkout / 't5x' / 'train.py').exists():
    print(f'{checkout} is not a checkout of T5X: it has no t5x/train.py.', file=sys.stderr)
    return 2
  from tests.t5x import gin_files
  from tests.t5x import own_tests
  from tests.t5x import public_names

  wrong = sum(part.check(str(checkout)) for part in (public_names, gin_files, own_tests))
  print(f'{wrong} results differ from the lists.' if wrong else 'All as listed.')
  return min(wrong, 1)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
