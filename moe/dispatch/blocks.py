"""Loop over blocks of rows for the experts' MLPs: work and temporaries follow the rows that exist.

With expert parallelism a device has a buffer for the worst case, in which all rows are for its experts, and with
balanced loads 1 / P of it is filled. The number of steps of the loop is therefore a value of the program: ceil(rows /
rows of a block), with a block of about an even share. Products, activations and dropout masks of a block are its
temporaries; the derivative computes them again, because a buffer of hidden units would have the size of the worst case.
"""

import dataclasses
import functools
from typing import Any, Protocol

import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from moe.dispatch.mlp import DropoutMask
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.routing import plan as plans
from moe.routing.plan import RowPlan
from t5x_lite.errors import ConfigError


@flax.struct.dataclass
class Block:
  """Rows of one step of the loop: T tiles of consecutive rows.

  Attributes:
    starts: int32 [T], first row of each tile, ascending.
    counts: int32 [T], number of rows of each tile; later rows of a tile belong to other tiles or to none.
    groups: which experts have the rows, in the form of the `Blocks`.
  """

  starts: jax.Array
  counts: jax.Array
  groups: Any


class Blocks(Protocol):
  """Division of rows sorted by expert into blocks, and the MLP of a block; hashable, compared by value."""

  @property
  def tile_rows(self) -> int:
    """Number of rows of a tile."""
    ...

  def num_blocks(self, group_sizes: jax.Array) -> jax.Array:
    """Return int32 [], the number of blocks of rows with these `group_sizes` int32 [E]."""
    ...

  def block(self, group_sizes: jax.Array, index: jax.Array) -> Block:
    """Return the block with this `index` int32 []."""
    ...

  def params_of(self, params: MlpParams, block: Block) -> MlpParams:
    """Return the parameters that `mlp` needs for the block."""
    ...

  def add_grads(self, total: MlpParams, grads: MlpParams, block: Block) -> MlpParams:
    """Return float32 gradients of all parameters plus those of `params_of`."""
    ...

  def mlp(
    self, params: MlpParams, rows: jax.Array, block: Block, spec: MlpSpec, keep: jax.Array | None
  ) -> jax.Array:
    """Return outputs <dtype>[T, tile_rows, D] of `rows` of this shape; rows after a tile's count are arbitrary."""
    ...


def mlp_in_blocks(
  blocks: Blocks,
  params: MlpParams,
  x: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  plan: RowPlan | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows.

  Args:
    blocks: division of the rows.
    params: parameters of the experts.
    x: <float>[N, D], rows sorted by expert; with a plan tokens [S, D].
    group_sizes: int32 [E], number of rows of each expert. Rows past their sum have outputs and gradients of 0.
    spec: computation of an expert.
    keep: hidden units that dropout keeps; None for all.
    plan: full plan of S * K = N choices, sorted by expert; None if `x` are rows.

  Returns:
    <spec.dtype>[N, D] in the order of the rows.
  """
  return _in_blocks(
    blocks, spec, params, x.astype(spec.dtype), plan, group_sizes.astype(jnp.int32), keep
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_blocks(blocks, spec, params, x, plan, group_sizes, keep):
  loop = _Loop(blocks, x, plan, group_sizes)

  def step(index, y):
    tiles = loop.tiles(index)
    tile_keep = None
    if keep is not None:
      tile_keep = keep.of_rows(tiles.rows)
    block_params = blocks.params_of(params, tiles.block)
    out = blocks.mlp(block_params, loop.take(x, tiles), tiles.block, spec, tile_keep)
    return loop.put(y, out, tiles)

  return loop.run(step, loop.zeros(x))[: loop.num_rows]


def _in_blocks_fwd(blocks, spec, params, x, plan, group_sizes, keep):
  y = checkpoint_name(_in_blocks(blocks, spec, params, x, plan, group_sizes, keep), 'expert_output')
  return y, (params, x, plan, group_sizes, keep)


def _in_blocks_bwd(blocks, spec, residuals, grad):
  params_grad, x_grad = _backward(blocks, spec, residuals, grad)
  return params_grad, x_grad, None, None, None


_in_blocks.defvjp(_in_blocks_fwd, _in_blocks_bwd)


def without_second_derivatives(fn, static_argnums=()):
  """Return a backward pass whose own derivative is an error with the remedy, instead of one in a kernel."""

  def raise_error(*args):
    del args
    raise ConfigError(
      "The grouped expert MLP has no second derivatives. Use dispatch='capacity' or 'einsum' with a "
      'capacity factor.'
    )

  wrapped = jax.custom_jvp(fn, nondiff_argnums=static_argnums)
  wrapped.defjvp(raise_error)
  return wrapped


@functools.partial(without_second_derivatives, static_argnums=(0, 1))
def _backward(blocks, spec, residuals, grad):
  """Return the gradients of parameters (in their dtypes, sums in float32) and of x."""
  params, x, plan, group_sizes, keep = residuals
  loop = _Loop(blocks, x, plan, group_sizes)

  def step(index, state):
    x_grad, total = state
    tiles = loop.tiles(index)
    tile_keep = None
    if keep is not None:
      tile_keep = keep.of_rows(tiles.rows)
    _, pull = jax.vjp(
      lambda params, rows: blocks.mlp(params, rows, tiles.block, spec, tile_keep),
      blocks.params_of(params, tiles.block),
      loop.take(x, tiles),
    )
    dy = jnp.where(tiles.is_valid, jnp.take(grad, tiles.rows, axis=0, mode='clip'), 0)
    params_grad, rows_grad = pull(dy)
    return loop.put(x_grad, rows_grad, tiles), blocks.add_grads(total, params_grad, tiles.block)

  zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params)
  x_grad, total = loop.run(step, (loop.zeros(x), zeros))
  params_grad = jax.tree.map(lambda total, param: total.astype(param.dtype), total, params)
  if plan is None:
    return params_grad, x_grad[: loop.num_rows]
  return params_grad, plans.sum_of_choices(x_grad, plan, x.shape[0])


@dataclasses.dataclass(frozen=True)
class _Tiles:
  """A block with its rows int32 [T, tile_rows], clipped to the last one, and which ones it has, [T, tile_rows, 1]."""

  block: Block
  rows: jax.Array
  is_valid: jax.Array


class _Loop:
  """Loop over the blocks of a buffer of `num_rows` rows."""

  def __init__(self, blocks, x, plan, group_sizes):
    if plan is None:
      self.num_rows = x.shape[0]
    else:
      self.num_rows = plan.row_choice.shape[0]
    self._blocks = blocks
    self._group_sizes = group_sizes
    # One token has num_rows / num_tokens rows.
    if plan is None:
      self._source = None
    else:
      self._source = plan.row_choice // (self.num_rows // x.shape[0])

  def run(self, step, init):
    return jax.lax.fori_loop(0, self._blocks.num_blocks(self._group_sizes), step, init)

  def zeros(self, x):
    """Return a buffer that has space for the last tile's empty rows."""
    return jnp.zeros((self.num_rows + self._blocks.tile_rows, x.shape[1]), x.dtype)

  def tiles(self, index):
    block = self._blocks.block(self._group_sizes, index)
    offset = jnp.arange(self._blocks.tile_rows, dtype=jnp.int32)
    rows = jnp.minimum(block.starts[:, None] + offset, self.num_rows - 1)
    return _Tiles(block, rows, (offset < block.counts[:, None])[:, :, None])

  def take(self, x, tiles):
    if self._source is None:
      index = tiles.rows
    else:
      index = jnp.take(self._source, tiles.rows, mode='clip')
    return jnp.take(x, index, axis=0, mode='clip')

  def put(self, buffer, values, tiles):
    """Return the buffer with the tiles' rows. The rows after a tile's last one are overwritten by the next tiles."""
    values = jnp.where(tiles.is_valid, values, 0).astype(buffer.dtype)

    def put_one(tile, buffer):
      return jax.lax.dynamic_update_slice_in_dim(
        buffer, values[tile], tiles.block.starts[tile], axis=0
      )

    if values.shape[0] == 1:
      return put_one(0, buffer)
    return jax.lax.fori_loop(0, values.shape[0], put_one, buffer)
