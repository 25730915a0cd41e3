"""Conversion of `param_layouts` array by array, for trees that are larger than memory.

An array of the result reads its stored arrays only when it is made, layer by layer. The result equals that of
`param_layouts.convert`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import re
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import param_layouts
from t5x_lite.networks.t5_config import PARAM_LAYOUTS

# Last parts of the names of arrays with dims in the state of an optimizer that belong to no parameter and are equal in
# each layout: coefficients, random keys, and Mechanic's numbers for each decay. Others may be lists of parameters.
_OF_NO_PARAMETER = frozenset(('ns_coeffs', 'rng_key', 'key', 'r', 'm', 'v', 's'))

ReadFn = Callable[[str], np.ndarray]

_STACKS = ('encoder', 'decoder')
_TABLE = 'relpos_bias/rel_embedding'
_LAYER = re.compile(r'layers_(\d+)/(.+)')
_LAYERS_DIM = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedArray:
  """Array of the result.

  Attributes:
    inputs: names of the stored arrays from which it is made.
    shape: shape of the result.
    dtype: dtype of the result.
    make: returns the result, given a function that reads a stored array by name in the dtype of the plan.
  """

  inputs: tuple[str, ...]
  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[ReadFn], np.ndarray]


def unchanged(name: str, leaf: Any) -> PlannedArray:
  """Return the plan of an array that does not change.

  Args:
    name: name of the stored array.
    leaf: object with `shape` and `dtype`.
  """
  return PlannedArray(
    inputs=(name,),
    shape=tuple(leaf.shape),
    dtype=np.dtype(leaf.dtype),
    make=lambda read: read(name),
  )


def plan(
  shapes: Mapping[str, Any], to_layout: str, *, relpos_per_layer: bool, heads: int | None = None
) -> dict[str, PlannedArray]:
  """Plan the conversion of parameters to a layout.

  Args:
    shapes: object with `shape` and `dtype` by name, for each stored parameter. A `dtype` may differ from the stored one
      if the function passed to `make` casts.
    to_layout: 't5' or 'scalable_t5'.
    relpos_per_layer: True for a table of relative position biases per layer of the result, False for one per stack. The
      layout 'scalable_t5' always has one per layer.
    heads: number of attention heads; None to use that of the tables of relative position biases.

  Returns:
    Plan of each array of the result, by name.

  Raises:
    ConfigError: the parameters are in neither layout, their layers differ, or the number of heads is unknown. `make` of
      a table for all layers raises it if the tables of the layers differ.
  """
  checks.check('', locals(), to_layout=checks.one_of(PARAM_LAYOUTS))
  from_layout = param_layouts.param_layout(tree_utils.unflatten_dict(dict(shapes)))
  if from_layout == to_layout:
    return {name: unchanged(name, leaf) for name, leaf in shapes.items()}
  result = {}
  for name, leaf in shapes.items():
    stack, _, rest = name.partition('/')
    if stack not in _STACKS or not _is_layered(stack, rest):
      result[name] = unchanged(name, leaf)
  for stack in _STACKS:
    of_stack = {
      name.partition('/')[2]: leaf for name, leaf in shapes.items() if name.startswith(f'{stack}/')
    }
    if not of_stack:
      continue
    if to_layout == 't5':
      result |= _plan_layers(stack, of_stack, relpos_per_layer)
    else:
      result |= _plan_stacked(stack, of_stack, heads or num_heads(shapes))
      result.pop(f'{stack}/{_TABLE}', None)
  return result


def plan_part(
  part: Mapping[str, Any],
  params: Mapping[str, Any],
  plan_fn: Callable[[Mapping[str, Any]], dict[str, PlannedArray]],
) -> dict[str, PlannedArray]:
  """Plan the conversion of arrays that belong to some of the parameters, such as the momenta of kernels.

  Args:
    part: object with `shape` and `dtype` by the name of the parameter, whose shape it has.
    params: the same for each stored parameter.
    plan_fn: function from such objects for all parameters to the plan, as `plan`.

  Returns:
    Plan of each array of the result that is made of the part alone, by name.

  Raises:
    ConfigError: the part has some layers of an array of the result but not all.
  """
  planned = plan_fn({**params, **part})
  result = {name: each for name, each in planned.items() if part.keys() >= set(each.inputs)}
  used = {name for each in result.values() for name in each.inputs}
  left = sorted(part.keys() - used)
  if left:
    raise ConfigError(
      f'An array of the other param_layout consists of {left[0]} and of arrays of other layers, which are missing. '
      'Keep the param_layout.'
    )
  return result


def is_at_one(name: str, params: Mapping[str, Any]) -> bool:
  """Return True if the path of a parameter is part of a '/'-joined name, given the parameters by path."""
  return any(f'/{param}/' in f'/{name}/' for param in params)


def is_independent(name: str, shape: tuple[int, ...], params: Mapping[str, Any]) -> bool:
  """Return True if an array of an optimizer's state is the same in each layout, such as a counter.

  Args:
    name: '/'-joined name.
    shape: shape of the array.
    params: the parameters by path.
  """
  is_known = not shape or name.rpartition('/')[2] in _OF_NO_PARAMETER
  return is_known and not is_at_one(name, params)


def num_heads(shapes: Mapping[str, Any]) -> int:
  """Return the number of attention heads, read from a table of relative position biases.

  Args:
    shapes: object with `shape` by name, for parameters in either layout.

  Raises:
    ConfigError: there is no table.
  """
  for name, leaf in shapes.items():
    if name.endswith(_TABLE):
      return leaf.shape[0]
  raise ConfigError(
    f'The number of heads is not known, as the parameters have no table {_TABLE!r}. Keep their '
    'param_layout.'
  )


def layer_tables(shapes: Mapping[str, Any]) -> tuple[str, ...]:
  """Return the names of the arrays with the tables of relative position biases of all layers.

  Args:
    shapes: parameters by name, in the layout 'scalable_t5'.
  """
  names = [f'{stack}/{stack}/{_TABLE}' for stack in _STACKS]
  return tuple(name for name in names if name in shapes)


def tables_are_equal(table: np.ndarray) -> bool:
  """Return whether the layers of a stack have equal tables of relative position biases.

  Args:
    table: <float>[num_heads, layers, num_buckets].
  """
  num_layers = table.shape[_LAYERS_DIM]
  return all(np.array_equal(table[:, 0], table[:, i]) for i in range(1, num_layers))


def tables_differ(shapes: Mapping[str, Any], read: ReadFn) -> bool:
  """Return whether the layers of a stack have different tables of relative position biases; reads the tables.

  Args:
    shapes: parameters by name, in either layout.
    read: returns a stored array by name.
  """
  return not all(tables_are_equal(read(name)) for name in layer_tables(shapes))


def _is_layered(stack: str, rest: str) -> bool:
  return rest.startswith(f'{stack}/') or _LAYER.match(rest) is not None


# ----------------------------------------------------------------------------------------------------------------------
# From layers to stacks


def _plan_stacked(stack: str, of_stack: Mapping[str, Any], heads: int) -> dict[str, PlannedArray]:
  layers: dict[int, dict[str, Any]] = {}
  for name, leaf in of_stack.items():
    match = _LAYER.match(name)
    if match:
      layers.setdefault(int(match[1]), {})[match[2]] = leaf
  _check_layers(stack, layers)
  _check_attention(stack, layers[0], heads)
  result = {}
  for rest, leaf in layers[0].items():
    names = tuple(f'{stack}/layers_{i}/{rest}' for i in range(len(layers)))
    dtypes = [layer[rest].dtype for layer in layers.values()]
    dtype = np.result_type(*dtypes)
    shape = _split_shape(rest, tuple(leaf.shape), heads)
    result[f'{stack}/{stack}/{rest}'] = _stacked(names, shape, dtype)
  if _TABLE in of_stack:
    table = of_stack[_TABLE]
    names = (f'{stack}/{_TABLE}',) * len(layers)
    shape = tuple(table.shape)
    result[f'{stack}/{stack}/{_TABLE}'] = _stacked(names, shape, np.dtype(table.dtype))
  return result


def _check_layers(stack: str, layers: Mapping[int, Mapping[str, Any]]) -> None:
  shapes = {
    i: {name: tuple(leaf.shape) for name, leaf in layer.items()} for i, layer in layers.items()
  }
  first, *others = [shapes.get(i, {}) for i in range(max(layers) + 1)]
  for i, other in enumerate(others, start=1):
    for name in sorted({*first, *other}):
      if first.get(name) != other.get(name):
        raise ConfigError(
          f"The layers of {stack!r} must be equal for param_layout='scalable_t5', got {name} of shape "
          f"{first.get(name)} in layer 0 and {other.get(name)} in layer {i}. Keep param_layout='t5'."
        )


def _check_attention(stack: str, layer: Mapping[str, Any], heads: int) -> None:
  shapes = {}
  widths = set()
  for name, leaf in layer.items():
    dim = param_layouts.heads_dim(name)
    if dim is not None:
      shapes[name] = tuple(leaf.shape)
      widths.add(leaf.shape[min(dim, len(leaf.shape) - 1)])
  if (
    len(widths) > 1
    or any(width % heads for width in widths)
    or any(len(shape) != 2 for shape in shapes.values())
  ):
    raise ConfigError(
      f'The attention kernels of {stack!r} must be matrices with the same number of columns (of rows for `out`), '
      f"divisible by {heads} heads, got shapes {shapes}. Keep param_layout='t5'."
    )


def _split_shape(rest: str, shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
  """Return the shape of an array of one layer with separate dims for heads and kv."""
  dim = param_layouts.heads_dim(rest)
  if dim is None:
    return shape
  split = (heads, shape[dim] // heads)
  if dim == 0:
    return (*split, shape[1])
  return (shape[0], *split)


def _stacked(names: tuple[str, ...], layer_shape: tuple[int, ...], dtype: np.dtype) -> PlannedArray:
  shape = (*layer_shape[:_LAYERS_DIM], len(names), *layer_shape[_LAYERS_DIM:])

  def make(read):
    result = np.empty(shape, dtype)
    for i, name in enumerate(names):
      result[:, i] = read(name).reshape(layer_shape)
    return result

  return PlannedArray(inputs=names, shape=shape, dtype=dtype, make=make)


# ----------------------------------------------------------------------------------------------------------------------
# From stacks to layers


def _plan_layers(
  stack: str, of_stack: Mapping[str, Any], relpos_per_layer: bool
) -> dict[str, PlannedArray]:
  stacked = {}
  counts = set()
  for name, leaf in of_stack.items():
    if not name.startswith(f'{stack}/'):
      continue
    stacked[name.partition('/')[2]] = leaf
    count = None
    if len(leaf.shape) > _LAYERS_DIM:
      count = leaf.shape[_LAYERS_DIM]
    counts.add(count)
  num_layers = next(iter(counts), None)
  if len(counts) != 1 or num_layers is None:
    raise ConfigError(
      f'The arrays of {stack}/{stack} must have the same number of layers in dim {_LAYERS_DIM}, got '
      f'{sorted(map(str, counts))}.'
    )
  result = {}
  for rest, leaf in stacked.items():
    source = f'{stack}/{stack}/{rest}'
    dtype = np.dtype(leaf.dtype)
    shape = _joined_shape(rest, (*leaf.shape[:_LAYERS_DIM], *leaf.shape[_LAYERS_DIM + 1 :]))
    if rest == _TABLE and not relpos_per_layer:
      result[f'{stack}/{_TABLE}'] = PlannedArray(
        inputs=(source,), shape=shape, dtype=dtype, make=functools.partial(_one_table, source)
      )
      continue
    for i in range(num_layers):
      result[f'{stack}/layers_{i}/{rest}'] = PlannedArray(
        inputs=(source,), shape=shape, dtype=dtype, make=functools.partial(_layer, source, i, shape)
      )
  return result


def _joined_shape(rest: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Return the shape of an array of one layer with one dim for heads and kv."""
  dim = param_layouts.heads_dim(rest)
  if dim is None:
    return shape
  if dim == 0:
    return (int(np.prod(shape[:-1])), shape[-1])
  return (shape[0], int(np.prod(shape[1:])))


def _layer(source: str, index: int, shape: tuple[int, ...], read: ReadFn) -> np.ndarray:
  return np.ascontiguousarray(read(source)[:, index]).reshape(shape)


def _one_table(source: str, read: ReadFn) -> np.ndarray:
  table = read(source)
  if not tables_are_equal(table):
    raise ConfigError(
      f'The layers of {source} must have equal tables of relative position biases for one table per '
      "stack. Set relpos_bias_tables='per_layer'."
    )
  return np.ascontiguousarray(table[:, 0])
