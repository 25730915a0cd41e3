"""Adafactor's update of one parameter, as pure functions of arrays.

Reference: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
https://arxiv.org/abs/1804.04235 (numbers of algorithms and sections below are those of the paper).
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import operator
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.optimizers.adafactor_rule.factor_rules import FactorDim
from t5x_lite.optimizers.adafactor_rule.factor_rules import FactorPlan
from t5x_lite.optimizers.adafactor_rule.factor_rules import HParamMap
from t5x_lite.types import Array

# Where a matrix has so many columns, XLA's sum over its rows is slow on a CPU: 48 ms for the kernel of the logits of T5
# 1.1 small, 512 x 32128, and 4 ms in blocks of rows.
_WIDE = 16384


@struct.dataclass
class AdafactorHyperParams:
  """Hyper-parameters of `Adafactor`, which documents them; only the learning rate may be traced."""

  learning_rate: Any
  factored: bool = struct.field(pytree_node=False)
  multiply_by_parameter_scale: bool | HParamMap = struct.field(pytree_node=False)
  beta1: float | None = struct.field(pytree_node=False)
  decay_rate: float = struct.field(pytree_node=False)
  step_offset: int = struct.field(pytree_node=False)
  clipping_threshold: float | None = struct.field(pytree_node=False)
  weight_decay_rate: float | None = struct.field(pytree_node=False)
  min_dim_size_to_factor: int = struct.field(pytree_node=False)
  epsilon1: float = struct.field(pytree_node=False)
  epsilon2: float = struct.field(pytree_node=False)
  factor_map: HParamMap | Mapping[str, Any] | None = struct.field(pytree_node=False, default=None)
  logical_factor_rules: Mapping[str, FactorDim] | None = struct.field(
    pytree_node=False, default=None
  )
  weight_decay_rate_lr_exponent: float | None = struct.field(pytree_node=False, default=None)
  global_norm_clip_threshold: float | None = struct.field(pytree_node=False, default=None)
  max_parameter_scale: float | None = struct.field(pytree_node=False, default=None)
  skip_nan_updates: bool | None = struct.field(pytree_node=False, default=False)


@struct.dataclass
class AdafactorParamState:
  """Statistics of one parameter; unused fields are a float32 zero of shape [1].

  Attributes:
    v_row: float32, mean of squared gradients over the column dims; has the parameter's other dims.
    v_col: float32, mean of squared gradients over the row dims; has the parameter's other dims.
    v: float32, second moment per element if not factored; the parameter's shape.
    m: momentum, the parameter's shape, in `dtype_momentum`.
  """

  v_row: Array
  v_col: Array
  v: Array
  m: Array


def relative_step(max_step: float = 1e-2, warmup_init: bool = False) -> Callable[[Array], Array]:
  """Return the schedule of relative step sizes of the paper (section 8 and algorithm 5).

  It can be used in `Adafactor(learning_rate=...)` and as the trainer's `learning_rate_fn`; with
  `multiply_by_parameter_scale` steps are relative to the size of the parameters. T5X's schedule
  'constant * rsqrt_decay' with a warmup of 10000 steps has the same values, one step later.

  Args:
    max_step: upper bound, reached in the first steps (1e-2 is the paper's, for 10000 steps).
    warmup_init: replace `max_step` by 1e-6 t, for training without momentum from unfavourable initial values.

  Returns:
    Function from the step (updates made before) to min(bound, 1 / sqrt(t)) with t = step + 1, float32.

  Raises:
    ConfigError: `max_step` is not positive.

  >>> [float(relative_step()(step)) for step in (0, 9999, 39999)]
  [0.009999999776482582, 0.009999999776482582, 0.004999999888241291]
  """
  checks.check('relative_step', locals(), max_step=checks.number(above=0))

  def schedule(step: Array) -> Array:
    t = jnp.asarray(step, jnp.float32) + 1.0
    bound = max_step
    if warmup_init:
      bound = 1e-6 * t
    return jnp.minimum(bound, jax.lax.rsqrt(t))

  return schedule


def update_param(
  step: Array,
  hyper_params: AdafactorHyperParams,
  learning_rate: Array | float,
  param: Array,
  state: AdafactorParamState,
  grad: Array,
  *,
  plan: FactorPlan,
  use_parameter_scale: bool,
) -> tuple[Array, AdafactorParamState]:
  """Return the result of an update of one parameter; see `Adafactor` for the formulas.

  Args:
    step: int32 scalar, the number of updates made before this one.
    hyper_params: hyper-parameters of this update.
    learning_rate: float32 scalar.
    param: the parameter, of any floating dtype.
    state: its statistics.
    grad: its gradient, of the same shape.
    plan: factorisation of the parameter.
    use_parameter_scale: make the step relative to the size of the parameter.

  Returns:
    (new parameter in its dtype, new statistics).
  """
  hp = hyper_params
  old_param = param.astype(jnp.float32)
  grad = grad.astype(jnp.float32)

  # XLA joins equal expressions of one array and stores their values for all uses. Arrays behind a barrier are other
  # arrays for it: squares and updates become a part of each sum over them, which reads nothing but the gradient.
  same_grad = jax.lax.optimization_barrier(grad)

  # ---- Second moment and the update it normalises. ----
  # []: the decay grows with the step, section 7.2 of the paper, so that no bias correction is needed.
  t = jnp.maximum((step - hp.step_offset).astype(jnp.float32) + 1.0, 1.0)
  decay = 1.0 - t**-hp.decay_rate
  v_row = state.v_row
  v_col = state.v_col
  v = state.v
  m = state.m
  if plan.is_factored:
    # The parameter's shape without its columns, and without its rows: means of the squares, algorithm 4.
    v_row = decay * v_row + (1.0 - decay) * (_mean_square(grad, plan.col_dims) + hp.epsilon1)
    v_col = decay * v_col + (1.0 - decay) * (_mean_square(same_grad, plan.row_dims) + hp.epsilon1)
    factors = _factors(v_row, v_col, plan)
  else:
    v = decay * v + (1.0 - decay) * (grad * grad + hp.epsilon1)
    factors = (jax.lax.rsqrt(v),)

  # ---- Step size, momentum, weight decay. ----
  # [] or the parameter's shape with dims of size 1: steps relative to the size of the parameter, section 8.
  update_scale = learning_rate
  if use_parameter_scale:
    param_scale = jnp.maximum(_rms(old_param, plan.averaging_dims), hp.epsilon2)
    if hp.max_parameter_scale is not None:
      param_scale = jnp.minimum(param_scale, hp.max_parameter_scale)
    update_scale = learning_rate * param_scale
  if hp.clipping_threshold is not None:
    # Clipping by the root mean square of the update, section 6: larger updates mean that the second moment is outdated.
    factors = jax.lax.optimization_barrier(factors)
    same_update = _product(same_grad, *jax.lax.optimization_barrier(factors))
    update_scale /= jnp.maximum(1.0, _rms(same_update, plan.averaging_dims) / hp.clipping_threshold)
  update = update_scale * _product(grad, *factors)
  if hp.beta1 is not None:
    update = hp.beta1 * m.astype(jnp.float32) + (1.0 - hp.beta1) * update
    m = update.astype(m.dtype)
  new_param = old_param - update
  weight_decay_rate = hp.weight_decay_rate
  if hp.weight_decay_rate_lr_exponent:
    if weight_decay_rate is None:
      weight_decay_rate = 1.0
    weight_decay_rate = weight_decay_rate * learning_rate**hp.weight_decay_rate_lr_exponent
  if weight_decay_rate is not None:
    new_param -= weight_decay_rate * old_param

  new_param = new_param.astype(param.dtype)
  new_state = AdafactorParamState(v_row=v_row, v_col=v_col, v=v, m=m)
  if hp.skip_nan_updates:

    def finite_or_old(new, old):
      return jnp.where(jnp.isfinite(new), new, old)

    new_param, new_state = jax.tree.map(finite_or_old, (new_param, new_state), (param, state))
  return new_param, new_state


def update_param_traced_once(
  step: Array, hyper_params: AdafactorHyperParams, *arrays: Any, **options: Any
) -> tuple[Array, AdafactorParamState]:
  """Return the result of `update_param`, which is traced once for all parameters of equal shapes and options."""
  # The other arguments have these.
  hp = dataclasses.replace(
    hyper_params,
    learning_rate=None,
    multiply_by_parameter_scale=False,
    factor_map=None,
    logical_factor_rules=None,
  )
  try:
    hash(hp)
  except TypeError:  # Hyper-parameters that are arrays
    return update_param(step, hp, *arrays, **options)
  return _update_param_inlined(step, hp, *arrays, **options)


_update_param_inlined = jax.jit(
  update_param, static_argnames=('hyper_params', 'plan', 'use_parameter_scale'), inline=True
)


def clip_by_global_norm(grads: list[Array], threshold: float) -> list[Array]:
  """Return gradients in float32, scaled by one factor to a joint Euclidean norm of at most `threshold`."""
  grads = [grad.astype(jnp.float32) for grad in grads]
  norm = jnp.sqrt(sum(jnp.sum(grad * grad) for grad in grads))
  scale = jnp.minimum(1.0, threshold / norm)
  return [grad * scale for grad in grads]


def _rms(array: Array, dims: tuple[int, ...]) -> Array:
  """Return the root mean square over `dims`, which become dims of size 1."""
  return jnp.sqrt(jnp.mean(array * array, axis=dims, keepdims=True))


def _mean_square(array: Array, dims: tuple[int, ...]) -> Array:
  """Return the mean of squares over `dims`, 0 over no elements."""
  num_elements = math.prod(array.shape[dim] for dim in dims)
  squares = array * array
  if dims == (0,) and array.ndim == 2 and array.shape[1] >= _WIDE and array.shape[0] % 64 == 0:
    total = jax.lax.platform_dependent(
      squares, cpu=_sum_of_rows_in_blocks, default=lambda squares: jnp.sum(squares, axis=0)
    )
  else:
    total = jnp.sum(squares, axis=dims)
  return total / max(num_elements, 1)


def _sum_of_rows_in_blocks(matrix: Array) -> Array:
  """Return the sum [n] of the rows of a matrix [64 k, n]: of 8 rows, of 8 of these sums, then of the k results."""
  for _ in range(2):
    # [rows / 8, 8, n]: rows of a block are on one device if rows are sharded.
    blocks = matrix.reshape(-1, 8, matrix.shape[1])
    matrix = functools.reduce(operator.add, [blocks[:, row] for row in range(8)])
  return jnp.sum(matrix, axis=0)


def _factors(v_row: Array, v_col: Array, plan: FactorPlan) -> tuple[Array, Array]:
  """Return factors whose product is the inverse root of the second moment v_row * v_col / mean(v_row).

  It is part of algorithm 4. The roots are multiplied one by one: quotients or products of the factors could exceed the
  range of float32, and a row without gradients next to a row with large gradients would become 0 * inf.
  """
  # With the missing dims as dims of size 1, dim numbers are the parameter's.
  v_row = jnp.expand_dims(v_row, plan.col_dims)
  v_col = jnp.expand_dims(v_col, plan.row_dims)
  row_mean = jnp.mean(v_row, axis=plan.row_dims, keepdims=True)
  return jax.lax.rsqrt(v_row) * jnp.sqrt(row_mean), jax.lax.rsqrt(v_col)


def _product(*arrays: Array) -> Array:
  return functools.reduce(operator.mul, arrays)
