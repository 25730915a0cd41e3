"""T5X's own tests of what it has in public, with t5x_lite's objects under T5X's names."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

from tests.t5x import known

_ROOT = pathlib.Path(__file__).parents[2]
# Not part of t5x_lite, see `t5x_lite.compat.names`.
_LEFT_OUT = (
  'contrib/gpu',
  'contrib/calm',
  'fiddle_configs',
  'scripts',
  'checkpoint_importer_test.py',
  'config_utils_test.py',
  'disable_gc_during_import_test.py',
  'export_lib_test.py',
  'main_test.py',
)


def check(checkout: str) -> int:
  """Run the tests, print the share that passes; return the number of tests that differ from the list of known ones."""
  folder = pathlib.Path(checkout) / 't5x'
  if not any(folder.rglob('*_test.py')):
    print('The checkout has no tests of T5X.')
    return 0
  with tempfile.TemporaryDirectory() as neutral:
    results = pathlib.Path(neutral) / 'results.xml'
    # The root and an empty configuration are outside the checkout, which has settings for its own runs.
    (pathlib.Path(neutral) / 'pytest.ini').write_text('[pytest]\n')
    command = [
      sys.executable,
      '-m',
      'pytest',
      '-q',
      '-p',
      'tests.t5x.plugin',
      '-p',
      'no:cacheprovider',
      f'--rootdir={neutral}',
      '-c',
      f'{neutral}/pytest.ini',
      '--import-mode=importlib',
      '--tb=line',
      '--override-ini=python_files=*_test.py',
      '--continue-on-collection-errors',
      f'--junitxml={results}',
      *(f'--ignore={folder / name}' for name in _LEFT_OUT),
      str(folder),
    ]
    ended = subprocess.run(
      command,
      cwd=neutral,
      env=os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
    )
    if not results.exists():
      print(ended.stdout, ended.stderr)
      return 1
    outcomes = {}
    for case in ElementTree.parse(results).iter('testcase'):
      if case.find('skipped') is None:
        problem = next(
          (
            ' '.join(child.get('message', '').split())[:200] or child.tag
            for child in case
            if child.tag in ('failure', 'error')
          ),
          '',
        )
        outcomes['.'.join(filter(None, (case.get('classname'), case.get('name'))))] = problem
  problems = {name: problem for name, problem in outcomes.items() if problem}
  reasons = known.read('own_tests.txt')
  _print_table(outcomes, folder)
  num_passed = len(outcomes) - len(problems)
  num_public = num_passed + sum(
    reasons.get(name, 'difference').startswith('difference') for name in problems
  )
  print(
    f'  {num_passed} of the {num_public} that neither use private names, mocks, messages and None axes nor the '
    f'internet ({num_passed / max(num_public, 1):.0%}).'
  )
  return known.report(problems, outcomes, reasons)


def _print_table(outcomes: dict[str, str], folder: pathlib.Path) -> None:
  """Print how many tests of each module pass; all of a module that cannot be imported fail."""
  passed, failed, closed = {}, {}, []
  for name, problem in outcomes.items():
    module = re.match(r'(.*?_test)(\.|$)', name)[1]
    if name == module:
      text = (folder / (module.replace('.', '/') + '.py')).read_text()
      failed[module] = len(re.findall(r'^  def test', text, re.MULTILINE))
      closed.append(module)
    else:
      count = failed if problem else passed
      count[module] = count.get(module, 0) + 1
  num_passed, num_failed = sum(passed.values()), sum(failed.values())
  print(
    f"{num_passed} of {num_passed + num_failed} of T5X's own tests pass "
    f'({num_passed / max(num_passed + num_failed, 1):.0%}).'
  )
  for module in sorted({*passed, *failed}):
    note = ' (cannot be imported)' if module in closed else ''
    print(f'  {module:40} {passed.get(module, 0):4} passed {failed.get(module, 0):4} failed{note}')
