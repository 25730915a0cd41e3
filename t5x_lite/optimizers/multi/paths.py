"""Parameters by path: how a `MultiOptimizer` takes trees apart and puts them together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import Params, PyTree


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
  """Returns the extra arguments of an update as a part sees them, for which the other parameters are constants.

  Args:
    extra_args: values by the names of `EXTRA_ARGS`.
    params: all parameters.
    leaves: their leaves by path.
    paths: the paths of the part's parameters.
  """

  def whole(part_params: Params) -> Params:
    return like(params, {**leaves, **by_path(part_params)})

  def of_part(tree: Params) -> dict[str, Any]:
    return subtree(by_path(tree), paths)

  def convert(name: str, value: Any) -> Any:
    match name:
      case 'value':
        return value
      case 'grad':
        return of_part(value)
      case 'value_fn' | 'obj_fn':
        return lambda part_params: value(whole(part_params))
      case 'grad_fn':
        return lambda part_params, number: of_part(value(whole(part_params), number))
    raise ConfigError(
        f'MultiOptimizer cannot pass {name!r} on to its parts; it knows value, grad, value_fn, obj_fn and grad_fn.')

  return {name: convert(name, value) for name, value in extra_args.items()}
