"""Inference with a model of a few hundred parameters, whose predictions tell which example and which draw made them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import train_state as train_state_lib
from t5x_lite.apps.infer import run as infer_app
from tests.models import toy_model

LENGTH = 6
LENGTHS = {'inputs': LENGTH, 'targets': LENGTH}


class LetterVocabulary(toy_model.ToyVocabulary):
  """Letters are ids."""

  extra_ids = 0

  def encode(self, text):
    return [ord(letter) - ord('a') + 2 for letter in text]


VOCABULARY = LetterVocabulary()


class LetterModel(toy_model.ToyModel):
  """Predicts the inputs, each letter moved on by 0 to 2 at random."""

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None):
    inputs = batch['encoder_input_tokens']
    moved = inputs + jax.random.randint(rng, inputs.shape, 0, 3)
    tokens = jnp.where(inputs > 1, jnp.minimum(moved, 27), inputs)
    return tokens, {'scores': jnp.sum(params['embedding'][tokens], axis=(1, 2))}


@functools.cache
def model():
  return LetterModel(toy_model.ToyNetwork(), VOCABULARY, VOCABULARY, optimizers.adamw())


@functools.cache
def partitioner():
  devices = np.array(jax.devices()[:2]).reshape(2, 1)
  mesh = jax.sharding.Mesh(devices, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  return partitioning.PjitPartitioner(mesh=mesh)


def params():
  return train_state_lib.InferenceState.create(
    model().get_initial_variables(jax.random.key(3), {'decoder_input_tokens': (2, LENGTH)})
  ).params


def save_checkpoint(model_dir, step=5):
  """Save a checkpoint like a training run of the model, and return its path."""
  state = train_state_lib.FlaxOptimTrainState.create(
    model().optimizer_def,
    model().get_initial_variables(jax.random.key(3), {'decoder_input_tokens': (2, LENGTH)}),
  )
  with checkpoints.CheckpointManager(
    model_dir, save_cfg=checkpoints.SaveCheckpointConfig(period=1)
  ) as manager:
    manager.save(step, jax.device_get(state.state_dict()))
    manager.wait()
  return checkpoints.get_checkpoint_dir(model_dir, step)


def save_new_state(model_dir, any_model, shapes, step):
  """Save a new state of any model like a training run, for inputs of `shapes`; return the checkpoint's path."""
  state = jax.jit(
    lambda: train_state_lib.FlaxOptimTrainState.create(
      any_model.optimizer_def, any_model.get_initial_variables(jax.random.key(0), shapes)
    )
  )()
  with checkpoints.CheckpointManager(
    model_dir, save_cfg=checkpoints.SaveCheckpointConfig(period=1)
  ) as manager:
    manager.save(step, jax.device_get(state.state_dict()), metadata={'param_layout': 't5'})
    manager.wait()
  return checkpoints.get_checkpoint_dir(model_dir, step)


def texts(num, seed=0):
  """Return lines of 1 to 5 letters, all different."""
  rng = np.random.default_rng(seed)
  found = {}
  while len(found) < num:
    found[''.join(chr(ord('a') + i) for i in rng.integers(0, 20, rng.integers(1, LENGTH)))] = True
  return list(found)


def text_cfg(path, batch_size=4, **kwargs):
  return data.TextFileConfig(
    path=str(path), task_feature_lengths=LENGTHS, batch_size=batch_size, **kwargs
  )


def infer(dataset_cfg, checkpoint, output_dir, **kwargs):
  """Call the app; any argument may be replaced."""
  arguments = {
    'mode': 'predict',
    'model': model(),
    'partitioner': partitioner(),
    'checkpoint_period': 2,
    'summarize_config_fn': None,
    'restore_checkpoint_cfg': checkpoints.RestoreCheckpointConfig(
      path=str(checkpoint), mode='specific'
    ),
    **kwargs,
  }
  return infer_app.infer(dataset_cfg=dataset_cfg, output_dir=str(output_dir), **arguments)
