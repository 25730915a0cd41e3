"""The structure of an optax state: the same from the first state on, or an error before anything is computed.

A train step is compiled once, for one structure of the state, and a checkpoint is restored into the structure of the
first state. Some transformations complete their state in their first update (`optax.monitor` adds its measurements
there): they get a first state that is complete already.

Between updates typed random keys are plain arrays, which can be saved, sharded and compared like all others.
"""

from collections.abc import Callable
import re
from typing import Any

import flax.serialization
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.axes import kinds
from t5x_lite.types import Params, PyTree

# From (parameters, state) to (updates, the new state); parameters stand for the gradients too.
UpdateFn = Callable[[Params, PyTree], tuple[PyTree, PyTree]]

_PLAIN_CONTAINERS = (dict, list, tuple)
# All states of optax and of this package keep their structure, but for those that hold what users' functions return.
_OWN_PACKAGES = ('optax', 't5x_lite', 'flax')
_STATES_OF_USERS = ('MonitorState', 'SnapshotState')
# A first state can need several: one for what it lacks and one for dtypes, and again for states inside that wait.
_MAX_UPDATES = 5
_REMEDY = 'Let `init` of the transformation return all arrays that `update` returns, of the same shapes and dtypes.'


def completed(state: PyTree, params: Params, update_fn: UpdateFn, owner: str) -> PyTree:
  """Returns a first state in the structure and the dtypes that updates return.

  Arrays that only updates add begin as zeros, provided that updates do not read them. An array whose dtype becomes a
  wider one is converted.

  Args:
    state: the first state.
    params: the parameters, of which only shapes and dtypes matter.
    update_fn: one update; it is traced where `state` may change, and nothing is computed.
    owner: the optimizer, for error messages.

  Raises:
    ConfigError: an update changes the state otherwise; the message names the place.
  """
  if not _may_change(state):
    return state
  shapes = jax.tree.map(lambda param: jax.ShapeDtypeStruct(np.shape(param), param.dtype), params)
  for _ in range(_MAX_UPDATES):
    try:
      following = jax.eval_shape(update_fn, shapes, state)[1]
    except Exception as error:  # pylint: disable=broad-exception-caught
      if _has_empty_monitor(state):
        # Optax's own updates fail there too: its conditions ask for states of one form.
        raise ConfigError(
            f'The optimizer {owner} has an optax.monitor inside a transformation that takes no state which changes its '
            f'form ({str(error).partition(chr(10))[0]}). Put the monitor outside of it: '
            'optax.chain(optax.monitor(...), wrapper(...)).') from error
      return state  # The first real update fails in the same way, and explains it.
    if difference(state, following) is None:
      return state
    if jax.tree.structure(state) == jax.tree.structure(following):
      state = jax.tree.map(_cast, state, following)
    else:
      first, state = state, _grown(state, following)
      if not _computes_the_same(update_fn, shapes, first, following):
        raise ConfigError(
            f'The first update of the optimizer {owner} differs from the others: {difference(first, following)}, and '
            f'later updates read it. {_REMEDY}')
  check(state, following, owner)
  return state


def check(state: PyTree, following: PyTree, owner: str) -> None:
  """Raises unless an update keeps structure, shapes and dtypes of the state.

  Args:
    state: the state before the update.
    following: the state after it.
    owner: the optimizer, for error messages.

  Raises:
    ConfigError: naming the first difference.
  """
  if (found := difference(state, following)) is not None:
    raise ConfigError(f'An update of the optimizer {owner} changes the form of its state: {found}. {_REMEDY}')


def difference(state: PyTree, following: PyTree) -> str | None:
  """Returns the first difference in structure, shapes or dtypes between two states in words; None without any."""
  old, new = (dict(tree_utils.named_leaves(tree)) for tree in (state, following))
  for name in sorted(old.keys() ^ new.keys()):
    return f'the array {name!r} is {"added" if name in new else "dropped"}'
  if jax.tree.structure(state) != jax.tree.structure(following):
    return f'its containers change from {jax.tree.structure(state)} to {jax.tree.structure(following)}'
  for name, leaf in old.items():
    if (leaf.shape, leaf.dtype) != (new[name].shape, new[name].dtype):
      return (f'the array {name!r} changes from {leaf.dtype}{list(leaf.shape)} to '
              f'{new[name].dtype}{list(new[name].shape)}')
  return None


def _may_change(state: PyTree) -> bool:
  """Returns whether there is anything in `state` that may change its form."""
  found = False

  def visit(node: Any) -> bool:
    nonlocal found
    node_class = type(node)
    is_own = node_class.__module__.partition('.')[0] in _OWN_PACKAGES and node_class.__name__ not in _STATES_OF_USERS
    found = found or not (kinds.is_array(node) or is_own or isinstance(node, _PLAIN_CONTAINERS) and (
        kinds.fields_of(node_class) is None))
    return False

  jax.tree.leaves(state, is_leaf=visit)
  return found


def _has_empty_monitor(state: PyTree) -> bool:
  is_monitor = lambda node: isinstance(node, optax.MonitorState)
  return any(is_monitor(node) and not node.measurements for node in jax.tree.leaves(state, is_leaf=is_monitor))


def _cast(array: jax.Array, following: jax.ShapeDtypeStruct) -> jax.Array:
  is_wider = jnp.promote_types(array.dtype, following.dtype) == following.dtype
  return array.astype(following.dtype) if is_wider else array


def _grown(state: PyTree, following: PyTree) -> PyTree:
  """Returns `state` with zeros for what only `following` has; as it is where `following` lacks something."""
  if kinds.is_array(following) and kinds.is_array(state):
    return state
  if not jax.tree.leaves(state):
    # NumPy's, which leave no trace in a program that does not read them.
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), following)
  if kinds.is_array(following) or kinds.is_array(state):
    return state
  (children, _), (new_children, treedef) = kinds.children_of(state), kinds.children_of(following)
  if not set(children) <= set(new_children):
    return state
  return treedef.unflatten([_grown(children.get(name), child) for name, child in new_children.items()])


def _computes_the_same(update_fn: UpdateFn, params: Params, state: PyTree, following: PyTree) -> bool:
  """Returns whether an update of `state` is the same program as one of the state that `_grown` makes of it."""

  def program(fn):
    # Addresses of functions differ from one trace to the next.
    return re.sub(' at 0x[0-9a-f]+', '', str(jax.make_jaxpr(fn)(params, state)))

  return program(update_fn) == program(lambda params, state: update_fn(params, _grown(state, following)))


@struct.dataclass
class RawKey:
  """A random key as its bits; in a state dict it is the bare array, as T5X's optax had it.

  Attributes:
    data: uint32 array, what `jax.random.key_data` returns.
    impl: name of the generator.
  """

  data: jax.Array
  impl: str = struct.field(pytree_node=False)


flax.serialization.register_serialization_state(
    RawKey, lambda key: key.data, lambda key, data: key.replace(data=data), override=True)


def keys_to_raw(state: PyTree) -> PyTree:
  """Returns `state` with a `RawKey` in the place of each typed random key."""

  def convert(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return RawKey(jax.random.key_data(leaf), str(jax.random.key_impl(leaf)))
    return leaf

  return jax.tree.map(convert, state)


def keys_to_typed(state: PyTree) -> PyTree:
  """Inverse of `keys_to_raw`."""
  return jax.tree.map(
      lambda leaf: jax.random.wrap_key_data(leaf.data, impl=leaf.impl) if isinstance(leaf, RawKey) else leaf, state,
      is_leaf=lambda leaf: isinstance(leaf, RawKey))
