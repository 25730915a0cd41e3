"""Loop of sampling and greedy search: one token per row and step, until all rows have ended."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite.decoding.cache import like_cache
from t5x_lite.decoding.options import is_end_token
from t5x_lite.decoding.state import DecodingState
from t5x_lite.decoding.state import LogitCallbackFn
from t5x_lite.decoding.state import LogitProcessor
from t5x_lite.decoding.state import ProcessorInputs
from t5x_lite.decoding.state import Rows
from t5x_lite.decoding.state import SamplingLoopState
from t5x_lite.decoding.state import StateCallbackFn
from t5x_lite.decoding.state import TokensIdsToLogitsCallable
from t5x_lite.types import Array

# (key, <float32>[rows, vocab] logits) -> (<int32>[rows] tokens, <float32>[rows] their log-probabilities).
ChooseFn = Callable[[Array, Array], tuple[Array, Array]]

# Columns after each row of tokens: the one that the last step writes, and one that is discarded.
_EXTRA_COLUMNS = 2


def decode_tokens(
  rows: Rows,
  cache: Mapping[str, Any],
  tokens_to_logits: TokensIdsToLogitsCallable,
  choose: ChooseFn,
  *,
  ends: tuple[int, ...],
  rng: Array,
  max_decoded: int,
  state_callback_fn: StateCallbackFn | None = None,
  logit_callback_fn: LogitCallbackFn | None = None,
  logit_processor: LogitProcessor | None = None,
) -> tuple[Array, Array]:
  """Decode one sequence for each row.

  A row ends with an end token that is not part of its prompt, or at its limit; padding follows. Each row has its own
  position. A row that has ended writes padding until all rows have ended, finally into a column that is discarded.

  Args:
    rows: initial state of each row.
    cache: the network's `cache` collection for these rows.
    tokens_to_logits: step of the network.
    choose: chooses the tokens from logits.
    ends: tokens that end a sequence.
    rng: key of the draws, split in each step.
    max_decoded: largest number of tokens that a row may decode, as far as it is known.
    state_callback_fn: may change the state before each step and at the end.
    logit_callback_fn: may change the logits of a step.
    logit_processor: changes these logits, in float32.

  Returns:
    (<int32>[rows, length] tokens, <float32>[rows] sums of the log-probabilities of decoded tokens, the end token
    included and forced tokens excluded).
  """
  (num_rows, length) = rows.tokens.shape
  padding_mask = rows.padding_mask
  inputs = jnp.where(padding_mask[:, None], 0, rows.tokens)
  sequences = jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, _EXTRA_COLUMNS)))
  columns = jnp.arange(length + _EXTRA_COLUMNS)
  # Number of tokens of each row when it is complete.
  limit = jnp.full((num_rows,), length, jnp.int32)
  if rows.max_decode_steps is not None:
    prompt_lengths = jnp.sum(inputs[:, 1:] != 0, axis=1, dtype=jnp.int32)
    limit = jnp.minimum(limit, prompt_lengths + rows.max_decode_steps)
  # [rows] and [rows, 1]: column of the first input token, and the token.
  if rows.initial_index is None:
    position = jnp.zeros((num_rows,), jnp.int32)
    token = rows.start_tokens.astype(jnp.int32)[:, None]
  else:
    position = rows.initial_index
    token = jnp.take_along_axis(sequences, position[:, None], axis=1)

  def count_ends(sequences: Array) -> Array:
    return jnp.sum(is_end_token(sequences, ends), axis=1)

  num_ends_forced = count_ends(sequences)
  processor_state = None
  if logit_processor is not None:
    processor_state, process = logit_processor(
      ProcessorInputs(
        tokens=inputs,
        num_cached=position,
        max_length=length,
        max_decoded=max_decoded,
        ends=ends,
      )
    )

  def not_done(state: SamplingLoopState) -> Array:
    return ~jnp.all(state.ended)

  def decode_position(state: SamplingLoopState) -> SamplingLoopState:
    if state_callback_fn is not None:
      state = state_callback_fn(state)
    rng, next_rng = jax.random.split(state.rng)
    logits, cache = tokens_to_logits(
      DecodingState(
        cur_index=state.cur_index,
        sequences=state.sequences[:, :length],
        cur_token=state.cur_token,
        cache=state.cache,
      )
    )
    if logit_callback_fn is not None:
      logits = logit_callback_fn(logits, state)
    # [rows, vocab]: float32 because log-probabilities are summed over the sequence.
    logits = logits.astype(jnp.float32)
    processor_state = state.processor_state
    if logit_processor is not None:
      processor_state, logits = process(processor_state, state.cur_token[:, 0], logits)
    # [rows] each: chosen tokens and their log-probabilities.
    choice, choice_log_prob = choose(rng, logits)

    ended = state.ended[:, 0]
    position = jnp.minimum(state.cur_index, limit)
    # [rows]: token of the prompt at the next position; 0 where there is none, so that the choice counts.
    forced = jnp.take_along_axis(state.sequences, position[:, None] + 1, axis=1)[:, 0]
    is_decoded = (forced == 0) & ~ended
    token = jnp.where(forced == 0, choice, forced)
    token = jnp.where(ended, 0, token)
    # A comparison with all columns instead of a scatter: rows are at different positions.
    is_next = columns == position[:, None] + 1
    sequences = jnp.where(is_next, token[:, None], state.sequences)
    if state_callback_fn is None:
      ends_now = is_decoded & is_end_token(token, ends)
    else:
      # The callback may have written an end token at any position.
      ends_now = count_ends(sequences) > num_ends_forced
    return SamplingLoopState(
      step=state.step + 1,
      cur_index=position + 1,
      sequences=sequences,
      cache=like_cache(cache, state.cache),
      cur_token=token[:, None],
      ended=(ended | ends_now | (position + 1 >= limit))[:, None],
      rng=next_rng,
      log_prob=state.log_prob + jnp.where(is_decoded, choice_log_prob, 0.0),
      processor_state=processor_state,
    )

  final = jax.lax.while_loop(
    not_done,
    decode_position,
    SamplingLoopState(
      step=jnp.zeros((), jnp.int32),
      cur_index=position,
      sequences=sequences,
      cache=cache,
      cur_token=token,
      # A row whose prompt fills it has nothing to decode.
      ended=(padding_mask | (position >= limit))[:, None],
      rng=rng,
      log_prob=jnp.zeros((num_rows,), jnp.float32),
      processor_state=processor_state,
    ),
  )
  # Forced tokens after the end of a row are still there if the loop ended with that row.
  is_written = columns <= final.cur_index[:, None]
  final = dataclasses.replace(final, sequences=jnp.where(is_written, final.sequences, 0))
  if state_callback_fn is not None:
    final = state_callback_fn(final)
  return final.sequences[:, 1 : length + 1], final.log_prob
