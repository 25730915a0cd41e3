"""Dispatch into buffers of equal size, [E, C, D] of a group: by gathers, or by products with the masks of the routing.

It needs no kernel, so it is fast on every backend; routings need a capacity, which may drop choices. Products with
masks are T5X's default. Their cost per token grows with the size of the group, so groups should be small.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from moe.dispatch.mlp import DropoutMask
from moe.dispatch.mlp import batched_mlp
from moe.dispatch.sharding import constrain
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.routing.result import ExpertsFn
from moe.routing.result import Routing
from moe.routing.types import ChoiceRouting

# Ids of the choices of N rows, int32 [N] -> hidden units that dropout keeps.
MaskFn = Callable[[jax.Array], DropoutMask]

BUFFER_AXES = ('expert', 'expert_replicas', None, 'embed')


def capacity_dispatch(
  x: jax.Array,
  routing: ChoiceRouting,
  params: MlpParams,
  spec: MlpSpec,
  mask_fn: MaskFn | None = None,
  experts_fn: ExpertsFn | None = None,
) -> jax.Array:
  """Apply the experts to buffers that are filled and emptied by gathers.

  Args:
    x: <float>[G, T, D].
    routing: routing with a capacity.
    params: parameters of the experts.
    spec: computation of an expert.
    mask_fn: hidden units that dropout keeps; None for all.
    experts_fn: function of the buffers; None for the experts of `params` with `mask_fn`.

  Returns:
    <spec.dtype>[G, T, D].
  """
  experts_fn = experts_fn or functools.partial(
    _apply_to_buffers, params=params, spec=spec, mask_fn=mask_fn
  )
  num_groups, group_size, width = x.shape
  tokens = x.astype(spec.dtype).reshape(-1, width)
  y = routing.through_buffers(tokens, experts_fn)
  return constrain(y.reshape(num_groups, group_size, width), ('batch', None, None))


def einsum_dispatch(
  x: jax.Array,
  routing: Routing,
  params: MlpParams,
  spec: MlpSpec,
  mask_fn: MaskFn | None = None,
  experts_fn: ExpertsFn | None = None,
) -> jax.Array:
  """Apply the experts by products with the masks of the routing; see `capacity_dispatch`."""
  experts_fn = experts_fn or functools.partial(
    _apply_to_buffers, params=params, spec=spec, mask_fn=mask_fn
  )
  # [groups, tokens, experts, slots] each.
  dispatch_mask, combine_weights = routing.masks()
  # [experts, groups, slots, width]: for choices, products with 0 and 1, which are exact in any dtype.
  buffers = jnp.einsum('gtec,gtd->egcd', dispatch_mask.astype(spec.dtype), x.astype(spec.dtype))
  buffers = experts_fn(buffers, routing.choice_ids())
  # [groups, tokens, width]: sum of the outputs of a token's experts, weighted by the gates.
  y = jnp.einsum('gtec,egcd->gtd', combine_weights.astype(spec.dtype), buffers)
  return constrain(y, ('batch', None, None))


def _apply_to_buffers(
  buffers: jax.Array,
  choice_ids: jax.Array,
  *,
  params: MlpParams,
  spec: MlpSpec,
  mask_fn: MaskFn | None,
) -> jax.Array:
  """Return the experts' outputs <dtype>[E, G, C, D] for `buffers` of the same shape; see `ExpertsFn`."""
  shape = buffers.shape
  num_experts = shape[0]
  keep = None
  if mask_fn is not None:
    # [experts, groups * slots, hidden units]: drawn by choice, so that dropout is the same in all forms of dispatch.
    mask = mask_fn(choice_ids.reshape(-1)).of_all()
    keep = mask.reshape(num_experts, -1, params.wo.shape[1])
  # [experts, groups * slots, width]: an expert has the same parameters for all groups.
  rows = constrain(buffers, BUFFER_AXES).reshape(num_experts, -1, shape[-1])
  outputs = batched_mlp(params, rows, spec, keep)
  return constrain(outputs.reshape(shape), BUFFER_AXES)
