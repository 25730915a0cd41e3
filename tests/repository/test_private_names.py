"""The names of JAX, Flax and optax without a promise of stability: docs/design.md lists all of them, and they exist.

A new release that moves or removes one fails here, with the name, before any other test.
"""

import ast
import importlib
import inspect
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_HEADING = '## 7. Private names of JAX, Flax and optax'
_LIBRARIES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax')
# Public, but their documentation promises nothing between releases; all of jaxlib except its version is private.
_UNSTABLE = ('jax.extend', 'jax.interpreters', 'jaxlib')
_STABLE = ('jaxlib.__version__',)
# Members that are reached through a variable, which a scan of the sources cannot follow.
_REACHED = (
  'jax._src.clusters.ClusterEnv.get_coordinator_address',
  'jax._src.clusters.ClusterEnv.get_local_process_id',
  'jax._src.clusters.ClusterEnv.get_process_count',
  'jax._src.clusters.ClusterEnv.get_process_id',
  'jax._src.clusters.ClusterEnv.is_env_present',
  'jax._src.clusters.ClusterEnv.opt_in_only_method',
  # A frame of this function in a traceback shows that JAX found no device.
  'jax._src.xla_bridge.backends',
)
# Name of a module, or of a module and a class, in a text.
_IN_TEXT = re.compile(rf'(?:{"|".join(_LIBRARIES)})(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*')
_IMPORT_IN_TEXT = re.compile(rf'from ((?:{"|".join(_LIBRARIES)})[\w.]*) import (\w+)')


def _is_private(name):
  parts = name.split('.')
  if parts[0] not in _LIBRARIES or name in _STABLE:
    return False
  if any(name == module or name.startswith(module + '.') for module in _UNSTABLE):
    return name != 'jaxlib'
  return any(part.startswith('_') and not part.startswith('__') for part in parts)


def _imported(tree):
  """Returns the full names of what a module imports, by the names that it gives them."""
  names = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        bound = alias.asname or alias.name.split('.')[0]
        names[bound] = alias.name if alias.asname else bound
        if _is_private(alias.name):
          names[alias.name] = alias.name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
      for alias in node.names:
        names[alias.asname or alias.name] = f'{node.module}.{alias.name}'
  return names


def _chain(node):
  """Returns the dotted name of an expression such as `a.b.c`, None for any other expression."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute):
    owner = _chain(node.value)
    return owner and f'{owner}.{node.attr}'
  return None


def _texts(tree):
  """Yields the strings of a module that are not docstrings."""
  docs = {
    id(node.value)
    for node in ast.walk(tree)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
      yield node.value


def _private_names(source):
  """Returns the longest private names that a module's source imports, reaches or has in a string."""
  tree = ast.parse(source)
  imported = _imported(tree)
  found = {name for name in imported.values() if _is_private(name)}
  for node in ast.walk(tree):
    first, _, rest = (_chain(node) or '').partition('.')
    if rest and first in imported:
      found.add(f'{imported[first]}.{rest}')
  for text in _texts(tree):
    found.update(_IN_TEXT.findall(text))
    found.update('.'.join(match) for match in _IMPORT_IN_TEXT.findall(text))
  found = {name for name in found if _is_private(name)}
  return {name for name in found if not any(longer.startswith(name + '.') for longer in found)}


def _used():
  """Returns the files that use each private name."""
  used = {}
  for top in ('t5x_lite', 'moe'):
    for path in sorted((_ROOT / top).rglob('*.py')):
      for name in _private_names(path.read_text()):
        used.setdefault(name, []).append(str(path.relative_to(_ROOT)))
  return used


def _listed():
  """Returns the names in the table of docs/design.md."""
  text = (_ROOT / 'docs/design.md').read_text()
  section = text.partition(_HEADING)[2].partition('\n## ')[0]
  rows = [line.split('|')[1] for line in section.splitlines() if line.startswith('| `')]
  return [name for cell in rows for name in re.findall(r'`([\w.]+)`', cell)]


def _resolve(name):
  """Imports the longest part of a name that is a module, and returns the object of the entire name."""
  parts = name.split('.')
  for length in range(len(parts), 0, -1):
    try:
      found = importlib.import_module('.'.join(parts[:length]))
    except ModuleNotFoundError:
      continue
    for part in parts[length:]:
      if found is None:  # Modules of JAX's plugin for CUDA are None without it.
        return None
      found = (
        inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
      )
    return found
  raise ModuleNotFoundError(name)


def test_design_page_lists_all_private_names():
  used = _used()
  listed = _listed()
  assert len(listed) == len(set(listed))
  missing = {name: files for name, files in used.items() if name not in listed}
  assert not missing, f'use a public name, or list these in docs/design.md, section 7: {missing}'
  gone = set(listed) - set(used) - set(_REACHED)
  assert not gone, f'no longer used: {gone}'
  assert set(_REACHED) <= set(listed)


@pytest.mark.parametrize('name', _listed())
def test_listed_name_exists(name):
  assert _resolve(name) is not inspect.Parameter.empty


def test_flags_probe_runs():
  from t5x_lite.command_line import platform as cli_platform

  exec(cli_platform._PROBE, {})  # pylint: disable=exec-used


@pytest.mark.parametrize(
  'source, expected',
  [
    ('from jax._src import core\ncore.jaxpr.x()', {'jax._src.core.jaxpr.x'}),
    ('import jax\njax.config._values', {'jax.config._values'}),
    ('import jax._src.core', {'jax._src.core'}),
    ('from flax import linen as nn\nnn.module._context', {'flax.linen.module._context'}),
    ('from jax.extend import mlir', {'jax.extend.mlir'}),
    ("X = {'optax._src.alias': 1}", {'optax._src.alias'}),
    ("X = 'from jaxlib import xla_client'", {'jaxlib.xla_client'}),
    ('"""See `jax._src.core`."""\nimport jax\nimport jaxlib\njaxlib.__version__', set()),
    ('import jax.numpy as jnp\nfrom jax import lax\njnp.ones(lax.x)', set()),
  ],
)
def test_scan(source, expected):
  assert _private_names(source) == expected
