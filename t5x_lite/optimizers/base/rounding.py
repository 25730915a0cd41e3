"""Stochastic rounding of bfloat16 parameters that have no float32 copy.

bfloat16 has 8 significant bits, so an update below 1/512 of a parameter disappears when the result is rounded to
nearest. Stochastic rounding rounds up or down with probabilities that make the mean exact (Gupta et al. 2015, "Deep
Learning with Limited Numerical Precision", https://arxiv.org/abs/1502.02551, section 3.1).

The random numbers are hashes of the element's index, the parameter's path and a key: JAX's generator would take longer
than the update itself. The hash is the finalizer of MurmurHash3 (Austin Appleby, public domain).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import Array, Params, PyTree

# Folded into the key of a step: above 2**31, so different from all numbers of micro-batches.
_STREAM = np.uint32(2**31 | zlib.crc32(b'stochastic_rounding'))


def key_of_step(step_key: Array | None) -> Array | None:
  """Return the key for the rounding of a step, given the step's key for dropout or None."""
  if step_key is None:
    return None
  return jax.random.fold_in(step_key, _STREAM)


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
  return _round(_seeds(key, [''])[0], values)


def _round(seed: Array, values: Array) -> Array:
  """Return the result of `round_to_bfloat16`, given a random uint32 scalar."""
  # bfloat16 is the upper half of float32. A random number below 2**16, added to the lower half, carries into the upper
  # half with the probability that the lower half is of 2**16.
  upper = (
    jax.lax.bitcast_convert_type(values, jnp.uint32) + (_hashes(seed, values.shape) >> 16)
  ) >> 16
  rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))


def _seeds(key: Array, paths: Sequence[str]) -> Array:
  """Return a seed for each parameter, uint32 [len(paths)], given a PRNG key and the paths."""
  words = jax.random.bits(key, (2,), jnp.uint32)
  hashes = np.array([zlib.crc32(path.encode()) for path in paths], np.uint32)
  return _mix(_mix(words[0] ^ hashes) ^ words[1])


def _hashes(seed: Array, shape: tuple[int, ...]) -> Array:
  """Return a uint32 array of a shape; each element is a hash of its index, so a device computes only its shard."""
  hashes = seed.reshape([1] * len(shape))
  for dim, size in enumerate(shape):
    # The factor, 2**32 over the golden ratio, keeps the indices of two rows apart.
    index = jax.lax.iota(jnp.uint32, size) * np.uint32(0x9E3779B9)
    other_dims = [other for other in range(len(shape)) if other != dim]
    hashes = _mix(hashes ^ jnp.expand_dims(index, other_dims))
  return hashes


def _mix(x: Array) -> Array:
  """Return a bijective hash of uint32 numbers, of which each bit of the argument changes half of the bits."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def widen(params: Params, extra_args: Mapping[str, Any]) -> tuple[Params, dict[str, Any]]:
  """Return the arguments of an update in float32, whose result `round_params` rounds.

  Args:
    params: the parameters.
    extra_args: values of the step, see `EXTRA_ARGS`.

  Returns:
    (parameters with float32 instead of bfloat16, values of the step whose functions take such parameters).
  """

  def of_wide(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_wide_params(wide, *args, **kwargs):
      narrow = jax.tree.map(lambda w, param: w.astype(param.dtype), wide, params)
      return function(narrow, *args, **kwargs)

    return of_wide_params

  def widened(param):
    if param.dtype == jnp.bfloat16:
      return param.astype(jnp.float32)
    return param

  wide_args = {}
  for name, value in extra_args.items():
    if callable(value):
      value = of_wide(value)
    wide_args[name] = value
  return jax.tree.map(widened, params), wide_args


def round_params(key: Array | None, wide: Params, params: Params) -> Params:
  """Return updated parameters in the dtypes that they had before the update.

  A parameter's random numbers depend on the key and on its path, and on nothing else: not on other parameters, on the
  mesh or on layers that are stacked.

  Args:
    key: PRNG key of the step.
    wide: updated parameters, float32 where `params` is bfloat16.
    params: the parameters before the update.

  Raises:
    ConfigError: the key is missing.
  """
  if key is None:
    raise ConfigError(
      'An optimizer with stochastic_rounding=True was updated without a key. Pass rounding_key=..., a '
      'PRNG key that differs in each step, to apply_gradient.'
    )

  narrow = [path for path, param in tree_utils.named_leaves(params) if param.dtype == jnp.bfloat16]
  single_paths = []
  starts = {}
  for path in narrow:
    starts[path] = len(single_paths)
    single_paths += layer_stacks.paths_of(path)
  # In one vector, since on a CPU each scalar would be a kernel.
  seeds = _seeds(key, single_paths)

  def of_param(path: str, new: Array) -> Array:
    if path not in starts:
      return new
    start = starts[path]
    if layer_stacks.is_stacked(path):
      return jax.vmap(_round)(seeds[start : start + new.shape[0]], new)
    return _round(seeds[start], new)

  return tree_utils.map_with_names(of_param, wide)


def has_bfloat16(params: PyTree) -> bool:
  """Return True if a parameter, or the shape of one, is bfloat16."""
  return any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
