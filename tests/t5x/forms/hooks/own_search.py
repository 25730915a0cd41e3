"""An encoder-decoder with a beam search of its own, in a `predict_batch_with_aux` written as T5X's.

T5X's `_compute_kv_cache` makes an empty cache of the batch, and `_compute_logits_from_slice` reads one token of each
beam of each row, whose rows of encoded inputs, inputs and cache are repeated: [row 0, row 0, row 1, row 1 ...].
"""

import functools

import jax
import jax.numpy as jnp
from t5x import decoding
from t5x import models


def search(tokens_to_logits, cache, batch_size, num_beams, length):
  """Return the most probable sequences [batch, beams, length], best last, and their log-probabilities."""
  cache = decoding.cache_map(lambda x: jnp.repeat(x, num_beams, axis=0), cache)
  sequences = jnp.zeros((batch_size * num_beams, length + 1), jnp.int32)
  # All beams are equal before the first token, so only the first counts.
  log_probs = jnp.where(jnp.arange(num_beams) == 0, 0.0, -1e7)[None].repeat(batch_size, axis=0)
  first = jnp.arange(batch_size)[:, None] * num_beams
  for index in range(length):
    state = decoding.DecodingState(index, sequences, sequences[:, index : index + 1], cache)
    logits, cache = tokens_to_logits(state)
    vocab = logits.shape[-1]
    scores = log_probs[..., None] + jax.nn.log_softmax(logits).reshape(batch_size, num_beams, vocab)
    log_probs, best = jax.lax.top_k(scores.reshape(batch_size, -1), num_beams)
    rows = (first + best // vocab).reshape(-1)
    cache = decoding.cache_map(lambda x: x[rows], cache)  # pylint: disable=cell-var-from-loop
    sequences = sequences[rows].at[:, index + 1].set((best % vocab).reshape(-1))
  sequences = sequences[:, 1:].reshape(batch_size, num_beams, length)
  return sequences[:, ::-1], log_probs[:, ::-1]


class OwnSearch(models.EncoderDecoderModel):
  def predict_batch_with_aux(self, params, batch, rng=None, num_decodes=3):
    inputs, tokens = batch['encoder_input_tokens'], batch['decoder_input_tokens']
    encoded = self.module.apply(
      {'params': params}, inputs, enable_dropout=False, method=self.module.encode
    )
    cache, _ = self._compute_kv_cache(params, encoded, inputs, jnp.zeros_like(tokens))
    step = functools.partial(
      self._compute_logits_from_slice,
      params=params,
      encoded_inputs=decoding.flat_batch_beam_expand(encoded, num_decodes),
      raw_inputs=decoding.flat_batch_beam_expand(inputs, num_decodes),
      max_decode_length=tokens.shape[1],
    )
    sequences, scores = search(step, cache, *tokens.shape[:1], num_decodes, tokens.shape[1])
    return sequences[:, -1], {'scores': scores[:, -1]}
