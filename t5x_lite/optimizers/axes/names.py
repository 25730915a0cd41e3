"""Logical axes of parameter-like trees: matching them to arrays and checking them.

Every optimizer derives the axes of its state from the axes of the parameters; what all of them need for it is here.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.types import LogicalAxes, PyTree


def _is_axes_leaf(node: Any) -> bool:
  return node is None or isinstance(node, PartitionSpec)


def unnamed_axes(array: Any) -> PartitionSpec:
  """Returns the spec of an array whose dims have no logical axes: one None per dim, `PartitionSpec()` for a scalar.

  Args:
    array: anything with a rank: an array, a tracer, a `jax.ShapeDtypeStruct` or a Python number.

  >>> import numpy as np
  >>> tuple(unnamed_axes(np.zeros([2, 3])))
  (None, None)
  """
  return PartitionSpec(*(None,) * np.ndim(array))


def match_logical_axes(arrays: PyTree, logical_axes: LogicalAxes, what: str = 'parameter') -> LogicalAxes:
  """Lays logical axes out in the structure of the arrays that they belong to.

  Containers may be of different types on the two sides (plain and frozen dicts); the names along the paths decide.

  Args:
    arrays: tree of arrays or `jax.ShapeDtypeStruct`s.
    logical_axes: tree with a `PartitionSpec` of logical names, or None for "no named dim", at the path of every array.
    what: what the arrays are, for error messages.

  Returns:
    A tree with exactly the structure of `arrays`; every leaf is a `PartitionSpec` with one entry per dim.

  Raises:
    ConfigError: an array without axes, axes without an array, or a number of names other than the array's rank.
  """
  specs = dict(tree_utils.named_leaves(logical_axes, is_leaf=_is_axes_leaf))

  def pick(name: str, array: Any) -> PartitionSpec:
    if name not in specs:
      raise ConfigError(
          f'The {what} {name!r} has no logical axes.{did_you_mean(name, specs)} Give every {what} its axes, for '
          'instance with flax.linen.partitioning.param_with_axes.')
    spec = specs.pop(name)
    if spec is None:
      return unnamed_axes(array)
    if len(spec) != np.ndim(array):
      raise ConfigError(
          f'The {what} {name!r} has rank {np.ndim(array)} (shape {tuple(np.shape(array))}) but {len(spec)} logical '
          f'axes {tuple(spec)}; give one name, or None, per dim.')
    return spec

  matched = tree_utils.map_with_names(pick, arrays)
  specs = {name: spec for name, spec in specs.items() if spec is not None}
  if specs:
    raise ConfigError(
        f'Logical axes were given for {sorted(specs)[0]!r}, but there is no such {what}; remove them or correct the '
        'name.')
  return matched


def check_logical_axes(arrays: PyTree, logical_axes: LogicalAxes, what: str) -> None:
  """Checks that `logical_axes` mirrors `arrays`: the same structure, and a spec as long as the rank at every leaf.

  Args:
    arrays: tree of arrays or `jax.ShapeDtypeStruct`s.
    logical_axes: tree to check.
    what: what the arrays are, for error messages.

  Raises:
    ConfigError: the two trees differ; the message names the first place.
  """
  structure = jax.tree.structure(arrays)
  axes_structure = jax.tree.structure(logical_axes)
  if structure != axes_structure:
    raise ConfigError(
        f'The logical axes derived for {what} have the structure {axes_structure}, but the arrays have {structure}; '
        'the partition rule of that state must replace each array by one PartitionSpec.')
  for (name, array), spec in zip(tree_utils.named_leaves(arrays), jax.tree.leaves(logical_axes), strict=True):
    if not isinstance(spec, PartitionSpec) or len(spec) != np.ndim(array):
      raise ConfigError(
          f'The logical axes derived for {name!r} of {what} are {spec!r}, but the array has rank {np.ndim(array)}; '
          'a PartitionSpec with one entry per dim was expected.')
