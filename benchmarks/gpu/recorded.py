"""Part 'recorded': the repository's tests that compare with recorded numbers and need one device, on the GPU.

The numbers were recorded on CPUs. So the result of a file of tests is its number of failures and their names, which
need a reader, and does not decide whether the kit succeeds.
"""

from collections.abc import Iterator
import functools
import importlib.util
import os
import re
import subprocess
import sys
import threading

from benchmarks.gpu import items

_FILES = {
  'real': (
    'tests/moe/dispatch/test_golden.py',
    'tests/moe/routing/test_golden.py',
    'tests/models/test_golden.py',
    'tests/decoding/test_golden.py',
    'tests/optimizers/adafactor_rule/test_update.py',
    'tests/optimizers/shampoo/test_roots.py',
    'tests/test_losses.py',
    'tests/networks/test_t5.py',
  ),
  'tiny': ('tests/test_schedules.py',),
}
# Needs several devices.
_DESELECTED = 'tests/test_losses.py::test_vocabulary_sharded_logits_are_not_gathered'
# Seconds of a file.
_LIMIT = 25.0
_OUTCOME = re.compile(r'^(\S+::.*?) (PASSED|FAILED|ERROR)\b')


def _command(file: str) -> list[str]:
  options = ('-v', '-p', 'no:cacheprovider', '--durations=0', '--tb=no', '-W', 'default')
  return [sys.executable, '-m', 'pytest', *options, '--deselect', _DESELECTED, file]


def _environment() -> dict[str, str]:
  """Return an environment in which the tests use JAX_PLATFORMS, which the kit sets, with products in full precision."""
  return {
    **os.environ,
    'JAX_DEFAULT_MATMUL_PRECISION': 'highest',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': 'false',
    # The installation of JAX may have plugins of pytest next to it.
    'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1',
  }


def _measure(file: str, limit: float) -> Iterator[items.Row]:
  row: items.Row = {'tests': file}
  if importlib.util.find_spec('pytest') is None:
    yield {**row, 'note': 'pytest is not installed'}
    return
  outcomes: dict[str, list[str]] = {'PASSED': [], 'FAILED': [], 'ERROR': []}
  lines = []
  process = subprocess.Popen(
    _command(file),
    env=_environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors='replace',
  )
  timer = threading.Timer(limit, process.kill)
  timer.start()
  with process:
    for line in process.stdout:
      lines.append(line.strip())
      found = _OUTCOME.match(line)
      if found:
        outcomes[found[2]].append(found[1].partition('::')[2])
  timer.cancel()
  failed = outcomes['FAILED'] + outcomes['ERROR']
  row['passed'] = len(outcomes['PASSED'])
  row['failed'] = len(failed)
  row['names of the failed'] = ', '.join(failed)
  if process.returncode < 0:
    row['note'] = f'ended by signal {-process.returncode} before the last test; limit {limit:.0f} s'
  elif not outcomes['PASSED'] and not failed:
    row['note'] = ' | '.join(lines[-2:])[:300]
  yield row


def make_items(sizes: str) -> list[items.Item]:
  """Return an item for each file of tests."""
  limit = {'real': _LIMIT, 'tiny': 20 * _LIMIT}[sizes]
  return [
    items.Item(
      name=file,
      measure=functools.partial(_measure, file, limit),
      programs=dict,
    )
    for file in _FILES[sizes]
  ]
