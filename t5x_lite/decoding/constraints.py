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
from t5x_lite.decoding.state import ProcessFn
from t5x_lite.decoding.state import ProcessorInputs
from t5x_lite.types import Array

# Id of columns without a token; larger than all ids, so that scatters skip it.
_NO_TOKEN = np.iinfo(np.int32).max


class _History(NamedTuple):
  """State of each row.

  Attributes:
    num_tokens: <int32>[rows], number of tokens read, including start token and prompt.
    num_prompt: <int32>[rows], number of those in the prompt and the start token.
    tokens: <int32>[rows, max_length], the tokens read, then _NO_TOKEN; None if no constraint reads it.
    node: <int32>[rows], node of the decoded tokens in the trie; None without one.
  """

  num_tokens: Array
  num_prompt: Array
  tokens: Array | None
  node: Array | None


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

  def __call__(self, inputs: ProcessorInputs) -> tuple[_History, ProcessFn]:
    """Return the state of rows before the first step, and the function of a step; see `LogitProcessor`.

    Raises:
      ConfigError: the sequences are too short for a constraint, or the outputs of a file are not `encoded`.
    """
    if self.min_decode_len > inputs.max_decoded:
      raise checks.invalid(
        '',
        'min_decode_len',
        f'at most the number of tokens to decode, {inputs.max_decoded}',
        self.min_decode_len,
        'Reduce it, or increase the length of targets.',
      )
    allowed = self.allowed_outputs
    checks.check(
      '',
      vars(self),
      allowed_outputs=checks.instance(
        AllowedOutputs,
        'AllowedOutputs, since a decoding function has no vocabulary,',
        'Call Constraints.encoded, or set the constraints of the model.',
      ).or_none(),
    )
    if allowed is not None:
      _check_allowed(allowed, inputs)
    num_rows = inputs.tokens.shape[0]
    tokens = None
    if self.no_repeat_ngram_size or self.repetition_penalty != 1:
      missing = inputs.max_length - inputs.tokens.shape[1]
      tokens = jnp.pad(inputs.tokens.astype(jnp.int32), ((0, 0), (0, max(0, missing))))
      tokens = tokens[:, : inputs.max_length]
      is_read = jnp.arange(inputs.max_length) < inputs.num_cached[:, None]
      tokens = jnp.where(is_read, tokens, _NO_TOKEN)
    history = _History(
      num_tokens=inputs.num_cached,
      num_prompt=1 + jnp.sum(inputs.tokens[:, 1:] != 0, axis=1, dtype=jnp.int32),
      tokens=tokens,
      node=None if allowed is None else allowed.start(num_rows),
    )
    return history, functools.partial(self._process, inputs.ends)

  def _process(
    self, ends: tuple[int, ...], history: _History, token: Array, logits: Array
  ) -> tuple[_History, Array]:
    history = self._read(history, token)
    if self.repetition_penalty != 1:
      logits = jax.vmap(self._penalize)(logits, history.tokens)
    if self.no_repeat_ngram_size:
      repeating = _repeating(history.tokens, history.num_tokens, self.no_repeat_ngram_size)
      logits = jax.vmap(_exclude)(logits, repeating)
    if self.min_decode_len:
      num_decoded = history.num_tokens - history.num_prompt
      is_too_short = num_decoded + 1 < self.min_decode_len
      is_end = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(ends))
      logits = jnp.where(is_too_short[:, None] & is_end, EXCLUDED_VALUE, logits)
    if self.allowed_outputs is not None:
      is_allowed = self.allowed_outputs.allowed(history.node, logits.shape[-1])
      logits = jnp.where(is_allowed, logits, EXCLUDED_VALUE)
    return history, logits

  def _read(self, history: _History, token: Array) -> _History:
    """Return the state after the input tokens <int32>[rows] of a step."""
    tokens = history.tokens
    if tokens is not None:
      is_next = jnp.arange(tokens.shape[1]) == history.num_tokens[:, None]
      tokens = jnp.where(is_next, token[:, None], tokens)
    node = history.node
    if self.allowed_outputs is not None:
      # Prompts are not part of an output.
      is_decoded = history.num_tokens >= history.num_prompt
      node = jnp.where(is_decoded, self.allowed_outputs.advance(node, token), node)
    return history._replace(num_tokens=history.num_tokens + 1, tokens=tokens, node=node)

  def _penalize(self, logits: Array, tokens: Array) -> Array:
    """Return the logits <float32>[vocab] of a row, changed where `tokens` <int32>[n] are."""
    before = jnp.take(logits, tokens, mode='clip')
    after = jnp.where(
      before < 0, before * self.repetition_penalty, before / self.repetition_penalty
    )
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
