"""Grouped expert MLP for GPU and TPU, by JAX's Pallas kernels, and for any backend, by plain operations.

| kernel | runs on | experts' dims | dtypes |
|---|---|---|---|
| `mosaic_gpu` | Hopper GPUs | multiples of 64 | bfloat16, float16 |
| `blackwell` | Blackwell data center GPUs | multiples of 128 | bfloat16, float16 |
| `megablox` | TPUs | multiples of 128 | bfloat16, float32 |
| `padded` | all | any | any |

All are exact. They run in a loop over blocks of rows (`blocks`), so that their work follows the rows that exist. The
first three multiply the rows of a block by a grouped product. `padded` divides each expert's rows into tiles of about
an even share and gathers a weight copy per tile; accelerators use it where no fast kernel is supported: JAX 0.10 has no
grouped product for GPUs before Hopper (`jax.lax.ragged_dot` multiplies every row with every expert there, and the
module of its Triton form is missing).
"""

from collections.abc import Callable
import dataclasses
import functools
import importlib
import math
from typing import cast

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from moe.dispatch import tilings
from moe.dispatch.blocks import Block
from moe.dispatch.blocks import mlp_in_blocks
from moe.dispatch.blocks import without_second_derivatives
from moe.dispatch.mlp import DropoutMask
from moe.dispatch.mlp import activate
from moe.dispatch.mlp import batched_mlp
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.routing import plan as plans
from moe.routing.plan import RowPlan

# Bounds of `padded`'s tiles. For fewer rows the copy of the weights takes longer than the products.
_LARGEST_PADDED_TILE = 1024
_SMALLEST_PADDED_TILE = 8
# Space for loads that are nearly balanced: an expert with up to this multiple of an even share has one tile, and a
# device with up to the other multiple of its share one block.
_TILE_MARGIN = 1.25
_BLOCK_MARGIN = 1.125
# Blocks of `padded` per even share: more of them compute fewer empty tiles, and give a GPU less to do at a time.
_BLOCKS_PER_SHARE = 8

# (rows [N, in] sorted by expert, kernels [E, in, out], group_sizes [E]) -> products of rows and kernels [N, out]. Rows
# past the sum of group_sizes are arbitrary.
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


# ---- Hopper ---------------------------------------------------------------------------------------------------------


def mosaic_gpu_unsupported_reason(params: MlpParams, spec: MlpSpec) -> str | None:
  """Return the reason why `mosaic_gpu_mlp` does not support `params` and `spec` on this device; None if it does."""
  capability = _compute_capability()
  if capability != '9.0':
    return f'needs a Hopper GPU (compute capability 9.0), got {capability}'
  return mosaic_gpu_unsupported_shapes(params, spec)


def mosaic_gpu_unsupported_shapes(
  params: MlpParams, spec: MlpSpec, multiple: int = 64
) -> str | None:
  """Return the reason why `mosaic_gpu_mlp` does not support the dims of `params` or the dtype of `spec`, or None."""
  if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
    return f'computes in bfloat16 or float16, got {jnp.dtype(spec.dtype)}'
  return _unsupported_dims(params, multiple)


def _unsupported_dims(params, multiple):
  _, hidden, width = params.wo.shape
  if hidden % multiple or width % multiple:
    return (
      f'needs width and hidden units that are multiples of {multiple}, got {width} and {hidden}'
    )
  return None


def _compute_capability():
  return getattr(jax.devices()[0], 'compute_capability', None)


_HOPPER_ROWS = 128


def _block(size: int) -> int:
  if size % 128 == 0:
    return 128
  return 64


@jax.custom_vjp
def mosaic_gpu_product(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Return products of rows, see `GroupedProduct`; N is a multiple of 128, and arbitrary rows are finite."""
  return _mosaic_product(rows, kernels, group_sizes, transpose=False)


def _mosaic_product(rows, kernels, group_sizes, *, transpose):
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu  # Importable only in GPU builds.

  _, dim_in, width = kernels.shape
  if transpose:
    width = dim_in
  return ragged_dot_mgpu.ragged_dot(
    rows,
    kernels,
    group_sizes=group_sizes,
    block_m=_HOPPER_ROWS,
    block_n=_block(width),
    block_k=64,
    max_concurrent_steps=4,
    grid_block_n=1,
    transpose_rhs=transpose,
  )


def _mosaic_product_fwd(rows, kernels, group_sizes):
  return mosaic_gpu_product(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _mosaic_product_bwd(residuals, grad):
  from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

  rows, kernels, group_sizes = residuals
  kernels_grad = transposed_ragged_dot_mgpu.transposed_ragged_dot(
    rows,
    grad,
    group_sizes=group_sizes,
    block_m=_block(rows.shape[1]),
    block_n=_block(grad.shape[1]),
    block_k=64,
    max_concurrent_steps=4,
    grid_block_n=1,
  )
  # The kernel may not write the gradients of experts without rows.
  kernels_grad = jnp.where((group_sizes > 0)[:, None, None], kernels_grad, 0)
  return _mosaic_product(grad, kernels, group_sizes, transpose=True), kernels_grad, None


mosaic_gpu_product.defvjp(_mosaic_product_fwd, without_second_derivatives(_mosaic_product_bwd))


def mosaic_gpu_mlp(
  params: MlpParams,
  x: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  balanced_rows: int | None = None,
  plan: RowPlan | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows, on a Hopper GPU; see `mlp_by_products`."""
  return mlp_by_products(
    mosaic_gpu_product, params, x, group_sizes, spec, keep, balanced_rows, plan
  )


# ---- Blackwell ------------------------------------------------------------------------------------------------------


def blackwell_unsupported_reason(params: MlpParams, spec: MlpSpec) -> str | None:
  """Return the reason why `blackwell_mlp` does not support `params` and `spec` on this device; None if it does."""
  capability = _compute_capability()
  if capability not in ('10.0', '10.3'):
    return f'needs a Blackwell data center GPU (compute capability 10.0 or 10.3), got {capability}'
  return mosaic_gpu_unsupported_shapes(params, spec, multiple=128)


@jax.custom_vjp
def blackwell_product(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Return products of rows, see `GroupedProduct`; N is a multiple of 256, and arbitrary rows are finite."""
  from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu
  from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu

  # Two multiprocessors share a tile of twice these rows and columns: JAX 0.10 cannot trace the form with one.
  config = blackwell_ragged_dot_mgpu.TuningConfig(
    tile_m=128,
    tile_n=_block(kernels.shape[2] // 2),
    tile_k=64,
    max_concurrent_steps=4,
    collective=True,
    grid_tile_width=1,
    grid_minor_dim=blackwell_matmul_mgpu.MatmulDimension.N,
  )
  return blackwell_ragged_dot_mgpu.ragged_dot_kernel(rows, kernels, group_sizes, config)


def _blackwell_product_fwd(rows, kernels, group_sizes):
  return blackwell_product(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _blackwell_product_bwd(residuals, grad):
  rows, kernels, group_sizes = residuals
  rows_grad = blackwell_product(grad, kernels.swapaxes(1, 2), group_sizes)
  return rows_grad, _kernels_grad_by_tiles(rows, grad, group_sizes).astype(kernels.dtype), None


blackwell_product.defvjp(_blackwell_product_fwd, without_second_derivatives(_blackwell_product_bwd))


def _kernels_grad_by_tiles(rows, grad, group_sizes):
  """Return float32 [E, in, out] of rows [N, in] and gradients of their products [N, out], by `padded`'s tiles.

  JAX has no kernel for it on Blackwell: the transposed product is Hopper's.
  """
  num_rows = rows.shape[0]
  blocks = PaddedBlocks.for_rows(num_rows, group_sizes.shape[0])

  def step(index, total):
    block = blocks.block(group_sizes, index)
    offset = jnp.arange(blocks.tile_rows, dtype=jnp.int32)
    row = block.starts[:, None] + offset
    is_valid = (offset < block.counts[:, None])[:, :, None]
    tiles, grads = (
      jnp.where(is_valid, jnp.take(x, row, axis=0, mode='clip'), 0) for x in (rows, grad)
    )
    return total.at[block.groups].add(
      jnp.einsum('tri,tro->tio', tiles, grads, preferred_element_type=jnp.float32)
    )

  zeros = jnp.zeros((group_sizes.shape[0], rows.shape[1], grad.shape[1]), jnp.float32)
  return jax.lax.fori_loop(0, blocks.num_blocks(group_sizes), step, zeros)


def blackwell_mlp(
  params: MlpParams,
  x: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  balanced_rows: int | None = None,
  plan: RowPlan | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows, on a Blackwell GPU; see `mlp_by_products`."""
  return mlp_by_products(blackwell_product, params, x, group_sizes, spec, keep, balanced_rows, plan)


# ---- TPU ------------------------------------------------------------------------------------------------------------


def megablox_unsupported_reason(params: MlpParams, spec: MlpSpec) -> str | None:
  """Return the reason why `megablox_mlp` does not support `params` and `spec`; None if it does."""
  if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
    return f'computes in bfloat16 or float32, got {jnp.dtype(spec.dtype)}'
  return _unsupported_dims(params, tilings.LANES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def megablox_product(
  rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array, interpret: bool = False
) -> jax.Array:
  """Return products of rows, see `GroupedProduct`; N is a multiple of 128. `interpret` emulates it without a TPU."""
  return _megablox_product(rows, kernels, group_sizes, interpret, transpose=False)


def _megablox_product(rows, kernels, group_sizes, interpret, *, transpose):
  num_rows = rows.shape[0]
  num_experts, dim_in, dim_out = kernels.shape
  if transpose:
    dim_in, dim_out = dim_out, dim_in
  tiling = tilings.product_tiling(num_rows, num_rows // num_experts, dim_in, dim_out, rows.dtype)
  return _megablox().gmm(
    rows,
    kernels,
    group_sizes,
    preferred_element_type=rows.dtype,
    tiling=tiling,
    transpose_rhs=transpose,
    interpret=interpret,
  )


def _megablox():
  # The package hides its module of this name behind a function with another derivative.
  return importlib.import_module('jax.experimental.pallas.ops.tpu.megablox.gmm')


def _megablox_product_fwd(rows, kernels, group_sizes, interpret):
  return megablox_product(rows, kernels, group_sizes, interpret), (rows, kernels, group_sizes)


def _megablox_product_bwd(interpret, residuals, grad):
  rows, kernels, group_sizes = residuals
  num_rows = rows.shape[0]
  num_experts, dim_in, dim_out = kernels.shape
  tiling = tilings.kernel_grad_tiling(
    num_rows, num_rows // num_experts, dim_in, dim_out, rows.dtype
  )
  kernels_grad = _megablox().tgmm(
    rows.swapaxes(0, 1),
    grad,
    group_sizes,
    preferred_element_type=kernels.dtype,
    tiling=tiling,
    interpret=interpret,
  )
  return (
    _megablox_product(grad, kernels, group_sizes, interpret, transpose=True),
    kernels_grad,
    None,
  )


megablox_product.defvjp(
  _megablox_product_fwd, without_second_derivatives(_megablox_product_bwd, (0,))
)


def megablox_mlp(
  params: MlpParams,
  x: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  balanced_rows: int | None = None,
  plan: RowPlan | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows, on a TPU; see `mlp_by_products`."""
  product_fn = cast(GroupedProduct, megablox_product)
  return mlp_by_products(product_fn, params, x, group_sizes, spec, keep, balanced_rows, plan)


# ---- Grouped products -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ProductBlocks:
  """Blocks of consecutive rows of any experts, one tile each; see `blocks.Blocks`.

  Attributes:
    product_fn: product of rows with their experts' kernels.
    tile_rows: number of rows of a block.
  """

  product_fn: GroupedProduct
  tile_rows: int

  def num_blocks(self, group_sizes: jax.Array) -> jax.Array:
    return -(-jnp.sum(group_sizes) // self.tile_rows)

  def block(self, group_sizes: jax.Array, index: jax.Array) -> Block:
    start = index * self.tile_rows
    ends = jnp.clip(jnp.cumsum(group_sizes) - start, 0, self.tile_rows)
    return Block(start[None], ends[-1:], jnp.diff(ends, prepend=0))

  def params_of(self, params: MlpParams, block: Block) -> MlpParams:
    return params

  def add_grads(self, total: MlpParams, grads: MlpParams, block: Block) -> MlpParams:
    return jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), total, grads)

  def mlp(
    self, params: MlpParams, rows: jax.Array, block: Block, spec: MlpSpec, keep: jax.Array | None
  ) -> jax.Array:
    if keep is not None:
      keep = keep[0]
    # A block is one tile.
    y = _product_mlp(self.product_fn, params, rows[0], block.groups, spec, keep)
    return y[None]


def mlp_by_products(
  product_fn: GroupedProduct,
  params: MlpParams,
  x: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  balanced_rows: int | None = None,
  plan: RowPlan | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows; see `blocks.mlp_in_blocks`.

  Without a loop, if all rows fit in one block, the derivative computes nothing again.

  Args:
    product_fn: product of rows with their experts' kernels.
    params: parameters of the experts.
    x: <float>[N, D] sorted by expert; with a plan tokens [S, D].
    group_sizes: int32 [E].
    spec: computation of an expert.
    keep: hidden units that dropout keeps; None for all.
    balanced_rows: number of rows if loads are balanced; None for N.
    plan: full plan of S * K = N choices; None if `x` are rows.

  Returns:
    <spec.dtype>[N, D].
  """
  if plan is None:
    num_rows = x.shape[0]
  else:
    num_rows = plan.row_choice.shape[0]
  if num_rows == 0:
    return jnp.zeros((0, x.shape[1]), spec.dtype)
  block_rows = _in_row_tiles(int(_BLOCK_MARGIN * (balanced_rows or num_rows)))
  if num_rows > block_rows:
    return mlp_in_blocks(
      ProductBlocks(product_fn, block_rows), params, x, group_sizes, spec, keep, plan
    )
  if plan is None:
    rows = x.astype(spec.dtype)
  else:
    rows = plans.dispatch(x.astype(spec.dtype), plan)
  padding = ((0, _in_row_tiles(num_rows) - num_rows), (0, 0))
  if keep is None:
    keep_rows = None
  else:
    keep_rows = jnp.pad(keep.of_all(), padding)
  return _product_mlp(product_fn, params, jnp.pad(rows, padding), group_sizes, spec, keep_rows)[
    :num_rows
  ]


def _product_mlp(product_fn, params, rows, group_sizes, spec, keep):
  """Return the outputs of `rows`, a multiple of the row tile, by grouped products; rows without an expert get 0."""
  ends = jnp.cumsum(group_sizes)
  row = jnp.arange(rows.shape[0], dtype=jnp.int32)
  expert = jnp.searchsorted(ends, row, side='right')
  is_valid = (row < ends[-1])[:, None]
  rows = jnp.where(is_valid, rows, 0)

  def project(x, kernels, biases):
    y = product_fn(x, kernels.astype(spec.dtype), group_sizes.astype(jnp.int32))
    # Uninitialized memory may contain NaN or infinity, whose products with 0 are NaN.
    y = jnp.where(is_valid, y, 0)
    # The cast follows the copy, so that gradients of an expert's rows are summed in float32.
    if biases is None:
      return y
    return y + jnp.take(biases, expert, axis=0, mode='clip').astype(spec.dtype)

  biases = params.wi_bias or (None,) * len(params.wi)
  pre = [project(rows, *each) for each in zip(params.wi, biases, strict=True)]
  hidden = jnp.where(is_valid, activate(checkpoint_name(pre, 'expert_hidden'), keep, spec), 0)
  return checkpoint_name(
    jnp.where(is_valid, project(hidden, params.wo, params.wo_bias), 0), 'expert_output'
  )


def _in_row_tiles(num_rows):
  """Return `num_rows` rounded up to complete tiles: of 512 rows, the largest, or of 256 where that adds many rows."""
  multiple = 512 if num_rows >= 4096 else 256
  return -(-num_rows // multiple) * multiple


# ---- Any backend ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PaddedBlocks:
  """Blocks of tiles, each with rows of one expert; see `blocks.Blocks`.

  Attributes:
    tile_rows: number of rows of a tile.
    num_tiles: number of tiles of a block.
  """

  tile_rows: int
  num_tiles: int

  @classmethod
  def for_rows(cls, balanced_rows: int, num_experts: int) -> 'PaddedBlocks':
    """Return blocks for `balanced_rows` rows in all, of which each expert has about an even share.

    >>> PaddedBlocks.for_rows(4096, 16), PaddedBlocks.for_rows(10**6, 4)
    (PaddedBlocks(tile_rows=320, num_tiles=2), PaddedBlocks(tile_rows=1016, num_tiles=4))
    """
    share = _TILE_MARGIN * balanced_rows / num_experts
    per_expert = math.ceil(share / _LARGEST_PADDED_TILE)
    rows = int(share / per_expert)
    # Sizes that processors like, as far as they are not much smaller than the share.
    rows -= rows % min(1 << max(rows.bit_length() - 4, 0), 8)
    tile_rows = max(rows, _SMALLEST_PADDED_TILE)
    # Copies of weights in a block are at most those of all experts.
    return cls(tile_rows, min(math.ceil(per_expert * num_experts / _BLOCKS_PER_SHARE), num_experts))

  def _tile_ends(self, group_sizes):
    """Return int32 [E], one past the last tile of each expert."""
    return jnp.cumsum(-(-group_sizes // self.tile_rows))

  def num_blocks(self, group_sizes: jax.Array) -> jax.Array:
    return -(-self._tile_ends(group_sizes)[-1] // self.num_tiles)

  def block(self, group_sizes: jax.Array, index: jax.Array) -> Block:
    row_ends = jnp.cumsum(group_sizes)
    tile_ends = self._tile_ends(group_sizes)
    tile = index * self.num_tiles + jnp.arange(self.num_tiles, dtype=jnp.int32)
    expert = jnp.minimum(
      jnp.searchsorted(tile_ends, tile, side='right'), group_sizes.shape[0] - 1
    ).astype(jnp.int32)
    ends = jnp.take(row_ends, expert)
    sizes = jnp.take(group_sizes, expert)
    of_expert = tile - jnp.take(tile_ends, expert) + -(-sizes // self.tile_rows)
    starts = jnp.minimum(ends - sizes + of_expert * self.tile_rows, row_ends[-1])
    return Block(starts, jnp.clip(ends - starts, 0, self.tile_rows), expert)

  def params_of(self, params: MlpParams, block: Block) -> MlpParams:
    return jax.tree.map(lambda param: jnp.take(param, block.groups, axis=0), params)

  def add_grads(self, total: MlpParams, grads: MlpParams, block: Block) -> MlpParams:
    return jax.tree.map(
      lambda total, grad: total.at[block.groups].add(grad.astype(jnp.float32)), total, grads
    )

  def mlp(
    self, params: MlpParams, rows: jax.Array, block: Block, spec: MlpSpec, keep: jax.Array | None
  ) -> jax.Array:
    # The cast follows the copy, so that gradients of an expert's tiles are summed in float32.
    return batched_mlp(params, rows, spec, keep)


def padded_mlp(
  params: MlpParams,
  x: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  balanced_rows: int | None = None,
  plan: RowPlan | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows, by batched products of tiles; see `mlp_by_products`."""
  if plan is None:
    num_rows = x.shape[0]
  else:
    num_rows = plan.row_choice.shape[0]
  if num_rows == 0:
    return jnp.zeros((0, x.shape[1]), spec.dtype)
  blocks = PaddedBlocks.for_rows(balanced_rows or num_rows, group_sizes.shape[0])
  return mlp_in_blocks(blocks, params, x, group_sizes, spec, keep, plan)
