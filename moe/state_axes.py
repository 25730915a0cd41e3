"""Gives the optimizer state of experts the `expert` axis where the optimizer's own derivation left it out.

The optimizers of `t5x_lite` derive the axes of their state from the names of the parameters' axes, so that whatever has
a dim of experts is named already. What is left are optimizers of users which say nothing about an array.
"""

from collections.abc import Callable, Mapping
import re
from typing import Any

from jax.sharding import PartitionSpec

from t5x_lite import tree_utils
from t5x_lite.train_state import FlaxOptimTrainState

EXPERT_AXIS = 'expert'


def match_fn(prefix: str | None) -> Callable[[str], bool]:
  """Return a function that tells whether a name begins with what the regular expression `prefix` matches.

  Args:
    prefix: the expression; None or '' matches no name.

  >>> matches = match_fn('.*expert.*/kernel/v_.*')
  >>> matches('encoder/expert/wi/kernel/v_row'), matches('encoder/mlp/wi/kernel/v_row'), match_fn('')('')
  (True, False, False)
  """
  if not prefix:
    return lambda name: False
  expression = re.compile(prefix)
  return lambda name: expression.match(name) is not None


def infer_state_filter_fn(
    train_state: FlaxOptimTrainState, logical_axes: FlaxOptimTrainState) -> Callable[[str], bool] | None:
  """Return what selects the state that belongs to experts, and of which its optimizer says nothing.

  Selected are arrays in the place of a parameter with experts (its path is part of their name), no dim of which has a
  name, and whose shape is that of the parameter or what is left of it without some dims other than the first.

  Args:
    train_state: the state; its leaves may be `jax.ShapeDtypeStruct`s.
    logical_axes: what it derived.

  Returns:
    A predicate on names within `param_states`; None if there is nothing to select.
  """
  shapes = _shapes(train_state.params)
  experts = {name: shapes[name] for name, spec in tree_utils.named_leaves(logical_axes.params)
             if tuple(spec)[:1] == (EXPERT_AXIS,)}
  if not experts:
    return None
  state_shapes = _shapes(train_state.param_states)
  selected = frozenset(
      name for name, spec in tree_utils.named_leaves(logical_axes.param_states, is_leaf=_is_spec)
      if name in state_shapes and not any(spec or ())
      and any(f'/{path}/' in f'/{name}/' and _is_reduced(state_shapes[name], shape)
              for path, shape in experts.items()))
  return selected.__contains__ if selected else None


def prepend_expert_axis(
    train_state: FlaxOptimTrainState, logical_axes: FlaxOptimTrainState,
    state_filter_fn: Callable[[str], bool]) -> FlaxOptimTrainState:
  """Return logical axes in which the selected optimizer state has `expert` for its first axis.

  What has the axis already is left as it is, and so is what has no room for it: a scalar, a first dim that has a name
  or that is not as long as there are experts (the empty slots of a factored optimizer have one element).

  Args:
    train_state: the state; its leaves may be `jax.ShapeDtypeStruct`s.
    logical_axes: what it derived.
    state_filter_fn: tells by its '/'-joined name within `param_states` whether a term is selected.
  """
  shapes = _shapes(train_state.param_states)
  param_shapes = _shapes(train_state.params)
  expert_counts = {
      size for name, spec in tree_utils.named_leaves(logical_axes.params)
      for axis, size in zip(spec, param_shapes[name], strict=True) if axis == EXPERT_AXIS}

  def prepend(name: str, spec: Any) -> Any:
    if name not in shapes or not state_filter_fn(name) or EXPERT_AXIS in (spec or ()):
      return spec
    names, shape = tuple(spec or ()), shapes[name]
    if len(names) == len(shape) and names[:1] == (None,):
      names = names[1:]  # the place of the first dim is there, without a name
    if len(names) >= len(shape) or shape[0] not in expert_counts:
      return spec
    return PartitionSpec(EXPERT_AXIS, *names, *(None,) * (len(shape) - len(names) - 1))

  optimizer = logical_axes._optimizer  # pylint: disable=protected-access
  param_states = tree_utils.map_with_names(prepend, optimizer.state.param_states, is_leaf=_is_spec)
  return logical_axes.replace(_optimizer=optimizer.replace(state=optimizer.state.replace(param_states=param_states)))


def _shapes(tree: Any) -> Mapping[str, tuple[int, ...]]:
  return {name: tuple(leaf.shape) for name, leaf in tree_utils.named_leaves(tree)}


def _is_spec(node: Any) -> bool:
  return node is None or isinstance(node, PartitionSpec)


def _is_reduced(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
  """Return whether `shape` begins with the first dim of `full`, and its other dims are among the others of `full` in order.

  >>> _is_reduced((4, 8), (4, 16, 8)), _is_reduced((16, 8), (4, 16, 8)), _is_reduced((), (4,))
  (True, False, False)
  """
  rest = iter(full[1:])
  return shape[:1] == full[:1] and bool(shape) and all(size in rest for size in shape[1:])
