"""The sizes of ScaledAdam's parameters: their root mean squares, and the steps of their logarithms.

There are one or two numbers per parameter, so those of a group are kept in one vector, and computed together: on CPU
an operation on a scalar costs as much as one on a vector, and a model has hundreds of parameters.

The suffix U of a name stands for the units of the group; see `Member`.
"""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.optimizers.scaled_adam_rule import report as report_lib
from t5x_lite.optimizers.scaled_adam_rule.groups import GroupPlan, Member
from t5x_lite.types import Array


class ScaledAdamGroupState(NamedTuple):
  """What a group keeps besides its trees. A parameter counts as one, or as many as its batched dims count.

  Attributes:
    param_rms: float32 [parameters], root mean squares when they were last taken; 1 for scalars.
    scale_exp_avg_sq: float32 [parameters], running means of squared gradients with respect to the logs of the sizes.
    scale_grad_sum: float32 [parameters], sum of those gradients in the current period.
    scale_grad_sumsq: float32 [parameters], sum of their squares.
    clipping: see `ScaledAdamClipState`; None without a `clipping_scale`.
  """

  param_rms: Array
  scale_exp_avg_sq: Array
  scale_grad_sum: Array
  scale_grad_sumsq: Array
  clipping: report_lib.ScaledAdamClipState | None


class UpdateFactors(NamedTuple):
  """What the update of one parameter is multiplied by: float32, scalars, or arrays that broadcast to the parameter.

  Attributes:
    grad: the gradient, before all else; None for 1.
    correction: the mean of squared gradients, before its root.
    adam: the quotient of gradient and root, not negative.
    size: the parameter, for the change of its size.
  """

  grad: Array | None
  correction: Array
  adam: Array
  size: Array


def init_group(plan: GroupPlan, params: Sequence[Array]) -> ScaledAdamGroupState:
  """Returns the state of a group before the first update of `params`, the leaves of the whole tree."""
  wide = [params[member.index].astype(jnp.float32) for member in plan.members]
  return ScaledAdamGroupState(
      param_rms=_param_rms(plan, wide),
      scale_exp_avg_sq=jnp.zeros([plan.num_units], jnp.float32),
      scale_grad_sum=jnp.zeros([plan.num_units], jnp.float32),
      scale_grad_sumsq=jnp.zeros([plan.num_units], jnp.float32),
      clipping=report_lib.init_clip_state(plan.options) if plan.options.clipping_scale is not None else None)


def update_group(
    plan: GroupPlan, state: ScaledAdamGroupState, count: Array, rate: Any, params: Sequence[Array],
    grads: Sequence[Array]) -> tuple[ScaledAdamGroupState, list[UpdateFactors]]:
  """Computes all that does not have the shape of a parameter.

  Args:
    plan: the group.
    state: its state.
    count: int32 scalar, number of updates made before this one.
    rate: learning rate of this update.
    params: float32, the leaves of the whole tree.
    grads: their gradients, likewise.

  Returns:
    (new state, the factors for each member).
  """
  if not plan.num_units:
    return state, []
  options = plan.options
  beta1, beta2 = options.betas
  params = [params[member.index] for member in plan.members]
  grads = [grads[member.index] for member in plan.members]
  size_grad_U = _unit_sums(plan.members, [param * grad for param, grad in zip(params, grads, strict=True)])

  # ---- Clipping, by the sizes as they were last taken. ----
  clip_scale, clipping = None, state.clipping
  if options.clipping_scale is not None:
    grad_sumsq_U = _unit_sums(plan.members, [grad * grad for grad in grads])
    clip_scale, clipping = report_lib.clip(plan, clipping, count, grad_sumsq_U, state.param_rms * state.param_rms)
    size_grad_U = clip_scale * size_grad_U

  # ---- Sizes: gathered in every step, changed in the last of a period. Parameters are read for it only then. ----
  period = options.size_update_period
  position = count % period
  state = state._replace(
      scale_grad_sum=jnp.where(position == 0, 0.0, state.scale_grad_sum) + size_grad_U,
      scale_grad_sumsq=jnp.where(position == 0, 0.0, state.scale_grad_sumsq) + size_grad_U * size_grad_U,
      clipping=clipping)
  state, size_step_U = jax.lax.cond(
      position == period - 1,
      lambda: _size_steps(plan, state, count, rate, params),
      lambda: (state, jnp.zeros_like(state.param_rms)))

  # ---- Factors. Scalars take a lower rate, whatever their size, and correct for the bias in every step. ----
  is_scalar_U = _is_scalar(plan)
  correction = 1.0 / _bias_correction(beta2, count + 1)
  late_correction = jnp.where(count < _num_corrected_steps(beta2), correction, 1.0)
  scale_U = jnp.where(is_scalar_U, options.scalar_lr_scale, jnp.maximum(state.param_rms, options.param_min_rms))
  adam_U = rate * (1 - beta1) * scale_U
  size_U = (1 - beta1) * size_step_U
  factors, first = [], 0
  for member in plan.members:
    here = slice(first, first + member.num_units)
    first += member.num_units
    factors.append(UpdateFactors(
        grad=None if options.clip_scale_gradient_only else clip_scale,
        correction=correction if member.is_scalar else late_correction,
        adam=adam_U[here].reshape(member.broadcast_shape), size=size_U[here].reshape(member.broadcast_shape)))
  return state, factors


def _size_steps(
    plan: GroupPlan, state: ScaledAdamGroupState, count: Array, rate: Any,
    params: Sequence[Array]) -> tuple[ScaledAdamGroupState, Array]:
  """Takes the sizes anew at the end of a period; returns the new state and the steps of their logarithms [U]."""
  options = plan.options
  beta2, period = options.betas[1], options.size_update_period
  size_rate = rate * options.scalar_lr_scale
  rms_U = _param_rms(plan, params)
  decay = beta2**period
  mean_sq_U = decay * state.scale_exp_avg_sq + (1 - decay) * state.scale_grad_sumsq / period
  correction = _bias_correction(beta2, (count + 1) // period * period)
  step_U = -size_rate * jnp.sqrt(correction) * state.scale_grad_sum / (jnp.sqrt(mean_sq_U) + options.eps)
  step_U = jnp.where(rms_U < options.param_min_rms, 0.0, step_U)
  step_U = jnp.where(rms_U > options.param_max_rms, -size_rate * period, step_U)
  # A period of one step learns no size in the first step of all.
  is_first = count == 0
  mean_sq_U = jnp.where(is_first, state.scale_exp_avg_sq, mean_sq_U)
  return state._replace(param_rms=rms_U, scale_exp_avg_sq=mean_sq_U), jnp.where(is_first, 0.0, step_U)


def _unit_sums(members: Sequence[Member], arrays: Sequence[Array]) -> Array:
  """Returns the sum of every unit, [U]."""
  sums = [jnp.sum(array, axis=member.reduced_dims).reshape(-1) for member, array in zip(members, arrays, strict=True)]
  return jnp.concatenate(sums) if sums else jnp.zeros([0], jnp.float32)


def _param_rms(plan: GroupPlan, params: Sequence[Array]) -> Array:
  """Returns the root mean square of every unit, [U]: 1 for scalars, 0 for what has no elements."""
  sizes = [max(member.unit_size, 1) for member in plan.members for _ in range(member.num_units)]
  sums_U = _unit_sums(plan.members, [param * param for param in params])
  return jnp.where(_is_scalar(plan), 1.0, jnp.sqrt(sums_U / np.asarray(sizes, np.float32)))


def _is_scalar(plan: GroupPlan) -> np.ndarray:
  """Returns for every unit whether it is a scalar, bool [U]."""
  return np.array([member.is_scalar for member in plan.members for _ in range(member.num_units)], bool)


def _bias_correction(beta: float, num_steps: Array) -> Array:
  """Returns 1 - beta ** num_steps without the cancellation that float32 would suffer for a beta near 1."""
  return -jnp.expm1(num_steps.astype(jnp.float32) * math.log(beta))


def _num_corrected_steps(beta: float) -> int:
  """Returns the number of steps t from 1 on for which 1 - beta ** t is below 0.99."""
  num_steps = max(int(math.log(0.01) / math.log(beta)) - 1, 0)
  while 1 - beta ** (num_steps + 1) < 0.99 and num_steps < 2**31 - 1:
    num_steps += 1
  return min(num_steps, 2**31 - 1)
