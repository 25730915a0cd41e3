"""The conversion of `param_layouts`, array by array: what each array of the result is made of, and how.

For trees that are larger than memory: nothing is read until an array of the result is asked for, and an array with a
dim over layers is filled layer by layer. The numbers are those of `param_layouts.convert`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import re
from typing import Any

import numpy as np

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import param_layouts
from t5x_lite.networks.t5_config import PARAM_LAYOUTS, check_choice

ReadFn = Callable[[str], np.ndarray]

_STACKS = ('encoder', 'decoder')
_TABLE = 'relpos_bias/rel_embedding'
_LAYER = re.compile(r'layers_(\d+)/(.+)')
_LAYERS_DIM = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedArray:
  """One array of the result.

  Attributes:
    inputs: names of the stored arrays that it is made of.
    shape: of the result.
    dtype: of the result.
    make: function from a function that reads a stored array by its name, in the dtype that the plan was given, to the
      result.
  """

  inputs: tuple[str, ...]
  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[ReadFn], np.ndarray]


def as_it_is(name: str, leaf: Any) -> PlannedArray:
  """Return the plan of an array that is passed on.

  Args:
    name: of the stored array.
    leaf: anything with its `shape` and `dtype`.
  """
  return PlannedArray(inputs=(name,), shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype),
                      make=lambda read: read(name))


def plan(
    shapes: Mapping[str, Any], to_layout: str, *, relpos_per_layer: bool, heads: int | None = None
) -> dict[str, PlannedArray]:
  """Plan the conversion of parameters to a layout.

  Args:
    shapes: name -> anything with `shape` and `dtype`, for each stored parameter. A `dtype` may be another than the
      stored one where `make` is given a function that casts.
    to_layout: 't5' or 'scalable_t5'.
    relpos_per_layer: whether the result has a table of relative position biases in each layer, not one for each stack.
      The layout 'scalable_t5' always does.
    heads: of attention; None: as many as the tables of relative position biases are for.

  Returns:
    name -> plan, for each array of the result.

  Raises:
    ConfigError: the parameters are in neither layout, their layers differ, or the heads of attention are unknown.
      `make` of a table that stands for those of all layers raises it where they are not equal.
  """
  check_choice('to_layout', to_layout, PARAM_LAYOUTS)
  from_layout = param_layouts.param_layout(tree_utils.unflatten_dict(dict(shapes)))
  if from_layout == to_layout:
    return {name: as_it_is(name, leaf) for name, leaf in shapes.items()}
  result = {}
  for name, leaf in shapes.items():
    stack, _, rest = name.partition('/')
    if stack not in _STACKS or not _is_layered(stack, rest):
      result[name] = as_it_is(name, leaf)
  for stack in _STACKS:
    own = {name.partition('/')[2]: leaf for name, leaf in shapes.items() if name.startswith(f'{stack}/')}
    if not own:
      continue
    if to_layout == 't5':
      result |= _plan_layers(stack, own, relpos_per_layer)
    else:
      result |= _plan_stacked(stack, own, heads or num_heads(shapes))
      result.pop(f'{stack}/{_TABLE}', None)
  return result


def num_heads(shapes: Mapping[str, Any]) -> int:
  """Return the number of heads of attention, as the tables of relative position biases have it.

  Args:
    shapes: name -> anything with a `shape`, of parameters in either layout.

  Raises:
    ConfigError: there is no table.
  """
  for name, leaf in shapes.items():
    if name.endswith(_TABLE):
      return leaf.shape[0]
  raise ConfigError(f'got parameters without a table {_TABLE!r}, so that the number of heads is not known; expected '
                    'those of a T5 network. Keep their param_layout.')


def layer_tables(shapes: Mapping[str, Any]) -> tuple[str, ...]:
  """Return the names of the tables of relative position biases that stand for several layers at once.

  Args:
    shapes: name -> anything, of parameters in the layout 'scalable_t5'.
  """
  return tuple(name for stack in _STACKS if (name := f'{stack}/{stack}/{_TABLE}') in shapes)


def tables_are_equal(table: np.ndarray) -> bool:
  """Return whether the layers of a stack have equal tables of relative position biases.

  Args:
    table: [num_heads, layers, num_buckets].
  """
  return all(np.array_equal(table[:, 0], table[:, i]) for i in range(1, table.shape[_LAYERS_DIM]))


def _is_layered(stack: str, rest: str) -> bool:
  return rest.startswith(f'{stack}/') or _LAYER.match(rest) is not None


def _attention_projection(name: str) -> str | None:
  """Return 'query', 'key', 'value' or 'out' for a kernel of attention, by its name within a layer."""
  parts = name.split('/')
  return parts[-2] if len(parts) >= 3 and parts[-3].endswith('attention') and parts[-1] == 'kernel' else None


# ----------------------------------------------------------------------------------------------------------------------
# From layers to stacks


def _plan_stacked(stack: str, own: Mapping[str, Any], heads: int) -> dict[str, PlannedArray]:
  layers: dict[int, dict[str, Any]] = {}
  for name, leaf in own.items():
    match = _LAYER.match(name)
    if match:
      layers.setdefault(int(match[1]), {})[match[2]] = leaf
  _check_layers(stack, layers)
  _check_attention(stack, layers[0])
  result = {}
  for rest, leaf in layers[0].items():
    names = tuple(f'{stack}/layers_{i}/{rest}' for i in range(len(layers)))
    dtype = np.result_type(*(layers[i][rest].dtype for i in layers))
    shape = _split_shape(rest, tuple(leaf.shape), heads)
    result[f'{stack}/{stack}/{rest}'] = _stacked(names, shape, dtype)
  if _TABLE in own:
    table = own[_TABLE]
    names = (f'{stack}/{_TABLE}',) * len(layers)
    result[f'{stack}/{stack}/{_TABLE}'] = _stacked(names, tuple(table.shape), np.dtype(table.dtype))
  return result


def _check_layers(stack: str, layers: Mapping[int, Mapping[str, Any]]) -> None:
  if sorted(layers) != list(range(len(layers))):
    raise ConfigError(f'got layers {sorted(layers)} of {stack!r}; expected all from 0 up.')
  for i in range(1, len(layers)):
    differing = [name for name in sorted({*layers[0], *layers[i]})
                 if name not in layers[0] or name not in layers[i]
                 or tuple(layers[0][name].shape) != tuple(layers[i][name].shape)]
    if differing:
      raise ConfigError(f'got layers of {stack!r} that differ: {differing[0]} is not the same in layers 0 and {i}; '
                        "the layout 'scalable_t5' stacks equal ones. Keep param_layout='t5'.")


def _check_attention(stack: str, layer: Mapping[str, Any]) -> None:
  widths = {name: leaf.shape[0 if projection == 'out' else -1] for name, leaf in layer.items()
            if (projection := _attention_projection(name)) is not None}
  first = next(iter(widths), None)
  for name, width in widths.items():
    if width != widths[first]:
      raise ConfigError(f'got {name} of {stack!r} with {width} numbers for heads, and {first} with {widths[first]}; '
                        "expected the same. Only attention with T5's projections can be converted: keep its "
                        'param_layout.')


def _split_shape(rest: str, shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
  """Return the shape of an array of one layer with dims of their own for heads and kv."""
  projection = _attention_projection(rest)
  if projection is None:
    return shape
  joined = shape[0] if projection == 'out' else shape[-1]
  if len(shape) != 2 or joined % heads:
    raise ConfigError(f'got {rest} of shape {shape}; expected a matrix with a dim that {heads} heads divide. Keep '
                      "param_layout='t5'.")
  split = (heads, joined // heads)
  return (*split, shape[1]) if projection == 'out' else (shape[0], *split)


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


def _plan_layers(stack: str, own: Mapping[str, Any], relpos_per_layer: bool) -> dict[str, PlannedArray]:
  stacked = {name.partition('/')[2]: leaf for name, leaf in own.items() if name.startswith(f'{stack}/')}
  counts = {leaf.shape[_LAYERS_DIM] if len(leaf.shape) > _LAYERS_DIM else None for leaf in stacked.values()}
  if len(counts) != 1 or None in counts:
    raise ConfigError(f'got arrays of {stack}/{stack} with {sorted(map(str, counts))} layers in dim {_LAYERS_DIM}; '
                      'expected the same number in all.')
  num_layers, = counts
  result = {}
  for rest, leaf in stacked.items():
    source, dtype = f'{stack}/{stack}/{rest}', np.dtype(leaf.dtype)
    shape = _joined_shape(rest, (*leaf.shape[:_LAYERS_DIM], *leaf.shape[_LAYERS_DIM + 1:]))
    if rest == _TABLE and not relpos_per_layer:
      result[f'{stack}/{_TABLE}'] = PlannedArray(
          inputs=(source,), shape=shape, dtype=dtype, make=functools.partial(_one_table, source))
      continue
    for i in range(num_layers):
      result[f'{stack}/layers_{i}/{rest}'] = PlannedArray(
          inputs=(source,), shape=shape, dtype=dtype, make=functools.partial(_layer, source, i, shape))
  return result


def _joined_shape(rest: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Return the shape of an array of one layer without dims of their own for heads and kv."""
  projection = _attention_projection(rest)
  if projection is None:
    return shape
  if projection == 'out':
    return (int(np.prod(shape[:-1])), shape[-1])
  return (shape[0], int(np.prod(shape[1:])))


def _layer(source: str, index: int, shape: tuple[int, ...], read: ReadFn) -> np.ndarray:
  return np.ascontiguousarray(read(source)[:, index]).reshape(shape)


def _one_table(source: str, read: ReadFn) -> np.ndarray:
  table = read(source)
  if not tables_are_equal(table):
    raise ConfigError(f'got different tables of relative position biases in the layers of {source}; expected equal '
                      'ones, as one table is to stand for all layers. Keep a table per layer.')
  return np.ascontiguousarray(table[:, 0])
