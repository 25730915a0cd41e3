"""Model of a few hundred parameters for tests of the loop, with all interfaces of real models; compiles fast."""

import dataclasses
import functools

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import metrics as metrics_lib
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import train_state as train_state_lib

VOCAB_SIZE = 32


class ToyVocabulary:
  """Vocabulary whose ids are letters."""

  vocab_size = VOCAB_SIZE
  eos_id = 1
  pad_id = 0

  def decode(self, ids):
    letters = []
    for i in ids:
      if i in (self.eos_id, self.pad_id):
        break
      letters.append(chr(ord('a') + int(i) - 2))
    return ''.join(letters)


class ToyNetwork(nn.Module):
  """Embedding of the decoder inputs, hidden layer, logits; optionally dropout, sown values and a mutable counter."""

  width: int = 8
  dropout_rate: float = 0.0
  counts: bool = False
  sows: bool = False

  @nn.compact
  def __call__(self, inputs, enable_dropout=True):
    def param(name, shape, axes):
      return nn_partitioning.param_with_axes(
        name, nn.initializers.normal(0.5), shape, jnp.float32, axes=axes
      )

    if self.counts:
      seen = nn_partitioning.variable_with_axes(
        'counters', 'seen', lambda: jnp.zeros((), jnp.float32), axes=()
      )
      if self.is_mutable_collection('counters') and not self.is_initializing():
        seen.value += jnp.sum(inputs).astype(jnp.float32)
    x = param('embedding', (VOCAB_SIZE, self.width), ('vocab', 'embed'))[inputs]
    x = jnp.tanh(x @ param('hidden', (self.width, 2 * self.width), ('embed', 'mlp')))
    x = nn.Dropout(self.dropout_rate, deterministic=not enable_dropout)(x)
    if self.sows:
      self.sow('intermediates', 'activity', jnp.mean(jnp.square(x)))
    return x @ param('logits', (2 * self.width, VOCAB_SIZE), ('mlp', 'vocab'))


class ToyModel(models.BaseTransformerModel):
  """Model that predicts each target from the previous token."""

  FEATURE_CONVERTER = 'encoder_decoder'

  def compute_logits(self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=()):
    return self.module.apply(
      {'params': params, **(flax_mutables or {})},
      batch['decoder_input_tokens'],
      enable_dropout=dropout_rng is not None,
      rngs=None if dropout_rng is None else {'dropout': dropout_rng},
      mutable=list(mutable),
    )

  def auxiliary_losses(self, intermediates, batch):
    if not self.module.sows:
      return 0.0, {}
    loss = 100.0 * intermediates['activity'][0]
    return loss, {'activity': metrics_lib.AveragePerStep(total=loss * self._auxiliary_loss_share)}

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    inputs = jnp.ones(input_shapes['decoder_input_tokens'], jnp.int32)
    variables = dict(self.module.init(rng, inputs, enable_dropout=False))
    variables.pop('intermediates', None)
    return variables

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None):
    logits, _ = self.compute_logits(params, batch, flax_mutables=flax_mutables)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), {}


def make_model(
  optimizer_def=None, *, width=8, dropout_rate=0.0, counts=False, sows=False, **kwargs
):
  vocabulary = ToyVocabulary()
  return ToyModel(
    ToyNetwork(width, dropout_rate, counts, sows),
    vocabulary,
    vocabulary,
    optimizer_def or optimizers.adamw(),
    **kwargs,
  )


def make_state(model, batch_size=8, length=6):
  shapes = {'decoder_input_tokens': (batch_size, length)}

  def init(rng):
    return train_state_lib.FlaxOptimTrainState.create(
      model.optimizer_def, model.get_initial_variables(rng, shapes)
    )

  return jax.jit(init)(jax.random.key(0))


@functools.cache
def _double(kind):
  return type(
    f'Double{kind.__name__}',
    (kind,),
    {'eval_params': property(lambda self: jax.tree.map(lambda x: 2 * x, self.params))},
  )


def evaluates_double(state):
  """Return the state, or its axes, with different parameters for evaluation."""
  return _double(type(state))(
    **{field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
  )


def make_batch(batch_size=16, length=6, seed=0, packed=False):
  """Return a batch of rows of different lengths, so that normalizing factors differ between micro-batches."""
  rng = np.random.default_rng(seed)
  targets = rng.integers(2, VOCAB_SIZE, (batch_size, length)).astype(np.int32)
  lengths = 1 + np.arange(batch_size) * (length - 1) // (batch_size - 1)
  targets[np.arange(length) >= lengths[:, None]] = 0
  batch = {
    'encoder_input_tokens': targets[:, ::-1].copy(),
    'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    'decoder_target_tokens': targets,
    'decoder_loss_weights': (targets > 0).astype(np.int32),
  }
  if packed:
    ids = np.where(targets > 0, 1 + (np.arange(length) >= lengths[:, None] // 2), 0).astype(
      np.int32
    )
    batch |= {'decoder_segment_ids': ids, 'encoder_segment_ids': ids}
  return batch


DATA = PartitionSpec('data')
