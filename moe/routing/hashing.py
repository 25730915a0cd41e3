"""Hash routing: token ids determine the experts, without parameters."""

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from moe.routing import token_choice as functions
from moe.routing.base import Router
from moe.routing.base import default_bias_init
from moe.routing.base import default_router_init
from moe.routing.types import TokenChoice
from t5x_lite import checks

# Functions from a token id to its first expert.
HASH_FNS = ('mix', 'balanced')
Bits = TypeVar('Bits', jax.Array, np.ndarray)


def mix_bits(x: Bits, seed: int) -> Bits:
  """Return pseudo-random bits, uint32 of the shape of `x`, that depend only on `x` <uint32>[...] and `seed`.

  >>> mix_bits(np.arange(3, dtype=np.uint32), seed=0).tolist()
  [0, 1753845952, 3507691905]
  """
  # An integer hash of two rounds of multiplication. The seed is hashed separately, so that results of consecutive seeds
  # are independent.
  hashed_seed = seed * 0x9E3779B1 + (seed >> 16) * 0x85EBCA77
  x = x ^ np.uint32(hashed_seed & 0xFFFFFFFF)
  x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
  return x ^ (x >> 16)


def _steps(num_experts: int) -> np.ndarray:
  """Return the numbers up to `num_experts` that are coprime to it, as steps that visit all experts."""
  steps = [step for step in range(1, num_experts + 1) if math.gcd(step, num_experts) == 1]
  return np.array(steps, np.uint32)


@functools.lru_cache(maxsize=16)
def balanced_table(vocab_size: int, num_experts: int, num_selected: int, seed: int) -> np.ndarray:
  """Return a random table of the experts of token ids, with the same number of ids per expert.

  Args:
    vocab_size: number of token ids.
    num_experts: number of experts, E.
    num_selected: number of experts of an id, K.
    seed: seed of the table.

  Returns:
    int32 [vocab_size, K]: distinct in a row; in a column the numbers of occurrences of experts differ by at most one.
  """
  # [ids]: a random order, in which ids are dealt to the experts round after round.
  order = np.argsort(mix_bits(np.arange(vocab_size, dtype=np.uint32), seed), kind='stable')
  rank = np.arange(vocab_size)
  # Ids of one round through the experts have the same step, so that each later choice is a round too.
  steps = _steps(num_experts)
  rounds = (rank // num_experts).astype(np.uint32)
  step_index = mix_bits(rounds, seed + 1) % np.uint32(len(steps))
  step = steps[step_index].astype(np.int64)
  # [ids, choices]: steps are coprime to the number of experts, so the choices of an id are distinct.
  choices = rank[:, None] + step[:, None] * np.arange(num_selected)
  table = np.zeros((vocab_size, num_selected), np.int32)
  table[order] = choices % num_experts
  table.flags.writeable = False
  return table


def mixed_index(token_ids: jax.Array, num_experts: int, num_selected: int, seed: int) -> jax.Array:
  """Return distinct experts by a hash of the token id.

  Args:
    token_ids: int32 [...].
    num_experts: number of experts, E.
    num_selected: number of experts of an id, K.
    seed: seed of the hash.

  Returns:
    int32 [..., K].
  """
  ids = token_ids.astype(jnp.uint32)
  steps = _steps(num_experts)
  first = mix_bits(ids, seed) % np.uint32(num_experts)
  step = jnp.asarray(steps)[mix_bits(ids, seed + 1) % np.uint32(len(steps))]
  # [..., choices]: steps are coprime to the number of experts, so the choices of a token are distinct.
  choices = jnp.arange(num_selected, dtype=jnp.uint32)
  experts = (first[..., None] + step[..., None] * choices) % np.uint32(num_experts)
  return experts.astype(jnp.int32)


class HashRouter(Router):
  """Router by token ids (hash layers), without parameters and losses. https://arxiv.org/abs/2106.04426, section 3.

  Attributes:
    num_selected: number of distinct experts of an id, K, each with the gate 1 / K.
    hash_fn: 'mix' for a hash of the id, 'balanced' for a random table with the same number of ids per expert.
    vocab_size: number of ids in the table of 'balanced'; larger ids wrap around.
    seed: seed of the hash or table. Layers with the same seed have equal routing.
  """

  num_selected: int = 1
  hash_fn: str = 'mix'
  vocab_size: int | None = None
  seed: int = 0

  def _expectations(self) -> dict[str, checks.Expectation]:
    defaults = {
      'jitter_noise': (0.0, 'a router by token ids has no noise'),
      'use_bias': (False, 'the router has no parameters'),
      'kernel_init': (default_router_init, 'the router has no parameters'),
      'bias_init': (default_bias_init, 'the router has no parameters'),
      'padding_in_losses': (True, 'the router has no losses'),
    }
    is_balanced = self.hash_fn == 'balanced'
    count = checks.number(at_least=1, integer=True)

    def is_vocab_size(size):
      if is_balanced:
        return count.holds(size)
      return size is None

    expectations = super()._expectations()
    for name, (default, reason) in defaults.items():
      expectations[name] = checks.Expectation(
        f'the default, since {reason}', lambda value, default=default: value == default
      )
    return expectations | {
      'num_selected': functions.num_selected_expectation(self.num_experts),
      'hash_fn': checks.one_of(HASH_FNS),
      'seed': checks.number(at_least=0, integer=True),
      'vocab_size': checks.Expectation(
        f"{count.text} with hash_fn='balanced', None with 'mix'", is_vocab_size
      ),
    }

  @property
  def losses(self) -> tuple[str, ...]:
    """Names of the losses of the router, an empty tuple."""
    return ()

  @property
  def needs_token_ids(self) -> bool:
    """True if the router routes by token ids."""
    return True

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded) -> TokenChoice:
    del deterministic
    gates = None
    if recorded is not None:
      recorded.check((*x.shape[:2], self.num_selected))
      expert_index = recorded.index.astype(jnp.int32)
      gates = recorded.gates
    elif self.hash_fn == 'balanced':
      assert token_ids is not None and self.vocab_size is not None  # Required by `_expectations`.
      table = balanced_table(self.vocab_size, self.num_experts, self.num_selected, self.seed)
      expert_index = jnp.asarray(table)[token_ids % self.vocab_size]
    else:
      assert token_ids is not None  # Required by `needs_token_ids`.
      expert_index = mixed_index(token_ids, self.num_experts, self.num_selected, self.seed)
    if token_mask is not None:
      expert_index = jnp.where(token_mask[..., None], expert_index, self.num_experts)
    # [groups, tokens, experts]: 1 / K for each of the K experts of a token.
    experts = jnp.arange(self.num_experts, dtype=jnp.int32)
    probs = jnp.mean(expert_index[..., None] == experts, axis=2, dtype=jnp.float32)
    zero = jnp.zeros([], jnp.float32)
    return functions.assign_slots(
      expert_index,
      probs,
      functions.ChoiceOptions(capacity=capacity),
      token_mask=token_mask,
      gates=gates,
      auxiliary_loss=zero,
      router_z_loss=zero,
    )
