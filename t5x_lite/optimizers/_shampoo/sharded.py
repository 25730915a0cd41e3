"""The sharded mode: the matrices of all parameters in one stack, which is sharded over the devices.

Every matrix is padded by identity to the largest, and their number to a multiple of the number of devices: at the price
of padding, each device keeps its share and no more, whatever the shapes of the parameters. Momenta and the like stay
with their parameters and are sharded as those are.

A step uses the roots of the step before, so that roots and the rest of the step may run side by side. Roots are taken
of the matrices at their own sizes, each by one device (`root_plan`).
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.optimizers import _axes
from t5x_lite.optimizers._shampoo import state as state_lib
from t5x_lite.optimizers._shampoo import update as update_lib
from t5x_lite.optimizers._shampoo.blocks import BlockLayout
from t5x_lite.optimizers._shampoo.config import ShampooConfig
from t5x_lite.optimizers._shampoo.state import (
    GlobalShardedParameterStats, InitFnState, LocalShardedParameterStats, ShampooState, ShardedShampooStats)
from t5x_lite.types import Params, PyTree


def sharded_transformation(
    learning_rate: update_lib.LearningRate, cfg: ShampooConfig) -> optax.GradientTransformation:
  """Returns the transformation of the sharded mode.

  Its `init` makes the state of the parameters it is given. Called as `init(None)` it returns an `InitFnState`, as users
  of the original expect, who lay the state out before they make it.
  """

  def init(params: Params | None) -> ShampooState | InitFnState:
    if params is not None:
      return init_sharded(params, cfg)
    return InitFnState(
        init_fn=functools.partial(init_sharded, cfg=cfg),
        pspec_fn=functools.partial(_partition_specs, cfg=cfg),
        shape_and_dtype_fn=lambda params: jax.eval_shape(lambda: init_sharded(params, cfg)))

  def update(grads: Params, state: ShampooState, params: Params | None = None) -> tuple[Params, ShampooState]:
    leaves, treedef = update_lib.flatten_inputs(grads, params, cfg)
    local_stats = treedef.flatten_up_to(state.stats.local_stats)
    index = MatrixIndex([state_lib.layout_of(leaf.grad, cfg) for leaf in leaves])
    global_stats, errors = _update_global(
        state.stats.global_stats, [leaf.grad for leaf in leaves], index, state.count, cfg)
    old_roots = index.stacks_of(_replicated(state.stats.global_stats.preconditioners))
    updates, new_stats = [], []
    for leaf, stats, layout, preconditioners, root_errors in zip(leaves, local_stats, index.layouts, old_roots, errors):
      update, fields = update_lib.update_parameter(
          leaf, stats, layout, preconditioners, state.count, learning_rate, cfg)
      updates.append(update)
      metrics = update_lib.record_errors(stats.training_metrics, root_errors, layout, cfg)
      new_stats.append(stats.replace(training_metrics=metrics, **fields))
    stats = ShardedShampooStats(global_stats, treedef.unflatten(new_stats))
    return treedef.unflatten(updates), ShampooState(state.count + 1, stats)

  return optax.GradientTransformation(init, update)


class MatrixIndex:
  """Where the matrices of each parameter stand in the global stacks: parameter by parameter, in the order of `blocks`.

  Attributes:
    layouts: the parameters' layouts.
    starts: place of the first matrix of each parameter.
    sizes: int [num_statistics], the size n of every matrix.
  """

  def __init__(self, layouts: Sequence[BlockLayout]):
    self.layouts = layouts
    self.starts = np.cumsum([0, *(layout.num_statistics for layout in layouts)])[:-1]
    self.sizes = np.array([size for layout in layouts for size in layout.sizes], np.int32)

  @functools.cached_property
  def rows(self) -> list[list[np.ndarray]]:
    """Per parameter and stack, the places of the matrices of the stack."""
    return [
        [start + np.flatnonzero(layout.order[:, 0] == stack) for stack in range(len(layout.stack_shapes))]
        for layout, start in zip(self.layouts, self.starts)]

  def stacks_of(self, matrices: jax.Array) -> list[list[jax.Array]]:
    """Returns, per parameter, the stacks [k, n, n] out of the global one [N, max_n, max_n]."""
    return [
        [matrices[rows, :size, :size] for rows, (_, size) in zip(parameter_rows, layout.stack_shapes)]
        for parameter_rows, layout in zip(self.rows, self.layouts)]

  def join(self, stacks: Sequence[Sequence[jax.Array]], num_rows: int, max_size: int) -> jax.Array:
    """Inverse of `stacks_of`, padded by identity to [num_rows, max_size, max_size]."""
    places = np.concatenate([rows for parameter_rows in self.rows for rows in parameter_rows])
    flat = [stack for parameter_stacks in stacks for stack in parameter_stacks]
    return _join_stacks(flat, places, num_rows, max_size)

  def errors_of(self, errors: jax.Array) -> list[list[jax.Array]]:
    """Returns, per parameter, the errors [k] of each stack out of the global ones [N]."""
    return [[errors[rows] for rows in parameter_rows] for parameter_rows in self.rows]

  def batches(self, cfg: ShampooConfig) -> list[tuple[np.ndarray, int, int]]:
    """Returns (places, size, exponent) of the matrices that have size and exponent in common."""
    exponents = [update_lib.root_exponent(layout, cfg) for layout in self.layouts for _ in layout.sizes]
    keys = list(zip(self.sizes.tolist(), exponents))
    return [(np.array([place for place, key in enumerate(keys) if key == wanted]), *wanted)
            for wanted in dict.fromkeys(keys)]


def init_sharded(params: Params, cfg: ShampooConfig) -> ShampooState:
  """Returns the sharded mode's state before the first update."""
  leaves, treedef = jax.tree.flatten(params)
  index = MatrixIndex([state_lib.layout_of(leaf, cfg) for leaf in leaves])
  local_stats = [
      LocalShardedParameterStats(
          index_start=int(start), sizes=layout.sizes, **state_lib.init_local(leaf, cfg))
      for leaf, layout, start in zip(leaves, index.layouts, index.starts)]
  num_matrices = len(index.sizes)
  num_devices = cfg.num_devices_for_pjit or jax.device_count()
  # At least one row each: also without any matrix the arrays are what they are declared to be.
  num_rows = max(-(-num_matrices // num_devices), 1) * num_devices
  max_size = max(index.sizes, default=cfg.block_size)
  identities = jnp.broadcast_to(jnp.eye(max_size, dtype=jnp.float32), [num_rows, max_size, max_size])
  is_matrix = (np.arange(num_rows) < num_matrices)[:, None, None]
  exponents = [update_lib.root_exponent(layout, cfg) for layout in index.layouts for _ in layout.sizes]
  global_stats = GlobalShardedParameterStats(
      statistics=identities * jnp.where(is_matrix, jnp.float32(cfg.matrix_epsilon), 1.0),
      preconditioners=identities,
      exponents=jnp.array(exponents + [1] * (num_rows - num_matrices), jnp.int32),
      partition_specs=cfg.partition_specs)
  return ShampooState(
      count=jnp.zeros([], jnp.int32), stats=ShardedShampooStats(global_stats, treedef.unflatten(local_stats)))


def _partition_specs(
    params: Params, params_partition_spec: PyTree, partition_spec_for_statistics: PartitionSpec, *,
    cfg: ShampooConfig) -> ShampooState:
  """`InitFnState.pspec_fn`.

  The specs of parameters may be shorter than their ranks, or None, as where JAX takes a spec: the rest is not sharded.
  """
  state = jax.eval_shape(lambda: init_sharded(params, cfg))
  leaves, treedef = jax.tree.flatten(params)
  specs = [PartitionSpec(*(spec or ()), *(None,) * (np.ndim(leaf) - len(spec or ())))
           for leaf, spec in zip(leaves, treedef.flatten_up_to(params_partition_spec))]
  specs = _axes.match_logical_axes(params, treedef.unflatten(specs))
  return state_lib.derive_axes(
      state, specs, stack_spec=partition_spec_for_statistics, blocks_axis=None, exponents_axis=None)


def _update_global(
    stats: GlobalShardedParameterStats, grads: Sequence[jax.Array], index: MatrixIndex, count: jax.Array,
    cfg: ShampooConfig) -> tuple[GlobalShardedParameterStats, list[list[jax.Array]]]:
  """Adds the gradients to the global statistics and takes the roots that are due.

  Returns:
    (new global statistics, per parameter the errors [k] of each stack).
  """
  if not len(index.sizes):
    return stats, [[] for _ in index.layouts]
  num_rows, max_size = stats.statistics.shape[:2]

  def updated(statistics: jax.Array) -> jax.Array:
    new = [layout.statistics(grad, cfg.precision) for layout, grad in zip(index.layouts, grads)]
    new = index.join(new, num_rows, max_size)
    return jnp.where(_is_padding(index.sizes, num_rows, max_size), new, update_lib.accumulate(statistics, new, cfg))

  if cfg.statistics_compute_steps == 1:
    statistics = updated(stats.statistics)
  else:
    statistics = update_lib.run_if(count % cfg.statistics_compute_steps == 0, updated, stats.statistics)
  preconditioners, errors = _update_roots(statistics, stats.preconditioners, index, count, cfg)
  return stats.replace(statistics=statistics, preconditioners=preconditioners), index.errors_of(errors)


def _update_roots(
    statistics: jax.Array, old: jax.Array, index: MatrixIndex, count: jax.Array,
    cfg: ShampooConfig) -> tuple[jax.Array, jax.Array]:
  """Returns the global preconditioners [N, n, n] and the error of each [N], see `compute_roots`."""
  batches = index.batches(cfg)
  places = np.concatenate([rows for rows, _, _ in batches])
  num_rows, max_size = old.shape[:2]

  def taken(results: tuple[jax.Array, jax.Array], every: int | None) -> tuple[jax.Array, jax.Array]:
    old, errors = results
    roots, root_errors = update_lib.take_roots(
        [statistics[rows, :size, :size] for rows, size, _ in batches], [exponent for _, _, exponent in batches],
        [old[rows, :size, :size] for rows, size, _ in batches], count, max_size, cfg, every)
    roots = _join_stacks(roots, places, num_rows, max_size)
    return roots, errors.at[places].set(jnp.concatenate(root_errors))

  errors = jnp.full([num_rows], cfg.inverse_failure_threshold, jnp.float32)
  return update_lib.take_when_due(taken, (old, errors), count, cfg)


def _join_stacks(stacks: Sequence[jax.Array], places: np.ndarray, num_rows: int, max_size: int) -> jax.Array:
  """Returns [num_rows, max_size, max_size] with the matrices of the stacks at `places`, padded by identity."""
  flat = [_pad_stack(stack, max_size) for stack in stacks]
  num_extra = num_rows - len(places)
  if num_extra:
    flat.append(jnp.broadcast_to(jnp.eye(max_size, dtype=jnp.float32), [num_extra, max_size, max_size]))
  places = np.concatenate([places, np.arange(len(places), num_rows)])
  joined = jnp.concatenate(flat)
  return joined if np.array_equal(places, np.arange(num_rows)) else joined[np.argsort(places)]


def _pad_stack(stack: jax.Array, size: int) -> jax.Array:
  """Returns matrices [k, n, n] as the upper left blocks of [k, size, size], with ones on the rest of the diagonal."""
  width = size - stack.shape[-1]
  if not width:
    return stack
  rest = jnp.diag(jnp.arange(size) >= stack.shape[-1]).astype(stack.dtype)
  return jnp.pad(stack, ((0, 0), (0, width), (0, width))) + rest


def _is_padding(sizes: np.ndarray, num_rows: int, max_size: int) -> jax.Array:
  """bool [num_rows, max_size, max_size]: whether an element is outside of its matrix."""
  inside = np.arange(max_size) < np.pad(sizes, (0, num_rows - len(sizes)))[:, None]
  return ~(inside[:, :, None] & inside[:, None, :])


def _replicated(array: jax.Array) -> jax.Array:
  """Gathers a sharded array once, where a mesh is in context, and not at each of its uses."""
  mesh = jax.sharding.get_abstract_mesh()
  return array if mesh.empty else jax.lax.with_sharding_constraint(array, PartitionSpec())
