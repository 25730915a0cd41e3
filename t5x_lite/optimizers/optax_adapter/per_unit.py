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

  def init(units: '_UnitsOfTree', shapes: PyTree, params: Params) -> PyTree:
    return units.apply(transformation.init, [params], [units.shapes], shapes)

  def update(
    units: '_UnitsOfTree', shapes: PyTree, fn: Callable[..., Any], trees: Sequence[PyTree]
  ) -> PyTree:
    shapes_of_trees = [units.shapes, shapes, units.shapes]
    return units.apply(fn, trees, shapes_of_trees[: len(trees)], (units.shapes, shapes))

  return _with_units(transformation, units_by_path, init, update)


def norm_per_unit(
  transformation: optax.GradientTransformation, units_by_path: UnitsByPath
) -> optax.GradientTransformationExtraArgs:
  """Return the result of `per_unit` for a transformation to which the dims of an array do not matter, only its norm.

  Attention kernels keep the dims of heads, which would be moved to be joined.

  Args:
    transformation: transformation whose update of an array depends on its elements in any order.
    units_by_path: units of the parameters.
  """
  return per_unit(transformation, units_by_path.without_joined_dims())


def units_as_layers(
  transformation: optax.GradientTransformation, units_by_path: UnitsByPath
) -> optax.GradientTransformationExtraArgs:
  """Return the result of `per_unit` for a transformation that supports stacked layers, see `layer_stacks`.

  In its tree of parameters, each parameter with several units has a subtree of a layer for each.

  Args:
    transformation: transformation whose initial state depends only on the shapes of parameters.
    units_by_path: units of the parameters.
  """

  def init(units: '_UnitsOfTree', shapes: PyTree, params: Params) -> PyTree:
    del params
    state = transformation.init(units.of_params(lambda param: param.layer_shapes))
    return units.joined(units.map_nodes(_Param.stack_layers, state), shapes)

  def update(
    units: '_UnitsOfTree', shapes: PyTree, fn: Callable[..., Any], trees: Sequence[PyTree]
  ) -> PyTree:
    layers = []
    for tree, shapes_of_tree in zip(trees, [units.shapes, shapes, units.shapes], strict=False):
      layers.append(units.map_nodes(_Param.to_layers, units.split(tree, shapes_of_tree)))
    results = units.map_nodes(_Param.from_layers, fn(*layers))
    return units.joined(results, (units.shapes, shapes))

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
    init_units: from (units, shapes of the state of single units, parameters) to the initial state, as in `UnitsState`.
    update_units: from (units, these shapes, `transformation.update`, its arguments) to its results; all in this form.
  """
  inner = optax.with_extra_args_support(transformation)

  def init(params: PyTree) -> Any:
    units = _UnitsOfTree(params, units_by_path)
    if units.are_single:
      return inner.init(params)
    shapes = units.state_shapes(inner)
    return units.stored(init_units(units, shapes, params), shapes)

  def update(
    updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, Any]:
    units = _UnitsOfTree(updates, units_by_path)
    if units.are_single:
      return inner.update(updates, state, params, **extra_args)
    if isinstance(state, UnitsState):
      state = state.of_units
    trees = [updates, state]
    if params is not None:
      trees.append(params)
    shapes = units.state_shapes(inner)
    fn = functools.partial(inner.update, **extra_args)
    new_updates, new_state = update_units(units, shapes, fn, trees)
    return new_updates, units.stored(new_state, shapes)

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
  def shapes(self) -> PyTree:
    """Shape of a unit of each parameter."""
    return self.of_params(lambda param: param.unit_shape)

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

  def of_leaves(self, tree: PyTree) -> list[_Param | None]:
    """Return the parameter of each leaf of a tree; None for a leaf that is at no parameter."""
    marked = self.map_nodes(lambda param, node: jax.tree.map(lambda _: param, node), tree)
    return [leaf if isinstance(leaf, _Param) else None for leaf in jax.tree.leaves(marked)]

  def state_shapes(self, transformation: optax.GradientTransformation) -> PyTree:
    """Return the shapes of the transformation's state for one unit of each parameter."""
    return jax.eval_shape(transformation.init, self.shapes)

  def stored(self, state: PyTree, shapes: PyTree) -> PyTree:
    """Return a state, in a `UnitsState` if it has other arrays of units than copies; `shapes` are those of one unit."""
    places = self._places(shapes)
    if all(place.param is None or place.param.is_single or place.is_copy for place in places):
      return state
    return UnitsState(state)

  def split(self, tree: PyTree, shapes: PyTree) -> PyTree:
    """Return a tree of arrays with all batch dims in front; `shapes` are those of one unit."""
    return self._convert_copies(Units.split, tree, shapes)

  def joined(self, tree: PyTree, shapes: PyTree) -> PyTree:
    """Return the inverse of `split`."""
    return self._convert_copies(Units.join, tree, shapes)

  def _convert_copies(
    self, fn: Callable[[Units, Any], Any], tree: PyTree, shapes: PyTree
  ) -> PyTree:
    arrays, treedef = jax.tree.flatten(tree)
    for i, place in enumerate(self._places(shapes)):
      if place.param is not None and place.is_copy:
        arrays[i] = fn(place.param.units, arrays[i])
    return treedef.unflatten(arrays)

  def apply(
    self,
    fn: Callable[..., PyTree],
    trees: Sequence[PyTree],
    shapes: Sequence[PyTree],
    result_shapes: PyTree,
  ) -> PyTree:
    """Return the result of a function of single units for all units.

    Args:
      fn: function whose values at a parameter depend on its arguments at this parameter and on shared scalars.
      trees: arguments, in the form of `UnitsState`.
      shapes: shapes of the arguments for one unit of each parameter.
      result_shapes: those of the result.
    """
    leaves, treedef = jax.tree.flatten(list(trees))
    places = self._places(list(shapes))
    result_places = self._places(result_shapes)

    def of_single_units(arguments: list[Any]) -> list[Any]:
      # Dims of the array, without batch dims, that are one dim of a unit are adjacent.
      units = [array.reshape(place.shape) for array, place in zip(arguments, places, strict=True)]
      results = jax.tree.leaves(fn(*treedef.unflatten(units)))
      return [
        result.reshape(place.shape_in_array)
        for result, place in zip(results, result_places, strict=True)
      ]

    found: list[Any] = [None] * len(result_places)
    for batch_shape in dict.fromkeys(param.units.batch_shape for param in self._params):
      arguments = []
      for leaf, place in zip(leaves, places, strict=True):
        if place.param is not None and place.param.units.batch_shape != batch_shape:
          # The results of other parameters are not used; the compiler removes them.
          leaf = jnp.zeros(place.shape, leaf.dtype)
        arguments.append(leaf)
      mapped = of_single_units
      for i in reversed(range(len(batch_shape))):
        in_dims = [place.mapped_dim(i, batch_shape) for place in places]
        out_dims = [place.mapped_dim(i, batch_shape) for place in result_places]
        mapped = jax.vmap(mapped, (in_dims,), out_dims)
      for i, result in enumerate(mapped(arguments)):
        param = result_places[i].param
        if param is None or param.units.batch_shape == batch_shape:
          found[i] = result
    return jax.tree.structure(result_shapes).unflatten(found)

  def _places(self, shapes: PyTree) -> list['_Place']:
    leaves = zip(self.of_leaves(shapes), jax.tree.leaves(shapes), strict=True)
    return [_Place(param, tuple(leaf.shape)) for param, leaf in leaves]


@dataclasses.dataclass(frozen=True)
class _Place:
  """A leaf of a tree with subtrees like the parameters.

  Attributes:
    param: the parameter at which the leaf is, or None.
    shape: shape of the leaf for one unit.
  """

  param: _Param | None
  shape: tuple[int, ...]

  @property
  def is_copy(self) -> bool:
    """True if the leaf has the shape of a unit."""
    return self.param is not None and self.shape == self.param.units.unit_shape

  @property
  def shape_in_array(self) -> tuple[int, ...]:
    """Shape of the leaf for one unit in its array: without joined dims for a copy."""
    if self.param is None or not self.is_copy:
      return self.shape
    units = self.param.units
    return tuple(size for dim, size in enumerate(units.shape) if dim not in units.batch_dims)

  def mapped_dim(self, number: int, batch_shape: tuple[int, ...]) -> int | None:
    """Return the dim with a batch dim, the `number`-th, when those before are gone; None for another batch shape."""
    if self.param is None or self.param.units.batch_shape != batch_shape:
      return None
    if self.is_copy:
      return self.param.units.batch_dims[number] - number
    return 0


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
    units.shapes,
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
