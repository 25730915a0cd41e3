"""SOAP: Adam in the eigenbases of Shampoo's statistics.

Vyas, Morwani, Zhao, Shapira, Brandfonbrener, Janson, Kakade 2024, "SOAP: Improving and Stabilizing Shampoo using Adam",
https://arxiv.org/abs/2409.11321.

`config` has the options, `layout` the blocks of a parameter, `bases` refreshes the bases, `state` defines the state,
`triangle` stores symmetric matrices, and `update` is the step.
"""

from typing import Any

import optax

from t5x_lite.optimizers.optax_adapter.factories import wrap_optax_optimizer
from t5x_lite.optimizers.optax_adapter.param_scales import Scaling
from t5x_lite.optimizers.optax_adapter.per_unit import units_as_layers
from t5x_lite.optimizers.soap_rule import update
from t5x_lite.optimizers.soap_rule.config import SoapConfig


def _transformation(
  learning_rate: Any,
  b1: float = 0.95,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.01,
  precondition_frequency: int = 10,
  *,
  shampoo_beta: float | None = None,
  max_precond_dim: int = 10000,
  block_size: int | None = None,
  merge_dims: bool = False,
  precondition_1d: bool = False,
  exponent: float = 0.5,
  correct_bias: bool = True,
  skip_first_step: bool = True,
  spread_refreshes: bool = False,
  momentum_dtype: str = 'float32',
  second_moment_dtype: str = 'float32',
  matrix_dtype: str = 'float32',
  symmetric_storage: bool = False,
) -> optax.GradientTransformation:
  """SOAP: Adam in the eigenbases of Shampoo's statistics, which are refreshed by power iteration and QR.

  Reference: Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 3,
  https://arxiv.org/abs/2409.11321. Defaults are those of the authors' implementation. The momentum is kept in the basis
  of the parameter. Unlike in the paper, statistics and bases are updated before the direction of a step. Each layer and
  expert is preconditioned by itself, whether it has its own array or shares one.

  Args:
    learning_rate: a number, a schedule (of the number of previous updates), or None for the trainer's.
    b1: decay of the momentum, in [0, 1).
    b2: decay of the second moments, in [0, 1]; 1 sums without decay and without bias correction.
    eps: added to the power of the second moments.
    weight_decay: decoupled weight decay, multiplied by the learning rate.
    precondition_frequency: period in steps of the refreshes of the bases.
    shampoo_beta: decay of the statistics, in [0, 1]; 1 sums. None means b2.
    max_precond_dim: dims larger than this are not rotated.
    block_size: largest size of a block along a rotated dim; None means that parameters are not split.
    merge_dims: merge adjacent dims while their product is at most `block_size`, or `max_precond_dim` without it.
    precondition_1d: rotate arrays of one dim too.
    exponent: power of the second moments by which directions are divided.
    correct_bias: divide momentum and second moments by the sum of the weights of their terms, as Adam does.
    skip_first_step: use the first gradient only for statistics and bases, as the authors' implementation does. It is
      diagonal in its own bases, and Adam would divide the rounding errors of the other elements by their own size.
    spread_refreshes: refresh a share of the bases in each step of a period, instead of all in one step.
    momentum_dtype: 'float32', 'bfloat16' or 'int8' (with a scale per column).
    second_moment_dtype: 'float32', or 'bfloat16' if b2 is at most 0.992.
    matrix_dtype: 'float32', or 'int16' with float32 diagonals and a scale per column, for statistics and bases.
    symmetric_storage: store only the upper triangle of the statistics. Results do not change.

  Returns:
    The transformation.

  Raises:
    ConfigError: an option that is unknown, out of range, or without effect.
  """
  cfg = SoapConfig(
    b1=b1,
    b2=b2,
    shampoo_beta=shampoo_beta,
    eps=eps,
    weight_decay=weight_decay,
    precondition_frequency=precondition_frequency,
    max_precond_dim=max_precond_dim,
    block_size=block_size,
    merge_dims=merge_dims,
    precondition_1d=precondition_1d,
    exponent=exponent,
    correct_bias=correct_bias,
    skip_first_step=skip_first_step,
    spread_refreshes=spread_refreshes,
    momentum_dtype=momentum_dtype,
    second_moment_dtype=second_moment_dtype,
    matrix_dtype=matrix_dtype,
    symmetric_storage=symmetric_storage,
  )
  return update.transformation(learning_rate, cfg)


_transformation.__name__ = 'soap'

# The update of a parameter depends on its shape and its scales alone, so equal layers may be stacked.
soap = wrap_optax_optimizer(
  _transformation,
  takes_learning_rate=True,
  stacking_key_fn=lambda path, param, state: 'soap',
  units_fn=units_as_layers,
  is_layout_dependent_fn=lambda arguments: bool(arguments.get('spread_refreshes')),
  scaling=Scaling(decay_by_path=True),
)
