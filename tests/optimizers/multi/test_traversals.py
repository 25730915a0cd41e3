"""Which parameters an optimizer trains: selections, and traversals of a user."""

import warnings

import flax.core
import flax.linen.partitioning
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from tests.optimizers.multi import multi_cases as cases


def _flax_traversal(filter_fn):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return flax.traverse_util.ModelParamTraversal(filter_fn)


class _OwnTraversal:
  """Knows the protocol and nothing else."""

  def iterate(self, inputs):
    yield inputs['decoder']['mlp']['kernel']

  def update(self, fn, inputs):
    decoder = inputs['decoder']
    return {**inputs, 'decoder': {**decoder, 'mlp': {'kernel': fn(decoder['mlp']['kernel'])}}}


# Made when they are used: pytest looks at the attributes of parameters, which warns for Flax's.
@pytest.mark.parametrize(
  'make_selection,want',
  [
    (lambda: 'scale$', 'decoder/norm/scale encoder/norm/scale'),
    (lambda: ['^encoder/mlp', 'embedding'], 'encoder/mlp/kernel token_embedder/embedding'),
    (
      lambda: optimizers.PathTraversal('.*', exclude=['kernel', 'norm']),
      'temperature token_embedder/embedding',
    ),
    (
      lambda: optimizers.ModelParamTraversal(
        lambda path, value: path.endswith('/scale') and value.ndim == 1
      ),
      'decoder/norm/scale encoder/norm/scale',
    ),
    (
      lambda: optimizers.ModelParamTraversal(lambda _, value: value.size > 100),
      'token_embedder/embedding',
    ),
    (lambda: _flax_traversal(lambda path, _: path == '/temperature'), 'temperature'),
    (lambda: _flax_traversal(lambda _, value: value.ndim == 3), 'encoder/attention/kernel'),
    (lambda: cases.flax_items('decoder'), 'decoder/mlp/kernel decoder/norm/scale'),
    (lambda: _OwnTraversal(), 'decoder/mlp/kernel'),
  ],
)
def test_selections(make_selection, want):
  optimizer = optimizers.MultiOptimizer([(make_selection(), optimizers.sgd(0.1))]).create(
    cases.random(0)
  )
  updated = optimizer.apply_gradient(jax.tree.map(jnp.ones_like, cases.random(0)))
  moved = [
    name
    for (name, new), old in zip(
      tree_utils.named_leaves(updated.target), jax.tree.leaves(optimizer.target), strict=True
    )
    if not np.array_equal(new, old)
  ]
  assert moved == want.split()
  assert optimizer.state.param_states.paths == (tuple(moved),)


def test_own_traversals_iterate_and_update():
  tree = flax.core.freeze({'b': {'kernel': 1, 'scale': 2}, 'a': {'kernel': 3}})
  by_filter = optimizers.ModelParamTraversal(lambda path, _: 'kernel' in path)
  for traversal in (optimizers.PathTraversal('kernel'), by_filter):
    assert isinstance(traversal, optimizers.Traversal)
    assert list(traversal.iterate(tree)) == [3, 1]
    updated = traversal.update(lambda x: 10 * x, tree)
    assert updated == flax.core.freeze({'b': {'kernel': 10, 'scale': 2}, 'a': {'kernel': 30}})
    assert isinstance(updated, flax.core.FrozenDict)
