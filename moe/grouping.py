"""Groups of tokens: routing is done group by group, and what a group is follows from the batch's shape alone."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from t5x_lite.errors import ConfigError

# A largest divisor this many times below the group size is refused: such groups drop much and cost much.
_LEAST_SHARE = 8


class Grouping(NamedTuple):
  """How the tokens of a batch are divided.

  Attributes:
    batch: rows of the batch, filling included.
    length: tokens of a row, filling included.
    num_groups: G.
    group_size: T; G * T = batch * length.
  """

  batch: int
  length: int
  num_groups: int
  group_size: int

  def split(self, x: jax.Array) -> jax.Array:
    """Return [G, T, ...] of [rows, tokens, ...], filled with zeros (False) behind rows and tokens."""
    filling = [(0, self.batch - x.shape[0]), (0, self.length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    if any(after for _, after in filling):
      x = jnp.pad(x, filling)
    return x.reshape(self.num_groups, self.group_size, *x.shape[2:])

  def merge(self, x: jax.Array, rows: int, tokens: int) -> jax.Array:
    """Inverse of `split`: [rows, tokens, ...] of [G, T, ...]."""
    return x.reshape(self.batch, self.length, *x.shape[2:])[:rows, :tokens]

  @property
  def rows_together(self) -> int:
    """The least number of consecutive rows, counted from the first, that hold whole groups."""
    return math.lcm(self.group_size, self.length) // self.length


def divide(batch: int, length: int, group_size: int, multiple: int = 1) -> Grouping:
  """Divide `batch * length` tokens, row by row, into groups of equal size.

  A group has as many tokens as possible, at most `group_size`. Devices have no part in it.

  With a `multiple` above 1 the rule is T5X's, which has the number of experts (times the copies of each) for it: if the
  tokens are no multiple of that, it fills up all rows or adds rows, whichever needs fewer tokens; then it takes the
  smallest number of groups that divides, is a multiple, and is not below `tokens // group_size`. Rounded down, that
  makes groups of more than `group_size` tokens, of less than twice as many, where the tokens are no multiple of it.

  Args:
    batch: rows of the batch.
    length: tokens of a row.
    group_size: the most tokens of a group; but see above.
    multiple: the number of groups is a multiple of this.

  Raises:
    ConfigError: the number of tokens has no divisor near `group_size`, or it is not known yet.

  >>> divide(batch=4, length=16, group_size=32)
  Grouping(batch=4, length=16, num_groups=2, group_size=32)
  >>> divide(batch=3, length=7, group_size=8, multiple=4)
  Grouping(batch=3, length=8, num_groups=4, group_size=6)
  >>> divide(batch=4, length=18, group_size=16), divide(batch=4, length=18, group_size=16, multiple=2)
  (Grouping(batch=4, length=18, num_groups=6, group_size=12), Grouping(batch=4, length=18, num_groups=4, group_size=18))
  """
  if not isinstance(batch, int) or not isinstance(length, int):
    raise ConfigError(f'got a batch of {batch} rows of {length} tokens; expected numbers: tokens of sparse layers are '
                      'routed in groups, which follow from them. For an export set --gin.export_lib.save.batch_size=8, '
                      'or another number.')
  batch, length = _fill(batch, length, multiple)
  tokens = batch * length
  if not tokens:
    raise ConfigError(f'got a batch of {batch} rows of {length} tokens; expected at least one token.')
  num_groups = max(tokens // group_size, multiple)
  while tokens % num_groups or num_groups % multiple or (multiple == 1 and tokens > num_groups * group_size):
    num_groups += 1
  found = tokens // num_groups
  if multiple == 1 and found * _LEAST_SHARE < min(group_size, tokens):
    raise ConfigError(
        f'{batch} rows of {length} tokens do not divide into groups of about {group_size}: the largest divisor of '
        f'{tokens} up to there is {found}. Set group_size to {tokens} (one group) or to a divisor, or change the batch '
        'size.')
  return Grouping(batch, length, num_groups, found)


def divide_microbatch(batch: int, length: int, num_microbatches: int, group_size: int, multiple: int = 1) -> Grouping:
  """Return the groups of one micro-batch: whole groups of the entire batch, see `divide`.

  Args:
    batch: rows of the entire batch.
    length: tokens of a row.
    num_microbatches: number of micro-batches of equal size, each of whole groups.
    group_size: see `divide`.
    multiple: see `divide`, which applies it to the groups of the entire batch.

  Raises:
    ConfigError: see `divide`; or the micro-batches cannot hold whole groups.

  >>> divide_microbatch(batch=8, length=16, num_microbatches=2, group_size=32)
  Grouping(batch=4, length=16, num_groups=2, group_size=32)
  """
  groups = divide(batch, length, group_size, multiple)
  if num_microbatches == 1:
    return groups
  if groups.batch != batch:
    raise ConfigError(
        f'`MoeLayer.num_groups_multiple` must not add rows to a batch of several micro-batches, got {multiple}, which '
        f'makes {groups.batch} rows of {batch}, with num_microbatches={num_microbatches}. Set a batch size that is a '
        f'multiple of {multiple}, or num_groups_multiple=1.')
  rows, tokens = batch // num_microbatches, groups.batch * groups.length
  if batch % num_microbatches or rows % groups.rows_together:
    num_groups = groups.num_groups
    while tokens % num_groups or num_groups % math.lcm(num_microbatches, multiple):
      num_groups += 1
    largest = math.gcd(groups.num_groups, batch)
    raise ConfigError(
        f'`MoeLayer.group_size` must make groups that are within one micro-batch, got group_size={group_size} '
        f'({groups.num_groups} group{"s"[:groups.num_groups - 1]} of {groups.group_size} tokens) for a batch of '
        f'{batch} rows of {length} tokens and num_microbatches={num_microbatches}. Set group_size='
        f'{tokens // num_groups} (GROUP_SIZE in gin), or num_microbatches to '
        f'{f"a divisor of {largest}" if largest > 1 else "None"}.')
  return Grouping(rows, groups.length, groups.num_groups // num_microbatches, groups.group_size)


def _fill(batch: int, length: int, multiple: int) -> tuple[int, int]:
  """Return (batch, length) enlarged so that their product is a multiple, at the price of few tokens."""
  if batch * length % multiple == 0:
    return batch, length
  rows = next(n for n in range(1, multiple + 1) if (batch + n) * length % multiple == 0)
  columns = next(n for n in range(1, multiple + 1) if batch * (length + n) % multiple == 0)
  return (batch + rows, length) if columns * batch > rows * length else (batch, length + columns)
