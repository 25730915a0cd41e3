"""Options of Distributed Shampoo, checked when they are given."""

from collections.abc import Sequence
import dataclasses
import enum
from typing import Any

import jax
from jax.sharding import PartitionSpec

from t5x_lite.checks import check_number
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.shampoo.roots import check_method

OWNER = 'distributed_shampoo'

# Logical axes that every partitioner knows, whatever its rules (see partitioning.rules): the first dim of a stack of
# matrices, sharded over all devices that it divides over; and what is counted per matrix of one parameter, replicated.
STACK_AXIS = 'optimizer_stack'
BLOCKS_AXIS = 'optimizer_blocks'


class GraftingType(enum.IntEnum):
  """The first-order method whose step length, tensor by tensor, Shampoo's direction is given.

  The `NORMALIZED` forms divide each gradient by its norm first.
  """

  SGD = 1
  ADAGRAD = 2
  RMSPROP = 3
  RMSPROP_NORMALIZED = 4
  SQRT_N = 5
  ADAGRAD_NORMALIZED = 6


_RMSPROP = (GraftingType.RMSPROP, GraftingType.RMSPROP_NORMALIZED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShampooConfig:
  """Options of `optimizers.distributed_shampoo`, where each is described; the learning rate is not among them.

  Raises:
    ConfigError: an option that is out of range, or two that exclude each other.
  """

  block_size: int
  beta1: float
  beta2: float
  diagonal_epsilon: float
  matrix_epsilon: float
  weight_decay: float
  start_preconditioning_step: int
  preconditioning_compute_steps: int
  statistics_compute_steps: int
  best_effort_shape_interpretation: bool
  graft_type: GraftingType
  nesterov: bool
  exponent_override: int
  batch_axis_name: str | None
  statistics_partition_spec: PartitionSpec | None
  preconditioner_partition_spec: PartitionSpec | None
  num_devices_for_pjit: int | None
  shard_optimizer_states: bool
  best_effort_memory_usage_reduction: bool
  inverse_failure_threshold: float
  moving_average_for_momentum: bool
  skip_preconditioning_dim_size_gt: int
  clip_by_scaled_gradient_norm: float | None
  precision: jax.lax.Precision
  root_method: str
  spread_roots: bool
  quantize_statistics: bool | None

  def __post_init__(self):
    for name in ('block_size', 'preconditioning_compute_steps', 'statistics_compute_steps',
                 'skip_preconditioning_dim_size_gt'):
      check_number(OWNER, name, getattr(self, name), at_least=1, integer=True)
    for name in ('start_preconditioning_step', 'exponent_override'):
      check_number(OWNER, name, getattr(self, name), at_least=0, integer=True)
    check_number(OWNER, 'num_devices_for_pjit', self.num_devices_for_pjit, at_least=1, integer=True, optional=True)
    check_number(OWNER, 'beta1', self.beta1, at_least=0, below=1)
    # 1 stands for the sum of all squared gradients, as in Adagrad.
    check_number(OWNER, 'beta2', self.beta2, at_least=0, at_most=1)
    for name in ('diagonal_epsilon', 'matrix_epsilon', 'weight_decay'):
      check_number(OWNER, name, getattr(self, name), at_least=0)
    check_number(OWNER, 'inverse_failure_threshold', self.inverse_failure_threshold, above=0)
    check_number(
        OWNER, 'clip_by_scaled_gradient_norm', self.clip_by_scaled_gradient_norm, above=0, optional=True)
    for name in ('best_effort_shape_interpretation', 'nesterov', 'shard_optimizer_states',
                 'best_effort_memory_usage_reduction', 'moving_average_for_momentum', 'spread_roots'):
      _check_bool(name, getattr(self, name))
    if self.quantize_statistics is not None:
      _check_bool('quantize_statistics', self.quantize_statistics)
    check_method(self.root_method)
    self._check_combinations()

  def _check_combinations(self) -> None:
    if self.batch_axis_name is not None and not (isinstance(self.batch_axis_name, str) and self.batch_axis_name):
      raise ConfigError(
          f'{OWNER}: batch_axis_name is {self.batch_axis_name!r}; expected the name of a mapped axis, or None.')
    if self.batch_axis_name is not None and self.shard_optimizer_states:
      raise ConfigError(
          f'{OWNER}: batch_axis_name and shard_optimizer_states exclude each other: one deals the roots out over a '
          'mapped axis, the other over a mesh; leave out one of them.')
    if self.clip_by_scaled_gradient_norm is not None and self.graft_type not in _RMSPROP:
      raise ConfigError(
          f'{OWNER}: clip_by_scaled_gradient_norm={self.clip_by_scaled_gradient_norm} has no effect with '
          f'graft_type={self.graft_type.name}; choose graft_type RMSPROP or RMSPROP_NORMALIZED, or leave it out.')
    if self.quantize_statistics and self.shard_optimizer_states:
      raise ConfigError(
          f'{OWNER}: quantize_statistics and shard_optimizer_states exclude each other, since sharded statistics are '
          'float32; leave out one of them.')
    if self.spread_roots and self.preconditioning_compute_steps == 1:
      raise ConfigError(
          f'{OWNER}: spread_roots=True needs an interval to spread the roots over; set preconditioning_compute_steps '
          'above 1, or leave spread_roots out.')

  @property
  def statistics_are_quantized(self) -> bool:
    """Whether statistics and preconditioners are int16 rather than float32."""
    if self.quantize_statistics is not None:
      return self.quantize_statistics
    return self.best_effort_memory_usage_reduction and self.batch_axis_name is not None

  @property
  def has_diagonal_statistics(self) -> bool:
    """Whether the grafted method keeps second moments of its own."""
    return self.graft_type not in (GraftingType.SGD, GraftingType.SQRT_N)

  @property
  def has_diagonal_momentum(self) -> bool:
    """Whether the grafted method's momentum is apart from Shampoo's."""
    return self.graft_type != GraftingType.SQRT_N

  @property
  def partition_specs(self) -> tuple[PartitionSpec, PartitionSpec]:
    """Logical axes of the [k, n, n] stacks of statistics and of preconditioners in the state."""
    statistics = self.statistics_partition_spec
    if statistics is None:
      statistics = PartitionSpec(STACK_AXIS, None, None)
    preconditioners = self.preconditioner_partition_spec
    return statistics, statistics if preconditioners is None else preconditioners


def parse_graft_type(graft_type: Any) -> GraftingType:
  """Returns a graft type given by member, name (any case) or number.

  Raises:
    ConfigError: there is no such type.

  >>> parse_graft_type('rmsprop').name
  'RMSPROP'
  """
  if isinstance(graft_type, str):
    if graft_type.upper() in GraftingType.__members__:
      return GraftingType[graft_type.upper()]
  elif isinstance(graft_type, int) and not isinstance(graft_type, bool) and graft_type in list(GraftingType):
    return GraftingType(graft_type)
  names = list(GraftingType.__members__)
  raise ConfigError(
      f'{OWNER}: graft_type is {graft_type!r}; expected one of {names}.{did_you_mean(str(graft_type).upper(), names)}')


def parse_partition_spec(name: str, spec: Any) -> PartitionSpec | None:
  """Returns the axes of a [k, n, n] stack as a spec of three entries.

  Args:
    name: name of the option, for the error message.
    spec: None, a `PartitionSpec` or another sequence (as gin gives it) of up to three axis names or None.

  Raises:
    ConfigError: something else.

  >>> parse_partition_spec('statistics_partition_spec', ['x'])
  P('x', None, None)
  """
  if spec is None:
    return None
  if isinstance(spec, str) or not isinstance(spec, (PartitionSpec, Sequence)) or len(spec) > 3:
    raise ConfigError(
        f'{OWNER}: {name} is {spec!r}; expected a PartitionSpec of up to three axes, for stacks [k, n, n] of matrices, '
        f"such as PartitionSpec('{STACK_AXIS}', None, None).")
  return PartitionSpec(*spec, *(None,) * (3 - len(spec)))


def parse_precision(precision: Any) -> jax.lax.Precision:
  """Returns a `jax.lax.Precision` given by member or name.

  Raises:
    ConfigError: there is no such precision.
  """
  if isinstance(precision, jax.lax.Precision):
    return precision
  names = list(jax.lax.Precision.__members__)
  if isinstance(precision, str) and precision.upper() in names:
    return jax.lax.Precision[precision.upper()]
  raise ConfigError(
      f'{OWNER}: precision is {precision!r}; expected one of {names}.{did_you_mean(str(precision).upper(), names)}')


def _check_bool(name: str, value: Any) -> None:
  if not isinstance(value, bool):
    raise ConfigError(f'{OWNER}: {name} is {value!r}; expected True or False.')
