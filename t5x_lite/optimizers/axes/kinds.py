"""Kinds of fields of optax states: functions that derive a field's logical axes from those of the parameters.

`KINDS` is the table; the module `rules` describes each kind. A kind is a function from (value of the field, layout of
the parameters, name of the field) to the value with a `PartitionSpec` for each array.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.axes import names
from t5x_lite.types import LogicalAxes, PyTree, PyTreeDef


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamsLayout:
  """Axes and shapes of the parameters of an optax state.

  Attributes:
    axes: `PartitionSpec` of logical names for each parameter.
    params: the parameters or their shapes in the same structure, or None.
    derive: function from (state, layout) to the axes of the state, for states of inner transformations.
  """

  axes: LogicalAxes
  params: PyTree | None
  derive: Callable[[Any, 'ParamsLayout'], Any]

  def require_params(self, where: str) -> PyTree:
    """Return the parameters.

    Args:
      where: name of the state, for the error message.

    Raises:
      ConfigError: the parameters are missing.
    """
    if self.params is None:
      raise ConfigError(
        f'The logical axes of {where} depend on the shapes of the parameters. Pass the parameters, or '
        'jax.ShapeDtypeStructs of them, as the third argument of derive_optax_logical_axes.'
      )
    return self.params


# Function from (value, layout, name) to the value with a `PartitionSpec` for each array.
Kind = Callable[[Any, ParamsLayout, str], Any]
# Function from (state, layout) to the state with a `PartitionSpec` for each array.
StateRule = Callable[[Any, ParamsLayout], Any]
# Function from ('/'-joined path of a parameter, value at this path, axes of the parameter, the parameter or None) to
# the axes of the value.
PerParam = Callable[[str, Any, PartitionSpec, Any], Any]


def is_masked(node: Any) -> bool:
  """Return True if `node` replaces parameters that a transformation does not update."""
  return isinstance(node, optax.MaskedNode)


def is_array(node: Any) -> bool:
  """Return True if `node` is a leaf for JAX: an array, a tracer, a shape or a number."""
  return node is not None and jax.tree_util.all_leaves([node])


def fields_of(node_class: type) -> tuple[str, ...] | None:
  """Return the field names of a named-tuple class, None for any other class."""
  if issubclass(node_class, tuple):
    return getattr(node_class, '_fields', None)
  return None


def children_of(node: Any) -> tuple[dict[str, Any], PyTreeDef]:
  """Return the children of one pytree node by name, and the tree definition to rebuild the node."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(
    node, is_leaf=lambda child: child is not node
  )
  return {_key_name(path): child for path, child in flat}, treedef


def _key_name(path: tuple[Any, ...]) -> str:
  # A node without children has the path (); any other child has the path of one key.
  return jax.tree_util.keystr(path, simple=True, separator='/')


def map_params(fn: PerParam, value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Map a function over the parameters' paths in a tree with their structure.

  Args:
    fn: called with (path of a parameter, value at this path, axes of the parameter, the parameter or None).
    value: tree like the parameters; `optax.MaskedNode` or None may replace any subtree, and plain dicts frozen ones.
    layout: the parameters.
    where: name of `value` for error messages.

  Returns:
    `value` with the results at the parameters' paths.

  Raises:
    ConfigError: `value` has another structure than the parameters; the message has the first difference.
  """

  def visit(path: str, node: Any, axes: Any, param: Any) -> Any:
    if node is None or is_masked(node):
      return node
    if isinstance(axes, PartitionSpec):
      return fn(path, node, axes, param)
    children, treedef = children_of(node)
    axes_children = {}
    if not is_array(axes):
      axes_children, _ = children_of(axes)
    if is_array(node) or children.keys() != axes_children.keys():
      if is_array(node):
        got = 'an array'
      else:
        got = f'{type(node).__name__} of {list(children)}'
      remedy = 'Register a rule function for this state class.'
      if is_array(node) and not path:
        remedy += ' In optax.flatten it is one vector of all parameters, which cannot be sharded: remove optax.flatten.'
      raise ConfigError(
        f'{where} does not have the structure of the parameters: at {path!r} it has {got}, the parameters have '
        f'{list(axes_children) or axes!r}. {remedy}'
      )
    params_children = {}
    if param is not None:
      params_children, _ = children_of(param)
    results = []
    for name, child in children.items():
      child_path = f'{path}/{name}'.removeprefix('/')
      results.append(visit(child_path, child, axes_children[name], params_children.get(name)))
    return treedef.unflatten(results)

  return visit('', value, layout.axes, layout.params)


def _fit_error(kind: str, where: str, path: str, array: Any, expected: str) -> ConfigError:
  if is_array(array):
    got = f'shape {tuple(np.shape(array))}'
  else:
    got = f'{type(array).__name__} (not an array)'
  return ConfigError(
    f'{where} must have {expected} at {path!r}, got {got}. The kind {kind!r} does not fit: register '
    'another kind, or a rule function.'
  )


def _per_param(
  kind: str, expected: str
) -> Callable[[Callable[[Any, PartitionSpec, Any], Any]], Kind]:
  """Return a decorator that makes a kind of a function for the value at one parameter.

  Args:
    kind: name of the kind, for error messages.
    expected: expected value, for error messages; '{dims}' is replaced by the dims of the parameter.

  Returns:
    Decorator of a function from (value, axes of the parameter, the parameter or None) to the axes of the value, or to
    None if the value does not fit the kind.
  """

  def decorate(axes_of: Callable[[Any, PartitionSpec, Any], Any]) -> Kind:
    @functools.wraps(axes_of)
    def derive_kind(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
      def derive(path: str, array: Any, axes: PartitionSpec, param: Any) -> Any:
        found = axes_of(array, axes, param)
        if found is None:
          dims = tuple(axes)
          if param is not None:
            dims = tuple(np.shape(param))
          raise _fit_error(kind, where, path, array, expected.format(dims=dims))
        return found

      return map_params(derive, value, layout, where)

    return derive_kind

  return decorate


@_per_param('params', 'the dims {dims} of the parameter')
def derive_params(array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec | None:
  """Return the axes of a copy of the parameters: the parameters' axes.

  Args:
    array: array or shape at the path of the parameter.
    axes: logical axes of the parameter.
    param: the parameter, its shape, or None.

  Returns:
    `PartitionSpec` of one entry per dim, or None if the value does not fit.
  """
  fits = (
    is_array(array)
    and np.ndim(array) == len(axes)
    and (param is None or np.shape(array) == np.shape(param))
  )
  if fits:
    return axes
  return None


@_per_param('leading_dims', 'the dims {dims} of the parameter after any leading dims')
def derive_leading_dims(array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec | None:
  """Return the axes of stacked copies of the parameters: the parameters' axes after unnamed leading dims.

  Args:
    array: array [..., *shape of the parameter] or its shape.
    axes: logical axes of the parameter.
    param: the parameter, its shape, or None.

  Returns:
    `PartitionSpec` of one entry per dim, or None if the value does not fit.
  """
  num_leading = np.ndim(array) - len(axes)
  fits = (
    is_array(array)
    and num_leading >= 0
    and (param is None or np.shape(array)[num_leading:] == np.shape(param))
  )
  if fits:
    return PartitionSpec(*(None,) * num_leading, *axes)
  return None


@_per_param('per_parameter_scalar', 'one element')
def derive_per_parameter_scalar(
  array: Any, axes: PartitionSpec, param: Any
) -> PartitionSpec | None:
  """Return the axes of one number per parameter: no names.

  Args:
    array: array with one element, or its shape.
    axes: logical axes of the parameter.
    param: the parameter, its shape, or None.

  Returns:
    `PartitionSpec` of one entry per dim, or None if the value does not fit.
  """
  del axes, param
  if is_array(array) and np.size(array) == 1:
    return names.unnamed_axes(array)
  return None


@_per_param('per_dim', 'one vector for each of the dims {dims}')
def derive_per_dim(vectors: Any, axes: PartitionSpec, param: Any) -> Any:
  """Return the axes of a list of vectors per parameter, one for each dim: the dims' names.

  Args:
    vectors: list of one array [n] for each dim of size n of the parameter.
    axes: logical axes of the parameter.
    param: the parameter, its shape, or None.

  Returns:
    `PartitionSpec` of one entry per dim for each vector, or None if the value does not fit.
  """
  if not isinstance(vectors, Sequence) or len(vectors) != len(axes):
    return None
  if any(np.ndim(vector) != 1 for vector in vectors):
    return None
  sizes = tuple(np.shape(vector)[0] for vector in vectors)
  if param is not None and sizes != np.shape(param):
    return None
  make_sequence: Any = type(vectors)
  return make_sequence(PartitionSpec(name) for name in axes)


def derive_scalar(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Return the axes of a counter or flag: no names. Raise if an array has dims.

  Args:
    value: tree of scalars.
    layout: the parameters.
    where: name of the field, for error messages.

  Returns:
    `value` with a `PartitionSpec` of one entry per dim for each array.
  """
  del layout

  def derive(array: Any) -> PartitionSpec:
    if np.ndim(array):
      raise _fit_error('scalar', where, '', array, 'a scalar')
    return PartitionSpec()

  return jax.tree.map(derive, value)


def derive_replicated(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Return the axes of replicated arrays of any size: no names.

  Args:
    value: tree of arrays or shapes.
    layout: the parameters.
    where: name of the field, for error messages.

  Returns:
    `value` with a `PartitionSpec` of one entry per dim for each array.
  """
  del layout, where
  return jax.tree.map(names.unnamed_axes, value)


def derive_nested(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Return the axes of states of inner transformations, by the rules of their classes.

  Args:
    value: state, or nest of states.
    layout: the parameters.
    where: name of the field, for error messages.

  Returns:
    `value` with a `PartitionSpec` of one entry per dim for each array.
  """
  del where
  return layout.derive(value, layout)


def derive_matched(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Return the parameters' axes for parts with the structure of the parameters, and no names for other arrays.

  Args:
    value: any tree of arrays or shapes.
    layout: the parameters.
    where: name of the field, for error messages.

  Returns:
    `value` with a `PartitionSpec` of one entry per dim for each array.
  """
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
  """Return a kind that fits the value of a field; 'replicated' if no other kind fits.

  Args:
    value: value of the field.
    layout: the parameters.

  Returns:
    Name of a kind in `KINDS`.
  """
  if jax.tree.leaves(value) and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(value)):
    # One number per parameter is a tree of numbers; a single number is a counter.
    if is_array(value):
      candidates = ['scalar']
    else:
      candidates = ['params', 'per_parameter_scalar', 'scalar']
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
  """Return True if `node` contains a named tuple, as states are, above its arrays."""
  if node is None or is_array(node) or is_masked(node):
    return False
  return fields_of(type(node)) is not None or any(
    _holds_states(child) for child in children_of(node)[0].values()
  )
