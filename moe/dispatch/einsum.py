"""Dispatch by one-hot masks: every move of a token is a matrix product.

What T5X does by default. Its cost per token grows with the group: use small groups.
"""

import functools

import jax
import jax.numpy as jnp

from moe.dispatch.capacity import ExpertsFn, KeepFn, apply_to_buffers, buffer_choice_ids, num_places
from moe.dispatch.sharding import constrain
from moe.dispatch.types import MlpParams, MlpSpec
from moe.routing.types import ExpertChoice, TokenChoice


def masks(routing: TokenChoice | ExpertChoice) -> tuple[jax.Array, jax.Array]:
  """Returns (dispatch mask, combine weights), float32 [G, T, E, C] both, C no more than T."""
  if isinstance(routing, ExpertChoice):
    chosen = jax.nn.one_hot(routing.token_index, routing.num_tokens, dtype=jnp.float32)  # [G, E, C, T]
    return jnp.moveaxis(chosen, 3, 1), jnp.einsum('gect,gec->gtec', chosen, routing.gates)
  experts = jax.nn.one_hot(routing.expert_index, routing.num_experts, dtype=jnp.float32)
  places = jax.nn.one_hot(routing.position, num_places(routing), dtype=jnp.float32)
  return (jnp.einsum('gtke,gtkc->gtec', experts, places),
          jnp.einsum('gtke,gtkc,gtk->gtec', experts, places, routing.gates))


def einsum_dispatch(x: jax.Array, routing: TokenChoice | ExpertChoice, params: MlpParams, spec: MlpSpec,
                    keep_fn: KeepFn | None = None, experts_fn: ExpertsFn | None = None) -> jax.Array:
  """Applies the experts by one-hot products.

  Args:
    x: <float>[G, T, D].
    routing: with a capacity.
    params: the experts' parameters.
    spec: what an expert computes.
    keep_fn: the hidden units that stay in dropout; None for all.
    experts_fn: what is done with the buffers; None: `params` and `keep_fn` say it.

  Returns:
    <spec.dtype>[G, T, D].
  """
  if experts_fn is None:
    experts_fn = functools.partial(apply_to_buffers, params=params, spec=spec, keep_fn=keep_fn)
  dispatch_mask, combine_weights = masks(routing)
  buffers = jnp.einsum('gtec,gtd->egcd', dispatch_mask.astype(spec.dtype), x.astype(spec.dtype))
  buffers = experts_fn(buffers, buffer_choice_ids(routing))
  y = jnp.einsum('gtec,egcd->gtd', combine_weights.astype(spec.dtype), buffers)
  return constrain(y, ('batch', None, None))
