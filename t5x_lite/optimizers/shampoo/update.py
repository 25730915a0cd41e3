"""Update of Distributed Shampoo: statistics, roots, direction, grafting, momentum.

For a block G [m, n] of a gradient, with running sums of squares:

    L <- beta2 L + (1 - beta2) G G^T        R <- beta2 R + (1 - beta2) G^T G
    direction = L^(-1/4) G R^(-1/4)         its length = that of the grafted method's update

Anil et al. 2020, "Scalable Second Order Optimization for Deep Learning", algorithm 1,
https://arxiv.org/abs/2002.09018. This module is the plain mode, which uses the roots of the updated statistics; the
sharded mode (`sharded`) uses the roots of the previous step.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.shampoo import state as state_lib
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.config import OWNER
from t5x_lite.optimizers.shampoo.config import ShampooConfig
from t5x_lite.optimizers.shampoo.grafting import NORM_EPSILON
from t5x_lite.optimizers.shampoo.grafting import grafted_update
from t5x_lite.optimizers.shampoo.grafting import norm
from t5x_lite.optimizers.shampoo.grafting import second_moment_weight
from t5x_lite.optimizers.shampoo.leaves import Leaf
from t5x_lite.optimizers.shampoo.leaves import flatten_inputs
from t5x_lite.optimizers.shampoo.quantize import QuantizedValue
from t5x_lite.optimizers.shampoo.root_plan import Shares
from t5x_lite.optimizers.shampoo.root_plan import compute_roots
from t5x_lite.optimizers.shampoo.roots import RootOptions
from t5x_lite.optimizers.shampoo.state import LocalShardedParameterStats
from t5x_lite.optimizers.shampoo.state import ParameterStats
from t5x_lite.optimizers.shampoo.state import ShampooState
from t5x_lite.types import Params, PyTree, PyTreeDef

# A number, a function of the number of previous updates, or a traced scalar.
LearningRate = float | jax.Array | Callable[[jax.Array], Any]
# For each parameter the stacks [k, n, n] of its matrices.
Stacks = list[list[Any]]


def plain_transformation(
  learning_rate: LearningRate, cfg: ShampooConfig
) -> optax.GradientTransformation:
  """Return the transformation of the plain mode, whose state has one `ParameterStats` per parameter."""

  def init(params: PyTree) -> ShampooState:
    return state_lib.init_plain(params, cfg)

  def update(
    grads: PyTree, state: ShampooState, params: PyTree | None = None
  ) -> tuple[PyTree, ShampooState]:
    leaves, treedef = inputs_of(grads, params, cfg)
    old_stats = treedef.flatten_up_to(state.stats)
    old_statistics = [stats.statistics.stacks for stats in old_stats]
    statistics = _update_statistics(old_statistics, leaves, state.count, cfg)
    old_preconditioners = [stats.preconditioners.stacks for stats in old_stats]
    preconditioners, errors = _update_preconditioners(
      statistics, old_preconditioners, leaves, state.count, cfg
    )
    updates = []
    new_stats = []
    done = []
    for leaf, stats, new_statistics, roots, root_errors in zip(
      leaves, old_stats, statistics, preconditioners, errors, strict=True
    ):
      leaf = dataclasses.replace(leaf, grad=in_sequence(leaf.grad, done, state.count))
      if cfg.statistics_are_quantized:
        sequenced = in_sequence(roots, done, state.count)
      else:
        sequenced = roots
      update_layers = leaf.of_each_layer(
        functools.partial(_precondition_and_update, leaf, state.count, learning_rate, cfg)
      )
      update, fields, length = update_layers(leaf.grad, leaf.param, stats, list(sequenced))
      done = [length]
      updates.append(update)
      new_stats.append(
        stats._replace(
          statistics=stats.statistics.replace(stacks=tuple(new_statistics)),
          preconditioners=stats.preconditioners.replace(stacks=tuple(roots)),
          training_metrics=record_errors(leaf, stats.training_metrics, root_errors, cfg),
          **fields,
        )
      )
    return treedef.unflatten(updates), ShampooState(state.count + 1, treedef.unflatten(new_stats))

  # Gradients are `updates` in optax's protocol.
  return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def inputs_of(
  grads: Params, params: Params | None, cfg: ShampooConfig
) -> tuple[list[Leaf], PyTreeDef]:
  """Return the result of `flatten_inputs` with the blocks and the weight decay of these options."""
  layout_fn = functools.partial(state_lib.layout_of, cfg=cfg)
  return flatten_inputs(OWNER, grads, params, cfg.weight_decay, layout_fn)


def accumulate(old: jax.Array, new: jax.Array, cfg: ShampooConfig) -> jax.Array:
  """Return the running second moment `beta2 old + (1 - beta2) new`, or the plain sum for beta2 = 1.

  `old`, `new` and the result are float32 of the same shape.
  """
  return cfg.beta2 * old + second_moment_weight(cfg) * new


def run_if(predicate: jax.Array, fn: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
  """Return `fn(value)` if `predicate`, a bool scalar, is True, else `value`.

  A conditional instead of a loop of one step, because XLA would move computations that do not depend on `value` out of
  a loop.
  """
  return jax.lax.cond(predicate, fn, lambda value: value, value)


def in_sequence(arrays: PyTree, done: Sequence[jax.Array], count: jax.Array) -> PyTree:
  """Return `arrays` such that, on one CPU device, computations with them start after `done` is computed.

  XLA's CPU compiler would compute the blocks and products of all parameters at once; with large parameters a step would
  spend as much time on allocating memory as on matrix products. The compiler removes optimization barriers, but it does
  not know that `count` is never negative: a selection by this condition, fused into the next operation on an array,
  enforces the order of parameters at no cost.

  On other devices `arrays` are returned unchanged: other compilers limit memory, and with several devices a scalar
  would have to be sent.

  Args:
    arrays: inputs of the next parameter's computations.
    done: arrays of the previous parameter; empty for the first.
    count: int32 scalar, number of previous updates.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not done or jax.default_backend() != 'cpu' or mesh.size > 1:
    return arrays
  return after(never(done, count), arrays)


def never(done: Sequence[jax.Array], count: jax.Array) -> jax.Array:
  """Return False, a bool scalar that the compiler computes after the arrays `done`, as described in `in_sequence`."""
  result = count < 0
  for array in done:
    first_element = array[(0,) * array.ndim]
    result = jnp.logical_and(result, first_element > 0)
  return result


def after(never_true: jax.Array, arrays: PyTree) -> PyTree:
  """Return `arrays` such that computations with them start after `never_true` is computed."""
  return jax.tree.map(
    lambda array: jnp.where(never_true, jnp.zeros([], array.dtype), array), arrays
  )


def _update_statistics(
  old: Sequence[Sequence[Any]], leaves: Sequence[Leaf], count: jax.Array, cfg: ShampooConfig
) -> Stacks:
  """Return the statistics, with the gradients added if an update of the statistics is due."""

  def updated_layer(
    layout: BlockLayout, stacks: Sequence[Any], grad: jax.Array
  ) -> tuple[list[Any], list[jax.Array]]:
    # [k, n, n] per stack: products G G^T of the gradient with itself along one dim of each block.
    products = layout.statistics(grad, cfg.precision)
    new = []
    for stack, product in zip(stacks, products, strict=True):
      total = accumulate(state_lib.stack_to_float(stack), product, cfg)
      new.append(state_lib.quantize_stack(total, cfg))
    return new, products

  def updated(old: Stacks) -> Stacks:
    results = []
    done = []
    for stacks, leaf in zip(old, leaves, strict=True):
      update_layers = leaf.of_each_layer(functools.partial(updated_layer, leaf.layout))
      new, products = update_layers(stacks, in_sequence(leaf.grad, done, count))
      results.append(new)
      done = products or done
    return results

  old = [list(stacks) for stacks in old]
  if cfg.statistics_compute_steps == 1:
    return updated(old)
  return run_if(count % cfg.statistics_compute_steps == 0, updated, old)


def _update_preconditioners(
  statistics: Stacks,
  old: Sequence[Sequence[Any]],
  leaves: Sequence[Leaf],
  count: jax.Array,
  cfg: ShampooConfig,
) -> tuple[Stacks, list[list[jax.Array]]]:
  """Return the preconditioners, with the roots that are due.

  Returns:
    (preconditioners, errors): per parameter the stacks [k, n, n] and the float32 errors [k] of each, which are
    `inverse_failure_threshold` for roots that were not due; with a first dim over layers if these are stacked.
  """
  leaf_of = [leaf for leaf in leaves for _ in leaf.layout.stack_shapes]
  exponents = [root_exponent(leaf.layout, cfg) for leaf in leaf_of]
  padded_size = max((size for leaf in leaves for _, size in leaf.layout.stack_shapes), default=None)
  flat_statistics = _merge_all(leaves, statistics)
  flat_old = _merge_all(leaves, old)
  ranks = [ranks for leaf in leaves for ranks in leaf.ranks]
  if cfg.statistics_are_quantized:
    take = compute_quantized_roots
  else:
    take = compute_stack_roots

  def with_new_roots(
    results: tuple[list[Any], list[jax.Array]],
  ) -> tuple[list[Any], list[jax.Array]]:
    return take(flat_statistics, exponents, results[0], count, padded_size, cfg, ranks)

  errors = [jnp.full([len(rows)], cfg.inverse_failure_threshold, jnp.float32) for rows in ranks]
  results = compute_when_due(with_new_roots, (flat_old, errors), count, cfg)
  lengths = [len(leaf.layout.stack_shapes) for leaf in leaves]
  roots, errors = results
  divided_roots = [leaf.divide(stack) for leaf, stack in zip(leaf_of, roots, strict=True)]
  divided_errors = [leaf.divide(error) for leaf, error in zip(leaf_of, errors, strict=True)]
  return _split(divided_roots, lengths), _split(divided_errors, lengths)


def _merge_all(leaves: Sequence[Leaf], stacks: Sequence[Sequence[Any]]) -> list[Any]:
  """Return the stacks of all parameters as one list of stacks without a dim over layers."""
  merged = []
  for leaf, stacks_of_leaf in zip(leaves, stacks, strict=True):
    merged += [leaf.merge(stack) for stack in stacks_of_leaf]
  return merged


def root_exponent(layout: BlockLayout, cfg: ShampooConfig) -> int:
  """Return the order of the roots of one parameter."""
  return cfg.exponent_override or layout.exponent


def root_options(padded_size: int | None, cfg: ShampooConfig) -> RootOptions:
  """Return the options of the roots of matrices that the original would pad to this size.

  Statistics stored as integers are padded by zeros, as the original pads the scales of their columns.
  """
  pad_value = 1.0
  if cfg.statistics_are_quantized:
    pad_value = 0.0
  return RootOptions(
    method=cfg.root_method,
    ridge_epsilon=cfg.matrix_epsilon,
    precision=cfg.precision,
    padded_size=padded_size,
    pad_value=pad_value,
  )


def compute_stack_roots(
  statistics: Sequence[jax.Array],
  exponents: Sequence[int],
  old: Sequence[jax.Array],
  count: jax.Array,
  padded_size: int | None,
  cfg: ShampooConfig,
  ranks: Sequence[np.ndarray] | None = None,
  shares: Shares | None = None,
  axis_names: tuple[str, ...] = (),
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Return the roots of stacks of float32 statistics and their errors, with the options in `cfg`; see `compute_roots`.

  Spread roots are not all computed in the first step if every root is computed before a preconditioner is used.
  """
  spread_over = 1
  if cfg.spread_roots:
    spread_over = cfg.preconditioning_compute_steps
  else:
    ranks = None  # Without an order, rows need not be moved.
  return compute_roots(
    statistics,
    exponents,
    old,
    count,
    options=root_options(padded_size, cfg),
    failure_threshold=cfg.inverse_failure_threshold,
    spread_over=spread_over,
    ranks=ranks,
    axis_name=axis_names or cfg.batch_axis_name,
    shares=shares,
    all_at_first=cfg.start_preconditioning_step < cfg.preconditioning_compute_steps,
  )


def compute_quantized_roots(
  statistics: Sequence[QuantizedValue],
  exponents: Sequence[int],
  old: Sequence[QuantizedValue],
  count: jax.Array,
  padded_size: int | None,
  cfg: ShampooConfig,
  ranks: Sequence[np.ndarray] | None = None,
) -> tuple[list[QuantizedValue], list[jax.Array]]:
  """Return the results of `compute_stack_roots` for quantized matrices; kept previous roots keep their integers.

  Arguments and results have the shapes of `compute_stack_roots`; see there.
  """
  float_statistics = [state_lib.stack_to_float(stack) for stack in statistics]
  float_old = [state_lib.stack_to_float(stack) for stack in old]
  roots, errors = compute_stack_roots(
    float_statistics, exponents, float_old, count, padded_size, cfg, ranks
  )
  new = [state_lib.quantize_stack(root, cfg) for root in roots]
  is_used = [error < jnp.float32(cfg.inverse_failure_threshold) for error in errors]  # False if NaN
  kept = []
  for condition, new_stack, old_stack in zip(is_used, new, old, strict=True):
    choose = functools.partial(_where_rows, condition)
    kept.append(jax.tree.map(choose, new_stack, old_stack))
  return kept, errors


def compute_when_due(
  with_new_roots: Callable[[PyTree], PyTree], results: PyTree, count: jax.Array, cfg: ShampooConfig
) -> PyTree:
  """Return `with_new_roots(results)` in steps with roots and `results` in other steps, which compute no roots.

  Args:
    with_new_roots: function from `results` to those with the roots of this step.
    results: results in steps without roots.
    count: int32 scalar, number of previous updates.
    cfg: options.
  """
  if cfg.preconditioning_compute_steps == 1 or cfg.spread_roots:
    return with_new_roots(results)
  return run_if(count % cfg.preconditioning_compute_steps == 0, with_new_roots, results)


def _where_rows(condition: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
  """Return rows of `new` where `condition` [k] holds, else of `old`."""
  dims_of_row = (1,) * (new.ndim - 1)
  return jnp.where(condition.reshape(condition.shape + dims_of_row), new, old)


def record_errors(
  leaf: Leaf, metrics: state_lib.TrainingMetrics, errors: Sequence[jax.Array], cfg: ShampooConfig
) -> state_lib.TrainingMetrics:
  """Return the metrics of a parameter with the measured errors [k], or [num_layers, k], of its stacks."""
  if not errors:
    return metrics
  # [matrices], or [layers, matrices], in the order of blocks.
  new = jnp.concatenate(errors, axis=-1)[..., leaf.layout.flat_order]
  is_measured = (new > 0.0) & (new != jnp.float32(cfg.inverse_failure_threshold))
  kept = jnp.where(is_measured, new, metrics.inverse_pth_root_errors)
  return metrics.replace(inverse_pth_root_errors=kept)


def _precondition_and_update(
  leaf: Leaf,
  count: jax.Array,
  learning_rate: LearningRate,
  cfg: ShampooConfig,
  grad: jax.Array,
  param: jax.Array | None,
  stats: ParameterStats,
  preconditioners: Sequence[Any],
) -> tuple[jax.Array, dict[str, Any], jax.Array]:
  """Return the results of `update_layer`, given the preconditioners in the form of the state, [k, n, n] each."""
  direction = None
  if leaf.layout.is_preconditioned:
    float_roots = [state_lib.stack_to_float(stack) for stack in preconditioners]
    direction = leaf.layout.precondition(grad, float_roots, cfg.precision)
  return update_layer(leaf, count, learning_rate, cfg, grad, param, stats, direction)


def update_layer(
  leaf: Leaf,
  count: jax.Array,
  learning_rate: LearningRate,
  cfg: ShampooConfig,
  grad: jax.Array,
  param: jax.Array | None,
  stats: ParameterStats | LocalShardedParameterStats,
  direction: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, dict[str, Any], jax.Array]:
  """Return the update of one parameter, or of one layer of stacked parameters.

  Until `start_preconditioning_step` the result is the grafted method's update with its momentum; both momenta advance
  in all steps.

  Args:
    leaf: weight decay, dtype and layout.
    count: int32 scalar, number of previous updates.
    learning_rate: number, schedule or traced scalar.
    cfg: options.
    grad: float32 gradient.
    param: float32 parameter; None without weight decay.
    stats: state of the parameter.
    direction: the preconditioned gradient, float32 of the parameter's shape, and its norm, a float32 scalar; None if
      the parameter is not preconditioned.

  Returns:
    (update in the parameter's dtype; new values of the fields `diagonal_statistics`, `diagonal_momentum` and
    `momentum` of `stats`; length of the direction before grafting, float32, for `in_sequence`).
  """
  # All arrays have the parameter's shape, in float32.
  old_moments = None
  if stats.diagonal_statistics is not None:
    old_moments = stats.diagonal_statistics.to_float()
  grafted, moments = grafted_update(grad, old_moments, cfg)
  if direction is None:
    preconditioned = grafted
    length = norm(grafted)
  else:
    preconditioned, length = direction
  # Grafting: Shampoo's direction with the length of the grafted method's update.
  step = preconditioned * (norm(grafted) / (length + NORM_EPSILON))
  if leaf.weight_decay:
    assert param is not None  # `flatten_inputs` raises without parameters.
    step = step + leaf.weight_decay * param
    grafted = grafted + leaf.weight_decay * param
  weight = 1.0
  if cfg.moving_average_for_momentum:
    weight = 1.0 - cfg.beta1
  old_momentum = stats.momentum.to_float()
  old_grafted_momentum = old_momentum
  if stats.diagonal_momentum is not None:
    old_grafted_momentum = stats.diagonal_momentum.to_float()
  momentum = cfg.beta1 * old_momentum + weight * step
  grafted_momentum = cfg.beta1 * old_grafted_momentum + weight * grafted
  # Both are computed in all steps: the first roots are of few gradients, and the switch needs a warm momentum.
  is_shampoo = count >= cfg.start_preconditioning_step
  applied = jnp.where(is_shampoo, momentum, grafted_momentum)
  if not cfg.has_diagonal_momentum:
    momentum = applied
  if cfg.nesterov:
    applied = weight * jnp.where(is_shampoo, step, grafted) + cfg.beta1 * applied
  rate = scalars.value_at(learning_rate, count)
  new_moments = None
  if moments is not None:
    new_moments = QuantizedValue.from_float(moments, jnp.float32)
  diagonal_momentum = None
  if cfg.has_diagonal_momentum:
    diagonal_momentum = state_lib.quantize_momentum(grafted_momentum, cfg)
  fields = {
    'diagonal_statistics': new_moments,
    'diagonal_momentum': diagonal_momentum,
    'momentum': state_lib.quantize_momentum(momentum, cfg),
  }
  return (-rate * applied).astype(leaf.dtype), fields, length


def _split(values: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
  """Return a sequence split into lists of these lengths."""
  rest = iter(values)
  return [[next(rest) for _ in range(length)] for length in lengths]
