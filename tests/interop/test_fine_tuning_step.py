"""A step of fine-tuning from a checkpoint of theirs is the step that PyTorch makes: loss, gradients, new parameters."""

import functools

import jax
import numpy as np
import pytest
import torch
import transformers

from t5x_lite import optimizers
from tests.interop import reference
from tests.networks import network_cases

_RATE = 0.01
_PADDING = -100


@functools.cache
def _loss_fn(name, layout, **options):
  """Returns a compiled function from (parameters, batch) to (loss, gradients) of our model with these options."""
  model = reference.our_model(reference.our_module(reference.FAMILIES[name], layout), **options)
  return network_cases.jit(
    jax.value_and_grad(lambda params, batch: model.loss_fn(params, batch, None)[0])
  )


def _labels(batch):
  targets = torch.from_numpy(batch['decoder_target_tokens']).long()
  return torch.where(targets > 0, targets, _PADDING)


def _mean_loss(model, batch):
  """Returns the loss of `transformers` for this package's batch: the mean over target tokens."""
  inputs = torch.from_numpy(batch['encoder_input_tokens']).long()
  # The decoder's inputs are made of the labels there.
  return model(input_ids=inputs, attention_mask=(inputs > 0).long(), labels=_labels(batch)).loss


def _summed_loss(model, batch, z_loss):
  """Returns the cross entropy with a z-loss, summed over target tokens, in PyTorch."""
  logits, labels = reference.torch_forward(model, batch), _labels(batch)
  cross_entropy = torch.nn.functional.cross_entropy(
    logits.flatten(0, 1), labels.flatten(), reduction='sum'
  )
  log_z = torch.logsumexp(logits, dim=-1)[labels != _PADDING]
  return cross_entropy + z_loss * torch.sum(log_z**2)


def _check(name, layout, loss_fn, torch_loss_fn):
  family, batch = reference.FAMILIES[name], reference.random_batch(3)
  model = reference.torch_model(family, 3)
  params = reference.our_tree(reference.state_dict(model), family, layout)
  weights = (batch['decoder_target_tokens'] > 0).astype(np.float32)
  loss, grads = loss_fn(params, {**batch, 'decoder_loss_weights': weights})
  want = torch_loss_fn(model, batch)
  want.backward()
  np.testing.assert_allclose(loss, want.item(), rtol=1e-5)
  want_grads = reference.our_tree(reference.torch_gradients(model), family)
  if layout != 't5':
    # A table of positions that all layers share has the sum of the gradients of its copies in the layers.
    grads = reference.to_t5_layout(grads, family, add_tables=not family.per_layer)
  network_cases.assert_trees_close(grads, want_grads, rtol=1e-4)


@pytest.mark.full  # by default, the sum below, and the logits of every architecture
@pytest.mark.parametrize('name, layout', reference.cases(('switch', 't5')))
def test_mean_loss_and_gradients(name, layout):
  loss_fn = _loss_fn(name, layout, loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  _check(name, layout, loss_fn, _mean_loss)


@pytest.mark.parametrize('name, layout', reference.cases(('umt5', 't5')))
def test_summed_loss_with_z_loss_and_gradients(name, layout):
  z_loss = 0.01
  _check(
    name,
    layout,
    _loss_fn(name, layout, z_loss=z_loss),
    functools.partial(_summed_loss, z_loss=z_loss),
  )


_OPTIMIZERS = {
  'sgd': (
    lambda: optimizers.sgd(_RATE, momentum=0.9),
    lambda params: torch.optim.SGD(params, _RATE, momentum=0.9),
  ),
  # Where gradients are small, AdamW makes much of their rounding: hence the rate and epsilon.
  'adamw': (
    lambda: optimizers.adamw(_RATE / 10, b2=0.99, eps=1e-4, weight_decay=0.1),
    lambda params: torch.optim.AdamW(
      params, _RATE / 10, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1
    ),
  ),
  # Theirs factors every matrix; ours, as T5X's, by default those only whose dims are all 128 or more.
  'adafactor': (
    lambda: optimizers.Adafactor(_RATE, min_dim_size_to_factor=1),
    lambda params: transformers.Adafactor(params, _RATE, relative_step=False, scale_parameter=True),
  ),
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
  model = reference.torch_model(family, 4)
  start = reference.our_tree(reference.state_dict(model), family)
  ours, theirs = (
    make() if i == 0 else make(model.parameters()) for i, make in enumerate(_OPTIMIZERS[optimizer])
  )
  state = ours.create(start)
  update = network_cases.jit(lambda state, grads: state.apply_gradient(grads))
  grads_fn = _loss_fn(name, 't5', loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  for seed in range(2):
    batch = reference.random_batch(seed)
    state = update(state, grads_fn(state.target, batch)[1])
    theirs.zero_grad()
    _mean_loss(model, batch).backward()
    theirs.step()
  want = reference.our_tree(reference.state_dict(model), family)
  network_cases.assert_trees_close(state.target, want, rtol=1e-5)
  moved = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(a), start, want)
  assert min(jax.tree.leaves(moved)) > 1e-4
