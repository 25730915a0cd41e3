"""Lists of what fails with T5X's files and tests, with the reason of each."""

import collections
from collections.abc import Collection, Mapping
import pathlib


def read(name: str) -> dict[str, str]:
  """Return a list beside this file: lines `id: class: reason`, without empty lines and comments."""
  lines = (pathlib.Path(__file__).parent / name).read_text().splitlines()
  return dict(line.split(': ', 1) for line in lines if line and not line.startswith('#'))


def report(problems: Mapping[str, str], ids: Collection[str], reasons: Mapping[str, str]) -> int:
  """Print how many failures the list has by class, and what it has wrong; return the number of the latter.

  Args:
    problems: messages by id of what failed.
    ids: ids of all that was run.
    reasons: list of known failures.
  """
  wrong = [
    f'NOT IN THE LIST {name}: {problem}'
    for name, problem in problems.items()
    if name not in reasons
  ]
  wrong += [
    f'LISTED, BUT PASSES {name}' for name in reasons if name in ids and name not in problems
  ]
  wrong += [f'LISTED, BUT DOES NOT EXIST {name}' for name in reasons if name not in ids]
  classes = collections.Counter(reasons[name].split(':')[0] for name in problems if name in reasons)
  print(
    '  Listed failures: '
    + ', '.join(f'{count} {each}' for each, count in classes.most_common())
    + '.'
  )
  for line in wrong:
    print(f'  {line}')
  return len(wrong)
