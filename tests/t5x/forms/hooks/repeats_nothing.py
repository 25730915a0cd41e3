"""A decoder-only model that never decodes a token twice in a row.

T5X calls `_compute_logits_from_slice` in each step of decoding, with the decoding state by position and the parameters
and the length by name. It returns logits [rows, vocab] and the cache.
"""

import jax
from t5x import decoding
from t5x import models


class RepeatsNothing(models.DecoderOnlyModel):
  def _compute_logits_from_slice(self, decoding_state, params, max_decode_length):
    logits, cache = super()._compute_logits_from_slice(decoding_state, params, max_decode_length)
    last = jax.nn.one_hot(decoding_state.cur_token[:, 0], logits.shape[-1], dtype=bool)
    assert decoding_state.sequences.shape[1] in (max_decode_length, max_decode_length + 2)
    return jax.numpy.where(last, decoding.NEG_INF, logits), cache
