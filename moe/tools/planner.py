"""What a capacity costs and drops: from the load that a run has recorded, or from a skewed one that is made up.

The number of a group's tokens that choose expert e is taken for binomial: each of T tokens chooses it with probability
`num_selected * load[e]`, independently of the others. That gives expected drops exactly, without drawing. Tokens of one
text are more alike than that, so real drops are somewhat higher; a recorded run tells its own
(`experts/<layer>/fraction_tokens_left_behind`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from moe.dispatch import expert_parallel
from moe.routing import capacity as capacity_lib
from t5x_lite import errors

# Of capacity factors per choice of a token: 1 is what balanced routing fills.
DEFAULT_FACTORS = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
# Of an expert, as `MoeLayer` has it.
DEFAULT_MIN_CAPACITY = 4
_FINEST_STEP = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What a layer routes, and how large its experts are.

  Attributes:
    tokens_per_group: T, padding included.
    routed_share: share of the tokens that is routed; padding usually is not, but capacities count it.
    num_selected: experts that a token chooses.
    width: size of a token.
    hidden: hidden units of an expert.
    num_inputs: input kernels of an expert, 2 for a gated one.
    bytes_per_number: of activations, 2 for bfloat16.
    min_capacity: least number of places of an expert.

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
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == 'routed_share':
        if not 0 < value <= 1:
          raise errors.ConfigError(f'routed_share is {value!r}; expected a share above 0, at most 1.')
      elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.ConfigError(f'{field.name} is {value!r}; expected a whole number of at least 1.')

  @property
  def num_routed(self) -> int:
    """Tokens of a group that are routed."""
    return max(1, round(self.routed_share * self.tokens_per_group))

  @property
  def num_choices(self) -> int:
    """Choices of a group's tokens; dropless dispatch computes so many rows."""
    return self.num_routed * self.num_selected

  @property
  def bytes_per_row(self) -> int:
    """Activations that a place of a buffer holds for the backward pass: input, hidden units, output."""
    return (2 * self.width + (self.num_inputs + 1) * self.hidden) * self.bytes_per_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
  """What one size of the buffers drops and costs.

  Attributes:
    factor: capacity factor as the layer takes it (`train_capacity_factor`), or receive factor.
    places: places of one buffer: of an expert for a group, or of a shard.
    drop_rate: expected share of the choices that find no place.
    rows_per_choice: places of all buffers over choices of all tokens; 1 is what dropless routing computes.
    bytes: activations of all buffers of a group.
  """

  factor: float
  places: int
  drop_rate: float
  rows_per_choice: float
  bytes: int


def zipf_load(num_experts: int, exponent: float) -> np.ndarray:
  """Return the load of experts whose popularity falls as rank ** -exponent; 0 is balanced, 1 is Zipf's law.

  Raises:
    ConfigError: no expert, or a negative exponent.

  >>> zipf_load(2, 1.0).round(3).tolist()
  [0.667, 0.333]
  """
  if num_experts < 1:
    raise errors.ConfigError(f'num_experts is {num_experts}; expected at least 1.')
  if not 0 <= exponent < math.inf:
    raise errors.ConfigError(f'zipf is {exponent}; expected a number of at least 0.')
  load = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
  return load / load.sum()


def check_load(load: np.ndarray, num_selected: int) -> np.ndarray:
  """Return the probability with which a token chooses each expert, float64 [experts].

  No expert can be chosen twice by a token: what a load asks beyond that goes to the others, in proportion to theirs.

  Raises:
    ConfigError: `load` is no load, or there are fewer experts than choices.
  """
  load = np.asarray(load, np.float64)
  if load.ndim != 1 or not load.size or not np.all(np.isfinite(load)) or np.any(load < 0) or not load.sum() > 0:
    raise errors.ConfigError(f'got a load of shape {load.shape} with a sum of {load.sum():.3g}; expected a share for '
                             'each expert, none negative and not all 0.')
  if num_selected > load.size:
    raise errors.ConfigError(f'num_selected is {num_selected}; expected at most the {load.size} experts.')
  probability = num_selected * load / load.sum()
  full = np.zeros(load.size, bool)
  while np.any(probability[~full] > 1):
    full |= probability >= 1
    rest = load[~full].sum()
    left = num_selected - full.sum()
    probability = np.where(full, 1.0, load * (left / rest if rest > 0 else 0.0))
  return np.minimum(probability, 1.0)


def expected_overflow(num_trials: int, probability: np.ndarray, places: int) -> np.ndarray:
  """Return E[max(X - places, 0)] for binomial X, float64 [buffers].

  Args:
    num_trials: tokens.
    probability: that a token is for a buffer, [buffers].
    places: places of each buffer.

  >>> expected_overflow(2, np.array([0.5, 1.0]), places=1).tolist()
  [0.25, 1.0]
  """
  if places >= num_trials:
    return np.zeros(len(probability))
  counts = np.arange(places + 1, num_trials + 1)
  log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num_trials + 1)))])
  log_choose = log_factorials[-1] - log_factorials[counts] - log_factorials[num_trials - counts]

  def overflow(p):
    if p <= 0 or p >= 1:
      return (num_trials - places) * float(p >= 1)
    log_pmf = log_choose + counts * math.log(p) + (num_trials - counts) * math.log1p(-p)
    return np.sum(np.exp(log_pmf) * (counts - places))

  # One buffer at a time: all at once take tokens times buffers numbers. Equal ones are computed once.
  values, inverse = np.unique(np.asarray(probability, np.float64), return_inverse=True)
  return np.array([overflow(p) for p in values])[inverse]


def drop_rate(load: np.ndarray, sizes: Sizes, places: int) -> float:
  """Return the expected share of a group's choices that find no place in buffers of so many places."""
  probability = check_load(load, sizes.num_selected)
  overflow = expected_overflow(sizes.num_routed, probability, places)
  return float(overflow.sum() / sizes.num_choices)


def capacity_options(load: np.ndarray, sizes: Sizes, factors: Sequence[float]) -> list[Option]:
  """Return what each capacity factor drops and costs.

  Args:
    load: share of the choices that each expert gets.
    sizes: of the layer.
    factors: capacity factors; balanced routing of k choices needs k.
  """
  options = []
  for factor in factors:
    places = capacity_lib.expert_capacity(sizes.tokens_per_group, len(load), factor, sizes.min_capacity)
    # An expert cannot get more tokens than there are; buffers are cut to that.
    rows = len(load) * min(places, sizes.tokens_per_group)
    options.append(Option(
        factor=factor, places=places, drop_rate=drop_rate(load, sizes, places),
        rows_per_choice=rows / sizes.num_choices, bytes=rows * sizes.bytes_per_row))
  return options


def receive_options(load: np.ndarray, sizes: Sizes, num_shards: int,
                    factors: Sequence[float | None]) -> list[Option]:
  """Return what each `receive_factor` drops and costs, with the experts cut into shards in their order.

  Padding is sent nowhere, but an even share counts it.

  Args:
    load: share of the choices that each expert gets.
    sizes: of the layer; `tokens_per_group` are the tokens of one device.
    num_shards: expert shards, which exchange tokens.
    factors: sizes of the buffer in which a shard receives, as multiples of an even share; None is the worst case,
      which drops nothing (its option says the factor that it amounts to).

  Raises:
    ConfigError: the experts do not divide over the shards.
  """
  if num_shards < 1 or len(load) % num_shards:
    raise errors.ConfigError(f'{len(load)} experts do not divide over {num_shards} shards; expected a divisor.')
  share = check_load(load, sizes.num_selected).reshape(num_shards, -1).sum(axis=1) / sizes.num_selected
  even_share = sizes.tokens_per_group * sizes.num_selected
  layout = (sizes.tokens_per_group, sizes.num_selected, len(load) // num_shards, num_shards)
  worst_case, _ = expert_parallel.num_receive_rows(*layout, None)
  options = []
  for factor in factors:
    places, _ = expert_parallel.num_receive_rows(*layout, factor)
    # The choices of one token are taken for independent here, as those of different tokens are.
    overflow = (0.0 if places >= worst_case
                else expected_overflow(num_shards * sizes.num_choices, share, places).sum())
    options.append(Option(
        factor=places / even_share if factor is None else factor, places=places,
        drop_rate=float(overflow / (num_shards * sizes.num_choices)),
        rows_per_choice=places / sizes.num_choices, bytes=places * sizes.bytes_per_row))
  return options


def suggest_factor(load: np.ndarray, sizes: Sizes, max_drop_rate: float) -> float:
  """Return the smallest capacity factor, a multiple of 0.05, that is expected to drop no more than `max_drop_rate`.

  Raises:
    ConfigError: a rate outside of 0 to 1.
  """
  # With a factor of E every token finds a place.
  return _smallest(len(load), max_drop_rate, lambda factor: capacity_options(load, sizes, (factor,))[0])


def suggest_receive_factor(load: np.ndarray, sizes: Sizes, num_shards: int, max_drop_rate: float) -> float:
  """Return the smallest receive factor, a multiple of 0.05, that is expected to drop no more than `max_drop_rate`.

  Raises:
    ConfigError: a rate outside of 0 to 1, or experts that do not divide over the shards.
  """
  return _smallest(num_shards, max_drop_rate, lambda factor: receive_options(load, sizes, num_shards, (factor,))[0])


def _smallest(largest: float, max_drop_rate: float, option_fn: Callable[[float], Option]) -> float:
  """Return the smallest factor up to `largest` whose option drops little enough, by bisection."""
  if not 0 <= max_drop_rate < 1:
    raise errors.ConfigError(f'max_drop is {max_drop_rate}; expected a share of at least 0 and below 1.')
  low, high = 1, math.ceil(largest / _FINEST_STEP)
  while low < high:
    middle = (low + high) // 2
    if option_fn(round(middle * _FINEST_STEP, 2)).drop_rate <= max_drop_rate:
      high = middle
    else:
      low = middle + 1
  return round(high * _FINEST_STEP, 2)
