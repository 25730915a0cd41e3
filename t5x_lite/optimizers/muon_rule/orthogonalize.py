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

from flax.core.spmd import get_logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes
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


# Norm that divides a matrix, by name of the preconditioning; the others need x x^H.
_NORMS: dict[str, Any] = {'frobenius': None, 'spectral': 2}


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
    if self.preconditioning in _NORMS:
      norm = jnp.linalg.norm(x, _NORMS[self.preconditioning], axis=(-2, -1), keepdims=True)
      x = x / (norm + self.eps)
    for step, (a, b, c) in enumerate(rows.tolist()):
      # [n, rows, rows]: x x^H, and the polynomial b x x^H + c (x x^H)^2.
      gram = x @ _transposed(x.conj())
      if step == 0 and self.preconditioning not in _NORMS:
        # [n, rows, 1], a factor of each row, or [n, 1, 1], one of each matrix.
        if self.preconditioning == 'aol':
          size = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
        else:
          size = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
        scale = lax.rsqrt(jnp.maximum(size, self.eps))
        x = x * scale
        gram = gram * scale * _transposed(scale)
      polynomial = b * gram + c * (gram @ gram)
      x = a * x + polynomial @ x
    return x


def orthogonalize(
  matrices: Sequence[Array], batch_axes: Sequence[Sequence[str | None]], iteration: Iteration
) -> list[Array]:
  """Return orthogonalized matrices.

  Args:
    matrices: <float>[*batch, m, n] each.
    batch_axes: logical axis name of each batch dim of each of them, or None.
    iteration: options.

  Returns:
    Arrays of the same shapes.
  """
  mesh = root_plan.mesh_to_spread_over()
  stacks: dict[Any, list[Array]] = {}
  inverses = []
  for matrix, names in zip(matrices, batch_axes, strict=True):
    dim, kept_axes = _sharded_dim(mesh, matrix.shape, names)
    rows, inverse = _to_rows(matrix, dim)
    key = (rows.shape[1:], rows.dtype, kept_axes)
    members = stacks.setdefault(key, [])
    inverses.append((key, len(members), inverse))
    members.append(rows)
  parts = {}
  for key, members in stacks.items():
    *_, kept_axes = key
    iterate = functools.partial(_in_pieces, iteration)
    stack = _on_all_devices(iterate, jnp.concatenate(members), mesh, kept_axes)
    parts[key] = jnp.split(stack, np.cumsum([len(rows) for rows in members])[:-1])
  return [inverse(parts[key][i]) for key, i, inverse in inverses]


def _to_rows(matrices: Array, kept_dim: int | None) -> tuple[Array, Callable[[Array], Array]]:
  """Return the rows of an array in a stack, and the function from rows to such an array.

  Args:
    matrices: <float>[*batch, m, n].
    kept_dim: batch dim of size k that rows have; None, and k = 1, without one.

  Returns:
    (<float>[other batch dims, k, rows, cols] with rows <= cols, the inverse function).
  """
  if kept_dim is None:
    rows, inverse = _to_rows(matrices[None], 0)
    return rows, lambda rows: inverse(rows)[0]
  moved = jnp.moveaxis(matrices, kept_dim, -3)
  is_tall = moved.shape[-2] > moved.shape[-1]
  if is_tall:
    moved = _transposed(moved)

  def inverse_of_rows(rows: Array) -> Array:
    array = rows.reshape(moved.shape)
    if is_tall:
      array = _transposed(array)
    return jnp.moveaxis(array, -3, kept_dim)

  return moved.reshape(-1, *moved.shape[-3:]), inverse_of_rows


def _sharded_dim(
  mesh: jax.sharding.AbstractMesh | None, shape: Sequence[int], names: Sequence[str | None]
) -> tuple[int | None, tuple[str, ...]]:
  """Return the first batch dim that the rules in context shard over the mesh, with its mesh axes; (None, ())."""
  entries = logical_to_mesh_axes(names, get_logical_axis_rules())
  for dim, entry in enumerate(entries or ()):
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    sizes = [mesh.shape.get(axis, 0) for axis in axes] if mesh else []
    if sizes and all(sizes) and shape[dim] % math.prod(sizes) == 0:
      return dim, axes
  return None, ()


def _transposed(x: Array) -> Array:
  return jnp.swapaxes(x, -1, -2)


def _in_pieces(fn: Callable[[Array], Array], stack: Array) -> Array:
  """Return `fn` of all matrices of a stack [n, k, rows, cols].

  It is computed in place piece by piece, so that temporaries have the size of a piece.
  """
  matrices = stack.reshape(-1, *stack.shape[-2:])
  num_matrices = len(matrices)
  limit = _piece_bytes() * num_matrices // (stack.dtype.itemsize * stack.size)
  sizes = range(1, max(limit, 1) + 1)
  piece = max(size for size in sizes if num_matrices % size == 0)

  def update(i: Array, matrices: Array) -> Array:
    new = fn(lax.dynamic_slice_in_dim(matrices, i * piece, piece))
    return lax.dynamic_update_slice_in_dim(matrices, new, i * piece, 0)

  if piece == num_matrices:
    matrices = fn(matrices)
  else:
    matrices = lax.fori_loop(0, num_matrices // piece, update, matrices)
  return matrices.reshape(stack.shape)


def _piece_bytes() -> int:
  """Return the size in bytes of the matrices that one device computes at a time: on CPU, about that of its caches."""
  return 2**22 if jax.default_backend() == 'cpu' else 2**28


def _on_all_devices(
  fn: Callable[[Array], Array],
  stack: Array,
  mesh: jax.sharding.AbstractMesh | None,
  kept_axes: tuple[str, ...],
) -> Array:
  """Return `fn` of all matrices of a stack [n, k, rows, cols], of which each device of the mesh computes its share.

  k stays sharded over `kept_axes`, and the other axes of the mesh share n. Before and after, these axes shard the
  columns: the partitioner moves the axes of one dim to another one by an all-to-all, but gathers the entire stack on
  every device if it has to move those of two dims.
  """
  if not mesh:
    return fn(stack)
  axes = tuple(axis for axis in mesh.axis_names if axis not in kept_axes)
  num_shares = math.prod(mesh.shape[axis] for axis in axes)
  num_rows = len(stack)
  num_cols = stack.shape[-1]
  by_column = PartitionSpec(None, kept_axes, None, axes)
  by_row = PartitionSpec(axes, kept_axes)
  spare_cols = [(0, 0), (0, 0), (0, 0), (0, -num_cols % num_shares)]

  def own_share(rows: Array) -> Array:
    return jnp.pad(fn(rows[..., :num_cols]), spare_cols)

  stack = jnp.pad(stack, [(0, -num_rows % num_shares), *spare_cols[1:]])
  stack = lax.with_sharding_constraint(stack, by_column)
  on_each = jax.shard_map(own_share, in_specs=by_row, out_specs=by_row, check_vma=False)
  stack = lax.with_sharding_constraint(on_each(stack), by_column)
  return stack[:num_rows, ..., :num_cols]
