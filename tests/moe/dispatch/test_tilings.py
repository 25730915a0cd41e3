"""Tilings of the TPU kernels fit in memory, divide the dims, and leave few rows to compute twice."""

import itertools

import pytest

from moe.dispatch import tilings

# Width and hidden units of T5 1.1, of Mixtral, and of fine-grained experts.
_DIMS = (
  (512, 1024),
  (768, 2048),
  (1024, 2816),
  (2048, 5120),
  (4096, 10240),
  (4096, 14336),
  (2048, 1408),
  (128, 128),
)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_tilings_fit_and_divide(dtype):
  itemsize = 2 if dtype == 'bfloat16' else 4
  for dims, rows_per_expert in itertools.product(_DIMS, (10, 300, 5000)):
    for dim_in, dim_out in (dims, dims[::-1]):
      for tiling_fn, vmem_fn in (
        (tilings.product_tiling, tilings.product_vmem),
        (tilings.kernel_grad_tiling, tilings.kernel_grad_vmem),
      ):
        tm, tk, tn = tiling = tiling_fn(8192, rows_per_expert, dim_in, dim_out, dtype)
        assert vmem_fn(tiling, itemsize) <= tilings.VMEM_BUDGET
        assert 8192 % tm == 0 and dim_in % tk == 0 and dim_out % tn == 0
        assert tk % tilings.LANES == 0 and tn % tilings.LANES == 0


def test_a_tile_has_at_most_half_of_an_experts_rows():
  for rows_per_expert in range(256, 2000, 50):
    assert tilings.row_tile(8192, rows_per_expert) <= rows_per_expert / 2
  assert tilings.row_tile(8192, 1000) == 256 and tilings.row_tile(128 * 3, 5000) == 128


def test_known_shapes_have_larger_tiles_than_the_rule():
  for (dim_in, dim_out, itemsize), tile in tilings._KERNEL_TILES.items():
    rule = tilings._largest_fitting(512, dim_in, dim_out, itemsize, tilings.product_vmem)
    assert tile[0] * tile[1] > rule[1] * rule[2], (dim_in, dim_out, itemsize, rule)
