"""Costs and drop rates of capacities, for the recorded load of a run or for an artificial skewed load.

The number of a group's tokens that choose expert e is assumed to be binomial: each of T tokens chooses it with
probability `num_selected * load[e]`, independently of the others. This gives the exact expectation of drops, without
sampling. Tokens of one text are more similar than that, so real drops are somewhat higher; runs record them
(`experts/<layer>/fraction_tokens_left_behind`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math

import numpy as np

from moe.dispatch import expert_parallel
from moe.routing import capacity as capacity_lib
from t5x_lite import checks

# Capacity factors divided by the choices of a token; balanced routing fills a factor of 1.
DEFAULT_FACTORS = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
# The default of `MoeLayer`.
DEFAULT_MIN_CAPACITY = 4
_FINEST_STEP = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of the groups and the experts of a layer.

  Attributes:
    tokens_per_group: T, padding included.
    routed_share: share of the tokens that are routed; padding usually is not, but capacities include it.
    num_selected: number of experts that a token chooses.
    width: size of a token.
    hidden: hidden units of an expert.
    num_inputs: number of input kernels of an expert, 2 for a gated one.
    bytes_per_number: bytes of one activation, 2 for bfloat16.
    min_capacity: minimum number of slots of an expert.

  Raises:
    ConfigError: a number below 1, or a share outside of 0 to 1.
  """

  tokens_per_group: int
  routed_share: float = 1.0
  num_selected: int = 1
  width: int = 512
  hidden: int = 2048
  num_inputs: int = 1
  bytes_per_number: int = 4
  min_capacity: int = DEFAULT_MIN_CAPACITY

  def __post_init__(self):
    count = checks.number(at_least=1, integer=True)
    expected = {field.name: count for field in dataclasses.fields(self)}
    expected['routed_share'] = checks.number(above=0, at_most=1)
    checks.check('', vars(self), **expected)

  @property
  def num_routed(self) -> int:
    """Number of routed tokens of a group."""
    return max(1, round(self.routed_share * self.tokens_per_group))

  @property
  def num_choices(self) -> int:
    """Number of choices of a group's tokens, which is the number of rows of dropless dispatch."""
    return self.num_routed * self.num_selected

  @property
  def bytes_per_row(self) -> int:
    """Bytes of the activations of one slot for the backward pass: input, hidden units, output."""
    return (2 * self.width + (self.num_inputs + 1) * self.hidden) * self.bytes_per_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
  """Drop rate and costs of one size of the buffers.

  Attributes:
    factor: capacity factor as the layer takes it (`train_capacity_factor`), or receive factor.
    num_slots: number of slots of one buffer: of an expert for a group, or of a shard.
    drop_rate: expected share of the choices that get no slot.
    rows_per_choice: slots of all buffers divided by choices of all tokens; dropless dispatch has 1.
    bytes: activations of all buffers of a group.
  """

  factor: float
  num_slots: int
  drop_rate: float
  rows_per_choice: float
  bytes: int


def zipf_load(num_experts: int, exponent: float) -> np.ndarray:
  """Return the load of experts with popularity rank ** -`exponent`; 0 is balanced, 1 is Zipf's law.

  Raises:
    ConfigError: an invalid number of experts or exponent.

  >>> zipf_load(2, 1.0).round(3).tolist()
  [0.667, 0.333]
  """
  checks.check(
    '',
    {'num_experts': num_experts, 'zipf': exponent},
    num_experts=checks.number(at_least=1, integer=True),
    zipf=checks.number(at_least=0),
  )
  load = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
  return load / load.sum()


def choice_probabilities(load: np.ndarray, num_selected: int) -> np.ndarray:
  """Return the probability with which a token chooses each expert, float64 [experts].

  A token chooses each expert at most once: probabilities are capped at 1, and the excess goes to the other experts in
  proportion to their load.

  Raises:
    ConfigError: an invalid load, or fewer experts than choices.
  """
  load = np.asarray(load, np.float64)

  def is_load(load):
    if load.ndim != 1 or not np.all(np.isfinite(load)) or np.any(load < 0):
      return False
    return bool(load.sum() > 0)

  checks.check(
    '',
    locals(),
    load=checks.Expectation('one finite number >= 0 for each expert, not all 0', is_load),
    num_selected=checks.number(at_most=load.size),
  )
  probability = num_selected * load / load.sum()
  full = np.zeros(load.size, bool)
  while np.any(probability[~full] > 1):
    full |= probability >= 1
    rest = load[~full].sum()
    left = num_selected - full.sum()
    scale = 0.0
    if rest > 0:
      scale = left / rest
    probability = np.where(full, 1.0, load * scale)
  return np.minimum(probability, 1.0)


def expected_overflow(num_trials: int, probability: np.ndarray, num_slots: int) -> np.ndarray:
  """Return E[max(X - num_slots, 0)] for binomial X, float64 [buffers].

  Args:
    num_trials: number of tokens.
    probability: float64 [buffers], probability of a token to go to each buffer.
    num_slots: number of slots of each buffer.

  >>> expected_overflow(2, np.array([0.5, 1.0]), num_slots=1).tolist()
  [0.25, 1.0]
  """
  if num_slots >= num_trials:
    return np.zeros(len(probability))
  # [numbers of tokens above the number of slots]: logarithms of the binomial coefficients.
  counts = np.arange(num_slots + 1, num_trials + 1)
  log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num_trials + 1)))])
  log_choose = log_factorials[-1] - log_factorials[counts] - log_factorials[num_trials - counts]

  def overflow(p):
    if p <= 0:
      return 0.0
    if p >= 1:
      return float(num_trials - num_slots)
    log_pmf = log_choose + counts * math.log(p) + (num_trials - counts) * math.log1p(-p)
    return np.sum(np.exp(log_pmf) * (counts - num_slots))

  # One buffer at a time, because all together need tokens times buffers numbers. Equal buffers are computed once.
  values, inverse = np.unique(np.asarray(probability, np.float64), return_inverse=True)
  return np.array([overflow(p) for p in values])[inverse]


def drop_rate(load: np.ndarray, sizes: Sizes, num_slots: int) -> float:
  """Return the expected share of a group's choices that get no slot in buffers with `num_slots` slots.

  Args:
    load: float64 [E], share of the choices that each expert gets.
    sizes: sizes of the layer.
    num_slots: number of slots of each buffer.
  """
  probability = choice_probabilities(load, sizes.num_selected)
  overflow = expected_overflow(sizes.num_routed, probability, num_slots)
  return float(overflow.sum() / sizes.num_choices)


def capacity_options(load: np.ndarray, sizes: Sizes, factors: Sequence[float]) -> list[Option]:
  """Return the drop rate and the costs of each capacity factor.

  Args:
    load: float64 [E], share of the choices that each expert gets.
    sizes: sizes of the layer.
    factors: capacity factors; balanced routing of k choices needs k.
  """
  options = []
  for factor in factors:
    num_slots = capacity_lib.expert_capacity(
      sizes.tokens_per_group, len(load), factor, sizes.min_capacity
    )
    # An expert gets at most all tokens of the group, which limits its buffer.
    rows = len(load) * min(num_slots, sizes.tokens_per_group)
    options.append(
      Option(
        factor=factor,
        num_slots=num_slots,
        drop_rate=drop_rate(load, sizes, num_slots),
        rows_per_choice=rows / sizes.num_choices,
        bytes=rows * sizes.bytes_per_row,
      )
    )
  return options


def receive_options(
  load: np.ndarray, sizes: Sizes, num_shards: int, factors: Sequence[float | None]
) -> list[Option]:
  """Return the drop rate and the costs of each `receive_factor`, for shards of consecutive experts.

  Padding is not sent, but an even share includes it.

  Args:
    load: float64 [E], share of the choices that each expert gets.
    sizes: sizes of the layer; `tokens_per_group` is the number of tokens of one device.
    num_shards: number of expert shards, which exchange tokens.
    factors: sizes of the receive buffer of a shard, as multiples of an even share; None is the worst case, which drops
      nothing (its option has the equivalent factor).

  Raises:
    ConfigError: `num_shards` does not divide the number of experts.
  """
  checks.check(
    '',
    locals(),
    num_shards=checks.Expectation(
      f'a divisor of the number of experts {len(load)}',
      lambda shards: shards >= 1 and len(load) % shards == 0,
      'The flag is --expert_partitions.',
    ),
  )
  # [shards]: probability of a choice to go to each shard.
  probabilities = choice_probabilities(load, sizes.num_selected)
  share = probabilities.reshape(num_shards, -1).sum(axis=1) / sizes.num_selected
  even_share = sizes.tokens_per_group * sizes.num_selected
  num_local_experts = len(load) // num_shards

  def num_receive_rows(factor):
    num_rows, _ = expert_parallel.num_receive_rows(
      sizes.tokens_per_group, sizes.num_selected, num_local_experts, num_shards, factor
    )
    return num_rows

  worst_case = num_receive_rows(None)
  options = []
  for factor in factors:
    num_slots = num_receive_rows(factor)
    # The choices of one token are assumed to be independent here, as those of different tokens.
    if num_slots >= worst_case:
      overflow = 0.0
    else:
      overflow = expected_overflow(num_shards * sizes.num_choices, share, num_slots).sum()
    if factor is None:
      factor = num_slots / even_share
    options.append(
      Option(
        factor=factor,
        num_slots=num_slots,
        drop_rate=float(overflow / (num_shards * sizes.num_choices)),
        rows_per_choice=num_slots / sizes.num_choices,
        bytes=num_slots * sizes.bytes_per_row,
      )
    )
  return options


def suggest_factor(load: np.ndarray, sizes: Sizes, max_drop_rate: float) -> float:
  """Return the smallest capacity factor, a multiple of 0.05, with an expected drop rate of at most `max_drop_rate`.

  Args:
    load: float64 [E], share of the choices that each expert gets.
    sizes: sizes of the layer.
    max_drop_rate: maximum share of the choices that may be dropped.

  Raises:
    ConfigError: a rate outside [0, 1).
  """

  def option(factor):
    return capacity_options(load, sizes, (factor,))[0]

  # With a factor of E every token gets a slot.
  return _smallest(len(load), max_drop_rate, option)


def suggest_receive_factor(
  load: np.ndarray, sizes: Sizes, num_shards: int, max_drop_rate: float
) -> float:
  """Return the smallest receive factor, a multiple of 0.05, with an expected drop rate of at most `max_drop_rate`.

  Args:
    load: float64 [E], share of the choices that each expert gets.
    sizes: sizes of the layer.
    num_shards: number of expert shards, which exchange tokens.
    max_drop_rate: maximum share of the choices that may be dropped.

  Raises:
    ConfigError: a rate outside [0, 1), or `num_shards` does not divide the number of experts.
  """

  def option(factor):
    return receive_options(load, sizes, num_shards, (factor,))[0]

  return _smallest(num_shards, max_drop_rate, option)


def _smallest(largest: float, max_drop_rate: float, option_fn: Callable[[float], Option]) -> float:
  """Return the smallest factor up to `largest` whose option has at most this drop rate, by bisection."""
  checks.check('', {'max_drop': max_drop_rate}, max_drop=checks.number(at_least=0, below=1))
  low = 1
  high = math.ceil(largest / _FINEST_STEP)
  while low < high:
    middle = (low + high) // 2
    if option_fn(round(middle * _FINEST_STEP, 2)).drop_rate <= max_drop_rate:
      high = middle
    else:
      low = middle + 1
  return round(high * _FINEST_STEP, 2)
