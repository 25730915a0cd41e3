"""Grouped expert MLP for GPU and TPU, by JAX's Pallas kernels, and for any backend, by plain operations.

| kernel | runs on | experts' dims | dtypes |
|---|---|---|---|
| `mosaic_gpu` | Hopper GPUs | multiples of 64 | bfloat16, float16 |
| `megablox` | TPUs | multiples of 128 | bfloat16, float32 |
| `padded` | all | any | any |

All are exact. `padded` divides each expert's rows into tiles of about an even share and gathers a weight copy per tile:
at most twice the products, twice the rows and one more copy of the weights. Accelerators use it where the fast kernel
is not supported.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moe.dispatch.mlp import activate, batched_mlp
from moe.dispatch.types import MlpParams, MlpSpec
from moe.routing import plan as plans
from moe.routing.plan import RowPlan

# Rows are padded to a multiple of this.
_ROW_TILE = 128
_LARGEST_PADDED_TILE, _SMALLEST_PADDED_TILE = 1024, 8

# (rows [N, in] sorted by expert, kernels [E, in, out], group_sizes [E]) -> products of rows and kernels [N, out]. Rows
# past the sum of group_sizes are arbitrary.
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


# ---- Hopper ---------------------------------------------------------------------------------------------------------


def mosaic_gpu_unsupported_reason(params: MlpParams, spec: MlpSpec) -> str | None:
  """Return the reason why `mosaic_gpu_mlp` does not support `params` and `spec` on this device; None if it does."""
  capability = getattr(jax.devices()[0], 'compute_capability', None)
  if capability != '9.0':
    return f'needs a Hopper GPU (compute capability 9.0), got {capability}'
  return mosaic_gpu_unsupported_shapes(params, spec)


def mosaic_gpu_unsupported_shapes(params: MlpParams, spec: MlpSpec) -> str | None:
  """Return the reason why `mosaic_gpu_mlp` does not support the dims of `params` or the dtype of `spec`, or None."""
  if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
    return f'computes in bfloat16 or float16, got {jnp.dtype(spec.dtype)}'
  _, hidden, width = params.wo.shape
  if hidden % 64 or width % 64:
    return f'needs width and hidden units that are multiples of 64, got {width} and {hidden}'
  return None


def _block(size: int) -> int:
  return 128 if size % 128 == 0 else 64


@jax.custom_vjp
def mosaic_gpu_product(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
  """Return products of rows, see `GroupedProduct`; N is a multiple of 128, and arbitrary rows are finite."""
  return _mosaic_product(rows, kernels, group_sizes, transpose=False)


def _mosaic_product(rows, kernels, group_sizes, *, transpose):
  from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu  # Importable only in GPU builds.
  width = kernels.shape[1 if transpose else 2]
  return ragged_dot_mgpu.ragged_dot(
      rows, kernels, group_sizes=group_sizes, block_m=_ROW_TILE, block_n=_block(width), block_k=64,
      max_concurrent_steps=4, grid_block_n=1, transpose_rhs=transpose)


def _mosaic_product_fwd(rows, kernels, group_sizes):
  return mosaic_gpu_product(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _mosaic_product_bwd(residuals, grad):
  from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu
  rows, kernels, group_sizes = residuals
  kernels_grad = transposed_ragged_dot_mgpu.transposed_ragged_dot(
      rows, grad, group_sizes=group_sizes, block_m=_block(rows.shape[1]), block_n=_block(grad.shape[1]), block_k=64,
      max_concurrent_steps=4, grid_block_n=1)
  # The kernel may not write the gradients of experts without rows.
  kernels_grad = jnp.where((group_sizes > 0)[:, None, None], kernels_grad, 0)
  return _mosaic_product(grad, kernels, group_sizes, transpose=True), kernels_grad, None


mosaic_gpu_product.defvjp(_mosaic_product_fwd, _mosaic_product_bwd)


def mosaic_gpu_mlp(params: MlpParams, rows: jax.Array, group_sizes: jax.Array, spec: MlpSpec,
                   keep: jax.Array | None = None) -> jax.Array:
  """Return the experts' outputs for their rows, on a Hopper GPU; see `grouped_mlp`."""
  return mlp_by_products(mosaic_gpu_product, params, rows, group_sizes, spec, keep)


# ---- TPU ------------------------------------------------------------------------------------------------------------


def megablox_unsupported_reason(params: MlpParams, spec: MlpSpec) -> str | None:
  """Return the reason why `megablox_mlp` does not support `params` and `spec`; None if it does."""
  if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
    return f'computes in bfloat16 or float32, got {jnp.dtype(spec.dtype)}'
  _, hidden, width = params.wo.shape
  if hidden % 128 or width % 128:
    return f'needs width and hidden units that are multiples of 128, got {width} and {hidden}'
  return None


def megablox_product(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array, interpret: bool = False) -> jax.Array:
  """Return products of rows, see `GroupedProduct`; N is a multiple of 128. `interpret` emulates it without a TPU."""
  from jax.experimental.pallas.ops.tpu import megablox
  return megablox.gmm(rows, kernels, group_sizes, preferred_element_type=rows.dtype, interpret=interpret)


def megablox_mlp(params: MlpParams, rows: jax.Array, group_sizes: jax.Array, spec: MlpSpec,
                 keep: jax.Array | None = None) -> jax.Array:
  """Return the experts' outputs for their rows, on a TPU; see `grouped_mlp`."""
  return mlp_by_products(megablox_product, params, rows, group_sizes, spec, keep)


# ---- Hopper and TPU -------------------------------------------------------------------------------------------------


def mlp_by_products(product_fn: GroupedProduct, params: MlpParams, rows: jax.Array, group_sizes: jax.Array,
                    spec: MlpSpec, keep: jax.Array | None) -> jax.Array:
  """Return the experts' outputs for their rows; see `grouped_mlp`.

  Args:
    product_fn: product of rows with their experts' kernels.
    params: parameters of the experts.
    rows: <float>[N, D] sorted by expert.
    group_sizes: int32 [E].
    spec: computation of an expert.
    keep: bool [N, F] for dropout, or None.

  Returns:
    <spec.dtype>[N, D].
  """
  num_rows = rows.shape[0]
  if num_rows == 0:
    return jnp.zeros(rows.shape, spec.dtype)
  padding = ((0, -num_rows % _ROW_TILE), (0, 0))
  rows = jnp.pad(rows.astype(spec.dtype), padding)
  keep = None if keep is None else jnp.pad(keep, padding)
  ends = jnp.cumsum(group_sizes)
  row = jnp.arange(rows.shape[0], dtype=jnp.int32)
  expert = jnp.searchsorted(ends, row, side='right')
  is_valid = (row < ends[-1])[:, None]
  rows = jnp.where(is_valid, rows, 0)

  def project(x, kernels, biases):
    y = product_fn(x, kernels.astype(spec.dtype), group_sizes.astype(jnp.int32))
    # Uninitialized memory may contain NaN or infinity, whose products with 0 are NaN.
    y = jnp.where(is_valid, y, 0)
    return y if biases is None else y + jnp.take(biases.astype(spec.dtype), expert, axis=0, mode='clip')

  biases = params.wi_bias or (None,) * len(params.wi)
  pre = [project(rows, *each) for each in zip(params.wi, biases, strict=True)]
  hidden = jnp.where(is_valid, activate(checkpoint_name(pre, 'expert_hidden'), keep, spec), 0)
  out = jnp.where(is_valid, project(hidden, params.wo, params.wo_bias), 0)
  return checkpoint_name(out, 'expert_output')[:num_rows]


# ---- Any backend ----------------------------------------------------------------------------------------------------


def padded_tile_size(num_rows: int, num_experts: int) -> int:
  """Return the number of rows of a tile of `padded_mlp`, about `num_rows` / `num_experts`.

  >>> padded_tile_size(4096, 16), padded_tile_size(100, 8), padded_tile_size(10**6, 4)
  (256, 16, 1024)
  """
  share = -(-num_rows // num_experts)
  rounded = -(-share // _SMALLEST_PADDED_TILE) * _SMALLEST_PADDED_TILE
  return max(min(rounded, _LARGEST_PADDED_TILE), _SMALLEST_PADDED_TILE)


def _tile_plan(num_rows: int, group_sizes: jax.Array) -> tuple[RowPlan, jax.Array, int]:
  """Return (plan from rows to rows of tiles, the expert of each tile int32 [tiles], number of rows of a tile)."""
  num_experts = group_sizes.shape[0]
  size = padded_tile_size(num_rows, num_experts)
  num_tiles = num_rows // size + num_experts
  tiles_of_expert = -(-group_sizes // size)
  ends, tile_ends = jnp.cumsum(group_sizes), jnp.cumsum(tiles_of_expert)
  starts, tile_starts = ends - group_sizes, tile_ends - tiles_of_expert

  row = jnp.arange(num_rows, dtype=jnp.int32)
  expert = jnp.minimum(jnp.searchsorted(ends, row, side='right'), num_experts - 1)
  target = jnp.take(tile_starts, expert) * size + row - jnp.take(starts, expert)
  target = jnp.where(row < ends[-1], target, num_tiles * size).astype(jnp.int32)
  source = jnp.full((num_tiles * size,), num_rows, jnp.int32).at[target].set(row, mode='drop')
  tile_expert = jnp.searchsorted(tile_ends, jnp.arange(num_tiles, dtype=jnp.int32), side='right')
  return RowPlan(source, target), jnp.minimum(tile_expert, num_experts - 1), size


def padded_mlp(params: MlpParams, rows: jax.Array, group_sizes: jax.Array, spec: MlpSpec,
               keep: jax.Array | None = None) -> jax.Array:
  """Return the experts' outputs for their rows, by batched products of tiles; see `grouped_mlp`."""
  num_rows, width = rows.shape
  if num_rows == 0:
    return jnp.zeros(rows.shape, spec.dtype)
  plan, tile_expert, size = _tile_plan(num_rows, group_sizes.astype(jnp.int32))
  tiles = plans.dispatch(rows.astype(spec.dtype), plan).reshape(-1, size, width)
  if keep is not None:
    keep = jnp.take(keep, plan.row_choice, axis=0, mode='clip').reshape(-1, size, keep.shape[1])
  # The cast follows the copy, so that gradients of an expert's tiles are summed in the dtype of the weights.
  of_tiles = jax.tree.map(lambda x: jnp.take(x, tile_expert, axis=0).astype(spec.dtype), params)
  tiles = batched_mlp(of_tiles, tiles, spec, keep)
  return plans.combine(tiles.reshape(-1, width), jnp.ones((num_rows, 1), jnp.float32), plan)

