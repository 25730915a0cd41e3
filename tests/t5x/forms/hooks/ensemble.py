"""An ensemble: parameters, logits, targets and weights have a leading dim, the members.

T5X computes the loss of all members, since its losses accept leading dims, and passes logits, targets and weights of
this shape to `_compute_metrics` by name. The metrics are those of the mean of the logits. Decoding is written for
T5X before it had decoding states: `_compute_logits_from_slice` gets token ids and the cache.
"""

import jax
import jax.numpy as jnp
from t5x import models


class Ensemble(models.EncoderDecoderModel):
  def __init__(self, *args, num_members=2, **kwargs):
    super().__init__(*args, **kwargs)
    self._num_members = num_members

  def get_initial_variables(self, rng, *args, **kwargs):
    keys = jax.random.split(rng, self._num_members)
    members = [super(Ensemble, self).get_initial_variables(key, *args, **kwargs) for key in keys]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)

  def _compute_logits(self, params, batch, dropout_rng=None, mutable=False, other_variables=None):
    one = super()._compute_logits
    return jax.vmap(lambda member: one(member, batch, dropout_rng, mutable, other_variables))(
      params
    )

  def loss_fn(self, params, batch, dropout_rng):
    tiled = {
      name: jnp.tile(batch[name], (self._num_members, 1, 1))
      for name in ('decoder_target_tokens', 'decoder_loss_weights')
    }
    return super().loss_fn(params, {**batch, **tiled}, dropout_rng)

  def _compute_metrics(self, logits, targets, mask, loss, z_loss=None, segment_ids=None):
    segment_ids = {name: ids[0] if ids.ndim == 3 else ids for name, ids in segment_ids.items()}
    return super()._compute_metrics(
      logits.mean(axis=0), targets[0], mask[0], loss, z_loss, segment_ids
    )

  def predict_batch_with_aux(self, params, batch, *args, **kwargs):
    first = jax.tree.map(lambda leaf: leaf[0], params)
    return super().predict_batch_with_aux(first, batch, *args, **kwargs)

  def _compute_logits_from_slice(
    self, flat_ids, flat_cache, params, encoded_inputs, raw_inputs, max_decode_length
  ):
    logits, cache = super()._compute_logits_from_slice(
      flat_ids, flat_cache, params, encoded_inputs, raw_inputs, max_decode_length
    )
    return logits.at[:, 3].set(-1e7), cache
