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

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any, cast

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.axes.units import UnitsByPath
from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.optax_adapter.param_scales import DecayByPath
from t5x_lite.optimizers.shampoo.update import in_sequence
from t5x_lite.optimizers.soap_rule import bases as bases_lib
from t5x_lite.optimizers.soap_rule import layout as layout_lib
from t5x_lite.optimizers.soap_rule import state as state_lib
from t5x_lite.optimizers.soap_rule import triangle
from t5x_lite.optimizers.soap_rule.config import OWNER
from t5x_lite.optimizers.soap_rule.config import SoapConfig
from t5x_lite.optimizers.soap_rule.config import average
from t5x_lite.optimizers.soap_rule.layout import SoapLayout
from t5x_lite.optimizers.soap_rule.state import SoapParameterState
from t5x_lite.optimizers.soap_rule.state import SoapState
from t5x_lite.types import Array, PyTree, PyTreeDef


def transformation(
  learning_rate: Any, cfg: SoapConfig, units: UnitsByPath
) -> optax.GradientTransformation:
  """Return the transformation.

  Args:
    learning_rate: number, schedule or traced scalar.
    cfg: options.
    units: units of the parameters.
  """

  def init(params: PyTree) -> SoapState:
    def init_parameter(path: str, param: Any) -> SoapParameterState:
      layout = layout_lib.layout_of(units.of(path, param), cfg)
      return state_lib.init_parameter(np.shape(param), layout, cfg)

    states = tree_utils.map_with_names(init_parameter, params)
    return SoapState(count=jnp.zeros([], jnp.int32), params=states)

  def update(
    grads: PyTree, state: SoapState, params: PyTree | None = None
  ) -> tuple[PyTree, SoapState]:
    leaves, treedef = _flatten(grads, params, cfg, units)
    states = treedef.flatten_up_to(state.params)
    states = _add_statistics(leaves, states, state.count, cfg)
    states = _refresh(leaves, states, state.count, cfg)
    rate = scalars.value_at(learning_rate, state.count)
    updates = []
    new_states = []
    done = []
    for leaf, own in zip(leaves, states, strict=True):
      leaf = dataclasses.replace(leaf, grad=in_sequence(leaf.grad, done, state.count))
      direction, new = _adam(leaf, own, state.count, cfg)
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


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """Inputs of the update of one parameter, or of that of several layers, stacked in dim 0 (see `layer_stacks`).

  Attributes:
    grad: float32 gradient.
    param: float32 parameter; None without weight decay.
    weight_decay: weight decay of the parameter.
    dtype: dtype of the parameter, or of the gradient if the parameters were not given.
    layout: blocks of the array, also of a stacked one.
    layers: indices of the layers' parameters among those of the tree with a subtree per layer.
  """

  grad: Array
  param: Array | None
  weight_decay: float
  dtype: Any
  layout: SoapLayout
  layers: tuple[int, ...]

  @property
  def is_stacked(self) -> bool:
    """True if the arrays have a first dim over layers."""
    return len(self.layers) > 1

  def of_each_layer(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays like `grad`, given a function of arrays of one layer."""
    if self.is_stacked:
      return jax.vmap(fn)
    return fn

  def merge(self, stacks: Sequence[Any]) -> list[Any]:
    """Return stacks [layers * K, ...], given those of the state: [layers, K, ...] if layers are stacked."""
    if self.is_stacked:
      return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), list(stacks))
    return list(stacks)

  def divide(self, stacks: Sequence[Any]) -> tuple[Any, ...]:
    """Return the inverse of `merge`."""
    if self.is_stacked:
      num_layers = len(self.layers)
      return jax.tree.map(lambda x: x.reshape(num_layers, -1, *x.shape[1:]), tuple(stacks))
    return tuple(stacks)

  def ranks(self, num_per_param: int) -> list[np.ndarray]:
    """Return int [K] per stack: numbers in the order of the matrices of the tree with a subtree per layer.

    Args:
      num_per_param: a number above that of the matrices of any parameter.
    """
    ranks = []
    offset = 0
    for count, _ in self.layout.stack_shapes:
      of_layer = offset + np.arange(count // len(self.layers))
      ranks.append(np.add.outer(np.array(self.layers) * num_per_param, of_layer).reshape(-1))
      offset += len(of_layer)
    return ranks


def _flatten(
  grads: PyTree, params: PyTree | None, cfg: SoapConfig, units: UnitsByPath
) -> tuple[list[_Leaf], PyTreeDef]:
  """Return gradients and parameters as a list, and the structure of their tree."""
  if params is None and cfg.weight_decay:
    raise ConfigError(
      f'`{OWNER}.weight_decay` needs the parameters. Call update(grads, state, params).'
    )
  flat_grads, treedef = jax.tree.flatten(grads)
  flat_params = [None] * len(flat_grads)
  if params is not None:
    flat_params = treedef.flatten_up_to(params)
  paths = [path for path, _ in tree_utils.named_leaves(grads)]
  _, numbers = layer_stacks.single_paths(paths)
  leaves = []
  for path, grad, param, layers in zip(paths, flat_grads, flat_params, numbers, strict=True):
    weight_decay = cfg.weight_decay
    if isinstance(weight_decay, DecayByPath):
      weight_decay = weight_decay.of(path)
    wide_param = None
    if weight_decay:
      wide_param = jnp.asarray(param, jnp.float32)
    leaf = _Leaf(
      grad=jnp.asarray(grad, jnp.float32),
      param=wide_param,
      weight_decay=weight_decay,
      dtype=jnp.asarray(grad if param is None else param).dtype,
      layout=layout_lib.layout_of(units.of(path, grad), cfg),
      layers=layers,
    )
    leaves.append(leaf)
  return leaves, treedef


def _add_statistics(
  leaves: Sequence[_Leaf], states: Sequence[SoapParameterState], count: Array, cfg: SoapConfig
) -> list[SoapParameterState]:
  """Return the states of the parameters with the products of the gradients added to the statistics."""
  results = []
  done = []
  for leaf, own in zip(leaves, states, strict=True):
    products = leaf.layout.statistics(in_sequence(leaf.grad, done, count))
    done = products or done
    new = []
    for stack, product in zip(leaf.merge(own.statistics), products, strict=True):
      if cfg.symmetric_storage:
        new.append(average(stack, triangle.pack(product), cfg.statistics_decay))
        continue
      total = average(state_lib.to_float(stack), product, cfg.statistics_decay)
      new.append(state_lib.matrices_to_state(total, cfg))
    results.append(own._replace(statistics=leaf.divide(new)))
  return results


def _refresh(
  leaves: Sequence[_Leaf], states: Sequence[SoapParameterState], count: Array, cfg: SoapConfig
) -> list[SoapParameterState]:
  """Return the states of the parameters with the bases refreshed that are due, and the second moments moved."""
  statistics = [
    x for leaf, own in zip(leaves, states, strict=True) for x in leaf.merge(own.statistics)
  ]
  num_per_param = 1 + max(map(len, (leaf.layout.stack_shapes for leaf in leaves)), default=0)
  num_per_param *= 1 + max((n for leaf in leaves for n, _ in leaf.layout.stack_shapes), default=0)
  ranks = [x for leaf in leaves for x in leaf.ranks(num_per_param)]
  if not statistics:
    return list(states)

  def first(bases):
    _, orders = unchanged(bases)
    return bases_lib.first_bases(statistics, bases, cfg), orders

  def later(bases):
    return bases_lib.next_bases(statistics, bases, ranks, count, cfg)

  def unchanged(bases):
    return bases, bases_lib.ascending_orders(bases)

  bases = [x for leaf, own in zip(leaves, states, strict=True) for x in leaf.merge(own.bases)]
  period = cfg.precondition_frequency // cfg.num_slots
  # 0: eigenvectors, 1: power iteration, 2: no refresh.
  branch = jnp.where(count == 0, 0, jnp.where(count % period == 0, 1, 2))
  branches = [first, later, unchanged]
  if period == 1:
    branches = [first, later]
  bases, orders = lax.switch(branch, branches, bases)
  results = []
  rest = zip(bases, orders, strict=True)
  for leaf, own in zip(leaves, states, strict=True):
    of_leaf = list(itertools.islice(rest, len(leaf.layout.stack_shapes)))
    moment = _move(leaf.layout, own.second_moment, [order for _, order in of_leaf])
    new = leaf.divide([basis for basis, _ in of_leaf])
    results.append(own._replace(bases=new, second_moment=moment))
  return results


def _move(layout: SoapLayout, moment: Array, orders: Sequence[Array]) -> Array:
  """Return second moments, moved as the columns of the bases: to `orders`, int32 [K, n] per stack."""
  if not orders:
    return moment

  def moved(moment: Array) -> Array:
    groups = zip(layout.cut(moment), layout.by_group(orders), strict=True)
    return layout.join([layout_lib.reorder(blocks, of_group) for blocks, of_group in groups])

  is_moved = jnp.any(jnp.stack([jnp.any(jnp.diff(order) < 0) for order in orders]))
  return lax.cond(is_moved, moved, lambda moment: moment, moment)


def _adam(
  leaf: _Leaf, own: SoapParameterState, count: Array, cfg: SoapConfig
) -> tuple[Array, SoapParameterState]:
  """Return (direction, float32 of the parameter's shape; new state) of Adam in the bases of a parameter."""
  step = jnp.maximum(count + 1 - int(cfg.skip_first_step), 1).astype(jnp.float32)
  momentum_scale = 1.0
  moment_scale = 1.0
  if cfg.correct_bias:
    momentum_scale = 1 / (1 - cfg.b1**step)
    if cfg.b2 < 1:
      moment_scale = 1 / (1 - cfg.b2**step)
  momentum = leaf.grad
  stored_momentum = None
  if own.momentum is not None:
    old = leaf.of_each_layer(lambda value: value.to_float())(own.momentum)
    momentum = average(old, leaf.grad, cfg.b1)
    stored_momentum = leaf.of_each_layer(lambda x: state_lib.momentum_to_state(x, cfg))(momentum)
  old_moment = own.second_moment.astype(jnp.float32)

  def adam(grad: Array, momentum: Array, moment: Array) -> tuple[Array, Array]:
    moment = average(moment, jnp.square(grad), cfg.b2)
    if cfg.exponent == 0.5:
      scale = jnp.sqrt(moment_scale * moment)
    else:
      scale = (moment_scale * moment) ** cfg.exponent
    return momentum_scale * momentum / (scale + cfg.eps), moment

  if leaf.layout.is_rotated:
    bases = [state_lib.to_float(stack) for stack in leaf.merge(own.bases)]
    directions = []
    moments = []
    for grad_blocks, momentum_blocks, moment_blocks, of_dims in zip(
      leaf.layout.cut(leaf.grad),
      leaf.layout.cut(momentum),
      leaf.layout.cut(old_moment),
      leaf.layout.by_group(bases),
      strict=True,
    ):
      rotated = layout_lib.rotate(grad_blocks, of_dims)
      rotated_momentum = rotated
      if own.momentum is not None:
        rotated_momentum = layout_lib.rotate(momentum_blocks, of_dims)
      direction, moment = adam(rotated, rotated_momentum, moment_blocks)
      directions.append(layout_lib.rotate_back(direction, of_dims))
      moments.append(moment)
    direction = leaf.layout.join(directions)
    moment = leaf.layout.join(moments)
  else:
    direction, moment = adam(leaf.grad, momentum, old_moment)
  new = own._replace(momentum=stored_momentum, second_moment=moment.astype(own.second_moment.dtype))
  return direction, new


def _where(condition: Array, left: PyTree, right: PyTree) -> PyTree:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), left, right)
