"""An encoder-decoder with a prompt in front of its inputs, in training, evaluation, scores and predictions.

T5X computes the logits of losses and scores by `_compute_logits`, here with the arguments that this class has and no
more; `predict_batch_with_aux` gets the keyword arguments of T5X.
"""

import jax.numpy as jnp
from t5x import models


class PromptedModel(models.EncoderDecoderModel):
  def __init__(self, *args, prompt=(7, 8), **kwargs):
    super().__init__(*args, **kwargs)
    self._prompt = prompt

  def _with_prompt(self, batch):
    inputs = batch['encoder_input_tokens']
    prompt = jnp.broadcast_to(
      jnp.array(self._prompt, inputs.dtype), (len(inputs), len(self._prompt))
    )
    return {**batch, 'encoder_input_tokens': jnp.concatenate([prompt, inputs], axis=1)}

  def _compute_logits(self, params, batch, dropout_rng=None):
    return super()._compute_logits(params, self._with_prompt(batch), dropout_rng)

  def predict_batch_with_aux(self, params, batch, rng=None, decoder_params=None, num_decodes=1):
    return super().predict_batch_with_aux(
      params, self._with_prompt(batch), rng, decoder_params, num_decodes=num_decodes
    )
