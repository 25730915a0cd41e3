"""Greedy decoding: the most probable token, one position after the other."""

from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
from t5x_lite import errors
from t5x_lite.decoding.state import DecodingState, TokensIdsToLogitsCallable
from t5x_lite.types import Array


@flax.struct.dataclass
class GreedyLoopState:
  """What the loop carries from position to position.

  Attributes:
    step: int32 scalar, the position of the current token.
    sequences: <int32>[batch, length + 1], the forced tokens, overwritten up to `step` by what was decoded.
    cache: the network's cache.
    ended: <bool>[batch], rows that have produced the end token.
    log_prob: <float32>[batch], sum over the decoded tokens.
  """

  step: Array
  sequences: Array
  cache: Mapping[str, Any]
  ended: Array
  log_prob: Array


def greedy_search(
    inputs: Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensIdsToLogitsCallable,
    eos_id: int,
    num_decodes: int = 1,
    decode_rng: Array | None = None,
    cache_offset: int = 0,
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

  Returns:
    (<int32>[batch, 1, length] sequences, <float32>[batch, 1] log-probabilities of the decoded tokens, the end token
    included and forced ones left out).

  Raises:
    ConfigError: `num_decodes` is not 1.
  """
  del decode_rng, cache_offset
  check_num_decodes(num_decodes)
  batch_size, length = inputs.shape
  inputs = jnp.pad(inputs.astype(jnp.int32), ((0, 0), (0, 1)))

  def not_done(state: GreedyLoopState) -> Array:
    return (state.step < length) & ~jnp.all(state.ended)

  def decode_position(state: GreedyLoopState) -> GreedyLoopState:
    cur_token = jax.lax.dynamic_slice_in_dim(state.sequences, state.step, 1, axis=1)
    logits, new_cache = tokens_to_logits(
        DecodingState(cur_index=state.step, sequences=state.sequences, cur_token=cur_token, cache=state.cache))
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    choice = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
    choice_log_prob = jnp.max(log_probs, axis=-1)

    forced = jax.lax.dynamic_slice_in_dim(inputs, state.step + 1, 1, axis=1)[:, 0]
    is_decoded = (forced == 0) & ~state.ended
    token = jnp.where(forced != 0, forced, jnp.where(state.ended, 0, choice))
    return GreedyLoopState(
        step=state.step + 1,
        sequences=jax.lax.dynamic_update_slice_in_dim(state.sequences, token[:, None], state.step + 1, axis=1),
        cache=new_cache,
        ended=state.ended | (is_decoded & (choice == eos_id)),
        log_prob=state.log_prob + jnp.where(is_decoded, choice_log_prob, 0.0),
    )

  final = jax.lax.while_loop(not_done, decode_position, GreedyLoopState(
      step=jnp.zeros((), jnp.int32),
      sequences=inputs,
      cache=cache,
      ended=jnp.zeros((batch_size,), bool),
      log_prob=jnp.zeros((batch_size,), jnp.float32),
  ))
  return final.sequences[:, None, 1:], final.log_prob[:, None]


def check_num_decodes(num_decodes: int) -> None:
  """Refuses any number of decodes that a greedy search cannot give.

  Raises:
    ConfigError: `num_decodes` is not 1.
  """
  if num_decodes != 1:
    raise errors.ConfigError(
        f'Got num_decodes={num_decodes} with decode_fn=greedy_search; greedy decoding has one result, so expected '
        'num_decodes=1. Set num_decodes=1, or use a decode_fn that returns several sequences.')
