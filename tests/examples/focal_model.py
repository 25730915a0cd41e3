"""An encoder-decoder model with the focal loss, which weights each token by how far its probability is from 1."""

import jax
import jax.numpy as jnp

from t5x_lite import models


class FocalModel(models.EncoderDecoderModel):
  """EncoderDecoderModel with the focal loss."""

  def __init__(self, *args, gamma=2.0, **kwargs):
    super().__init__(*args, **kwargs)
    self.gamma = gamma

  def weighted_loss(self, outputs, targets, weights, loss_normalizing_factor):
    """See base class."""
    log_probs = jax.nn.log_softmax(outputs.astype(jnp.float32))
    # [batch, length]
    log_prob = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    focus = (1.0 - jnp.exp(log_prob)) ** self.gamma
    if weights is not None:
      focus *= weights
    return super().weighted_loss(outputs, targets, focus, loss_normalizing_factor)
