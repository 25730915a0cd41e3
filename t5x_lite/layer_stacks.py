"""Equal layers as stacked arrays: one array for a parameter of many layers, with a leading dim over the layers.

A tree with a subtree per layer, {'encoder': {'layers_0': ..., 'layers_1': ..., 'layers_2': ...}}, becomes
{'encoder': {'layers_0,1,2': ...}}: the name of a stacked subtree lists its layers. The training step works on such
trees, so that its program does not grow with the number of layers; checkpoints, and everything that users read or
write, have a subtree per layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError

PyTree = Any
# Logical axes of dims whose indices number separate arrays, of layers or experts.
BATCH_AXES = ('layers', 'stack', 'expert')
_PREFIX = 'layers_'
# (name of a stack, its layers that are stacked).
_Group = tuple[str, tuple[int, ...]]


def layer_name(layer: int) -> str:
  """Return the name of the subtree of a layer."""
  return f'{_PREFIX}{layer}'


def stacked_name(layers: Iterable[int]) -> str:
  """Return the name of the subtree of stacked layers.

  >>> stacked_name([0, 2, 4])
  'layers_0,2,4'
  """
  return _PREFIX + ','.join(map(str, layers))


def layers_of(name: str) -> tuple[int, ...]:
  """Return the layers of a stacked subtree, in the order of its arrays' first dim; () for any other name.

  >>> layers_of('layers_0,2,4'), layers_of('layers_0'), layers_of('mlp')
  ((0, 2, 4), (), ())
  """
  if not name.startswith(_PREFIX):
    return ()
  numbers = name.removeprefix(_PREFIX).split(',')
  if len(numbers) > 1 and all(map(str.isdecimal, numbers)):
    return tuple(map(int, numbers))
  return ()


def paths_of(path: str) -> list[str]:
  """Return the '/'-joined paths of each layer's array for the path of an array; [path] if it is not stacked.

  Of several stacks in a path, the layers of the last one vary slowest.

  >>> paths_of('encoder/layers_0,1/mlp')
  ['encoder/layers_0/mlp', 'encoder/layers_1/mlp']
  """
  paths = [path.split('/')]
  for i in reversed(range(len(paths[0]))):
    layers = layers_of(paths[0][i])
    if layers:
      paths = [
        [*names[:i], layer_name(layer), *names[i + 1 :]] for names in paths for layer in layers
      ]
  return ['/'.join(names) for names in paths]


def single_paths(paths: Sequence[str]) -> tuple[list[str], list[tuple[int, ...]]]:
  """Return the paths of the arrays in the tree with a subtree per layer, and which of them each array has.

  Args:
    paths: '/'-joined paths of arrays, in the order in which JAX flattens their tree.

  Returns:
    (paths of the layers' arrays, in the order of their tree; for each of `paths` their indices in this list).

  >>> single_paths(['a/layers_2,10/b', 'a/layers_3/b'])
  (['a/layers_10/b', 'a/layers_2/b', 'a/layers_3/b'], [(1, 0), (2,)])
  """
  if not any(map(is_stacked, paths)):
    return list(paths), [(i,) for i in range(len(paths))]
  ordered = _in_order(path for stacked in paths for path in paths_of(stacked))
  index_of = {path: i for i, path in enumerate(ordered)}
  indices = [tuple(map(index_of.__getitem__, paths_of(stacked))) for stacked in paths]
  return list(ordered), indices


def is_stacked(path: str) -> bool:
  """Return whether the array at a '/'-joined path has a leading dim over layers."""
  return any(map(layers_of, path.split('/')))


def is_accepted_by(*objects: Any) -> bool:
  """Return whether the class of each object declares in its body ACCEPTS_STACKED_LAYERS = True.

  A declaration is not inherited, since an overridden method may depend on single layers or on numbers of dims.
  """
  return all(declares(each, 'ACCEPTS_STACKED_LAYERS') for each in objects)


def declares(instance: Any, name: str) -> bool:
  """Return whether the class of an object sets `name` to True in its body.

  The subclass that gin makes of a class with configured methods, with the same name, counts as that class.
  """
  cls = type(instance)
  while cls.__base__ is not None and (cls.__module__, cls.__qualname__) == (
    cls.__base__.__module__,
    cls.__base__.__qualname__,
  ):
    cls = cls.__base__
  return vars(cls).get(name, False)


@dataclasses.dataclass(frozen=True)
class LayerStacks:
  """Selection of the layers that are stacked.

  Attributes:
    groups: pairs of the name of a stack of layers, such as 'encoder', and the numbers of at least two of its layers
      whose arrays are stacked.
  """

  groups: tuple[_Group, ...] = ()

  def __bool__(self) -> bool:
    return bool(self.groups)

  def __str__(self) -> str:
    """Return the layers by stack.

    >>> str(LayerStacks((('encoder', (0, 1, 2)), ('decoder', (0, 2))))), str(LayerStacks())
    ('encoder 0-2; decoder 0, 2', 'none')
    """

    def describe(layers):
      first = layers[0]
      last = layers[-1]
      if layers == tuple(range(first, last + 1)):
        return f'{first}-{last}'
      return ', '.join(map(str, layers))

    if not self.groups:
      return 'none'
    return '; '.join(f'{stack} {describe(layers)}' for stack, layers in self.groups)

  def stack(self, tree: PyTree) -> PyTree:
    """Return a tree with a subtree per layer in the stacked form.

    Args:
      tree: any pytree that contains trees like the parameters: nested dicts, or states of optimizers. Its leaves are
        arrays, NumPy arrays, tracers, `jax.ShapeDtypeStruct`s or `PartitionSpec`s of mesh axes.
    """

    def convert(path, node):
      if not isinstance(node, Mapping) or not path:
        return node
      parent = getattr(path[-1], 'key', None)
      for stack, layers in self.groups:
        names = list(map(layer_name, layers))
        if parent == stack and all(name in node for name in names):
          single = [node[name] for name in names]
          others = {name: child for name, child in node.items() if name not in names}
          others[stacked_name(layers)] = jax.tree.map(lambda *leaves: _stack(leaves), *single)
          node = _like(node, others)
      return node

    first = {layer_name(layers[0]) for _, layers in self.groups}
    return jax.tree_util.tree_map_with_path(
      convert,
      tree,
      is_leaf=lambda node: isinstance(node, Mapping) and any(name in node for name in first),
    )

  def unstack(self, tree: PyTree) -> PyTree:
    """Return a tree in the stacked form with a subtree per layer, the inverse of `stack`."""
    names = {stacked_name(layers) for _, layers in self.groups}
    return _unstack_nodes(tree, names.__contains__)

  def stack_paths(self, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths in the stacked form of arrays at '/'-joined paths, in the order in which JAX flattens dicts."""
    renamed = {}
    for stack, layers in self.groups:
      for layer in layers:
        renamed[stack, layer_name(layer)] = stacked_name(layers)

    def rename(path: str) -> str:
      names = path.split('/')
      pairs = zip(names, names[1:], strict=False)
      names[1:] = [renamed.get(pair, pair[1]) for pair in pairs]
      return '/'.join(names)

    return _in_order(map(rename, paths))

  def unstack_paths(self, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the inverse of `stack_paths`."""
    return _in_order(layer_path for path in paths for layer_path in paths_of(path))


def single_shapes(tree: PyTree) -> PyTree:
  """Return a tree of arrays with a subtree per layer and a `jax.ShapeDtypeStruct` for each array."""
  return _unstack_nodes(tree_utils.shapes(tree), lambda name: bool(layers_of(str(name))))


def _unstack_nodes(tree: PyTree, is_stacked_name: Callable[[str], bool]) -> PyTree:
  """Return a tree in which each mapping with a stacked name has a subtree per layer instead."""

  def is_parent(node: Any) -> bool:
    return isinstance(node, Mapping) and any(map(is_stacked_name, node))

  def convert(node: Any) -> Any:
    if isinstance(node, Mapping):
      return unstack_subtrees(node)
    return node

  return jax.tree.map(convert, tree, is_leaf=is_parent)


def unstack_subtrees(tree: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
  """Return a dict in which each stacked subtree is replaced by a subtree per layer; other children are unchanged."""
  result = {}
  for name, child in tree.items():
    if layers := layers_of(name):
      leaves, treedef = jax.tree.flatten(child)
      columns = [_unstack(leaf, len(layers)) for leaf in leaves]
      for i, layer in enumerate(layers):
        result[layer_name(layer)] = treedef.unflatten([column[i] for column in columns])
    else:
      result[name] = child
  return _like(tree, result)


def _like(node: Any, children: dict[str, PyTree]) -> Any:
  """Return a node of the class of `node`, a mapping, with other children."""
  return type(node)(children)


def _in_order(paths: Iterable[str]) -> tuple[str, ...]:
  return tuple(sorted(set(paths), key=lambda path: path.split('/')))


class HeldState:
  """A train state, as single layers or stacked, which is converted array by array when the other form is asked for."""

  def __init__(self, state: Any, stacks: LayerStacks = LayerStacks(), *, is_stacked: bool = False):
    """Hold a state.

    Args:
      state: a state with the methods `stack_layers` and `unstack_layers`, if anything is stacked.
      stacks: the layers that are stacked.
      is_stacked: True if `state` has these layers stacked, False if it has a subtree per layer.
    """
    self.stacks = stacks
    self._state = state
    self._is_stacked = is_stacked and bool(stacks)

  @property
  def single(self) -> Any:
    """The state with a subtree per layer."""
    return self._converted(is_stacked=False)

  @property
  def stacked(self) -> Any:
    """The state with stacked layers; set it after an update."""
    return self._converted(is_stacked=bool(self.stacks))

  @stacked.setter
  def stacked(self, state: Any) -> None:
    self._state = state
    self._is_stacked = bool(self.stacks)

  @property
  def stacked_shapes(self) -> Any:
    """The shapes of `stacked`, without a conversion of arrays."""
    shapes = tree_utils.shapes(self._state)
    if self._is_stacked or not self.stacks:
      return shapes
    return shapes.stack_layers(self.stacks)

  def _converted(self, *, is_stacked: bool) -> Any:
    if is_stacked != self._is_stacked and self._state is not None:
      leaves, treedef = jax.tree.flatten(self._state)
      if is_stacked:
        convert = type(self._state).stack_layers
      else:
        convert = type(self._state).unstack_layers
      self._state = None  # its arrays are freed one by one
      self._state = _convert_arrays(lambda state: convert(state, self.stacks), leaves, treedef)
      self._is_stacked = is_stacked
    if self._state is None:
      raise ConfigError(
        'The conversion of the train state was interrupted, and the state is lost. Set '
        'trainer.train_state, for instance from a checkpoint.'
      )
    return self._state


class _Cell:
  """A leaf that is dropped when it is taken, so that a tree can be converted without two copies of its arrays."""

  def __init__(self, leaf: Any):
    self._leaf = leaf

  def take(self) -> Any:
    leaf = self._leaf
    self._leaf = None
    return leaf


def _taken(leaf: Any) -> Any:
  """Return the leaf of a cell, and any other leaf unchanged."""
  if isinstance(leaf, _Cell):
    return leaf.take()
  return leaf


def _convert_arrays(fn: Callable[[PyTree], PyTree], leaves: list[Any], treedef: Any) -> PyTree:
  """Return `fn(tree)`, and drop each array of the tree once it is converted.

  Args:
    fn: a composition of `stack` and `unstack`.
    leaves: leaves of the tree; the list is emptied. The caller must not hold the tree.
    treedef: structure of the tree.
  """
  cells = treedef.unflatten(map(_Cell, leaves))
  leaves.clear()
  return jax.tree.map(_taken, fn(cells))


def _stack(leaves: Sequence[Any]) -> Any:
  """Return the stacked leaf of equal leaves of the layers."""
  leaves = list(map(_taken, leaves))
  first = leaves[0]
  if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return jnp.stack(jnp.broadcast_arrays(*leaves))  # some may be constants
  match first:
    case PartitionSpec():
      return PartitionSpec(None, *first)
    case jax.ShapeDtypeStruct():
      return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    case np.ndarray():
      return np.stack(leaves)
  sharding = _sharding_of(first, lambda spec: (None, *spec))
  if all(map(_is_on_one_cpu, leaves)):
    return _copy(np.stack(leaves), first, sharding)
  return _stack_program(sharding)(leaves)


def _unstack(leaf: Any, num_layers: int) -> Sequence[Any]:
  """Return the leaves of each layer of a stacked leaf."""
  leaf = leaf.take() if isinstance(leaf, _Cell) else leaf
  match leaf:
    case PartitionSpec():
      return [PartitionSpec(*leaf[1:])] * num_layers
    case jax.ShapeDtypeStruct():
      return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)] * num_layers
    case np.ndarray():
      return [leaf[i, ...] for i in range(num_layers)]  # arrays, also without dims
    case jax.core.Tracer():
      return jnp.unstack(leaf)
  sharding = _sharding_of(leaf, lambda spec: spec[1:])
  if _is_on_one_cpu(leaf):
    layers = np.asarray(leaf)
    return [_copy(layers[i, ...], leaf, sharding) for i in range(num_layers)]
  index = _index_program(sharding)
  return [index(leaf, np.int32(i)) for i in range(num_layers)]


def _copy(values: np.ndarray, like: jax.Array, sharding: NamedSharding | None) -> jax.Array:
  """Return an array of its own memory, which a step may overwrite, on the device of `like`."""
  # `jax.device_put` reads a NumPy array in place, even with may_alias=False.
  device: Any = sharding
  if device is None and like.committed:
    device = like.sharding
  return jnp.array(values, copy=True, device=device)


def _is_on_one_cpu(array: jax.Array) -> bool:
  """Return whether NumPy can read an array in place, so that no program for its shape has to be compiled."""
  devices = array.sharding.device_set
  return (
    len(devices) == 1
    and next(iter(devices)).platform == 'cpu'
    and isinstance(array.dtype, np.dtype)
  )


def _sharding_of(
  array: jax.Array, convert: Callable[[tuple[Any, ...]], Iterable[Any]]
) -> NamedSharding | None:
  """Return the sharding of `array` with a converted spec; None without a mesh."""
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return None
  return NamedSharding(
    sharding.mesh, PartitionSpec(*convert(tuple(sharding.spec))), memory_kind=sharding.memory_kind
  )


@functools.lru_cache(maxsize=1024)
def _stack_program(sharding: NamedSharding | None) -> Callable[[Sequence[jax.Array]], jax.Array]:
  return jax.jit(jnp.stack, out_shardings=sharding)


@functools.lru_cache(maxsize=1024)
def _index_program(sharding: NamedSharding | None) -> Callable[[jax.Array, np.int32], jax.Array]:
  return jax.jit(
    functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False), out_shardings=sharding
  )
