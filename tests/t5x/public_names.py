"""T5X's public names against the table of `t5x_lite.compat.names`."""

import ast
from collections.abc import Iterable, Iterator, Sequence
import pathlib
import sys

from t5x_lite.checkpoints import config
from t5x_lite.compat import forks
from t5x_lite.compat import names
from t5x_lite.compat import views


def check(checkout: str) -> int:
  """Print how many public names of T5X's modules are here; return the number that the table does not explain.

  Args:
    checkout: folder with a checkout of T5X, which is not imported.
  """
  folder = pathlib.Path(checkout)
  modules = {}
  for path in sorted((folder / 't5x').rglob('*.py')):
    if not path.name.endswith('_test.py') and path.name != '__init__.py':
      modules['.'.join(path.relative_to(folder).with_suffix('').parts)] = path
  here, left_out, wrong = [], [], []
  for module, path in modules.items():
    if module not in names.MODULES:
      if 'no equivalent' not in names.why_no_module(module):
        wrong.append(f'{module} is a module of T5X, and not in the table')
      continue
    for name in dict.fromkeys(_defined(ast.parse(path.read_text()).body)):
      if names.sentence(module, name):
        left_out.append(name)
      elif views.find(module, name):
        here.append(name)
      else:
        wrong.append(f'{module}.{name} is neither here nor in the table')
    if module == 't5x.checkpoints':
      listed = {*config.CALLED, *config.NOT_CALLED}
      for method in sorted(listed ^ {*_methods_of_checkpointers(ast.parse(path.read_text()))}):
        wrong.append(
          f'{method} is only in checkpoints.config, or only in T5X: a method that a class overrides'
        )
  wrong += [
    f'{module} is in the table, and not a module of T5X'
    for module in names.MODULES
    if module not in modules
  ]
  wrong += _taken_for_a_fork(checkout, modules)
  print(
    f"{len(here)} of {len(here) + len(left_out) + len(wrong)} public names of T5X's modules are here, {len(left_out)} "
    'have a sentence with the alternative.',
    *wrong,
    sep='\n  ',
  )
  return len(wrong)


def _taken_for_a_fork(checkout: str, modules: Iterable[str]) -> list[str]:
  """Return what of T5X itself, as `t5x` of the current folder, counts as a project's: nothing but its tests."""
  finder = forks.LastFolder(checkout)
  sys.meta_path.append(finder)
  try:
    names_of_project = views.names_of_forks()
    wrong = [f'{each} counts as a module of a fork' for each in modules if forks.has_module(each)]
  finally:
    sys.meta_path.remove(finder)
  return [*filter(None, [names_of_project]), *wrong]


def _methods_of_checkpointers(module: ast.Module) -> Iterator[str]:
  for each in module.body:
    if isinstance(each, ast.ClassDef) and each.name in ('Checkpointer', 'SaveBestCheckpointer'):
      yield from (node.name for node in each.body if isinstance(node, ast.FunctionDef))


def _is_set(node: ast.Name) -> bool:
  return isinstance(node.ctx, ast.Store)


def _defined(body: Sequence[ast.stmt]) -> Iterator[str]:
  """Yield the public names that the statements of a module define, without those of its program and of imports."""
  for statement in body:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
      found = [statement.name]
    elif isinstance(statement, ast.Assign):
      nodes = [node for target in statement.targets for node in ast.walk(target)]
      found = [node.id for node in nodes if isinstance(node, ast.Name) and _is_set(node)]
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
      found = [statement.target.id]
    elif isinstance(statement, ast.If) and '__name__' not in ast.unparse(statement.test):
      found = [*_defined(statement.body), *_defined(statement.orelse)]
    else:
      found = []
    yield from (name for name in found if not name.startswith('_'))
