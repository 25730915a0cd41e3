"""Blocks of parameters in Shampoo: statistics, and products with preconditioners.

Adjacent small dims are merged, large ones are split at multiples of the block size. Blocks of equal shape are a
*group*: there is one group if all dims are divisible, and each other dim doubles the number of groups. Computations are
batched over the blocks of a group.

For a block G of rank r, dim i has the statistic of G unfolded along it, `G_(i) G_(i)^T` [n_i, n_i]; its preconditioner
is the inverse root of order 2r (Gupta, Koren, Singer 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization",
algorithm 2, https://arxiv.org/abs/1802.09568; blocks: Anil et al. 2020, "Scalable Second Order Optimization for Deep
Learning", section 3.4, https://arxiv.org/abs/2002.09018).

The matrices of a parameter are ordered block by block, the first dim slowest; in a block, dim by dim.
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
  """Adjacent blocks of equal shape.

  Attributes:
    starts: per dim, start of the first block.
    counts: per dim, number of blocks.
    sizes: per dim, size of a block.
  """

  starts: tuple[int, ...]
  counts: tuple[int, ...]
  sizes: tuple[int, ...]

  @property
  def num_blocks(self) -> int:
    """Number of blocks k."""
    return math.prod(self.counts)

  def cut(self, array: jax.Array) -> jax.Array:
    """Return the blocks [k, *sizes] of an array of the merged shape."""
    ends = [
      start + count * size
      for start, count, size in zip(self.starts, self.counts, self.sizes, strict=True)
    ]
    rank = len(self.sizes)
    region = jax.lax.slice(array, self.starts, ends)
    region = region.reshape(
      [extent for pair in zip(self.counts, self.sizes, strict=True) for extent in pair]
    )
    return region.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]).reshape(
      [-1, *self.sizes]
    )

  def join(self, blocks: jax.Array) -> jax.Array:
    """Return the region [counts * sizes] of blocks [k, *sizes]; inverse of `cut`."""
    rank = len(self.sizes)
    blocks = blocks.reshape([*self.counts, *self.sizes])
    blocks = blocks.transpose(
      [axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair]
    )
    return blocks.reshape(
      [count * size for count, size in zip(self.counts, self.sizes, strict=True)]
    )


@dataclasses.dataclass(frozen=True)
class BlockLayout:
  """Division of one parameter into blocks; no blocks if it is not preconditioned.

  The matrices of the parameter are in stacks [k, n, n], one per group and dim, in this order.

  Attributes:
    shape: the parameter's shape.
    merged_shape: the shape with small dims merged; () if the parameter is not preconditioned.
    block_size: largest size of a block along any dim.
    whole_dims: dims of the merged shape that are not split and have no matrices.
  """

  shape: tuple[int, ...]
  merged_shape: tuple[int, ...]
  block_size: int
  whole_dims: tuple[int, ...] = ()

  @functools.cached_property
  def matrix_dims(self) -> tuple[int, ...]:
    """Dims of the merged shape that have matrices."""
    return tuple(dim for dim in range(len(self.merged_shape)) if dim not in self.whole_dims)

  @functools.cached_property
  def groups(self) -> tuple[BlockGroup, ...]:
    """Groups of equal blocks, the first dim varying slowest."""
    if not self.merged_shape:
      return ()
    return tuple(
      BlockGroup(*zip(*combination, strict=True))
      for combination in itertools.product(*self._pieces)
    )

  @functools.cached_property
  def _pieces(self) -> list[list[tuple[int, int, int]]]:
    """The result of `_pieces_of_dim` for each dim of the merged shape."""
    pieces = []
    for dim, size in enumerate(self.merged_shape):
      if dim in self.whole_dims:
        pieces.append([(0, 1, size)])
      else:
        pieces.append(_pieces_of_dim(size, self.block_size))
    return pieces

  @property
  def is_preconditioned(self) -> bool:
    """True if the parameter has preconditioners."""
    return bool(self.merged_shape)

  @property
  def exponent(self) -> int:
    """Order of the roots: twice the number of merged dims."""
    return 2 * len(self.merged_shape)

  @functools.cached_property
  def stack_shapes(self) -> tuple[tuple[int, int], ...]:
    """(k, n) of each stack [k, n, n]."""
    return tuple(
      (group.num_blocks, group.sizes[dim]) for group in self.groups for dim in self.matrix_dims
    )

  @property
  def num_statistics(self) -> int:
    """Number of matrices."""
    return sum(count for count, _ in self.stack_shapes)

  @functools.cached_property
  def order(self) -> np.ndarray:
    """int [num_statistics, 2]: (stack, row in the stack) of each matrix in the order of the module's docstring."""
    rank = len(self.matrix_dims)
    # Per dim and block along it: (piece of the dim, index within the piece).
    blocks = [
      [(piece, index) for piece, (_, count, _) in enumerate(pieces) for index in range(count)]
      for pieces in self._pieces
    ]
    pieces_per_dim = list(map(len, self._pieces))
    order = []
    for block in itertools.product(*blocks) if rank else ():
      group = int(np.ravel_multi_index([piece for piece, _ in block], pieces_per_dim))
      row = int(np.ravel_multi_index([index for _, index in block], self.groups[group].counts))
      order.extend((group * rank + dim, row) for dim in range(rank))
    return np.array(order, np.int32).reshape([-1, 2])

  @functools.cached_property
  def flat_order(self) -> np.ndarray:
    """int [num_statistics]: index of each matrix in the concatenated stacks."""
    offsets = np.cumsum([0, *(count for count, _ in self.stack_shapes)])
    return offsets[self.order[:, 0]] + self.order[:, 1]

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """Size n of each matrix, in order."""
    return tuple(self.stack_shapes[stack][1] for stack, _ in self.order)

  def cut(self, array: jax.Array) -> list[jax.Array]:
    """Return the blocks [k, *sizes] of each group of an array of the parameter's shape."""
    if not self.is_preconditioned:
      return []
    merged = array.reshape(self.merged_shape)
    return [group.cut(merged) for group in self.groups]

  def join(self, blocks: Sequence[jax.Array]) -> jax.Array:
    """Return an array of the parameter's shape; inverse of `cut`."""
    regions = [group.join(array) for group, array in zip(self.groups, blocks, strict=True)]
    for dim in reversed(range(len(self.merged_shape))):
      width = len(self._pieces[dim])
      if width == 1:
        continue
      starts = range(0, len(regions), width)
      regions = [jnp.concatenate(regions[start : start + width], axis=dim) for start in starts]
    return regions[0].reshape(self.shape)

  def statistics(self, grad: jax.Array, precision: jax.lax.Precision) -> list[jax.Array]:
    """Return the statistics of a gradient.

    Args:
      grad: float32 of the parameter's shape.
      precision: precision of the products.

    Returns:
      Float32 stacks [k, n, n], one per group and dim with matrices.
    """
    stacks = []
    for blocks in self.cut(grad):
      stacks += block_statistics(blocks, precision, self.matrix_dims)
    return stacks

  def precondition(
    self, grad: jax.Array, preconditioners: Sequence[jax.Array], precision: jax.lax.Precision
  ) -> tuple[jax.Array, jax.Array]:
    """Return the gradient with every dim of every block multiplied by its preconditioner.

    Args:
      grad: float32 of the parameter's shape.
      preconditioners: float32 stacks [k, n, n], one per group and dim.
      precision: precision of the products.

    Returns:
      (product, float32 of the parameter's shape; its Euclidean norm, a float32 scalar).
    """
    rank = len(self.merged_shape)
    results = []
    for index, blocks in enumerate(self.cut(grad)):
      of_group = preconditioners[index * rank : (index + 1) * rank]
      results.append(precondition_blocks(blocks, of_group, precision))
    return self.join(results), norm_of_blocks(results)


def block_statistics(
  blocks: jax.Array, precision: jax.lax.Precision, dims: Sequence[int] | None = None
) -> list[jax.Array]:
  """Return the statistics [k, n, n] of blocks float32 [k, *sizes], one stack per dim of `dims` (None: all)."""
  stacks = []
  batch_dims = ((0,), (0,))
  if dims is None:
    dims = range(blocks.ndim - 1)
  for dim in (dim + 1 for dim in dims):
    # [k, n, n]: G G^T of the block as a matrix with this dim as rows, that is, contracted over all other dims.
    others = tuple(other for other in range(1, blocks.ndim) if other != dim)
    product = jax.lax.dot_general(
      blocks, blocks, ((others, others), batch_dims), precision=precision
    )
    stacks.append(product)
  return stacks


def precondition_blocks(
  blocks: jax.Array, preconditioners: Sequence[jax.Array | None], precision: jax.lax.Precision
) -> jax.Array:
  """Return blocks float32 [k, *sizes] with every dim multiplied by its preconditioners.

  Args:
    blocks: float32 [k, *sizes].
    preconditioners: float32 [k, n, n] per dim, whose first n is contracted; None for a dim that is not multiplied.
    precision: precision of the products.
  """
  for matrices in preconditioners:
    if matrices is None:
      blocks = jnp.moveaxis(blocks, 1, -1)
      continue
    # Contracts the first dim and appends the new one last, so that the final order of dims is the original one.
    blocks = jax.lax.dot_general(
      blocks, matrices, (((1,), (1,)), ((0,), (0,))), precision=precision
    )
  return blocks


def norm_of_blocks(groups: Sequence[jax.Array]) -> jax.Array:
  """Return the Euclidean norm, a float32 scalar, of a parameter, given its blocks.

  Computed from the blocks, it does not wait until they are joined.
  """
  return jnp.sqrt(sum(jnp.sum(jnp.square(blocks)) for blocks in groups))


def make_layout(
  shape: Sequence[int], *, block_size: int, merge_dims: bool, largest_dim: int
) -> BlockLayout:
  """Return the layout of a parameter.

  Args:
    shape: the parameter's shape.
    block_size: largest size of a block.
    merge_dims: merge small dims first.
    largest_dim: parameters with a larger dim, or without dims or elements, are not preconditioned.

  Returns:
    The layout.
  """
  shape = tuple(int(dim) for dim in shape)
  if not shape or 0 in shape or max(shape) > largest_dim:
    return BlockLayout(shape, (), block_size)
  merged_shape = shape
  if merge_dims:
    merged_shape = tuple(merge_small_dims(shape, block_size))
  return BlockLayout(shape, merged_shape, block_size)


def merge_small_dims(shape_to_merge: Sequence[int], max_dim: int) -> list[int]:
  """Return dims with adjacent ones merged while the product is at most `max_dim`, and without dims of 1.

  Args:
    shape_to_merge: the shape.
    max_dim: largest merged dim; larger dims stay.

  Returns:
    The merged shape: [1] if all dims are 1, [] for a scalar.

  >>> merge_small_dims([1, 2, 512, 1, 2048, 1, 3, 4], 1024)
  [1024, 2048, 12]
  >>> merge_small_dims([1, 1], 4)
  [1]
  """
  merged = []
  product = 1
  for dim in shape_to_merge:
    if product * dim <= max_dim:
      product *= dim
      continue
    if product > 1:
      merged.append(product)
    product = dim
  if product > 1:
    merged.append(product)
  if merged or not shape_to_merge:
    return merged
  return [1]


def _pieces_of_dim(dim: int, block_size: int) -> list[tuple[int, int, int]]:
  """Return (start, number of blocks, block size) of the full blocks of a dim and of the remaining block."""
  if dim <= block_size:
    return [(0, 1, dim)]
  count, rest = divmod(dim, block_size)
  pieces = [(0, count, block_size)]
  if rest:
    pieces.append((count * block_size, 1, rest))
  return pieces
