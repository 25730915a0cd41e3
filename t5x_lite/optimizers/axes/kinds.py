"""What a field of an optax state can be, and how its logical axes follow from those of the parameters.

`KINDS` is the table; `OptaxStatePartitionRules` describes each kind to users. A kind is a function from (value of the
field, layout of the parameters, where the field is) to the value with a `PartitionSpec` in the place of each array.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.axes import names
from t5x_lite.types import LogicalAxes, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamsLayout:
  """The parameters that an optax state belongs to.

  Attributes:
    axes: a `PartitionSpec` of logical names for each parameter.
    params: the parameters or their shapes in the same structure; None where the caller did not give them.
    derive: from (state, layout) to the axes of the state, for the states of inner transformations.
  """

  axes: LogicalAxes
  params: PyTree | None
  derive: Callable[[Any, 'ParamsLayout'], Any]

  def require_params(self, where: str) -> PyTree:
    """Returns the parameters; raises ConfigError where there are none."""
    if self.params is None:
      raise ConfigError(
          f'The logical axes of {where} depend on the shapes of the parameters; pass the parameters, or '
          'jax.ShapeDtypeStructs of them, as the third argument of derive_optax_logical_axes.')
    return self.params


# From (value, layout, where) to the value with a `PartitionSpec` in the place of each array.
Kind = Callable[[Any, ParamsLayout, str], Any]
# From (state, layout) to the same, for a whole state.
StateRule = Callable[[Any, ParamsLayout], Any]
# From ('/'-joined path, what stands at the place of a parameter, its axes, the parameter or None) to the axes.
PerParam = Callable[[str, Any, PartitionSpec, Any], Any]


def is_masked(node: Any) -> bool:
  """Whether `node` stands for parameters that a transformation leaves alone."""
  return isinstance(node, optax.MaskedNode)


def is_array(node: Any) -> bool:
  """Whether `node` is a leaf for JAX (an array, a tracer, a shape, a number) and no container."""
  return node is not None and jax.tree_util.all_leaves([node])


def fields_of(node_class: type) -> tuple[str, ...] | None:
  """Returns the field names of a named-tuple class, None for any other class."""
  return getattr(node_class, '_fields', None) if issubclass(node_class, tuple) else None


def children_of(node: Any) -> tuple[dict[str, Any], jax.tree_util.PyTreeDef]:
  """Returns the children of one pytree node by name, and what makes a node of their kind of new ones."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
  return {_key_name(path): child for path, child in flat}, treedef


def _key_name(path: tuple[Any, ...]) -> str:
  # A node without arrays has the path (); any other child the path of one key.
  return jax.tree_util.keystr(path, simple=True, separator='/')


def map_params(fn: PerParam, value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Maps over the places of the parameters in a tree that is laid out like them.

  Args:
    fn: called with (path, what stands in `value` at the place of a parameter, its axes, the parameter or None).
    value: a tree like the parameters; `optax.MaskedNode` or None may stand for any subtree, and plain for frozen dicts.
    layout: the parameters.
    where: what `value` is, for error messages.

  Returns:
    `value` with the results in the places of the parameters.

  Raises:
    ConfigError: `value` is not laid out like the parameters; the message names the first place.
  """

  def visit(path: str, node: Any, axes: Any, param: Any) -> Any:
    if node is None or is_masked(node):
      return node
    if isinstance(axes, PartitionSpec):
      return fn(path, node, axes, param)
    children, treedef = children_of(node)
    axes_children = {} if is_array(axes) else children_of(axes)[0]
    if is_array(node) or children.keys() != axes_children.keys():
      got = 'an array' if is_array(node) else f'{type(node).__name__} of {list(children)}'
      remedy = 'register a rule function for this state class instead.'
      if is_array(node) and not path:
        remedy += (
            ' (Under optax.flatten it is all parameters as one vector, which no names shard: leave optax.flatten out.)')
      raise ConfigError(
          f'{where} has not the structure of the parameters: at {path!r} it has {got}, the parameters have '
          f'{list(axes_children) or axes!r}, so its axes cannot be theirs; {remedy}')
    params_children = {} if param is None else children_of(param)[0]
    return treedef.unflatten([
        visit(f'{path}/{name}' if path else name, child, axes_children[name], params_children.get(name))
        for name, child in children.items()])

  return visit('', value, layout.axes, layout.params)


def _shape_error(where: str, path: str, array: Any, expected: str, remedy: str) -> ConfigError:
  got = f'shape {tuple(np.shape(array))}' if is_array(array) else f'{type(array).__name__} (no array)'
  return ConfigError(f'{where} has {got} at {path!r}; expected {expected}. {remedy}')


def derive_params(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of a copy of the parameters: theirs."""

  def derive(path: str, array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec:
    if is_array(array) and np.ndim(array) != len(axes):
      raise ConfigError(
          f'{where} has rank {np.ndim(array)} at {path!r} where the parameter has the {len(axes)} logical axes '
          f"{tuple(axes)}: it is not a copy of the parameters; register another kind than 'params', or a rule "
          'function.')
    if not is_array(array) or (param is not None and np.shape(array) != np.shape(param)):
      raise _shape_error(
          where, path, array, 'an array' if param is None else f'the shape {tuple(np.shape(param))} of the parameter',
          "It is not a copy of the parameters: register another kind than 'params', or a rule function.")
    return axes

  return map_params(derive, value, layout, where)


def derive_leading_dims(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of stacked copies of the parameters: theirs, after unnamed leading dims."""

  def derive(path: str, array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec:
    num_leading = np.ndim(array) - len(axes)
    if not is_array(array) or num_leading < 0 or (
        param is not None and np.shape(array)[num_leading:] != np.shape(param)):
      dims = f'the dims {tuple(axes) if param is None else tuple(np.shape(param))} of the parameter'
      raise _shape_error(where, path, array, f'{dims}, after any leading ones', "The kind 'leading_dims' does not fit.")
    return PartitionSpec(*(None,) * num_leading, *axes)

  return map_params(derive, value, layout, where)


def derive_per_parameter_scalar(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of one number per parameter: none."""

  def derive(path: str, array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec:
    del axes, param
    if not is_array(array) or np.size(array) != 1:
      raise _shape_error(where, path, array, 'one element', "The kind 'per_parameter_scalar' does not fit.")
    return names.unnamed_axes(array)

  return map_params(derive, value, layout, where)


def derive_per_dim(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of a list of vectors per parameter, one for each of its dims: the dims' names."""

  def derive(path: str, vectors: Any, axes: PartitionSpec, param: Any) -> Any:
    is_list = isinstance(vectors, Sequence) and len(vectors) == len(axes)
    if not is_list or any(np.ndim(vector) != 1 for vector in vectors) or (
        param is not None and tuple(map(len_of_vector, vectors)) != np.shape(param)):
      raise _shape_error(
          where, path, vectors, f'{len(axes)} vectors, one as long as each of the dims {tuple(axes)}',
          "The kind 'per_dim' does not fit.")
    return type(vectors)(PartitionSpec(name) for name in axes)

  return map_params(derive, value, layout, where)


def len_of_vector(vector: Any) -> int:
  """Returns the size of an array of one dim, or of a `jax.ShapeDtypeStruct` of one."""
  return np.shape(vector)[0]


def derive_scalar(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of a counter or flag: none. Arrays of one dim or more are refused."""
  del layout

  def derive(array: Any) -> PartitionSpec:
    if np.ndim(array):
      raise _shape_error(where, '', array, 'a scalar', "The kind 'scalar' does not fit.")
    return PartitionSpec()

  return jax.tree.map(derive, value)


def derive_replicated(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of what every device holds a copy of, whatever its size: none."""
  del layout, where
  return jax.tree.map(names.unnamed_axes, value)


def derive_nested(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of the states of inner transformations: by the rules of their classes."""
  del where
  return layout.derive(value, layout)


def derive_matched(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Axes of what may or may not be laid out like the parameters: theirs wherever it is, else none."""
  if value is None or is_masked(value):
    return value
  try:
    return derive_params(value, layout, where)
  except ConfigError:
    if is_array(value):
      return names.unnamed_axes(value)
  children, treedef = children_of(value)
  return treedef.unflatten([derive_matched(child, layout, where) for child in children.values()])


KINDS: dict[str, Kind] = {
    'params': derive_params,
    'leading_dims': derive_leading_dims,
    'per_dim': derive_per_dim,
    'per_parameter_scalar': derive_per_parameter_scalar,
    'nested': derive_nested,
    'scalar': derive_scalar,
    'matched': derive_matched,
    'replicated': derive_replicated,
}


def propose_kind(value: Any, layout: ParamsLayout) -> str:
  """Returns the kind that fits the value of a field as far as one can see; 'replicated' where none other does."""
  if jax.tree.leaves(value) and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(value)):
    # One number per parameter is laid out as a tree of them; a single one is a counter.
    candidates = ['scalar'] if is_array(value) else ['params', 'per_parameter_scalar', 'scalar']
  elif _holds_states(value):
    return 'nested'
  else:
    candidates = ['params', 'per_dim', 'leading_dims', 'per_parameter_scalar']
  for kind in candidates:
    try:
      KINDS[kind](value, layout, '')
    except ConfigError:
      continue
    return kind
  return 'replicated'


def _holds_states(node: Any) -> bool:
  """Whether there is a named tuple, which states are, in `node` above its arrays."""
  if node is None or is_array(node) or is_masked(node):
    return False
  return fields_of(type(node)) is not None or any(_holds_states(child) for child in children_of(node)[0].values())
