"""What a decoding function, its loop, its callbacks and the network's step exchange."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import flax
import numpy as np
from t5x_lite.errors import ConfigError
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


class Rows(NamedTuple):
  """State of each row before it is decoded one token at a time.

  Attributes:
    tokens: <int32>[rows, length]; ids above 0 behind column 0 are forced.
    start_tokens: <int32>[rows], what to feed first where `initial_index` is None.
    is_filling: <bool>[rows], rows that have ended from the start: all padding, of log-probability 0.
    initial_index: <int32>[rows], number of tokens that the cache holds already; None: none.
    max_decode_steps: <int32>[] or [rows], number of tokens to decode behind the prompt; None: up to `length`.
  """

  tokens: Array
  start_tokens: Array
  is_filling: Array
  initial_index: Array | None
  max_decode_steps: Array | None


# One step of the network: state -> (<float>[rows, vocab] logits of the next token, updated cache).
TokensIdsToLogitsCallable = Callable[[DecodingState], tuple[Array, Mapping[str, Any]]]

# Called before each step of sampling, and once more at its end, with the loop's state; returns the state to go on with.
StateCallbackFn = Callable[[SamplingLoopState], SamplingLoopState]

# (<float>[rows, vocab] logits, state before the step) -> the logits to choose from.
LogitCallbackFn = Callable[[Array, SamplingLoopState], Array]


class DecodeFnCallable(Protocol):
  """A decoding algorithm, independent of the network.

  Where models have read prompts they also pass `initial_index`, <int32>[batch], the number of tokens of each row that
  the cache holds. What else an algorithm accepts is declared by `declare`; see `DecodeContract`.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeContract:
  """Contract that a decoding function declares. The defaults hold for undeclared functions in T5X's signature.

  Attributes:
    initial_index: it accepts `initial_index`: models may read prompts before it starts. Models raise for prompts where
      this is False, or where there is no such argument.
    is_filling: it accepts `is_filling`, <bool>[batch] or None for no row: rows that are True only fill up the batch.
      They are nothing to wait for, and their results are padding with scores of 0. Other functions decode them as all
      others.
    reorders_decodes: it moves the cache among the decodes of an example, as beam search does. Networks may then make a
      cache in which nothing has to be moved; see `networks.Network.share_beams`.
    max_num_decodes: the most sequences of each row that it can return; None for any number.
    options: names of its own options, which `decoder_params` may set. None: the names of its arguments, or any names
      with `**kwargs`.
  """

  initial_index: bool = True
  is_filling: bool = False
  reorders_decodes: bool = False
  max_num_decodes: int | None = None
  options: tuple[str, ...] | None = None


_Function = TypeVar('_Function', bound=Callable[..., Any])
_ATTRIBUTE = '_t5x_lite_decode_contract'


def declare(**fields: Any) -> Callable[[_Function], _Function]:
  """Returns a decorator that declares the contract of a decoding function (or of the instances of a class).

  >>> @declare(is_filling=True)
  ... def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset, is_filling=None):
  ...   ...
  >>> contract_of(decode).is_filling
  True

  Args:
    **fields: fields of `DecodeContract`.
  """

  def decorate(decode_fn):
    setattr(decode_fn, _ATTRIBUTE, DecodeContract(**fields))
    return decode_fn

  return decorate


def contract_of(decode_fn: Callable[..., Any]) -> DecodeContract:
  """Returns what `decode_fn` declares, or else what the first function inside its partials and wrappers declares.

  Wrappers are those that name what they wrap, as `functools.wraps` does and gin's are.

  >>> contract_of(lambda **options: None) == DecodeContract()
  True

  Raises:
    ConfigError: instead of a declaration there is the attribute `takes_filling_rows` of earlier versions.
  """
  while (contract := getattr(decode_fn, _ATTRIBUTE, None)) is None:
    if getattr(decode_fn, 'takes_filling_rows', False):
      raise ConfigError(
          f'Got decode_fn={getattr(decode_fn, "__name__", repr(decode_fn))} with the attribute takes_filling_rows='
          f'{decode_fn.takes_filling_rows!r}, which has no effect; expected a declaration. Decorate the function (or '
          'class) with @decoding.declare(is_filling=True) in place of the attribute.')
    inner = decode_fn.func if isinstance(decode_fn, functools.partial) else getattr(decode_fn, '__wrapped__', None)
    if inner is None:
      return DecodeContract()
    decode_fn = inner
  return contract


def takes_filling_rows(decode_fn: _Function) -> _Function:
  """Declares that `decode_fn` accepts `is_filling`, and for the rest what it declares already; see `declare`."""
  setattr(decode_fn, _ATTRIBUTE, dataclasses.replace(contract_of(decode_fn), is_filling=True))
  return decode_fn
