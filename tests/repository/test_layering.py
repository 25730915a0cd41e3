"""The layers of docs/design.md, held by walking every import of the sources."""

import ast
import functools
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


def _layers() -> dict[str, int]:
  """Returns the layer of each module or package of the list in section 1 of docs/design.md; its files inherit it."""
  text = (_ROOT / 'docs/design.md').read_text(encoding='utf-8')
  section = text.partition('## 1. Layers')[2].partition('\n## ')[0]
  layers, layer = {}, None
  for word in section.split('```')[1].split():
    if word.isdigit():
      layer = int(word)
      continue
    is_full = word.split('.')[0] in ('moe', 'scripts')
    layers[word if is_full else f't5x_lite.{word}'] = layer
  return layers


_LAYERS = _layers()
# Modules of one layer that may import each other, and why.
_SAME_LAYER = {
  ('t5x_lite.adafactor', 't5x_lite.optimizers'),  # T5X's module of that name, re-exported
  ('t5x_lite.errors', 't5x_lite.types'),
}
# Third parties, and the modules that may import them.
_IMPORTERS = {
  # apps.export.saved_model writes SavedModels, which only TensorFlow can; it is imported when one is asked for.
  'tensorflow': ('t5x_lite.data.seqio.', 't5x_lite.apps.export.saved_model'),
  'tensorflow_datasets': ('t5x_lite.data.seqio.',),
  'seqio': ('t5x_lite.data.seqio.',),
  't5': ('t5x_lite.data.seqio.',),
  'tensorflow_text': ('t5x_lite.data.seqio.',),
  'grain': ('t5x_lite.data.files.grain_records', 't5x_lite.data.sources.grain_source'),
  'orbax': ('t5x_lite.checkpoints',),
  'gin': ('t5x_lite.configuration', 't5x_lite.gin_utils', 't5x_lite.compat'),
}


def _sources() -> dict[str, pathlib.Path]:
  found = {}
  for top in ('t5x_lite', 'moe', 'scripts'):
    for path in sorted((_ROOT / top).rglob('*.py')):
      parts = path.relative_to(_ROOT).with_suffix('').parts
      found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
  return found


_SOURCES = _sources()


def _entry_of(module: str) -> str | None:
  """Returns the entry of _LAYERS that `module` belongs to; None for the bare top package."""
  parts = module.split('.')
  for length in range(len(parts), 0, -1):
    name = '.'.join(parts[:length])
    if name in _LAYERS:
      return name
  return None


@functools.cache
def _imports(module: str, path: pathlib.Path) -> list[tuple[str, int]]:
  """Returns (imported module, line) of every import statement of a file, those inside functions included."""
  package = module if path.name == '__init__.py' else module.rpartition('.')[0]
  found = []
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found += [(alias.name, node.lineno) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        parents = package.split('.')[: len(package.split('.')) - node.level + 1]
        base = '.'.join([*parents, *([base] if base else [])])
      for alias in node.names:
        # `from t5x_lite import models` imports the submodule; `from t5x_lite.errors import X` does not.
        submodule = f'{base}.{alias.name}'
        found.append((submodule if submodule in _SOURCES else base, node.lineno))
  return found


@pytest.mark.parametrize('module', [m for m in _SOURCES if _entry_of(m)])
def test_imports_point_downwards(module):
  entry = _entry_of(module)
  for imported, line in _imports(module, _SOURCES[module]):
    if imported.split('.')[0] not in ('t5x_lite', 'moe', 'scripts'):
      continue
    target = _entry_of(imported)
    if target is None or target == entry or (entry, target) in _SAME_LAYER:
      continue
    # Layer 0 and single modules of one layer may build on each other; packages may not (docs/design.md, section 1).
    allowed = _LAYERS[target] < _LAYERS[entry] or (_LAYERS[target] == 0 == _LAYERS[entry])
    if _LAYERS[target] == _LAYERS[entry] and not (_is_package(entry) and _is_package(target)):
      allowed = True
    assert allowed, (
      f'{module}:{line} (layer {_LAYERS[entry]}) imports {imported} (layer {_LAYERS[target]})'
    )


def _is_package(entry: str) -> bool:
  return (_ROOT / entry.replace('.', '/')).is_dir()


def test_core_never_imports_moe():
  for module, path in _SOURCES.items():
    if module.startswith('t5x_lite'):
      for imported, line in _imports(module, path):
        assert imported.split('.')[0] != 'moe', f'{module}:{line} imports {imported}'


@pytest.mark.parametrize('third_party', sorted(_IMPORTERS))
def test_third_parties_are_imported_only_by_their_modules(third_party):
  for module, path in _SOURCES.items():
    for imported, line in _imports(module, path):
      if imported.split('.')[0] == third_party:
        assert module.startswith(_IMPORTERS[third_party]), f'{module}:{line} imports {imported}'


def test_every_module_has_a_layer():
  without = [m for m in _SOURCES if m not in ('t5x_lite', 'scripts') and _entry_of(m) is None]
  assert not without, f'give these a layer in docs/design.md: {without}'


def _graph() -> dict[str, list[str]]:
  """Returns the modules of ours that each module imports."""
  return {
    module: sorted(
      {name for name, _ in _imports(module, path) if name in _SOURCES and name != module}
    )
    for module, path in _SOURCES.items()
  }


def test_no_import_cycles():
  """Depth-first search over all imports: one inside a function hides a cycle, but does not remove it."""
  graph = _graph()

  done, path_now = set(), []

  def visit(module):
    if module in path_now:
      cycle = ' -> '.join([*path_now[path_now.index(module) :], module])
      raise AssertionError(f'import cycle: {cycle}')
    if module in done:
      return
    path_now.append(module)
    for name in graph[module]:
      # A package's files may import siblings while its `__init__` imports them: that is not a step of the cycle.
      if not module.startswith(name + '.'):
        visit(name)
    path_now.pop()
    done.add(module)

  for module in graph:
    visit(module)


def test_a_folder_has_at_most_eight_levels():
  """A module is one level above the highest module of its folder that it imports."""
  graph = _graph()

  @functools.cache
  def level(module):
    folder = _SOURCES[module].parent
    below = [name for name in graph[module] if _SOURCES[name].parent == folder]
    return 1 + max(map(level, below), default=0)

  high = {module: level(module) for module in _SOURCES if level(module) > 8}
  assert not high, f'divide the folders of these modules: {high}'


def test_gin_folder_is_not_a_package():
  # With an __init__.py the folder would hide gin-config for everything that runs from the checkout.
  assert not list((_ROOT / 'gin').rglob('__init__.py'))
