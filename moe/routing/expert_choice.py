"""Routing in which every expert chooses its tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from moe.routing import losses
from moe.routing.base import Router
from moe.routing.types import ExpertChoice, RecordedChoice
from t5x_lite.errors import ConfigError


def experts_choose(
    logits: jax.Array, capacity: int, *, token_mask: jax.Array | None = None, padding_takes_places: bool = False,
    padding_in_losses: bool = True, recorded: RecordedChoice | None = None) -> ExpertChoice:
  """Give every expert the C tokens of its group that have its highest probability; of equal ones, the earlier.

  https://arxiv.org/abs/2202.09368, section 3.2.

  Args:
    logits: float32 [G, T, E].
    capacity: C; a group has no more than T tokens, so the result has at most T places.
    token_mask: bool [G, T], False for padding, which is ignored; None: nothing is.
    padding_takes_places: ignored padding has probability 0, but may be chosen where other tokens do not suffice (T5X).
    padding_in_losses: the mean of the z-loss is over ignored padding too.
    recorded: choices to repeat instead of choosing.

  Returns:
    The routing; its `probs` are 0 for ignored padding.

  Raises:
    ConfigError: a record that does not fit.
  """
  groups, num_tokens, num_experts = logits.shape
  shape = (groups, num_experts, min(capacity, num_tokens))
  probs = jax.nn.softmax(logits)
  if token_mask is not None:
    probs = jnp.where(token_mask[..., None], probs, 0.0)
    logits = jnp.where(token_mask[..., None], logits, 0.0)
  by_expert = jnp.swapaxes(probs, 1, 2)
  gates = None
  if recorded is not None:
    recorded.check(shape)
    token_index, gates = recorded.index.astype(jnp.int32), recorded.gates
  else:
    token_index = _choose(by_expert, shape[-1], None if padding_takes_places else token_mask)
  if gates is None:
    safe = jnp.minimum(token_index, num_tokens - 1)
    gates = jnp.take_along_axis(by_expert, safe, axis=-1)
  return ExpertChoice(
      token_index=token_index, gates=jnp.where(token_index < num_tokens, gates, 0.0), probs=probs,
      auxiliary_loss=jnp.zeros([], jnp.float32),
      router_z_loss=losses.router_z_loss(logits, None if padding_in_losses else token_mask),
      num_tokens=num_tokens, token_mask=token_mask, padding_in_losses=padding_in_losses)


def _choose(by_expert: jax.Array, num_places: int, token_mask: jax.Array | None) -> jax.Array:
  """Return int32 [G, E, C] from probabilities [G, E, T]; T for places to which only masked tokens are left."""
  num_tokens = by_expert.shape[-1]
  if token_mask is not None:
    # Below every probability, so that a token of probability 0 is still taken before padding.
    by_expert = jnp.where(token_mask[:, None], by_expert, -1.0)
  values, index = lax.top_k(lax.stop_gradient(by_expert), num_places)
  return jnp.where(values < 0, num_tokens, index).astype(jnp.int32)


class ExpertsChooseRouter(Router):
  """Every expert chooses the tokens of its highest probability: balanced by construction, without auxiliary loss.

  A token is computed by any number of experts, or by none. Not for decoders: choices depend on later tokens.
  https://arxiv.org/abs/2202.09368.

  Attributes:
    padding_takes_places: with `ignore_padding_tokens`, padding has probability 0, but takes places where an expert has
      more than there are other tokens, as in T5X. The outputs are the same.
  """

  padding_takes_places: bool = False

  def _check(self) -> None:
    super()._check()
    if self.padding_takes_places and not self.ignore_padding_tokens:
      raise ConfigError(f'{type(self).__name__}: padding_takes_places is set, but ignore_padding_tokens is False, so '
                        'that padding is routed as any token. Set ignore_padding_tokens=True, or leave '
                        'padding_takes_places alone.')

  @property
  def losses(self) -> tuple[str, ...]:
    """Names of the losses that the router has: experts are balanced as it is."""
    return ('router_z_loss',)

  @property
  def needs_capacity(self) -> bool:
    """See base class."""
    return True

  @property
  def uses_later_tokens(self) -> str:
    """See base class."""
    return 'always'

  @property
  def record_name(self) -> str:
    """See base class."""
    return 'token_index'

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded) -> ExpertChoice:
    del token_ids
    if capacity is None:
      raise ConfigError('ExpertsChooseRouter got no capacity: an expert chooses as many tokens as it has places, so '
                        'there is no dropless form. Give a capacity factor, or let tokens choose (TokensChooseRouter).')
    return experts_choose(
        self.logits(x, deterministic), capacity, token_mask=token_mask,
        padding_takes_places=self.padding_takes_places, padding_in_losses=self.padding_in_losses, recorded=recorded)
