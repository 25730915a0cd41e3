"""Blocks of a parameter in SOAP, and changes of their bases."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.blocks import merge_small_dims
from t5x_lite.optimizers.shampoo.blocks import precondition_blocks
from t5x_lite.optimizers.soap_rule.config import SoapConfig
from t5x_lite.types import Array

PRECISION = jax.lax.Precision.HIGHEST


def layout_of(shape: tuple[int, ...], cfg: SoapConfig) -> BlockLayout:
  """Return the blocks of a parameter of this shape; dims that are not rotated have no matrices."""
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
  return BlockLayout(shape, merged, block_size, whole_dims)


def by_group(layout: BlockLayout, stacks: Sequence[Array]) -> list[list[Array | None]]:
  """Return for each group of blocks one stack [K, ...] per dim, None for dims that are not rotated."""
  groups = []
  for start in range(0, len(stacks), len(layout.matrix_dims)):
    of_dims: list[Array | None] = [None] * len(layout.merged_shape)
    for i, dim in enumerate(layout.matrix_dims):
      of_dims[dim] = stacks[start + i]
    groups.append(of_dims)
  return groups


def rotate(blocks: Array, bases: Sequence[Array | None]) -> Array:
  """Return blocks [K, *sizes] in the bases [K, n, n] of their dims, whose columns are the basis vectors."""
  return precondition_blocks(blocks, bases, PRECISION)


def rotate_back(blocks: Array, bases: Sequence[Array | None]) -> Array:
  """Return the inverse of `rotate`."""
  inverse = [None if basis is None else jnp.swapaxes(basis, 1, 2) for basis in bases]
  return precondition_blocks(blocks, inverse, PRECISION)


def reorder(blocks: Array, orders: Sequence[Array | None]) -> Array:
  """Return blocks [K, *sizes] with the elements along each dim in the order int32 [K, n]; None keeps a dim."""
  for dim, order in enumerate(orders):
    if order is not None:
      shape = [len(order), *(1,) * len(orders)]
      shape[dim + 1] = order.shape[1]
      blocks = jnp.take_along_axis(blocks, order.reshape(shape), axis=dim + 1)
  return blocks
