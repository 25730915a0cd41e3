"""The sparse feed-forward layer: a router sends every token to a few of many experts."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moe import dispatch as dispatch_lib
from moe import recording
from moe.dispatch.sharding import constrain
from moe.experts import ExpertFactory, ExpertMlp, ExpertParams, apply_blocks
from moe.grouping import Grouping, divide_microbatch
from moe.routing import RecordedChoice, Router, Routing, expert_capacity
from t5x_lite import layers
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite import checks

# Forms of dispatch that fill buffers of equal size.
_BUFFERED = ('einsum', 'capacity')
_DEFAULT_MIN_CAPACITY = 4


class MoeLayer(nn.Module):
  """A feed-forward block (`t5x_lite.networks.t5.FeedForwardFactory`) of many experts, of which a token sees a few.

  Dropless by default: every choice of the router is computed. With capacity factors an expert has a number of places
  for each group, and choices that find none are dropped, as in T5X. https://arxiv.org/abs/2101.03961, section 2.2.

  Groups are `group_size` consecutive tokens of the global batch (see `grouping.divide`): results depend on the batch's
  shape and on no device. Routing goes by groups, and so do the load-balancing loss and capacities.

  Decoding with a cache drops nothing, in steps and in prompts: a token does not depend on the rows beside it. (Experts
  that choose tokens choose among those of a step, so for them it does.) The layers of an encoder know of no decoding:
  they are under the evaluation capacity, if there is one.

  Sows into `intermediates`: `auxiliary_loss`, `router_z_loss`, `fraction_tokens_left_behind`, `expert_usage`,
  `router_confidence`, `router_entropy`, `choices_dropped`, `receive_drops`, float32 []; `expert_load` float32 [E];
  `drops_by_position` float32 [16]; and `metric_weights`, a dict from these names to the weights of a micro-batch in
  means over several, see `routing.TokenChoice.weights`. Where the collection `routing` is mutable, the decisions are
  written there: `expert_index` int32 [G, T, K] (`token_index` [G, E, C] if experts choose) and `gates`. If the
  collection `routing_replay` has the index, the layer routes so: with gates of the present router, or if it has `gates`
  too, with those, as constants.

  Attributes:
    num_experts: E.
    expert: what an expert is, or a factory of any feed-forward block.
    router: assigns tokens to experts; unbound.
    group_size: the most tokens of a group; the largest divisor of the number of tokens is taken.
    train_capacity_factor: places of an expert in training, as a multiple of tokens / experts; None: dropless.
    eval_capacity_factor: likewise without dropout.
    min_expert_capacity: the least number of places, with a capacity factor; None is T5X's 4.
    dispatch: one of `dispatch.METHODS`.
    shared_expert_dim: hidden units of a block `shared_mlp` for all tokens, whose output is added; 0: none. It has the
      activations and dropout of an expert, and no biases, as dense blocks have none.
      https://arxiv.org/abs/2401.06066, section 3.2.
    receive_factor: see `dispatch.apply_experts`; for 'grouped' dispatch, and not in decoding.
    num_groups_multiple: the number of groups is a multiple of this, by T5X's rule (see `grouping.divide`). T5X's is the
      number of experts, times the copies of each.
    dtype: compute dtype of the experts; the router computes in float32.
  """

  num_experts: int
  expert: ExpertMlp | ExpertFactory
  router: Router
  group_size: int = 4096
  train_capacity_factor: float | None = None
  eval_capacity_factor: float | None = None
  min_expert_capacity: int | None = None
  dispatch: str = 'auto'
  shared_expert_dim: int = 0
  receive_factor: float | None = None
  num_groups_multiple: int = 1
  dtype: Any = jnp.float32

  def __post_init__(self):
    self._check()
    super().__post_init__()

  @nn.compact
  def __call__(
      self, x: jax.Array, token_mask: jax.Array | None = None, token_ids: jax.Array | None = None,
      decode: bool = False, deterministic: bool = False, num_microbatches: int = 1) -> jax.Array:
    """Let experts transform tokens.

    Args:
      x: <float>[batch, length, embed].
      token_mask: bool [batch, length], False at padding. None: where the router ignores padding, tokens that are all
        zero are padding, as in T5X.
      token_ids: int32 [batch, length], for routers that go by them.
      decode: a step of decoding with a cache, or the prompts before it.
      deterministic: no dropout, no noise, and the capacity of evaluation.
      num_microbatches: the rows are one of so many micro-batches of a batch: their groups are groups of that batch.

    Returns:
      <dtype>[batch, length, embed]. What is not computed by any expert is 0, before the shared block's output is added.

    Raises:
      ConfigError: shapes that do not fit, a form of dispatch that does not run well here, or groups or buffers that
        several micro-batches would share.
    """
    rows, tokens, _ = x.shape
    groups = divide_microbatch(
        rows * num_microbatches, tokens, num_microbatches, self.group_size, self.num_groups_multiple)
    grouped = constrain(groups.split(x), ('batch', None, None))
    capacity = self._capacity(groups.group_size, decode, deterministic)
    if num_microbatches > 1 and capacity is not None and self.router.shares_capacity:
      raise ConfigError(
          f"`TokensChooseRouter.capacity_scope` must be 'group' where a batch is cut into micro-batches, got 'global', "
          f"by which all groups of the batch share buffers, with num_microbatches={num_microbatches}. Set "
          "capacity_scope='group', or num_microbatches=None.")
    routing = self.router(
        grouped, capacity=capacity,
        token_mask=self._split(groups, token_mask, 'token_mask', x), token_ids=self._split(
            groups, token_ids, 'token_ids', x), deterministic=deterministic, recorded=self._recorded())
    self._record(routing)
    y, stats = self._experts(grouped, routing, decode, deterministic)
    self._sow_metrics(routing, stats, groups)
    y = constrain(groups.merge(y, rows, tokens), ('batch', 'length', 'embed'))
    return y + self._shared(x, deterministic) if self.shared_expert_dim else y

  def _experts(self, x, routing, decode, deterministic):
    """Return (<dtype>[G, T, D], statistics of dispatch)."""
    if not isinstance(self.expert, ExpertMlp):
      y = apply_blocks(self.expert(name='expert'), x, routing, self.dtype, decode=decode, deterministic=deterministic)
      return y, dispatch_lib.DispatchStats(receive_drops=jnp.zeros([], jnp.float32))
    params = ExpertParams(self.num_experts, self.expert, name='expert')(x.shape[-1])
    drops_out = self.expert.dropout_rate > 0 and not deterministic
    # Decoding drops nothing: buffers for that would be as long as the group.
    is_free = decode and routing.forms == ('grouped',)
    return dispatch_lib.apply_experts(
        x, routing, params, self.expert.spec(self.dtype), method='auto' if is_free else self.dispatch,
        dropout_rng=self.make_rng('dropout') if drops_out else None,
        # In exchanges neither.
        receive_factor=None if decode else self.receive_factor)

  def _shared(self, x, deterministic):
    return layers.MlpBlock(
        intermediate_dim=self.shared_expert_dim, activations=tuple(self.expert.activations),
        kernel_init=self.expert.kernel_init, intermediate_dropout_rate=self.expert.dropout_rate, dtype=self.dtype,
        name='shared_mlp')(x, deterministic=deterministic)

  def _capacity(self, group_size: int, decode: bool, deterministic: bool) -> int | None:
    """Return the places of an expert for a group; None: dropless."""
    factor = self.eval_capacity_factor if deterministic or decode else self.train_capacity_factor
    if decode and not self.router.needs_capacity:
      # Where there must be buffers, with a place for every token: a token chooses an expert once at most.
      return None if isinstance(self.expert, ExpertMlp) else group_size
    if factor is None:
      return None
    least = _DEFAULT_MIN_CAPACITY if self.min_expert_capacity is None else self.min_expert_capacity
    return expert_capacity(group_size, self.num_experts, factor, least)

  def _split(self, groups: Grouping, array: jax.Array | None, name: str, x: jax.Array) -> jax.Array | None:
    if array is None:
      return None
    if array.shape != x.shape[:2]:
      raise ConfigError(f'MoeLayer got {name} of shape {array.shape} for tokens of shape {x.shape}; expected '
                        f'{x.shape[:2]}. Pass one value per token.')
    return groups.split(array)

  def _recorded(self) -> RecordedChoice | None:
    """Return the decisions to repeat, if there are any."""
    name = self.router.record_name
    if not self.has_variable(recording.REPLAY, name):
      return None
    gates = self.get_variable(recording.REPLAY, recording.GATES)
    return RecordedChoice(
        jnp.asarray(self.get_variable(recording.REPLAY, name)), None if gates is None else jnp.asarray(gates))

  def _record(self, routing: Routing) -> None:
    """Write the decisions where they are wanted."""
    if self.is_initializing() or not self.is_mutable_collection(recording.ROUTING):
      return
    for name, value in routing.record().items():
      self.put_variable(recording.ROUTING, name, value)

  def _sow_metrics(self, routing: Routing, stats: dispatch_lib.DispatchStats, groups: Grouping) -> None:
    if not self.is_mutable_collection('intermediates'):
      return
    for name, value in {
        'auxiliary_loss': routing.auxiliary_loss,
        'router_z_loss': routing.router_z_loss,
        'fraction_tokens_left_behind': routing.fraction_tokens_left_behind(),
        'expert_usage': routing.expert_usage(),
        'router_confidence': routing.router_confidence(),
        'router_entropy': routing.router_entropy(),
        'expert_load': routing.expert_load(),
        'choices_dropped': routing.dropped_fraction(),
        'drops_by_position': routing.drops_by_position(groups.batch, groups.length),
        'receive_drops': stats.receive_drops,
    }.items():
      self.sow('intermediates', name, value)
    self.sow('intermediates', 'metric_weights', routing.weights(groups.batch, groups.length))

  def _check(self) -> None:
    """Refuses options; raises ConfigError."""
    for name in ('num_experts', 'group_size', 'num_groups_multiple'):
      checks.check_number('MoeLayer', name, getattr(self, name), at_least=1, integer=True)
    for name in ('train_capacity_factor', 'eval_capacity_factor', 'receive_factor'):
      checks.check_number('MoeLayer', name, getattr(self, name), above=0, optional=True)
    checks.check_number('MoeLayer', 'min_expert_capacity', self.min_expert_capacity, at_least=0, integer=True,
                         optional=True)
    checks.check_number('MoeLayer', 'shared_expert_dim', self.shared_expert_dim, at_least=0, integer=True)
    if self.dispatch == 'ragged_dot':
      raise ConfigError("MoeLayer: got dispatch='ragged_dot'; jax.lax.ragged_dot multiplies every row with every "
                        "expert on CPU, and on GPU up to JAX 0.10. Use 'auto' or 'grouped', which are as exact.")
    if self.dispatch not in dispatch_lib.METHODS:
      raise ConfigError(f'MoeLayer: unknown dispatch {self.dispatch!r}.'
                        f'{did_you_mean(str(self.dispatch), dispatch_lib.METHODS)}')
    if not isinstance(self.router, Router):
      raise ConfigError(f'MoeLayer: got router={self.router!r}; expected a router, such as TokensChooseRouter('
                        'num_experts). In gin, router = @moe.TokensChooseRouter() with the parentheses.')
    if self.router.num_experts != self.num_experts:
      raise ConfigError(f'MoeLayer: got num_experts={self.num_experts} and a router of {self.router.num_experts} '
                        'experts; expected the same number. Set both.')
    self._check_capacity_factors()
    if not isinstance(self.expert, ExpertMlp):
      self._check_factory()

  def _check_capacity_factors(self) -> None:
    factors = (self.train_capacity_factor, self.eval_capacity_factor)
    if None in factors and self.router.needs_capacity:
      raise ConfigError(f'MoeLayer: got capacity factors {factors} with {type(self.router).__name__}; expected '
                        'numbers, as its experts choose as many tokens as they have places. Set train_capacity_factor '
                        'and eval_capacity_factor.')
    if None in factors and self.dispatch in _BUFFERED:
      raise ConfigError(f'MoeLayer: got capacity factors {factors} with dispatch={self.dispatch!r}; expected numbers, '
                        "as buffers have a size. Set both factors, or dispatch='auto'.")
    has_buffers = isinstance(self.expert, ExpertMlp) and self.dispatch != 'grouped' and None not in factors
    if self.receive_factor is not None and has_buffers:
      raise ConfigError(f'MoeLayer: got receive_factor={self.receive_factor} with capacity factors {factors} and '
                        f'dispatch={self.dispatch!r}, whose buffers of equal size travel whole. Leave receive_factor '
                        "alone, or set dispatch='grouped' or no capacity factors.")
    if factors != (None, None):
      return
    unused = [*self.router.capacity_options] + ['min_expert_capacity'] * (self.min_expert_capacity is not None)
    if unused:
      raise ConfigError(f'MoeLayer: {", ".join(unused)} has no effect without capacity factors: nothing is dropped. '
                        'Set train_capacity_factor and eval_capacity_factor, or leave it alone.')

  def _check_factory(self) -> None:
    if not callable(self.expert) or isinstance(self.expert, nn.Module):
      raise ConfigError(f'MoeLayer: got expert={self.expert!r}; expected an ExpertMlp, or a callable that takes a name '
                        'and returns a module. Wrap the module: functools.partial(MyBlock, ...).')
    factors = (self.train_capacity_factor, self.eval_capacity_factor)
    if None in factors or self.dispatch not in ('auto', 'capacity'):
      raise ConfigError(
          f'MoeLayer: got a factory of experts with capacity factors {factors} and dispatch={self.dispatch!r}; blocks '
          'of any kind run on buffers of equal size only, as no form of dropless dispatch knows what they compute. Set '
          "both capacity factors and dispatch='auto' or 'capacity', or use an ExpertMlp.")
    for name in ('shared_expert_dim', 'receive_factor'):
      if getattr(self, name):
        raise ConfigError(f'MoeLayer: got {name}={getattr(self, name)} with a factory of experts; expected an '
                          f'ExpertMlp, whose activations and dispatch it is for. Leave {name} alone.')
