"""Schedule of the roots of all statistics: batched by size, distributed over devices, and spread over steps.

The original pads every matrix to the largest one and computes all roots in one step. Here matrices of equal size are a
batch, which is compiled once and computed at this size; its rows are distributed over all devices of the current mesh
(`jax.set_mesh`), so that each root is computed by one device.

Spreading: an interval of `spread_over` steps is divided into as many slots. Slot t is computed at the steps with
`count % spread_over == t`, and has the next `ceil(K / spread_over)` of a batch of K matrices. So each matrix is
refreshed once per interval, at the same step on any number of devices, and no step is slow. Batches too small for a row
in every slot have consecutive slots, one batch after the other. At count 0 all slots are computed, unless
`all_at_first` is False: otherwise some blocks would still have the identity as preconditioner while others have roots,
and these differ in scale by orders of magnitude.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite.optimizers.shampoo import roots


@dataclasses.dataclass(frozen=True)
class Shares:
  """Shares of matrices on the devices of a mapped axis.

  Attributes:
    positions: per entry of `compute_roots` an int32 [k], positions of this device's matrices among those of all
      devices; -1 for entries that do not count.
    counts: per entry, number of matrices of all devices.
    max_rows: limit of the number of matrices that are sent at a time, if it is at least the number of devices.
  """

  positions: Sequence[jax.Array]
  counts: Sequence[int]
  max_rows: int


def compute_roots(
  statistics: Sequence[jax.Array],
  exponents: Sequence[int | jax.Array],
  previous: Sequence[jax.Array],
  count: jax.Array,
  *,
  spread_over: int = 1,
  options: roots.RootOptions = roots.RootOptions(),
  failure_threshold: float = 0.1,
  axis_name: str | tuple[str, ...] | None = None,
  all_at_first: bool = True,
  ranks: Sequence[np.ndarray] | None = None,
  shares: Shares | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Return the roots, of which all or a share are new and the others are the previous ones.

  A new root whose error is NaN, or not below the threshold, is replaced by the previous one.

  Args:
    statistics: float32 matrices [n, n] or stacks of them [k, n, n].
    exponents: per entry the order p of the root: an int, or an int32 array [k] if it differs within a stack.
    previous: previous roots; shapes as `statistics`.
    count: int32 scalar, number of previous updates.
    spread_over: number of steps that each compute a share, see the module's docstring; 1 computes all at once.
    options: options of the computation of a root.
    failure_threshold: smallest error of a failed root.
    axis_name: mapped axis (`jax.shard_map`, `jax.pmap`) around the call, over which the roots are distributed.
    all_at_first: compute all roots at count 0, if they are spread.
    ranks: per entry an int [k], different for all matrices; roots are spread in ascending order of these numbers. None
      means the order of the entries.
    shares: the entries are this device's shares of the matrices of each size and exponent, which it keeps; the roots
      of a slot are distributed over `axis_name`. None means that each device has all matrices.

  Returns:
    Roots with the shapes of `statistics`, and their errors, float32 [] or [k] per entry: as computed, or
    `failure_threshold` for roots that were not due, as in the original.

  Raises:
    ConfigError: `padded_size` is below a matrix's size.
  """
  distribute, num_devices = _devices(axis_name)
  entire = statistics
  if shares:
    entire = [
      jax.ShapeDtypeStruct((count, *matrix.shape[1:]), matrix.dtype)
      for count, matrix in zip(shares.counts, statistics, strict=True)
    ]
  batches = _plan(entire, exponents, ranks, num_slots=spread_over, num_devices=num_devices)
  root_fn = functools.partial(roots.inverse_pth_root, options=options)
  skipped = [jnp.full(matrix.shape[:-2], failure_threshold, jnp.float32) for matrix in statistics]

  def refresh(slot, results):
    # XLA moves loop-invariant computations out of loops: all slots would be computed in every step. Therefore the
    # statistics depend on the state of the loop below, and of a loop of the caller.
    slot, matrices, (kept, errors) = lax.optimization_barrier((slot, list(statistics), results))
    kept = list(kept)
    errors = list(errors)
    for batch in batches:
      if shares:
        (i,) = batch.entries
        refresh_share = functools.partial(
          _refresh_share, batch, shares, axis_name, root_fn, failure_threshold
        )
        kept[i], errors[i] = refresh_share(slot, matrices[i], kept[i], errors[i])
        continue
      new = _refresh_batch(
        batch,
        slot,
        *([values[i] for i in batch.entries] for values in (matrices, exponents, kept, errors)),
        roots_fn=functools.partial(_roots_on_all_devices, root_fn, distribute),
        failure_threshold=failure_threshold,
      )
      for i, root, error in zip(batch.entries, *new, strict=True):
        kept[i] = root
        errors[i] = error
    return kept, errors

  results = (list(previous), skipped)
  if not batches:
    return results
  if spread_over == 1:
    return refresh(0, results)
  slot = count % spread_over
  if all_at_first:
    num_slots = jnp.where(count == 0, spread_over, 1)
  else:
    num_slots = 1
  return lax.fori_loop(slot, slot + num_slots, refresh, results)


@dataclasses.dataclass(frozen=True)
class _Batch:
  """Matrices of one size, and of one exponent if it is static, whose roots are computed together.

  Attributes:
    size: n of all matrices.
    exponent: exponent of all matrices, or None if they are traced or differ.
    entries: indices of the entries of `statistics`.
    positions: per entry an int [k], positions of its matrices among those of the batch.
    num_rows: K, number of matrices.
    rows_per_slot: number of matrices that a slot refreshes, independent of the devices, so that the step in which a
      matrix is refreshed is independent of them too.
    num_computed: number of roots that a slot computes, including padding: a multiple of `piece` and of the number of
      devices.
    piece: number of matrices that a device computes at a time.
    num_slots: number of slots per interval.
    first_slot: slot of the first rows; the others follow, wrapping around.
  """

  size: int
  exponent: int | None
  entries: tuple[int, ...]
  positions: tuple[np.ndarray, ...]
  num_rows: int
  rows_per_slot: int
  num_computed: int
  piece: int
  num_slots: int
  first_slot: int

  @property
  def num_used_slots(self) -> int:
    """Number of slots with rows."""
    return _divide_up(self.num_rows, self.rows_per_slot)


def mesh_to_spread_over() -> jax.sharding.AbstractMesh | None:
  """Return the current mesh if it has several devices and only axes of type Auto, else None."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or any(kind != AxisType.Auto for kind in mesh.axis_types):
    return None
  return mesh


def _plan(statistics, exponents, ranks, *, num_slots: int, num_devices: int) -> list[_Batch]:
  """Return the batches of the entries, with their slots."""
  if ranks is None:
    starts = itertools.accumulate(map(_num_rows, statistics), initial=0)
    ranks = [
      start + np.arange(_num_rows(matrix))
      for start, matrix in zip(starts, statistics, strict=False)
    ]
  groups: dict[tuple[int, int | None], list[int]] = {}
  for i, (matrix, exponent) in enumerate(zip(statistics, exponents, strict=True)):
    if matrix.size:
      if isinstance(exponent, (int, np.integer)):
        exponent = int(exponent)
      else:
        exponent = None
      groups.setdefault((matrix.shape[-1], exponent), []).append(i)
  batches = []
  first_slot = 0
  for (size, exponent), entries in sorted(
    groups.items(), key=lambda group: min(ranks[i].min() for i in group[1])
  ):
    positions = np.argsort(np.argsort(np.concatenate([ranks[i] for i in entries])))
    num_rows = len(positions)
    rows_per_slot = _divide_up(num_rows, num_slots)
    rows_per_device = _divide_up(rows_per_slot, num_devices)
    piece = largest_piece(rows_per_device, size)
    num_pieces = _divide_up(rows_per_device, piece)
    batch = _Batch(
      size=size,
      exponent=exponent,
      entries=tuple(entries),
      positions=tuple(np.split(positions, np.cumsum([len(ranks[i]) for i in entries])[:-1])),
      num_rows=num_rows,
      rows_per_slot=rows_per_slot,
      num_computed=num_devices * num_pieces * piece,
      piece=piece,
      num_slots=num_slots,
      first_slot=first_slot % num_slots,
    )
    batches.append(batch)
    first_slot += batch.num_used_slots
  return batches


def largest_piece(num_matrices: int, size: int) -> int:
  """Return the number of matrices [size, size] that one device computes at a time, in pieces of about equal length."""
  num_pieces = _divide_up(4 * size * size * num_matrices, _piece_bytes())
  return _divide_up(num_matrices, num_pieces)


def _piece_bytes() -> int:
  """Return the size in bytes of the matrices that one device computes at a time: on CPU, the size of its caches.

  Memory for intermediate results is about ten times as much.
  """
  if jax.default_backend() == 'cpu':
    return 2**19
  return 2**26


def _divide_up(a: int, b: int) -> int:
  """Return a / b rounded up."""
  return -(-a // b)


def _num_rows(matrix) -> int:
  """Return the number of matrices in an entry."""
  if matrix.ndim == 2:
    return 1
  return matrix.shape[0]


def _refresh_batch(
  batch, slot, matrices, exponents, old_roots, old_errors, *, roots_fn, failure_threshold
):
  """Return the lists of roots and errors of a batch's entries after one slot."""
  slot = (slot - batch.first_slot) % batch.num_slots

  def refreshed(old_roots, old_errors):
    start = slot * batch.rows_per_slot
    rows, powers = _rows_of_slot(batch, start, matrices, exponents)
    new_roots, new_errors = roots_fn(batch, rows, powers)
    is_good = new_errors < failure_threshold  # False if NaN
    results = [], []
    for old_root, old_error, positions in zip(old_roots, old_errors, batch.positions, strict=True):
      index = positions - start
      is_here = (index >= 0) & (index < batch.rows_per_slot)
      index = jnp.clip(index, 0, batch.rows_per_slot - 1)
      is_used = (is_here & is_good[index])[:, None, None]
      results[0].append(jnp.where(is_used, new_roots[index], old_root).reshape(old_root.shape))
      results[1].append(jnp.where(is_here, new_errors[index], old_error).reshape(old_error.shape))
    return results

  return _unless_unused(batch, slot, refreshed, old_roots, old_errors)


def _unless_unused(batch, slot, refreshed, *old):
  """Return `refreshed(*old)`, or the old roots and errors in slots without rows."""
  if batch.num_used_slots == batch.num_slots:
    return refreshed(*old)
  return lax.cond(slot < batch.num_used_slots, refreshed, lambda *old: old, *old)


def _refresh_share(
  batch, shares, axis_name, root_fn, failure_threshold, slot, matrices, old_roots, old_errors
):
  """Return the roots and errors of this device's share of a batch after one slot.

  In each round the next `width` matrices of the slot are sent to the devices, which compute their roots: the same
  number of matrices to each device, or one to each of the first devices if a slot has fewer matrices than devices.
  """
  (positions,) = [shares.positions[i] for i in batch.entries]
  device = lax.axis_index(axis_name)
  num_devices = lax.axis_size(axis_name)
  is_scattered = batch.rows_per_slot >= num_devices
  width = batch.rows_per_slot
  if is_scattered:
    width = num_devices * min(batch.piece, max(shares.max_rows // num_devices, 1))
  slot = (slot - batch.first_slot) % batch.num_slots
  root_fn = jax.vmap(functools.partial(root_fn, p=batch.exponent))

  def gathered(own):
    if is_scattered:
      return lax.all_gather(own, axis_name, tiled=True)
    zeros = jnp.zeros([width, *own.shape[1:]], own.dtype)
    return lax.psum(zeros.at[device].set(own[0], mode='drop'), axis_name)

  def refreshed(old_roots, old_errors):
    end = jnp.minimum((slot + 1) * batch.rows_per_slot, batch.num_rows)

    def next_round(i, results):
      roots, errors = results
      start = slot * batch.rows_per_slot + i * width
      index = positions - start
      is_here = (index >= 0) & (index < width) & (positions >= 0) & (positions < end)
      rows = jnp.zeros([width, batch.size, batch.size], matrices.dtype)
      rows = rows.at[jnp.where(is_here, index, width)].set(matrices, mode='drop')
      if is_scattered:
        own = lax.psum_scatter(rows, axis_name, tiled=True)
      else:
        own = lax.dynamic_slice_in_dim(lax.psum(rows, axis_name), device, 1)
      is_busy = start + device * len(own) < jnp.minimum(start + width, end)
      no_errors = jnp.zeros(len(own), jnp.float32)
      results = lax.cond(is_busy, root_fn, lambda own: (own, no_errors), own)
      new_roots, new_errors = jax.tree.map(gathered, results)
      index = jnp.clip(index, 0, width - 1)
      is_used = is_here & (new_errors[index] < failure_threshold)  # False if NaN
      return (
        jnp.where(is_used[:, None, None], new_roots[index], roots),
        jnp.where(is_here, new_errors[index], errors),
      )

    return lax.fori_loop(
      0, _divide_up(batch.rows_per_slot, width), next_round, (old_roots, old_errors)
    )

  return _unless_unused(batch, slot, refreshed, old_roots, old_errors)


def _rows_of_slot(batch, start, matrices, exponents):
  """Return a slot's matrices, float32 [num_computed, n, n], and their exponents: one int, or int32 [num_computed].

  Padding rows are those of the next slot or, after the last matrix, identities.
  """
  num_extra = (batch.num_used_slots - 1) * batch.rows_per_slot + batch.num_computed - batch.num_rows
  identities = jnp.broadcast_to(
    jnp.eye(batch.size, dtype=matrices[0].dtype), (num_extra, batch.size, batch.size)
  )
  rows = _slice(
    batch, [*(matrix.reshape(-1, batch.size, batch.size) for matrix in matrices), identities], start
  )
  if batch.exponent is not None:
    return rows, batch.exponent
  powers = [
    jnp.broadcast_to(jnp.asarray(p, jnp.int32), _num_rows(matrix))
    for p, matrix in zip(exponents, matrices, strict=True)
  ]
  return rows, _slice(batch, [*powers, jnp.ones(num_extra, jnp.int32)], start)


def _slice(batch, parts, start):
  """Return a slot's rows of the concatenated parts."""
  parts = [part for part in parts if part.shape[0]]
  if mesh_to_spread_over():
    # Without a constraint, the compiler shards the concatenation along the dims of the matrices.
    joined = lax.with_sharding_constraint(
      jnp.concatenate([lax.with_sharding_constraint(part, PartitionSpec()) for part in parts]),
      PartitionSpec(),
    )
  else:
    if len(parts) == 1:
      joined = parts[0]
    else:
      joined = jnp.concatenate(parts)
  order = np.argsort(np.concatenate([*batch.positions, np.arange(batch.num_rows, len(joined))]))
  if np.any(order != np.arange(len(joined))):
    joined = joined[order]
  if batch.num_used_slots == 1:
    return joined
  return lax.dynamic_slice_in_dim(joined, start, batch.num_computed)


def _roots_on_all_devices(root_fn, distribute, batch, rows, powers):
  """Return the roots of a slot, each computed by one device, on all devices.

  Args:
    root_fn: function from a matrix and its exponent to its root and error.
    distribute: see `_devices`.
    batch: the batch.
    rows: float32 [num_computed, n, n].
    powers: int, or int32 [num_computed].

  Returns:
    Roots [num_computed, n, n] and errors [num_computed].
  """
  static_power = powers if isinstance(powers, int) else None

  def in_pieces(rows, *powers):
    if static_power is None:
      piece_fn = jax.vmap(root_fn)
    else:
      piece_fn = jax.vmap(functools.partial(root_fn, p=static_power))
    if batch.piece == rows.shape[0]:
      return piece_fn(rows, *powers)
    pieces = jax.tree.map(lambda x: x.reshape(-1, batch.piece, *x.shape[1:]), (rows, *powers))
    results = lax.map(lambda piece: piece_fn(*piece), pieces)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

  if static_power is not None:
    return distribute(in_pieces, (rows,))
  return distribute(in_pieces, (rows, powers))


def _devices(axis_name):
  """Return (a function of (fn, args) that calls fn with the rows of args distributed, number of devices)."""
  if axis_name is None:
    num_devices = None
  else:
    num_devices = _size_of_axis(axis_name)
  if num_devices is not None:
    return functools.partial(_over_axis, axis_name, num_devices), num_devices
  mesh = mesh_to_spread_over()
  if mesh:
    return (functools.partial(_over_mesh, mesh), mesh.size)
  return (lambda fn, args: fn(*args), 1)


def _size_of_axis(axis_name):
  """Return the size of a mapped axis, or None if the caller is not mapped over it."""
  try:
    return lax.axis_size(axis_name)
  except NameError:
    return None


def _over_axis(axis_name, num_devices, fn, args):
  """Return the results of `fn` for this device's share of the rows, gathered from all devices."""

  def share_of(rows):
    num_rows = rows.shape[0] // num_devices
    return lax.dynamic_slice_in_dim(rows, lax.axis_index(axis_name) * num_rows, num_rows)

  results = fn(*jax.tree.map(share_of, args))
  return jax.tree.map(lambda result: lax.all_gather(result, axis_name, tiled=True), results)


def _over_mesh(mesh, fn, args):
  """Return the results of `fn` on every device of the mesh for a share of the rows, gathered on all devices."""
  spec = PartitionSpec(mesh.axis_names)
  results = jax.shard_map(fn, in_specs=spec, out_specs=spec, check_vma=False)(*args)
  return lax.with_sharding_constraint(results, PartitionSpec())
