"""Functions that run on each device's part of attention's arrays, by the logical axis rules in context."""

from collections.abc import Callable
import math
from typing import Any

from flax.core.spmd import get_logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes
import jax
from jax import lax
from jax.sharding import PartitionSpec

from t5x_lite.types import PyTree

_LOGICAL_AXES = {'b': 'batch', 'h': 'heads'}


def on_each_device(
  fn: Callable[..., PyTree],
  args: PyTree,
  dims: PyTree,
  result_dims: PyTree,
  *,
  is_kernel: bool = False,
) -> PyTree:
  """Return `fn(*args)`, computed on each device for its rows of the batch and its heads.

  Without a mesh of several devices, `fn` is called on the whole arrays. So it is if rules divide no dim: a dim is whole
  if its size is not a multiple of the number of its devices.

  Args:
    fn: function of arrays that treats all rows and heads alike.
    args: tuple of its arguments, pytrees of arrays.
    dims: one string per array, with one letter per dim: 'b' for the batch, 'h' for the heads, '.' for another dim.
    result_dims: strings of the results. A result without the batch (or heads) is summed over it.
    is_kernel: True for a function that XLA cannot partition, which all devices then compute where no dim is divided.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rules = get_logical_axis_rules()
  axes = {}
  free = set()
  if not mesh.empty:
    free = set(mesh.axis_names) - set(mesh.manual_axes)
  if rules and free and mesh.size > 1:
    leaves = jax.tree.leaves(args)
    names = jax.tree.leaves(dims)
    entries = _mesh_axes(tuple(_LOGICAL_AXES.values()), rules)
    for letter, entry in zip(_LOGICAL_AXES, entries, strict=True):
      if isinstance(entry, (tuple, list)):
        found = tuple(entry)
      elif entry:
        found = (entry,)
      else:
        found = ()
      if set(found) <= free:
        shards = math.prod(mesh.shape[axis] for axis in found)
      else:
        shards = 1
      sizes = [
        array.shape[dim.index(letter)]
        for array, dim in zip(leaves, names, strict=True)
        if letter in dim
      ]
      if shards > 1 and all(size % shards == 0 for size in sizes):
        axes[letter] = found
  if not axes and not (is_kernel and free and mesh.size > 1):
    return fn(*args)

  def run(*args):
    results = fn(*args)
    return jax.tree.map(
      lambda dim, part: _sum(part, [axes[letter] for letter in axes if letter not in dim]),
      result_dims,
      results,
    )

  def spec(dim):
    return PartitionSpec(*(axes.get(letter) for letter in dim))

  return jax.shard_map(
    run,
    in_specs=jax.tree.map(spec, dims),
    out_specs=jax.tree.map(spec, result_dims),
    axis_names=free,
    check_vma=False,
  )(*args)


def _mesh_axes(names: tuple[str, ...], rules: Any) -> tuple[Any, ...]:
  """Return the mesh axes of logical axes; None for one without a rule."""
  known = {name for name, _ in rules}
  entries = logical_to_mesh_axes([name if name in known else None for name in names], rules)
  assert entries is not None  # It is None without names.
  return tuple(entries)


def _sum(array: jax.Array, groups: list[tuple[str, ...]]) -> jax.Array:
  axes = tuple(axis for group in groups for axis in group)
  if axes:
    return lax.psum(array, axes)
  return array
