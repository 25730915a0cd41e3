"""What is refused of a decoding's options, before anything is computed.

Options may be traced by an enclosing `jax.jit`; a traced value has no number yet and cannot be checked.
"""

from collections.abc import Sequence
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from t5x_lite.errors import ConfigError
from t5x_lite.types import Array


def concrete(value: Any) -> np.ndarray | None:
  """Returns the numbers of `value`, NaN for what is no number; None if traced, or on devices of other processes."""
  if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and not value.is_fully_addressable):
    return None
  known = np.asarray(value)
  return np.full(known.shape, np.nan) if known.dtype.kind in 'OSU' else known


def check_inputs(inputs: Array) -> None:
  """Refuses anything but token ids [batch, length].

  Raises:
    ConfigError: `inputs` has another rank or dtype.
  """
  if jnp.ndim(inputs) != 2 or not jnp.issubdtype(jnp.result_type(inputs), jnp.integer):
    raise ConfigError(
        f'Got inputs of shape {jnp.shape(inputs)} and dtype {jnp.result_type(inputs)} to decode from; expected token '
        'ids, <int32>[batch, length]: the start token, forced tokens, then zeros up to the number of tokens to decode.')


def check_count(name: str, value: int, remedy: str) -> None:
  """Refuses a count that is not a whole number of at least 1.

  Raises:
    ConfigError: `value` is something else.
  """
  try:
    valid = operator.index(value) >= 1
  except TypeError:
    valid = False
  if not valid:
    raise ConfigError(f'Got {name}={value!r}; expected a whole number of at least 1. {remedy}')


def check_max_decode_step(max_decode_step: Any) -> None:
  """Refuses a number of steps that is not whole.

  Raises:
    ConfigError: `max_decode_step` is something else.
  """
  known = concrete(max_decode_step)
  if known is not None and not _is_whole_number(known):
    raise ConfigError(f'Got max_decode_step={max_decode_step!r}; expected a whole number. 0 or less sets no bound.')


def _is_whole_number(known: np.ndarray) -> bool:
  return known.ndim == 0 and np.issubdtype(known.dtype, np.integer)


def end_token_ids(eos_id: int, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
  """Returns all tokens that end a sequence.

  Raises:
    ConfigError: `eos_id` is not a whole number, or `stop_token_ids` is not a sequence of ids above 0, the id of
      padding.
  """
  known = concrete(eos_id)
  if known is not None and not _is_whole_number(known):
    raise ConfigError(
        f'Got eos_id={eos_id!r}; expected a token id, that of the output vocabulary. With a negative number no token '
        'ends a sequence.')
  try:
    stops = tuple(operator.index(token) for token in stop_token_ids)
    valid = min(stops, default=1) > 0
  except TypeError:
    valid = False
  if not valid:
    raise ConfigError(
        f'Got stop_token_ids={stop_token_ids!r}; expected a sequence of token ids above 0, such as (5, 9). 0 is '
        'padding.')
  return (eos_id, *stops)


def is_end_token(tokens: Array, ends: tuple[int, ...]) -> Array:
  """Returns <bool>[...], whether each of `tokens` <int32>[...] is one of `ends`. Padding, 0, ends nothing."""
  found = jnp.zeros(tokens.shape, bool)
  for end in ends:
    found |= tokens == end
  return found & (tokens != 0)


def check_initial_index(initial_index: Array | None, inputs: Array) -> Array | None:
  """Returns `initial_index` as <int32>[batch], or None.

  Raises:
    ConfigError: it is not one whole number for each row, is outside the row, or counts tokens that the row lacks.
  """
  if initial_index is None:
    return None
  batch, length = inputs.shape
  if jnp.shape(initial_index) != (batch,) or not jnp.issubdtype(jnp.result_type(initial_index), jnp.integer):
    raise ConfigError(
        f'Got initial_index of shape {jnp.shape(initial_index)} and dtype {jnp.result_type(initial_index)} for inputs '
        f'of {batch} rows; expected <int32>[{batch}], the number of tokens of each row that the cache holds.')
  index, tokens = concrete(initial_index), concrete(inputs)
  if index is not None:
    if np.any((index < 0) | (index >= length)):
      raise ConfigError(
          f'Got initial_index={index.tolist()} for inputs of length {length}; expected numbers from 0 to {length - 1}. '
          'Pass longer inputs: they hold the prompt and the tokens to decode.')
    if tokens is not None and np.any((index > 0) & (tokens[np.arange(batch), index] == 0)):
      raise ConfigError(
          f'Got initial_index={index.tolist()} for inputs with padding at one of these positions; expected the '
          'position of the last token of each prompt (0 for none). Count the tokens behind the start token.')
  return jnp.asarray(initial_index, jnp.int32)


def check_is_filling(is_filling: Array | None, batch_size: int) -> Array:
  """Returns `is_filling` as <bool>[batch]: no row, if it is None.

  Raises:
    ConfigError: it is not one truth value for each row.
  """
  if is_filling is None:
    return jnp.zeros((batch_size,), bool)
  if jnp.shape(is_filling) != (batch_size,) or jnp.result_type(is_filling) != bool:
    raise ConfigError(
        f'Got is_filling of shape {jnp.shape(is_filling)} and dtype {jnp.result_type(is_filling)} for inputs of '
        f'{batch_size} rows; expected <bool>[{batch_size}], True for rows that only fill up the batch.')
  return jnp.asarray(is_filling)


def check_temperature(temperature: Any, batch_size: int) -> None:
  """Refuses temperatures that are negative or not finite, and any number of them but one or one for each row.

  Raises:
    ConfigError: see above.
  """
  if np.shape(temperature) not in ((), (batch_size,)):
    raise ConfigError(
        f'Got temperatures of shape {jnp.shape(temperature)} for {batch_size} rows; expected one number, or one for '
        f'each row of the batch, [{batch_size}].')
  known = concrete(temperature)
  if known is not None and not np.all(np.isfinite(known) & (known >= 0)):
    raise ConfigError(
        f'Got temperature={temperature}; expected finite numbers of at least 0. 0 takes the most probable token, 1 '
        'draws from what the network predicts.')


def check_topk_topp(topk: Any, topp: Any) -> None:
  """Refuses limits of sampling that are out of range, and both at once.

  Raises:
    ConfigError: `topk` is not a whole number of at least 0, `topp` is outside [0, 1], or neither is 0.
  """
  top_k, top_p = concrete(topk), concrete(topp)
  if top_k is not None and not (_is_whole_number(top_k) and top_k >= 0):
    raise ConfigError(f'Got topk={topk}; expected a whole number of at least 0. 0 draws from the whole vocabulary.')
  if top_p is not None and not (top_p.ndim == 0 and 0 <= top_p <= 1):
    raise ConfigError(f'Got topp={topp}; expected a probability from 0 to 1. 0 draws from the whole vocabulary.')
  if top_k is not None and top_p is not None and top_k and top_p:
    raise ConfigError(
        f'Got topk={topk} and topp={topp}; at most one of them may differ from 0. Set topk=0 to sample with topp (1 is '
        "topk's default), or topp=0.")


def check_max_decode_steps(max_decode_steps: Any, hard_limit: int | None, inputs: Array) -> Array | None:
  """Returns the number of tokens to decode behind each prompt, <int32>[] or [batch], or None.

  Raises:
    ConfigError: `max_decode_steps` is not one number or one for each row, is below 1 or above the length of `inputs`,
      or `hard_limit` is negative.
  """
  batch, length = inputs.shape
  if hard_limit is not None and hard_limit < 0:
    raise ConfigError(f'Got max_decode_steps_hard_limit={hard_limit}; expected at least 1, or None for no limit.')
  if max_decode_steps is None:
    return None
  if np.shape(max_decode_steps) not in ((), (batch,)):
    raise ConfigError(
        f'Got max_decode_steps of shape {jnp.shape(max_decode_steps)} for {batch} rows; expected one number, or one '
        f'for each row of the batch, [{batch}].')
  known = concrete(max_decode_steps)
  if known is not None:
    allowed = np.minimum(known, hard_limit) if hard_limit else known
    if not (np.issubdtype(known.dtype, np.integer) and np.all((known >= 1) & (allowed <= length))):
      raise ConfigError(
          f'Got max_decode_steps={max_decode_steps} for inputs of length {length}; expected whole numbers from 1 to '
          f'{length}. Pass longer inputs to decode more tokens.')
    return jnp.asarray(allowed, jnp.int32)
  steps = jnp.asarray(max_decode_steps, jnp.int32)
  return jnp.minimum(steps, hard_limit) if hard_limit else steps
