"""Tile sizes of the grouped products on a TPU (`megablox`), by shape and dtype.

No TPU was available, so these sizes are reasoned, not measured. A tile of rows multiplies the kernels of all experts
that have rows in it, so it has at most half of an expert's rows: then the rows computed twice are at most half of all.
Tiles of the kernels are as large as memory allows, since each is read again for every tile of rows: a product of tiles
[tm, tk] and [tk, tn] has tm FLOPs per 2 bytes of kernel in bfloat16.

The memory is the compiler's limit for a kernel's VMEM, which `megablox.gmm` cannot raise: 16 MiB, all VMEM of a TPU v2,
v3 and v4 and the default of the later ones (v5e and v6e have 128 MiB, v5p and v7x 64 MiB). Input and output tiles are
held twice, since the next ones are read while a tile is multiplied.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# Multiples of this, in both dims of a tile.
LANES = 128
VMEM_BUDGET = 14 * 2**20  # of 16 MiB: the rest is the compiler's
_LARGEST_ROWS = 512
_LARGEST_DIM = 1024

# (in, out, bytes of an element) -> tile of a kernel, where the rule below has only small ones: the hidden units of T5
# 1.1 large (2816 = 22 * 128) and of fine-grained experts (1408 = 11 * 128) have no divisors between 2 and 11 lanes.
_KERNEL_TILES: Mapping[tuple[int, int, int], tuple[int, int]] = {
  (1024, 2816, 2): (512, 1408),
  (2816, 1024, 2): (1408, 512),
  (1024, 2816, 4): (256, 1408),
  (2816, 1024, 4): (1408, 256),
  (2048, 1408, 2): (512, 1408),
  (1408, 2048, 2): (1408, 512),
  (2048, 1408, 4): (256, 1408),
  (1408, 2048, 4): (1408, 256),
}


def row_tile(num_rows: int, rows_per_expert: int) -> int:
  """Return the rows of a tile, a power of two of 128 to 512, at most half of `rows_per_expert` if that is 256 or more.

  >>> row_tile(8192, 1024), row_tile(8192, 600), row_tile(8192, 10), row_tile(384, 10000)
  (512, 256, 128, 128)
  """
  size = _LARGEST_ROWS
  while size > LANES and (2 * size > rows_per_expert or num_rows % size):
    size //= 2
  return size


def product_vmem(tiling: tuple[int, int, int], itemsize: int) -> int:
  """Return the bytes of VMEM of `gmm` with this tiling: rows, kernel and result twice, sums in float32."""
  tm, tk, tn = tiling
  return 2 * itemsize * (tm * tk + tk * tn + tm * tn) + 4 * tm * tn


def kernel_grad_vmem(tiling: tuple[int, int, int], itemsize: int) -> int:
  """Return the bytes of VMEM of `tgmm`: rows, their gradients and result twice, sums and masked rows in float32."""
  tm, tk, tn = tiling
  return 2 * itemsize * (tm * tk + tm * tn + tk * tn) + 4 * (tk * tn + tm * tk + tm * tn)


def product_tiling(
  num_rows: int, rows_per_expert: int, dim_in: int, dim_out: int, dtype: Any
) -> tuple[int, int, int]:
  """Return the tiling (rows, in, out) of `gmm`, the product of rows [num_rows, in] and kernels [E, in, out].

  Args:
    num_rows: number of rows, a multiple of 128.
    rows_per_expert: mean number of rows of an expert.
    dim_in: size of a row, a multiple of 128.
    dim_out: size of a product, a multiple of 128.
    dtype: dtype of rows and kernels.

  >>> product_tiling(8192, 1024, 1024, 4096, 'bfloat16'), product_tiling(8192, 1024, 768, 3072, 'float32')
  ((512, 1024, 1024), (512, 768, 512))
  """
  itemsize = jnp.dtype(dtype).itemsize
  tm = row_tile(num_rows, rows_per_expert)
  known = _KERNEL_TILES.get((dim_in, dim_out, itemsize))
  if known:
    return (tm, *known)
  return _largest_fitting(tm, dim_in, dim_out, itemsize, product_vmem)


def kernel_grad_tiling(
  num_rows: int, rows_per_expert: int, dim_in: int, dim_out: int, dtype: Any
) -> tuple[int, int, int]:
  """Return the tiling of `tgmm`, the gradient of kernels [E, in, out]; see `product_tiling`.

  >>> kernel_grad_tiling(8192, 1024, 1024, 4096, 'bfloat16')
  (512, 1024, 512)
  """
  return _largest_fitting(
    row_tile(num_rows, rows_per_expert),
    dim_in,
    dim_out,
    jnp.dtype(dtype).itemsize,
    kernel_grad_vmem,
  )


def _largest_fitting(tm, dim_in, dim_out, itemsize, vmem_fn):
  largest = [_LARGEST_DIM, _LARGEST_DIM]
  while True:
    tiling = (tm, _divisor(dim_in, largest[0]), _divisor(dim_out, largest[1]))
    if vmem_fn(tiling, itemsize) <= VMEM_BUDGET:
      return tiling
    wider = 0 if tiling[1] > tiling[2] else 1
    largest[wider] = tiling[1 + wider] // 2


def _divisor(dim, largest):
  """Return the largest divisor of `dim` that is a multiple of 128 and at most `largest`, or 128."""
  return max((size for size in range(LANES, largest + 1, LANES) if dim % size == 0), default=LANES)
