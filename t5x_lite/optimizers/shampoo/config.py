"""Options of Distributed Shampoo, with their checks."""

from collections.abc import Sequence
import dataclasses
import enum
from typing import Any

import jax
from jax.sharding import PartitionSpec

from t5x_lite import checks
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.optax_adapter.param_scales import DecayByPath
from t5x_lite.optimizers.shampoo.roots import METHODS

OWNER = 'distributed_shampoo'

# Logical axes that every partitioner knows (see partitioning.rules): the first dim of a stack of matrices, sharded over
# as many devices as divide it; and the dim with one entry per matrix of a parameter, replicated.
STACK_AXIS = 'optimizer_stack'
ROWS_AXIS = 'optimizer_rows'
BLOCKS_AXIS = 'optimizer_blocks'


class GraftingType(enum.IntEnum):
  """First-order method whose step length for each tensor Shampoo's update gets.

  The `NORMALIZED` forms divide each gradient by its norm first.
  """

  SGD = 1
  ADAGRAD = 2
  RMSPROP = 3
  RMSPROP_NORMALIZED = 4
  SQRT_N = 5
  ADAGRAD_NORMALIZED = 6


_RMSPROP = (GraftingType.RMSPROP, GraftingType.RMSPROP_NORMALIZED)

_COUNT = checks.number(at_least=1, integer=True)
_COUNT_OR_ZERO = checks.number(at_least=0, integer=True)
_NOT_NEGATIVE = checks.number(at_least=0, finite=False)
_BOOL = checks.instance(bool, 'True or False')
_OPTIONS = dict(
  block_size=_COUNT,
  preconditioning_compute_steps=_COUNT,
  statistics_compute_steps=_COUNT,
  skip_preconditioning_dim_size_gt=_COUNT,
  start_preconditioning_step=_COUNT_OR_ZERO,
  exponent_override=_COUNT_OR_ZERO,
  num_devices_for_pjit=_COUNT.or_none(),
  beta1=checks.number(at_least=0, below=1),
  beta2=checks.number(
    at_least=0, at_most=1
  ),  # 1 means the sum of all squared gradients, as in Adagrad
  diagonal_epsilon=_NOT_NEGATIVE,
  matrix_epsilon=_NOT_NEGATIVE,
  weight_decay=_NOT_NEGATIVE._replace(
    holds=lambda value: isinstance(value, DecayByPath) or _NOT_NEGATIVE.holds(value)
  ),
  inverse_failure_threshold=checks.number(above=0, finite=False),
  clip_by_scaled_gradient_norm=checks.number(above=0, finite=False).or_none(),
  best_effort_shape_interpretation=_BOOL,
  nesterov=_BOOL,
  shard_optimizer_states=_BOOL,
  best_effort_memory_usage_reduction=_BOOL,
  moving_average_for_momentum=_BOOL,
  spread_roots=_BOOL,
  quantize_statistics=_BOOL.or_none(),
  root_method=checks.one_of(METHODS),
  batch_axis_name=checks.Expectation(
    'the name of a mapped axis', lambda name: isinstance(name, str) and name != ''
  ).or_none(),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShampooConfig:
  """Options of `optimizers.distributed_shampoo`, which describes them, without the learning rate.

  Raises:
    ConfigError: an option that is out of range or without effect.
  """

  block_size: int
  beta1: float
  beta2: float
  diagonal_epsilon: float
  matrix_epsilon: float
  weight_decay: float | DecayByPath
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
    checks.check(OWNER, vars(self), **_OPTIONS)
    for option, condition, other in (
      (
        'batch_axis_name',
        self.batch_axis_name is not None and self.shard_optimizer_states,
        'shard_optimizer_states, which distributes roots over a mesh',
      ),
      (
        'clip_by_scaled_gradient_norm',
        self.clip_by_scaled_gradient_norm is not None and self.graft_type not in _RMSPROP,
        f'graft_type={self.graft_type.name}, only with RMSPROP or RMSPROP_NORMALIZED',
      ),
      (
        'quantize_statistics',
        self.quantize_statistics and self.shard_optimizer_states,
        'shard_optimizer_states, whose statistics are float32',
      ),
      (
        'spread_roots',
        self.spread_roots and self.preconditioning_compute_steps == 1,
        'preconditioning_compute_steps=1, only with a larger interval',
      ),
    ):
      if condition:
        raise ConfigError(f'`{OWNER}.{option}` cannot be used with {other}. Leave out one of them.')

  @property
  def statistics_are_quantized(self) -> bool:
    """True if statistics and preconditioners are int16 instead of float32."""
    if self.quantize_statistics is not None:
      return self.quantize_statistics
    return self.best_effort_memory_usage_reduction and self.batch_axis_name is not None

  @property
  def has_diagonal_statistics(self) -> bool:
    """True if the grafted method has second moments."""
    return self.graft_type not in (GraftingType.SGD, GraftingType.SQRT_N)

  @property
  def has_diagonal_momentum(self) -> bool:
    """True if the grafted method and Shampoo have separate momenta."""
    return self.graft_type != GraftingType.SQRT_N

  @property
  def partition_specs(self) -> tuple[PartitionSpec, PartitionSpec]:
    """Logical axes of the [k, n, n] stacks of statistics and of preconditioners in the state."""
    statistics = self.statistics_partition_spec
    if statistics is None:
      statistics = PartitionSpec(STACK_AXIS, None, None)
    preconditioners = self.preconditioner_partition_spec
    if preconditioners is None:
      preconditioners = statistics
    return statistics, preconditioners


def parse_graft_type(graft_type: Any) -> GraftingType:
  """Return a graft type given by member, name (any case) or number.

  Raises:
    ConfigError: an unknown type.

  >>> parse_graft_type('rmsprop').name
  'RMSPROP'
  """
  if isinstance(graft_type, str):
    if graft_type.upper() in GraftingType.__members__:
      return GraftingType[graft_type.upper()]
  elif (
    isinstance(graft_type, int)
    and not isinstance(graft_type, bool)
    and graft_type in list(GraftingType)
  ):
    return GraftingType(graft_type)
  names = list(GraftingType.__members__)
  raise checks.invalid(
    OWNER,
    'graft_type',
    f'one of {", ".join(names)}',
    graft_type,
    did_you_mean(str(graft_type).upper(), names).strip(),
  )


def parse_partition_spec(name: str, spec: Any) -> PartitionSpec | None:
  """Return the axes of a [k, n, n] stack as a spec of three entries.

  Args:
    name: name of the option, for the error message.
    spec: None, a `PartitionSpec` or another sequence (from gin) of up to three axis names or None.

  Raises:
    ConfigError: another value.

  >>> parse_partition_spec('statistics_partition_spec', ['x'])
  P('x', None, None)
  """
  if spec is None:
    return None
  if isinstance(spec, str) or not isinstance(spec, (PartitionSpec, Sequence)) or len(spec) > 3:
    raise checks.invalid(
      OWNER,
      name,
      f"a PartitionSpec of up to three axes, such as ('{STACK_AXIS}', None, None)",
      spec,
    )
  return PartitionSpec(*spec, *(None,) * (3 - len(spec)))


def parse_precision(precision: Any) -> jax.lax.Precision:
  """Return a `jax.lax.Precision` given by member or name.

  Raises:
    ConfigError: an unknown precision.
  """
  if isinstance(precision, jax.lax.Precision):
    return precision
  name = str(precision).upper()
  checks.check(OWNER, {'precision': name}, precision=checks.one_of(jax.lax.Precision.__members__))
  return jax.lax.Precision[name]
