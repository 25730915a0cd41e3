"""Models of the recordings of T5X, in `tests/golden/t5x`: one pass of a network, or a training."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lite import adafactor
from t5x_lite import models
from t5x_lite import networks
from t5x_lite import optimizers
from t5x_lite import schedules
from t5x_lite.networks import t5
from t5x_lite.train_state import FlaxOptimTrainState
from tests import golden_data

ENCODER_DECODERS = (
  'net_t5_1_0_tiny',
  'net_t5_1_1_tiny',
  'net_t5_1_1_packed',
  'net_scalable_t5_1_1_tiny',
)
DECODER_ONLY = ('net_decoder_only_causal', 'net_decoder_only_prefixlm')


@functools.cache
def load(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], Any, Any]:
  """Return (description, arrays, parameters, batch) of a network's recording."""
  golden, arrays = golden_data.load(f't5x/{name}')
  to_device = functools.partial(jax.tree.map, jnp.asarray)
  params, batch = (to_device(golden_data.subtree(arrays, prefix)) for prefix in ('params', 'batch'))
  return golden, arrays, params, batch


def parse_factor(name: str) -> float | str | None:
  """Return the loss-normalizing factor that a recording calls `name`."""
  if name == 'none':
    return None
  return float(name) if name[0].isdigit() else name


def make_model(
  golden: dict[str, Any],
  loss_normalizing_factor: float | str | None = None,
  optimizer_def: optimizers.OptimizerDef | None = None,
  **options: Any,
) -> models.EncoderDecoderModel | models.DecoderOnlyModel:
  """Return the model that a recording describes, with other options of its class."""
  config = {name: value for name, value in golden['config'].items() if name != 'param_scan_axis'}
  config['mlp_activations'] = tuple(config['mlp_activations'])
  if 'scalable' in golden['model']:
    config['param_layout'] = 'scalable_t5'
  vocabulary = types.SimpleNamespace(vocab_size=config['vocab_size'], eos_id=1, pad_id=0)
  options |= dict(
    label_smoothing=golden['label_smoothing'],
    z_loss=golden['z_loss'],
    loss_normalizing_factor=loss_normalizing_factor,
  )
  if 'decoder_only' in golden['model']:
    network = networks.DecoderWrapper(networks.TransformerConfig(**config))
    bidirectional = golden['inputs_bidirectional_attention']
    return models.DecoderOnlyModel(
      network, vocabulary, optimizer_def, inputs_bidirectional_attention=bidirectional, **options
    )
  network = t5.Transformer(t5.T5Config(**config))
  return models.EncoderDecoderModel(network, vocabulary, vocabulary, optimizer_def, **options)


def global_norm(tree: Any) -> float:
  """Return the norm of all arrays, computed in float64."""
  return np.sqrt(
    sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))
  )


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


# Name of a recorded training to (optimizer, the trainer's schedule or None).
TRAININGS = {
  'train_adamw': (_adamw, None),
  'train_adafactor': (_adafactor, optax.constant_schedule(0.02)),
  'train_multi': (
    _multi,
    schedules.create_learning_rate_scheduler(
      'constant * rsqrt_decay', base_learning_rate=0.2, warmup_steps=10
    ),
  ),
}


def train(name: str) -> tuple[FlaxOptimTrainState, tuple[jax.Array, jax.Array, jax.Array]]:
  """Train from the recorded parameters on the recorded batches.

  Returns:
    The last state, and the losses, z-losses and accuracies, each float32[steps].
  """
  golden, arrays = golden_data.load(f't5x/{name}')
  make_optimizer, learning_rate_fn = TRAININGS[name]
  model = make_model(golden, golden['loss_normalizing_factor'], make_optimizer())
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
  return jax.jit(lambda state: jax.lax.scan(step, state, batches))(state)
