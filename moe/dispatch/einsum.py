"""Dispatch by one-hot masks: every move of a token is a matrix product.

What T5X does by default. It partitions well anywhere, and its cost per token grows with the group: use small groups.
"""

import jax
import jax.numpy as jnp

from moe.dispatch.capacity import BUFFER_AXES, KeepFn, buffer_choice_ids
from moe.dispatch.mlp import batched_mlp
from moe.dispatch.sharding import constrain
from moe.dispatch.types import MlpParams, MlpSpec
from moe.routing.types import ExpertChoice, TokenChoice


def masks(routing: TokenChoice | ExpertChoice) -> tuple[jax.Array, jax.Array]:
  """Returns (dispatch mask, combine weights), float32 [G, T, E, C] both."""
  if isinstance(routing, ExpertChoice):
    chosen = jax.nn.one_hot(routing.token_index, routing.num_tokens, dtype=jnp.float32)  # [G, E, C, T]
    return jnp.moveaxis(chosen, 3, 1), jnp.einsum('gect,gec->gtec', chosen, routing.gates)
  experts = jax.nn.one_hot(routing.expert_index, routing.num_experts, dtype=jnp.float32)
  places = jax.nn.one_hot(routing.position, routing.capacity, dtype=jnp.float32)
  return (jnp.einsum('gtke,gtkc->gtec', experts, places),
          jnp.einsum('gtke,gtkc,gtk->gtec', experts, places, routing.gates))


def einsum_dispatch(x: jax.Array, routing: TokenChoice | ExpertChoice, params: MlpParams, spec: MlpSpec,
                    keep_fn: KeepFn | None = None) -> jax.Array:
  """Applies the experts by one-hot products.

  Args:
    x: <float>[G, T, D].
    routing: with a capacity.
    params: the experts' parameters.
    spec: what an expert computes.
    keep_fn: the hidden units that stay in dropout; None for all.

  Returns:
    <spec.dtype>[G, T, D].
  """
  dispatch_mask, combine_weights = masks(routing)
  num_groups, _, num_experts, capacity = dispatch_mask.shape
  buffers = jnp.einsum('gtec,gtd->egcd', dispatch_mask.astype(spec.dtype), x.astype(spec.dtype))
  buffers = constrain(buffers, BUFFER_AXES)
  keep = None
  if keep_fn is not None:
    keep = keep_fn(buffer_choice_ids(routing)).reshape(num_experts, num_groups * capacity, -1)
  buffers = batched_mlp(params, buffers.reshape(num_experts, num_groups * capacity, -1), spec, keep)
  buffers = constrain(buffers.reshape(num_experts, num_groups, capacity, -1), BUFFER_AXES)
  y = jnp.einsum('gtec,egcd->gtd', combine_weights.astype(spec.dtype), buffers)
  return constrain(y, ('batch', None, None))
