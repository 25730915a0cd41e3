"""Dispatch on a mesh: each device holds its experts, and rows travel to them and back.

The router decides in the global view. What follows is written per device in `shard_map`. Dropless, a device sorts the
choices of its tokens by expert, the devices tell each other how many rows they have for whom, rows move along the
experts' mesh axes, every device runs its experts on what it received, and results return the same way, to be summed
with the gates where their tokens live. With a capacity, and whole groups on every device, whole buffers move.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jax.sharding import PartitionSpec

from moe.dispatch import exchange as exchange_lib
from moe.dispatch.capacity import capacity_dispatch
from moe.dispatch.grouped import grouped_tokens
from moe.dispatch.mlp import batched_mlp, dropout_keep
from moe.dispatch.types import DispatchStats, MlpParams, MlpSpec
from moe.routing import plan as plans
from moe.routing.result import Routing
from moe.routing.types import TokenChoice
from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import rules as axis_rules

# Rounding must not make the sum of shares larger than the whole.
_JUST_BELOW_ONE = 1.0 - 1e-6


@dataclasses.dataclass(frozen=True)
class Layout:
  """What lies where; mesh axes of one device are left out.

  Attributes:
    token_axes: mesh axes that tokens are divided over.
    expert_axes: mesh axes that experts are divided over.
    mlp_axes: mesh axes that experts' hidden units are divided over.
    num_expert_shards: P, devices along `expert_axes`.
    num_mlp_shards: devices along `mlp_axes`.
  """

  token_axes: tuple[str, ...]
  expert_axes: tuple[str, ...]
  mlp_axes: tuple[str, ...]
  num_expert_shards: int
  num_mlp_shards: int

  @property
  def moves_tokens(self) -> bool:
    """True if tokens are divided among the devices along `expert_axes` too, so that they have to travel.

    Otherwise those devices have the same tokens, each runs its experts on them, and the results are added.
    """
    return self.num_expert_shards > 1 and set(self.expert_axes) <= set(self.token_axes)


def find_layout(num_tokens: int, num_experts: int, hidden_dim: int) -> Layout | None:
  """Return the layout that the mesh and the logical axis rules in context ask for, by `batch`, `expert`, `expert_mlp`.

  Tokens that do not divide over the mesh axes of `batch` are divided over those that experts do not need, or, if that
  does not go either, are on all devices. Hidden units that do not divide are on all devices.

  Args:
    num_tokens: tokens of the global batch.
    num_experts: E.
    hidden_dim: F.

  Returns:
    None on a single device, without rules, and inside `shard_map`.

  Raises:
    ConfigError: the experts do not divide over their mesh axes.
  """
  mesh, rules = jax.sharding.get_abstract_mesh(), nn_partitioning.get_axis_rules()
  if not rules or mesh.empty or mesh.size == 1 or mesh.manual_axes:
    return None

  def axes_of(name, taken=()):
    for logical_axis, entry in rules:
      axes = axis_rules.axes_of(entry)
      if logical_axis == name and set(axes) <= set(mesh.axis_names) and not set(axes) & set(taken):
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return ()

  def num_shards(axes):
    return math.prod(mesh.shape[axis] for axis in axes)

  batch, expert = axes_of('batch'), axes_of('expert')
  if num_experts % num_shards(expert):
    raise ConfigError(
        f'{num_experts} experts do not divide over mesh axes {expert} of {num_shards(expert)} devices '
        f'({dict(mesh.shape)}). Use a multiple of {num_shards(expert)} experts, or fewer expert partitions '
        f'({math.gcd(num_experts, num_shards(expert))}).')
  mlp = axes_of('expert_mlp', taken=(*batch, *expert))
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


def num_receive_rows(num_tokens: int, num_selected: int, num_experts: int, num_shards: int,
                     receive_factor: float | None, places: int | None = None) -> tuple[int, int]:
  """Return (rows of a device's receive buffer, the most rows that one device can have for another).

  Without a factor the buffer holds the worst case: all devices send all they can to one. A token's choices are
  distinct, so it has at most as many for a device as there are experts there.

  Args:
    num_tokens: tokens of a device.
    num_selected: K.
    num_experts: experts of a device.
    num_shards: P.
    receive_factor: None, or the size as a multiple of an even share, num_tokens * K.
    places: None, or the most choices that an expert can have.

  >>> num_receive_rows(100, 2, 8, 4, None), num_receive_rows(100, 2, 1, 4, None), num_receive_rows(100, 2, 8, 4, 1.25)
  ((800, 200), (400, 100), (250, 200))
  """
  block = num_tokens * min(num_selected, num_experts)
  num_rows = num_shards * block if places is None else min(num_shards * block, num_experts * places)
  if receive_factor is not None:
    num_rows = min(num_rows, max(math.ceil(receive_factor * num_tokens * num_selected), 1))
  return num_rows, min(block, num_rows)


def sharded_grouped(
    x: jax.Array, routing: TokenChoice, params: MlpParams, spec: MlpSpec, layout: Layout, *,
    dropout_rng: jax.Array | None = None, receive_factor: float | None = None,
    exchange_form: str | None = None) -> tuple[jax.Array, DispatchStats]:
  """Apply the experts on the mesh in context, without drops unless `receive_factor` is too small.

  Args:
    x: <float>[G, T, D].
    routing: choices over its capacity, if it has one, are dropped; then receive buffers hold the places of that.
    params: the experts' parameters; dims that the layout does not divide are gathered.
    spec: what an expert computes.
    layout: where what lies.
    dropout_rng: key for dropout of the hidden units; None: no dropout.
    receive_factor: size of a device's receive buffer, as a multiple of an even share of the choices; what finds no
      place there is dropped, the same share of every sender's rows for every expert. None: the worst case fits.
    exchange_form: one of `exchange.FORMS`; None: what the backend has.

  Returns:
    (<spec.dtype>[G, T, D], statistics).
  """
  tokens = x.astype(spec.dtype).reshape(-1, x.shape[-1])
  expert_index = jnp.where(routing.kept(), routing.expert_index, routing.num_experts)
  num_tokens = tokens.shape[0]
  form = exchange_form or exchange_lib.select_form(layers.traced_platform())
  places = None if routing.position is None else routing.num_places * routing.expert_index.shape[0]
  shard = _Shard(layout, spec, routing.num_experts, params.wo.shape[1], receive_factor, form, places)
  y, drops = _map(shard.grouped, params, dropout_rng, layout)(
      tokens, (routing.gates.reshape(num_tokens, -1), expert_index.reshape(num_tokens, -1)))
  return y.reshape(x.shape), DispatchStats(receive_drops=drops)


def sharded_capacity(
    x: jax.Array, routing: Routing, params: MlpParams, spec: MlpSpec, layout: Layout, *,
    dropout_rng: jax.Array | None = None, dispatch_fn: Callable[..., jax.Array] = capacity_dispatch) -> jax.Array:
  """Apply the experts to buffers on the mesh in context, for a layout and groups that `divides_groups` says fit.

  Args:
    x: <float>[G, T, D] in the routing's groups.
    routing: with a capacity.
    params: the experts' parameters; dims that the layout does not divide are gathered.
    spec: what an expert computes.
    layout: where what lies.
    dropout_rng: key for dropout of the hidden units; None: no dropout.
    dispatch_fn: how a device fills and empties its buffers, `capacity_dispatch` or `einsum_dispatch`.

  Returns:
    <spec.dtype>[G, T, D].
  """
  shard = _Shard(layout, spec, routing.num_experts, params.wo.shape[1])
  fn = lambda x, routing, params, rng: shard.capacity(x, routing, params, rng, dispatch_fn)
  return _map(fn, params, dropout_rng, layout)(x.astype(spec.dtype), routing.for_dispatch())[0]


def divides_groups(layout: Layout, num_groups: int) -> bool:
  """Return whether every device has whole groups, whose buffers it can fill by itself, and sends them if experts are divided.

  Otherwise (a capacity that all groups share, or fewer groups than devices) rows can travel one by one.
  """
  mesh = jax.sharding.get_abstract_mesh()
  is_divided = num_groups % math.prod(mesh.shape[axis] for axis in layout.token_axes) == 0
  return is_divided and (layout.moves_tokens or layout.num_expert_shards == 1)


def _map(fn: Callable[..., tuple[jax.Array, jax.Array]], params: MlpParams, rng: jax.Array | None,
         layout: Layout) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Return a function of (tokens [S or G, ..., D], arrays of routing) in the global view.

  Args:
    fn: of one device's (tokens, arrays, params, rng); returns a result like tokens, of which this device knows a term
      if hidden units are divided, and a number that is the same on all devices.
    params: the experts' parameters.
    rng: a key, or None.
    layout: where what lies.
  """

  def mapped(tokens, arrays):
    width, dims = tokens.shape[-1], tokens.ndim
    # The sum over parts of the hidden units can leave each device with a part of the result.
    scatters = layout.num_mlp_shards > 1 and width % layout.num_mlp_shards == 0

    def on_device(tokens, arrays, params, rng):
      if params.wo_bias is not None and layout.mlp_axes:
        # Devices add up terms of the result: one of them has the bias.
        first = jax.lax.axis_index(layout.mlp_axes) == 0
        params = params.replace(wo_bias=jnp.where(first, params.wo_bias, 0))
      y, number = fn(tokens, arrays, params, rng)
      if scatters:
        y = jax.lax.psum_scatter(y, layout.mlp_axes, scatter_dimension=dims - 1, tiled=True)
      elif layout.mlp_axes:
        y = jax.lax.psum(y, layout.mlp_axes)
      return y, number

    by_token = PartitionSpec(layout.token_axes or None)
    out_spec = PartitionSpec(layout.token_axes or None, *[None] * (dims - 2), layout.mlp_axes if scatters else None)
    return jax.shard_map(
        on_device, in_specs=(by_token, by_token, _params_specs(params, layout), PartitionSpec()),
        # The loops of kernels start from zeros, which are the same on all devices, and end with what is not: no check.
        out_specs=(out_spec, PartitionSpec()), check_vma=False)(tokens, arrays, params, rng)

  return mapped


def _params_specs(params: MlpParams, layout: Layout) -> MlpParams:
  expert, mlp = layout.expert_axes or None, layout.mlp_axes or None
  return MlpParams(
      wi=tuple(PartitionSpec(expert, None, mlp) for _ in params.wi), wo=PartitionSpec(expert, mlp, None),
      wi_bias=None if params.wi_bias is None else tuple(PartitionSpec(expert, mlp) for _ in params.wi_bias),
      wo_bias=None if params.wo_bias is None else PartitionSpec(expert, None))


@dataclasses.dataclass(frozen=True)
class _Shard:
  """What one device does. Arrays are its parts: n tokens of K choices, E / P experts, a part of their hidden units.

  Attributes:
    layout: what lies where.
    spec: what an expert computes.
    num_experts: E, on all devices.
    hidden_dim: F, on all devices.
    receive_factor: see `sharded_grouped`.
    form: see `exchange.exchange`.
    places: the most choices that an expert can have, of all devices; None: as many as there are tokens.
  """

  layout: Layout
  spec: MlpSpec
  num_experts: int
  hidden_dim: int
  receive_factor: float | None = None
  form: str = 'blocks'
  places: int | None = None

  def grouped(self, tokens, arrays, params, rng):
    """Return (results [n, D], share of choices dropped, of all devices)."""
    gates, expert_index = arrays
    if self.layout.moves_tokens:
      return self._send(tokens, gates, expert_index, params, rng)
    y = self._stay(tokens, gates, expert_index, params, rng)
    if self.layout.expert_axes:
      y = jax.lax.psum(y, self.layout.expert_axes)
    return y, jnp.zeros([], jnp.float32)

  def capacity(self, x, routing, params, rng, dispatch_fn):
    """Return (results [groups of this device, T, D], 0)."""

    def move(buffers, *, back=False):
      if self.layout.num_expert_shards == 1:
        return buffers
      split, concat = (1, 0) if back else (0, 1)
      return jax.lax.all_to_all(buffers, self.layout.expert_axes, split, concat, tiled=True)

    def experts_fn(buffers, choice_ids):
      keep = None
      if rng is not None and self.spec.dropout_rate > 0:
        choice_ids = move(self._global_ids(choice_ids, routing.num_choices))
        keep = self._keep(rng, choice_ids.reshape(choice_ids.shape[0], -1))
      buffers = move(buffers)
      flat = buffers.reshape(buffers.shape[0], -1, buffers.shape[-1])
      return move(batched_mlp(params, flat, self.spec, keep).reshape(buffers.shape), back=True)

    return dispatch_fn(x, routing, params, self.spec, experts_fn=experts_fn), jnp.zeros([], jnp.float32)

  @property
  def _num_local_experts(self):
    return self.num_experts // self.layout.num_expert_shards

  def _stay(self, tokens, gates, expert_index, params, rng):
    """Run this device's experts on tokens that are here anyway."""
    local = self._num_local_experts
    if self.layout.expert_axes:
      expert_index = expert_index - jax.lax.axis_index(self.layout.expert_axes) * local
    expert_index = jnp.where((expert_index >= 0) & (expert_index < local), expert_index, local)
    plan, group_sizes = plans.sort_by_expert(expert_index.reshape(-1), local)
    keep = self._keep(rng, self._choice_ids(plan, gates))
    return grouped_tokens(params, tokens, gates, plan, group_sizes, self.spec, keep)

  def _send(self, tokens, gates, expert_index, params, rng):
    """Send tokens to their experts' devices and takes the results back."""
    axes, num_shards, local = self.layout.expert_axes, self.layout.num_expert_shards, self._num_local_experts
    num_rows, block = num_receive_rows(*gates.shape, local, num_shards, self.receive_factor, self.places)
    plan, kept, drops = self._admit(expert_index.reshape(-1), num_rows, block)
    kept = kept.reshape(num_shards, num_shards, local)  # [from, to, expert]
    sizes = jnp.sum(kept, axis=2)
    send = functools.partial(
        exchange_lib.exchange, sizes=sizes, num_received=num_rows, block=block, axis_name=axes, form=self.form)
    received = send(plans.dispatch(tokens, plan))
    # Rows came sender by sender, and those of a sender expert by expert.
    ends = jnp.cumsum(kept[:, jax.lax.axis_index(axes)].reshape(-1))
    run = jnp.searchsorted(ends, jnp.arange(num_rows, dtype=jnp.int32), side='right').astype(jnp.int32)
    expert = jnp.where(run < ends.shape[0], run % local, local)
    received_plan, group_sizes = plans.sort_by_expert(expert, local)
    keep = None
    if rng is not None and self.spec.dropout_rate > 0:
      ids = send(self._choice_ids(plan, gates))
      keep = self._keep(rng, jnp.take(ids, received_plan.row_choice))
    results = grouped_tokens(
        params, received, jnp.ones((num_rows, 1), jnp.float32), received_plan, group_sizes, self.spec, keep)
    rows = exchange_lib.exchange(
        results, sizes.T, plan.row_choice.shape[0], block=block, axis_name=axes, form=self.form)
    return plans.combine(rows, gates, plan), drops

  def _admit(self, expert_index, num_rows, block):
    """Return the plan of this device's choices, int32 [P, E] (how many each device may send), share of drops."""
    plan, counts = plans.sort_by_expert(expert_index, self.num_experts)
    all_counts = jax.lax.all_gather(counts, self.layout.expert_axes).reshape(-1, self.num_experts)
    if num_rows >= all_counts.shape[0] * expert_index.shape[0]:
      return plan, all_counts, jnp.zeros([], jnp.float32)
    kept = admitted(all_counts, self.layout.num_expert_shards, num_rows, block)
    mine = kept[jax.lax.axis_index(self.layout.expert_axes)]
    # A choice's place among those of its expert. The first ones are kept, the others count for nothing from here on.
    bounded = jnp.minimum(expert_index, self.num_experts - 1)
    place = plan.choice_row - jnp.take(jnp.cumsum(counts) - counts, bounded)
    is_kept = (expert_index < self.num_experts) & (place < jnp.take(mine, bounded))
    plan, _ = plans.sort_by_expert(jnp.where(is_kept, expert_index, self.num_experts), self.num_experts)
    lost, chosen = (jax.lax.psum(jnp.sum(n).astype(jnp.float32), self.layout.token_axes)
                    for n in (counts - mine, counts))
    return plan, kept, lost / jnp.maximum(chosen, 1.0)

  def _choice_ids(self, plan, gates):
    """Return int32 [rows], the rows' choices among those of all devices."""
    return self._global_ids(plan.row_choice, gates.size)

  def _global_ids(self, choice_ids, num_choices):
    if not self.layout.token_axes:
      return choice_ids
    return choice_ids + jax.lax.axis_index(self.layout.token_axes) * num_choices

  def _keep(self, rng, choice_ids):
    """Return bool [..., F of this device] for dropout, or None."""
    if rng is None or not self.spec.dropout_rate:
      return None
    keep = dropout_keep(rng, choice_ids, self.hidden_dim, self.spec.dropout_rate)
    if not self.layout.mlp_axes:
      return keep
    size = self.hidden_dim // self.layout.num_mlp_shards
    return jax.lax.dynamic_slice_in_dim(keep, jax.lax.axis_index(self.layout.mlp_axes) * size, size, axis=keep.ndim - 1)


def admitted(counts: jax.Array, num_shards: int, num_rows: int, block: int) -> jax.Array:
  """Return how many rows each device may send for each expert, so that every receive buffer suffices.

  If a device is to get more than it has room for, every sender keeps the same share for each of its experts, rounded
  down: no expert and no sender is preferred.

  Args:
    counts: int32 [P, E], how many rows each device has for each expert.
    num_shards: P.
    num_rows: rows of a receive buffer.
    block: the most rows from one device to another.

  Returns:
    int32 [P, E].
  """
  by_pair = counts.reshape(num_shards, num_shards, -1)  # [from, to, expert]
  part = jnp.sum(by_pair, axis=2, keepdims=True)
  share = jnp.minimum(num_rows / jnp.maximum(jnp.sum(part, axis=0, keepdims=True), 1.0),
                      block / jnp.maximum(part, 1.0))
  kept = jnp.where(share >= 1.0, by_pair, jnp.floor(by_pair * share * _JUST_BELOW_ONE).astype(jnp.int32))
  return kept.reshape(counts.shape)
