"""Sizes of parameters in ScaledAdam: their root mean squares, and the steps of their logarithms.

The numbers of a group are computed together in one vector, because a model has hundreds of parameters, and on CPU an
operation on a scalar costs as much as one on a vector.

The suffix U of a name means one number per unit of the group; see `Member`.
"""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.optimizers.scaled_adam_rule import report as report_lib
from t5x_lite.optimizers.scaled_adam_rule.groups import GroupPlan
from t5x_lite.types import Array


class ScaledAdamGroupState(NamedTuple):
  """State of a group in addition to trees, with one number per unit.

  Attributes:
    param_rms: float32 [U], root mean squares at the end of the last period; 1 for scalars.
    scale_exp_avg_sq: float32 [U], running means of squared gradients with respect to the logarithms of the sizes.
    scale_grad_sum: float32 [U], sum of these gradients in the current period.
    scale_grad_sumsq: float32 [U], sum of their squares.
    clipping: see `ScaledAdamClipState`; None without a `clipping_scale`.
  """

  param_rms: Array
  scale_exp_avg_sq: Array
  scale_grad_sum: Array
  scale_grad_sumsq: Array
  clipping: report_lib.ScaledAdamClipState | None


class UpdateFactors(NamedTuple):
  """Factors in the update of one parameter: float32 scalars, or arrays that broadcast to the parameter.

  Attributes:
    grad: factor of the gradient; None for 1.
    correction: factor of the mean of squared gradients under the root.
    adam: factor of the quotient of gradient and root, not negative.
    size: factor of the parameter, for the change of its size.
  """

  grad: Array | None
  correction: Array
  adam: Array
  size: Array


def init_group(plan: GroupPlan, params: Sequence[Array]) -> ScaledAdamGroupState:
  """Return the initial state of a group.

  Args:
    plan: the group.
    params: leaves of the entire tree, <float>[...] each.
  """
  wide = [params[member.index].astype(jnp.float32) for member in plan.members]
  clipping = None
  if plan.options.clipping_scale is not None:
    clipping = report_lib.init_clip_state(plan.options)
  return ScaledAdamGroupState(
    param_rms=_param_rms(plan, wide),
    scale_exp_avg_sq=jnp.zeros([plan.num_units], jnp.float32),
    scale_grad_sum=jnp.zeros([plan.num_units], jnp.float32),
    scale_grad_sumsq=jnp.zeros([plan.num_units], jnp.float32),
    clipping=clipping,
  )


def update_group(
  plan: GroupPlan,
  state: ScaledAdamGroupState,
  count: Array,
  rate: Any,
  params: Sequence[Array],
  grads: Sequence[Array],
) -> tuple[ScaledAdamGroupState, list[UpdateFactors]]:
  """Return the result of an update for one number per unit.

  Args:
    plan: the group.
    state: state of the group.
    count: int32 scalar, number of updates made before this one.
    rate: learning rate of this update.
    params: float32, leaves of the entire tree.
    grads: float32, gradients of `params`.

  Returns:
    (new state, factors for each member).
  """
  if not plan.num_units:
    return state, []
  options = plan.options
  beta1, beta2 = options.betas
  params = [params[member.index] for member in plan.members]
  grads = [grads[member.index] for member in plan.members]
  # [units]: derivative of the loss by the logarithm of the size of each unit.
  products = [param * grad for param, grad in zip(params, grads, strict=True)]
  size_grad_U = _unit_sums(plan, products)

  # ---- Clipping, with the sizes of the last period. ----
  clip_scale = None
  clipping = state.clipping
  if options.clipping_scale is not None:
    assert clipping is not None  # `init_group`
    grad_sumsq_U = _unit_sums(plan, [grad * grad for grad in grads])
    mean_square_U = state.param_rms * state.param_rms
    clip_scale, clipping = report_lib.clip(plan, clipping, count, grad_sumsq_U, mean_square_U)
    size_grad_U = clip_scale * size_grad_U

  # ---- Sizes: gradients are summed in every step, sizes change in the last step of a period. ----
  period = options.size_update_period
  position = count % period
  old_sum_U = jnp.where(position == 0, 0.0, state.scale_grad_sum)
  old_sumsq_U = jnp.where(position == 0, 0.0, state.scale_grad_sumsq)
  state = state._replace(
    scale_grad_sum=old_sum_U + size_grad_U,
    scale_grad_sumsq=old_sumsq_U + size_grad_U * size_grad_U,
    clipping=clipping,
  )
  state, size_step_U = jax.lax.cond(
    position == period - 1,
    lambda: _size_steps(plan, state, count, rate, params),
    lambda: (state, jnp.zeros_like(state.param_rms)),
  )

  # ---- Factors. Scalars have a lower rate, independent of their size, and a bias correction in every step. ----
  is_scalar_U = _is_scalar(plan)
  correction = 1.0 / _bias_correction(beta2, count + 1)
  late_correction = jnp.where(count < _num_corrected_steps(beta2), correction, 1.0)
  size_of_unit_U = jnp.maximum(state.param_rms, options.param_min_rms)
  scale_U = jnp.where(is_scalar_U, options.scalar_lr_scale, size_of_unit_U)
  # [units]: steps are relative to the size of a unit; 1 - beta1 because `delta` sums steps with decay beta1.
  adam_U = rate * (1 - beta1) * scale_U
  size_U = (1 - beta1) * size_step_U
  if options.clip_scale_gradient_only:
    clip_scale = None
  factors = []
  for member, adam, size in zip(plan.members, plan.split(adam_U), plan.split(size_U), strict=True):
    member_correction = late_correction
    if member.is_scalar:
      member_correction = correction
    of_member = UpdateFactors(
      grad=clip_scale,
      correction=member_correction,
      adam=adam.reshape(member.broadcast_shape),
      size=size.reshape(member.broadcast_shape),
    )
    factors.append(of_member)
  return state, factors


def _size_steps(
  plan: GroupPlan, state: ScaledAdamGroupState, count: Array, rate: Any, params: Sequence[Array]
) -> tuple[ScaledAdamGroupState, Array]:
  """Return the state with the sizes at the end of a period, and the steps of their logarithms [U]."""
  options = plan.options
  beta2 = options.betas[1]
  period = options.size_update_period
  size_rate = rate * options.scalar_lr_scale
  rms_U = _param_rms(plan, params)
  decay = beta2**period
  mean_sq_U = decay * state.scale_exp_avg_sq + (1 - decay) * state.scale_grad_sumsq / period
  correction = _bias_correction(beta2, (count + 1) // period * period)
  # [units]: Adam's step of the logarithm of the size, with the gradients of the period.
  numerator_U = -size_rate * jnp.sqrt(correction) * state.scale_grad_sum
  step_U = numerator_U / (jnp.sqrt(mean_sq_U) + options.eps)
  step_U = jnp.where(rms_U < options.param_min_rms, 0.0, step_U)
  step_U = jnp.where(rms_U > options.param_max_rms, -size_rate * period, step_U)
  # With a period of one step, the first step does not change sizes.
  is_first = count == 0
  mean_sq_U = jnp.where(is_first, state.scale_exp_avg_sq, mean_sq_U)
  new_state = state._replace(param_rms=rms_U, scale_exp_avg_sq=mean_sq_U)
  return new_state, jnp.where(is_first, 0.0, step_U)


def _unit_sums(plan: GroupPlan, arrays: Sequence[Array]) -> Array:
  """Return the sums of units, [U]."""
  sums = []
  for member, array in zip(plan.members, arrays, strict=True):
    sums.append(jnp.sum(array, axis=member.reduced_dims).reshape(-1))
  return plan.join(sums)


def _param_rms(plan: GroupPlan, params: Sequence[Array]) -> Array:
  """Return the root mean squares of units, [U]: 1 for scalars, 0 for units without elements."""
  sizes_U = plan.constants(lambda member: max(member.unit_size, 1), np.float32)
  sums_U = _unit_sums(plan, [param * param for param in params])
  return jnp.where(_is_scalar(plan), 1.0, jnp.sqrt(sums_U / sizes_U))


def _is_scalar(plan: GroupPlan) -> np.ndarray:
  """Return bool [U], True for units that are scalars."""
  return plan.constants(lambda member: member.is_scalar, bool)


def _bias_correction(beta: float, num_steps: Array) -> Array:
  """Return 1 - beta ** num_steps without cancellation in float32 for a beta near 1."""
  return -jnp.expm1(num_steps.astype(jnp.float32) * math.log(beta))


def _num_corrected_steps(beta: float) -> int:
  """Return the number of steps t from 1 on for which 1 - beta ** t is below 0.99."""
  num_steps = max(int(math.log(0.01) / math.log(beta)) - 1, 0)
  while 1 - beta ** (num_steps + 1) < 0.99 and num_steps < 2**31 - 1:
    num_steps += 1
  return min(num_steps, 2**31 - 1)
