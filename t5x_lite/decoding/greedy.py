"""Greedy decoding: the most probable token at each position."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from t5x_lite import checks
from t5x_lite.decoding import loop
from t5x_lite.decoding import options
from t5x_lite.decoding import sampling
from t5x_lite.decoding.state import LogitProcessor
from t5x_lite.decoding.state import Rows
from t5x_lite.decoding.state import TokensIdsToLogitsCallable
from t5x_lite.decoding.state import declare
from t5x_lite.types import Array


@declare(
  padding_mask=True,
  max_num_decodes=1,
  options=('max_decode_steps', 'stop_token_ids', 'logit_processor'),
)
def greedy_search(
  inputs: Array,
  cache: Mapping[str, Any],
  tokens_to_logits: TokensIdsToLogitsCallable,
  eos_id: int,
  num_decodes: int = 1,
  decode_rng: Array | None = None,
  cache_offset: int = 0,
  *,
  initial_index: Array | None = None,
  max_decode_steps: int | Array | None = None,
  stop_token_ids: Sequence[int] = (),
  padding_mask: Array | None = None,
  logit_processor: LogitProcessor | None = None,
) -> tuple[Array, Array]:
  """Decode each row greedily until all rows have ended.

  An end token forced by `inputs` does not end its row. After its end a row is padded with 0.

  Args:
    inputs: <int32>[batch, length]; see `DecodeFnCallable`.
    cache: the network's `cache` collection.
    tokens_to_logits: step of the network.
    eos_id: token that ends a sequence.
    num_decodes: must be 1.
    decode_rng: part of the decoding interface, without effect.
    cache_offset: part of the decoding interface, without effect.
    initial_index: <int32>[batch], number of tokens of each row in the cache; None: none.
    max_decode_steps: number of tokens to decode after each prompt, <int32>[] or [batch]; None: up to `length`.
    stop_token_ids: more tokens that end a sequence.
    padding_mask: <bool>[batch], True for padding rows; see `DecodeContract`.
    logit_processor: changes the logits of each step, such as `Constraints`; log-probabilities are those of the changed
      logits.

  Returns:
    (<int32>[batch, 1, length] sequences, <float32>[batch, 1] log-probabilities of the decoded tokens, the end token
    included and forced tokens excluded).

  Raises:
    ConfigError: `num_decodes` is not 1, or another option is out of range.
  """
  del decode_rng, cache_offset
  options.check_inputs('greedy_search', inputs)
  checks.check(
    'greedy_search',
    locals(),
    num_decodes=checks.one_of((1,)),
    eos_id=options.EOS_ID,
    stop_token_ids=options.STOP_TOKEN_IDS,
    initial_index=options.initial_index(inputs),
    padding_mask=options.padding_mask(inputs),
    max_decode_steps=options.max_decode_steps(inputs),
  )
  rows = Rows(
    tokens=inputs,
    start_tokens=inputs[:, 0],
    padding_mask=options.mask_or_zeros(padding_mask, inputs.shape[0]),
    initial_index=options.int32_or_none(initial_index),
    max_decode_steps=options.int32_or_none(max_decode_steps),
  )
  sequences, log_probs = loop.decode_tokens(
    rows,
    cache,
    tokens_to_logits,
    sampling.take_best,
    ends=options.end_token_ids(eos_id, stop_token_ids),
    # Greedy search draws nothing, but the state of the loop has a key.
    rng=jax.random.key(0),
    max_decoded=options.decode_length(inputs.shape[1], max_decode_steps),
    logit_processor=logit_processor,
  )
  return sequences[:, None], log_probs[:, None]
