"""Thirty training steps of a T5 reproduce the losses and parameters that T5X recorded, for each optimizer."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import adafactor
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import schedules
from t5x_lite import tree_utils
from t5x_lite.networks import t5
from t5x_lite.train_state import FlaxOptimTrainState
from tests import golden_data


def _adamw():
  return optimizers.OptaxWrapper(
    optax.adamw(optax.linear_schedule(0.0, 3e-3, 10), b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.01)
  )


def _adafactor():
  return adafactor.Adafactor(
    decay_rate=0.8,
    min_dim_size_to_factor=16,
    logical_factor_rules=adafactor.standard_logical_factor_rules(),
  )


def _multi():
  kernels = optimizers.ModelParamTraversal(
    lambda path, _: 'decoder' in path and 'scale' not in path
  )
  scales = optimizers.ModelParamTraversal(lambda path, _: 'scale' in path)
  return optimizers.MultiOptimizer(
    [
      (kernels, adafactor.Adafactor(min_dim_size_to_factor=16)),
      (
        scales,
        adafactor.Adafactor(
          factored=False, multiply_by_parameter_scale=False, beta1=0.9, decay_rate=0.7
        ),
      ),
    ]
  )


# Name of the recording to (optimizer, the trainer's schedule or None).
_RUNS = {
  'train_adamw': (_adamw, None),
  'train_adafactor': (_adafactor, optax.constant_schedule(0.02)),
  'train_multi': (
    _multi,
    schedules.create_learning_rate_scheduler(
      'constant * rsqrt_decay', base_learning_rate=0.2, warmup_steps=10
    ),
  ),
}


@pytest.mark.parametrize(
  'name',
  [pytest.param(name, marks=pytest.mark.full) if name != 'train_multi' else name for name in _RUNS],
)
def test_training_follows_the_recorded_losses(name):
  golden, arrays = golden_data.load(f't5x/{name}')
  make_optimizer, learning_rate_fn = _RUNS[name]
  vocabulary = types.SimpleNamespace(vocab_size=golden['config']['vocab_size'], eos_id=1, pad_id=0)
  config = {**golden['config'], 'mlp_activations': tuple(golden['config']['mlp_activations'])}
  model = models.EncoderDecoderModel(
    t5.Transformer(t5.T5Config(**config)),
    vocabulary,
    vocabulary,
    make_optimizer(),
    label_smoothing=golden['label_smoothing'],
    z_loss=golden['z_loss'],
    loss_normalizing_factor=golden['loss_normalizing_factor'],
  )
  params = jax.tree.map(jnp.asarray, golden_data.subtree(arrays, 'params0'))
  batches = golden_data.subtree(arrays, 'batches')
  batches['decoder_input_tokens'] = np.pad(
    batches['decoder_target_tokens'], [(0, 0), (0, 0), (1, 0)]
  )[..., :-1]
  batches['decoder_loss_weights'] = (batches['decoder_target_tokens'] > 0).astype(np.int32)

  def init():
    return model.get_initial_variables(
      jax.random.key(0), {feature: array.shape[1:] for feature, array in batches.items()}
    )

  params_axes = jax.eval_shape(init)['params_axes']
  state = FlaxOptimTrainState.create(
    model.optimizer_def, {'params': params, 'params_axes': params_axes}
  )

  def step(state, batch):
    def loss_fn(params):
      return model.loss_fn(params, batch, jax.random.key(0))

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    learning_rate = None if learning_rate_fn is None else learning_rate_fn(state.step)
    return state.apply_gradient(grads, learning_rate), (
      loss,
      metrics['z_loss'].total,
      metrics['accuracy'].compute(),
    )

  # lax.scan holds the state to one structure from the first step to the last.
  state, (losses, z_losses, accuracies) = jax.jit(lambda state: jax.lax.scan(step, state, batches))(
    state
  )
  assert state.step == golden['steps']
  np.testing.assert_allclose(losses[:10], arrays['loss'][:10], rtol=1e-5)
  np.testing.assert_allclose(losses, arrays['loss'], rtol=1e-4)
  np.testing.assert_allclose(z_losses, arrays['z_loss'], rtol=1e-4)
  np.testing.assert_allclose(accuracies, arrays['accuracy'], rtol=1e-6)
  final = tree_utils.flatten_dict(golden_data.subtree(arrays, 'params_final'))
  trained = tree_utils.flatten_dict(state.params)
  assert trained.keys() == final.keys()
  for path, want in final.items():
    error = np.linalg.norm(trained[path] - want) / np.linalg.norm(want)
    assert error < 1e-3, f'{path}: {error}'
  if name == 'train_multi':
    first = tree_utils.flatten_dict(golden_data.subtree(arrays, 'params0'))
    frozen = [path for path in trained if 'decoder' not in path and 'scale' not in path]
    assert all(np.array_equal(trained[path], first[path]) for path in frozen) and len(frozen) == 16
