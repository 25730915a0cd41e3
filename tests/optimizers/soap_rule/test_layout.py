"""Blocks of parameters in SOAP."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite.optimizers.soap_rule import layout as layout_lib
from tests.optimizers.soap_rule import soap_cases


def _layout(shape, **options):
  return layout_lib.layout_of(shape, soap_cases.config(**options))


@pytest.mark.parametrize(
  'shape,options,stack_shapes',
  [
    ((4, 6), {}, ((1, 4), (1, 6))),
    ((4, 6), {'max_precond_dim': 5}, ((1, 4),)),
    ((4, 6), {'max_precond_dim': 3}, ()),
    # The vocabulary is neither rotated nor split.
    ((40, 6), {'max_precond_dim': 20, 'block_size': 3}, ((2, 3),)),
    ((7, 6), {'block_size': 3}, ((4, 3), (4, 3), (2, 1), (2, 3))),
    ((4, 1, 6), {}, ((1, 4), (1, 6))),
    ((2, 3, 6), {'merge_dims': True, 'max_precond_dim': 6}, ((1, 6), (1, 6))),
    ((2, 3), {'merge_dims': True}, ((1, 6),)),
    ((6,), {}, ()),
    ((6,), {'precondition_1d': True}, ((1, 6),)),
    ((), {'precondition_1d': True}, ()),
    ((1, 1), {'merge_dims': True}, ()),
  ],
)
def test_matrices_of_a_parameter(shape, options, stack_shapes):
  layout = _layout(shape, **options)
  assert layout.stack_shapes == stack_shapes
  assert layout.is_preconditioned == bool(stack_shapes)
  if not stack_shapes:
    return
  array = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
  np.testing.assert_array_equal(layout.join(layout.cut(array)), array)
  products = layout.statistics(array, layout_lib.PRECISION)
  assert [stack.shape for stack in products] == [(k, n, n) for k, n in stack_shapes]


def test_a_rotation_and_its_inverse():
  rng = np.random.default_rng(0)
  layout = _layout((5, 2, 7), max_precond_dim=6)
  (blocks,) = layout.cut(jnp.asarray(rng.normal(size=[5, 2, 7]), jnp.float32))
  first = np.linalg.qr(rng.normal(size=[5, 5]))[0].astype(np.float32)
  second = np.linalg.qr(rng.normal(size=[2, 2]))[0].astype(np.float32)
  (of_dims,) = layout_lib.by_group(layout, [first[None], second[None]])
  rotated = layout_lib.rotate(blocks, of_dims)
  want = np.einsum('ai,bj,kabc->kijc', first, second, blocks)
  np.testing.assert_allclose(rotated, want, atol=1e-5)
  np.testing.assert_allclose(layout_lib.rotate_back(rotated, of_dims), blocks, atol=1e-5)


def test_elements_move_with_their_columns():
  blocks = jnp.arange(12.0).reshape(2, 3, 2)
  orders = [jnp.asarray([[2, 0, 1], [0, 1, 2]]), None]
  got = layout_lib.reorder(blocks, orders)
  np.testing.assert_array_equal(got, [[[4, 5], [0, 1], [2, 3]], [[6, 7], [8, 9], [10, 11]]])
  orders = [None, jnp.asarray([[1, 0], [0, 1]])]
  assert layout_lib.reorder(blocks, orders)[0].tolist() == [[1, 0], [3, 2], [5, 4]]


def test_the_defaults_of_the_package_leave_blocks_whole():
  state = optimizers.soap(0.1).optax_optimizer.init({'w': jnp.zeros([300, 20])})
  assert [stack.shape for stack in state.params['w'].bases] == [(1, 300, 300), (1, 20, 20)]
