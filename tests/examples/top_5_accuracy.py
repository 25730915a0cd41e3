"""A metric of training and evaluation: how often the target is among the five most probable tokens."""

from clu import metrics
import jax
import jax.numpy as jnp


def top_5_accuracy(logits, batch):
  targets = batch['decoder_target_tokens']
  _, best = jax.lax.top_k(logits, 5)
  is_counted = batch.get('decoder_loss_weights', targets) != 0
  num_hits = jnp.sum(jnp.any(best == targets[..., None], axis=-1) & is_counted, dtype=jnp.float32)
  return {
    'accuracy_top_5': metrics.Average(total=num_hits, count=jnp.sum(is_counted, dtype=jnp.float32))
  }
