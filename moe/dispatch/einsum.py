"""Dispatch by masks, one-hot where tokens have places of their own: every move of a token is a matrix product.

What T5X does by default. Its cost per token grows with the group: use small groups.
"""

import functools

import jax
import jax.numpy as jnp

from moe.dispatch.capacity import KeepFn, apply_to_buffers
from moe.dispatch.sharding import constrain
from moe.dispatch.types import MlpParams, MlpSpec
from moe.routing.result import ExpertsFn, Routing


def einsum_dispatch(x: jax.Array, routing: Routing, params: MlpParams, spec: MlpSpec,
                    keep_fn: KeepFn | None = None, experts_fn: ExpertsFn | None = None) -> jax.Array:
  """Applies the experts by products with the masks of the routing.

  Args:
    x: <float>[G, T, D].
    routing: with `masks`.
    params: the experts' parameters.
    spec: what an expert computes.
    keep_fn: the hidden units that stay in dropout; None for all.
    experts_fn: what is done with the buffers; None: `params` and `keep_fn` say it.

  Returns:
    <spec.dtype>[G, T, D].
  """
  if experts_fn is None:
    experts_fn = functools.partial(apply_to_buffers, params=params, spec=spec, keep_fn=keep_fn)
  dispatch_mask, combine_weights = routing.masks()
  buffers = jnp.einsum('gtec,gtd->egcd', dispatch_mask.astype(spec.dtype), x.astype(spec.dtype))
  buffers = experts_fn(buffers, routing.choice_ids())
  y = jnp.einsum('gtec,egcd->gtd', combine_weights.astype(spec.dtype), buffers)
  return constrain(y, ('batch', None, None))
