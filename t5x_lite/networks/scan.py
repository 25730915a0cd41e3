"""Execution of a stack of layers: unrolled or as loops, with or without rematerialization, on either parameter tree.

A parameter tree has one subtree per layer (`layers_0`, `layers_1`, ...), or one subtree whose arrays have a `layers`
dim. Independently of that, the layers are compiled unrolled, or as a `lax.scan` whose program does not grow with the
number of layers; the results are equal, including random numbers. Layers that differ, for instance in their
feed-forward blocks, run as one loop per repeated segment; see `segments`. In the steps of the trainer, the subtrees of
equal layers are stacked, see `t5x_lite.layer_stacks`: a loop reads them as they are.

Layers are applied as functions of their variables, which are read from and written to the scope of the module that owns
the stack. So every collection (parameters, their axes, caches, intermediates) keeps the variables of each layer.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
from jax import ad_checkpoint
from jax import lax
from jax.core import Tracer
import jax.numpy as jnp

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks.remat import remat
from t5x_lite.networks.segments import Segment
from t5x_lite.networks.segments import find_segments
from t5x_lite.networks.segments import kinds_of

PyTree = Any
Variables = dict[str, PyTree]

# Least number of repetitions of a loop for which the trainer stacks layers if the configuration does not say whether to
# stack them. Shorter loops compile in about the time of their layers.
MIN_LAYERS_OF_A_LOOP = 6
# Logical name of the dim over layers.
LAYERS_AXIS = 'layers'
_UNEQUAL_LAYERS_REMEDY = (
  "Set param_layout='t5', or let feed_forward_fn return equal objects for every layer."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTree:
  """Positions of the variables of a stack's layers in the scope of the module that owns it.

  Attributes:
    name: name of the subtree if `stacked`.
    stacked: True for one subtree with a dim over layers, False for a subtree per layer.
    param_axis: position of that dim in parameters. In all other collections it is the first dim.
    per_layer: collections that always have a subtree per layer, because a step of decoding would have to copy its layer
      out of an array of all layers and back.
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
    return layer_stacks.layer_name(layer)

  def axis(self, collection: str, ndim: int) -> int:
    """Return the position of the dim over layers in an array with `ndim` dims per layer."""
    if collection in ('params', 'params_axes'):
      return min(self.param_axis, ndim)
    return 0


def stack_trees(trees: Sequence[PyTree], axis: Callable[[int], int]) -> PyTree:
  """Return the tree of stacked arrays of trees with equal structure.

  Args:
    trees: one tree per layer.
    axis: function from the number of dims of an array to the position of the new dim.
  """
  return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis(jnp.ndim(leaves[0]))), *trees)


def unstack_tree(tree: PyTree, num_layers: int, axis: Callable[[int], int]) -> list[PyTree]:
  """Return the trees of each layer, the inverse of `stack_trees`.

  Args:
    tree: tree of stacked arrays.
    num_layers: number of layers.
    axis: function from the number of dims per layer to the position of the dim over layers.
  """
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
  """Access to the variables of a stack's layers in the scope of the module that owns them."""

  def __init__(self, owner: nn.Module, tree: LayerTree, num_layers: int, fresh: Sequence[str] = ()):
    self._owner = owner
    self._tree = tree
    self._num_layers = num_layers
    self._fresh = fresh

  def _axis(self, collection: str) -> Callable[[int], int]:
    return lambda ndim: self._tree.axis(collection, ndim)

  def _collections(self) -> Mapping[str, Mapping[str, Any]]:
    """Return the owner's variables for its layers, without `*_axes`, which layers declare in each call."""
    return {
      name: tree
      for name, tree in self._owner.variables.items()
      if not name.endswith('_axes') and name not in self._fresh
    }

  def _subtrees(self, collection: str, tree: Mapping[str, Any]) -> dict[int, PyTree]:
    """Return the variables of layers in `collection`, by layer number."""
    if not self._tree.is_stacked(collection):
      tree = layer_stacks.unstack_subtrees(tree)
      names = {i: self._tree.layer_name(i) for i in range(self._num_layers)}
      return {i: tree_utils.to_dict(tree[name]) for i, name in names.items() if name in tree}
    if self._tree.name not in tree:
      return {}
    parts = unstack_tree(
      tree_utils.to_dict(tree[self._tree.name]), self._num_layers, self._axis(collection)
    )
    return dict(enumerate(parts))

  def kinds_by_stack(self, kinds: Sequence[int]) -> tuple[int, ...]:
    """Return kinds as by `kinds_of` for which layers are equal only if their parameters are in one stack.

    Args:
      kinds: kind of each layer.
    """
    params = self._owner.variables.get('params', {})
    stack_of = {}
    for name in params:
      for layer in layer_stacks.layers_of(name):
        stack_of[layer] = name
    return kinds_of([(kind, stack_of.get(layer, layer)) for layer, kind in enumerate(kinds)])

  def kinds_by_form(self, kinds: Sequence[int]) -> tuple[int, ...]:
    """Return kinds as by `kinds_of` for which layers are equal only if their parameters can be stacked.

    Adapters make parameters differ: only some layers have one, or their ranks differ.

    Args:
      kinds: kind of each layer; each layer has a subtree or is in a stack.
    """
    params = tree_utils.to_dict(self._owner.variables.get('params', {}))
    shapes = layer_stacks.single_shapes(params)
    forms = [_form(shapes.get(self._tree.layer_name(layer))) for layer in range(len(kinds))]
    return kinds_of(list(zip(kinds, forms, strict=True)))

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
          stacked = tree_utils.to_dict(tree[self._tree.name])
          # [repeats, ...]: `lax.scan` loops over the first dim.
          period[0][collection] = jax.tree.map(
            lambda a, axis=axis: jnp.moveaxis(a, axis(a.ndim - 1), 0), stacked
          )
        continue
      subtrees = None
      for offset, variables in enumerate(period):
        numbers = segment.layers_at(offset)
        stacked = layer_stacks.stacked_name(numbers)
        if len(numbers) > 1 and stacked in tree:  # a single layer has this name too
          variables[collection] = tree_utils.to_dict(tree[stacked])
          continue
        if subtrees is None:
          subtrees = self._subtrees(collection, tree)
        found = [i for i in numbers if i in subtrees]
        if len(found) == len(numbers):
          parts = [subtrees[i] for i in found]
          variables[collection] = stack_trees(parts, lambda ndim: 0)
        elif found:
          raise ConfigError(
            f'Layers of one loop must all have variables {collection!r} or none, got them in {found} '
            f'of {list(numbers)}. Set scan_layers=False.'
          )
    return period

  def write_layers(self, layers: Mapping[int, Variables]) -> None:
    """Store the updated variables of layers, by layer number."""
    by_collection: dict[str, dict[int, PyTree]] = {}
    for i, layer in layers.items():
      for collection, part in layer.items():
        by_collection.setdefault(collection, {})[i] = part
    for collection, parts in by_collection.items():
      self._put(collection, parts)

  def _put(self, collection: str, parts: Mapping[int, PyTree]) -> None:
    """Store the variables of layers in `collection`, by layer number."""
    if self._tree.is_stacked(collection):
      axis = self._axis(collection)
      trees = list(parts.values())
      are_equal = all(_form(tree) == _form(trees[0]) for tree in trees)
      if len(trees) != self._num_layers or not are_equal:
        raise ConfigError(
          f"With param_layout='scalable_t5' all layers must have equal variables, but those of collection "
          f'{collection!r} differ. {_UNEQUAL_LAYERS_REMEDY}'
        )
      stacked = _add_layers_axis(stack_trees(trees, axis), axis)
      self._owner.put_variable(collection, self._tree.name, stacked)
      return
    for i, part in parts.items():
      self._owner.put_variable(collection, self._tree.layer_name(i), part)

  def write_segment(self, segment: Segment, period: Sequence[Variables]) -> None:
    """Store the updated variables of each layer of the period, whose first dim is over repetitions."""
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
  """Return the structure, shapes and dtypes of a tree; trees can be stacked if these are equal."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def read_first_layer(
  owner: nn.Module, tree: LayerTree, collection: str, path: Sequence[str]
) -> jax.Array | None:
  """Return one variable of a stack's first layer, or None if it does not exist.

  Args:
    owner: module that owns the stack, bound.
    tree: positions of the layers' variables.
    collection: collection of the variable, with a subtree per layer.
    path: names within the layer.
  """
  node = owner.variables.get(collection, {}).get(tree.layer_name(0), {})
  for name in path:
    node = node.get(name, {})
  if isinstance(node, Mapping):
    return None
  return node


class _Runner:
  """Application of layers to the residual stream, in loops or one by one; see `run_layers` for the arguments."""

  def __init__(self, owner, layers, operands, store, remat_fn, method, options):
    self._owner = owner
    self._layers = layers
    self._operands = operands
    self._store = store
    self._remat = remat_fn
    self._method = method
    self._options = options
    self._mutable = owner.scope.mutable
    self._keys = {stream: owner.make_rng(stream) for stream in owner.scope.rngs}
    self._bodies: list[tuple[nn.Module, Callable]] = []

  def _layer_fn(self, layer: nn.Module) -> Callable[..., tuple[PyTree, Variables]]:
    """Return `layer` as a function of its variables: (index, variables, keys, x, operands) to (x, updates)."""
    mutable = self._mutable
    options = dict(self._options, method=self._method)
    initializing = self._owner.is_initializing()

    def run_layer(index, variables, keys, x, operands):
      rngs = {stream: jax.random.fold_in(key, index) for stream, key in keys.items()}
      x = ad_checkpoint.checkpoint_name(x, 'layer_input')
      if initializing and not variables:
        # With `init` the layer does not count the call as a step.
        x, updates = layer.init_with_output(rngs, x, *operands, mutable=mutable, **options)
      else:
        result = layer.apply(variables, x, *operands, rngs=rngs, mutable=mutable, **options)
        if mutable is False:
          x = result
          updates = {}
        else:
          x, updates = result
      return x, {collection: tree_utils.to_dict(update) for collection, update in updates.items()}

    run_layer.__name__ = type(layer).__name__
    return run_layer

  def loop(self, segment: Segment, x: PyTree) -> PyTree:
    """Run a repeated segment in a `lax.scan`."""
    period = segment.period
    layers = self._layers[segment.start : segment.start + period]
    kinds = kinds_of(layers)
    bodies = [self._remat(self._layer_fn(layer), in_loop=True) for layer in layers]
    if period > 1:
      # Equal layers are traced once, as outside of loops.
      bodies = [jax.jit(body) for body in bodies]

    def body(x, scanned):
      indices, variables = scanned
      updates = []
      for offset, kind in enumerate(kinds):
        x, update = bodies[kind](indices[offset], variables[offset], self._keys, x, self._operands)
        updates.append(update)
      return x, updates

    # uint32 [repeats] for each layer of the period: numbers of the layers, from which their random numbers are derived.
    indices = []
    for offset in range(period):
      numbers = segment.layers_at(offset)
      indices.append(jnp.arange(numbers.start, numbers.stop, numbers.step, dtype=jnp.uint32))
    x, updates = lax.scan(body, x, (indices, self._store.read_segment(segment)))
    self._store.write_segment(segment, [self._mutable_part(updated) for updated in updates])
    return x

  def _mutable_part(self, updates: Variables) -> Variables:
    is_mutable = self._owner.is_mutable_collection
    return {name: update for name, update in updates.items() if is_mutable(name)}

  def one_by_one(self, variables: Mapping[int, Variables], x: PyTree) -> PyTree:
    """Run layers one after the other, given their variables by layer number."""
    leaves = jax.tree.leaves((x, self._operands, variables))
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
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
      body = self._remat(self._layer_fn(layer), in_loop=False)
      # Inside a trace, equal layers are traced once; the compiler inlines the calls.
      body = jax.jit(body) if traced else body
      self._bodies.append((layer, body))
    return body


def run_layers(
  owner: nn.Module,
  layers: Sequence[nn.Module],
  x: PyTree,
  *operands: PyTree,
  tree: LayerTree,
  scan: bool | None,
  remat_policy: str,
  remat_offload: Sequence[str] = (),
  method: str = '__call__',
  fresh: Sequence[str] = (),
  **options: Any,
) -> PyTree:
  """Apply `layers` one after the other: x = layer(x, *operands, **options).

  Call it in a (compact) method of `owner`, whose scope has the layers' variables at the positions of `tree`. Missing
  variables of mutable collections are initialized, as in any Flax module. The random keys of a layer are derived from
  the owner's keys and the layer's index.

  Args:
    owner: module that owns the stack.
    layers: unbound modules (`parent=None`), one per layer.
    x: input of the first layer, a pytree of arrays; layers keep shapes and dtypes.
    *operands: pytrees of arrays, inputs of all layers.
    tree: positions of the variables.
    scan: True to run equal layers as one loop, and other layers as one loop per repeated segment; None to do so for
      layers whose parameters are stacked; False for no loops.
    remat_policy: one of `remat.REMAT_POLICIES`.
    remat_offload: names of results, see `remat.remat`.
    method: name of the layers' method.
    fresh: collections that are hidden from the layers, which initialize them again.
    **options: static arguments of the method.

  Returns:
    Output of the last layer.

  Raises:
    ConfigError: layers with stacked variables differ, or only some layers of a loop have variables of a collection.
  """
  store = _Store(owner, tree, len(layers), fresh)
  remat_fn = functools.partial(remat, policy=remat_policy, offload=remat_offload)
  runner = _Runner(owner, layers, operands, store, remat_fn, method, options)
  kinds = kinds_of(layers)
  is_step = False
  alike = not any(kinds)
  if scan and tree.stacked and not alike:
    raise ConfigError(
      "With scan_layers=True and param_layout='scalable_t5' all layers must be equal. "
      f'{_UNEQUAL_LAYERS_REMEDY}'
    )
  if owner.is_initializing():
    # Parameters are initialized in loops if possible: compiling random number generators per layer is slow.
    in_loop = alike or not tree.stacked
  elif 'cache' in owner.variables and 'cache' not in fresh:
    # A step of decoding is always unrolled, so that it does not copy the cache.
    in_loop = False
    is_step = True
  elif scan is None and tree.stacked:
    in_loop = alike
  elif scan is None:
    kinds = store.kinds_by_stack(kinds)
    in_loop = len(set(kinds)) < len(kinds)
    alike = not any(kinds)
  else:
    in_loop = scan
    if scan and not tree.stacked:
      kinds = store.kinds_by_form(kinds)
      alike = not any(kinds)
  if in_loop and alike:
    return runner.loop(Segment(0, 1, len(layers)), x)
  layer_variables = dict(enumerate(store.read_layers()))
  if in_loop:
    for segment in find_segments(kinds):
      first = segment.start
      if segment.repeats > 1:
        x = runner.loop(segment, x)
      else:
        x = runner.one_by_one({first: layer_variables[first]}, x)
    return x
  if is_step and tree.stacked:
    # The slices of stacked parameters are the same in all steps. Without a barrier the compiler does not move them out
    # of the loop over steps, and copies all parameters in each step.
    for layer in layer_variables.values():
      for name, variables in layer.items():
        if tree.is_stacked(name):
          layer[name] = lax.optimization_barrier(variables)
  return runner.one_by_one(layer_variables, x)
