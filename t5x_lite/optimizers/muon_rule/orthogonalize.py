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

from flax.linen.spmd import get_logical_axis_rules
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
  members = []
  groups: dict[Any, list[int]] = {}
  for i, (matrix, names) in enumerate(zip(matrices, batch_axes, strict=True)):
    kept_dim, kept_axes = _sharded_dim(mesh, matrix.shape, names)
    members.append(_Member(shape=matrix.shape, kept_dim=kept_dim, kept_axes=kept_axes))
    groups.setdefault((members[i].row_shape, kept_axes, matrix.dtype), []).append(i)
  results = list(matrices)
  for (_, kept_axes, _), indices in groups.items():
    parts = [members[i].to_rows(matrices[i]) for i in indices]
    stack = _on_all_devices(
      functools.partial(_in_pieces, iteration), jnp.concatenate(parts), mesh, kept_axes
    )
    ends = np.cumsum([len(part) for part in parts])
    for i, part in zip(indices, jnp.split(stack, ends[:-1]), strict=True):
      results[i] = members[i].from_rows(part)
  return results


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Member:
  """Matrices of an array as rows [k, rows, cols] of a stack, with rows <= cols.

  Attributes:
    shape: shape of the array, [*batch, m, n].
    kept_dim: batch dim that is sharded, of size k, such as that of experts; None, and k = 1, without one.
    kept_axes: mesh axes of this dim.
  """

  shape: tuple[int, ...]
  kept_dim: int | None
  kept_axes: tuple[str, ...]

  @property
  def row_shape(self) -> tuple[int, int, int]:
    """[k, rows, cols]."""
    kept = 1 if self.kept_dim is None else self.shape[self.kept_dim]
    rows, cols = sorted(self.shape[-2:])
    return kept, rows, cols

  @property
  def _is_tall(self) -> bool:
    return self.shape[-2] > self.shape[-1]

  def to_rows(self, array: Array) -> Array:
    """Return the rows [n, k, rows, cols] of the array."""
    if self._is_tall:
      array = _transposed(array)
    if self.kept_dim is not None:
      array = jnp.moveaxis(array, self.kept_dim, -3)
    return array.reshape(-1, *self.row_shape)

  def from_rows(self, rows: Array) -> Array:
    """Return the inverse of `to_rows`."""
    batch = list(self.shape[:-2])
    if self.kept_dim is not None:
      batch.append(batch.pop(self.kept_dim))
    array = rows.reshape(*batch, *self.row_shape[1:])
    if self.kept_dim is not None:
      array = jnp.moveaxis(array, -3, self.kept_dim)
    return _transposed(array) if self._is_tall else array


def _sharded_dim(
  mesh: jax.sharding.AbstractMesh | None, shape: Sequence[int], names: Sequence[str | None]
) -> tuple[int | None, tuple[str, ...]]:
  """Return the first batch dim that the rules in context shard over the mesh, with its mesh axes; (None, ())."""
  if mesh:
    entries = logical_to_mesh_axes(names, get_logical_axis_rules()) or ()
    for dim, entry in enumerate(entries):
      axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
      is_known = set(axes) <= set(mesh.axis_names)
      if axes and is_known and shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0:
        return dim, axes
  return None, ()


def _transposed(x: Array) -> Array:
  return jnp.swapaxes(x, -1, -2)


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
  row_shape = stack.shape[1:]

  def flat_fn(rows: Array) -> Array:
    return fn(rows.reshape(-1, *row_shape[1:])).reshape(rows.shape)

  if not mesh:
    return flat_fn(stack)
  axes = tuple(axis for axis in mesh.axis_names if axis not in kept_axes)
  num_shares = math.prod(mesh.shape[axis] for axis in axes)
  num_rows = len(stack)
  num_cols = row_shape[-1]
  by_column = PartitionSpec(None, kept_axes, None, axes)
  by_row = PartitionSpec(axes, kept_axes)
  spare_cols = [(0, 0), (0, 0), (0, 0), (0, -num_cols % num_shares)]

  def own_share(rows: Array) -> Array:
    return jnp.pad(flat_fn(rows[..., :num_cols]), spare_cols)

  stack = jnp.pad(stack, [(0, -num_rows % num_shares), *spare_cols[1:]])
  stack = lax.with_sharding_constraint(stack, by_column)
  on_each = jax.shard_map(own_share, in_specs=by_row, out_specs=by_row, check_vma=False)
  stack = lax.with_sharding_constraint(on_each(stack), by_column)
  return stack[:num_rows, ..., :num_cols]
