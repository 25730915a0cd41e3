"""Distributed Shampoo: a preconditioned optimizer whose preconditioners are inverse roots of matrix statistics.

Anil, Gupta, Koren, Regan, Singer 2020, "Scalable Second Order Optimization for Deep Learning",
https://arxiv.org/abs/2002.09018; Gupta, Koren, Singer 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization",
https://arxiv.org/abs/1802.09568.

`config` has the options, `blocks` cuts parameters and multiplies, `roots` and `root_plan` take the roots, `grafting`
gives the update its length, `state` and `quantize` say what is kept, `update` is the step, and `sharded` the step whose
statistics are one stack over all devices.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
import optax

from t5x_lite.optimizers.optax_adapter.factories import wrap_optax_optimizer
from t5x_lite.optimizers.shampoo.config import (
    GraftingType,
    ShampooConfig,
    parse_graft_type,
    parse_partition_spec,
    parse_precision,
)
from t5x_lite.optimizers.shampoo.quantize import QuantizedValue
from t5x_lite.optimizers.shampoo.sharded import sharded_transformation
from t5x_lite.optimizers.shampoo.state import (
    GlobalShardedParameterStats,
    InitFnState,
    LocalShardedParameterStats,
    ParameterStats,
    ShampooState,
    ShardedShampooStats,
    TrainingMetrics,
)
from t5x_lite.optimizers.shampoo.update import LearningRate, plain_transformation

__all__ = [
    'GlobalShardedParameterStats',
    'GraftingType',
    'InitFnState',
    'LocalShardedParameterStats',
    'ParameterStats',
    'QuantizedValue',
    'ShampooState',
    'ShardedShampooStats',
    'TrainingMetrics',
    'distributed_shampoo',
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
    quantize_statistics: bool | None = None) -> optax.GradientTransformation:
  """Distributed Shampoo: gradients multiplied along every dim by an inverse root of their own second moments.

  For a matrix, `L^(-1/4) G R^(-1/4)` with L and R running sums of `G G^T` and `G^T G`; each tensor's update then gets
  the length that a first-order method's would have (grafting), weight decay and momentum. Tensors are cut into blocks.
  Reference: Anil et al. 2020, "Scalable Second Order Optimization for Deep Learning", algorithm 1,
  https://arxiv.org/abs/2002.09018. Options up to `precision` are the original implementation's, in its order.

  Args:
    learning_rate: a number, a schedule (of the number of updates before), or None for the trainer's.
    block_size: largest size of a block along any dim, 1 at least. The cost of a root grows with its cube.
    beta1: decay of the momentum, in [0, 1).
    beta2: decay of all second moments, in [0, 1]; 1 sums without decay, as Adagrad does.
    diagonal_epsilon: added to the root of the grafted method's second moments.
    matrix_epsilon: start of the statistics (times the identity), and the ridge added before a root is taken, in units
      of the largest eigenvalue.
    weight_decay: times the parameter, added to the update before the momentum; multiplied by the learning rate.
    start_preconditioning_step: number of updates made by the grafted method alone, before statistics tell enough.
    preconditioning_compute_steps: interval between roots.
    statistics_compute_steps: interval between updates of the statistics.
    best_effort_shape_interpretation: whether neighbouring small dims are merged, up to `block_size`, before cutting.
    graft_type: a `GraftingType`, or its name.
    nesterov: whether the momentum looks ahead.
    exponent_override: order of the roots; 0 for twice the number of (merged) dims.
    batch_axis_name: mapped axis (`jax.pmap`; `jax.shard_map` with check_vma=False) that the update runs inside of, to
      deal the roots out over. Leave it None in `jax.jit`: there the mesh in context tells the devices.
    statistics_partition_spec: logical axes of the stacks [k, n, n] in which statistics and preconditioners are kept.
      By default their first dim is 'optimizer_stack', which partitioners shard over all devices that it divides over:
      always all of them in the sharded mode, those that divide the number of blocks of a parameter in the plain one.
    preconditioner_partition_spec: logical axes of the preconditioners' stacks, if not those of the statistics.
    num_devices_for_pjit: sharded mode: the number of matrices is padded to a multiple of it; by default the number of
      all devices.
    shard_optimizer_states: the sharded mode: the matrices of all parameters in one stack, sharded over the devices.
      Updates use the roots of the step before. `.optax_optimizer.init(None)` returns the original's `InitFnState`.
    best_effort_memory_usage_reduction: momenta as int8. With `batch_axis_name` also statistics and preconditioners as
      int16, as in the original; `quantize_statistics` does that without.
    inverse_failure_threshold: a root whose error is not below it is thrown away, and the old one stays.
    moving_average_for_momentum: whether the momentum is an average, new terms weighing 1 - beta1, and not a sum.
    skip_preconditioning_dim_size_gt: a tensor with a dim above it (before merging) is left to the grafted method.
    clip_by_scaled_gradient_norm: largest root mean square of the RMSPROP types' update; None for no limit.
    precision: of the matrix products of roots, statistics and preconditioning; a `jax.lax.Precision` or its name.
    root_method: 'coupled_newton', the original's iteration; 'eigh', by eigendecomposition; 'auto', 'eigh' on CPU and
      'coupled_newton' elsewhere.
    spread_roots: whether the roots are spread over the steps of `preconditioning_compute_steps`, a share in each,
      rather than all taken in one step. If `start_preconditioning_step` is below the interval, the first step still
      takes all: a parameter needs the roots of all its blocks.
    quantize_statistics: whether the plain mode keeps statistics and preconditioners as int16 with float32 diagonals;
      None for the original's rule, `best_effort_memory_usage_reduction` with `batch_axis_name`.

  Returns:
    The transformation.

  Raises:
    ConfigError: an option that is unknown, out of range, or without effect beside the others.
  """
  cfg = ShampooConfig(
      block_size=block_size, beta1=beta1, beta2=beta2, diagonal_epsilon=diagonal_epsilon,
      matrix_epsilon=matrix_epsilon, weight_decay=weight_decay,
      start_preconditioning_step=start_preconditioning_step,
      preconditioning_compute_steps=preconditioning_compute_steps,
      statistics_compute_steps=statistics_compute_steps,
      best_effort_shape_interpretation=best_effort_shape_interpretation, graft_type=parse_graft_type(graft_type),
      nesterov=nesterov, exponent_override=exponent_override, batch_axis_name=batch_axis_name,
      statistics_partition_spec=parse_partition_spec('statistics_partition_spec', statistics_partition_spec),
      preconditioner_partition_spec=parse_partition_spec(
          'preconditioner_partition_spec', preconditioner_partition_spec),
      num_devices_for_pjit=num_devices_for_pjit, shard_optimizer_states=shard_optimizer_states,
      best_effort_memory_usage_reduction=best_effort_memory_usage_reduction,
      inverse_failure_threshold=inverse_failure_threshold, moving_average_for_momentum=moving_average_for_momentum,
      skip_preconditioning_dim_size_gt=skip_preconditioning_dim_size_gt,
      clip_by_scaled_gradient_norm=clip_by_scaled_gradient_norm, precision=parse_precision(precision),
      root_method=root_method, spread_roots=spread_roots, quantize_statistics=quantize_statistics)
  return (sharded_transformation if cfg.shard_optimizer_states else plain_transformation)(learning_rate, cfg)


_transformation.__name__ = 'distributed_shampoo'


def _refuse(arguments: Mapping[str, Any]) -> str | None:
  """Returns why the trainer cannot train with these arguments, None if it can."""
  if (axis := arguments.get('batch_axis_name')) is not None:
    return (f'batch_axis_name={axis!r} is for an update inside jax.pmap or jax.shard_map over an axis of that name, '
            'and the trainer runs it under jax.jit, where the mesh tells the devices. Leave it out; '
            'quantize_statistics=True keeps statistics as integers without it')
  if (number := arguments.get('num_devices_for_pjit')) is not None and not arguments.get('shard_optimizer_states'):
    return (f'num_devices_for_pjit={number} has no effect without shard_optimizer_states=True, which pads the '
            'number of matrices to a multiple of it. Leave out the one, or set the other')
  return None


distributed_shampoo = wrap_optax_optimizer(_transformation, takes_learning_rate=True, trainer_refusal_fn=_refuse)
