"""Conversion between pytrees and nested plain dicts of arrays.

Flax converts dicts, lists, tuples, named tuples and the classes registered with it. It treats other containers (an
`OrderedDict`, a dataclass registered with JAX only) as arrays, so they are converted here. A state dict has no
empty nodes, since storage formats disagree about them. Its names are joined by '/' in checkpoints and by '.' in
TensorStore, so keys that would be ambiguous there are quoted.
"""

from collections.abc import Iterable, Mapping
import re
from typing import Any

import flax.serialization
import jax

from t5x_lite.errors import CheckpointError, ConfigError, did_you_mean
from t5x_lite.types import PyTree, PyTreeDef

# Contents of each entry of a train state's state dict, and the configuration that determines its structure.
_SECTIONS = {
  'target': ('parameters', 'model'),
  'state': ('optimizer', 'optimizer'),
  'flax_mutables': ('mutable collections', 'model'),
  'param_average': ('average of the parameters', 'model'),
}


def to_state_dict(tree: PyTree) -> Any:
  """Return a tree as nested plain dicts without empty nodes.

  Args:
    tree: any pytree; its leaves are kept unchanged.

  Returns:
    Nested dicts with string keys; the leaf if `tree` is a leaf, and None or {} for a tree without leaves. Keys that
    contain '/' or '%', the keys '', '.' and '..', and a key 'a.b' next to a key 'a' are quoted as in URLs.

  Raises:
    ConfigError: two keys of one container have the same string.
  """
  node = flax.serialization.to_state_dict(tree)
  if not _is_container(node):
    return node
  children = node if type(node) is dict else _children(node)[0]
  named = {name: to_state_dict(children[key]) for key, name in _names(children).items()}
  return {
    name: child
    for name, child in named.items()
    if child is not None and (type(child) is not dict or child)
  }


def restore_from_state_dict(template: PyTree, state_dict: Mapping[str, Any], key: str) -> PyTree:
  """Restore one entry of a state dict that `to_state_dict` made.

  Args:
    template: tree of the structure to restore.
    state_dict: nested dicts.
    key: the entry of `state_dict` to restore from.

  Returns:
    A tree like `template` with the values of `state_dict[key]`.

  Raises:
    CheckpointError: a value is missing, or is not in the template.
  """
  return _restored(template, state_dict.get(key, {}), key)


def _restored(template: PyTree, given: Any, path: str) -> PyTree:
  # Flax passes on unknown containers, which `_completed` has restored.
  complete = _completed(flax.serialization.to_state_dict(template), given, path)
  return flax.serialization.from_state_dict(template, complete)


def _completed(template: Any, given: Any, path: str) -> Any:
  """Return `given` with the keys and empty nodes of `template`, as Flax expects it.

  Containers that Flax does not know are restored.

  Args:
    template: Flax's state dict of the template, or a part of it.
    given: the same part of the state dict.
    path: '/'-joined path of the part.
  """
  if not _is_container(template):
    return given
  restore = _completed
  children = template
  treedef = None
  if type(template) is not dict:
    restore = _restored
    children, treedef = _children(template)
  names = _names(children)
  complete = {}
  problem = ''
  if not isinstance(given, Mapping):
    problem = f'{path!r} must have the entries {sorted(names.values())}, got a single value.'
  elif unknown := [name for name in given if name not in names.values()]:
    problem = (
      f'unknown value at {path}/{unknown[0]}.{did_you_mean(unknown[0], list(names.values()))}'
    )
  else:
    for key, name in names.items():
      if name not in given and jax.tree.leaves(children[key]):
        missing = _first_path(children[key], f'{path}/{name}')
        problem = f'the value at {missing} is missing.{did_you_mean(name, list(given))}'
        break
  if problem:
    section, owner = _SECTIONS.get(path.partition('/')[0], ('state', 'model'))
    raise CheckpointError(
      f'Cannot restore the {section}: {problem} Was it saved with another {owner}?'
    )
  for key, name in names.items():
    child = children[key]
    if name in given:
      complete[key] = restore(child, given[name], f'{path}/{name}')
    else:
      complete[key] = child
  if treedef is None:
    return complete
  return treedef.unflatten(complete.values())


def _is_container(node: Any) -> bool:
  return node is not None and not jax.tree_util.all_leaves([node])


def _children(node: Any) -> tuple[dict[str, Any], PyTreeDef]:
  """Return the children of a pytree node by name, and the tree definition to rebuild the node."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(
    node, is_leaf=lambda child: child is not node
  )
  names = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in flat]
  if len(set(names)) != len(names):
    raise ConfigError(
      f'A {type(node).__name__} in the train state has keys that are equal as strings: {names}. '
      'Rename one of them.'
    )
  return {name: child for name, (_, child) in zip(names, flat, strict=True)}, treedef


def _names(keys: Iterable[str]) -> dict[str, str]:
  """Return, by key of a container, the name that is unambiguous in a '/'-joined and in a '.'-joined path."""
  keys = tuple(keys)
  names = {}
  for key in keys:
    name = re.sub('[%/]', lambda match: f'%{ord(match[0]):02X}', key)
    prefixes = [key[: match.start()] for match in re.finditer(r'\.', key)]
    if key in ('.', '..') or not set(prefixes).isdisjoint(keys):
      name = name.replace('.', '%2E')
    names[key] = name or '%00'
  return names


def _first_path(tree: PyTree, path: str) -> str:
  node = to_state_dict(tree)
  while isinstance(node, Mapping):
    name, node = next(iter(node.items()))
    path = f'{path}/{name}'
  return path
