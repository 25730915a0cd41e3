"""Beam search with brevity penalty: extends several sequences of each row and returns the best ended sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.decoding import cache as cache_lib
from t5x_lite.decoding import options
from t5x_lite.decoding.state import NEG_INF_VALUE
from t5x_lite.decoding.state import BeamState
from t5x_lite.decoding.state import DecodingState
from t5x_lite.decoding.state import TokensIdsToLogitsCallable
from t5x_lite.decoding.state import declare
from t5x_lite.decoding.topk import top_k_two_stage
from t5x_lite.types import Array, ArrayLike


def brevity_penalty(alpha: float, length: ArrayLike) -> Array:
  """Return ((5 + length) / 6)^alpha, the divisor of the log-probability of a sequence of `length` tokens.

  `length` and the result have the same shape.

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
  """Return the state before the first step: one live beam per row, of probability 1, and no ended sequences.

  Args:
    batch_size: number of rows.
    beam_size: number of beams of each row.
    max_decode_len: number of columns of the sequences, including the start token.
    cache: the network's `cache` collection for `batch_size` rows.
    offset: number of dims before the batch dim in cache leaves.
    live_seqs: <int32>[batch, beam, max_decode_len], initial sequences for a prefilled cache, whose leaves named
      `cache_index` have one entry per row. None: zeros.
    initial_index: <int32>[batch], number of tokens of each row in the cache; None: none.
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
      lambda x: cache_lib.add_beam_dim(x, beam_size, offset),
      cache,
      apply_to_index=live_seqs is not None,
    ),
    initial_index=initial_index,
  )


@declare(
  padding_mask=True,
  reorders_decodes=True,
  options=('alpha', 'max_decode_len', 'max_decode_step', 'min_log_prob', 'stop_token_ids'),
)
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
  padding_mask: Array | None = None,
) -> tuple[Array, Array]:
  """Search for the `num_decodes` sequences of each row with the best scores.

  The score of a sequence is its log-probability divided by `brevity_penalty(alpha, n)`, where n is the number of its
  tokens, including prompt and end token. Each step ranks all one-token extensions of a row's beams and keeps the best
  2 * num_decodes: extensions that end compete with the best ended sequences, and the best of the others continue. The
  search stops when no live sequence can reach a better score than the ended ones. Forced tokens do not count for the
  log-probability; a forced end token ends the row's beams. Rows are independent, except through `min_log_prob`.

  Args:
    inputs: <int32>[batch, length]; ids above 0 after column 0 are forced. Column 0 is not read: without
      `initial_index` the first input token is 0.
    cache: the network's `cache` collection for `batch` rows.
    tokens_to_logits: step of the network, for batch * num_decodes rows.
    eos_id: token that ends a sequence.
    num_decodes: number of beams and of returned sequences.
    alpha: exponent of the brevity penalty; 0 compares log-probabilities.
    max_decode_len: number of tokens of the sequences, including the prompt; None: `length`.
    max_decode_step: largest number of steps, including forced tokens; 0 or less: no bound.
    min_log_prob: smallest log-probability of a live beam; the search stops when all are lower.
    decode_rng: part of the decoding interface, without effect.
    cache_offset: number of dims before the batch dim in cache leaves.
    initial_index: <int32>[batch], number of tokens of each row in the cache; the token at this position is the first
      input, and leaves named `cache_index` have one entry per row. None: the cache is empty.
    stop_token_ids: more tokens that end a sequence.
    padding_mask: <bool>[batch], True for padding rows; see `DecodeContract`.

  Returns:
    (<int32>[batch, num_decodes, max_decode_len] sequences, <float32>[batch, num_decodes] scores), in ascending order:
    the best is the last. A row without ended sequences gives its live beams and their log-probabilities. If fewer than
    `num_decodes` sequences have ended, the others have scores of about NEG_INF_VALUE.

  Raises:
    ConfigError: an option that is not traced is out of range.
  """
  del decode_rng
  options.check_inputs('beam_search', inputs)
  known_inputs = options.concrete(inputs)
  checks.check(
    'beam_search',
    locals(),
    num_decodes=options.COUNT,
    eos_id=options.EOS_ID,
    stop_token_ids=options.STOP_TOKEN_IDS,
    initial_index=options.initial_index(inputs),
    padding_mask=options.padding_mask(inputs),
    alpha=options.numbers(
      'a finite number >= 0', lambda x: (x >= 0) & (x < np.inf), remedy="0.6 is T5X's default."
    ),
    min_log_prob=options.numbers(
      'a number', lambda x: ~np.isnan(x), remedy='-1e7 stops no search.'
    ),
    max_decode_step=options.MAX_DECODE_STEP,
    max_decode_len=checks.Expectation(
      'an integer >= 1 and at least the number of tokens of each prompt, or None',
      lambda n: (
        n is None
        or (options.COUNT.holds(n) and (known_inputs is None or not known_inputs[:, n + 1 :].any()))
      ),
    ),
  )
  batch_size = inputs.shape[0]
  if max_decode_len is None:
    length = inputs.shape[1]
  else:
    length = max_decode_len
  ends = options.end_token_ids(eos_id, stop_token_ids)
  initial_index = options.int32_or_none(initial_index)
  padding_mask = options.mask_or_zeros(padding_mask, batch_size)
  is_prefilled = initial_index is not None
  if is_prefilled:
    num_cached = initial_index
  else:
    num_cached = jnp.zeros((batch_size,), jnp.int32)

  # Column s: input token of step 0 (s = 0) or forced choice of step s - 1; 0 if not forced. One column more than steps.
  forced = _shift_left(jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, length + 1))), num_cached)[
    :, : length + 1
  ]
  live_seqs = None
  if is_prefilled:
    live_seqs = (
      jnp.zeros((batch_size, num_decodes, length + 1), jnp.int32).at[:, :, 0].set(forced[:, :1])
    )

  def is_complete(state: BeamState) -> Array:
    """Return <bool>[batch], True for full rows."""
    return state.cur_index + num_cached >= length

  def not_done(state: BeamState) -> Array:
    # No live beam can reach a score above this.
    best_penalty = brevity_penalty(alpha, length + 1)
    best_live = state.live_logprobs[:, -1:] / best_penalty
    worst_finished = jnp.min(state.finished_scores, axis=1, keepdims=True)
    is_settled = jnp.all(
      jnp.where(state.finished_flags, worst_finished, NEG_INF_VALUE) > best_live, axis=1
    )
    is_hopeless = (state.cur_index > 0) & (best_live < min_log_prob / best_penalty)[:, 0]
    is_out_of_steps = (max_decode_step > 0) & (state.cur_index >= max_decode_step)
    complete = is_complete(state) | padding_mask
    return ~(jnp.all(complete | is_settled) | jnp.all(complete | is_hopeless) | is_out_of_steps)

  def select_beams(flat_cache, beams):
    # `cache_index` stays unchanged: all beams of a row are at the same position.
    cache = cache_lib.cache_map(
      lambda x: cache_lib.unflatten_beam_dim(x, batch_size, num_decodes, cache_offset), flat_cache
    )
    cache = cache_lib.cache_gather_beams(
      cache, beams, batch_size, num_decodes, num_decodes, one_hot=False, offset=cache_offset
    )
    return cache_lib.cache_map(lambda x: cache_lib.flatten_beam_dim(x, cache_offset), cache)

  def decode_position(state: BeamState) -> BeamState:
    cur_tokens = jax.lax.dynamic_slice_in_dim(state.live_seqs, state.cur_index, 1, axis=2)
    logits, new_cache = tokens_to_logits(
      DecodingState(
        cur_index=state.cur_index,
        sequences=cache_lib.flatten_beam_dim(state.live_seqs),
        cur_token=cache_lib.flatten_beam_dim(cur_tokens),
        cache=state.cache,
      )
    )
    new_cache = cache_lib.like_cache(new_cache, state.cache)
    logits = cache_lib.unflatten_beam_dim(logits.astype(jnp.float32), batch_size, num_decodes)
    next_forced = jax.lax.dynamic_slice_in_dim(forced, state.cur_index + 1, 1, axis=1)
    log_probs, beams, tokens = _best_extensions(logits, state.live_logprobs, next_forced)
    sequences = cache_lib.gather_beams(
      state.live_seqs, beams, batch_size, num_decodes, 2 * num_decodes, one_hot=False
    )
    sequences = jax.lax.dynamic_update_slice_in_dim(
      sequences, tokens[:, :, None], state.cur_index + 1, axis=2
    )
    has_ended = options.is_end_token(tokens, ends)

    # Live beams: the best extensions that have not ended.
    live_log_probs = log_probs + has_ended * NEG_INF_VALUE
    live_seqs, live_logprobs, live_beams = cache_lib.gather_topk_beams(
      (sequences, live_log_probs, beams), live_log_probs, batch_size, num_decodes
    )
    if num_decodes > 1:
      new_cache = select_beams(new_cache, live_beams)

    # Ended sequences: the best of the new and the earlier ones.
    penalty = brevity_penalty(alpha, num_cached[:, None] + state.cur_index + 1)
    scores = log_probs / penalty + ~has_ended * NEG_INF_VALUE
    candidates = jax.tree.map(
      lambda old, new: jnp.concatenate([old, new], axis=1),
      (state.finished_seqs, state.finished_scores, state.finished_flags),
      (sequences, scores, has_ended),
    )
    finished_seqs, finished_scores, finished_flags = cache_lib.gather_topk_beams(
      candidates, candidates[1], batch_size, num_decodes
    )
    new_state = state.replace(
      cur_index=state.cur_index + 1,
      live_logprobs=live_logprobs,
      finished_scores=finished_scores,
      live_seqs=live_seqs,
      finished_seqs=finished_seqs,
      finished_flags=finished_flags,
      cache=new_cache,
    )
    if is_prefilled:
      return _keep_complete_rows(is_complete(state), state, new_state)
    return new_state

  initial = beam_init(
    batch_size, num_decodes, length + 1, cache, cache_offset, live_seqs, initial_index
  )
  # The loop carries the cache with the network's rows: with a dim of beams, the CPU compiler would keep and write both
  # forms.
  initial = initial.replace(
    cache=cache_lib.cache_map(
      lambda x: cache_lib.flatten_beam_dim(x, cache_offset),
      initial.cache,
      apply_to_index=is_prefilled,
    )
  )
  final = jax.lax.while_loop(not_done, decode_position, initial)
  any_finished = jnp.any(final.finished_flags, axis=1)[:, None]
  sequences = jnp.where(any_finished[:, :, None], final.finished_seqs, final.live_seqs)[:, :, 1:]
  scores = jnp.where(any_finished, final.finished_scores, final.live_logprobs)
  if is_prefilled:
    sequences = _prepend_prompts(sequences, inputs, num_cached)
  return jnp.where(padding_mask[:, None, None], 0, sequences), jnp.where(
    padding_mask[:, None], 0.0, scores
  )


def _best_extensions(
  logits: Array, live_logprobs: Array, forced: Array
) -> tuple[Array, Array, Array]:
  """Rank all one-token extensions of each row's beams.

  Args:
    logits: <float32>[batch, beam, vocab].
    live_logprobs: <float32>[batch, beam].
    forced: <int32>[batch, 1], forced token of the row; 0 if not forced.

  Returns:
    The 2 * beam best: (log-probabilities <float32>, extended beams <int32>, tokens <int32>), each [batch, 2 * beam], in
    descending order. With a forced token the first has probability 1 and the others 0; otherwise all beams would become
    equal.
  """
  batch_size, beam_size, vocab_size = logits.shape
  num_best = 2 * beam_size
  num_of_beam = min(2 * beam_size, vocab_size)
  logits = logits.reshape(-1, vocab_size)
  before = live_logprobs.reshape(-1, 1)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  log_sum = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
  # The best of each beam, then the best of these, ranked by log-probabilities: ranking by logits gives the same order
  # except for values that rounding makes equal.
  log_probs, tokens = top_k_two_stage(logits, num_of_beam, lambda x: x - largest - log_sum + before)
  log_probs, positions = jax.lax.top_k(log_probs.reshape(batch_size, -1), num_best)
  tokens = jnp.take_along_axis(tokens.reshape(batch_size, -1), positions, axis=1)
  is_free = forced == 0
  certain = jnp.where(jnp.arange(num_best) == 0, 0.0, NEG_INF_VALUE)
  return (
    jnp.where(is_free, log_probs, certain),
    positions // num_of_beam,
    jnp.where(is_free, tokens, forced),
  )


def _keep_complete_rows(complete: Array, old: BeamState, new: BeamState) -> BeamState:
  """Return the new state, with the old results in rows that were already full."""

  def keep(name):
    old_value = getattr(old, name)
    return jnp.where(
      complete.reshape(-1, *(1,) * (old_value.ndim - 1)), old_value, getattr(new, name)
    )

  return new.replace(
    **{
      name: keep(name)
      for name in (
        'live_logprobs',
        'live_seqs',
        'finished_scores',
        'finished_seqs',
        'finished_flags',
      )
    }
  )


def _shift_left(x: Array, by: Array) -> Array:
  """Return [batch, n], each row of `x` shifted left by `by` <int32>[batch] and padded with its last column."""
  source = jnp.minimum(jnp.arange(x.shape[1]) + by[:, None], x.shape[1] - 1)
  return jnp.take_along_axis(x, source, axis=1)


def _prepend_prompts(decoded: Array, inputs: Array, num_cached: Array) -> Array:
  """Return `decoded` <int32>[batch, beam, length] after the tokens of `inputs` that were in the cache."""
  length = decoded.shape[2]
  columns = jnp.arange(length)
  is_prompt = columns < num_cached[:, None]
  source = jnp.maximum(columns - num_cached[:, None], 0)
  shifted = jnp.take_along_axis(decoded, source[:, None, :], axis=2)
  prompts = jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, length)))[:, 1 : length + 1]
  return jnp.where(is_prompt[:, None, :], prompts[:, None, :], shifted)
