"""Axes and shapes of three parameters, and shapes of states for them."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from t5x_lite import optimizers

AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}, 'scale': P()}
SHAPES = {
  'dense': {
    'kernel': jax.ShapeDtypeStruct([4, 6], jnp.float32),
    'bias': jax.ShapeDtypeStruct([6], jnp.float32),
  },
  'scale': jax.ShapeDtypeStruct([], jnp.float32),
}
derive = optimizers.OptaxStatePartitionRules.derive_optax_logical_axes


def zeros(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def each(fn):
  """Return a tree like the parameters with the results of `fn` for their shapes."""
  return jax.tree.map(lambda param: fn(param.shape), SHAPES)
