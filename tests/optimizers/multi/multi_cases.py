"""Small parameters, mixes of optimizers, and steps of training with them."""

import warnings

import flax.core
import flax.linen.partitioning
import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from t5x_lite import adafactor
from t5x_lite import optimizers
from t5x_lite import tree_utils

AXES = {
  'encoder': {
    'mlp': {'kernel': P('embed', 'mlp')},
    'attention': {'kernel': P('embed', 'layers', 'heads')},
    'norm': {'scale': P('embed')},
  },
  'decoder': {'mlp': {'kernel': P('embed', 'mlp')}, 'norm': {'scale': P('embed')}},
  'token_embedder': {'embedding': P('vocab', 'embed')},
  'temperature': P(),
}
SIZES = {'embed': 8, 'mlp': 12, 'heads': 6, 'layers': 2, 'vocab': 16}


def random(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda axes: jnp.asarray(rng.normal(size=[SIZES[name] for name in axes]), jnp.float32), AXES
  )


def make_adafactor(**options):
  return adafactor.Adafactor(
    **{
      'min_dim_size_to_factor': 4,
      'logical_factor_rules': adafactor.standard_logical_factor_rules(),
      **options,
    }
  )


def create(optimizer_def, params=None):
  params = random(0) if params is None else params
  return optimizer_def.with_param_axes(AXES, params).create(params)


def train(optimizer, num_steps=3, learning_rate=0.05, start=1):

  @jax.jit
  def train(optimizer, grads):
    return jax.lax.scan(
      lambda o, g: (o.apply_gradient(g, learning_rate=learning_rate), None), optimizer, grads
    )[0]

  grads = [random(seed) for seed in range(start, start + num_steps)]
  return train(optimizer, jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads))


def flat(tree):
  return dict(tree_utils.named_leaves(tree))


def assert_same(got, want):
  got, want = flat(got), flat(want)
  assert got.keys() == want.keys()
  for name, leaf in want.items():
    np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(leaf), err_msg=name)


def mix():
  return optimizers.MultiOptimizer(
    [
      ('encoder/.*kernel$', make_adafactor(beta1=0.9)),
      ('scale$', optimizers.adamw(0.01, weight_decay=0.1)),
      (
        optimizers.ModelParamTraversal(lambda path, _: path.startswith('/token_embedder/')),
        optimizers.sgd(momentum=0.9),
      ),
    ]
  )


def flax_items(*keys):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    traversal = flax.traverse_util.t_identity
    for key in keys:
      traversal = traversal[key]
    return traversal


def small():
  return {'kernel': jnp.ones([2, 3]), 'scale': jnp.ones([3])}
