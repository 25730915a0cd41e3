"""The sharded mode: the matrices of all parameters in one stack, which is sharded over the devices.

Every matrix is padded by identity to the largest, and their number to a multiple of the number of devices: so each
device stores only its share, whatever the shapes of the parameters. Momenta and other arrays with a parameter's shape
are sharded like the parameter.

A step uses the roots of the previous step, so that roots and the rest of the step may run in parallel. Roots are
computed at the matrices' unpadded sizes, each by one device (`root_plan`).
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.optimizers.axes import names
from t5x_lite.optimizers.shampoo import state as state_lib
from t5x_lite.optimizers.shampoo import update as update_lib
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.config import ShampooConfig
from t5x_lite.optimizers.shampoo.state import (
    GlobalShardedParameterStats,
    InitFnState,
    LocalShardedParameterStats,
    ShampooState,
    ShardedShampooStats,
)
from t5x_lite.types import Params, PyTree


def sharded_transformation(
    learning_rate: update_lib.LearningRate, cfg: ShampooConfig) -> optax.GradientTransformation:
  """Return the transformation of the sharded mode.

  Its `init` returns the state for given parameters. `init(None)` returns an `InitFnState`, as in the original, with
  which the shardings of the state can be computed before the state.

  Args:
    learning_rate: number, schedule or traced scalar.
    cfg: options.
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
    index = MatrixIndex(update_lib.single_layouts(leaves))
    count, old_roots = state.count, _replicated(state.stats.global_stats.preconditioners)
    updates, new_fields, done = [], [], []
    for leaf, stats in zip(leaves, local_stats, strict=True):
      leaf = dataclasses.replace(leaf, grad=update_lib.in_sequence(leaf.grad, done, count))
      starts = update_lib.in_sequence(jnp.asarray(leaf.starts), done, count)
      update, fields, length = update_lib.update_parameter(
          leaf, stats, _stacks_of(leaf, old_roots, starts), count, learning_rate, cfg)
      done = [length]
      updates.append(update)
      new_fields.append(fields)
    # All operations that read the old roots are done, so that the new ones may replace them in memory.
    global_stats, errors = _update_global(
        state.stats.global_stats, leaves, index, update_lib.in_sequence(count, done, count), cfg)
    new_stats = []
    for leaf, stats, fields, root_errors in zip(leaves, local_stats, new_fields, errors, strict=True):
      metrics = update_lib.record_errors(leaf, stats.training_metrics, root_errors, cfg)
      new_stats.append(stats.replace(training_metrics=metrics, **fields))
    stats = ShardedShampooStats(global_stats, treedef.unflatten(new_stats))
    return treedef.unflatten(updates), ShampooState(state.count + 1, stats)

  return optax.GradientTransformation(init, update)


class MatrixIndex:
  """The matrices in the global stacks: parameter by parameter, in the order of `blocks`.

  Attributes:
    layouts: layouts of the parameters, in the order in which JAX flattens the tree with a subtree per layer.
    sizes: int [num_statistics], size n of every matrix.
  """

  def __init__(self, layouts: Sequence[BlockLayout]):
    self.layouts = layouts
    self.sizes = np.array([size for layout in layouts for size in layout.sizes], np.int32)

  def batches(self, cfg: ShampooConfig) -> list[tuple[np.ndarray, int, int]]:
    """Return (indices int64[n], size, exponent) for each group of n matrices with equal size and exponent."""
    exponents = [update_lib.root_exponent(layout, cfg) for layout in self.layouts for _ in layout.sizes]
    keys = list(zip(self.sizes.tolist(), exponents, strict=True))
    return [(np.array([index for index, key in enumerate(keys) if key == wanted]), *wanted)
            for wanted in dict.fromkeys(keys)]


def init_sharded(params: Params, cfg: ShampooConfig) -> ShampooState:
  """Return the initial state of the sharded mode.

  Args:
    params: parameters, arrays or shapes.
    cfg: options.
  """
  leaves, treedef = jax.tree.flatten(params)
  index = MatrixIndex([state_lib.layout_of(leaf, cfg) for leaf in leaves])
  local_stats = [LocalShardedParameterStats(sizes=layout.sizes, **state_lib.init_local(leaf, cfg))
                 for leaf, layout in zip(leaves, index.layouts, strict=True)]
  num_matrices = len(index.sizes)
  num_devices = cfg.num_devices_for_pjit or jax.device_count()
  # At least one row, so that the arrays have the declared rank without matrices too.
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

  The specs of parameters may be shorter than their ranks, or None, as in JAX: the other dims are not sharded.
  """
  state = jax.eval_shape(lambda: init_sharded(params, cfg))
  leaves, treedef = jax.tree.flatten(params)
  specs = [PartitionSpec(*(spec or ()), *(None,) * (np.ndim(leaf) - len(spec or ())))
           for leaf, spec in zip(leaves, treedef.flatten_up_to(params_partition_spec), strict=True)]
  specs = names.match_logical_axes(params, treedef.unflatten(specs))
  return state_lib.derive_axes(
      state, specs, stack_spec=partition_spec_for_statistics, blocks_axis=None, exponents_axis=None)


def _stacks_of(leaf: update_lib.Leaf, matrices: jax.Array, starts: jax.Array) -> list[jax.Array]:
  """Return the stacks [k, n, n] of a parameter, with a first dim over layers if these are stacked.

  Args:
    leaf: the parameter.
    matrices: the global stack, float32 [N, max_n, max_n].
    starts: `leaf.starts`, possibly traced.
  """
  layout = leaf.layout

  def of_layer(start: jax.Array) -> list[jax.Array]:
    own = jax.lax.dynamic_slice_in_dim(matrices, start, layout.num_statistics)
    if len(layout.groups) == 1:
      # Equal blocks: the matrices of the stacks alternate.
      own = own.reshape([-1, len(layout.stack_shapes), *own.shape[1:]])
      return [own[:, stack, :size, :size] for stack, (_, size) in enumerate(layout.stack_shapes)]
    return [own[layout.order[:, 0] == stack, :size, :size] for stack, (_, size) in enumerate(layout.stack_shapes)]

  return leaf.of_each_layer(of_layer)(starts) if layout.is_preconditioned else []


def _matrices_of(leaf: update_lib.Leaf, stacks: Sequence[jax.Array], max_size: int) -> jax.Array:
  """Return the matrices of all layers of a parameter [m, max_n, max_n], padded by identity; inverse of `_stacks_of`."""

  def of_layer(stacks: Sequence[jax.Array]) -> jax.Array:
    stacks = [_pad_stack(stack, max_size) for stack in stacks]
    if len(leaf.layout.groups) == 1:
      return jnp.stack(stacks, axis=1).reshape([-1, max_size, max_size])
    return jnp.concatenate(stacks)[leaf.layout.flat_order]

  return leaf.merge(leaf.of_each_layer(of_layer)(stacks))


def _errors_of(leaf: update_lib.Leaf, errors: jax.Array) -> list[jax.Array]:
  """Return the errors [k], or [num_layers, k], of each stack of a parameter, given the global ones [N]."""
  return [errors[np.add.outer(leaf.starts, np.flatnonzero(leaf.layout.order[:, 0] == stack))]
          for stack in range(len(leaf.layout.stack_shapes))]


def _update_global(
    stats: GlobalShardedParameterStats, leaves: Sequence[update_lib.Leaf], index: MatrixIndex, count: jax.Array,
    cfg: ShampooConfig) -> tuple[GlobalShardedParameterStats, list[list[jax.Array]]]:
  """Return the statistics with the gradients added, and the errors of the roots that were due.

  Returns:
    (new global statistics, per parameter the errors of each stack, see `_errors_of`).
  """
  if not len(index.sizes):
    return stats, [[] for _ in leaves]
  num_rows, max_size = stats.statistics.shape[:2]
  # On several devices all rows are changed together; on one device, the rows of each parameter separately.
  is_spread = jax.sharding.get_abstract_mesh().size > 1

  def updated(statistics: jax.Array) -> jax.Array:
    new, rows_of_new, done = [], [], []
    for leaf in leaves:
      products = leaf.of_each_layer(functools.partial(leaf.layout.statistics, precision=cfg.precision))(
          update_lib.in_sequence(leaf.grad, done, count))
      if not products:
        continue
      done = products
      matrices = _matrices_of(leaf, products, max_size)
      rows = np.add.outer(leaf.starts, np.arange(leaf.layout.num_statistics)).reshape(-1)
      if is_spread:
        new.append(matrices)
        rows_of_new.append(rows)
      elif leaf.is_stacked:
        statistics = statistics.at[rows].set(
            _accumulate(statistics[rows], matrices, index.sizes[rows], cfg), unique_indices=True)
      else:
        old = jax.lax.dynamic_slice_in_dim(statistics, rows[0], len(rows))
        statistics = jax.lax.dynamic_update_slice_in_dim(
            statistics, _accumulate(old, matrices, index.sizes[rows], cfg), rows[0], 0)
    if not is_spread:
      return statistics
    return _accumulate(
        statistics, _join_stacks(new, np.concatenate(rows_of_new), num_rows, max_size), index.sizes, cfg)

  if cfg.statistics_compute_steps == 1:
    statistics = updated(stats.statistics)
  else:
    statistics = update_lib.run_if(count % cfg.statistics_compute_steps == 0, updated, stats.statistics)
  preconditioners, errors = _update_roots(statistics, stats.preconditioners, index, count, cfg)
  return (stats.replace(statistics=statistics, preconditioners=preconditioners),
          [_errors_of(leaf, errors) for leaf in leaves])


def _update_roots(
    statistics: jax.Array, old: jax.Array, index: MatrixIndex, count: jax.Array,
    cfg: ShampooConfig) -> tuple[jax.Array, jax.Array]:
  """Return the global preconditioners [N, n, n] and the error of each [N], see `compute_roots`."""
  batches = index.batches(cfg)
  indices = np.concatenate([rows for rows, _, _ in batches])
  num_rows, max_size = old.shape[:2]

  def with_new_roots(results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    old, errors = results
    roots, root_errors = update_lib.compute_stack_roots(
        [statistics[rows, :size, :size] for rows, size, _ in batches], [exponent for _, _, exponent in batches],
        [old[rows, :size, :size] for rows, size, _ in batches], count, max_size, cfg)
    roots = _join_stacks(roots, indices, num_rows, max_size)
    return roots, errors.at[indices].set(jnp.concatenate(root_errors))

  errors = jnp.full([num_rows], cfg.inverse_failure_threshold, jnp.float32)
  return update_lib.compute_when_due(with_new_roots, (old, errors), count, cfg)


def _join_stacks(stacks: Sequence[jax.Array], indices: np.ndarray, num_rows: int, max_size: int) -> jax.Array:
  """Return [num_rows, max_size, max_size] with the matrices of the stacks at `indices`, padded by identity."""
  flat = [_pad_stack(stack, max_size) for stack in stacks]
  num_extra = num_rows - len(indices)
  if num_extra:
    flat.append(jnp.broadcast_to(jnp.eye(max_size, dtype=jnp.float32), [num_extra, max_size, max_size]))
  indices = np.concatenate([indices, np.arange(len(indices), num_rows)])
  joined = jnp.concatenate(flat)
  return joined if np.array_equal(indices, np.arange(num_rows)) else joined[np.argsort(indices)]


def _pad_stack(stack: jax.Array, size: int) -> jax.Array:
  """Return matrices [k, n, n] as the upper left blocks of [k, size, size], with ones on the rest of the diagonal."""
  width = size - stack.shape[-1]
  if not width:
    return stack
  rest = jnp.diag(jnp.arange(size) >= stack.shape[-1]).astype(stack.dtype)
  return jnp.pad(stack, ((0, 0), (0, width), (0, width))) + rest


def _accumulate(old: jax.Array, new: jax.Array, sizes: np.ndarray, cfg: ShampooConfig) -> jax.Array:
  """Return running second moments [N, max_n, max_n] of matrices of these sizes; the padding is that of `new`."""
  num_rows, max_size = new.shape[:2]
  accumulated = update_lib.accumulate(old, new, cfg)
  inside = np.arange(max_size) < np.pad(sizes, (0, num_rows - len(sizes)))[:, None]
  if inside.all():
    return accumulated
  return jnp.where(inside[:, :, None] & inside[:, None, :], accumulated, new)


def _replicated(array: jax.Array) -> jax.Array:
  """Return a sharded array replicated, if a mesh is in context, so that it is gathered only once."""
  mesh = jax.sharding.get_abstract_mesh()
  return array if mesh.empty else jax.lax.with_sharding_constraint(array, PartitionSpec())
