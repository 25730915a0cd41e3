"""The test of a module is where its name says; other modules are run by the tests of those that import them."""

import ast
import pathlib

_ROOT = pathlib.Path(__file__).parents[2]


def _own_test(module):
  """Returns where the test of a module is by its name, relative to `tests/`."""
  path = pathlib.PurePath(module)
  folder = path.parent if path.parts[0] == 'moe' else path.parent.relative_to('t5x_lite')
  return str(folder / f'test_{path.name}')


def _imported(path):
  """Returns the names that the imports and the tables of lazy names of a file may mean, as dotted names."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.ImportFrom):
      names.add(node.module)
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
    elif isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      # Lazy imports and programs that tests start; with a dot at the end, the beginning of an f-string.
      names |= {node.value, node.value.partition(':')[0]}
  return names


def test_every_module_is_run_by_a_test():
  paths = {}
  for top in ('t5x_lite', 'moe'):
    for path in (_ROOT / top).rglob('*.py'):
      parts = path.relative_to(_ROOT).with_suffix('').parts
      paths['.'.join(parts[:-1] if path.name == '__init__.py' else parts)] = path
  used = set()
  for path in (_ROOT / 'tests').rglob('*.py'):
    used |= _imported(path)
  used |= {name.rpartition('.')[0] for name in used}  # `package.function`
  prefixes = tuple(
    name for name in used if name.startswith(('t5x_lite.', 'moe.')) and name.endswith('.')
  )
  reached = {
    name
    for name, path in paths.items()
    if name in used
    or name.startswith(prefixes)
    or (_ROOT / 'tests' / _own_test(path.relative_to(_ROOT))).exists()
  }
  new = reached
  while new:
    new = set().union(*(_imported(paths[name]) for name in new)) & paths.keys() - reached
    reached |= new
  without = sorted(paths.keys() - reached)
  assert not without, f'Write tests of these modules, or remove them: {without}'


def test_every_folder_of_tests_is_one_of_the_package():
  other = {'examples', 'golden', 'interop', 'multiprocess', 'mutation', 'repository', 't5x'}
  folders = {
    str(path.parent.relative_to(_ROOT / 'tests')) for path in (_ROOT / 'tests').rglob('test_*.py')
  }
  strange = sorted(
    folder
    for folder in folders
    if folder.split('/')[0] not in other
    and not (_ROOT / 't5x_lite' / folder).is_dir()
    and not (_ROOT / folder).is_dir()
  )
  assert not strange, f'Move these to the folder of the tested package: {strange}'
