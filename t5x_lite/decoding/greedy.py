"""Greedy decoding: the most probable token, one position after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from t5x_lite import errors
from t5x_lite.decoding import loop
from t5x_lite.decoding import options
from t5x_lite.decoding import sampling
from t5x_lite.decoding.state import Rows, TokensIdsToLogitsCallable, declare
from t5x_lite.types import Array


@declare(is_filling=True, max_num_decodes=1, options=('max_decode_steps', 'stop_token_ids'))
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
    is_filling: Array | None = None,
) -> tuple[Array, Array]:
  """Decodes each row greedily and stops as soon as all rows have ended.

  An end token that is forced by `inputs` does not end its row; after its end a row is filled with 0.

  Args:
    inputs: <int32>[batch, length]; see `DecodeFnCallable`.
    cache: the network's `cache` collection.
    tokens_to_logits: one step of the network.
    eos_id: the token that ends a sequence.
    num_decodes: must be 1.
    decode_rng: part of the decoding interface; nothing here is random, so it has no bearing on the result.
    cache_offset: part of the decoding interface; rows are never reordered here, so it has no bearing on the result.
    initial_index: <int32>[batch], number of tokens of each row that the cache holds already; None: none.
    max_decode_steps: number of tokens to decode behind each prompt, or one number for each row; None: up to `length`.
    stop_token_ids: further tokens that end a sequence.
    is_filling: <bool>[batch], rows that only fill up the batch; see `DecodeContract`.

  Returns:
    (<int32>[batch, 1, length] sequences, <float32>[batch, 1] log-probabilities of the decoded tokens, the end token
    included and forced ones left out).

  Raises:
    ConfigError: `num_decodes` is not 1, or another option is out of range.
  """
  del decode_rng, cache_offset
  if num_decodes != 1:
    raise errors.ConfigError(f'Got num_decodes={num_decodes} for greedy_search, which returns one sequence for each '
                             'row; expected 1.')
  options.check_inputs(inputs)
  rows = Rows(
      tokens=inputs, start_tokens=inputs[:, 0], is_filling=options.check_is_filling(is_filling, inputs.shape[0]),
      initial_index=options.check_initial_index(initial_index, inputs),
      max_decode_steps=options.check_max_decode_steps(max_decode_steps, None, inputs))
  sequences, log_probs = loop.decode_tokens(
      rows, cache, tokens_to_logits, sampling.take_best, ends=options.end_token_ids(eos_id, stop_token_ids),
      # A state's part of the loop; no step looks at it.
      rng=jax.random.key(0))
  return sequences[:, None], log_probs[:, None]
