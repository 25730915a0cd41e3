"""Groups of tokens, which are routed independently and depend only on the shape of the batch."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.errors import ConfigError

# Groups that are this many times smaller than the group size are rejected, since they drop many tokens and are slow.
_LEAST_SHARE = 8


class Grouping(NamedTuple):
  """Division of the tokens of a batch into groups.

  Attributes:
    batch: number of rows of the batch, including padding.
    length: number of tokens of a row, including padding.
    num_groups: number of groups, G.
    group_size: number of tokens of a group, T; G * T = batch * length.
  """

  batch: int
  length: int
  num_groups: int
  group_size: int

  def split(self, x: jax.Array) -> jax.Array:
    """Return [G, T, ...] of `x` [rows, tokens, ...], padded with zeros (False)."""
    rows, tokens, *rest = x.shape
    if (rows, tokens) != (self.batch, self.length):
      padding = [(0, self.batch - rows), (0, self.length - tokens)]
      x = jnp.pad(x, padding + [(0, 0)] * len(rest))
    return x.reshape(self.num_groups, self.group_size, *rest)

  def merge(self, x: jax.Array, rows: int, tokens: int) -> jax.Array:
    """Return [`rows`, `tokens`, ...] of `x` [G, T, ...], the inverse of `split`."""
    return x.reshape(self.batch, self.length, *x.shape[2:])[:rows, :tokens]

  @property
  def rows_together(self) -> int:
    """Smallest number of consecutive rows, from the first row, that consist of entire groups."""
    return math.lcm(self.group_size, self.length) // self.length


def divide(batch: int, length: int, group_size: int, multiple: int = 1) -> Grouping:
  """Divide `batch * length` tokens, row by row, into groups of equal size.

  A group has as many tokens as possible, up to `group_size`, independent of devices.

  With a `multiple` above 1 the rule is T5X's, where it is the number of experts (times their copies): if the number of
  tokens is not a multiple, all rows are padded or rows are added, whichever needs fewer tokens; the number of groups is
  then the smallest divisor of the tokens that is a multiple and at least `tokens // group_size`. So groups may have up
  to twice `group_size` tokens.

  Args:
    batch: number of rows of the batch.
    length: number of tokens of a row.
    group_size: largest number of tokens of a group; but see above.
    multiple: divisor of the number of groups.

  Raises:
    ConfigError: the number of tokens has no divisor near `group_size`, or it is symbolic.

  >>> divide(batch=4, length=16, group_size=32)
  Grouping(batch=4, length=16, num_groups=2, group_size=32)
  >>> divide(batch=3, length=7, group_size=8, multiple=4)
  Grouping(batch=3, length=8, num_groups=4, group_size=6)
  >>> divide(batch=4, length=18, group_size=16), divide(batch=4, length=18, group_size=16, multiple=2)
  (Grouping(batch=4, length=18, num_groups=6, group_size=12), Grouping(batch=4, length=18, num_groups=4, group_size=18))
  """
  size = checks.number(
    at_least=1,
    integer=True,
    remedy='For an export set --gin.export_lib.save.batch_size=8, or another number.',
  )
  checks.check('batch', {'rows': batch, 'tokens': length}, rows=size, tokens=size)
  batch, length = _pad(batch, length, multiple)
  tokens = batch * length

  def fits(num_groups):
    if tokens % num_groups or num_groups % multiple:
      return False
    return multiple > 1 or tokens <= num_groups * group_size

  num_groups = max(tokens // group_size, multiple)
  while not fits(num_groups):
    num_groups += 1
  found = tokens // num_groups
  if multiple == 1 and found * _LEAST_SHARE < min(group_size, tokens):
    raise ConfigError(
      f'`group_size` must be a divisor of the {tokens} tokens of a batch ({batch} rows of {length}), or slightly '
      f'larger than one, got {group_size}: the largest divisor below is {found}. Set `group_size` to {tokens} '
      '(one group), or change the batch size.'
    )
  return Grouping(batch, length, num_groups, found)


def divide_microbatch(
  batch: int, length: int, num_microbatches: int, group_size: int, multiple: int = 1
) -> Grouping:
  """Return the groups of one micro-batch, which are entire groups of the batch; see `divide`.

  Args:
    batch: number of rows of the entire batch.
    length: number of tokens of a row.
    num_microbatches: number of micro-batches of equal size, each of entire groups.
    group_size: see `divide`.
    multiple: see `divide`, which applies it to the groups of the entire batch.

  Raises:
    ConfigError: see `divide`; or the micro-batches do not consist of entire groups.

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
      f'multiple of {multiple}, or num_groups_multiple=1.'
    )
  rows = batch // num_microbatches
  tokens = groups.batch * groups.length
  if batch % num_microbatches or rows % groups.rows_together:
    num_groups = groups.num_groups
    while tokens % num_groups or num_groups % math.lcm(num_microbatches, multiple):
      num_groups += 1
    fitting = 'None'
    largest = math.gcd(groups.num_groups, batch)
    if largest > 1:
      fitting = f'a divisor of {largest}'
    plural = 's'
    if groups.num_groups == 1:
      plural = ''
    raise ConfigError(
      f'`MoeLayer.group_size` must make groups that are within one micro-batch, got group_size={group_size} '
      f'({groups.num_groups} group{plural} of {groups.group_size} tokens) for a batch of '
      f'{batch} rows of {length} tokens and num_microbatches={num_microbatches}. Set group_size='
      f'{tokens // num_groups} (GROUP_SIZE in gin), or num_microbatches to {fitting}.'
    )
  return Grouping(rows, groups.length, groups.num_groups // num_microbatches, groups.group_size)


def _pad(batch: int, length: int, multiple: int) -> tuple[int, int]:
  """Return (batch, length) padded so that their product is a multiple of `multiple`, with few additional tokens."""
  if batch * length % multiple == 0:
    return batch, length
  rows = next(n for n in range(1, multiple + 1) if (batch + n) * length % multiple == 0)
  columns = next(n for n in range(1, multiple + 1) if batch * (length + n) % multiple == 0)
  if columns * batch > rows * length:
    return (batch + rows, length)
  return (batch, length + columns)
