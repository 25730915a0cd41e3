"""A step of fine-tuning from a checkpoint of theirs is the step that PyTorch makes: loss, gradients, new parameters."""

import functools

import jax
import numpy as np
import pytest

from t5x_lite import optimizers
from tests.interop import reference
from tests.networks import network_cases

_RATE = 0.01


@functools.cache
def _loss_fn(name, layout, **options):
  """Returns a compiled function from (parameters, batch) to (loss, gradients) of our model with these options."""
  model = reference.our_model(reference.our_module(reference.FAMILIES[name], layout), **options)
  return reference.jit(
    jax.value_and_grad(lambda params, batch: model.loss_fn(params, batch, None)[0])
  )


def _check(name, layout, loss_fn, z_loss=None):
  family, batch = reference.FAMILIES[name], reference.random_batch(3)
  model = reference.hf_model(family, 3)
  params = reference.our_tree(model.tensors, family, layout)
  weights = (batch['decoder_target_tokens'] > 0).astype(np.float32)
  want, want_grads = model.loss_and_gradients(
    batch, z_loss, lambda tensors: reference.our_tree(tensors, family)
  )
  loss, grads = loss_fn(params, {**batch, 'decoder_loss_weights': weights})
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  if layout != 't5':
    # A table of positions that all layers share has the sum of the gradients of its copies in the layers.
    grads = reference.to_t5_layout(grads, family, add_tables=not family.per_layer)
  want_grads.assert_close(grads, rtol=1e-4)


@pytest.mark.full  # by default, the sum below, and the logits of every architecture
@pytest.mark.parametrize('name, layout', reference.cases(('switch', 't5')))
def test_mean_loss_and_gradients(name, layout):
  loss_fn = _loss_fn(name, layout, loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  _check(name, layout, loss_fn)


@pytest.mark.parametrize('name, layout', reference.cases(('umt5', 't5')))
def test_summed_loss_with_z_loss_and_gradients(name, layout):
  _check(name, layout, _loss_fn(name, layout, z_loss=0.01), z_loss=0.01)


# The optimizers of PyTorch and transformers with these options are in `libraries.train`.
_OPTIMIZERS = {
  'sgd': lambda: optimizers.sgd(_RATE, momentum=0.9),
  # Where gradients are small, AdamW makes much of their rounding: hence the rate and epsilon.
  'adamw': lambda: optimizers.adamw(_RATE / 10, b2=0.99, eps=1e-4, weight_decay=0.1),
  # Theirs factors every matrix; ours, as T5X's, by default those only whose dims are all 128 or more.
  'adafactor': lambda: optimizers.Adafactor(_RATE, min_dim_size_to_factor=1),
}


@pytest.mark.full  # by default, the gradients above and tests/test_train_golden.py
@pytest.mark.parametrize(
  'name, optimizer',
  [
    pytest.param(
      name,
      optimizer,
      marks=[] if (name, optimizer) == ('t5_1_1', 'adafactor') else [pytest.mark.full],
    )
    for name in reference.DENSE
    for optimizer in _OPTIMIZERS
  ],
)
def test_two_steps_of_an_optimizer(name, optimizer):
  family = reference.FAMILIES[name]
  model = reference.hf_model(family, 4)
  start = reference.our_tree(model.tensors, family)
  batches = [reference.random_batch(seed) for seed in range(2)]
  want = model.train(optimizer, _RATE, batches, lambda tensors: reference.our_tree(tensors, family))
  reference.end_if_writing()
  state = _OPTIMIZERS[optimizer]().create(start)
  update = network_cases.jit(lambda state, grads: state.apply_gradient(grads))
  grads_fn = _loss_fn(name, 't5', loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  for batch in batches:
    state = update(state, grads_fn(state.target, batch)[1])
  want.assert_close(state.target, rtol=1e-5)
  moved = jax.tree.map(
    lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(a), start, dict(state.target)
  )
  assert min(jax.tree.leaves(moved)) > 1e-4
