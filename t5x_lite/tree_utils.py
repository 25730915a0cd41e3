"""Paths, sizes and maps over nested dicts and other pytrees."""

from collections.abc import Callable, Iterator, Mapping
import math
from typing import Any

import flax.core
import jax

PyTree = Any


def path_name(path: tuple[Any, ...]) -> str:
  """Return the '/'-joined name of a `jax.tree_util` key path.

  >>> import jax
  >>> [path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path({'a': {'b': 1}, 'c': [2]})[0]]
  ['a/b', 'c/0']
  """
  names = []
  for key in path:
    for attribute in ('key', 'name', 'idx'):
      if hasattr(key, attribute):
        names.append(str(getattr(key, attribute)))
        break
    else:
      names.append(str(key))
  return '/'.join(names)


def named_leaves(
  tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
  """Yield ('/'-joined path, leaf) pairs in the order in which JAX flattens `tree`."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
    yield path_name(path), leaf


def map_with_names(fn: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf=None) -> PyTree:
  """Return the result of `jax.tree.map` with the leaf's '/'-joined path as first argument of `fn`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest, is_leaf=is_leaf
  )


def flatten_dict(
  tree: Mapping[str, Any],
  keep_empty: bool = False,
  is_leaf: Callable[[str, Mapping[str, Any]], bool] = lambda name, node: False,
) -> dict[str, Any]:
  """Return nested mappings as one dict with '/'-joined keys; values that are not mappings are leaves.

  Args:
    tree: nested mappings with string keys.
    keep_empty: keep an empty mapping as a leaf `{}` instead of omitting it.
    is_leaf: whether a mapping, given with its name, is a leaf.

  >>> flatten_dict({'a': {'b': 1, 'c': {}}}, keep_empty=True)
  {'a/b': 1, 'a/c': {}}
  """
  flat = {}

  def visit(node, prefix):
    for key, value in node.items():
      name = f'{prefix}/{key}' if prefix else str(key)
      if isinstance(value, Mapping) and not is_leaf(name, value):
        if value:
          visit(value, name)
        elif keep_empty:
          flat[name] = {}
      else:
        flat[name] = value

  visit(tree, '')
  return flat


def unflatten_dict(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Return nested dicts; inverse of `flatten_dict`.

  >>> unflatten_dict({'a/b': 1, 'a/c': 2})
  {'a': {'b': 1, 'c': 2}}
  """
  tree: dict[str, Any] = {}
  for name, value in flat.items():
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = value
  return tree


def prune_empty(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Return nested mappings as dicts without empty mappings, and without those that this makes empty.

  >>> prune_empty({'a': {'b': {}, 'c': {'d': {}}}, 'e': {'f': 0, 'g': {}}})
  {'e': {'f': 0}}
  """
  pruned = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      value = prune_empty(value)
      if not value:
        continue
    pruned[key] = value
  return pruned


def to_dict(tree: PyTree) -> PyTree:
  """Return `tree` with every `FrozenDict` replaced by a plain dict; other nodes are kept."""
  if isinstance(tree, flax.core.FrozenDict):
    return flax.core.unfreeze(tree)
  return tree


def shapes(tree: PyTree) -> PyTree:
  """Return `tree` with a `jax.ShapeDtypeStruct` for each array."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def shapes_key(batch: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
  """Return name, shape and dtype of the arrays of `batch`, or of their shapes, which identify a compiled program."""
  facts = [(name, leaf.shape, str(leaf.dtype)) for name, leaf in batch.items()]
  return tuple(sorted(facts))


def num_elements(tree: PyTree) -> int:
  """Return the number of array elements in `tree` (arrays or `jax.ShapeDtypeStruct`s)."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
  """Return the size in bytes of the arrays of `tree`: all shards, without replicas."""
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def flatten_dict_string_keys(x: Mapping[str, Any]) -> dict[str, Any]:
  """Return the leaves of nested dicts by '/'-joined keys: `flatten_dict` by T5X's name.

  >>> flatten_dict_string_keys({'a': {'b': 1}, 'c': 2})
  {'a/b': 1, 'c': 2}
  """
  return flatten_dict(x)
