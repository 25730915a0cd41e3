"""What a decoding function, its loop, its callbacks and the network's step exchange."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import flax
import numpy as np
from t5x_lite.types import Array

# Stands for "impossible" in scores and masked logits: finite, so that sums and differences of it stay numbers.
NEG_INF_VALUE = -1.0e7
NEG_INF = np.array(NEG_INF_VALUE)
# At or below this temperature sampling takes the most probable token.
MIN_TEMPERATURE = np.array(1e-4)


@flax.struct.dataclass
class DecodingState:
  """What `tokens_to_logits` sees of a decoding in progress. `rows` is batch * num_decodes.

  Attributes:
    cur_index: position in `sequences` of the current token: int32[rows] in sampling and greedy search; an int32 scalar
      in beam search, where it counts from `initial_index` if there is one.
    sequences: <int32>[rows, length], in beam search [rows, length + 1]: the start token, then what has been decoded so
      far; in beam search with `initial_index` it starts with the last token that the cache does not hold yet.
    cur_token: <int32>[rows, 1], the token to feed.
    cache: the network's `cache` collection, of `rows` rows.
  """

  cur_index: Array
  sequences: Array
  cur_token: Array
  cache: Mapping[str, Any]


@flax.struct.dataclass
class SamplingLoopState:
  """What sampling carries from position to position; callbacks see it. `rows` is batch * num_decodes.

  Attributes:
    step: int32 scalar, number of steps taken.
    cur_index: <int32>[rows], position in `sequences` of the current token.
    sequences: <int32>[rows, length + 2], the start token, then forced and decoded tokens. A token above 0 behind the
      current one is forced. The last column is scrap: rows that have no room left write there.
    cache: the network's `cache` collection.
    cur_token: <int32>[rows, 1], the token to feed next.
    ended: <bool>[rows, 1], rows that are complete.
    rng: key of the draws to come.
    log_prob: <float32>[rows], sum over the decoded tokens.
  """

  step: Array
  cur_index: Array
  sequences: Array
  cache: Mapping[str, Any]
  cur_token: Array
  ended: Array
  rng: Array
  log_prob: Array


@flax.struct.dataclass
class BeamState:
  """What beam search carries from position to position. Each row's beams stand in ascending order, the best last.

  Attributes:
    cur_index: int32 scalar, position in `live_seqs` of the current token.
    live_logprobs: <float32>[batch, beam], log-probabilities of the sequences that go on.
    finished_scores: <float32>[batch, beam], log-probabilities over brevity penalties of those that have ended.
    live_seqs: <int32>[batch, beam, length + 1].
    finished_seqs: <int32>[batch, beam, length + 1].
    finished_flags: <bool>[batch, beam], whether `finished_seqs` holds a sequence there.
    cache: the network's `cache` collection: from step to step of [batch * beam] rows, as the network sees it; as
      `beam_init` makes it, with its batch dim divided into [batch, beam].
    initial_index: <int32>[batch], number of tokens of each row that the cache held at the start; None if none.
  """

  cur_index: Array
  live_logprobs: Array
  finished_scores: Array
  live_seqs: Array
  finished_seqs: Array
  finished_flags: Array
  cache: Any
  initial_index: Array | None


# One step of the network: state -> (<float>[rows, vocab] logits of the next token, updated cache).
TokensIdsToLogitsCallable = Callable[[DecodingState], tuple[Array, Mapping[str, Any]]]

# Called before each step of sampling, and once more at its end, with the loop's state; returns the state to go on with.
StateCallbackFn = Callable[[SamplingLoopState], SamplingLoopState]

# (<float>[rows, vocab] logits, state before the step) -> the logits to choose from.
LogitCallbackFn = Callable[[Array, SamplingLoopState], Array]


class DecodeFnCallable(Protocol):
  """A decoding algorithm, independent of the network.

  Where models have read prompts they also pass `initial_index`, <int32>[batch], the number of tokens of each row that
  the cache holds. Prompts are refused for an algorithm that has no such argument. An algorithm that
  `TakesFillingRows` is told which rows of a batch only fill it up.
  """

  def __call__(
      self,
      *,
      inputs: Array,
      cache: Mapping[str, Any],
      tokens_to_logits: TokensIdsToLogitsCallable,
      eos_id: int,
      num_decodes: int,
      decode_rng: Array | None,
      cache_offset: int,
      **kwargs,
  ) -> tuple[Array, Array]:
    """Decodes a batch.

    Args:
      inputs: <int32>[batch, length]; column 0 is the start token, ids above 0 after it are forced on the decoding, and
        `length` is the number of tokens to decode.
      cache: the network's `cache` collection for `batch` rows.
      tokens_to_logits: one step of the network, for batch * num_decodes rows (the decodes of a row side by side).
      eos_id: the token that ends a sequence.
      num_decodes: number of sequences to return for each row.
      decode_rng: what random choices are drawn with.
      cache_offset: number of dims before the batch dim in cache leaves (1 where layers are stacked in front).
      **kwargs: options of the algorithm.

    Returns:
      (<int32>[batch, num_decodes, length] sequences, <float32>[batch, num_decodes] scores), each row in ascending order
      of scores: the best is the last.
    """


@runtime_checkable
class TakesFillingRows(Protocol):
  """A decoding algorithm with an argument `is_filling`; others need no such attribute. See `takes_filling_rows`.

  Attributes:
    takes_filling_rows: whether models pass `is_filling`, <bool>[batch], None for no row: rows that are True only fill
      up the batch. They are nothing to wait for, and their results are padding with scores of 0. Another algorithm
      decodes them as all others.
  """

  takes_filling_rows: bool


_Function = TypeVar('_Function', bound=Callable[..., Any])


def takes_filling_rows(decode_fn: _Function) -> _Function:
  """Decorates a decoding function that has the argument `is_filling`, so that models pass it; see `TakesFillingRows`.

  >>> @takes_filling_rows
  ... def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset, is_filling=None):
  ...   ...
  >>> isinstance(decode, TakesFillingRows) and decode.takes_filling_rows
  True
  """
  decode_fn.takes_filling_rows = True
  return decode_fn
