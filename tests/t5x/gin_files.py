"""T5X's gin files, unmodified, through the reader of our commands.

Each file of a checkout below `configs/runs`, `examples` and `contrib/moe` is bound alone, then loaded with the files
and values that its command requires, then compared with our file of the same path.
"""

from collections.abc import Callable
import os
import pathlib
import tempfile

import gin

from t5x_lite import gin_utils
from t5x_lite.configuration import binding
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import T5xLiteError
from tests.compat import t5x_gin
from tests.t5x import known

_FOLDERS = ('configs/runs', 'examples', 'contrib/moe')


def _load(path: str, checkout: str) -> None:
  names = [name if name.startswith('models/') else f'{checkout}/t5x/{name}' for name in t5x_gin.companions(path)]
  entry = t5x_gin.ENTRIES[t5x_gin.command(path)]
  if path.endswith('precompile.gin'):
    entry = 't5x_lite.apps.precompile.precompile'
  gin_utils.load(entry, gin_utils.read(names, (), [checkout], placeholders=t5x_gin.VALUES))


def _bind(path: str, checkout: str) -> None:
  binding.Binder().bind([gin_syntax.read_file(f'{checkout}/t5x/{path}', [checkout])])


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
  """Print the count of files that bind and load; return the number of files that differ from the list of known ones."""
  folder = pathlib.Path(checkout) / 't5x'
  paths = sorted(str(path.relative_to(folder)) for top in _FOLDERS for path in (folder / top).rglob('*.gin'))
  unexpected = 0
  with tempfile.TemporaryDirectory() as neutral:
    os.chdir(neutral)
    for title, run in (('bind', _bind), ('load with a model and a run', _load)):
      problems = {path: problem for path in paths if (problem := _problem(run, path, checkout))}
      print(f'{len(paths) - len(problems)} of {len(paths)} gin files of T5X {title}.')
      unexpected += known.report(problems, paths, known.read('gin_files.txt'))
  return unexpected
