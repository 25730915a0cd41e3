"""Parameters by path: how a `MultiOptimizer` takes trees apart and puts them together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import Params, PyTree

# Extra arguments that are functions of all parameters, and those that are trees like them.
_PARAM_FNS = ('value_fn', 'obj_fn')
_PARAM_TREES = ('grad',)


def by_path(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of `tree` by their '/'-joined paths.

  Raises:
    ConfigError: two leaves of one path.
  """
  leaves = {}
  for path, leaf in tree_utils.named_leaves(tree):
    if path in leaves:
      raise ConfigError(f'MultiOptimizer: there are two parameters of the path {path!r}; rename one.')
    leaves[path] = leaf
  return leaves


def subtree(leaves: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
  """Returns nested plain dicts of the leaves at `paths`."""
  return tree_utils.unflatten_dict({path: leaves[path] for path in paths})


def like(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
  """Returns a tree with the containers of `tree` and the leaves given by path."""
  return tree_utils.map_with_names(lambda path, _: leaves[path], tree)


def part_extra_args(
    extra_args: Mapping[str, Any], params: Params, leaves: Mapping[str, Any],
    paths: Sequence[str]) -> dict[str, Any]:
  """Returns the extra arguments as a part sees them, for which the other parameters are constants."""

  def as_fn_of_part(fn: Callable[[Params], Any]) -> Callable[[Params], Any]:
    return lambda part_params: fn(like(params, {**leaves, **by_path(part_params)}))

  part_args = {}
  for name, value in extra_args.items():
    if name in _PARAM_FNS:
      value = as_fn_of_part(value)
    elif name in _PARAM_TREES:
      value = subtree(by_path(value), paths)
    part_args[name] = value
  return part_args
