"""Conversion of parameter trees between the layouts of T5X's `examples/t5` and `examples/scalable_t5`.

They differ in three things: layers are subtrees (`encoder/layers_0/...`) or a dim in position 1 of the arrays of one
subtree (`encoder/encoder/...`); attention kernels are matrices or have dims of their own for heads and kv; and the
table of relative position biases stands beside the layers (one for all) or in each of them.

The functions take trees of anything with the shape of the parameters: parameters, gradients, first and second moments
that are kept unfactored. They work on NumPy arrays without a device, and on JAX arrays inside a jitted function.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks.t5_config import PARAM_LAYOUTS, StackConfig, check_choice

Params = Mapping[str, Any]

_STACKS = ('encoder', 'decoder')
_RELPOS = 'relpos_bias'
_LAYERS_DIM = 1


def param_layout(params: Params) -> str:
  """Return the layout of `params`: 't5' or 'scalable_t5'.

  Raises:
    ConfigError: `params` has neither form.
  """
  for stack in _STACKS:
    subtree = params.get(stack, {})
    if stack in subtree:
      return 'scalable_t5'
    if 'layers_0' in subtree:
      return 't5'
  raise ConfigError(f'got a parameter tree with {sorted(params)} on top; expected those of a T5 or a '
                    "decoder-only network, with 'decoder/layers_0' (layout t5) or 'decoder/decoder' (layout "
                    'scalable_t5).')


def _xp(leaf: Any) -> Any:
  """Return the module whose functions keep `leaf` where it is: host arrays stay on the host."""
  return np if isinstance(leaf, np.ndarray) else jax.numpy


def _map_attention_kernels(layer: Params, fn) -> dict[str, Any]:
  """Return `layer` with `fn(name of the projection, kernel)` for every attention kernel."""

  def visit(name, leaf):
    parts = name.split('/')
    is_kernel = len(parts) >= 3 and parts[-3].endswith('attention') and parts[-1] == 'kernel'
    return fn(parts[-2], leaf) if is_kernel else leaf

  return tree_utils.map_with_names(visit, layer)


def _flatten_kernel(projection: str, kernel: Any) -> Any:
  """Merge the heads and kv dims of an attention kernel of one layer."""
  if kernel.ndim != 3:
    raise _unlike_t5(projection, kernel, 'three dims, with one for heads and one for kv')
  return kernel.reshape(-1, kernel.shape[-1]) if projection == 'out' else kernel.reshape(kernel.shape[0], -1)


def _unflatten_kernel(config: StackConfig, projection: str, kernel: Any) -> Any:
  """Inverse of `_flatten_kernel`."""
  heads = (config.num_heads, config.head_dim)
  joined = config.num_heads * config.head_dim
  if kernel.ndim != 2 or kernel.shape[0 if projection == 'out' else 1] != joined:
    raise _unlike_t5(projection, kernel, f'a matrix with num_heads * head_dim = {joined} numbers for heads')
  return kernel.reshape((*heads, -1) if projection == 'out' else (-1, *heads))


def _unlike_t5(projection: str, kernel: Any, expected: str) -> ConfigError:
  return ConfigError(f'got a kernel {projection!r} of attention of shape {tuple(kernel.shape)}; expected {expected}. '
                     "Only attention with T5's projections can be converted: keep its param_layout.")


def _read_stack(subtree: Params, stack: str, layout: str, config: StackConfig) -> tuple[list[dict], dict]:
  """Return (one tree per layer in t5's form with its own position biases where there are, the rest of the stack)."""
  rest = {key: value for key, value in subtree.items() if key != stack and not key.startswith('layers_')}
  num_layers = config.num_layers_of(stack)
  if layout == 't5':
    names = [f'layers_{i}' for i in range(num_layers)]
    found = [key for key in subtree if key.startswith('layers_')]
    if sorted(found) != sorted(names):
      raise ConfigError(
          f'got {len(found)} layers in {stack!r}; expected {num_layers}. Set {config.LAYER_COUNTS[stack]}.')
    return [tree_utils.to_dict(subtree[name]) for name in names], rest
  stacked = tree_utils.to_dict(subtree[stack])
  for name, leaf in tree_utils.named_leaves(stacked):
    if leaf.ndim <= _LAYERS_DIM or leaf.shape[_LAYERS_DIM] != num_layers:
      raise ConfigError(f'got {stack}/{stack}/{name} of shape {leaf.shape}; expected {num_layers} layers in dim '
                        f'{_LAYERS_DIM}. Set {config.LAYER_COUNTS[stack]}.')
  layers = [jax.tree.map(lambda leaf, i=i: leaf[:, i], stacked) for i in range(num_layers)]
  return [_map_attention_kernels(layer, _flatten_kernel) for layer in layers], rest


def _place_position_biases(layers: list[dict], rest: dict, stack: str, per_layer: bool) -> None:
  """Move the position biases of a stack, in place, to where a model with or without tables per layer has them."""
  if per_layer and _RELPOS in rest:
    shared = rest.pop(_RELPOS)
    for layer in layers:
      layer[_RELPOS] = shared
  elif not per_layer and _RELPOS not in rest:
    tables = [layer.pop(_RELPOS) for layer in layers if _RELPOS in layer]
    if not tables:  # Positions are encoded in another way.
      return
    for i, table in enumerate(tables[1:], start=1):
      for first, other in zip(jax.tree.leaves(tables[0]), jax.tree.leaves(table), strict=True):
        if not np.array_equal(np.asarray(first), np.asarray(other)):
          raise ConfigError(
              f'got a different table of relative position biases in layer {i} of {stack!r} than in layer 0; expected '
              "equal ones, as the model has one table per stack. Set relpos_bias_tables='per_layer'.")
    rest[_RELPOS] = tables[0]


def convert(params: Params, from_layout: str, to_layout: str, config: StackConfig) -> dict[str, Any]:
  """Convert parameters from one layout to another.

  Position biases follow `config`: a shared table is copied into each layer for a model that has one per layer; tables
  per layer become one only if they are equal (the comparison needs values: it cannot be traced).

  Args:
    params: nested dicts of arrays in `from_layout`.
    from_layout: 't5' or 'scalable_t5'.
    to_layout: likewise.
    config: the model that the result is for; its `param_layout` must be `to_layout`.

  Returns:
    Nested dicts of arrays in `to_layout`; arrays that need no change are passed on.

  Raises:
    ConfigError: the parameters are not in `from_layout` or do not fit `config`, `config` has another layout or another
      architecture, or tables per layer differ where one is wanted.
  """
  check_choice('from_layout', from_layout, PARAM_LAYOUTS)
  check_choice('to_layout', to_layout, PARAM_LAYOUTS)
  if config.param_layout != to_layout:
    raise ConfigError(f'got to_layout={to_layout!r} for a model with param_layout={config.param_layout!r}; expected '
                      'the same. Pass the configuration of the model that the result is for.')
  if param_layout(params) != from_layout:
    raise ConfigError(f'got from_layout={from_layout!r} but parameters in layout {param_layout(params)!r}.')
  result = {key: value for key, value in tree_utils.to_dict(params).items() if key not in _STACKS}
  for stack in _STACKS:
    if stack not in params:
      continue
    if stack not in config.LAYER_COUNTS:
      raise ConfigError(f'got parameters of a network with {stack!r} for a model without: choose a checkpoint of the '
                        "model's architecture.")
    layers, rest = _read_stack(params[stack], stack, from_layout, config)
    layers = [dict(layer) for layer in layers]
    _place_position_biases(layers, rest, stack, config.relpos_per_layer)
    if to_layout == 't5':
      rest.update({f'layers_{i}': layer for i, layer in enumerate(layers)})
    else:
      unflat = [_map_attention_kernels(layer, lambda name, k: _unflatten_kernel(config, name, k)) for layer in layers]
      rest[stack] = jax.tree.map(lambda *leaves: _xp(leaves[0]).stack(leaves, _LAYERS_DIM), *unflat)
    result[stack] = rest
  return result
