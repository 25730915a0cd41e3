"""Sparse feed-forward layer: a router assigns every token to a few of many experts."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moe import dispatch as dispatch_lib
from moe import recording
from moe.dispatch.sharding import constrain
from moe.experts import ExpertFactory
from moe.experts import ExpertMlp
from moe.experts import ExpertParams
from moe.experts import apply_blocks
from moe.grouping import Grouping
from moe.grouping import divide_microbatch
from moe.routing.base import Router
from moe.routing.capacity import expert_capacity
from moe.routing.result import Routing
from moe.routing.types import RecordedChoice
from t5x_lite import checks
from t5x_lite import layers
from t5x_lite.errors import ConfigError

# Forms of dispatch that fill buffers of equal size.
_BUFFERED = ('einsum', 'capacity')
_DEFAULT_MIN_CAPACITY = 4
_DISPATCH = checks.one_of(dispatch_lib.METHODS)


class MoeLayer(nn.Module):
  """Feed-forward block (`t5x_lite.networks.t5.FeedForwardFactory`) of many experts, of which a token uses a few.

  By default it is dropless: every choice of the router is computed. With capacity factors an expert has a number of
  slots for each group, and choices beyond them are dropped, as in T5X. https://arxiv.org/abs/2101.03961, section 2.2.

  Groups are `group_size` consecutive tokens of the global batch (see `grouping.divide`), so results depend on the shape
  of the batch, not on devices. Routing, load-balancing loss and capacities are per group.

  Decoding with a cache drops no choices, in steps and in prompts, so a token does not depend on other rows. (With
  expert choice it does, since experts choose among the tokens of a step.) Layers of an encoder use the evaluation
  capacity in decoding too.

  Sows into `intermediates`: `auxiliary_loss`, `router_z_loss`, `fraction_tokens_left_behind`, `expert_usage`,
  `router_confidence`, `router_entropy`, `choices_dropped`, `receive_drops`, float32 []; `expert_load` float32 [E];
  `drops_by_position` float32 [16]; and `metric_weights`, a dict from these names to the weights of a micro-batch in
  means over several, see `routing.TokenChoice.weights`. If the collection `routing` is mutable, the choices are
  written there: `expert_index` int32 [G, T, K] (`token_index` [G, E, C] for expert choice) and `gates`. If the
  collection `routing_replay` has the index, the layer repeats these choices, with gates of the current router, or with
  recorded `gates`, as constants, if it has them.

  Attributes:
    num_experts: number of experts, E.
    expert: hyper-parameters of an expert, or a factory of any feed-forward block.
    router: unbound router.
    group_size: largest number of tokens of a group; the largest divisor of the number of tokens up to it is used.
    train_capacity_factor: number of slots of an expert in training, as a multiple of tokens / experts; None for
      dropless routing.
    eval_capacity_factor: number of slots without dropout, like `train_capacity_factor`.
    min_expert_capacity: smallest number of slots, with a capacity factor; None is T5X's 4.
    dispatch: one of `dispatch.METHODS`.
    shared_expert_dim: number of hidden units of a block `shared_mlp` for all tokens, whose output is added; 0 for none.
      It has the activations and dropout of an expert, and no biases, like dense blocks.
      https://arxiv.org/abs/2401.06066, section 3.2.
    receive_factor: see `dispatch.apply_experts`; for 'grouped' dispatch, and not in decoding.
    num_groups_multiple: divisor of the number of groups, by T5X's rule (see `grouping.divide`). In T5X it is the number
      of experts times their copies.
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
    self,
    x: jax.Array,
    token_mask: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    decode: bool = False,
    deterministic: bool = False,
    num_microbatches: int = 1,
  ) -> jax.Array:
    """Return the experts' outputs for tokens.

    Args:
      x: <float>[batch, length, embed].
      token_mask: bool [batch, length], False at padding. If None and the router ignores padding, tokens that are all
        zero are padding, as in T5X.
      token_ids: int32 [batch, length], for routers that use them.
      decode: True for a step of decoding with a cache, or its prompts.
      deterministic: True for no dropout, no noise, and the capacity of evaluation.
      num_microbatches: number of micro-batches of the batch, of which the rows are one.

    Returns:
      <dtype>[batch, length, embed]; 0 for tokens without an expert, before the shared block's output is added.

    Raises:
      ConfigError: inconsistent shapes, an unsupported form of dispatch, or groups or buffers of several micro-batches.
    """
    rows, tokens, _ = x.shape
    groups = divide_microbatch(
      rows * num_microbatches, tokens, num_microbatches, self.group_size, self.num_groups_multiple
    )
    # [groups, tokens, width]: groups are independent, so that devices route their groups without communication.
    grouped = constrain(groups.split(x), ('batch', None, None))
    capacity = self._capacity(groups.group_size, decode, deterministic)
    if num_microbatches > 1 and capacity is not None and self.router.shares_capacity:
      raise ConfigError(
        f"`TokensChooseRouter.capacity_scope` must be 'group' with num_microbatches={num_microbatches}, got "
        "'global'. All groups of a batch would share buffers."
      )
    routing = self.router(
      grouped,
      capacity=capacity,
      token_mask=self._split(groups, token_mask, 'token_mask', x),
      token_ids=self._split(groups, token_ids, 'token_ids', x),
      deterministic=deterministic,
      recorded=self._recorded(),
    )
    self._record(routing)
    y, stats = self._experts(grouped, routing, decode, deterministic)
    self._sow_metrics(routing, stats, groups)
    y = constrain(groups.merge(y, rows, tokens), ('batch', 'length', 'embed'))
    if self.shared_expert_dim:
      return y + self._shared(x, deterministic)
    return y

  def _experts(self, x, routing, decode, deterministic):
    """Return (<dtype>[G, T, D], statistics of dispatch)."""
    if not isinstance(self.expert, ExpertMlp):
      y = apply_blocks(
        self.expert(name='expert'),
        x,
        routing,
        self.dtype,
        decode=decode,
        deterministic=deterministic,
      )
      return y, dispatch_lib.DispatchStats(receive_drops=jnp.zeros([], jnp.float32))
    params = ExpertParams(self.num_experts, self.expert, name='expert')(x.shape[-1])
    dropout_rng = None
    if self.expert.dropout_rate > 0 and not deterministic:
      dropout_rng = self.make_rng('dropout')
    method = self.dispatch
    receive_factor = self.receive_factor
    if decode:
      # Decoding drops no choices; buffers for that would have the size of the group.
      receive_factor = None
      if routing.forms == ('grouped',):
        method = 'auto'
    return dispatch_lib.apply_experts(
      x,
      routing,
      params,
      self.expert.spec(self.dtype),
      method=method,
      dropout_rng=dropout_rng,
      receive_factor=receive_factor,
    )

  def _shared(self, x, deterministic):
    assert isinstance(self.expert, ExpertMlp)  # Required by `shared_expert_dim`.
    block = layers.MlpBlock(
      intermediate_dim=self.shared_expert_dim,
      activations=tuple(self.expert.activations),
      kernel_init=self.expert.kernel_init,
      intermediate_dropout_rate=self.expert.dropout_rate,
      dtype=self.dtype,
      name='shared_mlp',
    )
    return block(x, deterministic=deterministic)

  def _capacity(self, group_size: int, decode: bool, deterministic: bool) -> int | None:
    """Return the number of slots of an expert for a group; None for dropless routing."""
    if deterministic or decode:
      factor = self.eval_capacity_factor
    else:
      factor = self.train_capacity_factor
    if decode and not self.router.needs_capacity:
      # Custom experts need buffers, with a slot for every token, as a token chooses an expert at most once.
      if isinstance(self.expert, ExpertMlp):
        return None
      return group_size
    if factor is None:
      return None
    least = self.min_expert_capacity
    if least is None:
      least = _DEFAULT_MIN_CAPACITY
    return expert_capacity(group_size, self.num_experts, factor, least)

  def _split(
    self, groups: Grouping, array: jax.Array | None, name: str, x: jax.Array
  ) -> jax.Array | None:
    if array is None:
      return None
    shape = x.shape[:2]
    expectation = checks.Expectation(
      f'an array of shape {shape}', lambda array: array.shape == shape
    )
    checks.check('MoeLayer', {name: array}, **{name: expectation})
    return groups.split(array)

  def _recorded(self) -> RecordedChoice | None:
    """Return recorded choices to repeat, or None."""
    name = self.router.record_name
    if not self.has_variable(recording.REPLAY, name):
      return None
    index = self.get_variable(recording.REPLAY, name)
    gates = self.get_variable(recording.REPLAY, recording.GATES)
    if gates is not None:
      gates = jnp.asarray(gates)
    return RecordedChoice(jnp.asarray(index), gates)

  def _record(self, routing: Routing) -> None:
    """Write the choices into the collection `routing` if it is mutable."""
    if self.is_initializing() or not self.is_mutable_collection(recording.ROUTING):
      return
    for name, value in routing.record().items():
      self.put_variable(recording.ROUTING, name, value)

  def _sow_metrics(
    self,
    routing: Routing,
    stats: dispatch_lib.DispatchStats,
    groups: Grouping,
    skips_padding_rows: bool = False,
  ) -> None:
    """Sow the losses and metrics of a routing and their weights.

    Args:
      routing: the routing.
      stats: statistics of dispatch.
      groups: groups of the tokens.
      skips_padding_rows: True to exclude rows without tokens, which fill up a batch of an evaluation, from losses that
        include the padding of other rows.
    """
    if not self.is_mutable_collection('intermediates'):
      return
    weights = routing.weights(groups.batch, groups.length)
    mask = routing.token_mask
    if skips_padding_rows and self.router.losses and routing.padding_in_losses and mask is not None:
      has_tokens = jnp.any(mask.reshape(groups.batch, groups.length), axis=1)
      num_real = jnp.sum(has_tokens, dtype=jnp.float32) * groups.length
      routing = routing.without_padding_rows(num_real)
      weights = {'auxiliary_loss': num_real, 'router_z_loss': num_real, **weights}
    values = {
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
    }
    for name, value in values.items():
      self.sow('intermediates', name, value)
    self.sow('intermediates', 'metric_weights', weights)

  def _check(self) -> None:
    """Raise ConfigError for invalid options."""
    checks.check(
      'MoeLayer',
      {'router': self.router},
      router=checks.instance(
        Router,
        'a router, such as TokensChooseRouter(num_experts)',
        'In gin, router = @moe.TokensChooseRouter().',
      ),
    )
    count = checks.number(at_least=1, integer=True)
    factor = checks.number(above=0).or_none()
    is_mlp = isinstance(self.expert, ExpertMlp)
    factors = (self.train_capacity_factor, self.eval_capacity_factor)
    users = []
    if self.router.needs_capacity:
      users.append(type(self.router).__name__)
    if self.dispatch in _BUFFERED:
      users.append(f'dispatch={self.dispatch!r}')
    if not is_mlp:
      users.append('custom experts')
    if users:
      names = ' and '.join(users)
      factor = checks.number(above=0, remedy=f'It is required by {names}.')
    dispatch = _DISPATCH
    shared_expert_dim = checks.number(at_least=0, integer=True)
    if not is_mlp:
      dispatch = checks.one_of(('auto', 'capacity'), 'The experts are custom.')
      shared_expert_dim = checks.one_of((0,), 'The experts are custom.')
    receive_factor = checks.number(above=0).or_none()
    has_buffers = self.dispatch != 'grouped' and None not in factors
    if has_buffers or not is_mlp:
      receive_factor = checks.Expectation(
        'None with custom experts or buffers of equal size',
        lambda value: value is None,
        "Set dispatch='grouped' or no capacity factors.",
      )
    min_expert_capacity = checks.number(at_least=0, integer=True).or_none()
    if factors == (None, None):
      min_expert_capacity = checks.Expectation(
        'None without capacity factors', lambda value: value is None
      )

    def is_expert(expert):
      return is_mlp or (callable(expert) and not isinstance(expert, nn.Module))

    values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    values['router.num_experts'] = self.router.num_experts
    values['router options'] = self.router.capacity_options
    expectations = {
      'num_experts': count,
      'group_size': count,
      'num_groups_multiple': count,
      'dispatch': dispatch,
      'train_capacity_factor': factor,
      'eval_capacity_factor': factor,
      'min_expert_capacity': min_expert_capacity,
      'shared_expert_dim': shared_expert_dim,
      'receive_factor': receive_factor,
      'expert': checks.Expectation(
        'an ExpertMlp, or a function of a name that returns a module',
        is_expert,
        'For a module use functools.partial(MyBlock, ...).',
      ),
      'router.num_experts': checks.Expectation(
        f'num_experts={self.num_experts}', lambda number: number == self.num_experts
      ),
    }
    if factors == (None, None):
      expectations['router options'] = checks.Expectation(
        'the defaults without capacity factors', lambda options: not options
      )
    checks.check('MoeLayer', values, **expectations)
