"""Typed random keys in optax states as plain arrays, which can be saved, sharded and compared like all others."""

from typing import Any

import flax.serialization
from flax import struct
import jax
import jax.numpy as jnp

from t5x_lite.types import PyTree


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


def _is_typed(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_raw(state: PyTree) -> PyTree:
  """Returns `state` with a `RawKey` in the place of each typed random key."""

  def convert(leaf: Any) -> Any:
    return RawKey(jax.random.key_data(leaf), str(jax.random.key_impl(leaf))) if _is_typed(leaf) else leaf

  return jax.tree.map(convert, state)


def to_typed(state: PyTree) -> PyTree:
  """Inverse of `to_raw`."""
  return jax.tree.map(
      lambda leaf: jax.random.wrap_key_data(leaf.data, impl=leaf.impl) if isinstance(leaf, RawKey) else leaf, state,
      is_leaf=lambda leaf: isinstance(leaf, RawKey))
