"""A parameter in blocks: Shampoo's statistics of it, and its product with the preconditioners.

Small dims next to each other are merged, large ones cut at multiples of the block size. Blocks of equal shape make a
*group*: all dims that divide leave one group, each dim that does not doubles their number. What is computed for one
block is computed for a group in one batched product.

For a block G of rank r, dim i has the statistic of G unfolded along it, `G_(i) G_(i)^T` [n_i, n_i]; its preconditioner
is the inverse root of order 2r (Gupta, Koren, Singer 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization",
algorithm 2, https://arxiv.org/abs/1802.09568; blocks: Anil et al. 2020, "Scalable Second Order Optimization for Deep
Learning", section 3.4, https://arxiv.org/abs/2002.09018).

Order of the matrices of a parameter, wherever it shows: block by block, the first dim slowest; in a block, dim by dim.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class BlockGroup:
  """Equal blocks that lie side by side.

  Attributes:
    starts: per dim, where the first block begins.
    counts: per dim, the number of blocks.
    sizes: per dim, the size of a block.
  """

  starts: tuple[int, ...]
  counts: tuple[int, ...]
  sizes: tuple[int, ...]

  @property
  def num_blocks(self) -> int:
    """Number of blocks k."""
    return math.prod(self.counts)

  def cut(self, array: jax.Array) -> jax.Array:
    """Returns the blocks [k, *sizes] of an array of the merged shape."""
    ends = [start + count * size for start, count, size in zip(self.starts, self.counts, self.sizes, strict=True)]
    rank = len(self.sizes)
    region = jax.lax.slice(array, self.starts, ends)
    region = region.reshape([extent for pair in zip(self.counts, self.sizes, strict=True) for extent in pair])
    return region.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]).reshape([-1, *self.sizes])

  def join(self, blocks: jax.Array) -> jax.Array:
    """Inverse of `cut`: from blocks [k, *sizes] to the region [counts * sizes] that they fill."""
    rank = len(self.sizes)
    blocks = blocks.reshape([*self.counts, *self.sizes])
    blocks = blocks.transpose([axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair])
    return blocks.reshape([count * size for count, size in zip(self.counts, self.sizes, strict=True)])


@dataclasses.dataclass(frozen=True)
class BlockLayout:
  """How one parameter is cut into blocks; without any where it is not preconditioned.

  The matrices of the parameter are kept in stacks [k, n, n], one per group and dim, in that order.

  Attributes:
    shape: the parameter's shape.
    merged_shape: its shape with small dims merged; () if the parameter is not preconditioned.
    block_size: largest size of a block along any dim.
  """

  shape: tuple[int, ...]
  merged_shape: tuple[int, ...]
  block_size: int

  @functools.cached_property
  def groups(self) -> tuple[BlockGroup, ...]:
    """The groups of equal blocks, the first dim varying slowest."""
    if not self.merged_shape:
      return ()
    pieces = [_pieces_of_dim(dim, self.block_size) for dim in self.merged_shape]
    return tuple(BlockGroup(*zip(*combination, strict=True)) for combination in itertools.product(*pieces))

  @property
  def is_preconditioned(self) -> bool:
    """Whether the parameter has preconditioners at all."""
    return bool(self.merged_shape)

  @property
  def exponent(self) -> int:
    """Twice the number of merged dims: the order of the roots."""
    return 2 * len(self.merged_shape)

  @functools.cached_property
  def stack_shapes(self) -> tuple[tuple[int, int], ...]:
    """(k, n) of each stack [k, n, n]."""
    return tuple((group.num_blocks, size) for group in self.groups for size in group.sizes)

  @property
  def num_statistics(self) -> int:
    """Number of matrices."""
    return sum(count for count, _ in self.stack_shapes)

  @functools.cached_property
  def order(self) -> np.ndarray:
    """int [num_statistics, 2]: (stack, row in the stack) of each matrix in the order of the module's docstring."""
    rank = len(self.merged_shape)
    # Per dim and block along it: (piece of the dim, index within the piece).
    blocks = [[(piece, index) for piece, (_, count, _) in enumerate(_pieces_of_dim(dim, self.block_size))
               for index in range(count)] for dim in self.merged_shape]
    pieces_per_dim = [len(_pieces_of_dim(dim, self.block_size)) for dim in self.merged_shape]
    order = []
    for block in itertools.product(*blocks) if rank else ():
      group = int(np.ravel_multi_index([piece for piece, _ in block], pieces_per_dim))
      row = int(np.ravel_multi_index([index for _, index in block], self.groups[group].counts))
      order.extend((group * rank + dim, row) for dim in range(rank))
    return np.array(order, np.int32).reshape([-1, 2])

  @functools.cached_property
  def flat_order(self) -> np.ndarray:
    """int [num_statistics]: place of each matrix in the concatenated stacks."""
    offsets = np.cumsum([0, *(count for count, _ in self.stack_shapes)])
    return offsets[self.order[:, 0]] + self.order[:, 1]

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """Size n of each matrix, in order."""
    return tuple(self.stack_shapes[stack][1] for stack, _ in self.order)

  def cut(self, array: jax.Array) -> list[jax.Array]:
    """Returns the blocks [k, *sizes] of each group of an array of the parameter's shape."""
    if not self.is_preconditioned:
      return []
    merged = array.reshape(self.merged_shape)
    return [group.cut(merged) for group in self.groups]

  def join(self, blocks: Sequence[jax.Array]) -> jax.Array:
    """Inverse of `cut`."""
    regions = [group.join(array) for group, array in zip(self.groups, blocks, strict=True)]
    for dim in reversed(range(len(self.merged_shape))):
      width = len(_pieces_of_dim(self.merged_shape[dim], self.block_size))
      regions = [regions[start] if width == 1 else jnp.concatenate(regions[start:start + width], axis=dim)
                 for start in range(0, len(regions), width)]
    return regions[0].reshape(self.shape)

  def statistics(self, grad: jax.Array, precision: jax.lax.Precision) -> list[jax.Array]:
    """Returns the statistics of a gradient.

    Args:
      grad: float32 of the parameter's shape.
      precision: of the products.

    Returns:
      float32 stacks [k, n, n], one per group and dim.
    """
    stacks = []
    for blocks in self.cut(grad):
      for dim in range(1, blocks.ndim):
        others = tuple(other for other in range(1, blocks.ndim) if other != dim)
        stacks.append(jax.lax.dot_general(blocks, blocks, ((others, others), ((0,), (0,))), precision=precision))
    return stacks

  def precondition(
      self, grad: jax.Array, preconditioners: Sequence[jax.Array],
      precision: jax.lax.Precision) -> tuple[jax.Array, jax.Array]:
    """Multiplies every dim of every block by its preconditioner.

    Args:
      grad: float32 of the parameter's shape.
      preconditioners: float32 stacks [k, n, n], one per group and dim.
      precision: of the products.

    Returns:
      (product, float32 of the parameter's shape; its Euclidean norm, a float32 scalar).
    """
    rank = len(self.merged_shape)
    results = []
    for index, blocks in enumerate(self.cut(grad)):
      for matrices in preconditioners[index * rank:(index + 1) * rank]:
        # Takes the first dim and puts the product last: after all dims the order is the old one.
        blocks = jax.lax.dot_general(blocks, matrices, (((1,), (1,)), ((0,), (0,))), precision=precision)
      results.append(blocks)
    # The norm is that of the blocks: it does not wait for them to be put together, which is left to the next operation.
    return self.join(results), jnp.sqrt(sum(jnp.sum(jnp.square(blocks)) for blocks in results))


def make_layout(
    shape: Sequence[int], *, block_size: int, merge_dims: bool, largest_dim: int) -> BlockLayout:
  """Returns the layout of a parameter.

  Args:
    shape: the parameter's shape.
    block_size: largest size of a block.
    merge_dims: whether to merge small dims first.
    largest_dim: a parameter with a dim above it, or without dims or elements, is not preconditioned.
  """
  shape = tuple(int(dim) for dim in shape)
  if not shape or 0 in shape or max(shape) > largest_dim:
    return BlockLayout(shape, (), block_size)
  return BlockLayout(shape, merge_small_dims(shape, block_size) if merge_dims else shape, block_size)


def merge_small_dims(shape: Sequence[int], largest: int) -> tuple[int, ...]:
  """Multiplies neighbouring dims together as long as the product stays within `largest`; dims of 1 disappear.

  >>> merge_small_dims([1, 2, 512, 1, 2048, 1, 3, 4], 1024)
  (1024, 2048, 12)
  >>> merge_small_dims([1, 1], 4)
  (1,)
  """
  merged = []
  product = 1
  for dim in shape:
    if product * dim <= largest:
      product *= dim
      continue
    if product > 1:
      merged.append(product)
    product = dim
  if product > 1:
    merged.append(product)
  return tuple(merged) or (1,)


def _pieces_of_dim(dim: int, block_size: int) -> list[tuple[int, int, int]]:
  """Returns (start, number of blocks, block size) of the full blocks of a dim and of what is left over."""
  if dim <= block_size:
    return [(0, 1, dim)]
  count, rest = divmod(dim, block_size)
  return [(0, count, block_size)] + ([(count * block_size, 1, rest)] if rest else [])
