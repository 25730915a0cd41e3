"""T5X's gin files, unmodified, through the reader of our commands.

Each file of a checkout below `configs/runs`, `examples` and `contrib/moe` is bound alone, then loaded with the files
and values that its command requires, then compared with our file of the same path.
"""

from collections.abc import Callable
import contextlib
import pathlib
import subprocess
import sys
import tempfile

import gin

from t5x_lite import gin_utils
from t5x_lite.configuration import binding
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import T5xLiteError
from tests.compat import t5x_gin
from tests.t5x import known

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = ('configs/runs', 'examples', 'contrib/moe')


def _load(path: str, checkout: str) -> None:
  names = [
    name if name.startswith('models/') else f'{checkout}/t5x/{name}'
    for name in t5x_gin.companions(path)
  ]
  flag = '--gin.NUM_MODEL_PARTITIONS=1'  # or a submesh; T5X's partitioner raises without either
  flags = (
    [gin_syntax.read_flag('NUM_MODEL_PARTITIONS', '1', flag)]
    if path.startswith('contrib/moe/')
    else ()
  )
  configuration = gin_utils.load(
    t5x_gin.ENTRIES[t5x_gin.command(path)],
    gin_utils.read(names, flags, [checkout], placeholders=t5x_gin.VALUES),
  )
  if 'partitioner' in configuration.uses[0].bound:
    configuration.argument('partitioner')


def _bind(path: str, checkout: str) -> None:
  binding.Binder().resolve([gin_syntax.read_file(f'{checkout}/t5x/{path}', [checkout])])


def _problem(run: Callable[[str, str], object], path: str, checkout: str) -> str:
  """Return why a file does not load, in one line; '' if it does."""
  try:
    run(path, checkout)
  except T5xLiteError as error:
    return ' '.join(str(error).replace(f'{checkout}/', '').split())
  finally:
    gin.clear_config()
  return ''


def check(checkout: str) -> int:
  """Print the count of files that bind and load; return the number of results that differ from the lists."""
  folder = pathlib.Path(checkout) / 't5x'
  paths = sorted(
    str(path.relative_to(folder)) for top in _FOLDERS for path in (folder / top).rglob('*.gin')
  )
  problems = {}
  with tempfile.TemporaryDirectory() as neutral, contextlib.chdir(neutral):
    for word, run in (('bind', _bind), ('load', _load)):
      found = {
        f'{word} {path}': problem for path in paths if (problem := _problem(run, path, checkout))
      }
      print(
        f'{len(paths) - len(found)} of {len(paths)} gin files of T5X {word}'
        f'{" with a model and a run" if word == "load" else " alone"}.'
      )
      problems |= found
  # In a process of its own: gin keeps the names by which a process has first imported modules, and they are printed.
  compared = subprocess.run(
    [sys.executable, '-m', 'tests.compat.t5x_gin', checkout], cwd=_ROOT, check=False
  )
  reasons = known.read('gin_files.txt')
  for name, problem in problems.items():
    print(f'  {name} ({reasons.get(name, "not listed")}): {problem[:200]}')
  ids = [f'{word} {path}' for word in ('bind', 'load') for path in paths]
  return known.report(problems, ids, reasons) + compared.returncode
