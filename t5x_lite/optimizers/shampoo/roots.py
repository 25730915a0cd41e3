"""Inverse p-th roots of symmetric positive semidefinite matrices, the costly step of Distributed Shampoo.

There are two methods. `coupled_newton` has the original's iteration, stopping rules and results. `eigh` diagonalises
and refines the result to an accuracy of a few float32 roundings, also for ill-conditioned matrices.

Both compute the root of `A + ridge I`, with `ridge = ridge_epsilon * max(lambda_max, 1e-6)`.

The original pads every matrix with an identity to the size of the model's largest block. The padding changes the
largest eigenvalue, hence the ridge, and the scale and the error of the iteration. [M 0; 0 I] iterates block by block,
and its lower block remains a multiple of the identity; so `padded_size` gives the padded result at the cost of one
scalar. Statistics stored as integers are padded with zeros, [M 0; 0 0]: `pad_value=0`.

Arithmetic is float32, or float64 if `jax_enable_x64` is on, as in the original.
"""

import dataclasses
import functools
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite import reductions
from t5x_lite.optimizers.shampoo import symmetric

METHODS = ('coupled_newton', 'eigh', 'auto')

# Limits of the coupled Newton iteration and the power iteration, unless they are given: number of steps; and the error,
# or change of the estimate, below which they stop.
_MAX_ITERATIONS = 100
_TOLERANCE = 1e-6
# The coupled Newton iteration stops if its error grows by more than this factor; smaller growth may be temporary.
_MAX_ERROR_GROWTH = 1.2
# Lower bound of the largest eigenvalue for the ridge, so that a zero matrix has a root.
_MIN_LARGEST_EIGENVALUE = 1e-6
# Limit of refinement steps after an eigendecomposition; at most one is usual.
_MAX_REFINEMENTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootOptions:
  """Options of the computation of roots.

  Attributes:
    method: `coupled_newton`, `eigh`, or `auto`: `eigh` on CPU, `coupled_newton` elsewhere.
    ridge_epsilon: ridge relative to the largest eigenvalue.
    precision: precision of the matrix products.
    padded_size: size to which the original would pad the matrix, or None for no padding.
    pad_value: value on the padded diagonal: 1, or 0 for quantized statistics.
    num_iters: `coupled_newton`: limit of the number of iterations.
    error_tolerance: `coupled_newton`: error below which the iteration stops.
  """

  method: str = 'coupled_newton'
  ridge_epsilon: float = 1e-6
  precision: lax.PrecisionLike = lax.Precision.HIGHEST
  padded_size: int | None = None
  pad_value: float = 1.0
  num_iters: int = _MAX_ITERATIONS
  error_tolerance: float = _TOLERANCE

  def num_padded(self, size: int) -> int:
    """Return the size of the block that pads a matrix of this size.

    Raises:
      ConfigError: the matrix is larger than `padded_size`.
    """
    if self.padded_size is not None and self.padded_size < size:
      raise checks.invalid(
        'RootOptions', 'padded_size', f'at least the size of the matrix, {size}', self.padded_size
      )
    if self.padded_size is None:
      return 0
    return self.padded_size - size


def matrix_inverse_pth_root(
  matrix: jax.Array,
  p: int | jax.Array,
  num_iters: int = _MAX_ITERATIONS,
  ridge_epsilon: float = 1e-6,
  error_tolerance: float = _TOLERANCE,
  precision: lax.PrecisionLike = lax.Precision.HIGHEST,
) -> tuple[jax.Array, jax.Array]:
  """Compute `(matrix + ridge I)^(-1/p)` by the coupled Newton iteration, as the original implementation.

  The computation is in float32, or in float64 if `jax_enable_x64` is on.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite; or its blocks, see `materialize_matrix_from_concat`.
    p: positive integer, or an int32 scalar array.
    num_iters: limit of the number of iterations.
    ridge_epsilon: ridge relative to the largest eigenvalue, or to 1e-6 if that is larger.
    error_tolerance: the iteration stops when the largest entry of `root^p matrix - I` is not above this.
    precision: precision of the matrix products.

  Returns:
    The root, in the dtype of `matrix`, and its error, a float32 scalar.

  >>> root, error = matrix_inverse_pth_root(jnp.diag(jnp.array([4.0, 9.0])), 2)
  >>> root.round(3).tolist(), bool(error < 1e-4)
  ([[0.5, 0.0], [0.0, 0.333...]], True)
  """
  if matrix.shape[-2] != matrix.shape[-1]:
    matrix = symmetric.materialize_matrix_from_concat(matrix)
  options = RootOptions(
    num_iters=num_iters,
    ridge_epsilon=ridge_epsilon,
    error_tolerance=error_tolerance,
    precision=precision,
  )
  return inverse_pth_root(matrix, p, options)


def inverse_pth_root(
  matrix: jax.Array, p: int | jax.Array, options: RootOptions = RootOptions()
) -> tuple[jax.Array, jax.Array]:
  """Compute `(matrix + ridge I)^(-1/p)`.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite.
    p: positive integer, or an int32 scalar array (at the cost of some more matrix products).
    options: method and accuracy.

  Returns:
    The root, in the dtype of `matrix`, and its error, a float32 scalar: the largest entry of `root^p A - I` as measured
    by the method (see the functions below), or NaN if the root is invalid.

  Raises:
    ConfigError: `padded_size` below n.
  """
  if matrix.shape[-1] + options.num_padded(matrix.shape[-1]) == 1:
    return _root_of_scalar(matrix, p, options.ridge_epsilon)
  if options.method == 'auto':
    # Not an argument, because arguments are traced, and a static order saves matrix products.
    return lax.platform_dependent(
      matrix,
      cpu=functools.partial(eigh_root, p=p, options=options),
      default=functools.partial(coupled_newton_root, p=p, options=options),
    )
  if options.method == 'coupled_newton':
    return coupled_newton_root(matrix, p, options)
  return eigh_root(matrix, p, options)


def _root_dtype() -> jnp.dtype:
  """Return the dtype of all computations: float64 if the process allows it."""
  return jax.dtypes.canonicalize_dtype(np.float64)


def _root_of_scalar(matrix, p, ridge_epsilon):
  """Return the root of a 1 x 1 matrix and its error, 0 or NaN."""
  wide = matrix.astype(_root_dtype())
  _, largest = power_iteration(wide)
  ridge = ridge_epsilon * jnp.maximum(largest, _MIN_LARGEST_EIGENVALUE)
  root = (wide + ridge) ** (-1 / jnp.asarray(p, wide.dtype))
  error = jnp.where(jnp.isfinite(root[0, 0]), 0.0, jnp.nan).astype(jnp.float32)
  return root.astype(matrix.dtype), error


def power_iteration(
  matrix: jax.Array,
  num_iters: int = _MAX_ITERATIONS,
  error_tolerance: float = _TOLERANCE,
  precision: lax.PrecisionLike = lax.Precision.HIGHEST,
  *,
  num_padded: int = 0,
  pad_value: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Return an eigenvector and the largest eigenvalue, estimated by power iteration from a fixed start vector.

  The iteration stops when two estimates differ by no more than an absolute tolerance, hence early for tiny matrices,
  as in the original. A padding block, a multiple of the identity, does not change the direction of the vector's lower
  part, so that only its norm is computed.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite.
    num_iters: limit of the number of iterations.
    error_tolerance: change of the eigenvalue at which the iteration stops.
    precision: precision of the matrix products.
    num_padded: size of the padding block.
    pad_value: its multiple of the identity.

  Returns:
    The eigenvector <float>[n], of length 1 together with its part in the padding, and the eigenvalue <float>[]; zeros
    for a zero matrix.
  """
  size = matrix.shape[-1]
  start = np.random.RandomState(1729).uniform(-1.0, 1.0, size + num_padded).astype(matrix.dtype)
  pad_norm = jnp.asarray(np.linalg.norm(start[size:]), matrix.dtype)

  def body(state):
    i, vector, pad_norm, old, _ = state
    norm = jnp.sqrt(jnp.sum(vector * vector) + pad_norm * pad_norm)
    vector = vector / norm
    pad_norm = pad_norm / norm
    product = jnp.matmul(matrix, vector, precision=precision)
    quotient = jnp.vdot(vector, product, precision=precision)
    estimate = quotient + pad_value * pad_norm * pad_norm
    has_changed = jnp.abs(estimate - old) > error_tolerance
    return i + 1, product, pad_value * pad_norm, estimate, has_changed

  def continues(state):
    return (state[0] < num_iters) & state[-1]

  zero = jnp.zeros([], matrix.dtype)
  state = (jnp.int32(0), jnp.asarray(start[:size]), pad_norm, zero, jnp.bool_(True))
  _, vector, pad_norm, eigenvalue, _ = lax.while_loop(continues, body, state)
  norm = jnp.sqrt(jnp.sum(vector * vector) + pad_norm * pad_norm)
  return vector / jnp.where(norm > 0, norm, 1), eigenvalue


def mat_power(
  mat_m: jax.Array, p: int | jax.Array, precision: lax.PrecisionLike = lax.Precision.HIGHEST
) -> jax.Array:
  """Compute `mat_m^p` by repeated squaring.

  Args:
    mat_m: <float>[..., n, n].
    p: integer >= 0; if it is traced, a loop over its bits costs two more products.
    precision: precision of the matrix products.

  Returns:
    <float>[..., n, n].
  """

  def multiply(a, b):
    return jnp.matmul(a, b, precision=precision)

  identity = jnp.broadcast_to(jnp.eye(mat_m.shape[-1], dtype=mat_m.dtype), mat_m.shape)
  if isinstance(p, (int, np.integer)):
    if p == 0:
      return identity
    power = None
    while True:
      if p % 2 and power is None:
        power = mat_m
      elif p % 2:
        power = multiply(mat_m, power)
      p //= 2
      if not p:
        assert power is not None  # `p` is positive, so that its last bit is 1.
        return power
      mat_m = multiply(mat_m, mat_m)

  def body(state):
    p, power, square = state
    power = jnp.where(p % 2 == 1, multiply(square, power), power)
    return p // 2, power, multiply(square, square)

  return lax.while_loop(lambda state: state[0] > 0, body, (p, identity, mat_m))[1]


def coupled_newton_root(
  matrix: jax.Array, p: int | jax.Array, options: RootOptions = RootOptions()
) -> tuple[jax.Array, jax.Array]:
  """Compute `(matrix + ridge I)^(-1/p)` by the coupled Newton iteration.

  Higham, Functions of Matrices (2008), equation 7.18: M converges to I while H converges to the root. The largest
  eigenvalue comes from `power_iteration`. The iteration ends when the largest entry of M - I is small enough, or has
  grown by more than a fifth in one iteration: then the previous iterate is returned, with the error of the last.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite, not 1 x 1 unless padded.
    p: positive integer, or an int32 scalar array.
    options: ridge, precision and padding.

  Returns:
    The root, in the dtype of `matrix`, and the largest entry of M - I of the last iteration, float32.
  """
  num_padded = options.num_padded(matrix.shape[-1])
  precision = options.precision
  wide = matrix.astype(_root_dtype())
  identity = jnp.eye(matrix.shape[-1], dtype=wide.dtype)
  order = jnp.asarray(p, wide.dtype)
  alpha = -1 / order
  _, largest = power_iteration(
    wide, precision=precision, num_padded=num_padded, pad_value=options.pad_value
  )
  ridge = options.ridge_epsilon * jnp.maximum(largest, _MIN_LARGEST_EIGENVALUE)

  def error_of(m, pad_m):
    error = reductions.largest_magnitude(m - identity)
    if num_padded:
      return jnp.maximum(error, jnp.abs(pad_m - 1))
    return error

  def body(state):
    i, m, pad_m, h, _, error, _ = state
    factor = (1 - alpha) * identity + alpha * m
    pad_factor = (1 - alpha) + alpha * pad_m
    new_m = jnp.matmul(mat_power(factor, p, precision), m, precision=precision)
    new_pad_m = pad_factor**order * pad_m
    new_h = jnp.matmul(h, factor, precision=precision)
    new_error = error_of(new_m, new_pad_m)
    return i + 1, new_m, new_pad_m, new_h, h, new_error, new_error < error * _MAX_ERROR_GROWTH

  def continues(state):
    return (state[0] < options.num_iters) & (state[-2] > options.error_tolerance) & state[-1]

  damped = wide + ridge * identity
  # [] Frobenius norm of the damped matrix with its padding, an upper bound of the largest eigenvalue.
  sum_of_squares = jnp.sum(damped * damped) + num_padded * (options.pad_value + ridge) ** 2
  scale = (1 + order) / (2 * jnp.sqrt(sum_of_squares))
  # [n, n]: eigenvalues in (0, (1 + p) / 2], where the iteration converges.
  m = damped * scale
  pad_m = (options.pad_value + ridge) * scale
  h = identity * scale ** (1 / order)
  state = (jnp.int32(0), m, pad_m, h, h, error_of(m, pad_m), jnp.bool_(True))
  _, _, _, h, old_h, error, is_converging = lax.while_loop(continues, body, state)
  return jnp.where(is_converging, h, old_h).astype(matrix.dtype), error.astype(jnp.float32)


def eigh_root(
  matrix: jax.Array, p: int | jax.Array, options: RootOptions = RootOptions()
) -> tuple[jax.Array, jax.Array]:
  """Compute `(matrix + ridge I)^(-1/p)` by an eigendecomposition with refinement.

  A decomposition in float32 has errors of some roundings of the *largest* eigenvalue, which are as large as the
  smallest eigenvalue for a condition number of 1e6. Therefore, with the computed `A V ~ V diag(d)`, let
  `V^T A V = diag(d) + G`, where G follows from the residual `A V - V diag(d)`, computed without the rounding of a plain
  product (`_decompose`). The half and the quarter with the smallest eigenvalues are decomposed again. To first order
  the root of `diag(d) + G` is `diag(d^(-1/p)) + F * G`, with F the divided differences of `x^(-1/p)` (Higham, Functions
  of Matrices, 2008, theorem 3.11). Refinement steps are similar: if X is almost a root, `X + F * (A X^p A - A)` has
  about the square of its error. Everything is scaled by the square roots of the eigenvalues, so that relative errors
  of small and large eigenvalues are equal.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite. Eigenvalues that are negative by rounding are replaced, with
      the ridge, by at least a quarter of the ridge.
    p: positive integer, or an int32 scalar array.
    options: ridge, relative to the exact largest eigenvalue; padding, whose value may be the largest eigenvalue; and
      precision.

  Returns:
    The root, in the dtype of `matrix`, and the largest entry of A^(1/2) X^p A^(1/2) - I in the basis V, float32; NaN if
    the matrix is not finite. As with the other method, it does not include early roundings.
  """
  size = matrix.shape[-1]
  identity = jnp.eye(size, dtype=_root_dtype())
  is_finite = jnp.all(jnp.isfinite(matrix))
  wide = jnp.where(is_finite, matrix.astype(identity.dtype), identity)
  order = jnp.asarray(p, identity.dtype)
  multiply = functools.partial(jnp.matmul, precision=options.precision)
  if options.num_padded(size):
    pad_value = options.pad_value
  else:
    pad_value = 0.0

  values, vectors, gap = _decompose(wide, multiply)
  for num_small in (size // 2, size // 4):
    if num_small > 1:  # a 1 x 1 matrix is its eigenvalue
      values, vectors, gap = _decompose_again(values, vectors, gap, num_small, multiply)
  ridge = options.ridge_epsilon * jnp.maximum(values[-1], max(pad_value, _MIN_LARGEST_EIGENVALUE))

  damped = jnp.maximum(values + jnp.diagonal(gap) + ridge, ridge / 4)
  gap = jnp.where(identity > 0, 0, gap)
  scales = jnp.sqrt(damped)
  scales = scales[:, None] * scales
  scaled = identity + gap / scales
  differences = _divided_differences(damped, order)

  def continues(state):
    i, _, _, error, old_error = state
    is_inexact = error > 32 * jnp.finfo(error.dtype).eps
    return (i < _MAX_REFINEMENTS) & is_inexact & (error < old_error / 2)

  def body(state):
    i, root, excess, error, _ = state
    step = multiply(excess, scaled)
    root = root + differences * scales * (step + step.T) / 2
    excess = excess_of(root)
    return i + 1, root, excess, reductions.largest_magnitude(excess), error

  def excess_of(root):
    power = mat_power(root, p, options.precision)
    return multiply(scaled, power * scales) - identity

  root = jnp.diag(damped ** (-1 / order)) + differences * gap
  excess = excess_of(root)
  error = reductions.largest_magnitude(excess)
  state = (jnp.int32(0), root, excess, error, jnp.full_like(error, jnp.inf))
  _, root, _, error, _ = lax.while_loop(continues, body, state)
  root = multiply(multiply(vectors, root), vectors.T)
  error = jnp.where(is_finite, error, jnp.nan)
  return root.astype(matrix.dtype), error.astype(jnp.float32)


def _decompose(matrix, multiply):
  """Return values d, orthogonal vectors V and the residual G = V^T matrix V - diag(d)."""
  values, vectors = jnp.linalg.eigh(matrix)
  off = multiply(vectors.T, vectors) - jnp.eye(len(values), dtype=values.dtype)
  vectors = vectors - multiply(vectors, off) / 2  # orthogonal up to a rounding
  gap = multiply(vectors.T, _residual(matrix, values, vectors, multiply))
  return values, vectors, (gap + gap.T) / 2


def _decompose_again(values, vectors, gap, num_small, multiply):
  """Return the decomposition with the space of the smallest values decomposed again, at their scale."""
  small = slice(None, num_small)
  large = slice(num_small, None)
  small_matrix = jnp.diag(values[small]) + gap[small, small]
  small_values, rotation, small_gap = _decompose(small_matrix, multiply)
  cross = multiply(rotation.T, gap[small, large])
  gap = jnp.block([[small_gap, cross], [cross.T, gap[large, large]]])
  vectors = jnp.concatenate([multiply(vectors[:, small], rotation), vectors[:, large]], axis=1)
  return jnp.concatenate([small_values, values[large]]), vectors, gap


def _residual(matrix, values, vectors, multiply):
  """Return `matrix @ vectors - vectors * values`, with an error far below the rounding of the first product.

  Both factors are split into leading bits, on a grid so coarse that sums of products are exact, and the remainder.
  """

  def leading_bits(x, axis):
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    grid = jnp.ldexp(jnp.ones([], x.dtype), num_bits - exponent)
    return jnp.round(x * grid) / grid

  # A sum of n products of heads fits into the mantissa.
  bits_of_sum = math.ceil(math.log2(max(matrix.shape[-1], 2)))
  num_bits = (jnp.finfo(matrix.dtype).nmant + 1 - bits_of_sum) // 2
  matrix_head = leading_bits(matrix, 1)
  vectors_head = leading_bits(vectors, 0)
  exact = multiply(matrix_head, vectors_head) - vectors * values
  rest = multiply(matrix_head, vectors - vectors_head) + multiply(matrix - matrix_head, vectors)
  return exact + rest


def _divided_differences(values, order):
  """Return [n, n] `(f(x) - f(y)) / (x - y)` for all pairs of n positive values, f being `x^(-1/order)`.

  Pairs closer than a thousandth have the mean of their derivatives, with an error of at most 1e-6. The other pairs lose
  up to three digits, which hardly slows the refinement.
  """
  power = values ** (-1 / order)
  slope = -power / values / order
  difference = values[:, None] - values
  is_close = jnp.abs(difference) < 1e-3 * jnp.maximum(values[:, None], values)
  quotient = (power[:, None] - power) / jnp.where(is_close, 1, difference)
  return jnp.where(is_close, (slope[:, None] + slope) / 2, quotient)
