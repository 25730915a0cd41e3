"""Dispatch into buffers of equal size: a gather into [E, C, D], a batched product, a gather back.

It needs no kernel, so every backend runs it well; it takes routings with a capacity, which may drop choices.
"""

import functools
from collections.abc import Callable

import jax

from moe.dispatch.mlp import batched_mlp
from moe.dispatch.sharding import constrain
from moe.dispatch.types import MlpParams, MlpSpec
from moe.routing.result import ExpertsFn, Routing

# From the ids of choices, int32 [...], to the hidden units that stay in dropout, bool [..., F].
KeepFn = Callable[[jax.Array], jax.Array]

BUFFER_AXES = ('expert', 'expert_replicas', None, 'embed')


def capacity_dispatch(x: jax.Array, routing: Routing, params: MlpParams, spec: MlpSpec,
                      keep_fn: KeepFn | None = None, experts_fn: ExpertsFn | None = None) -> jax.Array:
  """Applies the experts to buffers.

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
  num_groups, group_size, width = x.shape
  tokens = x.astype(spec.dtype).reshape(-1, width)
  y = routing.through_buffers(tokens, experts_fn)
  return constrain(y.reshape(num_groups, group_size, width), ('batch', None, None))


def apply_to_buffers(buffers: jax.Array, choice_ids: jax.Array, *, params: MlpParams, spec: MlpSpec,
                     keep_fn: KeepFn | None) -> jax.Array:
  """Returns what the experts make of their buffers, <dtype>[E, G, C, D] of the same; see `ExpertsFn`."""
  shape, num_experts, width = buffers.shape, buffers.shape[0], buffers.shape[-1]
  keep = None if keep_fn is None else keep_fn(choice_ids.reshape(num_experts, -1))
  buffers = constrain(buffers, BUFFER_AXES).reshape(num_experts, -1, width)
  return constrain(batched_mlp(params, buffers, spec, keep).reshape(shape), BUFFER_AXES)
