"""Rotary positions: queries and keys are rotated by their positions. https://arxiv.org/abs/2104.09864"""

import functools

import jax
import jax.numpy as jnp

from t5x_lite.networks import t5


def rotate(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
  """Turns pairs (i, i + head_dim/2) of <dtype>[batch, length, heads, head_dim] by position * base^(-2i/head_dim)."""
  half = x.shape[-1] // 2
  angle = positions[..., None, None] * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = (
    first * jnp.cos(angle) - second * jnp.sin(angle),
    second * jnp.cos(angle) + first * jnp.sin(angle),
  )
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotary_positions(base: float = 10_000.0) -> t5.PositionEncoding:
  """Returns rotary positions, which replace T5's relative position biases; `head_dim` must be even."""
  return t5.PositionEncoding(encode_positions_fn=functools.partial(rotate, base=base))
