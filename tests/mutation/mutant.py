"""One small change of the code that a test must notice. Imports neither JAX nor the package."""

import ast
import dataclasses
import functools
import pathlib


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A change of one place in one file.

  Attributes:
    name: unique name.
    file: path of the changed file, relative to the repository.
    old: text that occurs once in the file.
    new: text that replaces it.
    test: node id of pytest, `path::test` or `path::test[case]`, of a test that must fail.
  """

  name: str
  file: str
  old: str
  new: str
  test: str

  def apply(self, text: str) -> str | None:
    """Returns the text of the file after the change; None if `old` does not occur exactly once."""
    return text.replace(self.old, self.new) if text.count(self.old) == 1 else None

  def problems(self, root: pathlib.Path) -> list[str]:
    """Return the errors of this entry in the checkout `root`, as texts, without running code."""
    path, found = root / self.file, []
    if not path.is_file():
      return [f'{self.file} does not exist']
    changed = self.apply(path.read_text())
    if changed is None:
      return [f'`old` occurs {path.read_text().count(self.old)} times in {self.file}']
    try:
      if path.suffix == '.py' and ast.dump(ast.parse(changed)) == _dump(path):
        found.append('the change has no effect')
    except SyntaxError as error:
      found.append(f'{self.file} does not compile after the change: {error}')
    test_path, _, function = self.test.partition('::')
    if not (root / test_path).is_file() or function.partition('[')[0] not in _functions(
      root / test_path
    ):
      found.append(f'{self.test} does not exist')
    return found


@functools.cache
def _dump(path: pathlib.Path) -> str:
  return ast.dump(ast.parse(path.read_text(encoding='utf-8')))


@functools.cache
def _functions(path: pathlib.Path) -> frozenset[str]:
  """Returns the names of the functions that a file defines at its top."""
  return frozenset(
    node.name
    for node in ast.parse(path.read_text(encoding='utf-8')).body
    if isinstance(node, ast.FunctionDef)
  )
