"""Expert-parallel dispatch: each device has some experts, and rows are exchanged between devices.

The router computes on global arrays; this module runs per device in `shard_map`. Without a capacity a device sorts the
choices of its tokens by expert, the devices exchange the numbers of their rows, rows move along the experts' mesh axes,
every device applies its experts to the rows that it received, and the outputs return to the devices of their tokens,
which sum them weighted by the gates. With a capacity, and entire groups on every device, entire buffers move.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moe.dispatch import exchange as exchange_lib
from moe.dispatch.capacity import capacity_dispatch
from moe.dispatch.grouped import grouped_tokens
from moe.dispatch.mlp import DropoutMask
from moe.dispatch.mlp import batched_mlp
from moe.dispatch.types import DispatchStats
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.routing import plan as plans
from moe.routing.result import Routing
from moe.routing.types import TokenChoice
from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import rules as axis_rules

# The sum of rounded shares must not exceed the total.
_JUST_BELOW_ONE = 1.0 - 1e-6


@dataclasses.dataclass(frozen=True)
class Layout:
  """Mesh axes of tokens, experts and hidden units, without axes of size 1.

  Attributes:
    token_axes: mesh axes over which tokens are divided.
    expert_axes: mesh axes over which experts are divided.
    mlp_axes: mesh axes over which hidden units of experts are divided.
    num_expert_shards: number of devices along `expert_axes`, P.
    num_mlp_shards: number of devices along `mlp_axes`.
  """

  token_axes: tuple[str, ...]
  expert_axes: tuple[str, ...]
  mlp_axes: tuple[str, ...]
  num_expert_shards: int
  num_mlp_shards: int

  @property
  def moves_tokens(self) -> bool:
    """True if tokens are divided along `expert_axes` too, so that they must be exchanged.

    Otherwise these devices have the same tokens, each applies its experts to them, and the outputs are summed.
    """
    return self.num_expert_shards > 1 and set(self.expert_axes) <= set(self.token_axes)


def find_layout(num_tokens: int, num_experts: int, hidden_dim: int) -> Layout | None:
  """Return the layout of the mesh and the logical axis rules in context, for `batch`, `expert` and `expert_mlp`.

  If the tokens are not divisible by the mesh axes of `batch`, they are divided over those axes that experts do not use,
  or else replicated. Hidden units are replicated if they are not divisible.

  Args:
    num_tokens: number of tokens of the global batch.
    num_experts: number of experts, E.
    hidden_dim: number of hidden units of an expert, F.

  Returns:
    The layout; None on a single device, without rules, or inside `shard_map`.

  Raises:
    ConfigError: the number of experts is not divisible by their mesh axes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rules = nn.get_logical_axis_rules()
  if not rules or mesh.empty or mesh.size == 1 or mesh.manual_axes:
    return None

  def mesh_axes_of(name, taken=()):
    for logical_axis, entry in rules:
      axes = axis_rules.axes_of(entry)
      if logical_axis == name and set(axes) <= set(mesh.axis_names) and not set(axes) & set(taken):
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return ()

  def num_shards(axes):
    return math.prod(mesh.shape[axis] for axis in axes)

  batch = mesh_axes_of('batch')
  expert = mesh_axes_of('expert')
  if num_experts % num_shards(expert):
    raise ConfigError(
      f'The number of experts must be a multiple of {num_shards(expert)}, the devices along mesh axes {expert} of '
      f'{dict(mesh.shape)}, got {num_experts}. Alternatively, use '
      f'{math.gcd(num_experts, num_shards(expert))} expert partitions.'
    )
  mlp = mesh_axes_of('expert_mlp', taken=(*batch, *expert))
  if hidden_dim % num_shards(mlp):
    mlp = ()
  tokens = batch
  if num_tokens % num_shards(tokens) or not set(expert) <= set(tokens):
    tokens = tuple(axis for axis in batch if axis not in expert)
  if num_tokens % num_shards(tokens):
    tokens = ()
  if not (tokens or expert or mlp):
    return None
  return Layout(tokens, expert, mlp, num_shards(expert), num_shards(mlp))


def num_receive_rows(
  num_tokens: int,
  num_selected: int,
  num_experts: int,
  num_shards: int,
  receive_factor: float | None,
  num_slots: int | None = None,
) -> tuple[int, int]:
  """Return (rows of a device's receive buffer, largest number of rows from one device to another).

  Without a factor the buffer has the size of the worst case, in which all devices send all rows to one. The choices of
  a token are distinct, so a token has at most as many choices for a device as the device has experts.

  Args:
    num_tokens: number of tokens of a device.
    num_selected: number of choices of a token, K.
    num_experts: number of experts of a device.
    num_shards: number of devices, P.
    receive_factor: size as a multiple of an even share, num_tokens * K; None for the worst case.
    num_slots: largest number of choices of an expert; None for no limit.

  >>> num_receive_rows(100, 2, 8, 4, None), num_receive_rows(100, 2, 1, 4, None), num_receive_rows(100, 2, 8, 4, 1.25)
  ((800, 200), (400, 100), (250, 200))
  """
  block = num_tokens * min(num_selected, num_experts)
  if num_slots is None:
    num_rows = num_shards * block
  else:
    num_rows = min(num_shards * block, num_experts * num_slots)
  if receive_factor is not None:
    num_rows = min(num_rows, max(math.ceil(receive_factor * num_tokens * num_selected), 1))
  return num_rows, min(block, num_rows)


def sharded_grouped(
  x: jax.Array,
  routing: TokenChoice,
  params: MlpParams,
  spec: MlpSpec,
  layout: Layout,
  *,
  dropout_rng: jax.Array | None = None,
  receive_factor: float | None = None,
  exchange_form: str | None = None,
) -> tuple[jax.Array, DispatchStats]:
  """Apply the experts on the mesh in context, without drops unless `receive_factor` is too small.

  Args:
    x: <float>[G, T, D].
    routing: routing; choices above its capacity are dropped, and the capacity bounds the receive buffers.
    params: parameters of the experts; dims that the layout does not divide are gathered.
    spec: computation of an expert.
    layout: layout of tokens and experts.
    dropout_rng: key for dropout of the hidden units; None for no dropout.
    receive_factor: size of a device's receive buffer, as a multiple of an even share of the choices; choices above it
      are dropped, the same share of every sender's rows for every expert. None for the size of the worst case.
    exchange_form: one of `exchange.FORMS`; None for the best of the backend.

  Returns:
    (<spec.dtype>[G, T, D], statistics).
  """
  tokens = x.astype(spec.dtype).reshape(-1, x.shape[-1])
  expert_index = jnp.where(routing.kept(), routing.expert_index, routing.num_experts)
  num_tokens = tokens.shape[0]
  form = exchange_form or exchange_lib.select_form(layers.traced_platform())
  if routing.position is None:
    num_slots = None
  else:
    num_slots = routing.num_slots * routing.expert_index.shape[0]
  shard = _Shard(
    layout, spec, routing.num_experts, params.wo.shape[1], receive_factor, form, num_slots
  )
  y, drops = _map(shard.grouped, params, dropout_rng, layout)(
    tokens, (routing.gates.reshape(num_tokens, -1), expert_index.reshape(num_tokens, -1))
  )
  return y.reshape(x.shape), DispatchStats(receive_drops=drops)


def sharded_capacity(
  x: jax.Array,
  routing: Routing,
  params: MlpParams,
  spec: MlpSpec,
  layout: Layout,
  *,
  dropout_rng: jax.Array | None = None,
  dispatch_fn: Callable[..., jax.Array] = capacity_dispatch,
) -> jax.Array:
  """Apply the experts to buffers on the mesh in context, for a layout and groups with `divides_groups`.

  Args:
    x: <float>[G, T, D] in the routing's groups.
    routing: routing with a capacity.
    params: parameters of the experts; dims that the layout does not divide are gathered.
    spec: computation of an expert.
    layout: layout of tokens and experts.
    dropout_rng: key for dropout of the hidden units; None for no dropout.
    dispatch_fn: dispatch on a device, `capacity_dispatch` or `einsum_dispatch`.

  Returns:
    <spec.dtype>[G, T, D].
  """
  shard = _Shard(layout, spec, routing.num_experts, params.wo.shape[1])

  def fn(x, routing, params, rng):
    return shard.capacity(x, routing, params, rng, dispatch_fn)

  return _map(fn, params, dropout_rng, layout)(x.astype(spec.dtype), routing.for_dispatch())[0]


def divides_groups(layout: Layout, num_groups: int) -> bool:
  """Return whether every device has entire groups, whose buffers it fills, and sends if experts are divided.

  Otherwise (capacity shared by all groups, or fewer groups than devices) rows are exchanged one by one.

  Args:
    layout: layout of tokens and experts.
    num_groups: number of groups, G.
  """
  mesh = jax.sharding.get_abstract_mesh()
  is_divided = num_groups % math.prod(mesh.shape[axis] for axis in layout.token_axes) == 0
  return is_divided and (layout.moves_tokens or layout.num_expert_shards == 1)


def _map(
  fn: Callable[..., tuple[jax.Array, jax.Array]],
  params: MlpParams,
  rng: jax.Array | None,
  layout: Layout,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Return a function of global arrays (tokens [S or G, ..., D], arrays of routing).

  Args:
    fn: function of one device's (tokens, arrays, params, rng) that returns a result of the shape of tokens, which is a
      term of a sum if hidden units are divided, and a number that is equal on all devices.
    params: parameters of the experts.
    rng: key, or None.
    layout: layout of tokens and experts.
  """

  def mapped(tokens, arrays):
    width = tokens.shape[-1]
    dims = tokens.ndim
    # The sum over parts of the hidden units can be scattered over devices.
    scatters = layout.num_mlp_shards > 1 and width % layout.num_mlp_shards == 0

    def on_device(tokens, arrays, params, rng):
      if params.wo_bias is not None and layout.mlp_axes:
        # Devices sum terms of the result, so only one of them adds the bias.
        first = jax.lax.axis_index(layout.mlp_axes) == 0
        params = params.replace(wo_bias=jnp.where(first, params.wo_bias, 0))
      y, number = fn(tokens, arrays, params, rng)
      if scatters:
        y = jax.lax.psum_scatter(y, layout.mlp_axes, scatter_dimension=dims - 1, tiled=True)
      elif layout.mlp_axes:
        y = jax.lax.psum(y, layout.mlp_axes)
      return y, number

    token_axes = layout.token_axes or None
    by_token = PartitionSpec(token_axes)
    width_axes = None
    if scatters:
      width_axes = layout.mlp_axes
    out_spec = PartitionSpec(token_axes, *[None] * (dims - 2), width_axes)
    return jax.shard_map(
      on_device,
      in_specs=(by_token, by_token, _params_specs(params, layout), PartitionSpec()),
      # No check of replication: loops of kernels start with zeros, equal on all devices, and end with different
      # values.
      out_specs=(out_spec, PartitionSpec()),
      check_vma=False,
    )(tokens, arrays, params, rng)

  return mapped


def _params_specs(params: MlpParams, layout: Layout) -> MlpParams:
  """Return the mesh axes of the parameters, in their structure."""
  expert = layout.expert_axes or None
  mlp = layout.mlp_axes or None
  specs: dict[str, Any] = {
    'wi': (PartitionSpec(expert, None, mlp),) * len(params.wi),
    'wo': PartitionSpec(expert, mlp, None),
  }
  if params.wi_bias is not None:
    specs['wi_bias'] = (PartitionSpec(expert, mlp),) * len(params.wi_bias)
  if params.wo_bias is not None:
    specs['wo_bias'] = PartitionSpec(expert, None)
  return MlpParams(**specs)


@dataclasses.dataclass(frozen=True)
class _Shard:
  """Computation of one device. Arrays are its parts: n tokens of K choices, E / P experts, part of the hidden units.

  Attributes:
    layout: layout of tokens and experts.
    spec: computation of an expert.
    num_experts: number of experts of all devices, E.
    hidden_dim: number of hidden units on all devices, F.
    receive_factor: see `sharded_grouped`.
    form: see `exchange.exchange`.
    num_slots: largest number of choices of an expert, of all devices; None for no limit.
  """

  layout: Layout
  spec: MlpSpec
  num_experts: int
  hidden_dim: int
  receive_factor: float | None = None
  form: str = 'blocks'
  num_slots: int | None = None

  def grouped(self, tokens, arrays, params, rng):
    """Return (outputs [n, D], share of dropped choices of all devices)."""
    gates, expert_index = arrays
    if self.layout.moves_tokens:
      return self._exchange(tokens, gates, expert_index, params, rng)
    y = self._apply_local(tokens, gates, expert_index, params, rng)
    if self.layout.expert_axes:
      y = jax.lax.psum(y, self.layout.expert_axes)
    return y, jnp.zeros([], jnp.float32)

  def capacity(self, x, routing, params, rng, dispatch_fn):
    """Return (outputs [groups of this device, T, D], 0)."""

    def move(buffers, *, back=False):
      if self.layout.num_expert_shards == 1:
        return buffers
      # [experts, groups, ...]: devices have all experts of their groups, or all groups of their experts.
      split = 0
      concat = 1
      if back:
        split = 1
        concat = 0
      return jax.lax.all_to_all(buffers, self.layout.expert_axes, split, concat, tiled=True)

    def experts_fn(buffers, choice_ids):
      keep = None
      if rng is not None and self.spec.dropout_rate > 0:
        choice_ids = move(self._global_ids(choice_ids, routing.num_choices))
        mask = self._mask(rng, choice_ids.reshape(-1))
        assert mask is not None  # There is a key and a rate.
        keep = mask.of_all().reshape(choice_ids.shape[0], -1, params.wo.shape[1])
      # [experts of this device, groups of all devices, slots, width].
      buffers = move(buffers)
      flat = buffers.reshape(buffers.shape[0], -1, buffers.shape[-1])
      outputs = batched_mlp(params, flat, self.spec, keep)
      return move(outputs.reshape(buffers.shape), back=True)

    y = dispatch_fn(x, routing, params, self.spec, experts_fn=experts_fn)
    return y, jnp.zeros([], jnp.float32)

  @property
  def _num_local_experts(self):
    return self.num_experts // self.layout.num_expert_shards

  def _apply_local(self, tokens, gates, expert_index, params, rng):
    """Apply this device's experts to this device's tokens."""
    local = self._num_local_experts
    if self.layout.expert_axes:
      expert_index = expert_index - jax.lax.axis_index(self.layout.expert_axes) * local
    # [tokens, choices]: experts of other devices are no experts here; their devices compute them.
    is_local = (expert_index >= 0) & (expert_index < local)
    expert_index = jnp.where(is_local, expert_index, local)
    plan, group_sizes = plans.sort_by_expert(expert_index.reshape(-1), local)
    keep = self._mask(rng, self._choice_ids(plan, gates))
    return grouped_tokens(
      params,
      tokens,
      gates,
      plan,
      group_sizes,
      self.spec,
      keep,
      balanced_rows=-(-gates.size // self.layout.num_expert_shards),
    )

  def _exchange(self, tokens, gates, expert_index, params, rng):
    """Send tokens to the devices of their experts, apply these, and return the outputs."""
    axes = self.layout.expert_axes
    num_shards = self.layout.num_expert_shards
    local = self._num_local_experts
    num_tokens, num_selected = gates.shape
    num_rows, block = num_receive_rows(
      num_tokens, num_selected, local, num_shards, self.receive_factor, self.num_slots
    )
    plan, kept, drops = self._admit(expert_index.reshape(-1), num_rows, block)
    # [from, to, expert]: number of rows that fit into the receive buffers.
    kept = kept.reshape(num_shards, num_shards, local)
    sizes = jnp.sum(kept, axis=2)
    send = functools.partial(
      exchange_lib.exchange,
      sizes=sizes,
      num_received=num_rows,
      block=block,
      axis_name=axes,
      form=self.form,
    )
    received = send(plans.dispatch(tokens, plan))
    # Rows arrive ordered by sender, and those of a sender by expert.
    ends = jnp.cumsum(kept[:, jax.lax.axis_index(axes)].reshape(-1))
    # [received rows]: the run (sender, expert) of each row, then its local expert; none for rows past the end.
    row_numbers = jnp.arange(num_rows, dtype=jnp.int32)
    run = jnp.searchsorted(ends, row_numbers, side='right').astype(jnp.int32)
    expert = jnp.where(run < ends.shape[0], run % local, local)
    received_plan, group_sizes = plans.sort_by_expert(expert, local)
    keep = None
    if rng is not None and self.spec.dropout_rate > 0:
      ids = send(self._choice_ids(plan, gates))
      keep = self._mask(rng, jnp.take(ids, received_plan.row_choice))
    results = grouped_tokens(
      params,
      received,
      jnp.ones((num_rows, 1), jnp.float32),
      received_plan,
      group_sizes,
      self.spec,
      keep,
      balanced_rows=min(gates.size, num_rows),
    )
    rows = exchange_lib.exchange(
      results, sizes.T, plan.row_choice.shape[0], block=block, axis_name=axes, form=self.form
    )
    return plans.combine(rows, gates, plan), drops

  def _admit(self, expert_index, num_rows, block):
    """Return the plan of this device's choices, the numbers of rows to send int32 [P, E], and the share of drops."""
    plan, counts = plans.sort_by_expert(expert_index, self.num_experts)
    all_counts = jax.lax.all_gather(counts, self.layout.expert_axes).reshape(-1, self.num_experts)
    if num_rows >= all_counts.shape[0] * expert_index.shape[0]:
      return plan, all_counts, jnp.zeros([], jnp.float32)
    kept = admitted(all_counts, self.layout.num_expert_shards, num_rows, block)
    kept_here = kept[jax.lax.axis_index(self.layout.expert_axes)]
    # The first choices of each expert are kept; the others become ignored choices.
    bounded = jnp.minimum(expert_index, self.num_experts - 1)
    rank = plan.choice_row - jnp.take(jnp.cumsum(counts) - counts, bounded)
    is_kept = (expert_index < self.num_experts) & (rank < jnp.take(kept_here, bounded))
    kept_index = jnp.where(is_kept, expert_index, self.num_experts)
    plan, _ = plans.sort_by_expert(kept_index, self.num_experts)
    lost = jnp.sum(counts - kept_here).astype(jnp.float32)
    chosen = jnp.sum(counts).astype(jnp.float32)
    # []: shares of all devices, which have different numbers of rows.
    all_lost = jax.lax.psum(lost, self.layout.token_axes)
    all_chosen = jax.lax.psum(chosen, self.layout.token_axes)
    return plan, kept, all_lost / jnp.maximum(all_chosen, 1.0)

  def _choice_ids(self, plan, gates):
    """Return int32 [rows], the ids of the rows' choices among all devices."""
    return self._global_ids(plan.row_choice, gates.size)

  def _global_ids(self, choice_ids, num_choices):
    if not self.layout.token_axes:
      return choice_ids
    return choice_ids + jax.lax.axis_index(self.layout.token_axes) * num_choices

  def _mask(self, rng, choice_ids):
    """Return the mask of dropout for rows with `choice_ids` int32 [N], or None."""
    if rng is None or not self.spec.dropout_rate:
      return None
    first = size = None
    if self.layout.mlp_axes:
      size = self.hidden_dim // self.layout.num_mlp_shards
      first = jax.lax.axis_index(self.layout.mlp_axes) * size
    return DropoutMask(rng, choice_ids, self.hidden_dim, self.spec.dropout_rate, first, size)


def admitted(counts: jax.Array, num_shards: int, num_rows: int, block: int) -> jax.Array:
  """Return the number of rows that each device sends to each expert, such that every receive buffer is sufficient.

  If the rows for a device exceed its buffer, every sender keeps the same share for each expert, rounded down.

  Args:
    counts: int32 [P, E], number of rows of each device for each expert.
    num_shards: number of devices, P.
    num_rows: number of rows of a receive buffer.
    block: largest number of rows from one device to another.

  Returns:
    int32 [P, E].
  """
  by_pair = counts.reshape(num_shards, num_shards, -1)  # [from, to, expert]
  part = jnp.sum(by_pair, axis=2, keepdims=True)
  share = jnp.minimum(
    num_rows / jnp.maximum(jnp.sum(part, axis=0, keepdims=True), 1.0),
    block / jnp.maximum(part, 1.0),
  )
  kept = jnp.where(
    share >= 1.0, by_pair, jnp.floor(by_pair * share * _JUST_BELOW_ONE).astype(jnp.int32)
  )
  return kept.reshape(counts.shape)
