"""Distributed Shampoo: a preconditioned optimizer whose preconditioners are inverse roots of matrix statistics.

Anil, Gupta, Koren, Regan, Singer 2020, "Scalable Second Order Optimization for Deep Learning",
https://arxiv.org/abs/2002.09018; Gupta, Koren, Singer 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization",
https://arxiv.org/abs/1802.09568.

`config` has the options, `blocks` cuts parameters and multiplies, `roots` and `root_plan` take the roots, `grafting`
gives the update its length, `state` and `quantize` say what is kept, `update` is the step, and `sharded` the step whose
statistics are one stack over all devices.
"""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec
import optax

from t5x_lite.optimizers._optax_wrapper import OptaxWrapper, wrap_optax_optimizer
from t5x_lite.optimizers._shampoo.config import (
    GraftingType, ShampooConfig, parse_graft_type, parse_partition_spec, parse_precision)
from t5x_lite.optimizers._shampoo.sharded import sharded_transformation
from t5x_lite.optimizers._shampoo.update import LearningRate, plain_transformation


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
  """Builds the transformation; see `distributed_shampoo`."""
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
_wrapped = wrap_optax_optimizer(_transformation, takes_learning_rate=True)


@functools.wraps(_wrapped)
def distributed_shampoo(*args: Any, **kwargs: Any) -> OptaxWrapper:
  optimizer = _wrapped(*args, **kwargs)
  if optimizer.learning_rate_factory is not None:
    # With a rate of its own the options were checked while it was built; here nothing was built yet.
    optimizer.learning_rate_factory(0.0)
  return optimizer
