"""Soft MoE: the input of each slot of an expert is a weighted mean of all tokens. https://arxiv.org/abs/2308.00951"""

import flax.struct
import jax
import jax.numpy as jnp

import moe
from t5x_lite.errors import ConfigError


@flax.struct.dataclass
class SoftRouting(moe.Routing):
  """Weights float32 [G, T, E, C] of each token in the input of each slot, and of each slot's output for each token."""

  dispatch_weights: jax.Array
  combine_weights: jax.Array
  probs: jax.Array
  auxiliary_loss: jax.Array
  router_z_loss: jax.Array
  token_mask: jax.Array | None = None
  padding_in_losses: bool = flax.struct.field(pytree_node=False, default=True)

  # Dispatch and combination are products with these dense weights.
  forms = ('einsum',)

  @property
  def num_experts(self):
    return self.combine_weights.shape[2]

  @property
  def num_slots(self):
    return self.combine_weights.shape[3]

  @property
  def num_choices(self):
    return self.combine_weights.shape[0] * self.num_experts * self.num_slots

  def masks(self):
    return self.dispatch_weights, self.combine_weights

  def choice_ids(self):
    groups, _, experts, slots = self.combine_weights.shape
    ids = jnp.arange(self.num_choices, dtype=jnp.int32).reshape(groups, experts, slots)
    return jnp.moveaxis(ids, 1, 0)


class SoftRouter(moe.Router):
  """Algorithm 1 of the paper, without the norms of section 2.3. Not for decoders: slots contain later tokens.

  Attributes:
    num_slots: number of slots of each expert in a group.
  """

  num_slots: int = 1

  @property
  def losses(self):
    """Empty: all experts get the same number of slots, so no balancing loss is needed."""
    return ()

  @property
  def uses_later_tokens(self):
    """Every slot is a mean over every token of the group."""
    return 'always'

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded):
    if capacity is not None:
      raise ConfigError(
        'SoftRouter: got a capacity; its experts have `num_slots`. Leave the capacity factors at None.'
      )
    logits = moe.RouterWeights(self.num_experts * self.num_slots, name='router_weights')(
      x.astype(jnp.float32)
    )
    combine = jax.nn.softmax(logits)
    if token_mask is not None:
      logits = jnp.where(token_mask[..., None], logits, -1e9)
    shape = (*x.shape[:2], self.num_experts, self.num_slots)
    combine, zero = combine.reshape(shape), jnp.zeros([], jnp.float32)
    return SoftRouting(
      dispatch_weights=jax.nn.softmax(logits, axis=1).reshape(shape),
      combine_weights=combine,
      probs=jnp.sum(combine, axis=-1),
      auxiliary_loss=zero,
      router_z_loss=zero,
      token_mask=token_mask,
    )
