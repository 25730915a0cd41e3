"""Trees of any containers that JAX knows as nested plain dicts of arrays, and back.

Flax converts dicts, lists, tuples, named tuples and the classes registered with it. The other containers (an
`OrderedDict`, a dataclass registered with JAX only) it takes for arrays, so they are converted here. A state dict has no
empty nodes, since storage formats disagree about them. Its names are joined by '/' in checkpoints and by '.' in
TensorStore, so keys that would be ambiguous there are quoted.
"""

from collections.abc import Iterable, Mapping
import re
from typing import Any

import flax.serialization
import jax

from t5x_lite.errors import CheckpointError, ConfigError, did_you_mean
from t5x_lite.types import PyTree

# What each entry of a train state's state dict holds, and what it depends on.
_SECTIONS = {'target': ('parameters', 'model'), 'state': ('optimizer', 'optimizer'),
             'flax_mutables': ('mutable collections', 'model'), 'param_average': ('average of the parameters', 'model')}


def to_state_dict(tree: PyTree) -> Any:
  """Returns a tree as nested plain dicts without empty nodes.

  Args:
    tree: any pytree; what stands at its leaves is kept as it is.

  Returns:
    Nested dicts with string keys; a leaf for a tree that is one, and None or {} for a tree without leaves. Keys that
    contain '/' or '%', the keys '', '.' and '..', and a key 'a.b' next to a key 'a' are quoted as in URLs.

  Raises:
    ConfigError: two keys of one container have the same string.
  """
  node = flax.serialization.to_state_dict(tree)
  if not _is_container(node):
    return node
  children = node if type(node) is dict else _children(node)[0]
  named = {name: to_state_dict(children[key]) for key, name in _names(children).items()}
  return {name: child for name, child in named.items() if child is not None and (type(child) is not dict or child)}


def restore_from_state_dict(template: PyTree, state_dict: Mapping[str, Any], key: str) -> PyTree:
  """Restores one entry of a state dict that `to_state_dict` made.

  Args:
    template: a tree of the structure to be restored.
    state_dict: nested dicts.
    key: the entry of `state_dict` to restore from.

  Returns:
    A tree like `template` with the values of `state_dict[key]`.

  Raises:
    CheckpointError: a value that is missing or that the template has no place for.
  """
  return _restored(template, state_dict.get(key, {}), key)


def _restored(template: PyTree, given: Any, path: str) -> PyTree:
  # Flax passes on what it does not know: the containers that `_completed` has restored.
  return flax.serialization.from_state_dict(
      template, _completed(flax.serialization.to_state_dict(template), given, path))


def _completed(template: Any, given: Any, path: str) -> Any:
  """Returns `given` with the keys and empty nodes of `template`, as Flax expects it.

  Containers that Flax does not know are restored.

  Args:
    template: what Flax makes of the template, or of a part of it.
    given: the part of the state dict for it.
    path: '/'-joined path of that part.
  """
  if not _is_container(template):
    return given
  section, owner = _SECTIONS.get(path.partition('/')[0], ('state', 'model'))
  remedy = f'Was it saved with another {owner}?'
  is_known = type(template) is dict
  children, treedef = (template, None) if is_known else _children(template)
  names = _names(children)
  if not isinstance(given, Mapping):
    raise CheckpointError(f'Cannot restore the {section}: {path!r} is a single value, expected the entries '
                          f'{sorted(names.values())}. {remedy}')
  for name in given:
    if name not in names.values():
      raise CheckpointError(f'Cannot restore the {section}: nothing takes the value at {path}/{name}.'
                            f'{did_you_mean(name, list(names.values()))} {remedy}')
  complete = {}
  for key, name in names.items():
    child = children[key]
    if name in given:
      complete[key] = (_completed if is_known else _restored)(child, given[name], f'{path}/{name}')
    elif not jax.tree.leaves(child):
      complete[key] = child
    else:
      raise CheckpointError(f'Cannot restore the {section}: the value at {_first_path(child, f"{path}/{name}")} is '
                            f'missing.{did_you_mean(name, list(given))} {remedy}')
  return complete if is_known else treedef.unflatten(complete.values())


def _is_container(node: Any) -> bool:
  return node is not None and not jax.tree_util.all_leaves([node])


def _children(node: Any) -> tuple[dict[str, Any], jax.tree_util.PyTreeDef]:
  """Returns the children of a pytree node by name, and what makes a node of new ones in the same order."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
  names = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in flat]
  if len(set(names)) != len(names):
    raise ConfigError(f'A {type(node).__name__} in the train state has keys that are the same as strings: {names}. '
                      'Rename one of them, or it cannot be saved.')
  return {name: child for name, (_, child) in zip(names, flat, strict=True)}, treedef


def _names(keys: Iterable[str]) -> dict[str, str]:
  """Returns, by key of a container, the name that is unambiguous in a '/'-joined and in a '.'-joined path."""
  keys = tuple(keys)
  names = {}
  for key in keys:
    name = re.sub('[%/]', lambda match: f'%{ord(match[0]):02X}', key)
    prefixes = [key[:match.start()] for match in re.finditer(r'\.', key)]
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
