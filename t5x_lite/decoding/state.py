"""States and signatures shared by decoding functions, their loops and callbacks, and the step of the network."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, TypeVar

from flax import struct
import numpy as np

from t5x_lite.types import Array, PyTree

# Score or logit of an impossible choice: finite, so that sums and differences of it are not NaN.
NEG_INF_VALUE = -1.0e7
NEG_INF = np.array(NEG_INF_VALUE)
# Logit of a token that a logit processor excludes: below NEG_INF_VALUE even after a division by a temperature or by the
# brevity penalty, so that a beam with such a token ranks below all others and stops no search late.
EXCLUDED_VALUE = 1.0e3 * NEG_INF_VALUE
# At or below this temperature sampling takes the most probable token.
MIN_TEMPERATURE = np.array(1e-4)


@struct.dataclass
class DecodingState:
  """Input of a step of the network, `tokens_to_logits`. `rows` is batch * num_decodes.

  Attributes:
    cur_index: position in `sequences` of the current token: int32[rows] in sampling and greedy search; an int32 scalar
      in beam search, where it counts from `initial_index` if there is one.
    sequences: <int32>[rows, length], in beam search [rows, length + 1]: the start token, then the tokens decoded so
      far; in beam search with `initial_index` it starts with the first token that the cache does not contain.
    cur_token: <int32>[rows, 1], the input token.
    cache: the network's `cache` collection for `rows` rows.
  """

  cur_index: Array
  sequences: Array
  cur_token: Array
  cache: Mapping[str, Any]


@struct.dataclass
class SamplingLoopState:
  """Loop state of sampling, passed to callbacks. `rows` is batch * num_decodes.

  Attributes:
    step: int32 scalar, number of steps taken.
    cur_index: <int32>[rows], position in `sequences` of the current token.
    sequences: <int32>[rows, length + 2], the start token, then forced and decoded tokens. A token above 0 after the
      current one is forced. Rows that are full write to the last column, which is discarded.
    cache: the network's `cache` collection.
    cur_token: <int32>[rows, 1], the next input token.
    ended: <bool>[rows, 1], True for complete rows.
    rng: key of the next draws.
    log_prob: <float32>[rows], sum over the decoded tokens.
    processor_state: state of the logit processor; None without one.
  """

  step: Array
  cur_index: Array
  sequences: Array
  cache: Mapping[str, Any]
  cur_token: Array
  ended: Array
  rng: Array
  log_prob: Array
  processor_state: PyTree = None


@struct.dataclass
class BeamState:
  """Loop state of beam search. The beams of each row are in ascending order, the best last.

  Attributes:
    cur_index: int32 scalar, position in `live_seqs` of the current token.
    live_logprobs: <float32>[batch, beam], log-probabilities of the sequences that continue.
    finished_scores: <float32>[batch, beam], log-probabilities over brevity penalties of ended sequences.
    live_seqs: <int32>[batch, beam, length + 1].
    finished_seqs: <int32>[batch, beam, length + 1].
    finished_flags: <bool>[batch, beam], True where `finished_seqs` has a sequence.
    cache: the network's `cache` collection for [batch * beam] rows; in the result of `beam_init` with dims [batch,
      beam] instead.
    initial_index: <int32>[batch], number of tokens of each row in the cache at the start; None for an empty cache.
    processor_state: state of the logit processor, for [batch * beam] rows; None without one.
  """

  cur_index: Array
  live_logprobs: Array
  finished_scores: Array
  live_seqs: Array
  finished_seqs: Array
  finished_flags: Array
  cache: Any
  initial_index: Array | None
  processor_state: PyTree = None


class Rows(NamedTuple):
  """State of each row before it is decoded one token at a time.

  Attributes:
    tokens: <int32>[rows, length]; ids above 0 after column 0 are forced.
    start_tokens: <int32>[rows], first input tokens if `initial_index` is None.
    padding_mask: <bool>[rows], True for padding rows, which have ended from the start, with log-probability 0.
    initial_index: <int32>[rows], number of tokens in the cache; None: none.
    max_decode_steps: <int32>[] or [rows], number of tokens to decode after the prompt; None: up to `length`.
  """

  tokens: Array
  start_tokens: Array
  padding_mask: Array
  initial_index: Array | None
  max_decode_steps: Array | None


class TokensIdsToLogitsCallable(Protocol):
  """Step of the network."""

  def __call__(self, decoding_state: DecodingState) -> tuple[Array, Mapping[str, Any]]:
    """Return (<float>[rows, vocab] logits of the next token, updated cache)."""
    ...


# Called with the loop's state before each step of sampling and at its end; returns the state to continue with.
StateCallbackFn = Callable[[SamplingLoopState], SamplingLoopState]

# (<float>[rows, vocab] logits, state before the step) -> logits to choose from.
LogitCallbackFn = Callable[[Array, SamplingLoopState], Array]


class ProcessorInputs(NamedTuple):
  """Properties of a decoding that a logit processor starts from.

  Attributes:
    tokens: <int32>[rows, length]; ids above 0 after column 0 are the prompt, and column 0 is the start token.
    num_cached: <int32>[rows], number of tokens in the cache, which no step reads again.
    max_length: number of tokens of the longest sequence, without the start token.
    max_decoded: largest number of tokens that a row may decode, as far as it is known.
    ends: tokens that end a sequence.
  """

  tokens: Array
  num_cached: Array
  max_length: int
  max_decoded: int
  ends: tuple[int, ...]


# (state, <int32>[rows] input tokens of the step, <float32>[rows, vocab] logits) -> (state, logits to choose from). A
# pure function of one row after the other.
ProcessFn = Callable[[PyTree, Array, Array], tuple[PyTree, Array]]

# Starts a logit processor for some rows: returns its state, a tree of arrays [rows, ...], and its function of a step.
# Decoding carries the state from step to step and reorders it with the beams.
LogitProcessor = Callable[[ProcessorInputs], tuple[PyTree, ProcessFn]]


class DecodeFnCallable(Protocol):
  """Decoding algorithm, independent of the network.

  Models that have read prompts also pass `initial_index`, <int32>[batch], the number of tokens of each row in the
  cache. An algorithm declares all other arguments that it accepts by `declare`; see `DecodeContract`.
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
    """Decode a batch.

    Args:
      inputs: <int32>[batch, length]; column 0 is the start token, ids above 0 after it are forced tokens, and
        `length` is the number of tokens to decode.
      cache: the network's `cache` collection for `batch` rows.
      tokens_to_logits: step of the network for batch * num_decodes rows, where the decodes of a row are adjacent.
      eos_id: token that ends a sequence.
      num_decodes: number of sequences to return for each row.
      decode_rng: key of random choices.
      cache_offset: number of dims before the batch dim in cache leaves (1 if layers are stacked).
      **kwargs: options of the algorithm.

    Returns:
      (<int32>[batch, num_decodes, length] sequences, <float32>[batch, num_decodes] scores), each row in ascending order
      of scores: the best is the last. Scores may have more dims, as those of `LabelScores`.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeContract:
  """Contract that a decoding function declares. The defaults apply to functions without declaration, such as T5X's.

  Attributes:
    initial_index: the function accepts `initial_index`, so models may read prompts before it starts. Otherwise models
      raise for prompts.
    padding_mask: the function accepts `padding_mask`, <bool>[batch] or None: rows with True are padding of the batch,
      do not delay decoding, and give padding with scores of 0. Other functions decode padding rows like all others.
    reorders_decodes: the function reorders the cache among the decodes of an example, as beam search does. Networks may
      then use a cache that need not be reordered; see `networks.Network.share_beams`.
    max_num_decodes: largest supported number of sequences per row; None for any number.
    options: names of the options that `decoder_params` may set. None: the names of the function's arguments, or any
      names if it has `**kwargs`.
  """

  initial_index: bool = True
  padding_mask: bool = False
  reorders_decodes: bool = False
  max_num_decodes: int | None = None
  options: tuple[str, ...] | None = None


_Function = TypeVar('_Function', bound=Callable[..., Any])
_ATTRIBUTE = '_t5x_lite_decode_contract'


def declare(**fields: Any) -> Callable[[_Function], _Function]:
  """Return a decorator that declares the contract of a decoding function, or of the instances of a class.

  >>> @declare(padding_mask=True)
  ... def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset, padding_mask=None):
  ...   ...
  >>> contract_of(decode).padding_mask
  True

  Args:
    **fields: fields of `DecodeContract`.
  """

  def decorate(decode_fn):
    setattr(decode_fn, _ATTRIBUTE, DecodeContract(**fields))
    return decode_fn

  return decorate


def contract_of(decode_fn: Callable[..., Any]) -> DecodeContract:
  """Return the contract of `decode_fn`, or of the first function inside its partials and wrappers that declares one.

  Wrappers are functions with `__wrapped__`, as `functools.wraps` and gin set it.

  >>> contract_of(lambda **options: None) == DecodeContract()
  True
  """
  while (contract := getattr(decode_fn, _ATTRIBUTE, None)) is None:
    if isinstance(decode_fn, functools.partial):
      inner = decode_fn.func
    else:
      inner = getattr(decode_fn, '__wrapped__', None)
    if inner is None:
      return DecodeContract()
    decode_fn = inner
  return contract


def identity_of(decode_fn: Any) -> Any:
  """Return a JSON value that names a decoding function, for records of what results depend on.

  It is the attribute `identity` of the function or of what is inside its partials, if there is one.
  """
  inner = decode_fn
  while isinstance(inner, functools.partial):
    inner = inner.func
  if hasattr(inner, 'identity'):
    return inner.identity
  return repr(getattr(decode_fn, '__qualname__', decode_fn))


def accepts_padding_rows(decode_fn: _Function) -> _Function:
  """Declare that `decode_fn` accepts `padding_mask`, and keep the rest of its declaration; see `declare`."""
  setattr(decode_fn, _ATTRIBUTE, dataclasses.replace(contract_of(decode_fn), padding_mask=True))
  return decode_fn
