"""Refreshes of the bases: eigenvectors at first, then one step of power iteration with QR per period.

    P Q = Q' R,  with the columns of Q in the order of their Rayleigh quotients q^T P q, largest first

Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 4, https://arxiv.org/abs/2409.11321.
Matrices of one size are a batch, whose rows are distributed over all devices of the mesh in context.

Spreading: a period of `num_slots` steps has as many slots; slot t, with the next rows of each batch, is refreshed at
the steps with count % num_slots == t.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite.optimizers.shampoo.root_plan import mesh_to_spread_over
from t5x_lite.optimizers.soap_rule import state as state_lib
from t5x_lite.optimizers.soap_rule.config import SoapConfig
from t5x_lite.types import Array

_PRECISION = lax.Precision.HIGHEST


def first_bases(statistics: Sequence[Any], bases: Sequence[Any], cfg: SoapConfig) -> list[Any]:
  """Return the eigenvectors of all statistics, those of the largest eigenvalues first.

  Args:
    statistics: stacks [K, n, n] in the form of the state.
    bases: stacks of the same sizes, which give the form of the result.
    cfg: options.
  """
  results = list(bases)
  for batch in _batches(bases):
    rows = batch.all_rows
    new = _on_all_devices(
      _eigenvectors, state_lib.symmetric_statistics(batch.take(statistics, rows), cfg)
    )
    batch.put(results, rows, state_lib.matrices_to_state(new, cfg))
  return results


def ascending_orders(bases: Sequence[Any]) -> list[Array]:
  """Return int32 [K, n] per stack of bases [K, n, n]: columns that keep their places."""
  return [jnp.broadcast_to(jnp.arange(size), (rows, size)) for rows, size in map(_shape, bases)]


def next_bases(
  statistics: Sequence[Any],
  bases: Sequence[Any],
  ranks: Sequence[np.ndarray],
  count: Array,
  cfg: SoapConfig,
) -> tuple[list[Any], list[Array]]:
  """Return the bases with those of a slot refreshed, and the order of the old columns in the new bases.

  Args:
    statistics: stacks [K, n, n] in the form of the state.
    bases: stacks of the same sizes.
    ranks: for each stack int [K], different for all matrices; slots are in ascending order of these numbers.
    count: int32 scalar, number of previous updates.
    cfg: options.

  Returns:
    (bases in the form of the state; int32 [K, n] per stack, ascending for bases that are not refreshed).
  """
  results = list(bases)
  orders = ascending_orders(bases)
  for batch in _batches(bases):
    slots = batch.slots([ranks[i] for i in batch.entries], cfg.num_slots)
    rows = jnp.asarray(slots)[count % cfg.num_slots]

    def refreshed(old, batch=batch, rows=rows):
      new_bases, new_orders = list(old[0]), list(old[1])
      new, order = _on_all_devices(
        _power_iteration,
        state_lib.symmetric_statistics(batch.take(statistics, rows), cfg),
        state_lib.to_float(batch.take(bases, rows)),
      )
      batch.put(new_bases, rows, state_lib.matrices_to_state(new, cfg))
      batch.put(new_orders, rows, order)
      return new_bases, new_orders

    if (slots[:, 0] < batch.num_rows).all():
      results, orders = refreshed((results, orders))
    else:  # no rows in some slots
      results, orders = lax.cond(
        rows[0] < batch.num_rows, refreshed, lambda old: old, (results, orders)
      )
  return results, orders


@dataclasses.dataclass(frozen=True)
class _Batch:
  """Stacks of matrices of one size.

  Attributes:
    entries: indices of the stacks.
    counts: number of matrices of each.
  """

  entries: tuple[int, ...]
  counts: tuple[int, ...]

  @property
  def num_rows(self) -> int:
    return sum(self.counts)

  @property
  def all_rows(self) -> np.ndarray:
    """All rows, as one slot."""
    return self.slots([np.arange(self.num_rows)], 1)[0]

  def slots(self, ranks: Sequence[np.ndarray], num_slots: int) -> np.ndarray:
    """Return int32 [num_slots, n]: the rows of each slot, n of them for all devices; `num_rows` stands for none."""
    order = np.argsort(np.concatenate(ranks))
    rows_per_slot = -(-self.num_rows // num_slots)
    mesh = mesh_to_spread_over()
    num_devices = 1
    if mesh is not None:
      num_devices = mesh.size
    slots = np.full([num_slots, -(-rows_per_slot // num_devices) * num_devices], self.num_rows)
    for slot in range(num_slots):
      own = order[slot * rows_per_slot : (slot + 1) * rows_per_slot]
      slots[slot, : len(own)] = own
    return slots.astype(np.int32)

  def take(self, stacks: Sequence[Any], rows: Array | np.ndarray) -> Any:
    """Return rows of the stacks of the batch, those with the number `num_rows` with any content."""
    return jax.tree.map(
      lambda *parts: jnp.take(_joined(parts), rows, axis=0, mode='clip'), *self._of(stacks)
    )

  def put(self, stacks: list[Any], rows: Array | np.ndarray, values: Any) -> None:
    """Replace rows of the stacks of the batch."""

    def replaced(new, *parts):
      return jnp.split(_joined(parts).at[rows].set(new, mode='drop'), np.cumsum(self.counts)[:-1])

    of_stacks = jax.tree.map(replaced, values, *self._of(stacks))
    for position, i in enumerate(self.entries):
      stacks[i] = jax.tree.map(
        lambda _, parts, position=position: parts[position], values, of_stacks
      )

  def _of(self, stacks: Sequence[Any]) -> list[Any]:
    return [stacks[i] for i in self.entries]


def _batches(bases: Sequence[Any]) -> list[_Batch]:
  """Return the batches of the sizes that occur."""
  by_size: dict[int, list[int]] = {}
  for i, stack in enumerate(bases):
    by_size.setdefault(_shape(stack)[1], []).append(i)
  return [
    _Batch(tuple(entries), tuple(_shape(bases[i])[0] for i in entries))
    for entries in by_size.values()
  ]


def _shape(basis: Any) -> tuple[int, int]:
  """Return (K, n) of bases [K, n, n] in the form of the state."""
  rows, size, _ = jax.tree.leaves(basis)[0].shape
  return rows, size


def _joined(parts: Sequence[Array]) -> Array:
  """Return the concatenated parts, on a mesh with a copy on every device."""
  if mesh_to_spread_over() is None:
    return jnp.concatenate(parts)
  # Without constraints, the compiler shards the concatenation along the dims of the matrices.
  copies = [lax.with_sharding_constraint(part, PartitionSpec()) for part in parts]
  return lax.with_sharding_constraint(jnp.concatenate(copies), PartitionSpec())


def _on_all_devices(fn: Callable[..., Any], *stacks: Array) -> Any:
  """Return `fn` of each matrix of the stacks [R, n, n], computed by all devices of the mesh in context, on all."""

  def of_device(*rows: Array) -> Any:
    return lax.map(lambda matrices: fn(*matrices), rows, batch_size=_batch_size(rows[0]))

  mesh = mesh_to_spread_over()
  if mesh is None:
    return of_device(*stacks)
  spec = PartitionSpec(mesh.axis_names)
  results = jax.shard_map(of_device, in_specs=spec, out_specs=spec, check_vma=False)(*stacks)
  return lax.with_sharding_constraint(results, PartitionSpec())


def _batch_size(rows: Array) -> int | None:
  """Return the number of matrices [R, n, n] that one device refreshes at a time; None for one without a batch dim."""
  if jax.default_backend() == 'cpu':
    # A batched QR waits, in a thread of XLA's pool, for others of its threads: two at a time on two cores never end.
    return None
  # Intermediate results take several times as much.
  return min(max(2**26 // (4 * rows.shape[-1] ** 2), 1), len(rows))


def _eigenvectors(matrix: Array) -> Array:
  """Return the eigenvectors of float32 [n, n] as columns, in descending order of the eigenvalues."""
  _, vectors = jnp.linalg.eigh(matrix)
  return jnp.flip(vectors, -1)


def _power_iteration(matrix: Array, basis: Array) -> tuple[Array, Array]:
  """Return (new basis float32 [n, n], order int32 [n] of the old columns in it)."""
  products = jnp.matmul(matrix, basis, precision=_PRECISION)
  quotients = jnp.sum(basis * products, axis=0)
  order = jnp.argsort(quotients, descending=True).astype(jnp.int32)
  new, _ = jnp.linalg.qr(products[:, order])
  return new, order
