"""Stochastic rounding of bfloat16 parameters that have no float32 copy.

bfloat16 has 8 significant bits, so an update below 1/512 of a parameter disappears when the result is rounded to
nearest. Stochastic rounding rounds up or down with probabilities that make the mean exact (Gupta et al. 2015, "Deep
Learning with Limited Numerical Precision", https://arxiv.org/abs/1502.02551, section 3.1).
"""

from collections.abc import Callable, Mapping
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import Array, Params, PyTree

# Folded into the key of a step: above 2**31, so that it is no number of a micro-batch.
_STREAM = np.uint32(2**31 | zlib.crc32(b'stochastic_rounding'))


def key_of_step(step_key: Array | None) -> Array | None:
  """Return the key for the rounding of a step, given the step's key for dropout; None if there is none."""
  return None if step_key is None else jax.random.fold_in(step_key, _STREAM)


def round_to_bfloat16(key: Array, values: Array) -> Array:
  """Return `values` rounded to one of the two nearest bfloat16 numbers, such that the mean of the result is the value.

  Numbers that bfloat16 represents are unchanged, also infinities; NaN remains NaN.

  Args:
    key: a PRNG key.
    values: float32 array of any shape.

  Returns:
    bfloat16 array of the same shape.

  >>> round_to_bfloat16(jax.random.key(0), jnp.float32([1.0, -0.0, jnp.inf])).tolist()
  [1.0, -0.0, inf]
  """
  # bfloat16 is the upper half of float32. A random number below 2**16, added to the lower half, carries into the upper
  # half with the probability that the lower half is of 2**16.
  noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
  upper = (jax.lax.bitcast_convert_type(values, jnp.uint32) + noise) >> 16
  rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))


def widen(params: Params, extra_args: Mapping[str, Any]) -> tuple[Params, dict[str, Any]]:
  """Return the arguments of an update in float32, whose result `round_params` rounds.

  Args:
    params: the parameters.
    extra_args: values of the step, see `EXTRA_ARGS`.

  Returns:
    (parameters with float32 instead of bfloat16, values of the step whose functions take such parameters).
  """

  def of_wide(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda wide, *args, **kwargs: function(
        jax.tree.map(lambda w, param: w.astype(param.dtype), wide, params), *args, **kwargs)

  wide = jax.tree.map(lambda param: param.astype(jnp.float32) if param.dtype == jnp.bfloat16 else param, params)
  return wide, {name: of_wide(value) if callable(value) else value for name, value in extra_args.items()}


def round_params(key: Array | None, wide: Params, params: Params) -> Params:
  """Return updated parameters in the dtypes that they had before the update.

  A parameter's random numbers depend on the key and on its path, and on nothing else: not on other parameters, on the
  mesh (with JAX's default generator, threefry2x32) or on layers that are stacked.

  Args:
    key: PRNG key of the step.
    wide: updated parameters, float32 where `params` is bfloat16.
    params: the parameters before the update.

  Raises:
    ConfigError: the key is missing.
  """
  if key is None:
    raise ConfigError('An optimizer with stochastic_rounding=True was updated without a key. Pass rounding_key=..., a '
                      'PRNG key that differs in each step, to apply_gradient.')

  def of_param(path: str, new: Array, old: Array) -> Array:
    if old.dtype != jnp.bfloat16:
      return new
    keys = [jax.random.fold_in(key, np.uint32(zlib.crc32(single.encode()))) for single in layer_stacks.paths_of(path)]
    if layer_stacks.is_stacked(path):
      return jax.vmap(round_to_bfloat16)(jnp.stack(keys), new)
    return round_to_bfloat16(keys[0], new)

  return tree_utils.map_with_names(of_param, wide, params)


def has_bfloat16(params: PyTree) -> bool:
  """Return True if a parameter, or the shape of one, is bfloat16."""
  return any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
