"""Root-mean-square normalization."""

from typing import Any

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
from jax import lax
import jax.numpy as jnp

from t5x_lite.layers.dense import Initializer


class LayerNorm(nn.Module):
  """T5's layer norm: division by the root mean square of the last dim, and a scale; no mean, no bias.

  The statistics are float32 for any `dtype`. Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, section 4.

  Attributes:
    epsilon: constant added to the mean square.
    dtype: dtype of the result.
    scale_init: initializer of the float32 parameter `scale` [features].
  """

  epsilon: float = 1e-6
  dtype: Any = jnp.float32
  scale_init: Initializer = nn.initializers.ones

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalize <float>[..., features] to <dtype> of the same shape."""
    x = x.astype(jnp.float32)
    scale = nn_partitioning.param_with_axes(
      'scale', self.scale_init, (x.shape[-1],), jnp.float32, axes=('embed',)
    )
    inverse_rms = lax.rsqrt(jnp.mean(lax.square(x), axis=-1, keepdims=True) + self.epsilon)
    return (x * inverse_rms).astype(self.dtype) * scale.astype(self.dtype)
