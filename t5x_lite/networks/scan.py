"""Runs a stack of layers: unrolled or as loops, rematerialized or not, on either parameter tree.

A parameter tree holds layers in one of two forms: one subtree per layer (`layers_0`, `layers_1`, ...), or one subtree
whose arrays have a `layers` dim. How the layers are *compiled* is another matter: unrolled, or as a `lax.scan` whose
program does not grow with the number of layers. Any form runs either way with the same numbers, random ones included.
Layers that differ (in their feed-forward blocks, say) run as one loop for each segment that repeats; see `segments`.

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
from t5x_lite.networks.segments import Segment, find_segments, kinds_of

PyTree = Any
Variables = dict[str, PyTree]

# Which intermediate results of a layer the backward pass keeps. 'none': all of them. 'minimal': the outputs of matrix
# products with parameters; the rest is computed again. 'full': nothing but the layer's input.
REMAT_POLICIES = ('none', 'minimal', 'full')
# Logical name of the dim over layers.
LAYERS_AXIS = 'layers'


def remat(fn: Callable[..., Any], policy: str, in_loop: bool) -> Callable[..., Any]:
  """Return `fn` with the intermediate results that `policy` names computed again in the backward pass.

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
    """Return whether `collection` has one subtree."""
    return self.stacked and collection not in self.per_layer

  def layer_name(self, layer: int) -> str:
    """Return the name of the subtree of layer `layer`."""
    return f'layers_{layer}'

  def axis(self, collection: str, ndim: int) -> int:
    """Return the position of the dim over layers in an array that has `ndim` dims per layer."""
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
  """Insert the `layers` name into every AxisMetadata of `tree`."""

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
    """Return the owner's variables that layers get to see; `*_axes` are names, which layers declare anew."""
    return {name: tree for name, tree in self._owner.variables.items()
            if not name.endswith('_axes') and name not in self._fresh}

  def _subtrees(self, collection: str, tree: Mapping[str, Any]) -> dict[int, PyTree]:
    """Return the variables that layers, by their number, have in `collection`."""
    if not self._tree.is_stacked(collection):
      names = {i: self._tree.layer_name(i) for i in range(self._num_layers)}
      return {i: tree_utils.to_dict(tree[name]) for i, name in names.items() if name in tree}
    if self._tree.name not in tree:
      return {}
    parts = unstack_tree(tree_utils.to_dict(tree[self._tree.name]), self._num_layers, self._axis(collection))
    return dict(enumerate(parts))

  def read_layers(self) -> list[Variables]:
    """Return the variables of each layer."""
    layers = [{} for _ in range(self._num_layers)]
    for collection, tree in self._collections().items():
      for i, part in self._subtrees(collection, tree).items():
        layers[i][collection] = part
    return layers

  def read_segment(self, segment: Segment) -> list[Variables]:
    """Return the variables of each layer of the period, with a dim over repetitions first."""
    period = [{} for _ in range(segment.period)]
    for collection, tree in self._collections().items():
      if self._tree.is_stacked(collection):
        if self._tree.name in tree:
          axis = self._axis(collection)
          period[0][collection] = jax.tree.map(
              lambda a, axis=axis: jnp.moveaxis(a, axis(a.ndim - 1), 0), tree_utils.to_dict(tree[self._tree.name]))
        continue
      subtrees = self._subtrees(collection, tree)
      for offset, variables in enumerate(period):
        numbers = segment.layers_at(offset)
        parts = [subtrees[i] for i in numbers if i in subtrees]
        if len(parts) == len(numbers):
          variables[collection] = stack_trees(parts, lambda ndim: 0)
        elif parts:
          found = [i for i in numbers if i in subtrees]
          raise ConfigError(f'got variables {collection!r} for the layers {found} of {list(numbers)}, which are alike '
                            'and run as one loop; expected them for all or for none. Set scan_layers=False.')
    return period

  def write_layers(self, layers: Mapping[int, Variables]) -> None:
    """Store the updated variables of layers, given by their number."""
    for collection in dict.fromkeys(name for layer in layers.values() for name in layer):
      self._put(collection, {i: layer[collection] for i, layer in layers.items() if collection in layer})

  def _put(self, collection: str, parts: Mapping[int, PyTree]) -> None:
    """Store the variables of layers, by their number, in `collection`."""
    if self._tree.is_stacked(collection):
      axis, trees = self._axis(collection), list(parts.values())
      if len(trees) != self._num_layers or any(_form(tree) != _form(trees[0]) for tree in trees):
        raise ConfigError(
            f"got layers whose variables in the collection {collection!r} differ; expected the same arrays in each, as "
            "param_layout='scalable_t5' stacks them. Set param_layout='t5', or let feed_forward_fn return equal "
            'objects for every layer.')
      self._owner.put_variable(collection, self._tree.name, _add_layers_axis(stack_trees(trees, axis), axis))
      return
    for i, part in parts.items():
      self._owner.put_variable(collection, self._tree.layer_name(i), part)

  def write_segment(self, segment: Segment, period: Sequence[Variables]) -> None:
    """Store the updated variables of each layer of the period, given with the dim over repetitions first."""
    for offset, variables in enumerate(period):
      for collection, tree in variables.items():
        if not self._tree.is_stacked(collection):
          parts = unstack_tree(tree, segment.repeats, lambda ndim: 0)
          self._put(collection, dict(zip(segment.layers_at(offset), parts, strict=True)))
          continue
        axis = self._axis(collection)
        tree = jax.tree.map(lambda a, axis=axis: jnp.moveaxis(a, 0, axis(a.ndim - 1)), tree)
        self._owner.put_variable(collection, self._tree.name, _add_layers_axis(tree, axis))


def _form(tree: PyTree) -> tuple[Any, ...]:
  """Return what trees have in common that can be stacked."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def read_first_layer(owner: nn.Module, tree: LayerTree, collection: str, path: Sequence[str]) -> jax.Array | None:
  """Return one variable of a stack's first layer, or None if it does not exist.

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


class _Runner:
  """Applies layers to the residual stream, in loops or one by one.

  Attributes are the arguments of `run_layers`.
  """

  def __init__(self, owner, layers, operands, store, remat_policy, method, options):
    self._owner, self._layers, self._operands, self._store = owner, layers, operands, store
    self._policy, self._method, self._options = remat_policy, method, options
    self._mutable = owner.scope.mutable
    self._keys = {stream: owner.make_rng(stream) for stream in owner.scope.rngs}
    self._bodies: list[tuple[nn.Module, Callable]] = []

  def _layer_fn(self, layer: nn.Module) -> Callable[..., tuple[PyTree, Variables]]:
    """Return `layer` as a function of its variables: (index, variables, keys, x, operands) to (x, updates)."""
    mutable, options = self._mutable, dict(self._options, method=self._method)
    initializing = self._owner.is_initializing()

    def run_layer(index, variables, keys, x, operands):
      rngs = {stream: jax.random.fold_in(key, index) for stream, key in keys.items()}
      if initializing and not variables:
        # The layer then knows that it is initialized, and does not count this as a step.
        x, updates = layer.init_with_output(rngs, x, *operands, mutable=mutable, **options)
      else:
        result = layer.apply(variables, x, *operands, rngs=rngs, mutable=mutable, **options)
        x, updates = (result, {}) if mutable is False else result
      return x, {collection: tree_utils.to_dict(update) for collection, update in updates.items()}

    run_layer.__name__ = type(layer).__name__
    return run_layer

  def loop(self, segment: Segment, x: PyTree) -> PyTree:
    """Run a repeated segment in a `lax.scan`."""
    start, period, repeats = segment
    kinds = kinds_of(self._layers[start:start + period])
    bodies = [remat(self._layer_fn(layer), self._policy, in_loop=True) for layer in self._layers[start:start + period]]
    if period > 1:
      # Equal layers are traced once and called, as outside of loops.
      bodies = [jax.jit(body) for body in bodies]

    def body(x, scanned):
      indices, variables = scanned
      updates = []
      for offset, kind in enumerate(kinds):
        x, update = bodies[kind](indices[offset], variables[offset], self._keys, x, self._operands)
        updates.append(update)
      return x, updates

    indices = [jnp.arange(numbers.start, numbers.stop, numbers.step, dtype=jnp.uint32)
               for numbers in map(segment.layers_at, range(period))]
    x, updates = lax.scan(body, x, (indices, self._store.read_segment(segment)))
    self._store.write_segment(segment, [
        {name: update for name, update in updated.items() if self._owner.is_mutable_collection(name)}
        for updated in updates])
    return x

  def one_by_one(self, variables: Mapping[int, Variables], x: PyTree) -> PyTree:
    """Run layers, given by number with their variables, one after the other."""
    leaves = jax.tree.leaves((x, self._operands, variables))
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    all_updates = {}
    for i, layer_variables in variables.items():
      body = self._body(self._layers[i], traced)
      x, all_updates[i] = body(jnp.uint32(i), layer_variables, self._keys, x, self._operands)
    self._store.write_layers(all_updates)
    return x

  def _body(self, layer: nn.Module, traced: bool) -> Callable[..., tuple[PyTree, Variables]]:
    """Return the function for `layer`, the same for equal layers."""
    body = next((body for other, body in self._bodies if other == layer), None)
    if body is None:
      body = remat(self._layer_fn(layer), self._policy, in_loop=False)
      # Inside a trace, equal layers are traced once and called; the compiler inlines the calls.
      body = jax.jit(body) if traced else body
      self._bodies.append((layer, body))
    return body


def run_layers(
    owner: nn.Module, layers: Sequence[nn.Module], x: PyTree, *operands: PyTree, tree: LayerTree, scan: bool,
    remat_policy: str, method: str = '__call__', fresh: Sequence[str] = (), **options: Any) -> PyTree:
  """Apply `layers` one after the other: x = layer(x, *operands, **options).

  To be called in a (compact) method of `owner`, whose scope holds the layers' variables as `tree` says. Variables that
  do not exist are made if their collection is mutable, as in any Flax module. Each layer gets its own random keys,
  derived from the owner's and its index.

  Args:
    owner: module that owns the stack.
    layers: unbound modules (`parent=None`), one per layer.
    x: what the first layer gets; a pytree of arrays whose shapes and dtypes the layers keep.
    *operands: pytrees of arrays that all layers get.
    tree: form of the variables.
    scan: run them as one loop, or layers that differ as one loop for each segment that repeats.
    remat_policy: one of `REMAT_POLICIES`.
    method: name of the layers' method to run.
    fresh: collections that the layers do not get to see and make anew.
    **options: static arguments of that method.

  Returns:
    What the last layer returned.

  Raises:
    ConfigError: stacked variables of layers that differ, or variables for some only of the layers of a loop.
  """
  store = _Store(owner, tree, len(layers), fresh)
  runner = _Runner(owner, layers, operands, store, remat_policy, method, options)
  kinds, is_step = kinds_of(layers), False
  alike = not any(kinds)
  if scan and tree.stacked and not alike:
    raise ConfigError(
        "got layers that differ, with scan_layers=True and param_layout='scalable_t5'; expected equal ones, as their "
        "parameters are stacked. Set param_layout='t5', where segments that repeat run as loops, or let "
        'feed_forward_fn return equal objects for every layer.')
  if owner.is_initializing():
    # Parameters are made in loops if possible: compiling the generators of their numbers once per layer takes long.
    in_loop = alike or not tree.stacked
  elif 'cache' in owner.variables and 'cache' not in fresh:
    # A step of decoding is unrolled in any case, so that it copies no cache.
    in_loop, is_step = False, True
  else:
    in_loop = scan
  if in_loop and alike:
    return runner.loop(Segment(0, 1, len(layers)), x)
  layer_variables = dict(enumerate(store.read_layers()))
  if in_loop:
    for segment in find_segments(kinds):
      first = segment.start
      x = runner.loop(segment, x) if segment.repeats > 1 else runner.one_by_one({first: layer_variables[first]}, x)
    return x
  if is_step and tree.stacked:
    # What is cut out of stacked parameters is the same in all steps. The compiler takes slices for too cheap to move
    # them out of the loop over steps, and copies all parameters in each; behind a barrier it moves them.
    layer_variables = {
        i: {name: lax.optimization_barrier(variables) if tree.is_stacked(name) else variables
            for name, variables in layer.items()} for i, layer in layer_variables.items()}
  return runner.one_by_one(layer_variables, x)
