"""Applies each mutant to a copy of the checkout and runs its test, which must fail.

    python -m tests.mutation [--only NAME_OR_FILE] [--jobs N] [--seconds N]

First the tests of all mutants must pass without a change. Prints a line for each mutant and the score. Ends with
status 1 if a mutant survives or its text is not found, and with status 2 if a test fails without a change. All runs
share compiled programs; JAX_COMPILATION_CACHE_DIR names a folder that keeps them for the next time.
"""

import argparse
import collections
from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile

from tests.mutation import table
from tests.mutation.mutant import Mutant

_ROOT = pathlib.Path(__file__).parents[2]
_KILLED, _SURVIVED, _NOT_FOUND = 'killed', 'SURVIVED', 'TEXT NOT FOUND'
_TESTS_FAILED = 1  # pytest's exit status


def copy_checkout(target: pathlib.Path) -> None:
  """Copies the files that git tracks or would add, as they are now."""
  command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
  listed = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
  for name in filter(None, listed.split('\0')):
    if (_ROOT / name).is_file():
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(_ROOT / name, target / name)


def run_tests(
  root: pathlib.Path, tests: Sequence[str], cache: str, seconds: float
) -> tuple[int, str]:
  """Runs `tests` in the copy `root` until the first failure.

  Args:
    root: a copy of the checkout.
    tests: node ids.
    cache: folder for compiled programs.
    seconds: time limit.

  Returns:
    (exit status of pytest, its output); an exceeded limit counts as a failed test.
  """
  # No byte code: Python takes a file for unchanged whose size and second of change are equal.
  env = {
    'JAX_COMPILATION_CACHE_DIR': cache,
    **os.environ,
    'PYTHONPATH': str(root),
    'PYTHONDONTWRITEBYTECODE': '1',
  }
  command = [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', '-m', '', *tests]
  with subprocess.Popen(
    command,
    cwd=root,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  ) as process:
    try:
      output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)  # with the programs that tests have started
      return _TESTS_FAILED, f'no result after {seconds:g} s'
  return process.returncode, output


@contextlib.contextmanager
def changed(root: pathlib.Path, mutant: Mutant) -> Iterator[bool]:
  """Applies `mutant` to the copy `root` within the context; the value says whether its text was found."""
  path = root / mutant.file
  original = path.read_text() if path.is_file() else ''
  text = mutant.apply(original)
  if text is None:
    yield False
    return
  path.write_text(text)
  try:
    yield True
  finally:
    path.write_text(original)


def outcome(root: pathlib.Path, mutant: Mutant, cache: str, seconds: float) -> str:
  """Returns what became of `mutant`.

  Raises:
    RuntimeError: pytest could not run the tests, for instance because one does not exist.
  """
  with changed(root, mutant) as found:
    if not found:
      return _NOT_FOUND
    status, output = run_tests(root, [mutant.test], cache, seconds)
  if status not in (0, _TESTS_FAILED):
    raise RuntimeError(f'{mutant.name}: pytest ended with status {status}.\n{output}')
  return _KILLED if status else _SURVIVED


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the mutants; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m tests.mutation', description='Runs the mutants of tests/mutation.'
  )
  parser.add_argument(
    '--only', metavar='NAME_OR_FILE', help='only mutants whose name or file contains this'
  )
  parser.add_argument(
    '--jobs', type=int, default=1, metavar='N', help='number of mutants at a time (1)'
  )
  parser.add_argument(
    '--seconds', type=float, default=300, metavar='N', help="time limit of a mutant's test (300)"
  )
  args = parser.parse_args(arguments)
  only = args.only or ''
  mutants = [mutant for mutant in table.MUTANTS if only in mutant.name or only in mutant.file]
  if not mutants:
    parser.error(f'--only {only}: no mutant has a name or a file with this.')
  with (
    tempfile.TemporaryDirectory(prefix='mutants_') as folder,
    futures.ThreadPoolExecutor(args.jobs) as pool,
  ):
    cache = str(pathlib.Path(folder) / 'compiled')
    copies = queue.SimpleQueue()
    for number in range(args.jobs):
      copies.put(pathlib.Path(folder) / str(number))
      copy_checkout(pathlib.Path(folder) / str(number))

    def in_a_copy(fn, *rest):
      root = copies.get()
      try:
        return fn(root, *rest)
      finally:
        copies.put(root)

    tests = sorted({mutant.test for mutant in mutants})
    shares = [
      tests[number :: args.jobs] for number in range(args.jobs) if tests[number :: args.jobs]
    ]
    limit = args.seconds * len(tests)
    for status, output in pool.map(lambda share: in_a_copy(run_tests, share, cache, limit), shares):
      if status:
        print(f'Without a change the tests must pass; pytest ended with status {status}:\n{output}')
        return 2
    outcomes = collections.Counter()
    width = max(len(mutant.name) for mutant in mutants)
    results = pool.map(lambda mutant: in_a_copy(outcome, mutant, cache, args.seconds), mutants)
    for mutant, result in zip(mutants, results, strict=True):
      outcomes[result] += 1
      print(f'{mutant.name:{width}}  {result:14}  {mutant.file}', flush=True)
  print(
    f'{outcomes[_KILLED]} of {len(mutants)} mutants killed, {outcomes[_SURVIVED]} survived, text not found of '
    f'{outcomes[_NOT_FOUND]}.'
  )
  return int(outcomes[_KILLED] < len(mutants))


if __name__ == '__main__':
  sys.exit(main())
