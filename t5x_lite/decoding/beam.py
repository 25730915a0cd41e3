"""Beam search with brevity penalty: extends several sequences of each row and returns the best ended sequences."""

from collections.abc import Mapping, Sequence
import dataclasses
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
from t5x_lite.decoding.state import LogitProcessor
from t5x_lite.decoding.state import ProcessorInputs
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
  per_beam = (batch_size, beam_size)
  empty = jnp.zeros((*per_beam, max_decode_len), jnp.int32)
  # [batch, beam]: all beams start as the same sequence, so only the first may be extended.
  impossible = jnp.full(per_beam, NEG_INF_VALUE, jnp.float32)
  live_logprobs = impossible.at[:, 0].set(0.0)
  cache = cache_lib.cache_map(
    lambda x: cache_lib.add_beam_dim(x, beam_size, offset),
    cache,
    apply_to_index=live_seqs is not None,
  )
  if live_seqs is None:
    live_seqs = empty
  return BeamState(
    cur_index=jnp.zeros((), jnp.int32),
    live_logprobs=live_logprobs,
    finished_scores=impossible,
    live_seqs=live_seqs,
    finished_seqs=empty,
    finished_flags=jnp.zeros(per_beam, bool),
    cache=cache,
    initial_index=initial_index,
  )


@declare(
  padding_mask=True,
  reorders_decodes=True,
  options=(
    'alpha',
    'max_decode_len',
    'max_decode_step',
    'min_log_prob',
    'stop_token_ids',
    'logit_processor',
  ),
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
  logit_processor: LogitProcessor | None = None,
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
    logit_processor: changes the log-probabilities of each step, such as `Constraints`; they are not normalized again.
      Sequences with an excluded token are not returned as ended ones.

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

  def fits_prompts(length: Any) -> bool:
    if length is None:
      return True
    if not options.COUNT.holds(length):
      return False
    return known_inputs is None or not known_inputs[:, length + 1 :].any()

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
      'an integer >= 1 and at least the number of tokens of each prompt, or None', fits_prompts
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
  padded = jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, length + 1)))
  forced = _shift_left(padded, num_cached)[:, : length + 1]
  processor_state = None
  if logit_processor is not None:
    processor_state, process = logit_processor(
      ProcessorInputs(
        tokens=inputs,
        num_cached=num_cached,
        max_length=length,
        max_decoded=options.decode_length(length, max_decode_step),
        ends=ends,
      )
    )
    processor_state = jax.tree.map(
      lambda x: cache_lib.flat_batch_beam_expand(x, num_decodes), processor_state
    )
  live_seqs = None
  if is_prefilled:
    # [batch, beam, length + 1]: sequences begin with the first token that the cache does not contain.
    live_seqs = jnp.zeros((batch_size, num_decodes, length + 1), jnp.int32)
    live_seqs = live_seqs.at[:, :, 0].set(forced[:, :1])

  def is_complete(state: BeamState) -> Array:
    """Return <bool>[batch], True for full rows."""
    return state.cur_index + num_cached >= length

  def not_done(state: BeamState) -> Array:
    # [batch, 1]: no live beam can reach a score above this, since log-probabilities only decrease and the penalty of
    # the longest sequence is the largest.
    best_penalty = brevity_penalty(alpha, length + 1)
    best_live = state.live_logprobs[:, -1:] / best_penalty
    worst_finished = jnp.min(state.finished_scores, axis=1, keepdims=True)
    # [batch, beam]: NEG_INF_VALUE where no sequence has ended, so that a row with fewer ended sequences continues.
    bounds = jnp.where(state.finished_flags, worst_finished, NEG_INF_VALUE)
    is_settled = jnp.all(bounds > best_live, axis=1)
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

  def select_rows(tree, beams):
    """Select beams in arrays [batch * beam, ...]."""

    def select(x):
      x = cache_lib.unflatten_beam_dim(x, batch_size, num_decodes)
      x = cache_lib.gather_beams(x, beams, batch_size, num_decodes, num_decodes, one_hot=False)
      return cache_lib.flatten_beam_dim(x)

    return jax.tree.map(select, tree)

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
    # [batch, beam, vocab]: float32 because log-probabilities are summed over the sequence.
    logits = logits.astype(jnp.float32)
    processor_state = state.processor_state
    if logit_processor is not None:
      # [rows, vocab]: a row's beams compete, so that its constraints must not change the probabilities of what is left.
      logits = jax.nn.log_softmax(logits)
      processor_state, logits = process(
        processor_state, cache_lib.flatten_beam_dim(cur_tokens)[:, 0], logits
      )
    logits = cache_lib.unflatten_beam_dim(logits, batch_size, num_decodes)
    next_forced = jax.lax.dynamic_slice_in_dim(forced, state.cur_index + 1, 1, axis=1)
    # [batch, 2 * beam] each: at most `beam` of them end with the end token, so that `beam` can continue.
    log_probs, beams, tokens = _best_extensions(
      logits, state.live_logprobs, next_forced, is_normalized=logit_processor is not None
    )
    # [batch, 2 * beam, length + 1]
    sequences = cache_lib.gather_beams(
      state.live_seqs, beams, batch_size, num_decodes, 2 * num_decodes, one_hot=False
    )
    sequences = jax.lax.dynamic_update_slice_in_dim(
      sequences, tokens[:, :, None], state.cur_index + 1, axis=2
    )
    has_ended = options.is_end_token(tokens, ends)
    if logit_processor is not None:
      # Neither an excluded sequence nor one of the impossible beams of the start is a result.
      has_ended &= log_probs > NEG_INF_VALUE / 2

    # [batch, beam] each: live beams, the best extensions that have not ended.
    live_log_probs = log_probs + has_ended * NEG_INF_VALUE
    live_seqs, live_logprobs, live_beams = cache_lib.gather_topk_beams(
      (sequences, live_log_probs, beams), live_log_probs, batch_size, num_decodes
    )
    if num_decodes > 1:
      new_cache = select_beams(new_cache, live_beams)
      processor_state = select_rows(processor_state, live_beams)

    # [batch, beam] each: ended sequences, the best of the 2 * beam new and the beam earlier ones.
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
    new_state = dataclasses.replace(
      state,
      cur_index=state.cur_index + 1,
      live_logprobs=live_logprobs,
      finished_scores=finished_scores,
      live_seqs=live_seqs,
      finished_seqs=finished_seqs,
      finished_flags=finished_flags,
      cache=new_cache,
      processor_state=processor_state,
    )
    if is_prefilled:
      return _keep_complete_rows(is_complete(state), state, new_state)
    return new_state

  initial = beam_init(
    batch_size, num_decodes, length + 1, cache, cache_offset, live_seqs, initial_index
  )
  if not is_prefilled:
    live_seqs = initial.live_seqs.at[:, :, 0].set(inputs[:, :1])
    initial = dataclasses.replace(initial, live_seqs=live_seqs)
  # The loop carries the cache with the network's rows: with a dim of beams, the CPU compiler would keep and write both
  # forms.
  flat_cache = cache_lib.cache_map(
    lambda x: cache_lib.flatten_beam_dim(x, cache_offset),
    initial.cache,
    apply_to_index=is_prefilled,
  )
  initial = dataclasses.replace(initial, cache=flat_cache, processor_state=processor_state)
  final = jax.lax.while_loop(not_done, decode_position, initial)
  # [batch, 1]: True for rows with an ended sequence; the others return their live beams.
  any_finished = jnp.any(final.finished_flags, axis=1)[:, None]
  sequences = jnp.where(any_finished[:, :, None], final.finished_seqs, final.live_seqs)
  sequences = sequences[:, :, 1:]  # without the start token
  scores = jnp.where(any_finished, final.finished_scores, final.live_logprobs)
  if is_prefilled:
    sequences = _prepend_prompts(sequences, inputs, num_cached)
  sequences = jnp.where(padding_mask[:, None, None], 0, sequences)
  return sequences, jnp.where(padding_mask[:, None], 0.0, scores)


def _best_extensions(
  logits: Array, live_logprobs: Array, forced: Array, is_normalized: bool
) -> tuple[Array, Array, Array]:
  """Rank all one-token extensions of each row's beams.

  Args:
    logits: <float32>[batch, beam, vocab].
    live_logprobs: <float32>[batch, beam].
    forced: <int32>[batch, 1], forced token of the row; 0 if not forced.
    is_normalized: True if `logits` are log-probabilities.

  Returns:
    The 2 * beam best: (log-probabilities <float32>, extended beams <int32>, tokens <int32>), each [batch, 2 * beam], in
    descending order. With a forced token the first has probability 1 and the others 0; otherwise all beams would become
    equal.
  """
  batch_size, beam_size, vocab_size = logits.shape
  num_best = 2 * beam_size
  num_of_beam = min(2 * beam_size, vocab_size)
  # [batch * beam, vocab], and [batch * beam, 1] each.
  logits = logits.reshape(-1, vocab_size)
  before = live_logprobs.reshape(-1, 1)
  if is_normalized:
    largest = 0.0
    log_sum = 0.0
  else:
    largest = jnp.max(logits, axis=-1, keepdims=True)
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
  # The best of each beam, then the best of these, ranked by log-probabilities: ranking by logits gives the same order
  # except for values that rounding makes equal.
  log_probs, tokens = top_k_two_stage(logits, num_of_beam, lambda x: x - largest - log_sum + before)
  # [batch, 2 * beam]: positions among the beams' candidates, `num_of_beam` of each beam.
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
    # [batch, 1, ...]: one condition for all beams and columns of a row.
    condition = complete.reshape(-1, *(1,) * (old_value.ndim - 1))
    return jnp.where(condition, old_value, getattr(new, name))

  return dataclasses.replace(
    new,
    live_logprobs=keep('live_logprobs'),
    live_seqs=keep('live_seqs'),
    finished_scores=keep('finished_scores'),
    finished_seqs=keep('finished_seqs'),
    finished_flags=keep('finished_flags'),
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
