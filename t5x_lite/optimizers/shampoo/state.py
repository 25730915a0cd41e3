"""State of Distributed Shampoo and its logical axes.

Classes and fields have the names of the original implementation. Updates do not change the structure.

In the state of a parameter whose layers are stacked (see `layer_stacks`), each array has another first dim, over the
layers, and the static data are those of a layer.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite import reductions
from t5x_lite import tree_utils
from t5x_lite.optimizers.axes import names
from t5x_lite.optimizers.axes.rules import OptaxStatePartitionRules
from t5x_lite.optimizers.base.state_hooks import register_description
from t5x_lite.optimizers.base.state_hooks import register_schedule_count
from t5x_lite.optimizers.base.state_hooks import register_state_metrics
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.blocks import make_layout
from t5x_lite.optimizers.shampoo.config import BLOCKS_AXIS
from t5x_lite.optimizers.shampoo.config import STACK_AXIS
from t5x_lite.optimizers.shampoo.config import ShampooConfig
from t5x_lite.optimizers.shampoo.quantize import QuantizedValue
from t5x_lite.types import LogicalAxes, Params, PyTree


class BlockMatrices(struct.PyTreeNode):
  """Statistics or preconditioners of one parameter.

  A sequence of matrices [n, n], or of `QuantizedValue`s of them, in the order of `blocks`, if layers are not stacked.
  They are stored in stacks, because a few dozen arrays compile and run faster than hundreds.

  Attributes:
    stacks: float32 arrays [k, n, n], or `QuantizedValue`s of them, one per group of equal blocks and dim.
    layout: division of the parameter into blocks (static).
    partition_spec: logical axes of a stack (static).
  """

  stacks: tuple[Any, ...]
  layout: BlockLayout = struct.field(pytree_node=False)
  partition_spec: PartitionSpec = struct.field(pytree_node=False)

  def __len__(self) -> int:
    return self.layout.num_statistics

  def __getitem__(self, index: int) -> Any:
    stack, row = self.layout.order[index]
    return jax.tree.map(lambda array: array[row], self.stacks[stack])

  def __iter__(self) -> Iterator[Any]:
    return (self[index] for index in range(len(self)))


class TrainingMetrics(struct.PyTreeNode):
  """Errors of the roots of one parameter.

  Attributes:
    inverse_pth_root_errors: float32 [num_statistics] ([1] without statistics), error of the last root computed for each
      matrix, used or discarded; 0 before the first. Exact zeros and NaN are not recorded.
  """

  inverse_pth_root_errors: jax.Array


class ParameterStats(NamedTuple):
  """State of one parameter in the plain mode.

  Attributes:
    diagonal_statistics: second moments of the grafted method, shaped like the parameter; None for SGD and SQRT_N.
    statistics: running second moments along the dims of each block.
    preconditioners: their inverse roots.
    diagonal_momentum: momentum of the grafted method, shaped like the parameter; None for SQRT_N, which uses Shampoo's.
    momentum: momentum of Shampoo, shaped like the parameter.
    training_metrics: errors of the roots.
  """

  diagonal_statistics: QuantizedValue | None
  statistics: BlockMatrices
  preconditioners: BlockMatrices
  diagonal_momentum: QuantizedValue | None
  momentum: QuantizedValue
  training_metrics: TrainingMetrics


class GlobalShardedParameterStats(struct.PyTreeNode):
  """Statistics of all parameters in the sharded mode, padded by identity to the largest; N includes padding.

  Attributes:
    statistics: float32 [N, n, n].
    preconditioners: float32 [N, n, n].
    exponents: int32 [N], orders of the roots.
    partition_specs: logical axes of statistics and of preconditioners (static).
  """

  statistics: jax.Array
  preconditioners: jax.Array
  exponents: jax.Array
  partition_specs: tuple[PartitionSpec, PartitionSpec] = struct.field(pytree_node=False)


class LocalShardedParameterStats(struct.PyTreeNode):
  """State of one parameter in the sharded mode; see `ParameterStats` for the arrays.

  Attributes:
    diagonal_statistics: second moments of the grafted method.
    diagonal_momentum: momentum of the grafted method.
    momentum: momentum of Shampoo.
    training_metrics: errors of the roots.
    sizes: sizes n of its matrices, in order (static).
  """

  diagonal_statistics: QuantizedValue | None
  diagonal_momentum: QuantizedValue | None
  momentum: QuantizedValue
  training_metrics: TrainingMetrics
  sizes: tuple[int, ...] = struct.field(pytree_node=False)


class ShardedShampooStats(NamedTuple):
  """State of all parameters in the sharded mode.

  Attributes:
    global_stats: matrices of all parameters.
    local_stats: tree like the parameters with a `LocalShardedParameterStats` for each.
  """

  global_stats: GlobalShardedParameterStats
  local_stats: PyTree


class ShampooState(NamedTuple):
  """State of Distributed Shampoo.

  Attributes:
    count: int32 scalar, number of updates made.
    stats: tree like the parameters with a `ParameterStats` for each; in the sharded mode a `ShardedShampooStats`.
  """

  count: jax.Array
  stats: Any


class InitFnState(NamedTuple):
  """Functions for the state of a sharded transformation, returned by `init(None)`.

  Attributes:
    init_fn: function from the parameters to the state.
    pspec_fn: function from (parameters, their `PartitionSpec`s, the spec of the stacked statistics) to the
      `PartitionSpec`s of the state.
    shape_and_dtype_fn: function from the parameters to the state with a `jax.ShapeDtypeStruct` for each array.
  """

  init_fn: Callable[[Params], ShampooState]
  pspec_fn: Callable[[Params, PyTree, PartitionSpec], ShampooState]
  shape_and_dtype_fn: Callable[[Params], ShampooState]


def layout_of(shape: tuple[int, ...], cfg: ShampooConfig) -> BlockLayout:
  """Return the division into blocks of a parameter of this shape."""
  return make_layout(
    shape,
    block_size=cfg.block_size,
    merge_dims=cfg.best_effort_shape_interpretation,
    largest_dim=cfg.skip_preconditioning_dim_size_gt,
  )


def quantize_momentum(momentum: jax.Array, cfg: ShampooConfig) -> QuantizedValue:
  """Return momentum (float32, shaped like a parameter) in the form of the state."""
  if cfg.best_effort_memory_usage_reduction:
    dtype = jnp.int8
  else:
    dtype = jnp.float32
  return QuantizedValue.from_float(momentum, dtype, False)


def quantize_stack(stack: jax.Array, cfg: ShampooConfig) -> Any:
  """Return matrices (float32 [k, n, n]) in the form of the plain mode's state."""
  if not cfg.statistics_are_quantized:
    return stack
  return jax.vmap(lambda matrix: QuantizedValue.from_float(matrix, jnp.int16, True))(stack)


def stack_to_float(stack: Any) -> jax.Array:
  """Return matrices, float32 [k, n, n]; inverse of `quantize_stack` up to rounding."""
  if isinstance(stack, QuantizedValue):
    return jax.vmap(lambda value: value.to_float())(stack)
  return stack


def init_local(param: Any, cfg: ShampooConfig) -> dict[str, Any]:
  """Return the common fields of `ParameterStats` and `LocalShardedParameterStats` for one parameter."""

  def zeros(quantize: Callable[[jax.Array], QuantizedValue]) -> QuantizedValue:
    shapes = jax.eval_shape(quantize, jax.ShapeDtypeStruct(np.shape(param), jnp.float32))
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)

  momentum_of = functools.partial(quantize_momentum, cfg=cfg)
  second_moments_of = functools.partial(QuantizedValue.from_float, dtype=jnp.float32)
  num_errors = max(layout_of(np.shape(param), cfg).num_statistics, 1)
  diagonal_statistics = None
  if cfg.has_diagonal_statistics:
    diagonal_statistics = zeros(second_moments_of)
  diagonal_momentum = None
  if cfg.has_diagonal_momentum:
    diagonal_momentum = zeros(momentum_of)
  return {
    'diagonal_statistics': diagonal_statistics,
    'diagonal_momentum': diagonal_momentum,
    'momentum': zeros(momentum_of),
    'training_metrics': TrainingMetrics(jnp.zeros([num_errors], jnp.float32)),
  }


def init_plain(params: Params, cfg: ShampooConfig) -> ShampooState:
  """Return the initial state of the plain mode.

  Statistics start at `matrix_epsilon` times the identity, preconditioners at the identity.
  """

  def init_parameter(param: Any) -> ParameterStats:
    layout = layout_of(np.shape(param), cfg)

    def matrices(scale: float, partition_spec: PartitionSpec) -> BlockMatrices:
      stacks = []
      for count, size in layout.stack_shapes:
        # One matrix is quantized and repeated, because compilers would slowly fold the constants of all matrices.
        single = quantize_stack(scale * jnp.eye(size, dtype=jnp.float32)[None], cfg)
        repeat = functools.partial(_repeat_row, count=count)
        stacks.append(jax.tree.map(repeat, single))
      return BlockMatrices(tuple(stacks), layout, partition_spec)

    statistics_spec, preconditioners_spec = cfg.partition_specs
    return ParameterStats(
      statistics=matrices(cfg.matrix_epsilon, statistics_spec),
      preconditioners=matrices(1.0, preconditioners_spec),
      **init_local(param, cfg),
    )

  return ShampooState(count=jnp.zeros([], jnp.int32), stats=jax.tree.map(init_parameter, params))


def _repeat_row(array: jax.Array, count: int) -> jax.Array:
  """Return [count, ...], given [1, ...]."""
  return jnp.broadcast_to(array[0], [count, *array.shape[1:]])


def axes_of_quantized(value: QuantizedValue | None, axes: PartitionSpec) -> QuantizedValue | None:
  """Return the axes of an array like a parameter with these axes; integers have one scale per column."""
  if value is None:
    return None
  names_of_dims = tuple(axes) + (None,) * (np.ndim(value.quantized) - len(axes))
  specs = jax.tree.map(names.unnamed_axes, value)
  specs = specs.replace(quantized=PartitionSpec(*names_of_dims))
  # Float arrays have no scales.
  if value.bucket_size is not None and jnp.issubdtype(value.dtype, jnp.integer):
    specs = specs.replace(bucket_size=PartitionSpec(*names_of_dims[1:]))
  return specs


def derive_axes(
  state: ShampooState,
  params_axes: LogicalAxes,
  *,
  stack_spec: PartitionSpec | None = None,
  blocks_axis: str | None = BLOCKS_AXIS,
  exponents_axis: str | None = STACK_AXIS,
) -> ShampooState:
  """Return a `ShampooState` with a `PartitionSpec` of one entry per dim for each array.

  Arrays shaped like a parameter have the parameter's axes, column scales of int8 momentum all of them except the first,
  and stacks of matrices the `partition_spec` in the state.

  Args:
    state: arrays or `jax.ShapeDtypeStruct`s.
    params_axes: `PartitionSpec` for each parameter.
    stack_spec: replaces the `partition_specs` of the sharded mode's stacks.
    blocks_axis: axis of the errors of one parameter.
    exponents_axis: axis of the sharded mode's exponents.
  """

  def of_matrices(matrices: BlockMatrices) -> BlockMatrices:
    def of_stack(array):
      return PartitionSpec(*matrices.partition_spec[: np.ndim(array)])

    return jax.tree.map(of_stack, matrices)

  def of_parameter(stats: Any, axes: PartitionSpec | None) -> Any:
    if isinstance(stats, optax.MaskedNode):
      return stats
    if axes is None:
      axes = PartitionSpec()
    metrics: TrainingMetrics = stats.training_metrics
    fields = {
      'diagonal_statistics': axes_of_quantized(stats.diagonal_statistics, axes),
      'diagonal_momentum': axes_of_quantized(stats.diagonal_momentum, axes),
      'momentum': axes_of_quantized(stats.momentum, axes),
      'training_metrics': metrics.replace(inverse_pth_root_errors=PartitionSpec(blocks_axis)),
    }
    if isinstance(stats, LocalShardedParameterStats):
      return stats.replace(**fields)
    return stats._replace(
      statistics=of_matrices(stats.statistics),
      preconditioners=of_matrices(stats.preconditioners),
      **fields,
    )

  axes = jax.tree.map(
    of_parameter, _stats_of_parameters(state), params_axes, is_leaf=_is_parameter_stats
  )
  if isinstance(state.stats, ShardedShampooStats):
    global_stats = state.stats.global_stats
    statistics, preconditioners = global_stats.partition_specs
    if stack_spec is not None:
      statistics = stack_spec
      preconditioners = stack_spec
    global_axes = global_stats.replace(
      statistics=statistics,
      preconditioners=preconditioners,
      exponents=PartitionSpec(exponents_axis),
    )
    axes = ShardedShampooStats(global_axes, axes)
  return state._replace(count=PartitionSpec(), stats=axes)


def _stats_of_parameters(state: ShampooState) -> PyTree:
  """Return the tree like the parameters with the state of each, in either mode."""
  if isinstance(state.stats, ShardedShampooStats):
    return state.stats.local_stats
  return state.stats


def _describe_copies(state: ShampooState) -> list[str]:
  """Return a line with the size of the plain mode's matrices that all devices store in full, if it is large."""
  num_devices = jax.device_count()
  total = 0
  copied = 0
  for node in jax.tree.leaves(state.stats, is_leaf=_is_parameter_stats):
    if not isinstance(node, ParameterStats):
      continue
    for matrices in (node.statistics, node.preconditioners):
      if STACK_AXIS not in matrices.partition_spec:
        continue
      for (count, _), stack in zip(matrices.layout.stack_shapes, matrices.stacks, strict=True):
        # Of all layers and experts.
        size = tree_utils.num_bytes(stack)
        total += size
        if count % num_devices:
          copied += size
  if copied <= 0.1 * total:
    return []
  return [
    f'Shampoo: {copied / total:.0%} of the matrices ({total / 2**30:.3g} GiB) are in '
    f'stacks that do not divide over all {num_devices} devices, of which several keep copies of them; '
    'shard_optimizer_states=True shards all over all'
  ]


def _is_parameter_stats(node: Any) -> bool:
  return isinstance(node, (ParameterStats, LocalShardedParameterStats, optax.MaskedNode))


def root_metrics(state: ShampooState) -> dict[str, jax.Array]:
  """Return the largest and the mean error of the last roots of all matrices; {} without matrices.

  Args:
    state: the state; errors of roots are float32.

  Returns:
    Names `root_error_max` and `root_error_mean` to float32 scalars.
  """
  errors = []
  for node in jax.tree.leaves(_stats_of_parameters(state), is_leaf=_is_parameter_stats):
    if isinstance(node, optax.MaskedNode):
      continue
    if isinstance(node, LocalShardedParameterStats):
      num_matrices = len(node.sizes)
    else:
      num_matrices = len(node.statistics)
    if num_matrices:
      errors.append(node.training_metrics.inverse_pth_root_errors.reshape(-1))
  if not errors:
    return {}
  all_errors = jnp.concatenate(errors)
  return {
    'root_error_max': reductions.largest_magnitude(all_errors),
    'root_error_mean': jnp.mean(all_errors),
  }


# Smallest error of a root that the log reports.
_NOTABLE_ERROR = 1e-2


def report_roots(values: Mapping[str, float]) -> list[str]:
  """Return a log line for the values of `root_metrics` if the largest error is notable, else no line."""
  largest = values.get('root_error_max', 0.0)
  if largest < _NOTABLE_ERROR:
    return []
  mean = values['root_error_mean']
  return [
    f'Shampoo: errors of the last roots: {largest:.2g} at most, '
    f'{mean:.2g} on average; where they reach inverse_failure_threshold the roots before '
    'stay in use'
  ]


OptaxStatePartitionRules.register(ShampooState, derive_axes)
register_state_metrics(ShampooState, root_metrics, report=report_roots)
register_schedule_count(ShampooState, lambda state: state.count)
register_description(ShampooState, _describe_copies)
