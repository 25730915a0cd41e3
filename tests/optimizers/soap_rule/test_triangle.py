"""Symmetric matrices stored as triangles."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.optimizers.soap_rule import triangle


@pytest.mark.parametrize('size', [1, 2, 3, 4, 7, 8])
def test_a_packed_matrix_has_half_the_elements_and_comes_back(size):
  matrices = np.random.default_rng(0).normal(size=[2, 3, size, size])
  symmetric = jnp.asarray(matrices + np.swapaxes(matrices, -2, -1), jnp.float32)
  packed = triangle.pack(symmetric)
  assert packed.shape == (2, 3, -(-size // 2), size + 1)
  np.testing.assert_array_equal(triangle.unpack(packed), symmetric)


def test_only_the_upper_triangle_counts():
  matrix = jnp.arange(9.0).reshape(3, 3)
  want = [[0, 1, 2], [1, 4, 5], [2, 5, 8]]
  np.testing.assert_array_equal(triangle.unpack(triangle.pack(matrix)), want)
  np.testing.assert_array_equal(triangle.symmetric(matrix), want)
  # As drawn in the module.
  matrix = jnp.asarray([[1, 2, 3, 4], [0, 5, 6, 7], [0, 0, 8, 9], [0, 0, 0, 10]])
  np.testing.assert_array_equal(triangle.pack(matrix), [[10, 1, 2, 3, 4], [9, 8, 5, 6, 7]])
