"""Shampoo's inverse roots: recorded numbers of the original, a float64 reading of its padding, the plan over steps."""

import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.errors import ConfigError
from t5x_lite.optimizers import shampoo
from t5x_lite.optimizers.shampoo import roots
from tests.optimizers.shampoo import roots_cases as cases

_ORDERS = (1, 2, 4, 6, 8)


def _random_matrix(rng, size, condition):
  """Symmetric, float32, largest eigenvalue 1, eigenvalues spaced evenly in the logarithm."""
  basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
  matrix = (basis * np.logspace(0, -np.log10(condition), size)) @ basis.T
  return ((matrix + matrix.T) / 2).astype(np.float32)


def _exact_root(matrix, p, largest=0.0, ridge_epsilon=1e-6):
  values, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
  values = values + ridge_epsilon * max(values[-1], largest, 1e-6)
  return (vectors * values ** (-1 / p)) @ vectors.T


def _distance(x, y):
  return np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)


# Every size costs a compilation.
_SIZES = [
  size if size in (5, 64) else pytest.param(size, marks=pytest.mark.full)
  for size in (2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64)
]


def _recorded(size):
  """Yield (p, row of the table, matrix, float32 root) of all recorded roots of matrices of a size."""
  matrices = cases.load('invroot_matrices')
  for p in _ORDERS:
    recorded = cases.load(f'invroot_out_p{p}')
    for row in recorded['table']:
      if row[0] == size:
        name = f'{size}_{int(row[1])}'
        yield p, row, matrices[f'A/{name}'], recorded[f'f32/{name}']


@pytest.mark.parametrize('size', _SIZES)
def test_coupled_newton_gives_the_recorded_roots(size):
  # By the compiler as users have it: its rounding decides which turn is the last, and here gives the recorded bits.
  root_fn = jax.jit(functools.partial(roots.inverse_pth_root, options=roots.RootOptions()))
  num_cases = 0
  for p, (_, condition, error, _, float32_error, *_), matrix, recorded in _recorded(size):
    root, reported = root_fn(matrix, jnp.int32(p))
    assert root.dtype == reported.dtype == jnp.float32
    assert _distance(root, recorded) <= max(1e-5, 10 * float32_error), (p, condition)
    np.testing.assert_allclose(reported, error, atol=1e-6)
    num_cases += 1
  assert num_cases >= 15


def test_a_static_order_gives_the_same_root_as_a_traced_one():
  matrix = cases.load('invroot_matrices')['A/8_2']
  for p in (6,):
    static, _ = jax.jit(functools.partial(roots.inverse_pth_root, p=p))(matrix)
    np.testing.assert_allclose(
      static, cases.root_fn()(matrix, jnp.int32(p))[0], rtol=1e-4, atol=1e-5
    )


def test_float64_roots_where_jax_allows_them():
  p = 2
  matrices, recorded = cases.load('invroot_matrices'), cases.load(f'invroot_out_p{p}')
  with jax.enable_x64(True):
    for name in (
      '2_4',
      '8_4',
      '8_6',
    ):  # the first one stops after one iteration, far from converged
      matrix = matrices[f'A/{name}'].astype(np.float64)
      root, error = cases.root_fn()(matrix, jnp.int32(p))
      assert root.dtype == jnp.float64 and error.dtype == jnp.float32
      np.testing.assert_allclose(root, recorded[f'f64/{name}'], rtol=1e-7, atol=1e-9)


def test_power_iteration_gives_the_recorded_eigenvalues():
  arrays = cases.load('invroot_matrices')
  for (size, condition), eigenvalue in zip(arrays['index'], arrays['power_iter_f32'], strict=True):
    if size in (2, 5, 64):
      matrix = arrays[f'A/{size}_{condition}']
      vector, estimate = jax.jit(roots.power_iteration)(matrix)
      np.testing.assert_allclose(estimate, eigenvalue, rtol=2e-6)
      np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-6)
      # The iteration stops at the tolerance of the eigenvalue, which is its square in the vector.
      assert np.linalg.norm(matrix @ vector - estimate * vector) < 0.05 * estimate


def test_the_names_and_signatures_of_the_original():
  matrix = cases.load('invroot_matrices')['A/8_2']
  vector, value = shampoo.power_iteration(matrix, num_iters=1000, error_tolerance=0.0)
  values, vectors = np.linalg.eigh(matrix)
  np.testing.assert_allclose(value, values[-1], rtol=1e-5)
  np.testing.assert_allclose(np.abs(vector @ vectors[:, -1]), 1, rtol=1e-5)
  assert not np.any(shampoo.power_iteration(jnp.zeros([3, 3]))[0])
  for p in (0, 1, 5):
    want = np.linalg.matrix_power(matrix, p)
    for order in (p, jnp.int32(p)):
      np.testing.assert_allclose(shampoo.mat_power(matrix, order), want, rtol=1e-4, atol=1e-6)
  root, error = shampoo.matrix_inverse_pth_root(matrix, 4, ridge_epsilon=1e-6)
  expected, reported = cases.root_fn()(matrix, jnp.int32(4))
  np.testing.assert_allclose(root, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(error, reported, atol=1e-6)
  assert shampoo.matrix_inverse_pth_root(matrix, 4, num_iters=1)[1] > error
  assert shampoo.matrix_inverse_pth_root(matrix, 4, error_tolerance=0.5)[1] > error
  blocks = np.concatenate([matrix[:4, :4], matrix[4:, :4], matrix[4:, 4:]], axis=1)
  np.testing.assert_allclose(
    shampoo.matrix_inverse_pth_root(blocks, 2)[0],
    shampoo.matrix_inverse_pth_root(matrix, 2)[0],
    rtol=1e-5,
  )


def _padded_root(matrix, p, padded_size, pad_value, num_iters=100, tolerance=1e-6):
  """The original's root of a padded matrix, in float64 and numpy; also its error and number of turns."""
  size = len(matrix)
  padded = pad_value * np.eye(padded_size)
  padded[:size, :size] = matrix
  vector, estimate = np.random.RandomState(1729).uniform(-1, 1, padded_size), 0.0
  for _ in range(100):
    vector = vector / np.linalg.norm(vector)
    product = padded @ vector
    old, estimate = estimate, vector @ product
    vector = product
    if abs(estimate - old) <= 1e-6:
      break
  ridge = 1e-6 * max(estimate, 1e-6)
  if padded_size == 1:
    return (padded + ridge) ** (-1 / p), 0.0, 0
  padded = padded + ridge * np.eye(padded_size)
  scale = (1 + p) / (2 * np.linalg.norm(padded))
  m, h = padded * scale, np.eye(padded_size) * scale ** (1 / p)
  error, turns = np.abs(m - np.eye(padded_size)).max(), 0
  result = h
  while turns < num_iters and error > tolerance:
    factor = (1 + 1 / p) * np.eye(padded_size) - m / p
    m = np.linalg.matrix_power(factor, p) @ m
    old_h, h = h, h @ factor
    old_error, error, turns = error, np.abs(m - np.eye(padded_size)).max(), turns + 1
    result = h
    if not error < 1.2 * old_error:
      result = old_h
      break
  return result[:size, :size], error, turns


@pytest.mark.parametrize(
  'size,padded_size,pad_value',
  [(1, 1, 1), (1, 7, 1), (3, 40, 1), (4, 4, 1), (9, 50, 1), (12, 13, 1), (1, 3, 0), (5, 9, 0)],
)
def test_padding_as_a_scalar_equals_padding(size, padded_size, pad_value):
  rng = np.random.default_rng([size, padded_size])
  num_turns = set()
  with jax.enable_x64(True):
    options = roots.RootOptions(padded_size=padded_size, pad_value=pad_value)
    root_fn = jax.jit(
      functools.partial(roots.inverse_pth_root, options=options),
      compiler_options=cases.FAST_COMPILE,
    )
    for p in (1, 2, 3, 4, 6, 8):
      for scale in (1e-6, 1e-2, 1.0, 30.0):
        matrix = scale * _random_matrix(rng, size, 10.0 ** rng.integers(0, 7)).astype(np.float64)
        expected, error, turns = _padded_root(matrix, p, padded_size, pad_value)
        root, reported = root_fn(matrix, jnp.int32(p))
        np.testing.assert_allclose(root, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())
        np.testing.assert_allclose(reported, error, rtol=1e-4, atol=1e-9)
        num_turns.add(turns)
  assert size == padded_size == 1 or len(num_turns) > 3


def test_padding_as_a_scalar_equals_padding_in_float32():
  rng = np.random.default_rng(0)
  for size, padded_size in ((3, 8),):
    for p in (2, 4):
      matrix = 0.01 * _random_matrix(rng, size, 100.0)
      padded = np.eye(padded_size, dtype=np.float32)
      padded[:size, :size] = matrix
      root, _ = cases.root_fn(padded_size=padded_size)(matrix, jnp.int32(p))
      assert (
        _distance(root, np.asarray(cases.root_fn()(padded, jnp.int32(p))[0])[:size, :size]) < 1e-5
      )


@pytest.mark.parametrize('size', _SIZES)
def test_eigh_is_no_worse_than_the_original_on_any_recorded_matrix(size):
  """Where the original is good to the last bit, 3e-7 is good enough."""
  for p, (_, condition, _, _, float32_error, *_), matrix, _ in _recorded(size):
    root, error = cases.root_fn('eigh')(matrix, jnp.int32(p))
    assert _distance(root, _exact_root(matrix, p)) <= max(float32_error, 3e-7), (p, condition)
    assert error < 2e-5


@pytest.mark.parametrize('num_gradients', (1, 5, 60))
def test_eigh_on_statistics_of_low_rank(num_gradients):
  """Null space of 32 - k dims: its eigenvalues are the ridge, which is only ten float32 roundings above zero."""
  rng = np.random.default_rng(num_gradients)
  grads = rng.standard_normal((32, num_gradients)) * np.logspace(0, -2, 32)[:, None]
  matrix = (grads @ grads.T).astype(np.float32)
  for p in (1, 2, 4):
    root, error = cases.root_fn('eigh')(matrix, jnp.int32(p))
    assert error < 1e-2
    assert _distance(root, _exact_root(matrix, p)) < (1e-3 if p == 1 else 1e-4)


def test_eigh_takes_the_ridge_of_the_padded_matrix():
  rng = np.random.default_rng(0)
  for scale in (1e-3, 3.0):
    matrix = scale * _random_matrix(rng, 8, 1e4)
    root, _ = cases.root_fn('eigh', padded_size=9)(matrix, jnp.int32(4))
    assert _distance(root, _exact_root(matrix, 4, largest=1.0)) < 1e-5


@pytest.mark.parametrize(
  'method', ['coupled_newton', 'auto', pytest.param('eigh', marks=pytest.mark.full)]
)
def test_odd_matrices(method):
  root_fn = cases.root_fn(method)
  for size in (1, 5):
    for p in (1, 4):
      root, error = root_fn(np.zeros((size, size), np.float32), jnp.int32(p))
      np.testing.assert_allclose(root, 1e12 ** (1 / p) * np.eye(size), rtol=1e-5)
      assert error < 1e-5
      for bad in (np.nan, np.inf):
        matrix = np.eye(size, dtype=np.float32)
        matrix[0, 0] = bad
        assert np.isnan(root_fn(matrix, jnp.int32(p))[1])
  negative = np.diag(
    np.array([1, 0.5, 0.1, -1e-8, -3e-8], np.float32)
  )  # as rounding leaves a null space
  root, error = root_fn(negative, jnp.int32(2))
  np.testing.assert_allclose(np.diagonal(root), np.diagonal(_exact_root(negative, 2)), rtol=0.03)
  assert error < 1e-5


def test_auto_is_eigh_on_cpu():
  matrix = _random_matrix(np.random.default_rng(0), 5, 1e5)
  np.testing.assert_array_equal(
    cases.root_fn('auto')(matrix, jnp.int32(4))[0], cases.root_fn('eigh')(matrix, jnp.int32(4))[0]
  )


def test_a_padded_size_below_the_size_is_rejected():
  with pytest.raises(
    ConfigError, match='padded_size` must be at least the size of the matrix, 3, got 2'
  ):
    roots.inverse_pth_root(jnp.eye(3), 2, roots.RootOptions(padded_size=2))


@pytest.mark.parametrize('method,limit', [('eigh', 4e-8), ('coupled_newton', 1e-3)])
def test_a_known_root_of_integers(method, limit):
  """The condition of the matrix is 7e5; its smallest eigenvalue follows from the characteristic polynomial."""
  matrix = np.array([[1195, -944, -224], [-944, 746, 177], [-224, 177, 42]])
  exact = np.array([[1, 1, 1], [1, 2, -3], [1, -3, 18]])
  np.testing.assert_array_equal(exact @ exact @ matrix, np.eye(3))
  options = roots.RootOptions(method=method, ridge_epsilon=0.0)
  root, _ = jax.jit(functools.partial(roots.inverse_pth_root, p=2, options=options))(
    jnp.asarray(matrix, jnp.float32)
  )
  assert np.abs(np.float64(root) - exact).max() <= limit * exact.max()
  np.testing.assert_allclose(np.linalg.eigvalsh(np.float64(matrix))[0], 2.8963977e-3, rtol=1e-8)
  # Exact: x^3 - 1983 x^2 + 351 x - 1 changes its sign at the eigenvalue, and is 0 at no other value below 0.17.
  signs = []
  for number in (28963977, 28963978, 29008677):
    x = fractions.Fraction(number, 10**10)
    signs.append(x**3 - 1983 * x**2 + 351 * x - 1 > 0)
  assert signs == [False, True, True]
