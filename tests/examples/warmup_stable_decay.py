"""A schedule: linear warm-up, a constant rate, and a decay by 1 - sqrt. https://arxiv.org/abs/2405.18392"""

import jax.numpy as jnp


def warmup_stable_decay(peak, warmup_steps, decay_steps, total_steps):
  """Returns a function from the step, int32 [], to its learning rate, float32 []."""

  def learning_rate(step):
    warmup = jnp.minimum(1.0, (step + 1) / warmup_steps)
    decayed = jnp.clip((step - (total_steps - decay_steps)) / decay_steps, 0.0, 1.0)
    return peak * warmup * (1.0 - jnp.sqrt(decayed))

  return learning_rate
