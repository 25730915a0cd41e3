"""Small encoder-decoder with all features that models use, and batches."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import decoding
from t5x_lite import models

VOCAB_SIZE = 11


class Vocabulary:
  """Attributes of a vocabulary that models use."""

  pad_id = 0
  eos_id = 1

  def __init__(self, vocab_size=VOCAB_SIZE):
    self.vocab_size = vocab_size


class Recorded(nn.Module):
  """Fake network that returns the logits of T5X's network, to compute many losses from one pass."""

  logits: Any

  @nn.compact
  def __call__(self, *args, **kwargs):
    return jnp.asarray(self.logits)


class RunningSum(nn.Module):
  """Cumulative sum over positions; with decode=True step by step, from a cache."""

  @nn.compact
  def __call__(self, y_BLD, decode, prefill_lengths=None):
    if not decode:
      return jnp.cumsum(y_BLD, axis=1)
    if prefill_lengths is not None:
      counted = jnp.arange(y_BLD.shape[1]) < prefill_lengths[:, None]
      self.put_variable('cache', 'total', jnp.sum(y_BLD * counted[..., None], axis=1))
      return jnp.cumsum(y_BLD, axis=1)
    is_initialised = self.has_variable('cache', 'total')
    total = self.variable('cache', 'total', jnp.zeros, (y_BLD.shape[0], y_BLD.shape[2]))
    if is_initialised:
      total.value = total.value + y_BLD[:, 0]
    return total.value[:, None]


class BatchMean(nn.Module):
  """Moving average of the input's mean, updated if its collection is mutable."""

  @nn.compact
  def __call__(self, x):
    mean = self.variable('batch_stats', 'mean', jnp.zeros, ())
    if self.is_mutable_collection('batch_stats') and not self.is_initializing():
      mean.value = 0.5 * mean.value + 0.5 * jnp.mean(x)
    return x + mean.value


class T5XSeq2Seq(nn.Module):
  """Small network with the methods of an encoder-decoder for T5X."""

  vocab_size: int = VOCAB_SIZE
  dim: int = 6
  dropout_rate: float = 0.0
  with_statistics: bool = False

  def setup(self):
    self.embed = nn.Embed(self.vocab_size, self.dim)
    self.running_sum = RunningSum()
    self.out = nn.Dense(self.vocab_size)
    self.dropout = nn.Dropout(self.dropout_rate)
    if self.with_statistics:
      self.statistics = BatchMean()

  def encode(self, encoder_input_tokens, enable_dropout=True):
    x_BLD = self.dropout(self.embed(encoder_input_tokens), deterministic=not enable_dropout)
    encoded = jnp.mean(x_BLD * (encoder_input_tokens > 0)[..., None], axis=1, keepdims=True)
    return self.statistics(encoded) if self.with_statistics else encoded

  def decode(
    self,
    encoded,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    enable_dropout=True,
    decode=False,
    max_decode_length=None,
    prefill=False,
    prefill_lengths=None,
  ):
    del encoder_input_tokens, decoder_target_tokens, max_decode_length, prefill
    state = self.running_sum(self.embed(decoder_input_tokens), decode, prefill_lengths)
    logits = self.out(
      jnp.tanh(self.dropout(state, deterministic=not enable_dropout) + 3.0 * encoded)
    )
    self.sow('intermediates', 'logit_square', jnp.mean(jnp.square(logits)))
    return logits

  def __call__(
    self,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
    encoder_positions=None,
    decoder_positions=None,
    *,
    enable_dropout=True,
    decode=False,
  ):
    del encoder_segment_ids, decoder_segment_ids, encoder_positions, decoder_positions
    encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
    return self.decode(
      encoded,
      encoder_input_tokens,
      decoder_input_tokens,
      decoder_target_tokens,
      enable_dropout=enable_dropout,
      decode=decode,
    )


class TinySeq2Seq(T5XSeq2Seq):
  """The same, which makes its cache in a method of its own."""

  def init_cache(self, encoded, encoder_input_tokens, max_decode_length):
    tokens = jnp.ones((encoder_input_tokens.shape[0], max_decode_length), jnp.int32)
    self.decode(encoded, encoder_input_tokens, tokens, tokens, enable_dropout=False, decode=True)


def make_model(module=None, model_cls=models.EncoderDecoderModel, **kwargs):
  kwargs = {'decode_fn': decoding.greedy_search, **kwargs}
  return model_cls(module or TinySeq2Seq(), Vocabulary(), Vocabulary(), None, **kwargs)


def make_batch(seed=0, rows=4, input_length=7, length=6, weights=True):
  rng = np.random.default_rng(seed)
  inputs = rng.integers(2, VOCAB_SIZE, (rows, input_length))
  targets = rng.integers(2, VOCAB_SIZE, (rows, length))
  for row in range(rows):
    num_real = rng.integers(2, length + 1)
    targets[row, num_real - 1] = 1
    targets[row, num_real:] = 0
    inputs[row, input_length - row % 3 :] = 0
  batch = {
    'encoder_input_tokens': inputs,
    'decoder_target_tokens': targets,
    'decoder_input_tokens': np.concatenate([np.zeros((rows, 1), int), targets[:, :-1]], axis=1),
  }
  batch = {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}
  if weights:
    batch['decoder_loss_weights'] = jnp.asarray(targets > 0, jnp.float32)
  return batch


def shapes_of(batch):
  return {name: value.shape for name, value in batch.items()}


def initialise(model, seed=0):
  shapes = shapes_of(make_batch())
  return jax.jit(lambda rng: model.get_initial_variables(rng, shapes))(jax.random.key(seed))


@functools.cache
def initial_params():
  return initialise(make_model())['params']
