"""What a decoding function and the network's step exchange."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax
from t5x_lite.types import Array


@flax.struct.dataclass
class DecodingState:
  """What `tokens_to_logits` sees of a decoding in progress. `rows` is batch * num_decodes.

  Attributes:
    cur_index: int32 scalar or [rows], the position in `sequences` of the current token.
    sequences: <int32>[rows, length + 1], the start token, then what has been decoded so far.
    cur_token: <int32>[rows, 1], the token to feed.
    cache: the network's `cache` collection, of `rows` rows.
  """

  cur_index: Array
  sequences: Array
  cur_token: Array
  cache: Mapping[str, Any]


# One step of the network: state -> (<float>[rows, vocab] logits of the next token, updated cache).
TokensIdsToLogitsCallable = Callable[[DecodingState], tuple[Array, Mapping[str, Any]]]


class DecodeFnCallable(Protocol):
  """A decoding algorithm, independent of the network."""

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
