"""Axis `expert` of experts' optimizer state, for optimizers that do not declare it.

The optimizers of `t5x_lite` derive the axes of their state from the names of the parameters' axes, so their arrays have
the axis. Custom optimizers may have arrays without axes.
"""

from collections.abc import Callable, Mapping
import re
from typing import Any

from jax.sharding import PartitionSpec

from t5x_lite import tree_utils
from t5x_lite.train_state import FlaxOptimTrainState

EXPERT_AXIS = 'expert'


def match_fn(prefix: str | None) -> Callable[[str], bool]:
  """Return a predicate on names whose start matches a regular expression.

  Args:
    prefix: regular expression; None or '' matches no name.

  >>> matches = match_fn('.*expert.*/kernel/v_.*')
  >>> matches('encoder/expert/wi/kernel/v_row'), matches('encoder/mlp/wi/kernel/v_row'), match_fn('')('')
  (True, False, False)
  """
  if not prefix:
    return lambda name: False
  expression = re.compile(prefix)
  return lambda name: expression.match(name) is not None


def infer_state_filter_fn(
  train_state: FlaxOptimTrainState, logical_axes: FlaxOptimTrainState
) -> Callable[[str], bool] | None:
  """Return a predicate that selects experts' optimizer state without declared axes.

  It selects arrays whose name contains the path of a parameter with experts, whose dims have no names, and whose shape
  is that of the parameter, possibly without some dims other than the first.

  Args:
    train_state: train state of arrays or `jax.ShapeDtypeStruct`s.
    logical_axes: logical axes that the state derived.

  Returns:
    Predicate on names within `param_states`; None if it selects nothing.
  """
  shapes = _shapes(train_state.params)
  experts = {}
  for name, spec in tree_utils.named_leaves(logical_axes.params):
    if tuple(spec)[:1] == (EXPERT_AXIS,):
      experts[name] = shapes[name]
  if not experts:
    return None
  state_shapes = _shapes(train_state.param_states)

  def is_of_experts(name):
    shapes_of_params = [shape for path, shape in experts.items() if f'/{path}/' in f'/{name}/']
    return any(_is_reduced(state_shapes[name], shape) for shape in shapes_of_params)

  selected = set()
  for name, spec in tree_utils.named_leaves(logical_axes.param_states, is_leaf=_is_spec):
    has_names = any(spec or ())
    if name in state_shapes and not has_names and is_of_experts(name):
      selected.add(name)
  if selected:
    return selected.__contains__
  return None


def prepend_expert_axis(
  train_state: FlaxOptimTrainState,
  logical_axes: FlaxOptimTrainState,
  state_filter_fn: Callable[[str], bool],
) -> FlaxOptimTrainState:
  """Return logical axes with `expert` as the first axis of the selected optimizer state.

  Arrays that have the axis do not change, nor do scalars and arrays whose first dim has a name or another size than the
  number of experts (the empty arrays of a factored optimizer have one element).

  Args:
    train_state: train state of arrays or `jax.ShapeDtypeStruct`s.
    logical_axes: logical axes that the state derived.
    state_filter_fn: predicate on '/'-joined names within `param_states`.
  """
  shapes = _shapes(train_state.param_states)
  param_shapes = _shapes(train_state.params)
  expert_counts = set()
  for name, spec in tree_utils.named_leaves(logical_axes.params):
    for axis, size in zip(spec, param_shapes[name], strict=True):
      if axis == EXPERT_AXIS:
        expert_counts.add(size)

  def prepend(name: str, spec: Any) -> Any:
    if name not in shapes or not state_filter_fn(name) or EXPERT_AXIS in (spec or ()):
      return spec
    names = tuple(spec or ())
    shape = shapes[name]  # [experts, ...], if the array has a dim of experts
    if len(names) == len(shape) and names[:1] == (None,):
      names = names[1:]  # the first dim has no name
    if len(names) >= len(shape) or shape[0] not in expert_counts:
      return spec
    return PartitionSpec(EXPERT_AXIS, *names, *(None,) * (len(shape) - len(names) - 1))

  optimizer = logical_axes._optimizer  # pylint: disable=protected-access
  param_states = tree_utils.map_with_names(prepend, optimizer.state.param_states, is_leaf=_is_spec)
  state = optimizer.state.replace(param_states=param_states)
  return logical_axes.replace(_optimizer=optimizer.replace(state=state))


def _shapes(tree: Any) -> Mapping[str, tuple[int, ...]]:
  return {name: tuple(leaf.shape) for name, leaf in tree_utils.named_leaves(tree)}


def _is_spec(node: Any) -> bool:
  return node is None or isinstance(node, PartitionSpec)


def _is_reduced(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
  """Return whether `shape` is `full` without some dims other than the first.

  >>> _is_reduced((4, 8), (4, 16, 8)), _is_reduced((16, 8), (4, 16, 8)), _is_reduced((), (4,))
  (True, False, False)
  """
  rest = iter(full[1:])
  return shape[:1] == full[:1] and bool(shape) and all(size in rest for size in shape[1:])
