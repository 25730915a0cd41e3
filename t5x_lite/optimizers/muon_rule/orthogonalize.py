"""Newton-Schulz iteration on stacks of matrices of equal shapes.

The iteration brings all singular values of a matrix near 1 and keeps its singular vectors. One batched product for all
matrices of a shape takes the place of one product for each array; on a mesh every device has its share of the stack.

Reference: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite.optimizers.shampoo import root_plan
from t5x_lite.types import Array

Coefficients = tuple[float, float, float]

# Coefficients by name: Jordan's for each iteration, and those of Ahn et al. 2025, https://arxiv.org/abs/2504.05295, one
# row for each of five iterations.
_PRESETS: dict[str, Any] = {
  'standard': (3.4445, -4.7750, 2.0315),
  'dion': (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iteration:
  """Options of the iteration; `optimizers.muon` describes them.

  Attributes:
    ns_coeffs: name of coefficients, three numbers, or three numbers for each iteration.
    ns_steps: number of iterations, unless `ns_coeffs` gives it.
    preconditioning: how matrices are scaled first, so that no singular value is above 1.
    eps: added to divisors, or their lower bound.
  """

  ns_coeffs: Any
  ns_steps: int
  preconditioning: str
  eps: Any

  @property
  def coefficients(self) -> np.ndarray:
    """Float64 [3], or [iterations, 3]."""
    given = self.ns_coeffs
    if isinstance(given, str):
      given = _PRESETS[given]
    return np.asarray(given, np.float64)

  def __call__(self, x: Array) -> Array:
    """Return <float>[n, rows, cols], orthogonalized, given such a stack with rows <= cols."""
    rows = self.coefficients
    if rows.ndim == 1:
      rows = np.tile(rows, [self.ns_steps, 1])
    if self.preconditioning == 'frobenius':
      x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + self.eps)
    elif self.preconditioning == 'spectral':
      x = x / (jnp.linalg.norm(x, ord=2, axis=(-2, -1), keepdims=True) + self.eps)
    for step, (a, b, c) in enumerate(rows.tolist()):
      # [n, rows, rows]: x x^H, and the polynomial b x x^H + c (x x^H)^2.
      gram = x @ _transposed(x.conj())
      if step == 0 and self.preconditioning in ('aol', 'schatten'):
        scale = self._scale_of(gram)
        x = x * scale
        gram = gram * scale * _transposed(scale)
      polynomial = b * gram + c * (gram @ gram)
      x = a * x + polynomial @ x
    return x

  def _scale_of(self, gram: Array) -> Array:
    """Return the factor of each row, [n, rows, 1], or of each matrix, [n, 1, 1], given x x^H [n, rows, rows]."""
    if self.preconditioning == 'aol':
      size = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    else:
      size = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
    return lax.rsqrt(jnp.maximum(size, self.eps))


def orthogonalize(matrices: Sequence[Array], iteration: Iteration) -> list[Array]:
  """Return orthogonalized matrices.

  Args:
    matrices: <float>[..., m, n] each.
    iteration: options.

  Returns:
    Arrays of the same shapes.
  """
  groups: dict[Any, list[int]] = {}
  for i, matrix in enumerate(matrices):
    groups.setdefault((*sorted(matrix.shape[-2:]), matrix.dtype), []).append(i)
  results = list(matrices)
  for (rows, cols, _), members in groups.items():
    stacks = [_wide(matrices[i]).reshape(-1, rows, cols) for i in members]
    joined = _on_all_devices(functools.partial(_in_pieces, iteration), jnp.concatenate(stacks))
    ends = np.cumsum([len(stack) for stack in stacks])
    for i, part in zip(members, jnp.split(joined, ends[:-1]), strict=True):
      shape = matrices[i].shape
      wide = part.reshape(*shape[:-2], rows, cols)
      results[i] = wide if wide.shape == shape else _transposed(wide)
  return results


def _transposed(x: Array) -> Array:
  return jnp.swapaxes(x, -1, -2)


def _wide(x: Array) -> Array:
  """Return matrices [..., m, n] with m <= n, transposed if they are tall."""
  if x.shape[-2] > x.shape[-1]:
    return _transposed(x)
  return x


def _in_pieces(fn: Callable[[Array], Array], stack: Array) -> Array:
  """Return `fn` of a stack [n, rows, cols], piece by piece in place: temporaries have the size of a piece."""
  num_matrices = len(stack)
  limit = max(_piece_bytes() // (stack.dtype.itemsize * math.prod(stack.shape[1:])), 1)
  piece = max(
    size for size in range(1, num_matrices + 1) if num_matrices % size == 0 and size <= limit
  )
  if piece == num_matrices:
    return fn(stack)

  def update(i: Array, stack: Array) -> Array:
    new = fn(lax.dynamic_slice_in_dim(stack, i * piece, piece))
    return lax.dynamic_update_slice_in_dim(stack, new, i * piece, 0)

  return lax.fori_loop(0, num_matrices // piece, update, stack)


def _piece_bytes() -> int:
  """Return the size in bytes of the matrices that one device computes at a time: on CPU, about that of its caches."""
  if jax.default_backend() == 'cpu':
    return 2**22
  return 2**28


def _on_all_devices(fn: Callable[[Array], Array], stack: Array) -> Array:
  """Return `fn` of a stack [n, rows, cols], of which each device of the current mesh computes its share of n.

  Before and after, the stack is sharded over its columns: the partitioner moves a dim to another one by an all-to-all,
  but gathers the entire stack on every device if it has to move two dims to one.
  """
  mesh = root_plan.mesh_to_spread_over()
  if not mesh:
    return fn(stack)
  num_matrices, _, num_cols = stack.shape
  spare_cols = [(0, 0), (0, 0), (0, -num_cols % mesh.size)]
  by_column = PartitionSpec(None, None, mesh.axis_names)
  by_matrix = PartitionSpec(mesh.axis_names)

  def own_share(share: Array) -> Array:
    return jnp.pad(fn(share[..., :num_cols]), spare_cols)

  stack = jnp.pad(stack, [(0, -num_matrices % mesh.size), *spare_cols[1:]])
  stack = lax.with_sharding_constraint(stack, by_column)
  on_each = jax.shard_map(own_share, in_specs=by_matrix, out_specs=by_matrix, check_vma=False)
  stack = lax.with_sharding_constraint(on_each(stack), by_column)
  return stack[:num_matrices, :, :num_cols]
