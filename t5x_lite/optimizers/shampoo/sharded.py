"""The sharded mode: the matrices of all parameters in one stack, which is sharded over the devices.

Every matrix is padded by identity to the largest, and their number to a multiple of the number of devices: so each
device stores only its share, whatever the shapes of the parameters. Momenta and other arrays with a parameter's shape
are sharded like the parameter.

A device computes with its own matrices, and gets only the blocks of gradients that belong to them (`placement`). A step
uses the roots of the previous step. Roots are computed at the matrices' unpadded sizes, by the device that stores them
or one with fewer operations (`root_balance`); those that are spread over steps are distributed again in each step
(`root_plan`).
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.optimizers.axes import names
from t5x_lite.optimizers.shampoo import state as state_lib
from t5x_lite.optimizers.shampoo import update as update_lib
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.blocks import block_statistics
from t5x_lite.optimizers.shampoo.blocks import norm_of_blocks
from t5x_lite.optimizers.shampoo.blocks import precondition_blocks
from t5x_lite.optimizers.shampoo.config import ShampooConfig
from t5x_lite.optimizers.shampoo.leaves import Leaf
from t5x_lite.optimizers.shampoo.leaves import single_layouts
from t5x_lite.optimizers.shampoo.placement import REPLICATED
from t5x_lite.optimizers.shampoo.placement import Devices
from t5x_lite.optimizers.shampoo.placement import Placement
from t5x_lite.optimizers.shampoo.placement import local_rows
from t5x_lite.optimizers.shampoo.placement import rows_of_device
from t5x_lite.optimizers.shampoo.placement import set_rows
from t5x_lite.optimizers.shampoo.placement import take_rows
from t5x_lite.optimizers.shampoo.root_balance import RootBalance
from t5x_lite.optimizers.shampoo.root_plan import Shares
from t5x_lite.optimizers.shampoo.state import GlobalShardedParameterStats
from t5x_lite.optimizers.shampoo.state import InitFnState
from t5x_lite.optimizers.shampoo.state import LocalShardedParameterStats
from t5x_lite.optimizers.shampoo.state import ShampooState
from t5x_lite.optimizers.shampoo.state import ShardedShampooStats
from t5x_lite.types import Params, PyTree


def sharded_transformation(
  learning_rate: update_lib.LearningRate, cfg: ShampooConfig
) -> optax.GradientTransformation:
  """Return the transformation of the sharded mode.

  Its `init` returns the state for given parameters. `init(None)` returns an `InitFnState`, as in the original, with
  which the shardings of the state can be computed before the state.

  Args:
    learning_rate: number, schedule or traced scalar.
    cfg: options.
  """

  def init(params: PyTree | None) -> Any:
    if params is not None:
      return init_sharded(params, cfg)
    return InitFnState(
      init_fn=functools.partial(init_sharded, cfg=cfg),
      pspec_fn=functools.partial(_partition_specs, cfg=cfg),
      shape_and_dtype_fn=lambda params: jax.eval_shape(lambda: init_sharded(params, cfg)),
    )

  def update(
    grads: PyTree, state: ShampooState, params: PyTree | None = None
  ) -> tuple[PyTree, ShampooState]:
    leaves, treedef = update_lib.inputs_of(grads, params, cfg)
    local_stats = treedef.flatten_up_to(state.stats.local_stats)
    global_stats = state.stats.global_stats
    devices = Devices.in_context()
    statistics = _padded(global_stats.statistics, devices)
    preconditioners = _padded(global_stats.preconditioners, devices)
    results = []
    never = jnp.bool_(False)
    # One device computes parameter by parameter. Of several, each computes all of its blocks of one shape at once.
    numbers = list(range(len(leaves)))
    if devices.count == 1:
      chunks = [[i] for i in numbers]
    else:
      chunks = [numbers]
    for chunk in chunks:
      new, statistics, never = _update_parameters(
        [leaves[i] for i in chunk],
        [local_stats[i] for i in chunk],
        preconditioners,
        statistics,
        never,
        state.count,
        learning_rate,
        devices,
        cfg,
      )
      results += new
    count = update_lib.after(never, state.count)
    preconditioners, errors = _update_roots(
      statistics, preconditioners, leaves, never, count, devices, cfg
    )
    num_rows = len(global_stats.statistics)
    global_stats = global_stats.replace(
      statistics=_unpadded(statistics, num_rows),
      preconditioners=_unpadded(preconditioners, num_rows),
    )
    updates = []
    new_stats = []
    for leaf, stats, (update, fields) in zip(leaves, local_stats, results, strict=True):
      own_errors = _errors_of(leaf, errors)
      metrics = update_lib.record_errors(leaf, stats.training_metrics, own_errors, cfg)
      updates.append(update)
      new_stats.append(stats.replace(training_metrics=metrics, **fields))
    stats = ShardedShampooStats(global_stats, treedef.unflatten(new_stats))
    return treedef.unflatten(updates), ShampooState(state.count + 1, stats)

  # Gradients are `updates` in optax's protocol.
  return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


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
    indices: dict[tuple[int, int], list[int]] = {}
    keys = zip(self.sizes.tolist(), self.exponents(cfg), strict=True)
    for index, key in enumerate(keys):
      indices.setdefault(key, []).append(index)
    return [(np.array(found), size, exponent) for (size, exponent), found in indices.items()]

  def exponents(self, cfg: ShampooConfig) -> list[int]:
    """Return the order of the root of every matrix."""
    exponents = []
    for layout in self.layouts:
      exponents += [update_lib.root_exponent(layout, cfg)] * len(layout.sizes)
    return exponents


def init_sharded(params: Params, cfg: ShampooConfig) -> ShampooState:
  """Return the initial state of the sharded mode.

  Args:
    params: parameters, arrays or shapes.
    cfg: options.
  """
  leaves, treedef = jax.tree.flatten(params)
  index = MatrixIndex([state_lib.layout_of(np.shape(leaf), cfg) for leaf in leaves])
  local_stats = [
    LocalShardedParameterStats(sizes=layout.sizes, **state_lib.init_local(leaf, cfg))
    for leaf, layout in zip(leaves, index.layouts, strict=True)
  ]
  num_matrices = len(index.sizes)
  num_devices = cfg.num_devices_for_pjit or jax.device_count()
  # At least one row, so that the arrays have the declared rank without matrices too.
  rows_of_device = max(-(-num_matrices // num_devices), 1)
  num_rows = rows_of_device * num_devices
  max_size = max(index.sizes, default=cfg.block_size)
  # [rows, largest size, largest size]: padding is the identity, whose root is the identity too.
  identity = jnp.eye(max_size, dtype=jnp.float32)
  identities = jnp.broadcast_to(identity, [num_rows, max_size, max_size])
  is_matrix = (np.arange(num_rows) < num_matrices)[:, None, None]
  scales = jnp.where(is_matrix, jnp.float32(cfg.matrix_epsilon), 1.0)
  exponents = index.exponents(cfg) + [1] * (num_rows - num_matrices)
  global_stats = GlobalShardedParameterStats(
    statistics=identities * scales,
    preconditioners=identities,
    exponents=jnp.array(exponents, jnp.int32),
    partition_specs=cfg.partition_specs,
  )
  return ShampooState(
    count=jnp.zeros([], jnp.int32),
    stats=ShardedShampooStats(global_stats, treedef.unflatten(local_stats)),
  )


def _partition_specs(
  params: Params,
  params_partition_spec: PyTree,
  partition_spec_for_statistics: PartitionSpec,
  *,
  cfg: ShampooConfig,
) -> ShampooState:
  """`InitFnState.pspec_fn`.

  The specs of parameters may be shorter than their ranks, or None, as in JAX: the other dims are not sharded.
  """
  state = jax.eval_shape(lambda: init_sharded(params, cfg))
  leaves, treedef = jax.tree.flatten(params)
  specs = []
  for leaf, spec in zip(leaves, treedef.flatten_up_to(params_partition_spec), strict=True):
    given = tuple(spec or ())
    others = (None,) * (np.ndim(leaf) - len(given))
    specs.append(PartitionSpec(*given, *others))
  axes = names.match_logical_axes(params, treedef.unflatten(specs))
  return state_lib.derive_axes(
    state, axes, stack_spec=partition_spec_for_statistics, blocks_axis=None, exponents_axis=None
  )


def _padded(stack: jax.Array, devices: Devices) -> jax.Array:
  """Return a stack [N, n, n] divided among the devices, with identities added to make N a multiple of their number."""
  num_extra = -len(stack) % devices.count
  if num_extra:  # only if `num_devices_for_pjit` is not the number of devices; then not all devices share the state
    identity = jnp.eye(stack.shape[-1], dtype=stack.dtype)
    extra = jnp.broadcast_to(identity, [num_extra, *identity.shape])
    stack = jnp.concatenate([_replicated(stack), extra])
    stack = _replicated(stack)
  if devices.axis_names:
    return jax.lax.with_sharding_constraint(stack, devices.rows)
  return stack


def _unpadded(stack: jax.Array, num_rows: int) -> jax.Array:
  """Return the first rows of a stack; inverse of `_padded`."""
  if len(stack) == num_rows:
    return stack
  return _replicated(stack)[:num_rows]


def _replicated(array: jax.Array) -> jax.Array:
  return jax.lax.with_sharding_constraint(array, REPLICATED)


def _update_parameters(
  leaves: Sequence[Leaf],
  local_stats: Sequence[LocalShardedParameterStats],
  preconditioners: jax.Array,
  statistics: jax.Array,
  never: jax.Array,
  count: jax.Array,
  learning_rate: update_lib.LearningRate,
  devices: Devices,
  cfg: ShampooConfig,
) -> tuple[list[tuple[jax.Array, dict[str, Any]]], jax.Array, jax.Array]:
  """Return the updates of parameters and their new state, except for the roots.

  Args:
    leaves: gradients and parameters.
    local_stats: state of each.
    preconditioners: float32 [N, n, n], the roots of the previous step.
    statistics: float32 [N, n, n].
    never: False as bool scalar, computed after all that comes first.
    count: int32 scalar, number of previous updates.
    learning_rate: number, schedule or traced scalar.
    devices: devices that store the rows.
    cfg: options.

  Returns:
    (for each parameter its update and the new fields of its state, see `update_layer`; new statistics; a value like
    `never` for what comes next).
  """
  placement = Placement(
    [(leaf.layout, leaf.first_matrices) for leaf in leaves],
    devices,
    len(statistics) // devices.count,
  )
  blocks = placement.empty_blocks()
  for i, leaf in enumerate(leaves):
    if not leaf.layout.is_preconditioned:
      continue

    def collect(carry, inputs, i=i, layout=leaf.layout):
      blocks, never = carry
      grad, tables = inputs
      return placement.collect(i, layout, grad, tables, blocks, never, count), None

    (blocks, never), _ = _for_each_layer(
      collect, leaf, (blocks, never), (leaf.grad, placement.tables(i))
    )
  blocks, statistics = _update_blocks(
    placement, blocks, preconditioners, statistics, never, count, cfg
  )
  results = []
  for i, (leaf, stats) in enumerate(zip(leaves, local_stats, strict=True)):
    update_layer = functools.partial(update_lib.update_layer, leaf, count, learning_rate, cfg)
    if not leaf.layout.is_preconditioned:
      grad = update_lib.after(never, leaf.grad)
      results.append(leaf.of_each_layer(update_layer)(grad, leaf.param, stats, None)[:2])
      continue

    def spread(never, inputs, i=i, layout=leaf.layout, update_layer=update_layer):
      grad, param, stats, tables = inputs
      groups, never = placement.spread(i, layout, blocks, tables, never, count)
      direction = layout.join(groups), norm_of_blocks(groups)
      if devices.count > 1:
        grad = update_lib.after(never, grad)
      update, fields, length = update_layer(grad, param, stats, direction)
      if devices.count == 1 and jax.default_backend() == 'cpu':
        never = update_lib.never([length], count)
      return never, (update, fields)

    never, new = _for_each_layer(
      spread, leaf, never, (leaf.grad, leaf.param, stats, placement.tables(i))
    )
    results.append(new)
  return results, statistics, never


def _for_each_layer(
  fn: Callable[..., Any], leaf: Leaf, carry: PyTree, inputs: PyTree
) -> tuple[Any, Any]:
  """Return the result of `jax.lax.scan` over the layers of a parameter, or without a loop if layers are not stacked.

  The tables in `inputs`, which are last, have a dim over layers in both cases.
  """
  *inputs, tables = inputs
  if leaf.is_stacked:
    return jax.lax.scan(fn, carry, (*inputs, [jnp.asarray(table) for table in tables]))
  return fn(carry, (*inputs, [table[0] for table in tables]))


def _update_blocks(
  placement: Placement,
  blocks: Sequence[jax.Array],
  preconditioners: jax.Array,
  statistics: jax.Array,
  never: jax.Array,
  count: jax.Array,
  cfg: ShampooConfig,
) -> tuple[list[jax.Array], jax.Array]:
  """Return the preconditioned blocks, and the statistics with the products of the blocks added if these are due.

  Args:
    placement: the blocks of each device.
    blocks: float32 [D * K, *sizes] for each class of blocks.
    preconditioners: float32 [N, n, n].
    statistics: float32 [N, n, n].
    never: False as bool scalar, computed after all that comes first.
    count: int32 scalar, number of previous updates.
    cfg: options.
  """
  max_size = statistics.shape[-1]

  def of_device(device, blocks, preconditioners, statistics, count):
    roots = placement.with_halo(preconditioners)
    rows = [rows_of_device(each.rows, device) for each in placement.classes]
    results = []
    for each, own, own_rows in zip(placement.classes, blocks, rows, strict=True):
      # [blocks, rank, largest size, largest size]: the roots of each block, one per dim, without their padding.
      flat = take_rows(roots, own_rows.reshape(-1))
      matrices = flat.reshape([*own_rows.shape, max_size, max_size])
      roots_of_dims = [matrices[:, dim, :size, :size] for dim, size in enumerate(each.sizes)]
      results.append(precondition_blocks(own, roots_of_dims, cfg.precision))

    def updated(statistics):
      for each, own, own_rows in zip(placement.classes, blocks, rows, strict=True):
        products = [_pad_stack(stack, max_size) for stack in block_statistics(own, cfg.precision)]
        new = jnp.stack(products, axis=1).reshape([-1, max_size, max_size])
        own_rows = own_rows.reshape(-1)
        if not isinstance(own_rows, np.ndarray):
          is_own = (own_rows >= 0) & (own_rows < len(statistics))
          own_rows = jnp.where(is_own, own_rows, len(statistics))
        sizes = np.tile(each.sizes, len(own))
        new = _accumulate(take_rows(statistics, own_rows), new, sizes, cfg)
        statistics = set_rows(statistics, own_rows, new)
      return statistics

    if cfg.statistics_compute_steps == 1:
      return results, updated(statistics)
    is_due = count % cfg.statistics_compute_steps == 0
    return results, update_lib.run_if(is_due, updated, statistics)

  if not placement.classes:
    return [], statistics
  if placement.devices.count == 1:
    preconditioners = update_lib.after(never, preconditioners)  # fused into the slices
  rows = placement.devices.rows
  in_specs = (rows, rows, rows, REPLICATED)
  update_on_each = placement.devices.on_each(of_device, in_specs, (rows, rows))
  return update_on_each(never, blocks, preconditioners, statistics, count)


def _update_roots(
  statistics: jax.Array,
  preconditioners: jax.Array,
  leaves: Sequence[Leaf],
  never: jax.Array,
  count: jax.Array,
  devices: Devices,
  cfg: ShampooConfig,
) -> tuple[jax.Array, jax.Array]:
  """Return the preconditioners [N, n, n] with the roots that are due, and the error of each [N] (`compute_roots`)."""
  index = MatrixIndex(single_layouts(leaves))
  batches = index.batches(cfg)
  if not batches:
    return preconditioners, jnp.zeros(len(preconditioners))
  max_size = statistics.shape[-1]
  num_rows = len(statistics) // devices.count
  sizes = [size for _, size, _ in batches]
  exponents = [exponent for _, _, exponent in batches]
  tables = [local_rows(rows, devices.count, num_rows) for rows, _, _ in batches]
  balance = None
  if devices.count > 1 and not cfg.spread_roots:
    balance = RootBalance(batches, devices.count, num_rows)

  def of_device(device, statistics, preconditioners, count):
    rows = [rows_of_device(table, device) for table, _ in tables]
    # Spread roots of one step are those of adjacent rows, which few devices have.
    distribution = {}
    if cfg.spread_roots and devices.count > 1:
      shares = Shares(
        [jnp.asarray(rows_of_device(positions, device)) for _, positions in tables],
        [len(indices) for indices, _, _ in batches],
        max(layout.num_statistics for layout in index.layouts) // 2,
      )
      distribution = {'axis_names': devices.axis_names, 'shares': shares}

    def unpadded(matrices):
      """Return float32 [k, n, n] for each batch of equal sizes, given those of the device."""
      return [
        take_rows(matrices, own)[:, :size, :size] for own, size in zip(rows, sizes, strict=True)
      ]

    def with_new_roots(results):
      old, errors = results
      if balance:
        return balance.compute(device, statistics, old, count, devices.axis_names, cfg)
      stacks = unpadded(statistics)
      old_stacks = unpadded(old)
      if devices.count == 1:
        # All operations that read the old roots are done, so that the new ones may replace them in memory.
        old_stacks = update_lib.after(never, old_stacks)
      roots, root_errors = update_lib.compute_stack_roots(
        stacks, exponents, old_stacks, count, max_size, cfg, **distribution
      )
      for own, new, new_errors in zip(rows, roots, root_errors, strict=True):
        old = set_rows(old, own, _pad_stack(new, max_size))
        errors = set_rows(errors, own, new_errors)
      return old, errors

    errors = jnp.full([len(statistics)], cfg.inverse_failure_threshold, jnp.float32)
    return update_lib.compute_when_due(with_new_roots, (preconditioners, errors), count, cfg)

  rows = devices.rows
  update_on_each = devices.on_each(of_device, (rows, rows, REPLICATED), rows)
  preconditioners, errors = update_on_each(never, statistics, preconditioners, count)
  if devices.axis_names:
    errors = _replicated(errors)
  return preconditioners, errors


def _errors_of(leaf: Leaf, errors: jax.Array) -> list[jax.Array]:
  """Return the errors [k], or [num_layers, k], of each stack of a parameter, given the global ones [N]."""
  stack_of_matrix = leaf.layout.order[:, 0]
  found = []
  for stack in range(len(leaf.layout.stack_shapes)):
    matrices = np.flatnonzero(stack_of_matrix == stack)
    found.append(errors[np.add.outer(leaf.starts, matrices)])
  return found


def _pad_stack(stack: jax.Array, size: int) -> jax.Array:
  """Return matrices [k, n, n] as the upper left blocks of [k, size, size], with ones on the rest of the diagonal."""
  width = size - stack.shape[-1]
  if not width:
    return stack
  rest = jnp.diag(jnp.arange(size) >= stack.shape[-1]).astype(stack.dtype)
  return jnp.pad(stack, ((0, 0), (0, width), (0, width))) + rest


def _accumulate(old: jax.Array, new: jax.Array, sizes: np.ndarray, cfg: ShampooConfig) -> jax.Array:
  """Return running second moments [k, max_n, max_n] of k matrices of these sizes; the padding is that of `new`."""
  accumulated = update_lib.accumulate(old, new, cfg)
  inside = np.arange(new.shape[-1]) < sizes[:, None]
  if inside.all():
    return accumulated
  return jnp.where(inside[:, :, None] & inside[:, None, :], accumulated, new)
