"""Optimizers by label, as in optax."""

import flax.core
import flax.linen.partitioning
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import adafactor
from t5x_lite import optimizers
from t5x_lite import tree_utils
from tests.optimizers.multi import multi_cases as cases

_LABELS = {
  'encoder': 'matrix',
  'decoder': {'mlp': {'kernel': 'matrix'}, 'norm': 'still'},
  'token_embedder': 'vector',
  'temperature': 'still',
}


@pytest.mark.parametrize(
  'labels',
  [
    _LABELS,
    flax.core.freeze(_LABELS),
    lambda params: _LABELS,
    lambda params: tree_utils.map_with_names(
      lambda path, leaf: (
        'vector'
        if leaf.size > 100
        else 'still'
        if path in ('decoder/norm/scale', 'temperature')
        else 'matrix'
      ),
      params,
    ),
    [('temperature|decoder/norm', 'still'), ('embedding', 'vector'), ('', 'matrix')],
    adafactor.HParamMap(
      [('temperature|decoder/norm', 'still'), ('embedding', 'vector'), ('', 'matrix')]
    ),
  ],
)
def test_optimizers_by_label(labels):
  optimizer_def = optimizers.partition(
    {'matrix': optimizers.sgd(0.5), 'vector': optimizers.adam(0.1), 'still': None}, labels
  )
  assert optimizer_def.part_names == ('matrix', 'vector')
  optimizer = optimizer_def.create(cases.random(0))
  ones = jax.tree.map(jnp.ones_like, cases.random(0))
  updated = jax.jit(lambda optimizer: optimizer.apply_gradient(ones))(optimizer)
  moved = {
    name: float(np.mean(old - new))
    for (name, new), old in zip(
      tree_utils.named_leaves(updated.target), jax.tree.leaves(optimizer.target), strict=True
    )
  }
  for name, distance in moved.items():
    want = (
      0.1
      if name.startswith('token')
      else 0.0
      if name in ('decoder/norm/scale', 'temperature')
      else 0.5
    )
    np.testing.assert_allclose(distance, want, atol=1e-6, err_msg=name)
  names = tree_utils.flatten_dict(updated.state_dict()['state'])
  assert 'param_states/optimizer:vector/0/mu/token_embedder/embedding' in names


def test_the_same_labels_in_optax_train_the_same():
  def labels(params):
    return jax.tree.map(lambda p: 'matrix' if p.ndim >= 2 else 'vector', params)

  ours = optimizers.partition(
    {'matrix': optimizers.adam(0.1), 'vector': optimizers.sgd(0.2, momentum=0.5)}, labels
  )
  theirs = optimizers.OptaxWrapper(
    optax.partition({'matrix': optax.adam(0.1), 'vector': optax.sgd(0.2, momentum=0.5)}, labels)
  )
  trained = (
    jax.tree.leaves(cases.train(cases.create(optimizer_def)).target)
    for optimizer_def in (ours, theirs)
  )
  for got, want in zip(*trained, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
