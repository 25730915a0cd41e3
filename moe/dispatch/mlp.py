"""Experts' feed-forward blocks on buffers of equal size, and the dropout of all forms of dispatch."""

from collections.abc import Sequence
import functools
import operator

import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from moe.dispatch import sharding
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.dispatch.types import check_params
from t5x_lite import layers

_DROPOUT_LEVELS = 1 << 16


def activate(pre: Sequence[jax.Array], keep: jax.Array | None, spec: MlpSpec) -> jax.Array:
  """Return the hidden units: the product of the activated projections, with dropout.

  Args:
    pre: one projection <float>[..., F] per activation.
    keep: bool [..., F], hidden units that dropout keeps; None for all.
    spec: computation of an expert.

  Returns:
    <float>[..., F] in the dtype of `pre`.
  """
  hidden = functools.reduce(
    operator.mul, [fn(x) for fn, x in zip(spec.activation_fns, pre, strict=True)]
  )
  if keep is None:
    return hidden
  return jnp.where(keep, hidden * (1.0 / kept_share(spec.dropout_rate)), 0.0).astype(hidden.dtype)


def kept_share(dropout_rate: float) -> float:
  """Return the probability that dropout keeps a hidden unit: 1 - `dropout_rate`, rounded to 2^16 levels."""
  return 1.0 - _dropped_levels(dropout_rate) / _DROPOUT_LEVELS


def _dropped_levels(dropout_rate: float) -> int:
  return min(round(dropout_rate * _DROPOUT_LEVELS), _DROPOUT_LEVELS - 1)


def dropout_keep(
  rng: jax.Array, choice_ids: jax.Array, hidden_dim: int, dropout_rate: float
) -> jax.Array:
  """Return the hidden units of each row that dropout keeps.

  The mask of a row depends only on the key and on its choice, so that all forms of dispatch and all meshes drop the
  same units.

  Args:
    rng: key.
    choice_ids: int32 [...], index of a choice in the flattened [G, T, K] (for expert choice: token * E + expert).
    hidden_dim: number of hidden units, F.
    dropout_rate: share of dropped units.

  Returns:
    bool [..., F].
  """
  # A unit needs 16 bits, so a word is enough for two units.
  num_words = -(-hidden_dim // 2)

  def words(choice):
    return jax.random.bits(jax.random.fold_in(rng, choice), (num_words,), jnp.uint32)

  # [choices, words]: a choice's bits depend on its id only, wherever its row is.
  bits = jax.vmap(words)(choice_ids.reshape(-1))
  halves = jnp.concatenate([bits & 0xFFFF, bits >> 16], axis=-1)[:, :hidden_dim]
  keep = halves >= _dropped_levels(dropout_rate)
  return keep.reshape(*choice_ids.shape, hidden_dim)


@flax.struct.dataclass
class DropoutMask:
  """Hidden units that dropout keeps in each of N rows, computed for some rows at a time.

  Attributes:
    rng: key.
    choice_ids: int32 [N], ids of the rows' choices, see `dropout_keep`.
    hidden_dim: number of hidden units, F.
    dropout_rate: share of dropped units.
    first: int32 [], first hidden unit of this device; None if it has all.
    size: number of hidden units of this device; None for all.
  """

  rng: jax.Array
  choice_ids: jax.Array
  hidden_dim: int = flax.struct.field(pytree_node=False)
  dropout_rate: float = flax.struct.field(pytree_node=False)
  first: jax.Array | None = None
  size: int | None = flax.struct.field(pytree_node=False, default=None)

  def of_rows(self, rows: jax.Array) -> jax.Array:
    """Return bool [..., F of this device] for `rows` int32 [...], row numbers."""
    choice_ids = jnp.take(self.choice_ids, rows, mode='clip')
    keep = dropout_keep(self.rng, choice_ids, self.hidden_dim, self.dropout_rate)
    if self.first is None or self.size is None:
      return keep
    # A device draws the bits of all hidden units and keeps its own, so that results do not depend on the mesh.
    return jax.lax.dynamic_slice_in_dim(keep, self.first, self.size, axis=keep.ndim - 1)

  def of_all(self) -> jax.Array:
    """Return bool [N, F of this device]."""
    return self.of_rows(jnp.arange(self.choice_ids.shape[0], dtype=jnp.int32))


def batched_mlp(
  params: MlpParams, x: jax.Array, spec: MlpSpec, keep: jax.Array | None = None
) -> jax.Array:
  """Return the experts' outputs for their buffers.

  Args:
    params: parameters of the experts.
    x: <float>[E, C, D], cast to `spec.dtype`.
    spec: computation of an expert.
    keep: bool [E, C, F], hidden units that dropout keeps (`dropout_keep`); None for all.

  Returns:
    <spec.dtype>[E, C, D].

  Raises:
    ConfigError: inconsistent shapes.
  """
  check_params(params, spec, x.shape[-1])
  x = x.astype(spec.dtype)
  biases = params.wi_bias or (None,) * len(params.wi)
  # [experts, slots, hidden units] each: one projection for each factor of a gated activation.
  pre = [_project(x, kernel, bias, spec) for kernel, bias in zip(params.wi, biases, strict=True)]
  hidden = activate(checkpoint_name(pre, 'expert_hidden'), keep, spec)
  hidden = sharding.constrain(hidden, ('expert', 'expert_replicas', 'expert_mlp'))
  # [experts, slots, width].
  outputs = _project(hidden, params.wo, params.wo_bias, spec)
  return checkpoint_name(outputs, 'expert_output')


def _project(x, kernel, bias, spec):
  """Return <dtype>[E, C, out] of x [E, C, in] and kernel [E, in, out], bias [E, out] or None."""
  operands = layers.operand_dtype(kernel, spec.dtype)
  y = jnp.einsum(
    'eci,eio->eco', x.astype(operands), kernel.astype(operands), preferred_element_type=spec.dtype
  )
  if bias is None:
    return y
  return y + bias.astype(spec.dtype)[:, None, :]
