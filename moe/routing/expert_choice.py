"""Expert choice: every expert chooses its tokens."""

import jax
from jax import lax
import jax.numpy as jnp

from moe.routing import losses
from moe.routing.base import Router
from moe.routing.types import ExpertChoice
from moe.routing.types import RecordedChoice
from t5x_lite import checks


def experts_choose(
  logits: jax.Array,
  capacity: int,
  *,
  token_mask: jax.Array | None = None,
  padding_uses_capacity: bool = False,
  padding_in_losses: bool = True,
  recorded: RecordedChoice | None = None,
) -> ExpertChoice:
  """Assign to every expert the C tokens of its group with its highest probability; of equal tokens, the earlier ones.

  https://arxiv.org/abs/2202.09368, section 3.2.

  Args:
    logits: float32 [G, T, E].
    capacity: number of slots, C; the result has at most T slots, as a group has T tokens.
    token_mask: bool [G, T], False for ignored padding; None for no padding.
    padding_uses_capacity: True, as in T5X, if ignored padding, with probability 0, may fill slots that no other tokens
      fill.
    padding_in_losses: True if the mean of the z-loss includes ignored padding.
    recorded: choices to repeat.

  Returns:
    The routing; its `probs` are 0 for ignored padding.

  Raises:
    ConfigError: recorded choices of another shape.
  """
  groups, num_tokens, num_experts = logits.shape
  num_slots = min(capacity, num_tokens)
  # [groups, tokens, experts]: normalized over experts, as in token choice, so that the gates of a token are comparable.
  probs = jax.nn.softmax(logits)
  if token_mask is not None:
    is_routed = token_mask[..., None]
    probs = jnp.where(is_routed, probs, 0.0)
    logits = jnp.where(is_routed, logits, 0.0)
  # [groups, experts, tokens]: an expert chooses along the last dim.
  by_expert = jnp.swapaxes(probs, 1, 2)
  gates = None
  if recorded is not None:
    recorded.check((groups, num_experts, num_slots))
    token_index = recorded.index.astype(jnp.int32)
    gates = recorded.gates
  elif padding_uses_capacity:
    token_index = _choose(by_expert, num_slots, None)
  else:
    token_index = _choose(by_expert, num_slots, token_mask)
  if gates is None:
    # [groups, experts, slots]: the gate of a slot is the probability of the expert for its token.
    safe = jnp.minimum(token_index, num_tokens - 1)
    gates = jnp.take_along_axis(by_expert, safe, axis=-1)
  if padding_in_losses:
    loss_mask = None
  else:
    loss_mask = token_mask
  return ExpertChoice(
    token_index=token_index,
    gates=jnp.where(token_index < num_tokens, gates, 0.0),
    probs=probs,
    auxiliary_loss=jnp.zeros([], jnp.float32),
    router_z_loss=losses.router_z_loss(logits, loss_mask),
    num_tokens=num_tokens,
    token_mask=token_mask,
    padding_in_losses=padding_in_losses,
  )


def _choose(by_expert: jax.Array, num_slots: int, token_mask: jax.Array | None) -> jax.Array:
  """Return int32 [G, E, C] from probabilities [G, E, T]; T for slots that only masked tokens could fill."""
  num_tokens = by_expert.shape[-1]
  if token_mask is not None:
    # Below all probabilities, so that tokens of probability 0 precede padding.
    by_expert = jnp.where(token_mask[:, None], by_expert, -1.0)
  values, index = lax.top_k(lax.stop_gradient(by_expert), num_slots)
  return jnp.where(values < 0, num_tokens, index).astype(jnp.int32)


class ExpertsChooseRouter(Router):
  """Router in which every expert chooses the tokens with its highest probability.

  The load is balanced by construction, so there is no auxiliary loss. A token may have any number of experts, or none.
  Do not use it in decoders, since choices depend on later tokens. https://arxiv.org/abs/2202.09368.

  Attributes:
    padding_uses_capacity: True, as in T5X, if ignored padding, with probability 0, may fill slots that no other tokens
      fill. The outputs are the same.
  """

  padding_uses_capacity: bool = False

  def _expectations(self) -> dict[str, checks.Expectation]:
    return super()._expectations() | {
      'padding_uses_capacity': checks.Expectation(
        'False with ignore_padding_tokens=False',
        lambda value: not value or self.ignore_padding_tokens,
      )
    }

  @property
  def losses(self) -> tuple[str, ...]:
    """Names of the losses that the router has."""
    return ('router_z_loss',)

  @property
  def needs_capacity(self) -> bool:
    """True: the capacity determines the number of tokens of an expert."""
    return True

  @property
  def uses_later_tokens(self) -> str:
    """'always': choices depend on all tokens of a group."""
    return 'always'

  @property
  def record_name(self) -> str:
    """Name of the recorded choices."""
    return 'token_index'

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded) -> ExpertChoice:
    del token_ids
    assert capacity is not None  # Required by `needs_capacity`.
    return experts_choose(
      self.logits(x, deterministic),
      capacity,
      token_mask=token_mask,
      padding_uses_capacity=self.padding_uses_capacity,
      padding_in_losses=self.padding_in_losses,
      recorded=recorded,
    )
