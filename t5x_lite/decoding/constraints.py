"""Constraints on decoded sequences, the same in greedy search, sampling and beam search.

The first three are those of `transformers` (`NoRepeatNGramLogitsProcessor`, `RepetitionPenaltyLogitsProcessor`,
`MinLengthLogitsProcessor`), also in that greedy search and sampling apply them to logits, and beam search to
log-probabilities.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.decoding.allowed_outputs import AllowedOutputs
from t5x_lite.decoding.allowed_outputs import read_allowed_outputs
from t5x_lite.decoding.state import EXCLUDED_VALUE
from t5x_lite.decoding.state import LogitProcessor
from t5x_lite.decoding.state import ProcessFn
from t5x_lite.decoding.state import ProcessorInputs
from t5x_lite.types import Array, PyTree

# Id of columns without a token; larger than all ids, so that scatters skip it.
_NO_TOKEN = np.iinfo(np.int32).max


class _Seen(NamedTuple):
  """State of each row for constraints on repetitions.

  Attributes:
    num_tokens: <int32>[rows], number of tokens read, including start token and prompt.
    tokens: <int32>[rows, max_length], the tokens read, then _NO_TOKEN.
  """

  num_tokens: Array
  tokens: Array


class _Prefix(NamedTuple):
  """State of each row for allowed outputs.

  Attributes:
    num_decoded: <int32>[rows], number of tokens read after the prompt; negative within it.
    node: <int32>[rows], node of the decoded tokens in the trie.
  """

  num_decoded: Array
  node: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraints:
  """Logit processor of decoding functions that restricts or reweights the tokens of each step.

  Attributes:
    no_repeat_ngram_size: size of n-grams that occur at most once in a sequence; 0 for no limit. The start token and
      prompts count.
    repetition_penalty: factor for the logits of tokens that the sequence has, before all other constraints: negative
      logits are multiplied by it, others divided. 1 for no change. The start token and prompts count.
    min_decode_len: least number of tokens to decode after the prompt, including the end token; 0 for no limit.
    allowed_outputs: the only outputs to produce, or a file with one text a line, which a model encodes with the
      vocabulary of its targets; None for any.

  Raises:
    ConfigError: an option is out of range, or allowed outputs are combined with constraints that could exclude all.
  """

  no_repeat_ngram_size: int = 0
  repetition_penalty: float = 1.0
  min_decode_len: int = 0
  allowed_outputs: AllowedOutputs | str | None = None

  def __post_init__(self) -> None:
    checks.check(
      '',
      vars(self),
      no_repeat_ngram_size=checks.number(
        at_least=0, integer=True, remedy='0 allows all repetitions.'
      ),
      repetition_penalty=checks.number(
        above=0, remedy='1 is no penalty, and 1.2 makes repetitions less probable.'
      ),
      min_decode_len=checks.number(at_least=0, integer=True, remedy='0 allows any length.'),
      allowed_outputs=checks.instance(
        (AllowedOutputs, str), 'the path of a file with one output a line'
      ).or_none(),
    )
    if self.allowed_outputs is not None:
      for name in ('no_repeat_ngram_size', 'min_decode_len'):
        if getattr(self, name):
          raise checks.invalid(
            '',
            name,
            '0 with allowed_outputs, all of which it might exclude',
            getattr(self, name),
            'Set it to 0, and remove the outputs that you do not want from the file.',
          )

  @property
  def identity(self) -> dict[str, Any]:
    """Values that results depend on, as JSON values by name, with a hash of the allowed outputs."""
    values = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if getattr(self, field.name) != field.default
    }
    allowed = values.pop('allowed_outputs', None)
    if allowed is not None:
      values['allowed_outputs.content'] = getattr(allowed, 'identity', allowed)
    return values

  def encoded(self, vocabulary: Any) -> 'Constraints':
    """Return the constraints with the outputs of a file as tokens.

    Args:
      vocabulary: vocabulary of the targets.

    Raises:
      ConfigError: see `read_allowed_outputs`.
    """
    if not isinstance(self.allowed_outputs, str):
      return self
    allowed = read_allowed_outputs(self.allowed_outputs, vocabulary)
    return dataclasses.replace(self, allowed_outputs=allowed)

  def __call__(self, inputs: ProcessorInputs) -> tuple[tuple[PyTree, ...], ProcessFn]:
    """Return the states of rows before the first step, and the function of a step; see `LogitProcessor`.

    Raises:
      ConfigError: the sequences are too short for a constraint, or the outputs of a file are not `encoded`.
    """
    started = [start(inputs) for start in self._processors()]

    def process(
      states: tuple[PyTree, ...], token: Array, logits: Array
    ) -> tuple[tuple[PyTree, ...], Array]:
      new_states = []
      for state, (_, process_one) in zip(states, started, strict=True):
        state, logits = process_one(state, token, logits)
        new_states.append(state)
      return tuple(new_states), logits

    return tuple(state for state, _ in started), process

  def _processors(self) -> list[LogitProcessor]:
    """Return a processor for each constraint, in the order of application."""
    found: list[LogitProcessor] = []
    if self.no_repeat_ngram_size or self.repetition_penalty != 1:
      found.append(
        functools.partial(_start_repetitions, self.repetition_penalty, self.no_repeat_ngram_size)
      )
    if self.min_decode_len:
      found.append(functools.partial(_start_min_length, self.min_decode_len))
    if isinstance(self.allowed_outputs, str):
      raise checks.invalid(
        '',
        'allowed_outputs',
        'AllowedOutputs, since a decoding function has no vocabulary, or None',
        self.allowed_outputs,
        'Call Constraints.encoded, or set the constraints of the model.',
      )
    if self.allowed_outputs is not None:
      found.append(functools.partial(_start_allowed, self.allowed_outputs))
    return found


def _num_decoded(inputs: ProcessorInputs) -> Array:
  """Return <int32>[rows], number of cached tokens after the prompt and the start token; negative within them."""
  return inputs.num_cached - 1 - jnp.sum(inputs.tokens[:, 1:] != 0, axis=1, dtype=jnp.int32)


def _start_repetitions(
  penalty: float, ngram_size: int, inputs: ProcessorInputs
) -> tuple[_Seen, ProcessFn]:
  """Start the processor of `repetition_penalty` and `no_repeat_ngram_size`, which read the same tokens."""
  missing = inputs.max_length - inputs.tokens.shape[1]
  tokens = jnp.pad(inputs.tokens.astype(jnp.int32), ((0, 0), (0, max(0, missing))))
  tokens = tokens[:, : inputs.max_length]
  is_read = jnp.arange(inputs.max_length) < inputs.num_cached[:, None]

  def process(seen: _Seen, token: Array, logits: Array) -> tuple[_Seen, Array]:
    is_next = jnp.arange(seen.tokens.shape[1]) == seen.num_tokens[:, None]
    seen = _Seen(seen.num_tokens + 1, jnp.where(is_next, token[:, None], seen.tokens))
    if penalty != 1:
      logits = jax.vmap(functools.partial(_penalize, penalty))(logits, seen.tokens)
    if ngram_size:
      repeating = _repeating(seen.tokens, seen.num_tokens, ngram_size)
      logits = jax.vmap(_exclude)(logits, repeating)
    return seen, logits

  return _Seen(inputs.num_cached, jnp.where(is_read, tokens, _NO_TOKEN)), process


def _start_min_length(min_decode_len: int, inputs: ProcessorInputs) -> tuple[Array, ProcessFn]:
  """Start the processor of `min_decode_len`, whose state is the number of decoded tokens, <int32>[rows]."""
  if min_decode_len > inputs.max_decoded:
    raise checks.invalid(
      '',
      'min_decode_len',
      f'at most the number of tokens to decode, {inputs.max_decoded}',
      min_decode_len,
      'Reduce it, or increase the length of targets.',
    )

  def process(num_decoded: Array, token: Array, logits: Array) -> tuple[Array, Array]:
    del token
    num_decoded = num_decoded + 1
    is_too_short = num_decoded + 1 < min_decode_len
    is_end = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(inputs.ends))
    return num_decoded, jnp.where(is_too_short[:, None] & is_end, EXCLUDED_VALUE, logits)

  return _num_decoded(inputs), process


def _start_allowed(allowed: AllowedOutputs, inputs: ProcessorInputs) -> tuple[_Prefix, ProcessFn]:
  """Start the processor of `allowed_outputs`."""
  _check_allowed(allowed, inputs)

  def process(prefix: _Prefix, token: Array, logits: Array) -> tuple[_Prefix, Array]:
    # Prompts are not part of an output.
    is_decoded = prefix.num_decoded >= 0
    node = jnp.where(is_decoded, allowed.advance(prefix.node, token), prefix.node)
    is_allowed = allowed.allowed(node, logits.shape[-1])
    return (
      _Prefix(prefix.num_decoded + 1, node),
      jnp.where(is_allowed, logits, EXCLUDED_VALUE),
    )

  return _Prefix(_num_decoded(inputs), allowed.start(inputs.tokens.shape[0])), process


def _penalize(penalty: float, logits: Array, tokens: Array) -> Array:
  """Return the logits <float32>[vocab] of a row, changed where `tokens` <int32>[n] are."""
  before = jnp.take(logits, tokens, mode='clip')
  after = jnp.where(before < 0, before * penalty, before / penalty)
  # Equal tokens write equal values.
  return logits.at[tokens].set(after, mode='drop')


def _check_allowed(allowed: AllowedOutputs, inputs: ProcessorInputs) -> None:
  """Raise ConfigError if decoding would cut an output."""
  if allowed.max_length > inputs.max_decoded:
    raise checks.invalid(
      '',
      'allowed_outputs',
      f'outputs of at most {inputs.max_decoded} tokens, the number of tokens to decode',
      f'one of {allowed.max_length}, including the end token',
      'Increase the length of targets (task_feature_lengths), or shorten the outputs.',
    )
  early = sorted(allowed.tokens.intersection(inputs.ends))
  if early or allowed.eos_id not in inputs.ends:
    raise checks.invalid(
      '',
      'allowed_outputs',
      f'outputs with one of the end tokens {inputs.ends} at the end, and none before',
      f'outputs with {early} before the end token {allowed.eos_id}',
      'Remove these tokens from stop_token_ids, and do not set another eos_id.',
    )


def _repeating(tokens: Array, num_tokens: Array, size: int) -> Array:
  """Return <int32>[rows, windows], the tokens that would repeat an n-gram, and _NO_TOKEN.

  Args:
    tokens: <int32>[rows, length].
    num_tokens: <int32>[rows], number of columns that are read.
    size: number n of tokens of an n-gram.
  """
  num_windows = max(0, tokens.shape[1] - size + 1)
  # [rows, windows]: n-grams that are complete, and begin with the last n - 1 tokens.
  is_match = jnp.arange(num_windows) + size <= num_tokens[:, None]
  for offset in range(size - 1):
    at = num_tokens - (size - 1) + offset
    last = jnp.take_along_axis(tokens, at[:, None], axis=1, mode='clip')
    is_match &= tokens[:, offset : offset + num_windows] == last
  return jnp.where(is_match, tokens[:, size - 1 :][:, :num_windows], _NO_TOKEN)


def _exclude(logits: Array, tokens: Array) -> Array:
  """Return the logits <float32>[vocab] of a row without `tokens` <int32>[n]."""
  return logits.at[tokens].set(EXCLUDED_VALUE, mode='drop')
