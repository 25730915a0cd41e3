"""Distributed Shampoo: a preconditioned optimizer whose preconditioners are inverse roots of matrix statistics.

Anil, Gupta, Koren, Regan, Singer 2020, "Scalable Second Order Optimization for Deep Learning",
https://arxiv.org/abs/2002.09018; Gupta, Koren, Singer 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization",
https://arxiv.org/abs/1802.09568.

`config` has the options, `blocks` splits and preconditions parameters, `roots` and `root_plan` compute the roots,
`grafting` sets the length of updates, `state` and `quantize` define the state, `update` is the step, `sharded` the step
whose statistics are one stack over all devices, and `placement` gives each device the blocks that belong to its
matrices. `preconditioner` has the blocks and statistics of one parameter as lists, and `symmetric` the padding of
matrices.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
import optax

from t5x_lite.optimizers.optax_adapter.factories import wrap_optax_optimizer
from t5x_lite.optimizers.optax_adapter.param_scales import Scaling
from t5x_lite.optimizers.optax_adapter.per_unit import units_as_layers
from t5x_lite.optimizers.shampoo.blocks import merge_small_dims
from t5x_lite.optimizers.shampoo.config import GraftingType
from t5x_lite.optimizers.shampoo.config import ShampooConfig
from t5x_lite.optimizers.shampoo.config import parse_graft_type
from t5x_lite.optimizers.shampoo.config import parse_partition_spec
from t5x_lite.optimizers.shampoo.config import parse_precision
from t5x_lite.optimizers.shampoo.preconditioner import BlockPartitioner
from t5x_lite.optimizers.shampoo.preconditioner import Preconditioner
from t5x_lite.optimizers.shampoo.quantize import QuantizedValue
from t5x_lite.optimizers.shampoo.roots import mat_power
from t5x_lite.optimizers.shampoo.roots import matrix_inverse_pth_root
from t5x_lite.optimizers.shampoo.roots import power_iteration
from t5x_lite.optimizers.shampoo.sharded import sharded_transformation
from t5x_lite.optimizers.shampoo.state import GlobalShardedParameterStats
from t5x_lite.optimizers.shampoo.state import InitFnState
from t5x_lite.optimizers.shampoo.state import LocalShardedParameterStats
from t5x_lite.optimizers.shampoo.state import ParameterStats
from t5x_lite.optimizers.shampoo.state import ShampooState
from t5x_lite.optimizers.shampoo.state import ShardedShampooStats
from t5x_lite.optimizers.shampoo.state import TrainingMetrics
from t5x_lite.optimizers.shampoo.symmetric import make_sliced_padding
from t5x_lite.optimizers.shampoo.symmetric import materialize_matrix_from_concat
from t5x_lite.optimizers.shampoo.symmetric import num_blocks_from_total_blocks
from t5x_lite.optimizers.shampoo.symmetric import pad_block_symmetric_matrix
from t5x_lite.optimizers.shampoo.symmetric import pad_square_matrix
from t5x_lite.optimizers.shampoo.symmetric import pad_vector
from t5x_lite.optimizers.shampoo.update import LearningRate
from t5x_lite.optimizers.shampoo.update import plain_transformation

__all__ = [
  'BlockPartitioner',
  'GlobalShardedParameterStats',
  'GraftingType',
  'InitFnState',
  'LocalShardedParameterStats',
  'ParameterStats',
  'Preconditioner',
  'QuantizedValue',
  'ShampooState',
  'ShardedShampooStats',
  'TrainingMetrics',
  'distributed_shampoo',
  'make_sliced_padding',
  'mat_power',
  'materialize_matrix_from_concat',
  'matrix_inverse_pth_root',
  'merge_small_dims',
  'num_blocks_from_total_blocks',
  'pad_block_symmetric_matrix',
  'pad_square_matrix',
  'pad_vector',
  'power_iteration',
]


def _transformation(
  learning_rate: LearningRate,
  block_size: int = 128,
  beta1: float = 0.9,
  beta2: float = 0.999,
  diagonal_epsilon: float = 1e-10,
  matrix_epsilon: float = 1e-6,
  weight_decay: float = 0.0,
  start_preconditioning_step: int = 5,
  preconditioning_compute_steps: int = 1,
  statistics_compute_steps: int = 1,
  best_effort_shape_interpretation: bool = True,
  graft_type: GraftingType | str = GraftingType.SGD,
  nesterov: bool = True,
  exponent_override: int = 0,
  batch_axis_name: str | None = None,
  statistics_partition_spec: PartitionSpec | None = None,
  preconditioner_partition_spec: PartitionSpec | None = None,
  num_devices_for_pjit: int | None = None,
  shard_optimizer_states: bool = False,
  best_effort_memory_usage_reduction: bool = False,
  inverse_failure_threshold: float = 0.1,
  moving_average_for_momentum: bool = False,
  skip_preconditioning_dim_size_gt: int = 4096,
  clip_by_scaled_gradient_norm: float | None = None,
  precision: jax.lax.Precision | str = jax.lax.Precision.HIGHEST,
  *,
  root_method: str = 'coupled_newton',
  spread_roots: bool = False,
  quantize_statistics: bool | None = None,
) -> optax.GradientTransformation:
  """Distributed Shampoo: gradients multiplied along every dim by an inverse root of their second moments.

  For a matrix, `L^(-1/4) G R^(-1/4)` with L and R running sums of `G G^T` and `G^T G`. Then each tensor's update gets
  the length of a first-order method's update (grafting), weight decay and momentum. Tensors are split into blocks.
  Reference: Anil et al. 2020, "Scalable Second Order Optimization for Deep Learning", algorithm 1,
  https://arxiv.org/abs/2002.09018. Options up to `precision` are those of the original implementation, in its order.

  Args:
    learning_rate: a number, a schedule (of the number of previous updates), or None for the trainer's.
    block_size: largest size of a block along any dim, at least 1. The cost of a root grows with its cube.
    beta1: decay of the momentum, in [0, 1).
    beta2: decay of all second moments, in [0, 1]; 1 sums without decay, as Adagrad does.
    diagonal_epsilon: added to the root of the grafted method's second moments.
    matrix_epsilon: initial statistics (times the identity), and the ridge added for a root, relative to the largest
      eigenvalue.
    weight_decay: times the parameter, added to the update before the momentum; multiplied by the learning rate.
    start_preconditioning_step: number of initial updates by the grafted method, while statistics are few.
    preconditioning_compute_steps: interval between roots.
    statistics_compute_steps: interval between updates of the statistics.
    best_effort_shape_interpretation: merge adjacent small dims, up to `block_size`, before splitting.
    graft_type: a `GraftingType`, or its name.
    nesterov: use Nesterov's momentum.
    exponent_override: order of the roots; 0 means twice the number of (merged) dims.
    batch_axis_name: mapped axis (`jax.pmap`; `jax.shard_map` with check_vma=False) around the update, over which the
      roots are distributed. Use None in `jax.jit`, where the mesh in context determines the devices.
    statistics_partition_spec: logical axes of the stacks [k, n, n] of statistics and preconditioners. By default their
      first dim is 'optimizer_stack', which partitioners shard over as many devices as divide it: over all of them in
      the sharded mode, over a divisor of the number of blocks of a parameter in the plain mode.
    preconditioner_partition_spec: logical axes of the preconditioners' stacks; by default those of the statistics.
    num_devices_for_pjit: sharded mode: the number of matrices is padded to a multiple of this; by default the number
      of devices.
    shard_optimizer_states: use the sharded mode: the matrices of all parameters in one stack, sharded over devices.
      Updates use the roots of the previous step. `.optax_optimizer.init(None)` returns the original's `InitFnState`.
    best_effort_memory_usage_reduction: store momenta as int8 and, with `batch_axis_name`, statistics and
      preconditioners as int16, as in the original; `quantize_statistics` does so without `batch_axis_name`.
    inverse_failure_threshold: a root whose error is not below this is discarded, and the previous one is kept.
    moving_average_for_momentum: use an average as momentum, with weight 1 - beta1 of new terms, instead of a sum.
    skip_preconditioning_dim_size_gt: a tensor with a larger dim (before merging) is updated by the grafted method.
    clip_by_scaled_gradient_norm: largest root mean square of the RMSPROP types' update; None means no limit.
    precision: precision of the matrix products; a `jax.lax.Precision` or its name.
    root_method: 'coupled_newton', the original's iteration; 'eigh', by eigendecomposition; 'auto', 'eigh' on CPU and
      'coupled_newton' elsewhere.
    spread_roots: compute a share of the roots in each of the `preconditioning_compute_steps` steps, instead of all in
      one step. If `start_preconditioning_step` is below the interval, the first step still computes all, because a
      parameter needs the roots of all its blocks.
    quantize_statistics: store statistics and preconditioners of the plain mode as int16 with float32 diagonals; None
      means the original's rule, `best_effort_memory_usage_reduction` with `batch_axis_name`.

  Returns:
    The transformation.

  Raises:
    ConfigError: an option that is unknown, out of range, or without effect.
  """
  cfg = ShampooConfig(
    block_size=block_size,
    beta1=beta1,
    beta2=beta2,
    diagonal_epsilon=diagonal_epsilon,
    matrix_epsilon=matrix_epsilon,
    weight_decay=weight_decay,
    start_preconditioning_step=start_preconditioning_step,
    preconditioning_compute_steps=preconditioning_compute_steps,
    statistics_compute_steps=statistics_compute_steps,
    best_effort_shape_interpretation=best_effort_shape_interpretation,
    graft_type=parse_graft_type(graft_type),
    nesterov=nesterov,
    exponent_override=exponent_override,
    batch_axis_name=batch_axis_name,
    statistics_partition_spec=parse_partition_spec(
      'statistics_partition_spec', statistics_partition_spec
    ),
    preconditioner_partition_spec=parse_partition_spec(
      'preconditioner_partition_spec', preconditioner_partition_spec
    ),
    num_devices_for_pjit=num_devices_for_pjit,
    shard_optimizer_states=shard_optimizer_states,
    best_effort_memory_usage_reduction=best_effort_memory_usage_reduction,
    inverse_failure_threshold=inverse_failure_threshold,
    moving_average_for_momentum=moving_average_for_momentum,
    skip_preconditioning_dim_size_gt=skip_preconditioning_dim_size_gt,
    clip_by_scaled_gradient_norm=clip_by_scaled_gradient_norm,
    precision=parse_precision(precision),
    root_method=root_method,
    spread_roots=spread_roots,
    quantize_statistics=quantize_statistics,
  )
  if cfg.shard_optimizer_states:
    return sharded_transformation(learning_rate, cfg)
  return plain_transformation(learning_rate, cfg)


_transformation.__name__ = 'distributed_shampoo'


def _unsupported_reason(arguments: Mapping[str, Any]) -> str | None:
  """Return why the trainer cannot train with these arguments, None if it can."""
  if (axis := arguments.get('batch_axis_name')) is not None:
    return (
      f'batch_axis_name={axis!r} is for an update in jax.pmap or jax.shard_map over an axis of that name; the '
      'trainer runs it in jax.jit, where the mesh determines the devices. Leave it out; quantize_statistics=True '
      'stores statistics as integers without it'
    )
  if (number := arguments.get('num_devices_for_pjit')) is not None and not arguments.get(
    'shard_optimizer_states'
  ):
    return (
      f'num_devices_for_pjit={number} has no effect without shard_optimizer_states=True, which pads the '
      'number of matrices to a multiple of it. Leave it out, or set shard_optimizer_states'
    )
  return None


# The update of a parameter depends on its shape and its scales alone, so equal layers may be stacked.
distributed_shampoo = wrap_optax_optimizer(
  _transformation,
  takes_learning_rate=True,
  unsupported_reason_fn=_unsupported_reason,
  stacking_key_fn=lambda path, param, state: 'shampoo',
  units_fn=units_as_layers,
  is_layout_dependent_fn=lambda arguments: bool(arguments.get('spread_roots')),
  scaling=Scaling(decay_by_path=True),
)
