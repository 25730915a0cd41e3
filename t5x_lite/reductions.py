"""Reductions of arrays that keep NaN."""

import jax
import jax.numpy as jnp


def largest_magnitude(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
  """Return the largest absolute value, or NaN if an element is NaN.

  XLA's maximum of larger arrays leaves NaN out on CPUs (JAX 0.10.2, `jnp.max` of 512 x 512 elements).

  Args:
    x: <float>[...].
    axis: dims to reduce; None for all.

  Returns:
    <float>[other dims], 0 without elements.
  """
  largest = jnp.max(jnp.abs(x), axis=axis, initial=0)
  return jnp.where(jnp.any(jnp.isnan(x), axis=axis), jnp.nan, largest)
