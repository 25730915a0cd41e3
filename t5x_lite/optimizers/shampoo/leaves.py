"""Inputs of an update by blocks: gradients, parameters, their blocks, and the numbers of their matrices."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.optax_adapter.param_scales import DecayByPath
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.types import Params, PyTree, PyTreeDef


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Inputs of the update of one parameter, or of that of several layers, stacked in dim 0 (see `layer_stacks`).

  Attributes:
    grad: float32 gradient.
    param: float32 parameter; None without weight decay.
    weight_decay: weight decay of the parameter.
    dtype: dtype of the parameter, or of the gradient if the parameters were not given.
    layout: blocks of the parameter, or of that of a layer.
    first_matrices: index of the first matrix of the parameter, or of that of each layer, among those of the parameters
      in the order in which JAX flattens the tree with a subtree per layer.
  """

  grad: jax.Array
  param: jax.Array | None
  weight_decay: float
  dtype: Any
  layout: BlockLayout
  first_matrices: tuple[int, ...]

  @property
  def is_stacked(self) -> bool:
    """True if the arrays have a first dim over layers."""
    return len(self.first_matrices) > 1

  def of_each_layer(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays like `grad`, given a function of arrays of one layer."""
    if self.is_stacked:
      return jax.vmap(fn)
    return fn

  @property
  def starts(self) -> np.ndarray:
    """`first_matrices` as int32 [num_layers], or as an int32 scalar if layers are not stacked."""
    if self.is_stacked:
      return np.array(self.first_matrices, np.int32)
    return np.array(self.first_matrices[0], np.int32)

  @property
  def ranks(self) -> list[np.ndarray]:
    """Int [num_layers * k] per stack: numbers that ascend in the order of the matrices without stacked layers."""
    ranks = []
    offset = 0
    for count, _ in self.layout.stack_shapes:
      of_layer = offset + np.arange(count)
      ranks.append(np.add.outer(self.starts, of_layer).reshape(-1))
      offset += count
    return ranks

  def merge(self, stacks: PyTree) -> PyTree:
    """Return [num_layers * k, ...], given stacks [num_layers, k, ...]; others are returned unchanged."""
    if self.is_stacked:
      return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacks)
    return stacks

  def divide(self, stacks: PyTree) -> PyTree:
    """Return the inverse of `merge`."""
    num_layers = len(self.first_matrices)
    if self.is_stacked:
      return jax.tree.map(lambda x: x.reshape(num_layers, -1, *x.shape[1:]), stacks)
    return stacks


def flatten_inputs(
  owner: str,
  grads: Params,
  params: Params | None,
  weight_decay: float | DecayByPath,
  layout_fn: Callable[[tuple[int, ...]], BlockLayout],
) -> tuple[list[Leaf], PyTreeDef]:
  """Return gradients and parameters as a list, and the structure of their tree.

  Args:
    owner: name of the optimizer, for the error.
    grads: gradients.
    params: parameters; may be None without weight decay.
    weight_decay: weight decay of all parameters, or by path.
    layout_fn: function from the shape of a parameter, or of that of a layer, to its blocks.

  Raises:
    ConfigError: weight decay without parameters.
  """
  if params is None and weight_decay:
    raise ConfigError(
      f'`{owner}.weight_decay` needs the parameters. Call update(grads, state, params).'
    )
  flat_grads, treedef = jax.tree.flatten(grads)
  flat_params = [None] * len(flat_grads)
  if params is not None:
    flat_params = treedef.flatten_up_to(params)
  paths = [path for path, _ in tree_utils.named_leaves(grads)]
  layouts = []
  for path, grad in zip(paths, flat_grads, strict=True):
    layouts.append(layout_fn(np.shape(grad)[layer_stacks.is_stacked(path) :]))
  first_matrices = _first_matrices(layouts, layer_stacks.single_paths(paths)[1])
  leaves = []
  for path, grad, param, layout, first in zip(
    paths, flat_grads, flat_params, layouts, first_matrices, strict=True
  ):
    own_decay = weight_decay
    if isinstance(own_decay, DecayByPath):
      own_decay = own_decay.of(path)
    decayed_param = None
    if own_decay:
      decayed_param = jnp.asarray(param, jnp.float32)
    leaf = Leaf(
      grad=jnp.asarray(grad, jnp.float32),
      param=decayed_param,
      weight_decay=own_decay,
      dtype=jnp.asarray(grad if param is None else param).dtype,
      layout=layout,
      first_matrices=first,
    )
    leaves.append(leaf)
  return leaves, treedef


def single_layouts(leaves: Sequence[Leaf]) -> list[BlockLayout]:
  """Return the layouts of the parameters in the tree with a subtree per layer, in the order of their matrices."""
  found = [(start, leaf.layout) for leaf in leaves for start in leaf.first_matrices]
  return [layout for _, layout in sorted(found, key=lambda entry: entry[0])]


def _first_matrices(
  layouts: Sequence[BlockLayout], numbers: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
  """Return `Leaf.first_matrices` of each array, given the indices of its parameters among those of single layers."""
  counts = {}
  for layout, layers in zip(layouts, numbers, strict=True):
    for number in layers:
      counts[number] = layout.num_statistics
  in_order = [counts[number] for number in sorted(counts)]
  starts = [0, *itertools.accumulate(in_order)]
  return [tuple(starts[number] for number in layers) for layers in numbers]
