"""A dual encoder: each row's left text is to match its own right text.

T5X calls `loss_fn` in training and, without dropout, in evaluation. `_compute_logits` and `_compute_metrics` have
arguments and results of their own, since only this `loss_fn` calls them; `BaseTransformerModel` requires the former.
"""

import clu.metrics
import flax.linen as nn
import jax
import jax.numpy as jnp
from t5x import models


class Towers(nn.Module):
  """One embedding of the words of both sides; a text is the sum of its words."""

  @nn.compact
  def __call__(self, left, right, enable_dropout=True):
    embed = nn.Embed(11, 4)
    encode = nn.Dropout(0.5, deterministic=not enable_dropout)
    left, right = (encode(embed(ids).sum(axis=1)) for ids in (left, right))
    return left, right, left @ right.T


class DualEncoder(models.BaseTransformerModel):
  FEATURE_CONVERTER_CLS = None

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    left, right = (jnp.ones(input_shapes[side], jnp.int32) for side in ('left', 'right'))
    return self.module.init(rng, left, right, enable_dropout=False)

  def _compute_logits(self, params, batch, dropout_rng=None):
    rngs = {'dropout': dropout_rng} if dropout_rng is not None else None
    (left, right, logits), _ = self.module.apply(
      {'params': params},
      batch['left'],
      batch['right'],
      enable_dropout=rngs is not None,
      rngs=rngs,
      mutable='dropout',
    )
    return left, right, logits, logits.T

  def _compute_metrics(self, left, loss):
    return {
      'loss': clu.metrics.Average.from_model_output(loss[None]),
      'norm': clu.metrics.Average.from_model_output(jnp.sum(left**2)[None]),
    }

  def loss_fn(self, params, batch, dropout_rng):
    left, _, *both = self._compute_logits(params, batch, dropout_rng)
    loss = -sum(jnp.mean(jnp.diag(jax.nn.log_softmax(logits))) for logits in both)
    return loss, self._compute_metrics(left, loss)

  def predict_batch_with_aux(self, params, batch, rng=None):
    raise NotImplementedError

  def score_batch(self, params, batch, return_intermediates=False):
    return self._compute_logits(params, batch)[2]
