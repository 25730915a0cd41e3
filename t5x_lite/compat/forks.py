"""Modules of a fork of T5X: the folder `t5x` of the current folder has files of the project next to those of T5X.

Modules that T5X does not have are imported from there, with our names inside them, as `t5x.NAME` or as `NAME`: with
`python3 t5x/train.py` Python looks for modules in this folder too. Other files are only read.
"""

import ast
from collections.abc import Iterator, Sequence
import functools
import importlib.machinery
import pathlib
import sys
from typing import Any

from t5x_lite.compat import names


class LastFolder:
  """Finder of modules in a folder, after all others: it hides no package, also not one that is installed editable.

  Attributes:
    folder: the folder.
    is_used: False to find nothing.
  """

  def __init__(self, folder: str):
    self.folder = folder
    self.is_used = True

  def find_spec(
    self, name: str, path: Sequence[str] | None = None, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Return the specification of a module or package in the folder, for Python's import."""
    del target
    if not self.is_used:
      return None
    if path is None:
      paths = [self.folder]
      if not names.has_module(f't5x.{name}'):
        paths.append(str(pathlib.Path(self.folder, 't5x')))
      return importlib.machinery.PathFinder.find_spec(name, paths)
    if not path and names.is_t5x(name) and not names.has_module(name):  # the path of a view
      parent = pathlib.Path(self.folder, *name.split('.')[:-1])
      return importlib.machinery.PathFinder.find_spec(name, [str(parent)])
    return None


def finders() -> list[LastFolder]:
  """Return the finders of this process, also unused ones."""
  return [finder for finder in sys.meta_path if isinstance(finder, LastFolder)]


def folders() -> list[str]:
  """Return the folders in which modules are found after all others."""
  return [finder.folder for finder in finders() if finder.is_used]


def has_module(module: str) -> bool:
  """Return True if the folder of a finder has a module `t5x.NAME` that T5X does not have, without importing it.

  Folders of unused finders count too: the error then names `--allowed_modules`, not a missing module.
  """
  if not module.startswith('t5x.') or names.has_module(module):
    return False
  return any(_file(finder.folder, module) is not None for finder in finders())


def definitions(module: str) -> dict[pathlib.Path, list[str]]:
  """Return the public functions and classes that files of a module of T5X define, by file, without running them."""
  found = {}
  for folder in folders():
    path = _file(folder, module)
    if path is not None and path.suffix == '.py':
      found[path.relative_to(folder)] = [*_defined_in(path)]
  return found


def modules() -> Iterator[str]:
  """Yield the modules of T5X of which the folders have a file."""
  for module in names.MODULES:
    if definitions(module):
      yield module


def _file(folder: str, module: str) -> pathlib.Path | None:
  """Return the file of a module, or the folder of a package, below a folder."""
  path = pathlib.Path(folder, *module.split('.'))
  for each in (path.with_suffix('.py'), path / '__init__.py', path):
    if each.is_file() or each == path and each.is_dir():
      return each
  return None


@functools.cache
def _defined_in(path: pathlib.Path) -> tuple[str, ...]:
  try:
    statements = ast.parse(path.read_bytes()).body
  except (OSError, SyntaxError, ValueError):
    return ()
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  defined = dict.fromkeys(each.name for each in statements if isinstance(each, kinds))
  return tuple(name for name in defined if not name.startswith('_'))
