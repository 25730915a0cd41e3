"""Blocks, statistics and preconditioned gradients of one parameter as lists, in the order of the original.

These classes have the interface of the original implementation of Distributed Shampoo; the optimizer itself computes
with stacks of equal blocks, `BlockLayout`, on which they are built.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.optimizers.shampoo import blocks

_PRECISION = jax.lax.Precision.HIGHEST


class BlockPartitioner:
  """Division of a tensor into blocks, the first dim slowest."""

  def __init__(self, param: Any, block_size: int):
    """Args:
    param: array of the tensor's shape, or another object with `shape`.
    block_size: largest size of a block along any dim; 0 splits no dim.
    """
    shape = tuple(param.shape)
    largest = max(shape, default=1)
    if block_size <= 0:
      block_size = max(largest, 1)
    self._layout = blocks.make_layout(
      shape, block_size=block_size, merge_dims=False, largest_dim=largest
    )

  @property
  def layout(self) -> blocks.BlockLayout:
    """Stacks of equal blocks."""
    return self._layout

  def shapes_for_preconditioners(self) -> list[list[int]]:
    """Return the shape [n, n] of the statistic of each dim of each block, block by block."""
    return [[size, size] for size in self._layout.sizes]

  def num_splits(self) -> int:
    """Return the number of dims, and so of statistics per block."""
    return len(self._layout.shape)

  def partition(self, tensor: jax.Array) -> list[jax.Array]:
    """Return the blocks of a tensor.

    Raises:
      ConfigError: the tensor has another shape.
    """
    if tuple(tensor.shape) != self._layout.shape:
      raise checks.invalid(
        'BlockPartitioner.partition', 'tensor', f'of shape {self._layout.shape}', tensor.shape
      )
    if not self._layout.is_preconditioned:
      return [tensor]
    groups = self._layout.cut(tensor)
    return [groups[group][row] for group, row in self._blocks()]

  def merge_partitions(self, partitions: Sequence[jax.Array]) -> jax.Array:
    """Return the tensor of blocks in the order of `partition`."""
    if not self._layout.is_preconditioned:
      return partitions[0]
    groups: list[dict[int, jax.Array]] = [{} for _ in self._layout.groups]
    for (group, row), block in zip(self._blocks(), partitions, strict=True):
      groups[group][row] = block
    return self._layout.join([_stacked(group) for group in groups])

  def _blocks(self) -> list[tuple[int, int]]:
    """Return (group, row in the group) of each block."""
    rank = len(self._layout.merged_shape)
    return [(int(stack) // rank, int(row)) for stack, row in self._layout.order[::rank]]


class Preconditioner:
  """Statistics and preconditioned gradients of one parameter."""

  def __init__(self, param: Any, block_size: int, best_effort_shape_interpretation: bool):
    """Args:
    param: the parameter, or another object with its `shape`.
    block_size: largest size of a block along any dim.
    best_effort_shape_interpretation: merge adjacent small dims first, see `merge_small_dims`.
    """
    self._original_shape = tuple(param.shape)
    self._transformed_shape = self._original_shape
    if best_effort_shape_interpretation:
      self._transformed_shape = tuple(blocks.merge_small_dims(self._original_shape, block_size))
    self._partitioner = BlockPartitioner(
      jax.ShapeDtypeStruct(self._transformed_shape, jnp.float32), block_size
    )
    self._layout = self._partitioner.layout

  def statistics_from_grad(self, grad: jax.Array) -> list[jax.Array]:
    """Return the statistics `G_(i) G_(i)^T` [n_i, n_i] of each dim i of each block G, block by block.

    Args:
      grad: <float> of the parameter's shape.
    """
    stacks = self._layout.statistics(jnp.reshape(grad, self._transformed_shape), _PRECISION)
    return [stacks[stack][row] for stack, row in self._layout.order]

  def shapes_for_preconditioners(self) -> list[list[int]]:
    """Return the shape [n, n] of each statistic."""
    return self._partitioner.shapes_for_preconditioners()

  def exponent_for_preconditioner(self) -> int:
    """Return the order p of the roots M^(-1/p): twice the number of dims after merging."""
    return 2 * len(self._transformed_shape)

  def preconditioned_grad(self, grad: jax.Array, preconditioners: Sequence[jax.Array]) -> jax.Array:
    """Return the gradient with each dim of each block multiplied by its preconditioner.

    Args:
      grad: <float> of the parameter's shape.
      preconditioners: symmetric matrices [n, n] in the order of `statistics_from_grad`.

    Returns:
      <float> of the parameter's shape.
    """
    if not self._layout.is_preconditioned:
      return grad
    stacks: list[dict[int, jax.Array]] = [{} for _ in self._layout.stack_shapes]
    for (stack, row), matrix in zip(self._layout.order, preconditioners, strict=True):
      stacks[int(stack)][int(row)] = matrix
    reshaped = jnp.reshape(grad, self._transformed_shape)
    product, _ = self._layout.precondition(
      reshaped, [_stacked(stack) for stack in stacks], _PRECISION
    )
    return jnp.reshape(product, self._original_shape)


def _stacked(rows: dict[int, jax.Array]) -> jax.Array:
  """Return the arrays of the rows 0, 1, ... as one array."""
  return jnp.stack([rows[row] for row in range(len(rows))])
