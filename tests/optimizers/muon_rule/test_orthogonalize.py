"""Newton-Schulz on stacks of matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.optimizers.muon_rule import orthogonalize as orthogonalize_lib
from tests.optimizers.muon_rule import muon_reference


def _iteration(**options):
  defaults = dict(ns_coeffs='standard', ns_steps=5, preconditioning='frobenius', eps=1e-8)
  return orthogonalize_lib.Iteration(**{**defaults, **options})


def _orthogonalize(matrices, iteration):
  return orthogonalize_lib.orthogonalize(
    matrices, [[None] * (matrix.ndim - 2) for matrix in matrices], iteration
  )


def _random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_matrices_of_all_shapes_are_orthogonalized_one_by_one():
  shapes = [(4, 6), (6, 4), (3, 4, 6), (2, 3, 6, 4), (5, 5), (1, 4)]
  matrices = [_random(*shape, seed=i) for i, shape in enumerate(shapes)]
  results = _orthogonalize(list(map(jnp.asarray, matrices)), _iteration())
  for matrix, result in zip(matrices, results, strict=True):
    assert result.shape == matrix.shape
    units = zip(
      matrix.reshape(-1, *matrix.shape[-2:]),
      np.reshape(result, (-1, *matrix.shape[-2:])),
      strict=True,
    )
    for unit, found in units:
      expected = muon_reference.orthogonalized(np.float64(unit))
      np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize('preconditioning', ['frobenius', 'spectral', 'aol', 'schatten'])
def test_singular_values_come_near_one(preconditioning):
  (result,) = _orthogonalize(
    [jnp.asarray(1e3 * _random(2, 8, 12))], _iteration(preconditioning=preconditioning)
  )
  values = np.linalg.svd(result, compute_uv=False)
  assert np.all((values > 0.6) & (values < 1.3)), values


def test_rows_of_coefficients_are_the_iterations():
  rows = ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))
  matrix = jnp.asarray(_random(4, 6))
  (result,) = _orthogonalize([matrix], _iteration(ns_coeffs=rows))
  # The singular values follow the polynomials a s + b s^3 + c s^5.
  start = np.linalg.svd(matrix, compute_uv=False) / np.linalg.norm(matrix)
  for a, b, c in rows:
    start = a * start + b * start**3 + c * start**5
  found = np.linalg.svd(result, compute_uv=False)
  np.testing.assert_allclose(np.sort(found), np.sort(start), rtol=1e-4)


def test_zero_matrices_stay_zero():
  for preconditioning in ('frobenius', 'spectral', 'aol', 'schatten'):
    (result,) = _orthogonalize([jnp.zeros([2, 3])], _iteration(preconditioning=preconditioning))
    np.testing.assert_array_equal(result, np.zeros([2, 3]))


def test_large_stacks_are_computed_in_place_piece_by_piece():
  """Of 12 matrices of 1 MB one piece has 4, and the temporaries are those of a piece."""
  iteration = _iteration(ns_steps=1)
  stack = jax.ShapeDtypeStruct((12, 512, 512), np.float32)
  compiled = (
    jax.jit(lambda x: _orthogonalize([x], iteration), donate_argnums=0).lower(stack).compile()
  )
  assert compiled.memory_analysis().temp_size_in_bytes < 13 * 2**20
  matrices = _random(*stack.shape)
  results = np.asarray(compiled(jnp.asarray(matrices))[0])
  for i in (0, 3, 4, 11):
    expected = muon_reference.orthogonalized(np.float64(matrices[i]), num_steps=1)
    np.testing.assert_allclose(results[i], expected, atol=1e-5)
