"""Experts fixed by token ids: the router has no parameters and learns nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from moe.routing import token_choice as functions
from moe.routing.base import Router, default_bias_init, default_router_init
from moe.routing.types import TokenChoice
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite import checks

# How a token id becomes its first expert.
HASH_FNS = ('mix', 'balanced')


def mix_bits(x: jax.Array | np.ndarray, seed: int) -> jax.Array | np.ndarray:
  """Return uint32 of the shape of `x` <uint32>[...]: bits that look random, fixed by `x` and `seed` for good.

  >>> mix_bits(np.arange(3, dtype=np.uint32), seed=0).tolist()
  [0, 1753845952, 3507691905]
  """
  # An integer hash of two rounds of multiplication. The seed goes through one of its own, so that neighbouring seeds
  # are not related.
  x = x ^ np.uint32((seed * 0x9E3779B1 + (seed >> 16) * 0x85EBCA77) & 0xFFFFFFFF)
  x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
  return x ^ (x >> 16)


def _steps(num_experts: int) -> np.ndarray:
  """Return the steps by which one can visit all experts in turn."""
  return np.array([step for step in range(1, num_experts + 1) if math.gcd(step, num_experts) == 1], np.uint32)


@functools.lru_cache(maxsize=16)
def balanced_table(vocab_size: int, num_experts: int, num_selected: int, seed: int) -> np.ndarray:
  """Return experts of token ids at random, every expert with the same number of ids.

  Args:
    vocab_size: number of token ids.
    num_experts: E.
    num_selected: K.
    seed: which table.

  Returns:
    int32 [vocab_size, K]: distinct in a row; in a column every expert stands equally often, or once more or less.
  """
  order = np.argsort(mix_bits(np.arange(vocab_size, dtype=np.uint32), seed), kind='stable')
  place = np.arange(vocab_size)
  # Ids of one round through the experts share their step, so that each later choice is a round as well.
  steps = _steps(num_experts)
  step = steps[mix_bits((place // num_experts).astype(np.uint32), seed + 1) % np.uint32(len(steps))].astype(np.int64)
  table = np.zeros((vocab_size, num_selected), np.int32)
  table[order] = (place[:, None] + step[:, None] * np.arange(num_selected)) % num_experts
  table.flags.writeable = False
  return table


def mixed_index(token_ids: jax.Array, num_experts: int, num_selected: int, seed: int) -> jax.Array:
  """Return int32 [..., K], distinct experts of int32 [...] `token_ids`, by a hash of the id."""
  ids = token_ids.astype(jnp.uint32)
  steps = _steps(num_experts)
  first = mix_bits(ids, seed) % np.uint32(num_experts)
  step = jnp.asarray(steps)[mix_bits(ids, seed + 1) % np.uint32(len(steps))]
  choices = jnp.arange(num_selected, dtype=jnp.uint32)
  return ((first[..., None] + step[..., None] * choices) % np.uint32(num_experts)).astype(jnp.int32)


class HashRouter(Router):
  """A token's id fixes its experts, for good: hash layers. No parameters, no losses (both are 0).

  Gates are 1/K. https://arxiv.org/abs/2106.04426, section 3.

  Attributes:
    num_selected: number of distinct experts of an id, each with the gate 1 / `num_selected`.
    hash_fn: 'mix': a hash of the id. 'balanced': a random table in which every expert has the same number of ids.
    vocab_size: number of ids in the table of 'balanced'; larger ids wrap around.
    seed: seed of the hash or table. Layers with the same seed route alike.
  """

  num_selected: int = 1
  hash_fn: str = 'mix'
  vocab_size: int | None = None
  seed: int = 0

  def _check(self) -> None:
    owner = type(self).__name__
    for name, unused, reason in (('jitter_noise', self.jitter_noise, 'it does not look at what noise would change'),
                                 ('use_bias', self.use_bias, 'it has no parameters'),
                                 ('kernel_init', self.kernel_init is not default_router_init, 'it has no parameters'),
                                 ('bias_init', self.bias_init is not default_bias_init, 'it has no parameters'),
                                 ('padding_in_losses=False', not self.padding_in_losses, 'it has no losses')):
      if unused:
        raise ConfigError(f'{owner}: {name} has no effect on this router: {reason}. Leave it at its default.')
    super()._check()
    functions.check_num_selected(owner, self.num_selected, self.num_experts)
    if self.hash_fn not in HASH_FNS:
      raise ConfigError(f'{owner}: unknown hash_fn {self.hash_fn!r}.{did_you_mean(str(self.hash_fn), HASH_FNS)}')
    checks.check_number(owner, 'seed', self.seed, at_least=0, integer=True)
    checks.check_number(owner, 'vocab_size', self.vocab_size, at_least=1, integer=True, optional=True)
    if (self.hash_fn == 'balanced') != (self.vocab_size is not None):
      raise ConfigError(f'{owner}: hash_fn is {self.hash_fn!r} and vocab_size is {self.vocab_size}; expected a '
                        "vocab_size with 'balanced' and none with 'mix'. Set both, or neither.")

  @property
  def losses(self) -> tuple[str, ...]:
    """Names of the losses that the router has: none."""
    return ()

  @property
  def needs_token_ids(self) -> bool:
    """True if the router routes by token ids."""
    return True

  def route(self, x, capacity, token_mask, token_ids, deterministic, recorded) -> TokenChoice:
    del deterministic
    if token_ids is None or not jnp.issubdtype(token_ids.dtype, jnp.integer):
      got = 'none' if token_ids is None else f'some of dtype {token_ids.dtype}'
      raise ConfigError(f'HashRouter routes by token ids and got {got}; expected int32 {x.shape[:2]}. Pass the ids of '
                        'the tokens (token_ids), or use a router that looks at the tokens (TokensChooseRouter).')
    gates = None
    if recorded is not None:
      recorded.check((*x.shape[:2], self.num_selected))
      expert_index, gates = recorded.index.astype(jnp.int32), recorded.gates
    elif self.hash_fn == 'balanced':
      table = balanced_table(self.vocab_size, self.num_experts, self.num_selected, self.seed)
      expert_index = jnp.asarray(table)[token_ids % self.vocab_size]
    else:
      expert_index = mixed_index(token_ids, self.num_experts, self.num_selected, self.seed)
    if token_mask is not None:
      expert_index = jnp.where(token_mask[..., None], expert_index, self.num_experts)
    experts = jnp.arange(self.num_experts, dtype=jnp.int32)
    probs = jnp.mean(expert_index[..., None] == experts, axis=2, dtype=jnp.float32)
    zero = jnp.zeros([], jnp.float32)
    return functions.assign_places(
        expert_index, probs, functions.ChoiceOptions(capacity=capacity), token_mask=token_mask, gates=gates,
        auxiliary_loss=zero, router_z_loss=zero)
