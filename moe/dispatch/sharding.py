"""Sharding constraints by logical axis names, where the mesh in context supports them."""

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from t5x_lite.partitioning import rules as axis_rules


def constrain(x: jax.Array, logical_axes: tuple[str | None, ...]) -> jax.Array:
  """Constrain the dims of `x` to mesh axes, by the logical axis rules in context.

  Without rules or without a mesh of several devices it has no effect. A dim is not constrained if its size is not a
  multiple of its number of shards, if it has no rule, or inside `shard_map` over one of its mesh axes.

  Args:
    x: array of any shape and dtype.
    logical_axes: one logical axis name, or None, per dim.

  Returns:
    `x`, constrained.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rules = nn.get_logical_axis_rules()
  if not rules or mesh.empty or mesh.size == 1:
    return x
  known = {name for name, _ in rules}
  names = tuple(name if name in known else None for name in logical_axes)
  entries = []
  # Flax exports it without declaring so.
  mesh_axes = nn.logical_to_mesh_axes(names, rules)  # pyright: ignore[reportPrivateImportUsage]
  assert mesh_axes is not None  # `names` is not None.
  for size, entry in zip(x.shape, mesh_axes, strict=True):
    axes = axis_rules.axes_of(entry)
    usable = not set(axes) & set(mesh.manual_axes) and set(axes) <= set(mesh.axis_names)
    fits = usable and size % axis_rules.num_shards(entry, mesh.shape) == 0
    if fits and axes:
      entries.append(entry)
    else:
      entries.append(PartitionSpec.UNCONSTRAINED)
  if all(entry is PartitionSpec.UNCONSTRAINED for entry in entries):
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
