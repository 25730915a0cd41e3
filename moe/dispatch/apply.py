"""One call for all forms of dispatch: chooses the form, refuses what would compute densely, applies the experts."""

import functools
import math

import jax
import jax.numpy as jnp

from moe.dispatch import expert_parallel
from moe.dispatch.capacity import KeepFn, capacity_dispatch, einsum_dispatch
from moe.dispatch.grouped import KERNELS_OF_BACKEND, grouped_tokens, select_kernel
from moe.dispatch.mlp import dropout_keep
from moe.dispatch.types import DispatchStats, MlpParams, MlpSpec, check_params
from moe.routing import plan as plans
from moe.routing.result import Routing
from moe.routing.types import TokenChoice
from t5x_lite import layers
from t5x_lite.errors import ConfigError, did_you_mean

METHODS = ('auto', 'einsum', 'capacity', 'grouped')


def apply_experts(x: jax.Array, routing: Routing, params: MlpParams, spec: MlpSpec, *,
                  method: str = 'auto', dropout_rng: jax.Array | None = None,
                  receive_factor: float | None = None) -> tuple[jax.Array, DispatchStats]:
  """Send every token to its experts and returns the sum of what they make of it, weighted by the gates.

  All forms compute the same function of x, gates and parameters, and drop the same hidden units in dropout.

  Args:
    x: <float>[G, T, D], cast to `spec.dtype`.
    routing: which expert gets which token. Its groups may be others (one of all tokens, if capacity is shared) as long
      as the tokens are the same in the same order.
    params: the experts' parameters.
    spec: what an expert computes.
    method: 'einsum' (products with masks), 'capacity' (buffers) or 'grouped' (dropless); 'auto' takes the routing's
      first form, of choices 'capacity' where they have a capacity and 'grouped' where not. On a mesh where tokens'
      groups span devices, rows of choices travel as in 'grouped' whatever the form.
    dropout_rng: key for dropout of the hidden units; None: no dropout.
    receive_factor: size of the receive buffers of an expert shard, as a multiple of an even share; None: nothing is
      dropped. Without expert parallelism there are no such buffers.

  Returns:
    (<spec.dtype>[G, T, D], statistics).

  Raises:
    ConfigError: a form that this routing or this backend cannot run well, or shapes that do not fit each other.
  """
  method = select_method(method, routing, layers.traced_platform())
  _check(x, routing, params, spec, receive_factor)
  groups, no_drops = _groups(routing), DispatchStats(receive_drops=jnp.zeros((), jnp.float32))
  layout = expert_parallel.find_layout(math.prod(x.shape[:2]), params.num_experts, params.wo.shape[1])
  if layout is not None and method != 'grouped' and expert_parallel.divides_groups(layout, groups[0]):
    y = expert_parallel.sharded_capacity(
        x.reshape(*groups, x.shape[-1]), routing, params, spec, layout, dropout_rng=dropout_rng,
        dispatch_fn=_FORMS[method])
    return y.reshape(x.shape), no_drops
  if layout is not None and 'grouped' in routing.forms and layers.traced_platform() in KERNELS_OF_BACKEND:
    # In every form the rows of groups that span devices travel one by one: to fill their buffers would gather tokens.
    return expert_parallel.sharded_grouped(
        x, routing, params, spec, layout, dropout_rng=dropout_rng,
        receive_factor=receive_factor if method == 'grouped' else None)
  keep_fn = None
  if dropout_rng is not None and spec.dropout_rate > 0:
    keep_fn = functools.partial(
        dropout_keep, dropout_rng, hidden_dim=params.wo.shape[1], dropout_rate=spec.dropout_rate)
  y = _FORMS[method](x.reshape(*groups, x.shape[-1]), routing, params, spec, keep_fn).reshape(x.shape)
  return y, no_drops


def select_method(method: str, routing: Routing, backend: str) -> str:
  """Return the form of dispatch that `method` means for this routing on `backend`.

  Raises:
    ConfigError: an unknown form, or one that the routing or the backend cannot run well.
  """
  if method == 'ragged_dot':
    select_kernel(method, backend)
  if method not in METHODS:
    raise ConfigError(f'unknown dispatch method {method!r}.{did_you_mean(str(method), METHODS)}')
  if method == 'auto':
    method = routing.forms[0]
  if method == 'grouped':
    if method not in routing.forms:
      raise ConfigError("dispatch='grouped' is for tokens that choose experts; experts that choose tokens fill "
                        "buffers of equal size. Use dispatch='capacity' or 'auto'.")
    select_kernel('auto', backend)
  elif routing.forms == ('grouped',):
    raise ConfigError(f"dispatch={method!r} needs buffers of a fixed size, and this routing is dropless. Set a "
                      "capacity factor, or use dispatch='grouped' or 'auto'.")
  elif method not in routing.forms:
    raise ConfigError(f"`dispatch` must be {', '.join(map(repr, routing.forms))} or 'auto' for a "
                      f'{type(routing).__name__}, got {method!r}.')
  return method


def _groups(routing: Routing) -> tuple[int, int]:
  """Return the routing's (G, T)."""
  return routing.probs.shape[:2]


def _check(x, routing, params, spec, receive_factor):
  check_params(params, spec, x.shape[-1])
  num_experts, shape = routing.num_experts, _groups(routing)
  if num_experts != params.num_experts:
    raise ConfigError(f'the routing is over {num_experts} experts, the parameters are of {params.num_experts}; '
                      'expected the same number.')
  if math.prod(shape) != math.prod(x.shape[:2]):
    raise ConfigError(f'the routing is of {shape[0]} groups of {shape[1]} tokens, x has shape {x.shape}; expected the '
                      'same number of tokens.')
  if receive_factor is not None and receive_factor <= 0:
    raise ConfigError(f'receive_factor is {receive_factor!r}; expected a positive number, or None for no drops.')


def _grouped(x, routing: TokenChoice, params, spec, keep_fn: KeepFn | None):
  """Apply the experts to rows sorted by expert; nothing is padded to a capacity."""
  tokens = x.astype(spec.dtype).reshape(-1, x.shape[-1])
  expert_index = routing.expert_index
  if routing.position is not None:
    expert_index = jnp.where(routing.position < routing.capacity, expert_index, routing.num_experts)
  plan, group_sizes = plans.sort_by_expert(expert_index.reshape(-1), routing.num_experts)
  keep = None if keep_fn is None else keep_fn(plan.row_choice)
  gates = routing.gates.reshape(tokens.shape[0], -1)
  return grouped_tokens(params, tokens, gates, plan, group_sizes, spec, keep).reshape(x.shape)


# Every form of dispatch: (x, routing, params, spec, keep_fn) -> y [G, T, D].
_FORMS = {'einsum': einsum_dispatch, 'capacity': capacity_dispatch, 'grouped': _grouped}
