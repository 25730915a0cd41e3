"""Application of experts, with the choice of the form of dispatch."""

import math
from typing import cast

import jax
import jax.numpy as jnp

from moe.dispatch import expert_parallel
from moe.dispatch.capacity import MaskFn
from moe.dispatch.capacity import capacity_dispatch
from moe.dispatch.capacity import einsum_dispatch
from moe.dispatch.grouped import KERNELS_OF_BACKEND
from moe.dispatch.grouped import grouped_tokens
from moe.dispatch.grouped import select_kernel
from moe.dispatch.mlp import DropoutMask
from moe.dispatch.mlp import batched_mlp
from moe.dispatch.types import DispatchStats
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.dispatch.types import check_params
from moe.routing import plan as plans
from moe.routing.result import Routing
from moe.routing.types import TokenChoice
from t5x_lite import checks
from t5x_lite import layers

METHODS = ('auto', 'einsum', 'capacity', 'grouped')


def apply_experts(
  x: jax.Array,
  routing: Routing,
  params: MlpParams,
  spec: MlpSpec,
  *,
  method: str = 'auto',
  dropout_rng: jax.Array | None = None,
  receive_factor: float | None = None,
) -> tuple[jax.Array, DispatchStats]:
  """Return for every token the sum of its experts' outputs, weighted by the gates.

  All forms compute the same function of x, gates and parameters, with the same dropout.

  Args:
    x: <float>[G, T, D], cast to `spec.dtype`.
    routing: experts of each token. Its groups may differ from those of x (one group of all tokens for shared capacity),
      with the same tokens in the same order.
    params: parameters of the experts.
    spec: computation of an expert.
    method: 'einsum' (products with masks), 'capacity' (buffers) or 'grouped' (dropless); 'auto' is the routing's first
      form, 'capacity' for choices with a capacity and 'grouped' without. On a mesh where groups span devices, rows of
      choices are exchanged as in 'grouped' for any form.
    dropout_rng: key for dropout of the hidden units; None for no dropout.
    receive_factor: size of the receive buffers of an expert shard, as a multiple of an even share; None for no drops.
      Without expert parallelism it has no effect.

  Returns:
    (<spec.dtype>[G, T, D], statistics).

  Raises:
    ConfigError: a form that the routing or the backend does not support, or inconsistent shapes.
  """
  backend = layers.traced_platform()
  method = select_method(method, routing, backend)
  _check(x, routing, params, spec, receive_factor)
  groups = _groups(routing)
  # [groups of the routing, tokens, width]: all groups are one if they share buffers.
  tokens = x.reshape(*groups, x.shape[-1])
  hidden_dim = params.wo.shape[1]
  no_drops = DispatchStats(receive_drops=jnp.zeros((), jnp.float32))
  if layers.counts_products():
    return _counted(tokens, routing, params, spec, method).reshape(x.shape), no_drops
  layout = expert_parallel.find_layout(math.prod(x.shape[:2]), params.num_experts, hidden_dim)
  if layout is not None:
    if method != 'grouped' and expert_parallel.divides_groups(layout, groups[0]):
      y = expert_parallel.sharded_capacity(
        tokens,
        routing,
        params,
        spec,
        layout,
        dropout_rng=dropout_rng,
        dispatch_fn=_FORMS[method],
      )
      return y.reshape(x.shape), no_drops
    if 'grouped' in routing.forms and backend in KERNELS_OF_BACKEND:
      if method != 'grouped':
        receive_factor = None
      # In every form the rows of groups that span devices travel one by one: to fill their buffers would gather tokens.
      return expert_parallel.sharded_grouped(
        x,
        cast(TokenChoice, routing),  # the only routing with this form
        params,
        spec,
        layout,
        dropout_rng=dropout_rng,
        receive_factor=receive_factor,
      )
  mask_fn: MaskFn | None = None
  if dropout_rng is not None and spec.dropout_rate > 0:

    def draw_mask(ids):
      return DropoutMask(dropout_rng, ids, hidden_dim, spec.dropout_rate)

    mask_fn = draw_mask
  y = _FORMS[method](tokens, routing, params, spec, mask_fn)
  return y.reshape(x.shape), no_drops


def select_method(method: str, routing: Routing, backend: str) -> str:
  """Return the form of dispatch for `method`.

  Args:
    method: see `apply_experts`.
    routing: routing with the supported forms.
    backend: platform of the program, see `layers.traced_platform`.

  Raises:
    ConfigError: an unknown form, or one that the routing or the backend does not support.
  """
  if method == 'ragged_dot':
    select_kernel(method, backend)
  remedy = ''
  if routing.forms == ('grouped',):
    remedy = f'The {type(routing).__name__} is dropless: set a capacity factor for buffers.'
  methods = METHODS
  if method in METHODS:
    methods = ('auto', *routing.forms)
  checks.check('', {'dispatch': method}, dispatch=checks.one_of(methods, remedy))
  if method == 'auto':
    method = routing.forms[0]
  if method == 'grouped':
    select_kernel('auto', backend)
  return method


def _groups(routing: Routing) -> tuple[int, int]:
  """Return (G, T) of the routing."""
  num_groups, group_size, _ = routing.probs.shape
  return num_groups, group_size


def _check(x, routing, params, spec, receive_factor):
  check_params(params, spec, x.shape[-1])
  num_experts = params.num_experts
  num_tokens = math.prod(x.shape[:2])
  routed = (routing.num_experts, math.prod(_groups(routing)))
  checks.check(
    'apply_experts',
    {'routing': routed, 'receive_factor': receive_factor},
    routing=checks.Expectation(
      f'of {num_experts} experts, those of params, and {num_tokens} tokens, those of x',
      lambda got: got == (num_experts, num_tokens),
    ),
    receive_factor=checks.number(above=0).or_none(),
  )


def _grouped(x, routing: TokenChoice, params, spec, mask_fn: MaskFn | None):
  """Apply the experts to rows sorted by expert, without padding to a capacity."""
  tokens = x.astype(spec.dtype).reshape(-1, x.shape[-1])
  # [groups, tokens, choices]: dropped choices have no expert, like those of padding.
  expert_index = routing.expert_index
  if routing.position is not None and routing.capacity is not None:
    expert_index = jnp.where(routing.position < routing.capacity, expert_index, routing.num_experts)
  plan, group_sizes = plans.sort_by_expert(expert_index.reshape(-1), routing.num_experts)
  keep = None
  if mask_fn is not None:
    keep = mask_fn(plan.row_choice)
  gates = routing.gates.reshape(tokens.shape[0], -1)
  return grouped_tokens(params, tokens, gates, plan, group_sizes, spec, keep).reshape(x.shape)


def _counted(tokens, routing, params, spec, method):
  """Return outputs of the right shape, by the products of the routed rows alone; see `layers.counted_products`."""
  if not isinstance(routing, TokenChoice):
    if 'capacity' in routing.forms:
      method = 'capacity'
    return _FORMS[method](tokens, routing, params, spec, None)
  # [1, choices of all tokens, width]: the experts have equal shapes, so the products of one for all rows count alike.
  first = jax.tree.map(lambda array: array[:1], params)
  rows = jnp.broadcast_to(tokens[:, :, None], (*routing.gates.shape, tokens.shape[-1]))
  outputs = batched_mlp(first, rows.reshape(1, -1, tokens.shape[-1]), spec)
  gates = routing.gates.astype(spec.dtype)
  return jnp.sum(outputs.reshape(rows.shape) * gates[..., None], axis=2)


# Forms of dispatch: (x, routing, params, spec, mask_fn) -> y [G, T, D].
_FORMS = {'einsum': einsum_dispatch, 'capacity': capacity_dispatch, 'grouped': _grouped}
