"""Runs a stack of equal layers: unrolled or as one loop, rematerialized or not, on either parameter tree.

A parameter tree holds layers in one of two forms: one subtree per layer (`layers_0`, `layers_1`, ...), or one subtree
whose arrays have a `layers` dim. How the layers are *compiled* is another matter: unrolled, or as a `lax.scan` whose
program does not grow with the number of layers. Any form runs either way with the same numbers, random ones included.

Layers are applied as functions of their own variables, which are read from and written back to the scope of the module
that owns the stack. So every collection (parameters, their axes, caches, intermediates) keeps its place per layer.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jax import lax

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean

PyTree = Any
Variables = dict[str, PyTree]

# Which intermediate results of a layer the backward pass keeps. 'none': all of them. 'minimal': the outputs of matrix
# products with parameters; the rest is computed again. 'full': nothing but the layer's input.
REMAT_POLICIES = ('none', 'minimal', 'full')
# Logical name of the dim over layers.
LAYERS_AXIS = 'layers'


def remat(fn: Callable[..., Any], policy: str, in_loop: bool) -> Callable[..., Any]:
  """Returns `fn` with the intermediate results that `policy` names computed again in the backward pass.

  Args:
    fn: a pure function.
    policy: one of `REMAT_POLICIES`.
    in_loop: `fn` is the body of a loop, where the compiler cannot merge the second computation with the first.

  Raises:
    ConfigError: unknown policy.
  """
  if policy not in REMAT_POLICIES:
    raise ConfigError(f'unknown remat_policy {policy!r}.{did_you_mean(str(policy), REMAT_POLICIES)}')
  if policy == 'none':
    return fn
  saveable = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims if policy == 'minimal' else None
  return jax.checkpoint(fn, policy=saveable, prevent_cse=not in_loop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTree:
  """Where the variables of a stack's layers are in the scope of the module that owns it.

  Attributes:
    name: with `stacked`, the name of the one subtree.
    stacked: one subtree with a dim over layers; otherwise a subtree per layer.
    param_axis: position of that dim in parameters. In all other collections it is the first.
    per_layer: collections that have a subtree per layer in any case: a step of decoding would have to cut its layer out
      of an array with all layers, and put it back.
  """

  name: str
  stacked: bool
  param_axis: int = 1
  per_layer: tuple[str, ...] = ('cache', 'cross_cache')

  def is_stacked(self, collection: str) -> bool:
    """Returns whether `collection` has one subtree."""
    return self.stacked and collection not in self.per_layer

  def layer_name(self, layer: int) -> str:
    """Returns the name of the subtree of layer `layer`."""
    return f'layers_{layer}'

  def axis(self, collection: str, ndim: int) -> int:
    """Returns the position of the dim over layers in an array that has `ndim` dims per layer."""
    return min(self.param_axis, ndim) if collection in ('params', 'params_axes') else 0


def stack_trees(trees: Sequence[PyTree], axis: Callable[[int], int]) -> PyTree:
  """Stacks the arrays of equal trees.

  Args:
    trees: one tree per layer.
    axis: gives the position of the new dim for an array of that many dims.
  """
  return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis(jnp.ndim(leaves[0]))), *trees)


def unstack_tree(tree: PyTree, num_layers: int, axis: Callable[[int], int]) -> list[PyTree]:
  """Inverse of `stack_trees`; `axis` gets the number of dims without the one over layers."""
  leaves, structure = jax.tree.flatten(tree)
  columns = [jnp.unstack(leaf, axis=axis(leaf.ndim - 1)) for leaf in leaves]
  return [structure.unflatten([column[i] for column in columns]) for i in range(num_layers)]


def _is_axes(leaf: Any) -> bool:
  return isinstance(leaf, nn_partitioning.AxisMetadata)


def _add_layers_axis(tree: PyTree, axis: Callable[[int], int]) -> PyTree:
  """Inserts the `layers` name into every AxisMetadata of `tree`."""

  def insert(leaf):
    if not _is_axes(leaf):
      return leaf
    names = list(leaf.names)
    names.insert(axis(len(names)), LAYERS_AXIS)
    return leaf.replace(names=tuple(names))

  return jax.tree.map(insert, tree, is_leaf=_is_axes)


class _Store:
  """Reads and writes the variables of a stack's layers in the scope of the module that owns them."""

  def __init__(self, owner: nn.Module, tree: LayerTree, num_layers: int, fresh: Sequence[str] = ()):
    self._owner, self._tree, self._num_layers, self._fresh = owner, tree, num_layers, fresh

  def _axis(self, collection: str) -> Callable[[int], int]:
    return lambda ndim: self._tree.axis(collection, ndim)

  def _collections(self) -> Mapping[str, Mapping[str, Any]]:
    """Returns the owner's variables that layers get to see; `*_axes` are names, which layers declare anew."""
    return {name: tree for name, tree in self._owner.variables.items()
            if not name.endswith('_axes') and name not in self._fresh}

  def _subtrees(self, collection: str, tree: Mapping[str, Any]) -> dict[int, PyTree]:
    """Returns the variables that layers, by their number, have in `collection`."""
    if not self._tree.is_stacked(collection):
      names = {i: self._tree.layer_name(i) for i in range(self._num_layers)}
      return {i: tree_utils.to_dict(tree[name]) for i, name in names.items() if name in tree}
    if self._tree.name not in tree:
      return {}
    parts = unstack_tree(tree_utils.to_dict(tree[self._tree.name]), self._num_layers, self._axis(collection))
    return dict(enumerate(parts))

  def read_layers(self) -> list[Variables]:
    """Returns the variables of each layer."""
    layers = [{} for _ in range(self._num_layers)]
    for collection, tree in self._collections().items():
      for i, part in self._subtrees(collection, tree).items():
        layers[i][collection] = part
    return layers

  def read_stacked(self) -> Variables:
    """Returns the variables of all layers with the dim over layers first."""
    stacked = {}
    for collection, tree in self._collections().items():
      if not self._tree.is_stacked(collection):
        if parts := self._subtrees(collection, tree):
          stacked[collection] = stack_trees(list(parts.values()), lambda ndim: 0)
      elif self._tree.name in tree:
        axis = self._axis(collection)
        stacked[collection] = jax.tree.map(
            lambda a, axis=axis: jnp.moveaxis(a, axis(a.ndim - 1), 0), tree_utils.to_dict(tree[self._tree.name]))
    return stacked

  def write_layers(self, layers: Sequence[Variables]) -> None:
    """Stores the updated variables of each layer."""
    for collection in dict.fromkeys(name for layer in layers for name in layer):
      self._put(collection, {i: layer[collection] for i, layer in enumerate(layers) if collection in layer})

  def _put(self, collection: str, parts: Mapping[int, PyTree]) -> None:
    """Stores the variables of layers, by their number, in `collection`."""
    if self._tree.is_stacked(collection):
      axis = self._axis(collection)
      stacked = stack_trees(list(parts.values()), axis)
      self._owner.put_variable(collection, self._tree.name, _add_layers_axis(stacked, axis))
      return
    for i, part in parts.items():
      self._owner.put_variable(collection, self._tree.layer_name(i), part)

  def write_stacked(self, stacked: Variables) -> None:
    """Stores the updated variables of all layers, given with the dim over layers first."""
    for collection, tree in stacked.items():
      if not self._tree.is_stacked(collection):
        self._put(collection, dict(enumerate(unstack_tree(tree, self._num_layers, lambda ndim: 0))))
        continue
      axis = self._axis(collection)
      tree = jax.tree.map(lambda a, axis=axis: jnp.moveaxis(a, 0, axis(a.ndim - 1)), tree)
      self._owner.put_variable(collection, self._tree.name, _add_layers_axis(tree, axis))


def read_first_layer(owner: nn.Module, tree: LayerTree, collection: str, path: Sequence[str]) -> jax.Array | None:
  """Returns one variable of a stack's first layer, or None if it does not exist.

  Args:
    owner: the module that owns the stack, bound.
    tree: where the layers' variables are.
    collection: collection of the variable, one that has a subtree per layer.
    path: names below the layer.
  """
  node = owner.variables.get(collection, {}).get(tree.layer_name(0), {})
  for name in path:
    node = node.get(name, {})
  return None if isinstance(node, Mapping) else node


def run_layers(
    owner: nn.Module, layers: Sequence[nn.Module], x: PyTree, *operands: PyTree, tree: LayerTree, scan: bool,
    remat_policy: str, method: str = '__call__', fresh: Sequence[str] = (), **options: Any) -> PyTree:
  """Applies `layers` one after the other: x = layer(x, *operands, **options).

  To be called in a (compact) method of `owner`, whose scope holds the layers' variables as `tree` says. Variables that
  do not exist are made if their collection is mutable, as in any Flax module. Each layer gets its own random keys,
  derived from the owner's and its index.

  Args:
    owner: module that owns the stack.
    layers: unbound modules (`parent=None`), one per layer.
    x: what the first layer gets; a pytree of arrays whose shapes and dtypes the layers keep.
    *operands: pytrees of arrays that all layers get.
    tree: form of the variables.
    scan: run them as one loop; the layers must be equal modules then.
    remat_policy: one of `REMAT_POLICIES`.
    method: name of the layers' method to run.
    fresh: collections that the layers do not get to see and make anew.
    **options: static arguments of that method.

  Returns:
    What the last layer returned.

  Raises:
    ConfigError: `scan` of layers that differ.
  """
  mutable = owner.scope.mutable
  keys = {stream: owner.make_rng(stream) for stream in owner.scope.rngs}
  store = _Store(owner, tree, len(layers), fresh)

  def layer_fn(layer: nn.Module) -> Callable[..., tuple[PyTree, Variables]]:

    def run_layer(index, variables, keys, x, operands):
      rngs = {stream: jax.random.fold_in(key, index) for stream, key in keys.items()}
      result = layer.apply(variables, x, *operands, rngs=rngs, mutable=mutable, method=method, **options)
      if mutable is False:
        return result, {}
      x, updates = result
      return x, {collection: tree_utils.to_dict(update) for collection, update in updates.items()}

    run_layer.__name__ = type(layer).__name__
    return run_layer

  alike, is_step = all(layer == layers[0] for layer in layers), False
  if scan and not alike:
    raise ConfigError('scan_layers=True needs layers that are all alike, but they differ. Set scan_layers=False, or '
                      'let feed_forward_fn return the same object for every layer.')
  if owner.is_initializing():
    # Parameters are made in a loop if possible: compiling the generators of their numbers once per layer takes long.
    in_loop = alike
  elif 'cache' in owner.variables and 'cache' not in fresh:
    # A step of decoding is unrolled in any case, so that it copies no cache.
    in_loop, is_step = False, True
  else:
    in_loop = scan
  if in_loop:
    x, updates = _run_loop(layer_fn(layers[0]), len(layers), store.read_stacked(), keys, x, operands, remat_policy)
    store.write_stacked({name: update for name, update in updates.items() if owner.is_mutable_collection(name)})
    return x

  layer_variables = store.read_layers()
  if is_step and tree.stacked:
    # What is cut out of stacked parameters is the same in all steps. The compiler takes slices for too cheap to move them
    # out of the loop over steps, and copies all parameters in each; behind a barrier it moves them.
    layer_variables = [
        {name: lax.optimization_barrier(variables) if tree.is_stacked(name) else variables
         for name, variables in layer.items()} for layer in layer_variables]
  traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((x, operands, layer_variables)))
  bodies: list[tuple[nn.Module, Callable]] = []
  all_updates = []
  for i, layer in enumerate(layers):
    body = next((body for other, body in bodies if other == layer), None)
    if body is None:
      body = remat(layer_fn(layer), remat_policy, in_loop=False)
      # Inside a trace, equal layers are traced once and called; the compiler inlines the calls.
      body = jax.jit(body) if traced else body
      bodies.append((layer, body))
    x, updates = body(jnp.uint32(i), layer_variables[i], keys, x, operands)
    all_updates.append(updates)
  store.write_layers(all_updates)
  return x


def _run_loop(layer_fn, num_layers, variables, keys, x, operands, remat_policy):
  """Runs one function for all layers in a `lax.scan`; returns (x, updates with the dim over layers first)."""

  def body(x, scanned):
    index, variables = scanned
    return layer_fn(index, variables, keys, x, operands)

  indices = jnp.arange(num_layers, dtype=jnp.uint32)
  return lax.scan(remat(body, remat_policy, in_loop=True), x, (indices, variables))
