"""Blocks of a parameter in SOAP: those of its units, the arrays of single layers and experts.

So the bases, and with them the updates, are the same whether layers and experts have an array each or share one.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp

from t5x_lite.optimizers.axes.units import Units
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.blocks import block_statistics
from t5x_lite.optimizers.shampoo.blocks import merge_small_dims
from t5x_lite.optimizers.shampoo.blocks import precondition_blocks
from t5x_lite.optimizers.soap_rule.config import SoapConfig
from t5x_lite.types import Array

_PRECISION = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class SoapLayout:
  """Division of a parameter into blocks [K, *sizes], of which each group has equal sizes.

  Attributes:
    units: the units of the parameter.
    blocks: division of a unit; dims that are not rotated have no matrices.
  """

  units: Units
  blocks: BlockLayout

  @property
  def is_rotated(self) -> bool:
    """True if any dim is rotated."""
    return self.blocks.is_preconditioned

  @functools.cached_property
  def stack_shapes(self) -> tuple[tuple[int, int], ...]:
    """(K, n) of each stack [K, n, n] of matrices: one per group of blocks and dim that is rotated."""
    return tuple((self.units.num_units * count, size) for count, size in self.blocks.stack_shapes)

  def cut(self, array: Array) -> list[Array]:
    """Return the blocks [K, *sizes] of each group, given an array of the shape of the parameter."""
    units = self.units.split(array).reshape(-1, *self.units.unit_shape)
    groups = jax.vmap(self.blocks.cut)(units)
    return [blocks.reshape(-1, *blocks.shape[2:]) for blocks in groups]

  def join(self, groups: Sequence[Array]) -> Array:
    """Return the inverse of `cut`."""
    num_units = self.units.num_units
    of_units = [blocks.reshape(num_units, -1, *blocks.shape[1:]) for blocks in groups]
    return self.units.join(jax.vmap(self.blocks.join)(of_units))

  def statistics(self, array: Array) -> list[Array]:
    """Return the products G G^T along each rotated dim of each block: stacks float32 [K, n, n]."""
    stacks = []
    for blocks in self.cut(array):
      stacks += block_statistics(blocks, _PRECISION, self.blocks.matrix_dims)
    return stacks

  def by_group(self, stacks: Sequence[Array]) -> list[list[Array | None]]:
    """Return for each group of blocks one stack per dim, None for dims that are not rotated."""
    groups = []
    for start in range(0, len(stacks), len(self.blocks.matrix_dims)):
      of_dims: list[Array | None] = [None] * len(self.blocks.merged_shape)
      for i, dim in enumerate(self.blocks.matrix_dims):
        of_dims[dim] = stacks[start + i]
      groups.append(of_dims)
    return groups


def rotate(blocks: Array, bases: Sequence[Array | None]) -> Array:
  """Return blocks [K, *sizes] in the bases [K, n, n] of their dims, whose columns are the basis vectors."""
  return precondition_blocks(blocks, bases, _PRECISION)


def rotate_back(blocks: Array, bases: Sequence[Array | None]) -> Array:
  """Return the inverse of `rotate`."""
  inverse = [None if basis is None else jnp.swapaxes(basis, 1, 2) for basis in bases]
  return precondition_blocks(blocks, inverse, _PRECISION)


def reorder(blocks: Array, orders: Sequence[Array | None]) -> Array:
  """Return blocks [K, *sizes] with the elements along each dim in the order int32 [K, n]; None keeps a dim."""
  for dim, order in enumerate(orders):
    if order is not None:
      shape = [len(order), *(1,) * len(orders)]
      shape[dim + 1] = order.shape[1]
      blocks = jnp.take_along_axis(blocks, order.reshape(shape), axis=dim + 1)
  return blocks


def layout_of(units: Units, cfg: SoapConfig) -> SoapLayout:
  """Return the layout of a parameter with these units."""
  shape = units.unit_shape
  merged = shape
  if cfg.merge_dims:
    merged = tuple(merge_small_dims(shape, cfg.block_size or cfg.max_precond_dim))
  # A basis of one dimension changes nothing.
  whole_dims = tuple(
    dim for dim, size in enumerate(merged) if size == 1 or size > cfg.max_precond_dim
  )
  is_vector = len(shape) == 1
  if len(whole_dims) == len(merged) or 0 in shape or (is_vector and not cfg.precondition_1d):
    merged = ()
    whole_dims = ()
  block_size = cfg.block_size or max(merged, default=1)
  return SoapLayout(units, BlockLayout(shape, merged, block_size, whole_dims))
