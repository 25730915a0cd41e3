"""Roots of the sharded mode, whose devices store equal numbers of matrices of unequal sizes.

A root costs about n^3 operations. So each device computes its roots of one size and exponent in a loop of its own
length. A device with more than `_MAX_SHARE` of the mean cost sends matrices to those with the lowest cost, and gets the
roots back: as few matrices as possible, since each of them moves twice.
"""

from collections.abc import Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from t5x_lite.optimizers.shampoo import root_plan
from t5x_lite.optimizers.shampoo import update as update_lib
from t5x_lite.optimizers.shampoo.config import ShampooConfig
from t5x_lite.optimizers.shampoo.roots import inverse_pth_root

# Cost of a device relative to the mean, above which it sends matrices, and up to which its last pieces are filled.
_MAX_SHARE = 1.3
_MAX_TRANSFERS = 64


class RootBalance:
  """The roots that each device computes.

  Row r < R of a device is its own; row R + s is the matrix that it gets in slot s.

  Attributes:
    num_rows: rows R of the global stack on each of D devices.
    transfers: int32 [T, D, 5], T collective operations in which some devices send a matrix each to different ones: the
      row that a device sends, its target, and the slot there; the slot in which it gets a matrix, and the source.
      Numbers are out of range for devices that send or get none. Roots are sent back in the same way.
    num_slots: number of slots of a device, at least 1.
    classes: (size, exponent, int32 [D] number of pieces that each device computes, int32 [D, pieces, matrices] rows of
      the matrices of each piece) for each size and exponent; rows that fill up a piece are out of range.
  """

  def __init__(
    self, batches: Sequence[tuple[np.ndarray, int, int]], num_devices: int, num_rows: int
  ):
    """Distribute the roots.

    Args:
      batches: (indices in the global stack, size, exponent) for each group of matrices with equal size and exponent.
      num_devices: number of devices D.
      num_rows: rows R of the global stack on each device.
    """
    self.num_rows = num_rows
    nothing = num_devices * num_rows
    costs = np.zeros(nothing)
    for indices, size, _ in batches:
      costs[indices] = float(size) ** 3
    owners, rows = np.divmod(np.arange(nothing), num_rows)
    loads = np.bincount(owners, costs)
    limit = _MAX_SHARE * loads.mean()
    transfers = np.full([_MAX_TRANSFERS, num_devices, 5], nothing, np.int32)
    num_received = np.zeros(num_devices, int)
    while loads.max() > limit:
      source = loads.argmax()
      target = loads.argmin()
      is_movable = (owners == source) & (rows < num_rows) & (costs > 0)
      is_movable &= loads[target] + costs < loads[source]
      matrix = np.argmax(is_movable * costs)
      is_free = (transfers[:, source, 1] == nothing) & (transfers[:, target, 3] == nothing)
      number = is_free.argmax()
      if not is_movable[matrix] or not is_free[number]:
        break
      transfers[number, source, :3] = (rows[matrix], target, num_received[target])
      transfers[number, target, 3:] = (num_received[target], source)
      owners[matrix] = target
      rows[matrix] = num_rows + num_received[target]
      num_received[target] += 1
      loads[source] -= costs[matrix]
      loads[target] += costs[matrix]
    self.transfers = transfers[(transfers < nothing).any(axis=(1, 2))]
    self.num_slots = max(int(num_received.max()), 1)
    self.classes: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    limit = max(limit, loads.max())
    # The classes with the most matrices gain the most by large pieces.
    by_length = sorted(batches, key=lambda batch: -len(batch[0]))
    for indices, size, exponent in by_length:
      counts = np.bincount(owners[indices], minlength=num_devices)
      piece = root_plan.largest_piece(counts.max(), size)
      while (loads + -counts % piece * float(size) ** 3).max() > limit:
        piece -= 1
      loads = loads + -counts % piece * float(size) ** 3
      num_pieces = (-(-counts // piece)).astype(np.int32)
      table = np.full([num_devices, num_pieces.max() * piece], nothing, np.int32)
      for device, count in enumerate(counts):
        table[device, :count] = rows[indices[owners[indices] == device]]
      table = table.reshape(num_devices, -1, piece)
      self.classes.append((size, exponent, num_pieces, table))

  def compute(
    self,
    device: jax.Array,
    statistics: jax.Array,
    old: jax.Array,
    count: jax.Array,
    axis_names: tuple[str, ...],
    cfg: ShampooConfig,
  ) -> tuple[jax.Array, jax.Array]:
    """Return the roots of a device's matrices and their errors; called on each device.

    Args:
      device: number of the device, int32 scalar.
      statistics: float32 [R, n, n], the device's matrices, padded to the largest.
      old: float32 [R, n, n], previous roots, of which those of failed new ones are kept.
      count: int32 scalar, number of previous updates.
      axis_names: mesh axes of the devices.
      cfg: options.

    Returns:
      (float32 [R, n, n], errors float32 [R]).
    """
    num_rows = self.num_rows
    threshold = cfg.inverse_failure_threshold
    options = update_lib.root_options(old.shape[-1], cfg)

    def compute_piece(size, exponent, table, i, results):
      roots, received, errors = results
      rows = jnp.asarray(table)[device, i]
      size = slice(size)
      slots = rows - num_rows
      is_own = slots < 0
      matrices = jnp.where(
        is_own[:, None, None],
        statistics.at[rows, size, size].get(mode='clip'),
        received.at[slots, size, size].get(mode='clip'),
      )
      root_fn = functools.partial(inverse_pth_root, p=exponent, options=options)
      new, new_errors = jax.vmap(root_fn)(matrices)
      is_used = new_errors < threshold  # False if NaN
      used_rows = jnp.where(is_used, rows, num_rows)
      roots = roots.at[used_rows, size, size].set(new, mode='drop')
      slots = jnp.where(is_own, self.num_slots, slots)
      received = received.at[slots, size, size].set(new, mode='drop')
      return roots, received, errors.at[rows].set(new_errors)

    def send(array, targets):
      sources = np.flatnonzero(targets < len(targets))
      pairs = list(zip(sources, targets[sources], strict=True))
      return lax.ppermute(array, axis_names, pairs)

    # Collectives follow each other: devices may not start them in different orders.
    never = update_lib.never([], count)
    identity = jnp.eye(old.shape[-1], dtype=old.dtype)
    received = jnp.broadcast_to(identity, [self.num_slots, *identity.shape])
    for transfer in self.transfers:
      row, _, _, slot, _ = jnp.asarray(transfer)[device]
      matrix = update_lib.after(never, statistics.at[row].get(mode='clip'))
      matrix = send(matrix, transfer[:, 1])
      never = update_lib.never([matrix], count)
      received = received.at[slot].set(matrix, mode='drop')
    errors = jnp.full(num_rows + self.num_slots, threshold, jnp.float32)
    results = (old, received, errors)
    for size, exponent, num_pieces, table in self.classes:
      compute_pieces = functools.partial(compute_piece, size, exponent, table)
      trips = jnp.asarray(num_pieces)[device]
      results = lax.fori_loop(0, trips, compute_pieces, results)
    roots, received, errors = results
    if not len(self.transfers):
      return roots, errors[:num_rows]
    all_errors = lax.all_gather(errors[num_rows:], axis_names)
    never = update_lib.never([all_errors], count)
    for transfer in self.transfers:
      row, target, target_slot, slot, _ = jnp.asarray(transfer)[device]
      root = update_lib.after(never, received.at[slot].get(mode='clip'))
      root = send(root, transfer[:, 4])
      never = update_lib.never([root], count)
      error = all_errors[target, target_slot]
      used_row = jnp.where(error < threshold, row, num_rows)  # none if NaN
      roots = roots.at[used_row].set(root, mode='drop')
      errors = errors.at[row].set(error, mode='drop')
    return roots, errors[:num_rows]
