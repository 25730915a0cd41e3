"""Optax transformations that update each unit of a parameter as an array of its own.

A transformation whose update of an array depends on the entire array, on its norm, its largest dims or its factors,
treats all layers of a stacked array, and all experts of a layer, as one. Here it gets their units instead (see
`axes.units`): by `per_unit` those of equal batch shapes together, mapped by `jax.vmap`, so that batch dims stay batch
dims on a mesh; by `units_as_layers` as stacked layers, for transformations that compute with all parameters at once.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re
from typing import Any, cast

from flax import struct
import flax.serialization
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.optimizers.axes import kinds
from t5x_lite.optimizers.axes.rules import OptaxStatePartitionRules
from t5x_lite.optimizers.axes.units import Units
from t5x_lite.optimizers.axes.units import UnitsByPath
from t5x_lite.optimizers.axes.units import units_of
from t5x_lite.types import LogicalAxes, Params, PyTree


@struct.dataclass
class UnitsState:
  """State of a transformation that has other arrays of units than copies, such as a number or a factor of each.

  In a state dict it is the state alone.

  Attributes:
    of_units: state of the transformation. At a parameter, an array of the shape of a unit has the shape of the
      parameter, and any other one is [*batch_shape, ...].
  """

  of_units: Any


flax.serialization.register_serialization_state(
  UnitsState,
  lambda state: flax.serialization.to_state_dict(state.of_units),
  lambda state, of_units: UnitsState(flax.serialization.from_state_dict(state.of_units, of_units)),
  override=True,
)


def per_unit(
  transformation: optax.GradientTransformation, units_by_path: UnitsByPath
) -> optax.GradientTransformationExtraArgs:
  """Return a transformation that updates units as `transformation` updates arrays.

  Its state is that of `transformation` if each parameter is its only unit, else one of the same structure, in a
  `UnitsState` if it has arrays of units that are no copies of them.

  Args:
    transformation: transformation whose update of an array depends on this array and on shared scalars.
    units_by_path: units of the parameters.
  """

  def init(units: '_UnitsOfTree', params: Params) -> PyTree:
    return units.apply(
      transformation.init, [units.split(params)], units.state_shapes(transformation)
    )

  def update(units: '_UnitsOfTree', fn: Callable[..., Any], *trees: PyTree) -> PyTree:
    return units.apply(fn, trees, trees[:2])

  return _with_units(transformation, units_by_path, init, update)


def units_as_layers(
  transformation: optax.GradientTransformation, units_by_path: UnitsByPath
) -> optax.GradientTransformationExtraArgs:
  """Return the result of `per_unit` for a transformation that supports stacked layers, see `layer_stacks`.

  In its tree of parameters, each parameter with several units has a subtree of a layer for each.

  Args:
    transformation: transformation whose initial state depends only on the shapes of parameters.
    units_by_path: units of the parameters.
  """

  def init(units: '_UnitsOfTree', params: Params) -> PyTree:
    del params
    state = transformation.init(units.of_params(lambda param: param.layer_shapes))
    return units.map_nodes(_Param.stack_layers, state)

  def update(units: '_UnitsOfTree', fn: Callable[..., Any], *trees: PyTree) -> PyTree:
    results = fn(*(units.map_nodes(_Param.to_layers, tree) for tree in trees))
    return units.map_nodes(_Param.from_layers, results)

  return _with_units(transformation, units_by_path, init, update)


def param_path(path: str) -> str:
  """Return the path of the parameter with an array that `units_as_layers` passes.

  >>> param_path('encoder/query/kernel/layers_0,1,2')
  'encoder/query/kernel'
  """
  return re.sub(r'/layers_[\d,]+$', '', path)


def _with_units(
  transformation: optax.GradientTransformation,
  units_by_path: UnitsByPath,
  init_units: Callable[..., PyTree],
  update_units: Callable[..., PyTree],
) -> optax.GradientTransformationExtraArgs:
  """Return a transformation of units.

  Args:
    transformation: transformation of arrays.
    units_by_path: units of the parameters.
    init_units: from (units, parameters) to the initial state of all units, with batch dims in front.
    update_units: from (units, `transformation.update`, gradients, state and parameters with batch dims in front) to
      (updates, new state) of this form.
  """
  inner = optax.with_extra_args_support(transformation)

  def init(params: PyTree) -> Any:
    units = _UnitsOfTree(params, units_by_path)
    if units.are_single:
      return inner.init(params)
    return units.stored(init_units(units, params), units.state_shapes(inner))

  def update(
    updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, Any]:
    units = _UnitsOfTree(updates, units_by_path)
    if units.are_single:
      return inner.update(updates, state, params, **extra_args)
    shapes = units.state_shapes(inner)
    fn = functools.partial(inner.update, **extra_args)
    new_updates, new_state = update_units(
      units, fn, units.split(updates), units.loaded(state, shapes), units.split(params)
    )
    return units.joined(new_updates), units.stored(new_state, shapes)

  return optax.GradientTransformationExtraArgs(init, cast(optax.TransformUpdateExtraArgsFn, update))


@dataclasses.dataclass(frozen=True)
class _Param:
  """One parameter.

  Attributes:
    units: its units.
    has_layers: True if the trainer has stacked layers in its first dim, a batch dim of the units.
  """

  units: Units
  has_layers: bool

  @property
  def is_single(self) -> bool:
    """True if the array, or that of each stacked layer, is its only unit."""
    if self.has_layers:
      return units_of(self.units.shape[1:], self.units.axes[1:]).is_single
    return self.units.is_single

  @property
  def unit_shape(self) -> jax.ShapeDtypeStruct:
    """Shape of a unit."""
    return jax.ShapeDtypeStruct(self.units.unit_shape, jnp.float32)

  @property
  def unit_axes(self) -> PartitionSpec:
    """Logical axes of a unit; of joined dims the first name, since a model without joined dims has no rule for them."""
    return PartitionSpec(*(self.units.axes[group[0]] for group in self.units.groups))

  @property
  def layer_shapes(self) -> PyTree:
    """Shapes of all units in a subtree per unit; that of the only one."""
    if self.units.num_units == 1:
      return self.unit_shape
    return {layer_stacks.layer_name(i): self.unit_shape for i in range(self.units.num_units)}

  def stack_layers(self, node: PyTree) -> PyTree:
    """Return a tree of arrays [*batch_shape, ...], given a tree for each unit like `layer_shapes`."""
    nodes = [node]
    if self.units.num_units > 1:
      nodes = [node[layer_stacks.layer_name(i)] for i in range(self.units.num_units)]
    return jax.tree.map(
      lambda *arrays: jnp.stack(arrays).reshape(*self.units.batch_shape, *arrays[0].shape),
      *nodes,
    )

  def to_layers(self, node: PyTree) -> PyTree:
    """Return arrays [*batch_shape, ...] as those of stacked layers, one for each unit."""
    if self.is_single:
      return node
    num_batch_dims = len(self.units.batch_dims)

    def convert(array: Any) -> Any:
      if self.has_layers:
        # A mesh shards experts and not layers: experts first, they stay sharded.
        array = jnp.moveaxis(array, 0, num_batch_dims - 1)
      if self.units.num_units == 1:
        return array.reshape(array.shape[num_batch_dims:])
      return array.reshape(-1, *array.shape[num_batch_dims:])

    layers = jax.tree.map(convert, node)
    if self._stack_name is None:
      return layers
    return {self._stack_name: layers}

  def from_layers(self, node: PyTree) -> PyTree:
    """Return the inverse of `to_layers`."""
    if self.is_single:
      return node
    batch_shape = self.units.batch_shape
    if self._stack_name is not None:
      node = node[self._stack_name]

    def convert(array: Any) -> Any:
      if not self.has_layers:
        dims = array.shape[int(self.units.num_units > 1) :]
        return array.reshape(*batch_shape, *dims)
      in_order = array.reshape(*batch_shape[1:], batch_shape[0], *array.shape[1:])
      return jnp.moveaxis(in_order, len(batch_shape) - 1, 0)

    return jax.tree.map(convert, node)

  @property
  def _stack_name(self) -> str | None:
    """Name of the stack of units, without the layers of the trainer; None for one unit."""
    num_units = self.units.num_units
    if self.has_layers:
      num_units //= self.units.batch_shape[0]
    if num_units == 1:
      return None
    return layer_stacks.stacked_name(range(num_units))


class _UnitsOfTree:
  """Units of the parameters of one tree; the state of a transformation has subtrees of this structure."""

  def __init__(self, params: PyTree, units_by_path: UnitsByPath):
    self._params = [
      _Param(units_by_path.of(path, array), layer_stacks.is_stacked(path))
      for path, array in tree_utils.named_leaves(params)
    ]
    self._treedef = jax.tree.structure(params)

  @property
  def are_single(self) -> bool:
    """True if each parameter is its only unit."""
    return all(param.is_single for param in self._params)

  def of_params(self, fn: Callable[[_Param], Any]) -> PyTree:
    """Return a tree with the result of a function for each parameter."""
    return self._treedef.unflatten(map(fn, self._params))

  def map_nodes(self, fn: Callable[[_Param, Any], Any], tree: PyTree) -> PyTree:
    """Return a tree with `fn(parameter, node)` for the node at each parameter in subtrees like the parameters."""
    try:
      nodes = self._treedef.flatten_up_to(tree)
    except ValueError:  # not a tree like the parameters
      if kinds.is_array(tree) or tree is None:
        return tree
      children, treedef = kinds.children_of(tree)
      return treedef.unflatten([self.map_nodes(fn, child) for child in children.values()])
    return self._treedef.unflatten(map(fn, self._params, nodes))

  def split(self, tree: PyTree) -> PyTree:
    """Return arrays [*batch_shape, *unit_shape], given arrays like the parameters, or None."""
    return self.map_nodes(lambda param, array: param.units.split(array), tree)

  def joined(self, tree: PyTree) -> PyTree:
    """Return the inverse of `split`."""
    return self.map_nodes(lambda param, array: param.units.join(array), tree)

  def of_leaves(self, tree: PyTree) -> list[_Param | None]:
    """Return the parameter of each leaf of a tree; None for a leaf that is at no parameter."""
    marked = self.map_nodes(lambda param, node: jax.tree.map(lambda _: param, node), tree)
    return [leaf if isinstance(leaf, _Param) else None for leaf in jax.tree.leaves(marked)]

  def state_shapes(self, transformation: optax.GradientTransformation) -> PyTree:
    """Return the shapes of the transformation's state for one unit of each parameter."""
    return jax.eval_shape(transformation.init, self.of_params(lambda param: param.unit_shape))

  def stored(self, state: PyTree, shapes: PyTree) -> PyTree:
    """Return the optimizer's state, given a state with batch dims in front, and its shapes for single units."""
    are_copies = True

    def convert(array: Any, shape: Any, param: _Param | None) -> Any:
      nonlocal are_copies
      if param is None:
        return array
      if shape.shape == param.units.unit_shape:
        return param.units.join(array)
      are_copies = are_copies and param.is_single
      return array

    state = self._map_leaves(convert, state, shapes)
    if are_copies:
      return state
    return UnitsState(state)

  def loaded(self, state: PyTree, shapes: PyTree) -> PyTree:
    """Return the inverse of `stored`."""
    if isinstance(state, UnitsState):
      state = state.of_units

    def convert(array: Any, shape: Any, param: _Param | None) -> Any:
      if param is not None and shape.shape == param.units.unit_shape:
        return param.units.split(array)
      return array

    return self._map_leaves(convert, state, shapes)

  def _map_leaves(self, fn: Callable[..., Any], state: PyTree, shapes: PyTree) -> PyTree:
    arrays, treedef = jax.tree.flatten(state)
    params = self.of_leaves(state)
    return treedef.unflatten(map(fn, arrays, jax.tree.leaves(shapes), params))

  def apply(self, fn: Callable[..., PyTree], trees: Sequence[PyTree], like: PyTree) -> PyTree:
    """Return the result of a function of single units for all units.

    Args:
      fn: function whose values at a parameter depend on its arguments at this parameter and on shared scalars.
      trees: arguments; arrays at a parameter have its batch dims in front.
      like: tree of the structure of the result.
    """
    leaves, treedef = jax.tree.flatten(list(trees))
    params = self.of_leaves(list(trees))
    result_params = self.of_leaves(like)

    def of_single_units(arguments: list[Any]) -> list[Any]:
      return jax.tree.leaves(fn(*treedef.unflatten(arguments)))

    results: list[Any] = [None] * len(result_params)
    for batch_shape in dict.fromkeys(param.units.batch_shape for param in self._params):
      arguments = []
      for leaf, param in zip(leaves, params, strict=True):
        if param is not None and param.units.batch_shape != batch_shape:
          # The results of other parameters are not used; the compiler removes them.
          leaf = jnp.zeros(leaf.shape[len(param.units.batch_shape) :], leaf.dtype)
        arguments.append(leaf)
      mapped = of_single_units
      for _ in batch_shape:
        in_axes = _mapped_dims(params, batch_shape)
        mapped = jax.vmap(mapped, (in_axes,), _mapped_dims(result_params, batch_shape))
      for i, result in enumerate(mapped(arguments)):
        param = result_params[i]
        if param is None or param.units.batch_shape == batch_shape:
          results[i] = result
    return jax.tree.structure(like).unflatten(results)


def _mapped_dims(params: Sequence[_Param | None], batch_shape: tuple[int, ...]) -> list[int | None]:
  """Return the dim that `jax.vmap` maps for leaves at these parameters: 0 for those with the batch shape."""
  dims: list[int | None] = [None] * len(params)
  for i, param in enumerate(params):
    if param is not None and param.units.batch_shape == batch_shape:
      dims[i] = 0
  return dims


def _derive_axes(state: UnitsState, params_axes: LogicalAxes, params: Params) -> UnitsState:
  """Return the axes of a state: the parameter's for copies, else those derived for units after the batch dims'."""
  units = _UnitsOfTree(params, UnitsByPath(params_axes))
  leaves, treedef = jax.tree.flatten(state.of_units)
  params_of_leaves = units.of_leaves(state.of_units)
  shapes = []
  for leaf, param in zip(leaves, params_of_leaves, strict=True):
    shape = leaf.shape
    if param is not None and shape == param.units.shape:
      shape = param.units.unit_shape
    elif param is not None:
      shape = shape[len(param.units.batch_shape) :]
    shapes.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
  axes_of_units = OptaxStatePartitionRules.derive_optax_logical_axes(
    treedef.unflatten(shapes),
    units.of_params(lambda param: param.unit_axes),
    units.of_params(lambda param: param.unit_shape),
  )
  derived = []
  for leaf, param, axes in zip(
    leaves, params_of_leaves, jax.tree.leaves(axes_of_units), strict=True
  ):
    if param is not None and leaf.shape == param.units.shape:
      axes = PartitionSpec(*param.units.axes)
    elif param is not None:
      axes = PartitionSpec(*param.units.batch_axes, *axes)
    derived.append(axes)
  return UnitsState(treedef.unflatten(derived))


OptaxStatePartitionRules.register_with_params(UnitsState, _derive_axes)
