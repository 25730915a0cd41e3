"""Expectations on the options of decoding functions, checked before anything is computed.

Options may be traced by an enclosing `jax.jit`; the value of a traced option is unknown and is not checked.
"""

from collections.abc import Callable, Sequence
import operator
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.checks import Expectation
from t5x_lite.types import Array

COUNT = checks.number(at_least=1, integer=True)


def concrete(value: Any) -> np.ndarray | None:
  """Return the numbers of `value` in its shape, NaN if not numeric; None if traced or on devices of other processes."""
  if isinstance(value, Tracer):
    return None
  if isinstance(value, jax.Array) and not value.is_fully_addressable:
    return None
  known = np.asarray(value)
  if known.dtype.kind in 'OSU':
    return np.full(known.shape, np.nan)
  return known


def numbers(
  text: str,
  condition: Callable[[np.ndarray], Any],
  *,
  shapes: Sequence[tuple[int, ...]] = ((),),
  integer: bool = False,
  remedy: str = '',
) -> Expectation:
  """Expect a number or an array of numbers; of a traced option only the shape is checked.

  Args:
    text: completes the sentence "the option must be ...".
    condition: returns for an array whether each number is valid.
    shapes: valid shapes.
    integer: accept only integer dtypes.
    remedy: see `Expectation`.
  """

  def holds(value: Any) -> bool:
    if np.shape(value) not in shapes:
      return False
    known = concrete(value)
    return known is None or bool(
      (not integer or np.issubdtype(known.dtype, np.integer)) and np.all(condition(known))
    )

  return Expectation(text, holds, remedy)


MAX_DECODE_STEP = numbers(
  'an integer', lambda known: True, integer=True, remedy='0 or less sets no bound.'
)
EOS_ID = numbers(
  'a token id of the output vocabulary',
  lambda known: True,
  integer=True,
  remedy='With a negative number no token ends a sequence.',
)


def _are_token_ids(value: Any) -> bool:
  try:
    return min((operator.index(token) for token in value), default=1) > 0
  except TypeError:
    return False


STOP_TOKEN_IDS = Expectation(
  'a sequence of token ids above 0, such as (5, 9)', _are_token_ids, '0 is padding.'
)


def check_inputs(owner: str, inputs: Array) -> None:
  """Raise ConfigError unless `inputs` are token ids <int>[batch, length].

  Args:
    owner: name of the decoding function, for the error.
    inputs: the start token, forced tokens, then zeros for the tokens to decode.
  """
  checks.check(
    owner,
    {'inputs': inputs},
    inputs=Expectation(
      'token ids <int32>[batch, length]: the start token, forced tokens, then zeros for the tokens to decode',
      lambda inputs: jnp.ndim(inputs) == 2 and jnp.issubdtype(jnp.result_type(inputs), jnp.integer),
    ),
  )


def end_token_ids(eos_id: int, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
  """Return all tokens that end a sequence: `eos_id` and `stop_token_ids`."""
  return (eos_id, *map(operator.index, stop_token_ids))


def is_end_token(tokens: Array, ends: tuple[int, ...]) -> Array:
  """Return <bool>[...], True where `tokens` <int32>[...] are in `ends`. Padding, 0, never ends a sequence."""
  found = jnp.zeros(tokens.shape, bool)
  for end in ends:
    found |= tokens == end
  return found & (tokens != 0)


def initial_index(inputs: Array) -> Expectation:
  """Expect the number of cached tokens of each row, <int>[batch], or None.

  Args:
    inputs: <int32>[batch, length], whose tokens the cache holds.
  """
  batch, length = inputs.shape

  def holds(value: Any) -> bool:
    if value is None:
      return True
    if jnp.shape(value) != (batch,) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
      return False
    index = concrete(value)
    tokens = concrete(inputs)
    return index is None or bool(
      np.all((index >= 0) & (index < length))
      and (tokens is None or np.all((index == 0) | (tokens[np.arange(batch), index] != 0)))
    )

  return Expectation(
    f'<int32>[{batch}] or None: the position in `inputs`, from 0 to {length - 1}, of the last token of each prompt, '
    'which is not padding',
    holds,
    'Longer inputs hold longer prompts.',
  )


def padding_mask(inputs: Array) -> Expectation:
  """Expect <bool>[batch], True for padding rows of `inputs` <int32>[batch, length], or None."""
  batch = inputs.shape[0]

  def holds(mask: Any) -> bool:
    if mask is None:
      return True
    return jnp.shape(mask) == (batch,) and jnp.result_type(mask) == jnp.bool_

  return Expectation(f'<bool>[{batch}], True for padding rows, or None', holds)


def max_decode_steps(inputs: Array, hard_limit: int | None = None) -> Expectation:
  """Expect a number of tokens to decode, for all rows or for each row, or None.

  Args:
    inputs: <int32>[batch, length], whose length bounds the number.
    hard_limit: bound to which larger numbers are reduced; None or 0 for none.
  """
  batch, length = inputs.shape

  def holds(known: np.ndarray) -> np.ndarray:
    reduced = known
    if hard_limit:
      reduced = np.minimum(known, hard_limit)
    fits = reduced <= length
    if not np.all(fits) and checks.log_for_t5x(
      f'`max_decode_steps` is reduced to {length}, the length of the sequences.'
    ):
      fits = True
    return (known >= 1) & fits

  return numbers(
    f'an integer from 1 to {length}, the length of `inputs`, or one for each of the {batch} rows',
    holds,
    shapes=((), (batch,)),
    integer=True,
    remedy='Longer inputs decode more tokens.',
  ).or_none()


def decode_length(length: int, *bounds: Any) -> int:
  """Return the least of `length` and the largest number of each bound above 0; None and traced bounds do not count."""
  known = [concrete(bound) for bound in bounds if bound is not None]
  largest = [int(np.max(bound)) for bound in known if bound is not None]
  return min([length, *(bound for bound in largest if bound > 0)])


def mask_or_zeros(mask: Array | None, batch_size: int) -> Array:
  """Return `mask` as <bool>[`batch_size`]; None means no padding."""
  if mask is None:
    return jnp.zeros((batch_size,), bool)
  return jnp.asarray(mask)


def int32_or_none(value: Any) -> Array | None:
  """Return `value` as int32, or None."""
  if value is None:
    return None
  return jnp.asarray(value, jnp.int32)
