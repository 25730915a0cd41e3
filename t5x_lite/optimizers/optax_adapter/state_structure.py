"""Checks that updates keep the structure of an optax state, and completes initial states.

A train step is compiled once, for one structure of the state, and a checkpoint is restored into the structure of the
initial state. Some transformations add arrays to their state in the first update (`optax.monitor` adds its
measurements): their initial state is completed with these arrays.

Between updates typed random keys are stored as plain arrays, which can be saved, sharded and compared.
"""

from collections.abc import Callable
import re
from typing import Any

from flax import struct
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.axes import kinds
from t5x_lite.types import Params, PyTree

# Function from (parameters, state) to (updates, new state); the parameters are also the gradients.
UpdateFn = Callable[[Params, PyTree], tuple[PyTree, PyTree]]

_PLAIN_CONTAINERS = (dict, list, tuple)
# All states of optax and of this package keep their structure, except those with results of users' functions.
_OWN_PACKAGES = ('optax', 't5x_lite', 'flax')
_STATES_OF_USERS = ('MonitorState', 'SnapshotState')
# An initial state may need several updates: for missing arrays, for dtypes, and again for nested states.
_MAX_UPDATES = 5
_REMEDY = 'Let `init` of the transformation return all arrays that `update` returns, with the same shapes and dtypes.'


def completed(state: PyTree, params: Params, update_fn: UpdateFn, owner: str) -> PyTree:
  """Return an initial state with the structure and the dtypes that updates return.

  Arrays that updates add are zeros at first, provided that updates do not read them. Arrays whose dtype becomes wider
  are converted.

  Args:
    state: the initial state.
    params: the parameters, of which only shapes and dtypes matter.
    update_fn: one update; it is traced if `state` may change, and never computed.
    owner: name of the optimizer, for error messages.

  Raises:
    ConfigError: an update changes the state in another way; the message names the array.
  """
  if not _may_change(state):
    return state
  shapes = jax.tree.map(lambda param: jax.ShapeDtypeStruct(np.shape(param), param.dtype), params)
  for _ in range(_MAX_UPDATES):
    try:
      following = jax.eval_shape(update_fn, shapes, state)[1]
    except Exception as error:  # pylint: disable=broad-exception-caught
      if _has_empty_monitor(state):
        # Optax's own update fails too: jax.lax.cond requires a state of constant structure.
        raise ConfigError(
          f'The optimizer {owner} has an optax.monitor inside a transformation that requires a state of constant '
          f'structure ({str(error).partition(chr(10))[0]}). Move the monitor outside: '
          'optax.chain(optax.monitor(...), wrapper(...)).'
        ) from error
      return state  # The first real update raises the same error.
    if difference(state, following) is None:
      return state
    if jax.tree.structure(state) == jax.tree.structure(following):
      state = jax.tree.map(_cast, state, following)
    else:
      first = state
      state = _grown(state, following)
      if not _computes_the_same(update_fn, shapes, first, following):
        raise ConfigError(
          f'The first update of the optimizer {owner} differs from later ones, which read the added arrays: '
          f'{difference(first, following)}. {_REMEDY}'
        )
  check(state, following, owner)
  return state


def check(state: PyTree, following: PyTree, owner: str) -> None:
  """Raise if an update changes the structure, shapes or dtypes of the state.

  Args:
    state: the state before the update.
    following: the state after it.
    owner: name of the optimizer, for error messages.

  Raises:
    ConfigError: names the first difference.
  """
  if (found := difference(state, following)) is not None:
    raise ConfigError(
      f'An update of the optimizer {owner} changes the structure of its state: {found}. {_REMEDY}'
    )


def difference(state: PyTree, following: PyTree) -> str | None:
  """Return a description of the first difference in structure, shape or dtype between two states, or None."""
  old, new = (dict(tree_utils.named_leaves(tree)) for tree in (state, following))
  for name in sorted(old.keys() ^ new.keys()):
    return f'the array {name!r} is {"added" if name in new else "dropped"}'
  if jax.tree.structure(state) != jax.tree.structure(following):
    return (
      f'its containers change from {jax.tree.structure(state)} to {jax.tree.structure(following)}'
    )
  for name, leaf in old.items():
    if (leaf.shape, leaf.dtype) != (new[name].shape, new[name].dtype):
      return (
        f'the array {name!r} changes from {leaf.dtype}{list(leaf.shape)} to '
        f'{new[name].dtype}{list(new[name].shape)}'
      )
  return None


def _may_change(state: PyTree) -> bool:
  """Return True if updates may change the structure of `state`."""
  found = False

  def visit(node: Any) -> bool:
    nonlocal found
    node_class = type(node)
    is_own = (
      node_class.__module__.partition('.')[0] in _OWN_PACKAGES
      and node_class.__name__ not in _STATES_OF_USERS
    )
    found = found or not (
      kinds.is_array(node)
      or is_own
      or isinstance(node, _PLAIN_CONTAINERS)
      and (kinds.fields_of(node_class) is None)
    )
    return False

  jax.tree.leaves(state, is_leaf=visit)
  return found


def _has_empty_monitor(state: PyTree) -> bool:
  def is_monitor(node):
    return isinstance(node, optax.MonitorState)

  return any(
    is_monitor(node) and not node.measurements
    for node in jax.tree.leaves(state, is_leaf=is_monitor)
  )


def _cast(array: jax.Array, following: jax.ShapeDtypeStruct) -> jax.Array:
  is_wider = jnp.promote_types(array.dtype, following.dtype) == following.dtype
  if is_wider:
    return array.astype(following.dtype)
  return array


def _grown(state: PyTree, following: PyTree) -> PyTree:
  """Return `state` with zeros for arrays that only `following` has; nodes with arrays that it lacks are unchanged."""
  if kinds.is_array(following) and kinds.is_array(state):
    return state
  if not jax.tree.leaves(state):
    # Of NumPy: in a traced program they appear only if they are read.
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), following)
  if kinds.is_array(following) or kinds.is_array(state):
    return state
  (children, _) = kinds.children_of(state)
  (new_children, treedef) = kinds.children_of(following)
  if not set(children) <= set(new_children):
    return state
  return treedef.unflatten(
    [_grown(children.get(name), child) for name, child in new_children.items()]
  )


def _computes_the_same(
  update_fn: UpdateFn, params: Params, state: PyTree, following: PyTree
) -> bool:
  """Return True if an update of `state` is the same program as one of the state completed by `_grown`."""

  def program(fn):
    # Addresses of functions differ from one trace to the next.
    return re.sub(' at 0x[0-9a-f]+', '', str(jax.make_jaxpr(fn)(params, state)))

  return program(update_fn) == program(
    lambda params, state: update_fn(params, _grown(state, following))
  )


@struct.dataclass
class RawKey:
  """Data of a random key; in a state dict it is the array alone, as with T5X's optax.

  Attributes:
    data: uint32 array, the result of `jax.random.key_data`.
    impl: name of the generator.
  """

  data: jax.Array
  impl: str = struct.field(pytree_node=False)


flax.serialization.register_serialization_state(
  RawKey, lambda key: key.data, lambda key, data: key.replace(data=data), override=True
)


def keys_to_raw(state: PyTree) -> PyTree:
  """Return `state` with a `RawKey` for each typed random key."""

  def convert(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return RawKey(jax.random.key_data(leaf), str(jax.random.key_impl(leaf)))
    return leaf

  return jax.tree.map(convert, state)


def keys_to_typed(state: PyTree) -> PyTree:
  """Inverse of `keys_to_raw`."""
  return jax.tree.map(
    lambda leaf: (
      jax.random.wrap_key_data(leaf.data, impl=leaf.impl) if isinstance(leaf, RawKey) else leaf
    ),
    state,
    is_leaf=lambda leaf: isinstance(leaf, RawKey),
  )
