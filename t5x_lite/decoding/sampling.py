"""Sampling: tokens drawn from the network's distribution, sharpened by temperature, top-k or top-p.

Draws are those of `jax.random.categorical`, so a key decides them; what a draw does not need is not computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from t5x_lite.decoding import cache as cache_lib
from t5x_lite.decoding import loop
from t5x_lite.decoding import options
from t5x_lite.decoding.state import (
    MIN_TEMPERATURE, NEG_INF_VALUE, LogitCallbackFn, Rows, StateCallbackFn, TokensIdsToLogitsCallable, declare)
from t5x_lite.decoding.topk import first_argmax, topk_mask, topp_mask
from t5x_lite.types import Array, ArrayLike

_MIN_TEMPERATURE = float(MIN_TEMPERATURE)
# With the one best logit above this, no masked token (at NEG_INF_VALUE) can be drawn: noise is far below 1000.
_CLEARLY_ABOVE_MASKED = NEG_INF_VALUE + 1000.0


@declare(is_filling=True, options=(
    'temperature', 'topk', 'topp', 'max_decode_steps', 'max_decode_steps_hard_limit', 'rescale_log_probs',
    'state_callback_fn', 'logit_callback_fn', 'stop_token_ids'))
def temperature_sample(
    inputs: Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensIdsToLogitsCallable,
    eos_id: int,
    decode_rng: Array | None = None,
    num_decodes: int = 1,
    temperature: float | Array = 1.0,
    topk: int = 1,
    topp: float = 0.0,
    cache_offset: int = 0,
    initial_index: Array | None = None,
    max_decode_steps: int | Array | None = None,
    max_decode_steps_hard_limit: int | None = None,
    rescale_log_probs: bool = True,
    state_callback_fn: StateCallbackFn | None = None,
    logit_callback_fn: LogitCallbackFn | None = None,
    *,
    stop_token_ids: Sequence[int] = (),
    is_filling: Array | None = None,
) -> tuple[Array, Array]:
  """Samples `num_decodes` sequences for each row and returns them ranked by log-probability.

  Decoding stops as soon as all sequences have ended: with an end token that the prompt does not have, or at their
  limit. After its end a sequence is filled with 0. Note that `topk` is 1 unless set: then the most probable token is
  taken (drawn only where several are equal), and rescaled log-probabilities are 0.

  Where rows have temperatures of their own, all rows share one step's draws (a row's decodes do not): so each row
  samples what it would sample alone, in a batch of one.

  Args:
    inputs: <int32>[batch, length]; ids above 0 behind column 0 are forced until their row ends. Column 0 is not read:
      without `initial_index` the first token fed is 0.
    cache: the network's `cache` collection for `batch` rows.
    tokens_to_logits: one step of the network.
    eos_id: the token that ends a sequence.
    decode_rng: key of the draws; None: `jax.random.PRNGKey(0)`.
    num_decodes: number of sequences for each row.
    temperature: divides the logits; a number, or one for each row, <float>[batch]. At most 1e-4 takes the most probable
      token, whatever `topk` and `topp`, with a rescaled log-probability of 0.
    topk: draw from this many most probable tokens, and those that tie with the last of them; 0: from all.
    topp: draw from the fewest most probable tokens whose probabilities sum up to this, ties included; 0: from all.
    cache_offset: number of dims before the batch dim in cache leaves.
    initial_index: <int32>[batch], number of tokens of each row that the cache holds already; the token at this position
      is fed first, and leaves named `cache_index` have one entry per row. None: the cache is empty.
    max_decode_steps: number of tokens to decode behind each prompt, or one number for each row, <int32>[batch]; None:
      up to `length`.
    max_decode_steps_hard_limit: bound on `max_decode_steps`, which may be a part of a request; None or 0: none.
    rescale_log_probs: return log-probabilities of the distribution that was drawn from; otherwise those of the logits.
    state_callback_fn: changes or watches the loop's state before each step and at the end. What it writes behind the
      current position is forced, and an end token it writes ends the row.
    logit_callback_fn: changes the logits of a step before one is drawn.
    stop_token_ids: further tokens that end a sequence.
    is_filling: <bool>[batch], rows that only fill up the batch; see `DecodeContract`.

  Returns:
    (<int32>[batch, num_decodes, length] sequences, <float32>[batch, num_decodes] log-probabilities of the decoded
    tokens, the end token included), in ascending order: the best is the last.

  Raises:
    ConfigError: an option that is not traced is out of range, or `topk` and `topp` are both set.
  """
  options.check_inputs(inputs)
  options.check_count('num_decodes', num_decodes, 'It is the number of sequences to sample for each row.')
  options.check_temperature(temperature, inputs.shape[0])
  options.check_topk_topp(topk, topp)
  ends = options.end_token_ids(eos_id, stop_token_ids)
  batch_size = inputs.shape[0]
  rows = Rows(
      tokens=inputs, start_tokens=jnp.zeros((batch_size,), jnp.int32),
      is_filling=options.check_is_filling(is_filling, batch_size),
      initial_index=options.check_initial_index(initial_index, inputs),
      max_decode_steps=options.check_max_decode_steps(max_decode_steps, max_decode_steps_hard_limit, inputs))
  # Every decode of a row has the row's entries.
  rows = jax.tree.map(lambda x: x if jnp.ndim(x) == 0 else cache_lib.flat_batch_beam_expand(x, num_decodes), rows)

  if num_decodes > 1:
    cache = cache_lib.cache_map(
        lambda x: cache_lib.flat_batch_beam_expand(x, num_decodes, cache_offset), cache,
        apply_to_index=initial_index is not None)
  sequences, log_probs = loop.decode_tokens(
      rows, cache, tokens_to_logits, _choose_fn(temperature, topk, topp, num_decodes, rescale_log_probs), ends=ends,
      rng=jax.random.PRNGKey(0) if decode_rng is None else decode_rng,
      state_callback_fn=state_callback_fn, logit_callback_fn=logit_callback_fn)
  sequences = cache_lib.unflatten_beam_dim(sequences, batch_size, num_decodes)
  log_probs = cache_lib.unflatten_beam_dim(log_probs, batch_size, num_decodes)
  order = jnp.argsort(log_probs, axis=1)
  return jnp.take_along_axis(sequences, order[:, :, None], axis=1), jnp.take_along_axis(log_probs, order, axis=1)


def take_best(rng: Array, logits: Array) -> tuple[Array, Array]:
  """Returns the most probable tokens <int32>[rows], of equal ones the first, and their log-probabilities [rows]."""
  del rng
  largest, token = first_argmax(logits)
  return token, _log_prob(logits, largest, largest)


def _choose_fn(
    temperature: ArrayLike, topk: ArrayLike, topp: ArrayLike, num_decodes: int, rescale: bool) -> loop.ChooseFn:
  """Returns what picks the tokens of a step, with no more in it than these options need."""

  def best(rng, logits):
    token, log_prob = take_best(rng, logits)
    return token, jnp.zeros_like(log_prob) if rescale else log_prob

  divisor, noise_rows = _per_decode(temperature, num_decodes)

  def draw(rng, logits):
    scaled = logits / divisor
    known = options.concrete(topk)

    def draw_from_kept():
      return _draw(rng, logits, _mask(scaled, topk, topp), noise_rows, rescale)

    if known is None or known != 1:
      return draw_from_kept()
    # One token is kept, unless others equal it: then which one is still a draw.
    largest, token = first_argmax(scaled)
    is_certain = (jnp.sum(scaled == largest[:, None], axis=-1) == 1) & (largest > _CLEARLY_ABOVE_MASKED)
    log_prob = jnp.zeros_like(largest) if rescale else _log_prob(logits, jnp.max(logits, axis=-1), _at(logits, token))
    return jax.lax.cond(jnp.all(is_certain), lambda: (token, log_prob), draw_from_kept)

  known = options.concrete(temperature)
  if known is not None and np.all(known <= _MIN_TEMPERATURE):
    return best
  if known is not None and np.all(known > _MIN_TEMPERATURE):
    return draw
  if jnp.ndim(temperature) == 0:
    return lambda rng, logits: jax.lax.cond(jnp.asarray(temperature) > _MIN_TEMPERATURE, draw, best, rng, logits)
  is_drawn = jnp.repeat(jnp.asarray(temperature), num_decodes) > _MIN_TEMPERATURE

  def either(rng, logits):
    return tuple(jnp.where(is_drawn, a, b) for a, b in zip(draw(rng, logits), best(rng, logits), strict=True))

  return either


def _per_decode(temperature: ArrayLike, num_decodes: int) -> tuple[Array, int | None]:
  """Returns (what to divide logits [rows, vocab] by, rows of noise that all batch rows share; None: none is shared)."""
  divisor = jnp.maximum(jnp.asarray(temperature, jnp.float32), _MIN_TEMPERATURE)
  if divisor.ndim == 0:
    return divisor, None
  return jnp.repeat(divisor, num_decodes)[:, None], num_decodes


def _mask(scaled: Array, topk: ArrayLike, topp: ArrayLike) -> Array:
  """Returns `scaled` <float32>[rows, vocab] with NEG_INF_VALUE where a token is not to be drawn."""
  for limit, mask_fn in ((topk, topk_mask), (topp, topp_mask)):
    known = options.concrete(limit)
    if known is None:
      masked = lambda mask_fn=mask_fn, limit=limit, x=scaled: mask_fn(x, limit, NEG_INF_VALUE)
      scaled = jax.lax.cond(limit > 0, masked, lambda x=scaled: x)
    elif known:
      scaled = mask_fn(scaled, limit, NEG_INF_VALUE)
  return scaled


def _draw(
    rng: Array, logits: Array, kept: Array, noise_rows: int | None, rescale: bool) -> tuple[Array, Array]:
  """Draws tokens from the logits `kept`; returns them and their log-probabilities under `kept` or `logits`."""
  rows, vocab_size = kept.shape
  # What `jax.random.categorical` does, by a faster arg-max.
  noise = jax.random.gumbel(rng, (rows if noise_rows is None else noise_rows, vocab_size), kept.dtype)
  if noise_rows is not None:
    noise = jnp.tile(noise, (rows // noise_rows, 1))
  _, token = first_argmax(noise + kept)
  scored = kept if rescale else logits
  return token, _log_prob(scored, jnp.max(scored, axis=-1), _at(scored, token))


def _at(logits: Array, token: Array) -> Array:
  """Returns [rows], the logit of each row's token."""
  return jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]


def _log_prob(logits: Array, largest: Array, logit: Array) -> Array:
  """Returns [rows], log-softmax at one entry of each row, without the array of all."""
  return (logit - largest) - jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1))
