"""Conversion of parameter trees between the layouts of T5X's `examples/t5` and `examples/scalable_t5`.

The layouts differ in three respects: layers are subtrees (`encoder/layers_0/...`) or dim 1 of the arrays of one subtree
(`encoder/encoder/...`); attention kernels are matrices or have separate dims for heads and kv; and the table of
relative position biases is next to the layers (one for all) or in each layer.

The functions accept trees of arrays with the shapes of the parameters: parameters, gradients, unfactored first and
second moments. They work on NumPy arrays without a device, and on JAX arrays inside a jitted function.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layers.low_rank import LORA_A
from t5x_lite.layers.low_rank import LORA_B
from t5x_lite.networks.t5_config import StackConfig

Params = Mapping[str, Any]

_STACKS = ('encoder', 'decoder')
_RELPOS = 'relpos_bias'
_LAYERS_DIM = 1


def param_layout(params: Params) -> str:
  """Return the layout of `params`: 't5' or 'scalable_t5'.

  Raises:
    ConfigError: `params` has neither layout.
  """
  for stack in _STACKS:
    subtree = params.get(stack, {})
    if stack in subtree:
      return 'scalable_t5'
    if 'layers_0' in subtree:
      return 't5'
  raise ConfigError(
    "The parameters must have 'decoder/layers_0' (param_layout t5) or 'decoder/decoder' (scalable_t5), "
    f'got a tree with {sorted(params)} at the top.'
  )


def _xp(leaf: Any) -> Any:
  """Return NumPy for NumPy arrays, which stay on the host, else `jax.numpy`."""
  if isinstance(leaf, np.ndarray):
    return np
  return jax.numpy


def _stack_leaves(*leaves: Any) -> Any:
  """Return the leaves of all layers as one array, with a dim for the layers."""
  return _xp(leaves[0]).stack(leaves, _LAYERS_DIM)


def heads_dim(name: str) -> int | None:
  """Return the dim that heads and kv share in a matrix of attention, 0 or 1; None for other arrays.

  These are the kernels, and of low-rank adapters the array at the heads' side of the kernel.

  Args:
    name: '/'-joined path within a layer.

  >>> heads_dim('attention/query/kernel'), heads_dim('attention/out/lora_a'), heads_dim('attention/out/lora_b')
  (1, 0, None)
  """
  parts = name.split('/')
  if len(parts) < 3 or not parts[-3].endswith('attention'):
    return None
  if parts[-2] == 'out' and parts[-1] in ('kernel', LORA_A):
    return 0
  if parts[-2] != 'out' and parts[-1] in ('kernel', LORA_B):
    return 1
  return None


def _map_attention_kernels(layer: Params, fn) -> dict[str, Any]:
  """Return `layer` with `fn(name of the projection, dim of the heads, kernel)` for every matrix of attention."""

  def visit(name, leaf):
    dim = heads_dim(name)
    if dim is None:
      return leaf
    return fn(name.split('/')[-2], dim, leaf)

  return tree_utils.map_with_names(visit, layer)


def _flatten_kernel(projection: str, joined_dim: int, kernel: Any) -> Any:
  """Merge the heads and kv dims of an attention kernel of one layer."""
  _check_kernel(
    projection, kernel, kernel.ndim == 3, 'three dims, with one for heads and one for kv'
  )
  if joined_dim == 0:
    return kernel.reshape(-1, kernel.shape[-1])
  return kernel.reshape(kernel.shape[0], -1)


def _unflatten_kernel(config: StackConfig, projection: str, joined_dim: int, kernel: Any) -> Any:
  """Split the heads and kv dims of an attention kernel of one layer."""
  heads = (config.num_heads, config.head_dim)
  if joined_dim == 0:
    shape = (*heads, -1)
  else:
    shape = (-1, *heads)
  joined = config.num_heads * config.head_dim
  is_valid = kernel.ndim == 2 and kernel.shape[joined_dim] == joined
  _check_kernel(projection, kernel, is_valid, f'two dims, with num_heads * head_dim = {joined}')
  return kernel.reshape(shape)


def _check_kernel(projection: str, kernel: Any, is_valid: bool, expectation: str) -> None:
  if not is_valid:
    raise ConfigError(
      f'The attention kernel {projection!r} must have {expectation}, got shape {tuple(kernel.shape)}. '
      "Keep the param_layout of attention without T5's projections."
    )


def _read_stack(
  subtree: Params, stack: str, layout: str, config: StackConfig
) -> tuple[list[dict], dict]:
  """Return (one tree per layer in layout t5, including its position biases if it has any, the rest of the stack)."""
  rest = {
    key: value for key, value in subtree.items() if key != stack and not key.startswith('layers_')
  }
  num_layers = config.num_layers_of(stack)
  names = [f'layers_{i}' for i in range(num_layers)]
  if layout == 't5':
    found = [key for key in subtree if key.startswith('layers_')]
    is_valid = sorted(found) == sorted(names)
    got = len(found)
  else:
    stacked = tree_utils.to_dict(subtree[stack])
    got = set()
    for leaf in jax.tree.leaves(stacked):
      count = None
      if leaf.ndim > _LAYERS_DIM:
        count = leaf.shape[_LAYERS_DIM]
      got.add(count)
    is_valid = got == {num_layers}
  if not is_valid:
    raise ConfigError(
      f'The parameters of {stack!r} must have {num_layers} layers, got {got}. Set '
      f'{config.LAYER_COUNTS[stack]}.'
    )
  if layout == 't5':
    return [tree_utils.to_dict(subtree[name]) for name in names], rest
  layers = [jax.tree.map(lambda leaf, i=i: leaf[:, i], stacked) for i in range(num_layers)]
  return [_map_attention_kernels(layer, _flatten_kernel) for layer in layers], rest


def _move_position_biases(layers: list[dict], rest: dict, stack: str, per_layer: bool) -> None:
  """Move the position biases of a stack, in place, into its layers or out of them."""
  if per_layer and _RELPOS in rest:
    shared = rest.pop(_RELPOS)
    for layer in layers:
      layer[_RELPOS] = shared
  elif not per_layer and _RELPOS not in rest:
    tables = [layer.pop(_RELPOS) for layer in layers if _RELPOS in layer]
    if not tables:  # The position encoding has no biases.
      return
    for i, table in enumerate(tables[1:], start=1):
      for first, other in zip(jax.tree.leaves(tables[0]), jax.tree.leaves(table), strict=True):
        if not np.array_equal(np.asarray(first), np.asarray(other)):
          raise ConfigError(
            f'The layers of {stack!r} must have equal tables of relative position biases for one table per stack, '
            f"got different ones in layers 0 and {i}. Set relpos_bias_tables='per_layer'."
          )
    rest[_RELPOS] = tables[0]


def convert(
  params: Params, from_layout: str, to_layout: str, config: StackConfig
) -> dict[str, Any]:
  """Convert parameters from one layout to another.

  Position biases follow `config`: a shared table is copied into each layer for a model with one table per layer; tables
  per layer become one table only if they are equal. (The comparison needs values, so it cannot be traced.)

  Args:
    params: nested dicts of arrays in `from_layout`.
    from_layout: 't5' or 'scalable_t5'.
    to_layout: 't5' or 'scalable_t5'.
    config: configuration of the model of the result; its `param_layout` must be `to_layout`.

  Returns:
    Nested dicts of arrays in `to_layout`; arrays that need no change are not copied.

  Raises:
    ConfigError: the parameters are not in `from_layout` or do not fit `config`, `config` has another layout or another
      architecture, or tables per layer differ but the result has one table.
  """
  checks.check(
    '',
    locals(),
    from_layout=checks.one_of((param_layout(params),), 'It is the layout of the parameters.'),
    to_layout=checks.one_of((config.param_layout,), 'It is the param_layout of the model.'),
  )
  result = {key: value for key, value in tree_utils.to_dict(params).items() if key not in _STACKS}
  for stack in _STACKS:
    if stack not in params:
      continue
    if stack not in config.LAYER_COUNTS:
      raise ConfigError(
        f"The model has no {stack!r}, but the parameters have one. Choose a checkpoint of the model's "
        'architecture.'
      )
    layers, rest = _read_stack(params[stack], stack, from_layout, config)
    layers = [dict(layer) for layer in layers]
    _move_position_biases(layers, rest, stack, config.relpos_per_layer)
    if to_layout == 't5':
      rest.update({f'layers_{i}': layer for i, layer in enumerate(layers)})
    else:
      unflatten = functools.partial(_unflatten_kernel, config)
      unflat = [_map_attention_kernels(layer, unflatten) for layer in layers]
      rest[stack] = jax.tree.map(_stack_leaves, *unflat)
    result[stack] = rest
  return result
