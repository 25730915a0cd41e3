"""What Distributed Shampoo keeps between steps, and the logical axes of it.

The names of classes and fields are those of the original implementation. The structure is the same from `init` on.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import logging
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.optimizers.axes import names
from t5x_lite.optimizers.axes.rules import OptaxStatePartitionRules
from t5x_lite.optimizers.base.state_hooks import register_schedule_count, register_state_metrics
from t5x_lite.optimizers.shampoo.blocks import BlockLayout, make_layout
from t5x_lite.optimizers.shampoo.config import BLOCKS_AXIS, STACK_AXIS, ShampooConfig
from t5x_lite.optimizers.shampoo.quantize import QuantizedValue
from t5x_lite.types import LogicalAxes, Params, PyTree

_logger = logging.getLogger(__name__)


class BlockMatrices(struct.PyTreeNode):
  """The statistics, or the preconditioners, of one parameter.

  Reads as a list of matrices [n, n], or of `QuantizedValue`s of them, in the order of `blocks`. They are kept in
  stacks, on which the update works as a whole: a few dozen arrays compile and start faster than hundreds.

  Attributes:
    stacks: float32 arrays [k, n, n], or `QuantizedValue`s of such, one per group of equal blocks and dim.
    layout: how the parameter is cut (static).
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
  """How well the roots of one parameter were taken.

  Attributes:
    inverse_pth_root_errors: float32 [num_statistics] ([1] without statistics), for each matrix the error of the last
      root taken, be it used or refused; 0 before the first. Exact zeros and NaN are not recorded.
  """

  inverse_pth_root_errors: jax.Array


class ParameterStats(NamedTuple):
  """State of one parameter in the plain mode.

  Attributes:
    diagonal_statistics: second moments of the grafted method, shaped as the parameter; None for SGD and SQRT_N.
    statistics: running second moments along the dims of each block.
    preconditioners: their inverse roots.
    diagonal_momentum: momentum of the grafted method, shaped as the parameter; None for SQRT_N, which shares Shampoo's.
    momentum: momentum of Shampoo, shaped as the parameter.
    training_metrics: errors of the roots.
  """

  diagonal_statistics: QuantizedValue | None
  statistics: BlockMatrices
  preconditioners: BlockMatrices
  diagonal_momentum: QuantizedValue | None
  momentum: QuantizedValue
  training_metrics: TrainingMetrics


class GlobalShardedParameterStats(struct.PyTreeNode):
  """Statistics of all parameters in the sharded mode, each padded by identity to the largest; N counts padding too.

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
    index_start: place of the first matrix of this parameter in the global stacks (static).
    sizes: sizes n of its matrices, in order (static).
  """

  diagonal_statistics: QuantizedValue | None
  diagonal_momentum: QuantizedValue | None
  momentum: QuantizedValue
  training_metrics: TrainingMetrics
  index_start: int = struct.field(pytree_node=False)
  sizes: tuple[int, ...] = struct.field(pytree_node=False)


class ShardedShampooStats(NamedTuple):
  """State of all parameters in the sharded mode.

  Attributes:
    global_stats: a `GlobalShardedParameterStats`.
    local_stats: a tree like the parameters, with a `LocalShardedParameterStats` at each.
  """

  global_stats: GlobalShardedParameterStats
  local_stats: PyTree


class ShampooState(NamedTuple):
  """State of Distributed Shampoo.

  Attributes:
    count: int32 scalar, the number of updates made.
    stats: a tree like the parameters with a `ParameterStats` at each; sharded, a `ShardedShampooStats`.
  """

  count: jax.Array
  stats: Any


class InitFnState(NamedTuple):
  """What `init(None)` of a sharded transformation returns.

  Attributes:
    init_fn: from the parameters to the state.
    pspec_fn: from (parameters, their `PartitionSpec`s, the spec of the stacked statistics) to the `PartitionSpec`s of
      the state.
    shape_and_dtype_fn: from the parameters to the state with a `jax.ShapeDtypeStruct` in place of each array.
  """

  init_fn: Callable[[Params], ShampooState]
  pspec_fn: Callable[[Params, PyTree, PartitionSpec], ShampooState]
  shape_and_dtype_fn: Callable[[Params], ShampooState]


def layout_of(array: Any, cfg: ShampooConfig) -> BlockLayout:
  """Returns how a parameter (anything with a shape) is cut into blocks."""
  return make_layout(
      np.shape(array), block_size=cfg.block_size, merge_dims=cfg.best_effort_shape_interpretation,
      largest_dim=cfg.skip_preconditioning_dim_size_gt)


def quantize_momentum(momentum: jax.Array, cfg: ShampooConfig) -> QuantizedValue:
  """Returns momentum (float32, shaped as a parameter) in the form that the state keeps."""
  dtype = jnp.int8 if cfg.best_effort_memory_usage_reduction else jnp.float32
  return QuantizedValue.from_float(momentum, dtype, False)


def quantize_stack(stack: jax.Array, cfg: ShampooConfig) -> Any:
  """Returns matrices (float32 [k, n, n]) in the form that the plain mode's state keeps."""
  if not cfg.statistics_are_quantized:
    return stack
  return jax.vmap(lambda matrix: QuantizedValue.from_float(matrix, jnp.int16, True))(stack)


def stack_to_float(stack: Any) -> jax.Array:
  """Inverse of `quantize_stack`, as far as rounding allows: float32 [k, n, n]."""
  return jax.vmap(lambda value: value.to_float())(stack) if isinstance(stack, QuantizedValue) else stack


def init_local(param: Any, cfg: ShampooConfig) -> dict[str, Any]:
  """Returns the fields that `ParameterStats` and `LocalShardedParameterStats` share, for one parameter."""

  def zeros(quantize: Callable[[jax.Array], QuantizedValue]) -> QuantizedValue:
    shapes = jax.eval_shape(quantize, jax.ShapeDtypeStruct(np.shape(param), jnp.float32))
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)

  momentum_of = functools.partial(quantize_momentum, cfg=cfg)
  second_moments_of = functools.partial(QuantizedValue.from_float, dtype=jnp.float32)
  num_errors = max(layout_of(param, cfg).num_statistics, 1)
  return {
      'diagonal_statistics': zeros(second_moments_of) if cfg.has_diagonal_statistics else None,
      'diagonal_momentum': zeros(momentum_of) if cfg.has_diagonal_momentum else None,
      'momentum': zeros(momentum_of),
      'training_metrics': TrainingMetrics(jnp.zeros([num_errors], jnp.float32)),
  }


def init_plain(params: Params, cfg: ShampooConfig) -> ShampooState:
  """Returns the plain mode's state before the first update.

  Statistics start at `matrix_epsilon` times the identity, preconditioners at the identity.
  """

  def init_parameter(param: Any) -> ParameterStats:
    layout = layout_of(param, cfg)

    def matrices(scale: float, partition_spec: PartitionSpec) -> BlockMatrices:
      # One matrix is quantized and repeated: compilers would compute all of them beforehand, slowly.
      stacks = tuple(
          jax.tree.map(lambda array, count=count: jnp.broadcast_to(array[0], [count, *array.shape[1:]]),
                       quantize_stack(scale * jnp.eye(size, dtype=jnp.float32)[None], cfg))
          for count, size in layout.stack_shapes)
      return BlockMatrices(stacks, layout, partition_spec)

    statistics_spec, preconditioners_spec = cfg.partition_specs
    return ParameterStats(
        statistics=matrices(cfg.matrix_epsilon, statistics_spec), preconditioners=matrices(1.0, preconditioners_spec),
        **init_local(param, cfg))

  return ShampooState(count=jnp.zeros([], jnp.int32), stats=jax.tree.map(init_parameter, params))


def derive_axes(
    state: ShampooState, params_axes: LogicalAxes, *, stack_spec: PartitionSpec | None = None,
    blocks_axis: str | None = BLOCKS_AXIS, exponents_axis: str | None = STACK_AXIS) -> ShampooState:
  """Returns a `ShampooState` with a `PartitionSpec` of one entry per dim in place of each array.

  What is shaped as a parameter has the parameter's axes, a column scale of int8 momentum all but the first of them,
  a stack of matrices the `partition_spec` that the state says.

  Args:
    state: arrays or `jax.ShapeDtypeStruct`s.
    params_axes: a `PartitionSpec` for each parameter.
    stack_spec: replaces the `partition_specs` of the sharded mode's stacks.
    blocks_axis: axis of the errors of one parameter.
    exponents_axis: axis of the sharded mode's exponents.
  """

  def of_quantized(value: QuantizedValue | None, axes: PartitionSpec) -> QuantizedValue | None:
    if value is None:
      return None
    axes = tuple(axes) + (None,) * (np.ndim(value.quantized) - len(axes))
    specs = jax.tree.map(names.unnamed_axes, value)
    specs = specs.replace(quantized=PartitionSpec(*axes))
    # The scales of integers: one per column. There are none of a float array.
    if value.bucket_size is not None and jnp.issubdtype(value.dtype, jnp.integer):
      specs = specs.replace(bucket_size=PartitionSpec(*axes[1:]))
    return specs

  def of_matrices(matrices: BlockMatrices) -> BlockMatrices:
    return jax.tree.map(lambda array: PartitionSpec(*matrices.partition_spec[:np.ndim(array)]), matrices)

  def of_parameter(stats: Any, axes: PartitionSpec) -> Any:
    if isinstance(stats, optax.MaskedNode):
      return stats
    axes = PartitionSpec() if axes is None else axes
    fields = {
        'diagonal_statistics': of_quantized(stats.diagonal_statistics, axes),
        'diagonal_momentum': of_quantized(stats.diagonal_momentum, axes),
        'momentum': of_quantized(stats.momentum, axes),
        'training_metrics': TrainingMetrics(PartitionSpec(blocks_axis)),
    }
    if isinstance(stats, LocalShardedParameterStats):
      return stats.replace(**fields)
    return stats._replace(
        statistics=of_matrices(stats.statistics), preconditioners=of_matrices(stats.preconditioners), **fields)

  is_sharded = isinstance(state.stats, ShardedShampooStats)
  axes = jax.tree.map(
      of_parameter, state.stats.local_stats if is_sharded else state.stats, params_axes, is_leaf=_is_parameter_stats)
  if is_sharded:
    global_stats = state.stats.global_stats
    statistics, preconditioners = (stack_spec,) * 2 if stack_spec is not None else global_stats.partition_specs
    axes = ShardedShampooStats(
        global_stats.replace(
            statistics=statistics, preconditioners=preconditioners, exponents=PartitionSpec(exponents_axis)), axes)
  else:
    _tell_of_copies(state)
  return ShampooState(count=PartitionSpec(), stats=axes)


def _tell_of_copies(state: ShampooState) -> None:
  """Logs how much of the plain mode's matrices does not divide over all devices, with the remedy, if it is much."""
  num_devices = jax.device_count()
  stacks = [
      array for node in jax.tree.leaves(state.stats, is_leaf=_is_parameter_stats) if isinstance(node, ParameterStats)
      for matrices in (node.statistics, node.preconditioners) if STACK_AXIS in matrices.partition_spec
      for array in jax.tree.leaves(matrices)]
  sizes = np.array([array.size * array.dtype.itemsize for array in stacks])
  is_copied = np.array([array.shape[0] % num_devices > 0 for array in stacks], bool)
  if sizes[is_copied].sum() > 0.1 * sizes.sum():
    log_once(
        f'Shampoo: {sizes[is_copied].sum() / sizes.sum():.0%} of the matrices ({sizes.sum() / 2**30:.3g} GiB) are in '
        f'stacks that do not divide over all {num_devices} devices, of which several keep copies of them; '
        'shard_optimizer_states=True shards all over all')


@functools.cache
def log_once(message: str) -> None:
  """Logs a message the first time that it is given."""
  # The axes of one state are asked for by several parts of a program.
  _logger.info('%s', message)


def _is_parameter_stats(node: Any) -> bool:
  return isinstance(node, (ParameterStats, LocalShardedParameterStats, optax.MaskedNode))


def root_metrics(state: ShampooState) -> dict[str, jax.Array]:
  """Returns the largest and the mean error of the last roots of all matrices; nothing if there are no matrices."""
  is_sharded = isinstance(state.stats, ShardedShampooStats)
  stats = jax.tree.leaves(state.stats.local_stats if is_sharded else state.stats, is_leaf=_is_parameter_stats)
  errors = [
      node.training_metrics.inverse_pth_root_errors for node in stats
      if not isinstance(node, optax.MaskedNode) and len(node.sizes if is_sharded else node.statistics)]
  if not errors:
    return {}
  errors = jnp.concatenate(errors)
  return {'root_error_max': jnp.max(errors), 'root_error_mean': jnp.mean(errors)}


# From here on a root tells too little of its matrix to pass unmentioned.
_NOTABLE_ERROR = 1e-2


def report_roots(values: Mapping[str, float]) -> list[str]:
  """Returns a log line of the values of `root_metrics` where an error is notable, else none."""
  if values.get('root_error_max', 0.0) < _NOTABLE_ERROR:
    return []
  return [f'Shampoo: errors of the last roots: {values["root_error_max"]:.2g} at most, '
          f'{values["root_error_mean"]:.2g} on average; where they reach inverse_failure_threshold the roots before '
          'stay in use']


OptaxStatePartitionRules.register(ShampooState, derive_axes)
register_state_metrics(ShampooState, root_metrics, report=report_roots)
register_schedule_count(ShampooState, lambda state: state.count)
