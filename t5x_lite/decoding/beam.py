"""Beam search with brevity penalty: follows several sequences of each row at once and returns the best that end."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from t5x_lite.decoding import cache as cache_lib
from t5x_lite.decoding import options
from t5x_lite.decoding.state import (
    NEG_INF_VALUE, BeamState, DecodingState, TokensIdsToLogitsCallable, declare)
from t5x_lite.decoding.topk import top_k_two_stage
from t5x_lite.errors import ConfigError
from t5x_lite.types import Array, ArrayLike


def brevity_penalty(alpha: float, length: ArrayLike) -> Array:
  """Returns ((5 + length) / 6)^alpha, what the log-probability of a sequence of `length` tokens is divided by.

  Reference: Wu et al., "Google's Neural Machine Translation System" (2016), section 7.

  >>> float(brevity_penalty(1.0, 7))
  2.0
  """
  return jnp.power((5.0 + length) / 6.0, alpha)


def beam_init(
    batch_size: int,
    beam_size: int,
    max_decode_len: int,
    cache: Mapping[str, Any],
    offset: int = 0,
    live_seqs: Array | None = None,
    initial_index: Array | None = None,
) -> BeamState:
  """Returns the state before the first step: one live beam in each row, of probability 1, and none that has ended.

  Args:
    batch_size: number of rows.
    beam_size: number of beams of each row.
    max_decode_len: number of columns of the sequences, the start token's included.
    cache: the network's `cache` collection for `batch_size` rows.
    offset: number of dims before the batch dim in cache leaves.
    live_seqs: <int32>[batch, beam, max_decode_len], sequences to start with, of a prefilled cache: its leaves named
      `cache_index` have one entry per row. None: zeros.
    initial_index: <int32>[batch], number of tokens of each row that the cache holds; None: none.
  """
  empty = jnp.zeros((batch_size, beam_size, max_decode_len), jnp.int32)
  return BeamState(
      cur_index=jnp.zeros((), jnp.int32),
      live_logprobs=jnp.full((batch_size, beam_size), NEG_INF_VALUE, jnp.float32).at[:, 0].set(0.0),
      finished_scores=jnp.full((batch_size, beam_size), NEG_INF_VALUE, jnp.float32),
      live_seqs=empty if live_seqs is None else live_seqs,
      finished_seqs=empty,
      finished_flags=jnp.zeros((batch_size, beam_size), bool),
      cache=cache_lib.cache_map(
          lambda x: cache_lib.add_beam_dim(x, beam_size, offset), cache, apply_to_index=live_seqs is not None),
      initial_index=initial_index)


@declare(is_filling=True, reorders_decodes=True,
         options=('alpha', 'max_decode_len', 'max_decode_step', 'min_log_prob', 'stop_token_ids'))
def beam_search(
    inputs: Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensIdsToLogitsCallable,
    eos_id: int,
    num_decodes: int = 4,
    alpha: float = 0.6,
    max_decode_len: int | None = None,
    max_decode_step: int = -1,
    min_log_prob: float = NEG_INF_VALUE,
    decode_rng: Array | None = None,
    cache_offset: int = 0,
    initial_index: Array | None = None,
    *,
    stop_token_ids: Sequence[int] = (),
    is_filling: Array | None = None,
) -> tuple[Array, Array]:
  """Searches for the `num_decodes` sequences of each row that score best.

  The score of a sequence is its log-probability over `brevity_penalty(alpha, n)`, n the number of its tokens, prompt
  and end token included. Each step ranks all one-token extensions of a row's beams and keeps 2 * num_decodes of them:
  those that end are compared with the best that have ended so far, and the best of the others go on. The search stops
  when no sequence that goes on can overtake any that has ended. Forced tokens do not count for the log-probability; a
  forced end token ends the row's beams. Rows do not depend on each other, except through `min_log_prob`.

  Args:
    inputs: <int32>[batch, length]; ids above 0 behind column 0 are forced. Column 0 is not read: without
      `initial_index` the first token fed is 0.
    cache: the network's `cache` collection for `batch` rows.
    tokens_to_logits: one step of the network, for batch * num_decodes rows.
    eos_id: the token that ends a sequence.
    num_decodes: number of beams, and of sequences returned.
    alpha: exponent of the brevity penalty; 0 compares log-probabilities.
    max_decode_len: number of tokens of the sequences, prompt included; None: `length`.
    max_decode_step: most steps to take, those for forced tokens included; 0 or less: no such bound.
    min_log_prob: stop when no live beam of any row has a log-probability of at least this.
    decode_rng: part of the decoding interface; nothing here is random, so it has no bearing on the result.
    cache_offset: number of dims before the batch dim in cache leaves.
    initial_index: <int32>[batch], number of tokens of each row that the cache holds already; the token at this position
      is fed first, and leaves named `cache_index` have one entry per row. None: the cache is empty.
    stop_token_ids: further tokens that end a sequence.
    is_filling: <bool>[batch], rows that only fill up the batch; see `DecodeContract`.

  Returns:
    (<int32>[batch, num_decodes, max_decode_len] sequences, <float32>[batch, num_decodes] scores), in ascending order:
    the best is the last. A row of which no sequence has ended gives its live beams and their log-probabilities. Where
    fewer than `num_decodes` have ended, the rest are fillers, with scores of about NEG_INF_VALUE.

  Raises:
    ConfigError: an option that is not traced is out of range.
  """
  del decode_rng
  options.check_inputs(inputs)
  options.check_count('num_decodes', num_decodes, 'It is the number of beams.')
  batch_size, length = inputs.shape[0], inputs.shape[1] if max_decode_len is None else max_decode_len
  options.check_count('max_decode_len', length, 'It is the number of tokens of a sequence; None takes that of inputs.')
  _check_alpha(alpha)
  _check_min_log_prob(min_log_prob)
  options.check_max_decode_step(max_decode_step)
  ends = options.end_token_ids(eos_id, stop_token_ids)
  initial_index = options.check_initial_index(initial_index, inputs)
  is_filling = options.check_is_filling(is_filling, batch_size)
  _check_prompts_fit(inputs, length)
  is_prefilled = initial_index is not None
  num_cached = initial_index if is_prefilled else jnp.zeros((batch_size,), jnp.int32)

  # Column s: the token that step s feeds (s = 0) or must choose; 0 where it is free. One more than there are steps.
  forced = _shift_left(jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, length + 1))), num_cached)[:, :length + 1]
  live_seqs = None
  if is_prefilled:
    live_seqs = jnp.zeros((batch_size, num_decodes, length + 1), jnp.int32).at[:, :, 0].set(forced[:, :1])

  def is_complete(state: BeamState) -> Array:
    """Returns <bool>[batch], rows that have no room for a further token."""
    return state.cur_index + num_cached >= length

  def not_done(state: BeamState) -> Array:
    # No score that a live beam can still reach is above this.
    best_penalty = brevity_penalty(alpha, length + 1)
    best_live = state.live_logprobs[:, -1:] / best_penalty
    worst_finished = jnp.min(state.finished_scores, axis=1, keepdims=True)
    is_settled = jnp.all(jnp.where(state.finished_flags, worst_finished, NEG_INF_VALUE) > best_live, axis=1)
    is_hopeless = (state.cur_index > 0) & (best_live < min_log_prob / best_penalty)[:, 0]
    is_out_of_steps = (max_decode_step > 0) & (state.cur_index >= max_decode_step)
    complete = is_complete(state) | is_filling
    return ~(jnp.all(complete | is_settled) | jnp.all(complete | is_hopeless) | is_out_of_steps)

  def take_beams(flat_cache, beams):
    # Without `cache_index`: the beams of a row are all at one position.
    cache = cache_lib.cache_map(
        lambda x: cache_lib.unflatten_beam_dim(x, batch_size, num_decodes, cache_offset), flat_cache)
    cache = cache_lib.cache_gather_beams(
        cache, beams, batch_size, num_decodes, num_decodes, one_hot=False, offset=cache_offset)
    return cache_lib.cache_map(lambda x: cache_lib.flatten_beam_dim(x, cache_offset), cache)

  def decode_position(state: BeamState) -> BeamState:
    cur_tokens = jax.lax.dynamic_slice_in_dim(state.live_seqs, state.cur_index, 1, axis=2)
    logits, new_cache = tokens_to_logits(DecodingState(
        cur_index=state.cur_index, sequences=cache_lib.flatten_beam_dim(state.live_seqs),
        cur_token=cache_lib.flatten_beam_dim(cur_tokens), cache=state.cache))
    new_cache = cache_lib.like_cache(new_cache, state.cache)
    logits = cache_lib.unflatten_beam_dim(logits.astype(jnp.float32), batch_size, num_decodes)
    next_forced = jax.lax.dynamic_slice_in_dim(forced, state.cur_index + 1, 1, axis=1)
    log_probs, beams, tokens = _best_extensions(logits, state.live_logprobs, next_forced)
    sequences = cache_lib.gather_beams(
        state.live_seqs, beams, batch_size, num_decodes, 2 * num_decodes, one_hot=False)
    sequences = jax.lax.dynamic_update_slice_in_dim(sequences, tokens[:, :, None], state.cur_index + 1, axis=2)
    has_ended = options.is_end_token(tokens, ends)

    # Those that go on: the best of those that have not ended.
    live_log_probs = log_probs + has_ended * NEG_INF_VALUE
    live_seqs, live_logprobs, live_beams = cache_lib.gather_topk_beams(
        (sequences, live_log_probs, beams), live_log_probs, batch_size, num_decodes)
    if num_decodes > 1:
      new_cache = take_beams(new_cache, live_beams)

    # Those that have ended: the best of the new ones and of those before.
    penalty = brevity_penalty(alpha, num_cached[:, None] + state.cur_index + 1)
    scores = log_probs / penalty + ~has_ended * NEG_INF_VALUE
    candidates = jax.tree.map(
        lambda old, new: jnp.concatenate([old, new], axis=1),
        (state.finished_seqs, state.finished_scores, state.finished_flags), (sequences, scores, has_ended))
    finished_seqs, finished_scores, finished_flags = cache_lib.gather_topk_beams(
        candidates, candidates[1], batch_size, num_decodes)
    new_state = state.replace(
        cur_index=state.cur_index + 1, live_logprobs=live_logprobs, finished_scores=finished_scores,
        live_seqs=live_seqs, finished_seqs=finished_seqs, finished_flags=finished_flags, cache=new_cache)
    return _keep_complete_rows(is_complete(state), state, new_state) if is_prefilled else new_state

  initial = beam_init(batch_size, num_decodes, length + 1, cache, cache_offset, live_seqs, initial_index)
  # From step to step the cache has the rows that the network sees: with a dim of beams, the CPU compiler would keep it
  # in both forms and write to both.
  initial = initial.replace(cache=cache_lib.cache_map(
      lambda x: cache_lib.flatten_beam_dim(x, cache_offset), initial.cache, apply_to_index=is_prefilled))
  final = jax.lax.while_loop(not_done, decode_position, initial)
  any_finished = jnp.any(final.finished_flags, axis=1)[:, None]
  sequences = jnp.where(any_finished[:, :, None], final.finished_seqs, final.live_seqs)[:, :, 1:]
  scores = jnp.where(any_finished, final.finished_scores, final.live_logprobs)
  if is_prefilled:
    sequences = _behind_prompts(sequences, inputs, num_cached)
  return jnp.where(is_filling[:, None, None], 0, sequences), jnp.where(is_filling[:, None], 0.0, scores)


def _best_extensions(
    logits: Array, live_logprobs: Array, forced: Array) -> tuple[Array, Array, Array]:
  """Ranks all one-token extensions of each row's beams.

  Args:
    logits: <float32>[batch, beam, vocab].
    live_logprobs: <float32>[batch, beam].
    forced: <int32>[batch, 1], the token that the row must take; 0 leaves it free.

  Returns:
    The 2 * beam best: (log-probabilities <float32>, beams that they extend <int32>, tokens <int32>), each
    [batch, 2 * beam], in descending order. With a forced token the first has probability 1 and the others none: else
    all beams would come to be the same.
  """
  batch_size, beam_size, vocab_size = logits.shape
  num_best, num_of_beam = 2 * beam_size, min(2 * beam_size, vocab_size)
  logits, before = logits.reshape(-1, vocab_size), live_logprobs.reshape(-1, 1)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  log_sum = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
  # The best of each beam, then the best of those. Ranked by the log-probabilities themselves, not by their logits:
  # their orders are the same but for ties that rounding makes.
  log_probs, tokens = top_k_two_stage(logits, num_of_beam, lambda x: x - largest - log_sum + before)
  log_probs, places = jax.lax.top_k(log_probs.reshape(batch_size, -1), num_best)
  tokens = jnp.take_along_axis(tokens.reshape(batch_size, -1), places, axis=1)
  is_free = forced == 0
  certain = jnp.where(jnp.arange(num_best) == 0, 0.0, NEG_INF_VALUE)
  return jnp.where(is_free, log_probs, certain), places // num_of_beam, jnp.where(is_free, tokens, forced)


def _keep_complete_rows(complete: Array, old: BeamState, new: BeamState) -> BeamState:
  """Returns the new state, with the old results in rows that had no room left: they only wait for shorter prompts."""

  def keep(name):
    old_value = getattr(old, name)
    return jnp.where(complete.reshape(-1, *(1,) * (old_value.ndim - 1)), old_value, getattr(new, name))

  return new.replace(**{name: keep(name) for name in (
      'live_logprobs', 'live_seqs', 'finished_scores', 'finished_seqs', 'finished_flags')})


def _shift_left(x: Array, by: Array) -> Array:
  """Returns [batch, n], each row of `x` from its column `by` <int32>[batch] on; the row's last column fills up."""
  source = jnp.minimum(jnp.arange(x.shape[1]) + by[:, None], x.shape[1] - 1)
  return jnp.take_along_axis(x, source, axis=1)


def _behind_prompts(decoded: Array, inputs: Array, num_cached: Array) -> Array:
  """Puts what was decoded, <int32>[batch, beam, length], behind the tokens of `inputs` that the cache held."""
  length = decoded.shape[2]
  columns = jnp.arange(length)
  is_prompt = columns < num_cached[:, None]
  source = jnp.maximum(columns - num_cached[:, None], 0)
  shifted = jnp.take_along_axis(decoded, source[:, None, :], axis=2)
  prompts = jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, length)))[:, 1:length + 1]
  return jnp.where(is_prompt[:, None, :], prompts[:, None, :], shifted)


def _check_alpha(alpha: Any) -> None:
  known = options.concrete(alpha)
  if known is not None and not (known.ndim == 0 and 0 <= known < jnp.inf):
    raise ConfigError(
        f'Got alpha={alpha} for beam_search; expected a finite number of at least 0. 0 compares log-probabilities, '
        '0.6 is usual, and larger values favour longer sequences.')


def _check_min_log_prob(min_log_prob: Any) -> None:
  known = options.concrete(min_log_prob)
  if known is not None and (known.ndim or np.isnan(known)):
    raise ConfigError(f'Got min_log_prob={min_log_prob} for beam_search; expected a number. -1e7 stops no search.')


def _check_prompts_fit(inputs: Array, length: int) -> None:
  tokens = options.concrete(inputs)
  if tokens is not None and tokens[:, length + 1:].any():
    raise ConfigError(
        f'Got prompts of more than max_decode_len={length} tokens; expected all of each prompt to fit. Raise '
        'max_decode_len, which counts the prompt and the tokens to decode.')
