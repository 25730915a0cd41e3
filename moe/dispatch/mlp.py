"""The experts' feed-forward blocks on buffers of equal size, and the dropout that all forms of dispatch share."""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moe.dispatch import sharding
from moe.dispatch.types import MlpParams, MlpSpec, check_params

_DROPOUT_LEVELS = 1 << 16


def activate(pre: Sequence[jax.Array], keep: jax.Array | None, spec: MlpSpec) -> jax.Array:
  """Return the hidden units: the product of the activated projections, with dropout.

  Args:
    pre: one projection <float>[..., F] per activation.
    keep: bool [..., F], the units that stay, or None for all of them.
    spec: what an expert computes.

  Returns:
    <float>[..., F] in the dtype of `pre`.
  """
  hidden = functools.reduce(operator.mul, [fn(x) for fn, x in zip(spec.activation_fns, pre, strict=True)])
  if keep is None:
    return hidden
  return jnp.where(keep, hidden * (1.0 / kept_share(spec.dropout_rate)), 0.0).astype(hidden.dtype)


def kept_share(dropout_rate: float) -> float:
  """Return the probability that a hidden unit stays: 1 - `dropout_rate`, to the nearest of 2^16 levels."""
  return 1.0 - _dropped_levels(dropout_rate) / _DROPOUT_LEVELS


def _dropped_levels(dropout_rate: float) -> int:
  return min(round(dropout_rate * _DROPOUT_LEVELS), _DROPOUT_LEVELS - 1)


def dropout_keep(rng: jax.Array, choice_ids: jax.Array, hidden_dim: int, dropout_rate: float) -> jax.Array:
  """Return which hidden units of each row stay.

  A row's mask depends on the key and on which choice of which token it holds, not on where the row lies: so every form
  of dispatch, and every mesh, drops the same units.

  Args:
    rng: a key.
    choice_ids: int32 [...]; for a choice its place in the flattened [G, T, K] (for an expert's choice: token * E + e).
    hidden_dim: F.
    dropout_rate: share of the units to drop.

  Returns:
    bool [..., F].
  """
  # 16 bits decide about a unit, two units share a word.
  num_words = -(-hidden_dim // 2)

  def words(choice):
    return jax.random.bits(jax.random.fold_in(rng, choice), (num_words,), jnp.uint32)

  bits = jax.vmap(words)(choice_ids.reshape(-1))
  halves = jnp.concatenate([bits & 0xFFFF, bits >> 16], axis=-1)[:, :hidden_dim]
  return (halves >= _dropped_levels(dropout_rate)).reshape(*choice_ids.shape, hidden_dim)


def batched_mlp(params: MlpParams, x: jax.Array, spec: MlpSpec, keep: jax.Array | None = None) -> jax.Array:
  """Let every expert transform its own buffer.

  Args:
    params: the experts' parameters.
    x: <float>[E, C, D], cast to `spec.dtype`.
    spec: what an expert computes.
    keep: bool [E, C, F], hidden units that stay in dropout (`dropout_keep`); None for all.

  Returns:
    <spec.dtype>[E, C, D].

  Raises:
    ConfigError: shapes that do not fit each other.
  """
  check_params(params, spec, x.shape[-1])
  x = x.astype(spec.dtype)
  biases = params.wi_bias or (None,) * len(params.wi)
  pre = [_project(x, kernel, bias, spec) for kernel, bias in zip(params.wi, biases, strict=True)]
  hidden = activate(pre, keep, spec)
  hidden = sharding.constrain(hidden, ('expert', 'expert_replicas', 'expert_mlp'))
  return _project(hidden, params.wo, params.wo_bias, spec)


def _project(x, kernel, bias, spec):
  """Return <dtype>[E, C, out] of x [E, C, in] and kernel [E, in, out], bias [E, out] or None."""
  y = jnp.einsum('eci,eio->eco', x, kernel.astype(spec.dtype))
  return y if bias is None else y + bias.astype(spec.dtype)[:, None, :]
