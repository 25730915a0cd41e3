"""Dispatch into buffers of equal size: a gather into [E, C, D], a batched product, a gather back.

It needs no kernel, so every backend runs it well; it takes routings with a capacity, which may drop choices.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moe.routing import plan as plans
from moe.dispatch.mlp import batched_mlp
from moe.dispatch.sharding import constrain
from moe.dispatch.types import MlpParams, MlpSpec
from moe.routing.types import ExpertChoice, TokenChoice
from t5x_lite.errors import ConfigError

# From the ids of choices, int32 [...], to the hidden units that stay in dropout, bool [..., F].
KeepFn = Callable[[jax.Array], jax.Array]

# Experts on buffers <float>[E, G, C, D] of choices with these ids, int32 [E, G, C]: the same shape again.
ExpertsFn = Callable[[jax.Array, jax.Array], jax.Array]

BUFFER_AXES = ('expert', 'expert_replicas', None, 'embed')


def num_places(routing: TokenChoice | ExpertChoice) -> int:
  """Returns the places of an expert's buffer for a group: its capacity, or the group's tokens where they are fewer.

  A token chooses an expert once at most, so no more places are ever filled.
  """
  if isinstance(routing, TokenChoice):
    return min(routing.capacity, routing.expert_index.shape[1])
  return routing.capacity


def buffer_choice_ids(routing: TokenChoice | ExpertChoice) -> jax.Array:
  """Returns the id of the choice in each of the C = `num_places` of the buffers, int32 [E, G, C]; past the last: none.

  A token's choice k has id token * K + k, the choice of a token by an expert token * E + expert.
  """
  if isinstance(routing, TokenChoice):
    num_groups, places = routing.expert_index.shape[0], num_places(routing)
    plan = plans.plan_buffers(routing.expert_index, routing.position, routing.num_experts, places)
    return plan.row_choice.reshape(routing.num_experts, num_groups, places)
  num_groups, num_experts, _ = routing.token_index.shape
  if num_experts * (num_groups * routing.num_tokens + 1) >= 2**31:
    raise ConfigError(f'{num_experts} experts that choose among {num_groups} x {routing.num_tokens} tokens have more '
                      'choices than int32 numbers. Use a smaller batch, or micro-batches.')
  token = jnp.moveaxis(_global_tokens(routing), 1, 0)
  return token * num_experts + jnp.arange(num_experts, dtype=jnp.int32)[:, None, None]


def _global_tokens(routing: ExpertChoice) -> jax.Array:
  """Returns the chosen tokens among all G * T, int32 [G, E, C]; G * T: none."""
  num_groups, num_tokens = routing.token_index.shape[0], routing.num_tokens
  group = jnp.arange(num_groups, dtype=jnp.int32)[:, None, None]
  is_token = routing.token_index < num_tokens
  return jnp.where(is_token, group * num_tokens + routing.token_index, num_groups * num_tokens).astype(jnp.int32)


def capacity_dispatch(x: jax.Array, routing: TokenChoice | ExpertChoice, params: MlpParams, spec: MlpSpec,
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
  if isinstance(routing, ExpertChoice):
    y = _chosen_by_experts(tokens, routing, spec, experts_fn)
  else:
    places = num_places(routing)
    plan = plans.plan_buffers(routing.expert_index, routing.position, routing.num_experts, places)
    shape = (routing.num_experts, num_groups, places)
    rows = experts_fn(plans.dispatch(tokens, plan).reshape(*shape, width), plan.row_choice.reshape(shape))
    y = plans.combine(rows.reshape(-1, width), routing.gates.reshape(tokens.shape[0], -1), plan)
  return constrain(y.reshape(num_groups, group_size, width), ('batch', None, None))


def _chosen_by_experts(tokens, routing, spec, experts_fn):
  """Returns <dtype>[tokens, D]; a token has any number of choices, so their sum is a scatter."""
  token, gates = jnp.moveaxis(_global_tokens(routing), 1, 0), jnp.moveaxis(routing.gates, 1, 0)
  rows = jnp.take(tokens, token, axis=0, mode='fill', fill_value=0)
  weighted = experts_fn(rows, buffer_choice_ids(routing)).astype(jnp.float32) * gates[..., None]
  return jnp.zeros(tokens.shape, jnp.float32).at[token].add(weighted, mode='drop').astype(spec.dtype)


def apply_to_buffers(buffers: jax.Array, choice_ids: jax.Array, *, params: MlpParams, spec: MlpSpec,
                     keep_fn: KeepFn | None) -> jax.Array:
  """Returns what the experts make of their buffers, <dtype>[E, G, C, D] of the same; see `ExpertsFn`."""
  shape, num_experts, width = buffers.shape, buffers.shape[0], buffers.shape[-1]
  keep = None if keep_fn is None else keep_fn(choice_ids.reshape(num_experts, -1))
  buffers = constrain(buffers, BUFFER_AXES).reshape(num_experts, -1, width)
  return constrain(batched_mlp(params, buffers, spec, keep).reshape(shape), BUFFER_AXES)
