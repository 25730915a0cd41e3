"""AdamW that clips the update of each array to a root mean square. https://arxiv.org/abs/1804.04235, section 6"""

import optax

from t5x_lite import optimizers


def _clipped_adamw(learning_rate, b1=0.9, b2=0.999, threshold=1.0, weight_decay=0.0):
  return optax.chain(
    optax.scale_by_adam(b1, b2),
    optax.clip_by_block_rms(threshold),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


# Without a learning rate it takes the trainer's, like all other optimizers.
clipped_adamw = optimizers.wrap_optax_optimizer(_clipped_adamw, takes_learning_rate=True)
