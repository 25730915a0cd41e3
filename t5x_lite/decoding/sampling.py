"""Sampling from the network's distribution with temperature, top-k or top-p.

Draws equal those of `jax.random.categorical` for the same key.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.decoding import cache as cache_lib
from t5x_lite.decoding import loop
from t5x_lite.decoding import options
from t5x_lite.decoding.state import MIN_TEMPERATURE
from t5x_lite.decoding.state import NEG_INF_VALUE
from t5x_lite.decoding.state import LogitCallbackFn
from t5x_lite.decoding.state import LogitProcessor
from t5x_lite.decoding.state import Rows
from t5x_lite.decoding.state import StateCallbackFn
from t5x_lite.decoding.state import TokensIdsToLogitsCallable
from t5x_lite.decoding.state import declare
from t5x_lite.decoding.topk import first_argmax
from t5x_lite.decoding.topk import topk_mask
from t5x_lite.decoding.topk import topp_mask
from t5x_lite.types import Array, ArrayLike

_MIN_TEMPERATURE = float(MIN_TEMPERATURE)
# If the only largest logit is above this, no masked token (at NEG_INF_VALUE) is drawn: noise is far below 1000.
_CLEARLY_ABOVE_MASKED = NEG_INF_VALUE + 1000.0


@declare(
  padding_mask=True,
  options=(
    'temperature',
    'topk',
    'topp',
    'max_decode_steps',
    'max_decode_steps_hard_limit',
    'rescale_log_probs',
    'state_callback_fn',
    'logit_callback_fn',
    'stop_token_ids',
    'logit_processor',
  ),
)
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
  padding_mask: Array | None = None,
  logit_processor: LogitProcessor | None = None,
) -> tuple[Array, Array]:
  """Sample `num_decodes` sequences for each row and return them ranked by log-probability.

  Decoding stops when all sequences have ended, by an end token that is not in the prompt or at their limit. After its
  end a sequence is padded with 0. By default `topk` is 1: the most probable token is chosen (drawn only if several are
  equal), and rescaled log-probabilities are 0.

  If `temperature` has one entry per row, all rows use the same random numbers in a step, so each row samples the same
  tokens as in a batch of one. The `num_decodes` sequences of a row use different random numbers.

  Args:
    inputs: <int32>[batch, length]; ids above 0 after column 0 are forced until their row ends. Column 0 is not read:
      without `initial_index` the first input token is 0.
    cache: the network's `cache` collection for `batch` rows.
    tokens_to_logits: step of the network.
    eos_id: token that ends a sequence.
    decode_rng: key of the draws; None: `jax.random.PRNGKey(0)`.
    num_decodes: number of sequences for each row.
    temperature: divisor of the logits, <float>[] or [batch]. Up to 1e-4 the most probable token is chosen, whatever
      `topk` and `topp`, with a rescaled log-probability of 0.
    topk: number of most probable tokens to draw from, including ties with the last of them; 0: all tokens.
    topp: cumulative probability of the most probable tokens to draw from, including ties with the last of them; 0: all
      tokens.
    cache_offset: number of dims before the batch dim in cache leaves.
    initial_index: <int32>[batch], number of tokens of each row in the cache; the token at this position is the first
      input, and leaves named `cache_index` have one entry per row. None: the cache is empty.
    max_decode_steps: number of tokens to decode after each prompt, <int32>[] or [batch]; None: up to `length`.
    max_decode_steps_hard_limit: bound on `max_decode_steps`; None or 0: none.
    rescale_log_probs: True for log-probabilities of the distribution of the draws, False for those of the logits.
    state_callback_fn: returns a changed state of the loop, before each step and at the end. Tokens that it writes after
      the current position are forced, and an end token ends the row.
    logit_callback_fn: returns changed logits of a step.
    stop_token_ids: more tokens that end a sequence.
    padding_mask: <bool>[batch], True for padding rows; see `DecodeContract`.
    logit_processor: changes the logits of each step, such as `Constraints`, after `logit_callback_fn` and before the
      temperature. "Logits" above are the changed ones.

  Returns:
    (<int32>[batch, num_decodes, length] sequences, <float32>[batch, num_decodes] log-probabilities of the decoded
    tokens, the end token included), in ascending order: the best is the last.

  Raises:
    ConfigError: an option that is not traced is out of range, or `topk` and `topp` are both set.
  """
  options.check_inputs('temperature_sample', inputs)
  batch_size = inputs.shape[0]
  checks.check(
    'temperature_sample',
    locals(),
    num_decodes=options.COUNT,
    eos_id=options.EOS_ID,
    stop_token_ids=options.STOP_TOKEN_IDS,
    initial_index=options.initial_index(inputs),
    padding_mask=options.padding_mask(inputs),
    temperature=options.numbers(
      f'a finite number >= 0, or one for each of the {batch_size} rows',
      lambda t: np.isfinite(t) & (t >= 0),
      shapes=((), (batch_size,)),
      remedy='0 chooses the most probable token.',
    ),
    topk=options.numbers(
      'an integer >= 0', lambda k: k >= 0, integer=True, remedy='0 draws from all tokens.'
    ),
    topp=options.numbers(
      'a probability in [0, 1], and 0 unless `topk` is 0',
      lambda p: (p >= 0) & (p <= 1) & ((p == 0) | (not options.concrete(topk))),
      remedy='Set topk=0 to sample with topp.',
    ),
    max_decode_steps_hard_limit=checks.number(at_least=0, integer=True).or_none(),
    max_decode_steps=options.max_decode_steps(inputs, max_decode_steps_hard_limit),
  )
  max_decoded = options.decode_length(inputs.shape[1], max_decode_steps)
  max_decode_steps = options.int32_or_none(max_decode_steps)
  if max_decode_steps is not None and max_decode_steps_hard_limit:
    max_decoded = min(max_decoded, max_decode_steps_hard_limit)
    max_decode_steps = jnp.minimum(max_decode_steps, max_decode_steps_hard_limit)
  rows = Rows(
    tokens=inputs,
    start_tokens=inputs[:, 0],
    padding_mask=options.mask_or_zeros(padding_mask, batch_size),
    initial_index=options.int32_or_none(initial_index),
    max_decode_steps=max_decode_steps,
  )

  def repeat_rows(x: Array) -> Array:
    if jnp.ndim(x) == 0:
      return x
    return cache_lib.flat_batch_beam_expand(x, num_decodes)

  # [batch * num_decodes, ...], the decodes of an example adjacent.
  rows = jax.tree.map(repeat_rows, rows)

  if num_decodes > 1:
    cache = cache_lib.cache_map(
      lambda x: cache_lib.flat_batch_beam_expand(x, num_decodes, cache_offset),
      cache,
      apply_to_index=initial_index is not None,
    )
  if decode_rng is None:
    decode_rng = jax.random.PRNGKey(0)
  sequences, log_probs = loop.decode_tokens(
    rows,
    cache,
    tokens_to_logits,
    _choose_fn(temperature, topk, topp, num_decodes, rescale_log_probs),
    ends=options.end_token_ids(eos_id, stop_token_ids),
    rng=decode_rng,
    max_decoded=max_decoded,
    state_callback_fn=state_callback_fn,
    logit_callback_fn=logit_callback_fn,
    logit_processor=logit_processor,
  )
  # [batch, num_decodes, length] and [batch, num_decodes]
  sequences = cache_lib.unflatten_beam_dim(sequences, batch_size, num_decodes)
  log_probs = cache_lib.unflatten_beam_dim(log_probs, batch_size, num_decodes)
  order = jnp.argsort(log_probs, axis=1)  # the best decode is the last
  sequences = jnp.take_along_axis(sequences, order[:, :, None], axis=1)
  return sequences, jnp.take_along_axis(log_probs, order, axis=1)


def take_best(rng: Array, logits: Array) -> tuple[Array, Array]:
  """Return the most probable tokens <int32>[rows], of equal tokens the first, and their log-probabilities [rows].

  Args:
    rng: not used; part of `loop.ChooseFn`.
    logits: <float32>[rows, vocab].
  """
  del rng
  largest, token = first_argmax(logits)
  return token, _log_prob(logits, largest, largest)


def _choose_fn(
  temperature: ArrayLike, topk: ArrayLike, topp: ArrayLike, num_decodes: int, rescale: bool
) -> loop.ChooseFn:
  """Return the function that chooses the tokens of a step, with only the computations that the options need."""

  def best(rng, logits):
    token, log_prob = take_best(rng, logits)
    # Of the only token that is kept, the rescaled probability is 1.
    if rescale:
      log_prob = jnp.zeros_like(log_prob)
    return token, log_prob

  divisor, noise_rows = _per_decode(temperature, num_decodes)

  def draw(rng, logits):
    scaled = logits / divisor
    known = options.concrete(topk)

    def draw_from_kept():
      return _draw(rng, logits, _mask(scaled, topk, topp), noise_rows, rescale)

    if known is None or known != 1:
      return draw_from_kept()
    # [rows]: one token is kept, unless others are equal; then one of these is drawn.
    largest, token = first_argmax(scaled)
    num_largest = jnp.sum(scaled == largest[:, None], axis=-1)
    is_certain = (num_largest == 1) & (largest > _CLEARLY_ABOVE_MASKED)
    if rescale:
      log_prob = jnp.zeros_like(largest)
    else:
      log_prob = _log_prob(logits, jnp.max(logits, axis=-1), _at(logits, token))
    return jax.lax.cond(jnp.all(is_certain), lambda: (token, log_prob), draw_from_kept)

  known = options.concrete(temperature)
  if known is not None and np.all(known <= _MIN_TEMPERATURE):
    return best
  if known is not None and np.all(known > _MIN_TEMPERATURE):
    return draw
  if jnp.ndim(temperature) == 0:
    return lambda rng, logits: jax.lax.cond(
      jnp.asarray(temperature) > _MIN_TEMPERATURE, draw, best, rng, logits
    )
  is_drawn = jnp.repeat(jnp.asarray(temperature), num_decodes) > _MIN_TEMPERATURE

  def either(rng, logits):
    drawn, drawn_log_prob = draw(rng, logits)
    token, log_prob = best(rng, logits)
    token = jnp.where(is_drawn, drawn, token)
    return token, jnp.where(is_drawn, drawn_log_prob, log_prob)

  return either


def _per_decode(temperature: ArrayLike, num_decodes: int) -> tuple[Array, int | None]:
  """Return (divisor of logits [rows, vocab], number of rows of noise shared by all batch rows; None if not shared)."""
  divisor = jnp.maximum(jnp.asarray(temperature, jnp.float32), _MIN_TEMPERATURE)
  if divisor.ndim == 0:
    return divisor, None
  return jnp.repeat(divisor, num_decodes)[:, None], num_decodes


def _mask(scaled: Array, topk: ArrayLike, topp: ArrayLike) -> Array:
  """Return `scaled` <float32>[rows, vocab] with NEG_INF_VALUE for tokens that must not be drawn."""
  for limit, mask_fn in ((topk, topk_mask), (topp, topp_mask)):
    known = options.concrete(limit)
    if known is None:

      def masked(mask_fn=mask_fn, limit=limit, x=scaled):
        return mask_fn(x, limit, NEG_INF_VALUE)

      scaled = jax.lax.cond(limit > 0, masked, lambda x=scaled: x)
    elif known:
      scaled = mask_fn(scaled, limit, NEG_INF_VALUE)
  return scaled


def _draw(
  rng: Array, logits: Array, kept: Array, noise_rows: int | None, rescale: bool
) -> tuple[Array, Array]:
  """Draw tokens from the logits `kept`; return them and their log-probabilities under `kept` or `logits`."""
  rows, vocab_size = kept.shape
  num_noise = rows
  if noise_rows is not None:
    num_noise = noise_rows
  # [rows, vocab]: the arg-max of logits plus Gumbel noise is a sample of the softmax. Same as `jax.random.categorical`,
  # with a faster arg-max.
  noise = jax.random.gumbel(rng, (num_noise, vocab_size), kept.dtype)
  if noise_rows is not None:
    noise = jnp.tile(noise, (rows // noise_rows, 1))
  _, token = first_argmax(noise + kept)
  scored = logits
  if rescale:
    scored = kept
  return token, _log_prob(scored, jnp.max(scored, axis=-1), _at(scored, token))


def _at(logits: Array, token: Array) -> Array:
  """Return [rows], the logit of each row's token."""
  return jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]


def _log_prob(logits: Array, largest: Array, logit: Array) -> Array:
  """Return [rows], the log-softmax of one entry of each row, without computing the others."""
  return (logit - largest) - jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1))
