"""Logical axes of trees like the parameters: conversion to the structure of the arrays, and checks.

Every optimizer derives the axes of its state from the axes of the parameters with these functions.
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
  """Return the spec of an array whose dims have no logical axes: one None per dim, `PartitionSpec()` for a scalar.

  Args:
    array: array, tracer, `jax.ShapeDtypeStruct` or Python number.

  >>> import numpy as np
  >>> tuple(unnamed_axes(np.zeros([2, 3])))
  (None, None)
  """
  return PartitionSpec(*(None,) * np.ndim(array))


def match_logical_axes(
  arrays: PyTree, logical_axes: LogicalAxes, what: str = 'parameter'
) -> LogicalAxes:
  """Return logical axes in the structure of their arrays.

  Paths are matched by name, so that container types (plain and frozen dicts) may differ.

  Args:
    arrays: tree of arrays or `jax.ShapeDtypeStruct`s.
    logical_axes: tree with a `PartitionSpec` or `partitioning.AxisNames` of logical names, or None for "no named dim",
      at the path of every array.
    what: name of the arrays for error messages.

  Returns:
    A tree with exactly the structure of `arrays`; every leaf is a `PartitionSpec` with one entry per dim.

  Raises:
    ConfigError: an array without axes, axes without an array, or a number of names that differs from the rank.
  """
  specs = dict(tree_utils.named_leaves(logical_axes, is_leaf=_is_axes_leaf))
  leaves = dict(tree_utils.named_leaves(arrays))
  surplus = sorted(specs.keys() - leaves.keys())
  for name, array in leaves.items():
    if name not in specs:
      raise ConfigError(
        f'The {what} {name!r} has no logical axes.{did_you_mean(name, surplus)} Give every {what} '
        'its axes, for instance with flax.linen.partitioning.param_with_axes.'
      )
    axes = specs[name]
    if axes is not None and len(axes) != np.ndim(array):
      shape = tuple(np.shape(array))
      raise ConfigError(
        f'The {what} {name!r} has rank {len(shape)} (shape {shape}) but {len(axes)} logical '
        f'axes {tuple(axes)}. Give one name, or None, per dim.'
      )
  for name in surplus:
    if specs[name] is not None:
      raise ConfigError(
        f'There are logical axes for {name!r}, but no such {what}. Remove them or correct the name.'
      )

  def axes_of(name, array):
    if specs[name] is None:
      return unnamed_axes(array)
    return PartitionSpec(*specs[name])

  return tree_utils.map_with_names(axes_of, arrays)


def check_logical_axes(arrays: PyTree, logical_axes: LogicalAxes, what: str) -> None:
  """Raise unless `logical_axes` has the structure of `arrays`, with a spec as long as the rank at every leaf.

  Args:
    arrays: tree of arrays or `jax.ShapeDtypeStruct`s.
    logical_axes: tree to check.
    what: name of the arrays for error messages.

  Raises:
    ConfigError: the two trees differ; the message has the first difference.
  """
  structure = jax.tree.structure(arrays)
  axes_structure = jax.tree.structure(logical_axes)
  if structure == axes_structure:
    problem = ''
  else:
    problem = f'{what} have the structure {axes_structure}, but the arrays have {structure}'
  for (name, array), spec in zip(
    tree_utils.named_leaves(arrays), jax.tree.leaves(logical_axes), strict=False
  ):
    if not problem and not (isinstance(spec, PartitionSpec) and len(spec) == np.ndim(array)):
      problem = f'{name!r} of {what} are {spec!r}, but the array has rank {np.ndim(array)}'
  if problem:
    raise ConfigError(
      f'The logical axes derived for {problem}. Correct the rule for the axes of the optimizer state: '
      'it must give each array a PartitionSpec with one entry per dim.'
    )
