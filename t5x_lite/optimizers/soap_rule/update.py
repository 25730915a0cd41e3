"""Update of SOAP: Adam in the bases of Shampoo's statistics.

For a block G [m, n] of a gradient, with V the second moments in the bases:

    L <- beta L + (1 - beta) G G^T,  R <- beta R + (1 - beta) G^T G      beta: `shampoo_beta`
    Q_L, Q_R: bases of L and R, refreshed every `precondition_frequency` steps (`bases`); V moves with their columns
    M <- b1 M + (1 - b1) G                                               momentum, in the basis of the parameter
    V <- b2 V + (1 - b2) (Q_L^T G Q_R)^2
    direction = Q_L ((Q_L^T M Q_R) / (V^exponent + eps)) Q_R^T           M and V corrected for their bias

Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 3, https://arxiv.org/abs/2409.11321,
which updates statistics and bases after the direction instead of before it, so that a basis is one step older.
"""

from collections.abc import Sequence
import functools
import itertools
from typing import Any, cast

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.leaves import Leaf
from t5x_lite.optimizers.shampoo.leaves import flatten_inputs
from t5x_lite.optimizers.shampoo.update import in_sequence
from t5x_lite.optimizers.soap_rule import bases as bases_lib
from t5x_lite.optimizers.soap_rule import layout as layout_lib
from t5x_lite.optimizers.soap_rule import state as state_lib
from t5x_lite.optimizers.soap_rule import triangle
from t5x_lite.optimizers.soap_rule.config import OWNER
from t5x_lite.optimizers.soap_rule.config import SoapConfig
from t5x_lite.optimizers.soap_rule.config import average
from t5x_lite.optimizers.soap_rule.state import SoapParameterState
from t5x_lite.optimizers.soap_rule.state import SoapState
from t5x_lite.types import Array, PyTree


def transformation(learning_rate: Any, cfg: SoapConfig) -> optax.GradientTransformation:
  """Return the transformation.

  Args:
    learning_rate: number, schedule or traced scalar.
    cfg: options.
  """
  layout_of = functools.partial(layout_lib.layout_of, cfg=cfg)

  def init(params: PyTree) -> SoapState:
    states = jax.tree.map(
      lambda param: state_lib.init_parameter(layout_of(np.shape(param)), cfg), params
    )
    return SoapState(count=jnp.zeros([], jnp.int32), params=states)

  def update(
    grads: PyTree, state: SoapState, params: PyTree | None = None
  ) -> tuple[PyTree, SoapState]:
    leaves, treedef = flatten_inputs(OWNER, grads, params, cfg.weight_decay, layout_of)
    states = treedef.flatten_up_to(state.params)
    states = _add_statistics(leaves, states, state.count, cfg)
    states = _refresh(leaves, states, state.count, cfg)
    rate = scalars.value_at(learning_rate, state.count)
    updates = []
    new_states = []
    done = []
    for leaf, own in zip(leaves, states, strict=True):
      adam = leaf.of_each_layer(functools.partial(_adam, leaf.layout, state.count, cfg))
      direction, new = adam(in_sequence(leaf.grad, done, state.count), own)
      done = [direction]
      if leaf.param is not None:
        direction = direction + leaf.weight_decay * leaf.param
      if cfg.skip_first_step:
        is_first = state.count == 0
        direction = jnp.where(is_first, 0.0, direction)
        new = _where(is_first, own, new)
      updates.append((-rate * direction).astype(leaf.dtype))
      new_states.append(new)
    new_state = SoapState(state.count + 1, treedef.unflatten(new_states))
    return treedef.unflatten(updates), new_state

  # Gradients are `updates` in optax's protocol.
  return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def _add_statistics(
  leaves: Sequence[Leaf], states: Sequence[SoapParameterState], count: Array, cfg: SoapConfig
) -> list[SoapParameterState]:
  """Return the states of the parameters with the products of the gradients added to the statistics."""

  def added(
    layout: BlockLayout, statistics: Sequence[Any], grad: Array
  ) -> tuple[tuple[Any, ...], list[Array]]:
    # [K, n, n] per stack: products G G^T of the gradient with itself along one dim of each block.
    products = layout.statistics(grad, layout_lib.PRECISION)
    new = []
    for stack, product in zip(statistics, products, strict=True):
      if cfg.symmetric_storage:
        # Of entire matrices, as without this option: compilers round a sum of products in different ways.
        total = average(triangle.unpack(stack), product, cfg.statistics_decay)
        new.append(triangle.pack(total))
        continue
      total = average(state_lib.to_float(stack), product, cfg.statistics_decay)
      new.append(state_lib.matrices_to_state(total, cfg))
    return tuple(new), products

  results = []
  done = []
  for leaf, own in zip(leaves, states, strict=True):
    add_to_layers = leaf.of_each_layer(functools.partial(added, leaf.layout))
    statistics, products = add_to_layers(own.statistics, in_sequence(leaf.grad, done, count))
    done = products or done
    results.append(own._replace(statistics=statistics))
  return results


def _refresh(
  leaves: Sequence[Leaf], states: Sequence[SoapParameterState], count: Array, cfg: SoapConfig
) -> list[SoapParameterState]:
  """Return the states of the parameters with the bases refreshed that are due, and the second moments moved."""
  statistics = []
  bases = []
  ranks = []
  for leaf, own in zip(leaves, states, strict=True):
    statistics += leaf.merge(own.statistics)
    bases += leaf.merge(own.bases)
    ranks += leaf.ranks
  if not statistics:
    return list(states)

  def first(bases):
    _, orders = unchanged(bases)
    return bases_lib.first_bases(statistics, bases, cfg), orders

  def later(bases):
    return bases_lib.next_bases(statistics, bases, ranks, count, cfg)

  def unchanged(bases):
    return bases, bases_lib.ascending_orders(bases)

  period = cfg.precondition_frequency // cfg.num_slots
  # 0: eigenvectors, 1: power iteration, 2: no refresh.
  branch = jnp.where(count == 0, 0, jnp.where(count % period == 0, 1, 2))
  branches = [first, later, unchanged]
  if period == 1:
    branches = [first, later]
  new_bases, orders = lax.switch(branch, branches, bases)
  results = []
  rest = zip(new_bases, orders, strict=True)
  for leaf, own in zip(leaves, states, strict=True):
    of_leaf = list(itertools.islice(rest, len(leaf.layout.stack_shapes)))
    new = tuple(leaf.divide([basis for basis, _ in of_leaf]))
    moment = _move(leaf, own.second_moment, leaf.divide([order for _, order in of_leaf]))
    results.append(own._replace(bases=new, second_moment=moment))
  return results


def _move(leaf: Leaf, moment: Array, orders: list[Array]) -> Array:
  """Return second moments, moved as the columns of the bases: to `orders`, int32 [K, n] per stack and layer."""
  if not orders:
    return moment

  def of_layer(moment: Array, orders: list[Array]) -> Array:
    layout = leaf.layout
    groups = zip(layout.cut(moment), layout_lib.by_group(layout, orders), strict=True)
    return layout.join([layout_lib.reorder(blocks, of_group) for blocks, of_group in groups])

  def moved(moment: Array) -> Array:
    return leaf.of_each_layer(of_layer)(moment, orders)

  is_moved = jnp.any(jnp.stack([jnp.any(jnp.diff(order) < 0) for order in orders]))
  return lax.cond(is_moved, moved, lambda moment: moment, moment)


def _adam(
  layout: BlockLayout, count: Array, cfg: SoapConfig, grad: Array, own: SoapParameterState
) -> tuple[Array, SoapParameterState]:
  """Return the direction of Adam in the bases of a parameter, or of one layer of stacked parameters.

  Args:
    layout: blocks of the parameter.
    count: int32 scalar, number of previous updates.
    cfg: options.
    grad: float32 gradient.
    own: state of the parameter, with this step's bases.

  Returns:
    (direction, float32 of the parameter's shape; the new state).
  """
  step = jnp.maximum(count + 1 - int(cfg.skip_first_step), 1).astype(jnp.float32)
  momentum_scale = 1.0
  moment_scale = 1.0
  if cfg.correct_bias:
    momentum_scale = 1 / (1 - cfg.b1**step)
    if cfg.b2 < 1:
      moment_scale = 1 / (1 - cfg.b2**step)
  momentum = grad
  stored_momentum = None
  if own.momentum is not None:
    momentum = average(own.momentum.to_float(), grad, cfg.b1)
    stored_momentum = state_lib.momentum_to_state(momentum, cfg)

  def adam(grad: Array, momentum: Array, moment: Array) -> tuple[Array, Array]:
    moment = average(moment, jnp.square(grad), cfg.b2)
    if cfg.exponent == 0.5:
      scale = jnp.sqrt(moment_scale * moment)
    else:
      scale = (moment_scale * moment) ** cfg.exponent
    return momentum_scale * momentum / (scale + cfg.eps), moment

  old_moment = own.second_moment.astype(jnp.float32)
  if layout.is_preconditioned:
    bases = [state_lib.to_float(stack) for stack in own.bases]
    directions = []
    moments = []
    for grad_blocks, momentum_blocks, moment_blocks, of_dims in zip(
      layout.cut(grad),
      layout.cut(momentum),
      layout.cut(old_moment),
      layout_lib.by_group(layout, bases),
      strict=True,
    ):
      rotated = layout_lib.rotate(grad_blocks, of_dims)
      rotated_momentum = rotated
      if own.momentum is not None:
        rotated_momentum = layout_lib.rotate(momentum_blocks, of_dims)
      direction, moment = adam(rotated, rotated_momentum, moment_blocks)
      directions.append(layout_lib.rotate_back(direction, of_dims))
      moments.append(moment)
    direction = layout.join(directions)
    moment = layout.join(moments)
  else:
    direction, moment = adam(grad, momentum, old_moment)
  new = own._replace(momentum=stored_momentum, second_moment=moment.astype(own.second_moment.dtype))
  return direction, new


def _where(condition: Array, left: PyTree, right: PyTree) -> PyTree:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), left, right)
