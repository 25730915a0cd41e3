"""Conversion of a `MultiOptimizer` between trees and parameters by path."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import Params, PyTree


def by_path(tree: PyTree) -> dict[str, Any]:
  """Return the leaves of `tree` by their '/'-joined paths.

  Raises:
    ConfigError: two leaves have the same path.
  """
  leaves = {}
  for path, leaf in tree_utils.named_leaves(tree):
    if path in leaves:
      raise ConfigError(
        f'MultiOptimizer: two parameters have the path {path!r}. Rename one of them.'
      )
    leaves[path] = leaf
  return leaves


def subtree(leaves: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
  """Return nested plain dicts of the leaves at `paths`."""
  return tree_utils.unflatten_dict({path: leaves[path] for path in paths})


def like(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
  """Return a tree with the containers of `tree` and the leaves given by path."""
  return tree_utils.map_with_names(lambda path, _: leaves[path], tree)


def part_extra_args(
  extra_args: Mapping[str, Any], params: Params, leaves: Mapping[str, Any], paths: Sequence[str]
) -> dict[str, Any]:
  """Return the extra arguments of an update for a part; the parameters of other parts are constants in them.

  Args:
    extra_args: values by the names of `EXTRA_ARGS`.
    params: all parameters.
    leaves: all parameters by path.
    paths: paths of the part's parameters.
  """

  def all_params(part_params: Params) -> Params:
    return like(params, {**leaves, **by_path(part_params)})

  def of_part(tree: Params) -> dict[str, Any]:
    return subtree(by_path(tree), paths)

  def convert_value_fn(value_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda part_params: value_fn(all_params(part_params))

  def convert_grad_fn(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda part_params, number: of_part(grad_fn(all_params(part_params), number))

  converters = {
    'value': lambda value: value,
    'grad': of_part,
    'value_fn': convert_value_fn,
    'obj_fn': convert_value_fn,
    'grad_fn': convert_grad_fn,
  }
  return {name: converters[name](value) for name, value in extra_args.items()}
