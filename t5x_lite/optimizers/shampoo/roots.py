"""Inverse p-th roots of symmetric positive semidefinite matrices, the costly step of Distributed Shampoo.

Two methods. `coupled_newton` is the original's: the same iteration, stopping rules and numbers. `eigh` diagonalises
and refines the result until it is good to some float32 roundings, which the iteration is not on ill-conditioned
matrices.

Both damp first: the root is that of `A + ridge I`, with `ridge = ridge_epsilon * max(lambda_max, 1e-6)`.

The original pads every matrix with an identity up to the largest block of the whole model. The padding changes the
largest eigenvalue, hence the ridge, and the scale and the error of the iteration. [M 0; 0 I] iterates block by block,
and its lower block stays a multiple of the identity, so `padded_size` asks for the padded result and costs one scalar.
Statistics that it keeps as integers it pads with zeros, [M 0; 0 0]: `pad_value=0`.

Arithmetic is float32, or float64 where `jax_enable_x64` is on, as in the original.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from t5x_lite.errors import ConfigError, did_you_mean

RootMethod = Literal['coupled_newton', 'eigh', 'auto']
METHODS = ('coupled_newton', 'eigh', 'auto')

# Most steps of the coupled Newton iteration, and of the power iteration before it; the error below which the one stops,
# and the change of the estimate below which the other does.
_MAX_ITERATIONS = 100
_TOLERANCE = 1e-6
# The coupled Newton iteration gives up when an error exceeds the one before by more than this factor: it may rise
# before it falls.
_MAX_ERROR_GROWTH = 1.2
# The largest eigenvalue counts as at least this for the ridge, so that a zero matrix has a root.
_MIN_LARGEST_EIGENVALUE = 1e-6
# Most steps of refinement after an eigendecomposition; one or none is usual.
_MAX_REFINEMENTS = 4


def check_method(method: str) -> None:
  """Refuses an unknown `root_method`.

  Raises:
    ConfigError: `method` is none of `METHODS`.
  """
  if method not in METHODS:
    raise ConfigError(f'root_method is {method!r}, expected one of {METHODS}.{did_you_mean(method, METHODS)}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootOptions:
  """How roots are taken.

  Attributes:
    method: `coupled_newton`, `eigh`, or `auto`: `eigh` on CPU, `coupled_newton` elsewhere.
    ridge_epsilon: the ridge, in units of the largest eigenvalue.
    precision: of the matrix products.
    padded_size: size that the original would pad the matrix to, or None for no padding.
    pad_value: what it would put on the rest of the diagonal: 1, or 0 as it does to quantized statistics.

  Raises:
    ConfigError: an unknown method.
  """

  method: RootMethod = 'coupled_newton'
  ridge_epsilon: float = 1e-6
  precision: lax.PrecisionLike = lax.Precision.HIGHEST
  padded_size: int | None = None
  pad_value: float = 1.0

  def __post_init__(self):
    check_method(self.method)

  def num_padded(self, size: int) -> int:
    """Returns the size of the block that pads a matrix of this size.

    Raises:
      ConfigError: the matrix is larger than `padded_size`.
    """
    if self.padded_size is not None and self.padded_size < size:
      raise ConfigError(f'padded_size is {self.padded_size}, expected at least the size of the matrix, {size}.')
    return 0 if self.padded_size is None else self.padded_size - size


def inverse_pth_root(
    matrix: jax.Array, p: int | jax.Array, options: RootOptions = RootOptions()) -> tuple[jax.Array, jax.Array]:
  """Computes `(matrix + ridge I)^(-1/p)`.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite.
    p: positive integer, or an int32 scalar array (which costs some matrix products more).
    options: by which method, and how well.

  Returns:
    The root, in the dtype of `matrix`, and its error, a float32 scalar: the largest entry of `root^p A - I` as the
    method measures it (see the functions below). NaN where the root is unusable.

  Raises:
    ConfigError: `padded_size` below n.
  """
  if matrix.shape[-1] + options.num_padded(matrix.shape[-1]) == 1:
    return _root_of_scalar(matrix, p, options.ridge_epsilon)
  if options.method == 'auto':
    # The order stays out of the arguments, which are traced: a static one saves matrix products.
    return lax.platform_dependent(
        matrix, cpu=functools.partial(eigh_root, p=p, options=options),
        default=functools.partial(coupled_newton_root, p=p, options=options))
  return (coupled_newton_root if options.method == 'coupled_newton' else eigh_root)(matrix, p, options)


def _root_dtype() -> jnp.dtype:
  """The dtype of all computations here: float64 where the process allows it."""
  return jax.dtypes.canonicalize_dtype(np.float64)


def _root_of_scalar(matrix, p, ridge_epsilon):
  """The root of a 1 x 1 matrix, in closed form; its error is 0 by definition, or NaN."""
  wide = matrix.astype(_root_dtype())
  ridge = ridge_epsilon * jnp.maximum(power_iteration(wide), _MIN_LARGEST_EIGENVALUE)
  root = (wide + ridge) ** (-1 / jnp.asarray(p, wide.dtype))
  error = jnp.where(jnp.isfinite(root[0, 0]), 0.0, jnp.nan).astype(jnp.float32)
  return root.astype(matrix.dtype), error


def power_iteration(matrix: jax.Array, options: RootOptions = RootOptions()) -> jax.Array:
  """Estimates the largest eigenvalue by power iteration from a fixed start vector.

  The iteration stops when two estimates differ by no more than an absolute tolerance, hence early for tiny matrices,
  as in the original. A padding block, a multiple of the identity, keeps the direction of the vector's lower part:
  its norm is all that has to be carried.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite.
    options: precision and padding.

  Returns:
    <float>[], the eigenvalue; 0 of a zero matrix.
  """
  size = matrix.shape[-1]
  num_padded, pad_value = options.num_padded(size), options.pad_value
  start = np.random.RandomState(1729).uniform(-1.0, 1.0, size + num_padded).astype(matrix.dtype)
  pad_norm = jnp.asarray(np.linalg.norm(start[size:]), matrix.dtype)

  def body(state):
    i, vector, pad_norm, old, _ = state
    norm = jnp.sqrt(jnp.sum(vector * vector) + pad_norm * pad_norm)
    vector, pad_norm = vector / norm, pad_norm / norm
    product = jnp.matmul(matrix, vector, precision=options.precision)
    estimate = jnp.vdot(vector, product, precision=options.precision) + pad_value * pad_norm * pad_norm
    return i + 1, product, pad_value * pad_norm, estimate, jnp.abs(estimate - old) > _TOLERANCE

  def goes_on(state):
    return (state[0] < _MAX_ITERATIONS) & state[-1]

  zero = jnp.zeros([], matrix.dtype)
  state = (jnp.int32(0), jnp.asarray(start[:size]), pad_norm, zero, jnp.bool_(True))
  return lax.while_loop(goes_on, body, state)[3]


def matrix_power(
    matrix: jax.Array, p: int | jax.Array, precision: lax.PrecisionLike = lax.Precision.HIGHEST) -> jax.Array:
  """Computes `matrix^p` by repeated squaring.

  Args:
    matrix: <float>[..., n, n].
    p: positive integer; if it is traced, a loop runs over its bits and two products are wasted.
    precision: of the matrix products.

  Returns:
    <float>[..., n, n].
  """
  def multiply(a, b):
    return jnp.matmul(a, b, precision=precision)

  if isinstance(p, (int, np.integer)):
    power = None
    while True:
      if p % 2:
        power = matrix if power is None else multiply(matrix, power)
      p //= 2
      if not p:
        return power
      matrix = multiply(matrix, matrix)

  def body(state):
    p, power, matrix = state
    power = jnp.where(p % 2 == 1, multiply(matrix, power), power)
    return p // 2, power, multiply(matrix, matrix)

  identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
  return lax.while_loop(lambda state: state[0] > 0, body, (p, identity, matrix))[1]


def coupled_newton_root(
    matrix: jax.Array, p: int | jax.Array, options: RootOptions = RootOptions()) -> tuple[jax.Array, jax.Array]:
  """Computes `(matrix + ridge I)^(-1/p)` by the coupled Newton iteration.

  Higham, Functions of Matrices (2008), equation 7.18: M converges to I while H converges to the root. The largest
  eigenvalue comes from `power_iteration`. The iteration ends when the largest entry of M - I is small enough, or has
  grown by more than a fifth in one iteration: then the iterate before is returned, with the error of the last.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite, not 1 x 1 unless padded.
    p: positive integer, or an int32 scalar array.
    options: ridge, precision and padding.

  Returns:
    The root, in the dtype of `matrix`, and the largest entry of M - I of the last iteration, float32.
  """
  num_padded, precision = options.num_padded(matrix.shape[-1]), options.precision
  wide = matrix.astype(_root_dtype())
  identity = jnp.eye(matrix.shape[-1], dtype=wide.dtype)
  order = jnp.asarray(p, wide.dtype)
  alpha = -1 / order
  ridge = options.ridge_epsilon * jnp.maximum(power_iteration(wide, options), _MIN_LARGEST_EIGENVALUE)

  def error_of(m, pad_m):
    error = jnp.max(jnp.abs(m - identity))
    return jnp.maximum(error, jnp.abs(pad_m - 1)) if num_padded else error

  def body(state):
    i, m, pad_m, h, _, error, _ = state
    factor = (1 - alpha) * identity + alpha * m
    pad_factor = (1 - alpha) + alpha * pad_m
    new_m = jnp.matmul(matrix_power(factor, p, precision), m, precision=precision)
    new_pad_m = pad_factor ** order * pad_m
    new_h = jnp.matmul(h, factor, precision=precision)
    new_error = error_of(new_m, new_pad_m)
    return i + 1, new_m, new_pad_m, new_h, h, new_error, new_error < error * _MAX_ERROR_GROWTH

  def goes_on(state):
    return (state[0] < _MAX_ITERATIONS) & (state[-2] > _TOLERANCE) & state[-1]

  damped = wide + ridge * identity
  scale = (1 + order) / (2 * jnp.sqrt(jnp.sum(damped * damped) + num_padded * (options.pad_value + ridge) ** 2))
  m, pad_m = damped * scale, (options.pad_value + ridge) * scale
  h = identity * scale ** (1 / order)
  state = (jnp.int32(0), m, pad_m, h, h, error_of(m, pad_m), jnp.bool_(True))
  _, _, _, h, old_h, error, is_converging = lax.while_loop(goes_on, body, state)
  return jnp.where(is_converging, h, old_h).astype(matrix.dtype), error.astype(jnp.float32)


def eigh_root(
    matrix: jax.Array, p: int | jax.Array, options: RootOptions = RootOptions()) -> tuple[jax.Array, jax.Array]:
  """Computes `(matrix + ridge I)^(-1/p)` by an eigendecomposition, and refines it.

  A decomposition in float32 is off by some roundings of the *largest* eigenvalue, which on a matrix of condition 1e6
  leaves little of the smallest. So with `A V ~ V diag(d)`, computed, let `V^T A V = diag(d) + G`, where G follows from
  the residual `A V - V diag(d)` without the rounding of a plain product (`_decompose`); and the half and the quarter of
  the smallest eigenvalues are decomposed again, on their own scale. To first order
  the root of `diag(d) + G` is `diag(d^(-1/p)) + F * G`, with F the divided differences of `x^(-1/p)` (Higham, Functions
  of Matrices, 2008, theorem 3.11). The rest goes by steps of the same kind: if X is almost a root,
  `X + F * (A X^p A - A)` has about the square of its error.
  All of it is scaled by the square roots of the eigenvalues, so that small ones count as much as large ones.

  Args:
    matrix: <float>[n, n], symmetric positive semidefinite. Rounding may have made eigenvalues negative: plus the
      ridge they count as a quarter of it at least.
    p: positive integer, or an int32 scalar array.
    options: the ridge, in units of the largest eigenvalue, which is not estimated but exact here; the padding, whose
      value counts for the largest eigenvalue; and the precision.

  Returns:
    The root, in the dtype of `matrix`, and the largest entry of A^(1/2) X^p A^(1/2) - I in the basis V, float32; NaN if
    the matrix is not finite. As with the other method, early roundings do not show in it.
  """
  size = matrix.shape[-1]
  identity = jnp.eye(size, dtype=_root_dtype())
  is_finite = jnp.all(jnp.isfinite(matrix))
  wide = jnp.where(is_finite, matrix.astype(identity.dtype), identity)
  order = jnp.asarray(p, identity.dtype)
  multiply = functools.partial(jnp.matmul, precision=options.precision)
  pad_value = options.pad_value if options.num_padded(size) else 0.0

  values, vectors, gap = _decompose(wide, multiply)
  for num_small in (size // 2, size // 4):
    if num_small > 1:  # of 1 x 1 there is nothing to decompose
      values, vectors, gap = _decompose_again(values, vectors, gap, num_small, multiply)
  ridge = options.ridge_epsilon * jnp.maximum(values[-1], max(pad_value, _MIN_LARGEST_EIGENVALUE))

  damped = jnp.maximum(values + jnp.diagonal(gap) + ridge, ridge / 4)
  gap = jnp.where(identity > 0, 0, gap)
  scales = jnp.sqrt(damped)
  scales = scales[:, None] * scales
  scaled = identity + gap / scales
  differences = _divided_differences(damped, order)

  def goes_on(state):
    i, _, _, error, old_error = state
    return (i < _MAX_REFINEMENTS) & (error > 32 * jnp.finfo(error.dtype).eps) & (error < old_error / 2)

  def body(state):
    i, root, excess, error, _ = state
    step = multiply(excess, scaled)
    root = root + differences * scales * (step + step.T) / 2
    excess = excess_of(root)
    return i + 1, root, excess, jnp.max(jnp.abs(excess)), error

  def excess_of(root):
    return multiply(scaled, matrix_power(root, p, options.precision) * scales) - identity

  root = jnp.diag(damped ** (-1 / order)) + differences * gap
  excess = excess_of(root)
  error = jnp.max(jnp.abs(excess))
  state = (jnp.int32(0), root, excess, error, jnp.full_like(error, jnp.inf))
  _, root, _, error, _ = lax.while_loop(goes_on, body, state)
  root = multiply(multiply(vectors, root), vectors.T)
  error = jnp.where(is_finite, error, jnp.nan)
  return root.astype(matrix.dtype), error.astype(jnp.float32)


def _decompose(matrix, multiply):
  """Returns values d, orthogonal vectors V and what is left, G = V^T matrix V - diag(d)."""
  values, vectors = jnp.linalg.eigh(matrix)
  off = multiply(vectors.T, vectors) - jnp.eye(len(values), dtype=values.dtype)
  vectors = vectors - multiply(vectors, off) / 2  # orthogonal up to a rounding
  gap = multiply(vectors.T, _residual(matrix, values, vectors, multiply))
  return values, vectors, (gap + gap.T) / 2


def _decompose_again(values, vectors, gap, num_small, multiply):
  """Decomposes the space of the smallest values once more, where roundings are of their size."""
  small, large = slice(None, num_small), slice(num_small, None)
  small_values, rotation, small_gap = _decompose(jnp.diag(values[small]) + gap[small, small], multiply)
  cross = multiply(rotation.T, gap[small, large])
  gap = jnp.block([[small_gap, cross], [cross.T, gap[large, large]]])
  vectors = jnp.concatenate([multiply(vectors[:, small], rotation), vectors[:, large]], axis=1)
  return jnp.concatenate([small_values, values[large]]), vectors, gap


def _residual(matrix, values, vectors, multiply):
  """Returns `matrix @ vectors - vectors * values`, with an error far below the rounding of the first product.

  Both factors are cut in two: leading bits on a grid so coarse that sums of products of them are exact, and the rest.
  """
  def leading_bits(x, axis):
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    grid = jnp.ldexp(jnp.ones([], x.dtype), num_bits - exponent)
    return jnp.round(x * grid) / grid

  num_bits = (jnp.finfo(matrix.dtype).nmant + 1 - math.ceil(math.log2(max(matrix.shape[-1], 2)))) // 2
  matrix_head, vectors_head = leading_bits(matrix, 1), leading_bits(vectors, 0)
  exact = multiply(matrix_head, vectors_head) - vectors * values
  return exact + (multiply(matrix_head, vectors - vectors_head) + multiply(matrix - matrix_head, vectors))


def _divided_differences(values, order):
  """Returns [n, n] `(f(x) - f(y)) / (x - y)` for all pairs of n positive values, f being `x^(-1/order)`.

  Pairs closer than a thousandth take the mean of their derivatives, which is off by 1e-6 at most. That the others lose
  up to three digits slows the refinement by as little.
  """
  power = values ** (-1 / order)
  slope = -power / values / order
  difference = values[:, None] - values
  is_close = jnp.abs(difference) < 1e-3 * jnp.maximum(values[:, None], values)
  quotient = (power[:, None] - power) / jnp.where(is_close, 1, difference)
  return jnp.where(is_close, (slope[:, None] + slope) / 2, quotient)
