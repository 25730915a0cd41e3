"""Kinds of fields of optax states: functions that derive a field's logical axes from those of the parameters.

`KINDS` is the table; the module `rules` describes each kind. A kind is a function from (value of the field, layout of
the parameters, name of the field) to the value with a `PartitionSpec` for each array. `derive_inferred` needs no kind:
it tells from its shape what each array is.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
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


# Classes of arrays, their shapes, and numbers. Other leaves of a tree are objects that JAX does not know.
ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)

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


def name_dims(arrays: PyTree, axes: PyTree) -> PyTree:
  """Return axes in which None stands for arrays without names, in the form with a `PartitionSpec` for each array.

  Args:
    arrays: tree of arrays or shapes.
    axes: the same tree, or a part of it, with a `PartitionSpec` or None for arrays and None for subtrees. Where
      `arrays` has None or `optax.MaskedNode` it may have anything.

  Returns:
    The structure of `arrays` as far as `axes` has it.
  """
  if axes is None:
    return jax.tree.map(names.unnamed_axes, arrays)
  if arrays is None or is_masked(arrays):
    return arrays
  if is_array(arrays) or is_array(axes):
    return axes
  children, treedef = children_of(arrays)
  axes_children, _ = children_of(axes)
  if children.keys() != axes_children.keys():
    return axes
  return treedef.unflatten(
    [name_dims(child, axes_children[name]) for name, child in children.items()]
  )


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


# --- What an array at a parameter is ---------------------------------------------------------------------------------

# Function from (value at a parameter, axes of the parameter, the parameter, its shape, or None) to the axes of the
# value, or to None if the value is not of this kind.
Reading = Callable[[Any, PartitionSpec, Any], Any]


def _read_copy(array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec | None:
  """Return the parameter's axes for a copy of it."""
  if not is_array(array) or np.ndim(array) != len(axes):
    return None
  if param is not None and np.shape(array) != np.shape(param):
    return None
  return axes


def _read_number(array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec | None:
  """Return no names for one number per parameter, of any rank."""
  del axes, param
  if is_array(array) and np.size(array) == 1:
    return names.unnamed_axes(array)
  return None


def _read_vectors(vectors: Any, axes: PartitionSpec, param: Any) -> Any:
  """Return the name of each dim for a list of vectors, one [n] for each dim of size n of the parameter."""
  if not isinstance(vectors, Sequence) or len(vectors) != len(axes):
    return None
  if any(np.ndim(vector) != 1 for vector in vectors):
    return None
  sizes = tuple(np.shape(vector)[0] for vector in vectors)
  if param is not None and sizes != np.shape(param):
    return None
  make_sequence: Any = type(vectors)
  return make_sequence(PartitionSpec(name) for name in axes)


def _read_stack(array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec | None:
  """Return the parameter's axes after unnamed ones for copies stacked to [..., *shape of the parameter]."""
  num_leading = np.ndim(array) - len(axes)
  if not is_array(array) or num_leading < 0:
    return None
  if param is not None and np.shape(array)[num_leading:] != np.shape(param):
    return None
  return PartitionSpec(*(None,) * num_leading, *axes)


def _read_reduced(array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec | None:
  """Return the names of the dims that an array keeps of its parameter, such as a factored moment.

  The other dims are gone, or have size 1. If several choices of dims have the sizes of the array but other names, as
  for a vector [n] of a matrix [n, n], the array is not of this kind.
  """
  if param is None or not is_array(array):
    return None
  shape = np.shape(param)
  sizes = np.shape(array)
  if len(sizes) == len(shape):
    kept = [size == whole for size, whole in zip(sizes, shape, strict=True)]
    if not all(is_kept or size == 1 for is_kept, size in zip(kept, sizes, strict=True)):
      return None
    return PartitionSpec(
      *(name if is_kept else None for name, is_kept in zip(axes, kept, strict=True))
    )
  choices = itertools.combinations(range(len(shape)), len(sizes))
  found = {
    tuple(axes[dim] for dim in dims)
    for dims in choices
    if tuple(shape[dim] for dim in dims) == sizes
  }
  if len(found) == 1:
    return PartitionSpec(*found.pop())
  return None


# Kind to its reading, in the order in which they are tried, and to what the value must be, for error messages.
_READINGS: Mapping[str, tuple[Reading, str]] = {
  'params': (_read_copy, 'the dims {dims} of the parameter'),
  'per_parameter_scalar': (_read_number, 'one element'),
  'per_dim': (_read_vectors, 'one vector for each of the dims {dims}'),
  'reduced': (_read_reduced, 'some of the dims {dims} of the parameter, told by their sizes'),
  'leading_dims': (_read_stack, 'the dims {dims} of the parameter after any leading dims'),
}


def _per_param(kind: str) -> Kind:
  """Return the kind of a tree whose value at each parameter has one reading."""
  read, expected = _READINGS[kind]

  def derive_kind(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:

    def derive(path: str, array: Any, axes: PartitionSpec, param: Any) -> Any:
      found = read(array, axes, param)
      if found is None:
        dims = tuple(axes)
        if param is not None:
          dims = tuple(np.shape(param))
        raise _fit_error(kind, where, path, array, expected.format(dims=dims))
      return found

    return map_params(derive, value, layout, where)

  return derive_kind


derive_params = _per_param('params')

# --- Kinds of other trees --------------------------------------------------------------------------------------------


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


class UnlikeParamsError(Exception):
  """An array whose logical axes do not follow from its shape.

  Attributes:
    array: the array or its shape.
    reason: why its axes do not follow, a clause.
    path: names from the state to the array.
  """

  def __init__(self, array: Any, reason: str, path: tuple[str, ...] = ()):
    super().__init__(array, reason, path)
    self.array = array
    self.reason = reason
    self.path = path

  def below(self, name: str) -> 'UnlikeParamsError':
    """Return the error as seen from the node that has this one as its child `name`."""
    return UnlikeParamsError(self.array, self.reason, (name, *self.path))


def derive_inferred(value: PyTree, layout: ParamsLayout, where: str = '') -> PyTree:
  """Return the axes of any tree of arrays as far as their shapes tell them.

  A part with the structure of the parameters has, at each parameter, a copy of it, one number, one vector for each dim,
  copies stacked along leading dims, or an array that lacks some of its dims. Outside of such parts there are states,
  by the rules of their classes, and scalars.

  Args:
    value: tree of arrays or shapes.
    layout: the parameters.
    where: name of the value; unused.

  Returns:
    `value` with a `PartitionSpec` of one entry per dim for each array.

  Raises:
    UnlikeParamsError: an array of another shape, or of a shape that several dims of its parameter may have.
  """
  del where
  if value is None or is_masked(value):
    return value
  if _is_like_params(value, layout.axes, layout.params):
    return map_params(_infer_axes, value, layout, '')
  if is_array(value):
    if np.ndim(value) == 0 and isinstance(value, ARRAY_TYPES):
      return PartitionSpec()
    raise UnlikeParamsError(value, 'no parameter has its place in the tree')
  children, treedef = children_of(value)
  results = []
  for name, child in children.items():
    try:
      results.append(layout.derive(child, layout))
    except UnlikeParamsError as error:
      raise error.below(name) from None
  return treedef.unflatten(results)


def _is_like_params(node: Any, axes: Any, params: Any) -> bool:
  """Return True if a tree has the structure of the parameters, with an array, or one per dim, at each of them."""
  if node is None or is_masked(node):
    return True
  if isinstance(axes, PartitionSpec):
    return is_array(node) or _read_vectors(node, axes, params) is not None
  if is_array(node) or is_array(axes):
    return False
  children, _ = children_of(node)
  axes_children, _ = children_of(axes)
  params_children = {}
  if params is not None:
    params_children, _ = children_of(params)
  return children.keys() == axes_children.keys() and all(
    _is_like_params(child, axes_children[name], params_children.get(name))
    for name, child in children.items()
  )


def _infer_axes(path: str, array: Any, axes: PartitionSpec, param: Any) -> Any:
  """Return the axes of an array, or of a list of vectors, at a parameter, by the first reading that fits."""
  for read, _ in _READINGS.values():
    found = read(array, axes, param)
    if found is not None:
      return found
  if param is None:
    reason = 'it depends on the shapes of the parameters, which were not passed'
  else:
    reason = (
      f'it is neither a copy nor, in one way only, a part of its parameter {tuple(np.shape(param))}'
    )
  raise UnlikeParamsError(array, reason, tuple(path.split('/')))


def derive_matched(value: PyTree, layout: ParamsLayout, where: str) -> PyTree:
  """Return the axes of any tree of arrays: as `derive_inferred`, but no names for an array that is like no parameter.

  Args:
    value: any tree of arrays or shapes.
    layout: the parameters.
    where: name of the field, for error messages.

  Returns:
    `value` with a `PartitionSpec` of one entry per dim for each array.
  """
  try:
    return derive_inferred(value, layout)
  except UnlikeParamsError:
    if is_array(value):
      return names.unnamed_axes(value)
  children, treedef = children_of(value)
  return treedef.unflatten([derive_matched(child, layout, where) for child in children.values()])


KINDS: dict[str, Kind] = {
  **{kind: _per_param(kind) for kind in _READINGS},
  'nested': derive_nested,
  'scalar': derive_scalar,
  'matched': derive_matched,
  'replicated': derive_replicated,
  'inferred': derive_inferred,
}
