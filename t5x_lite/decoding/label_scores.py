"""Scores of given texts, the labels of a classification, instead of decoding any text.

This is rank classification as in Raffel et al. 2020 (T5) and Sanh et al. 2022 (T0): the prediction is the label that
the model gives the largest log-likelihood.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.decoding import cache as cache_lib
from t5x_lite.decoding import options
from t5x_lite.decoding.allowed_outputs import encode_lines
from t5x_lite.decoding.allowed_outputs import read_lines
from t5x_lite.decoding.state import DecodingState
from t5x_lite.decoding.state import TokensIdsToLogitsCallable
from t5x_lite.decoding.state import declare
from t5x_lite.errors import ConfigError
from t5x_lite.types import Array

# Largest size, on a device, of the logits and the copies of the cache for the labels that are scored at once.
_MAX_BYTES = 2**28


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelScores:
  """Decoding algorithm that scores given labels and predicts the best, for `decode_fn` of a model or a command.

  The model encodes the labels by the vocabulary of its targets; see `EncodedLabels`.

  Attributes:
    labels: path of a file of UTF-8 text with one label a line, or a list of labels.
    normalize_by_target_length: divide each log-likelihood by the number of tokens of its label, the end token included,
      as the option of T5's rank classification with this name.

  Raises:
    ConfigError: the file is missing, empty or not UTF-8, a label is blank, or two are equal.
  """

  labels: str | Sequence[str]
  normalize_by_target_length: bool = False

  def __post_init__(self) -> None:
    checks.check(
      'LabelScores',
      vars(self),
      normalize_by_target_length=checks.instance(bool, 'True or False'),
      labels=checks.Expectation(
        'the path of a file with one label a line, or a list of labels',
        lambda labels: (
          isinstance(labels, str)
          or (
            isinstance(labels, (list, tuple))
            and len(labels) > 0
            and all(isinstance(text, str) for text in labels)
          )
        ),
      ),
    )
    first: dict[str, int] = {}
    for number, text in enumerate(self.texts, start=1):
      if not text.strip():
        raise self._invalid(number, 'is blank. Remove it')
      if first.setdefault(text, number) != number:
        raise self._invalid(number, f'repeats line {first[text]}. Remove one of them')

  @functools.cached_property
  def texts(self) -> tuple[str, ...]:
    """The labels."""
    if isinstance(self.labels, str):
      return tuple(read_lines('labels', self.labels, 'label'))
    return tuple(self.labels)

  @property
  def identity(self) -> dict[str, Any]:
    """Everything that the scores depend on except the model, as JSON values, with a hash of the labels."""
    content = hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:16]
    return {
      'label_scores': {
        'labels.content': content,
        'normalize_by_target_length': self.normalize_by_target_length,
      }
    }

  def encoded(self, vocabulary: Any) -> 'EncodedLabels':
    """Return the decoding function for a vocabulary of targets.

    Raises:
      ConfigError: the vocabulary cannot encode a label, or encodes two as the same tokens.
    """
    checks.check(
      'LabelScores',
      {'eos_id': vocabulary.eos_id},
      eos_id=checks.number(
        at_least=1, integer=True, remedy='Use a vocabulary with an end-of-sequence id.'
      ),
    )
    tokens = encode_lines('labels', self.texts, self._source, vocabulary)
    first: dict[tuple[int, ...], int] = {}
    for number, ids in enumerate(tokens, start=1):
      if first.setdefault(tuple(ids), number) != number:
        other = first[tuple(ids)]
        raise self._invalid(
          number,
          f'has the tokens of line {other}, {self.texts[other - 1]!r}. Remove one of them',
        )
    return EncodedLabels(self, tokens, vocabulary.eos_id)

  @property
  def _source(self) -> str:
    if isinstance(self.labels, str):
      return f'of {self.labels}'
    return 'of the list'

  def _invalid(self, number: int, problem: str) -> ConfigError:
    return ConfigError(
      f'`labels` must be different texts, but line {number} {self._source}, {self.texts[number - 1]!r}, {problem}.'
    )


@declare(max_num_decodes=1, options=('stop_token_ids',))
class EncodedLabels:
  """Decoding function that scores the labels of `LabelScores`, encoded for a model.

  The start token, or the last token of a prompt, is read once for each input, and its logits have the scores of all
  first tokens. Then the labels are read in chunks, each in a copy of the input's cache, one token of all labels of a
  chunk in a step. Rows of a step are [batch * chunk], so that the encoder's keys and values, which a network caches
  for each input, are not repeated for a label. A chunk has as many labels as fit into a fixed size of logits and
  caches. Labels are sorted by length, so that a chunk takes no more steps than its labels need.

  Attributes:
    config: the labels and options.
    tokens: <int32>[labels, max_length], the token ids of each label with the end token, then 0.
    lengths: <int>[labels], number of these tokens.
    eos_id: the end token.
  """

  def __init__(self, config: LabelScores, tokens: Sequence[Sequence[int]], eos_id: int):
    self.config = config
    self.eos_id = eos_id
    self.lengths = np.asarray([len(ids) + 1 for ids in tokens])
    self.tokens = np.zeros((len(tokens), self.max_length), np.int32)
    for row, ids in zip(self.tokens, tokens, strict=True):
      row[: len(ids) + 1] = [*ids, eos_id]

  def __repr__(self) -> str:
    return f'LabelScores({len(self.lengths)} labels)'

  @property
  def identity(self) -> dict[str, Any]:
    """See `LabelScores.identity`."""
    return self.config.identity

  @property
  def max_length(self) -> int:
    """Number of tokens of the longest label, including the end token."""
    return int(self.lengths.max())

  def by_label(self, scores: Sequence[Any]) -> Any:
    """Return nested lists of scores, whose last dim is the labels, as lists of mappings from label to score."""
    if scores and not isinstance(scores[0], list):
      return dict(zip(self.config.texts, scores, strict=True))
    return [self.by_label(each) for each in scores]

  def check_length(self, length: int) -> None:
    """Raise ConfigError if a label has more than `length` tokens, the length of targets."""
    if self.max_length > length:
      longest = self.config.texts[int(np.argmax(self.lengths))]
      raise ConfigError(
        f'`labels` must have at most {length} tokens, the length of targets, got {longest!r} of {self.max_length} '
        'tokens, including the end token. Increase the length of targets (task_feature_lengths), or shorten the label.'
      )

  def __call__(
    self,
    inputs: Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensIdsToLogitsCallable,
    eos_id: int,
    num_decodes: int = 1,
    decode_rng: Array | None = None,
    cache_offset: int = 0,
    *,
    initial_index: Array | None = None,
    stop_token_ids: Sequence[int] = (),
  ) -> tuple[Array, Array]:
    """Score the labels as continuations of each row; see `DecodeFnCallable`.

    Args:
      inputs: <int32>[batch, length] with at least `max_length` positions after each prompt.
      cache: the network's `cache` collection.
      tokens_to_logits: step of the network; it gets no decoded `sequences`, only the current tokens.
      eos_id: must be the end token of the labels.
      num_decodes: must be 1.
      decode_rng: part of the decoding interface, without effect.
      cache_offset: number of dims before the batch dim in cache leaves.
      initial_index: <int32>[batch], number of tokens of each row in the cache; None: none.
      stop_token_ids: without effect, since the labels end with the end token.

    Returns:
      (<int32>[batch, 1, length] prompts with the best label, <float32>[batch, 1, labels] scores in the order of the
      labels). Of equally good labels the first is the best.

    Raises:
      ConfigError: `eos_id` or `num_decodes` differ, or another option is out of range.
    """
    del decode_rng, stop_token_ids
    options.check_inputs('LabelScores', inputs)
    checks.check(
      'LabelScores',
      locals(),
      num_decodes=checks.one_of((1,)),
      eos_id=checks.one_of((self.eos_id,), 'Labels end with the end token of the vocabulary.'),
      initial_index=options.initial_index(inputs),
    )
    index = jnp.zeros((inputs.shape[0],), jnp.int32)
    if initial_index is not None:
      index = jnp.asarray(initial_index, jnp.int32)

    def step(token: Array, at: Array, cache: Mapping[str, Any]) -> tuple[Array, Mapping[str, Any]]:
      sequences = jnp.zeros((token.shape[0], inputs.shape[1]), jnp.int32)
      logits, new_cache = tokens_to_logits(DecodingState(at, sequences, token, cache))
      return logits.astype(jnp.float32), cache_lib.like_cache(new_cache, cache)

    start = jnp.take_along_axis(inputs.astype(jnp.int32), index[:, None], axis=1)
    logits, cache = step(start, index, cache)

    def copy_cache(copies: int) -> Mapping[str, Any]:
      return cache_lib.cache_map(
        lambda x: cache_lib.flat_batch_beam_expand(x, copies, cache_offset),
        cache,
        apply_to_index=initial_index is not None,
      )

    # [batch, labels]
    scores = _log_probs(logits, jnp.asarray(self.tokens[:, 0])[None])
    scores += self._scores_after_first(step, copy_cache, index, _num_at_once(logits, cache))
    if self.config.normalize_by_target_length:
      scores = scores / jnp.asarray(self.lengths, jnp.float32)
    best = jnp.asarray(self.tokens)[jnp.argmax(scores, axis=1)]
    return _place(inputs, index, best)[:, None], scores[:, None]

  def _scores_after_first(
    self,
    step: Callable[..., tuple[Array, Mapping[str, Any]]],
    copy_cache: Callable[[int], Mapping[str, Any]],
    index: Array,
    num_at_once: int,
  ) -> Array:
    """Return <float32>[batch, labels], the log-likelihoods of the tokens after the first.

    Args:
      step: function of (tokens [rows, 1], their positions [rows], cache) that returns (logits [rows, vocab], cache).
      copy_cache: returns the cache for a number of labels for each input.
      index: <int32>[batch], position of the last token of each prompt.
      num_at_once: number of labels of a chunk.
    """
    num_labels = len(self.lengths)
    num_chunks = -(-num_labels // num_at_once)
    size = -(-num_labels // num_chunks)
    order = np.argsort(self.lengths, kind='stable')
    # The last chunk repeats the longest label.
    padded = np.pad(order, (0, num_chunks * size - num_labels), mode='edge').reshape(-1, size)
    batch_size = index.shape[0]
    positions = cache_lib.flat_batch_beam_expand(index, size)

    def score(chunk: tuple[Array, Array]) -> Array:
      tokens, length = chunk
      # [batch * chunk, max_length]: the labels of an input are adjacent.
      rows = jnp.broadcast_to(tokens, (batch_size, *tokens.shape))
      rows = cache_lib.flatten_beam_dim(rows)

      def add_token(i: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        total, cache = state
        token = jax.lax.dynamic_slice_in_dim(rows, i - 1, 1, axis=1)
        target = jax.lax.dynamic_slice_in_dim(rows, i, 1, axis=1)
        logits, cache = step(token, positions + i, cache)
        log_prob = jnp.where(target > 0, _log_probs(logits, target), 0.0)
        return total + log_prob[:, 0], cache

      start = (jnp.zeros((rows.shape[0],), jnp.float32), copy_cache(size))
      total, _ = jax.lax.fori_loop(1, length, add_token, start)
      return cache_lib.unflatten_beam_dim(total, batch_size, size)

    # [chunks, batch, chunk]
    found = jax.lax.map(
      score, (jnp.asarray(self.tokens[padded]), jnp.asarray(self.lengths[padded].max(axis=1)))
    )
    found = jnp.moveaxis(found, 0, 1).reshape(batch_size, -1)
    return found[:, np.argsort(order)]


def _num_at_once(logits: Array, cache: Mapping[str, Any]) -> int:
  """Return the number of labels of a chunk.

  Args:
    logits: <float32>[batch, vocab] of one label for each input.
    cache: cache of one label for each input.
  """
  if jax.export.is_symbolic_dim(logits.shape[0]):
    return 1  # The sizes of an exported program for any batch size are unknown.
  num_bytes = sum(leaf.nbytes for leaf in [logits, *jax.tree.leaves(cache)])
  mesh = jax.sharding.get_abstract_mesh()
  # Rows are divided over the data axes, and the vocabulary and the heads over the others.
  return max(1, _MAX_BYTES * max(1, mesh.size) // num_bytes)


def _log_probs(logits: Array, tokens: Array) -> Array:
  """Return <float32>[rows, n], the log-probabilities of `tokens` <int32>[rows or 1, n] by `logits` [rows, vocab]."""
  tokens = jnp.broadcast_to(tokens, (logits.shape[0], tokens.shape[1]))
  chosen = jnp.take_along_axis(logits, tokens, axis=1)
  return chosen - jax.nn.logsumexp(logits, axis=1, keepdims=True)


def _place(inputs: Array, index: Array, tokens: Array) -> Array:
  """Return <int32>[batch, length], the prompts of `inputs` without their start tokens, followed by `tokens`.

  Args:
    inputs: <int32>[batch, length].
    index: <int32>[batch], position of the last token of each prompt.
    tokens: <int32>[batch, n], n at most the number of positions from `index` on.
  """
  # [batch, length], position in `tokens`; negative in the prompt.
  at = jnp.arange(inputs.shape[1]) - index[:, None]
  prompt = jnp.roll(inputs, -1, axis=1)
  padded = jnp.pad(tokens, ((0, 0), (0, 1)))  # 0 after the label
  found = jnp.take_along_axis(padded, jnp.clip(at, 0, tokens.shape[1]), axis=1)
  return jnp.where(at < 0, prompt, found).astype(jnp.int32)


def labels_of(decode_fn: Any) -> EncodedLabels | None:
  """Return the `EncodedLabels` that a decoding function is, or has inside its partials; None for all others."""
  while isinstance(decode_fn, functools.partial):
    decode_fn = decode_fn.func
  if isinstance(decode_fn, EncodedLabels):
    return decode_fn
  return None


def encoded(decode_fn: Any, vocabulary: Any) -> Any:
  """Return the decoding function that a model calls for its option `decode_fn`.

  Args:
    decode_fn: a decoding function or `LabelScores`.
    vocabulary: vocabulary of the model's targets.

  Raises:
    ConfigError: see `LabelScores.encoded`.
  """
  if isinstance(decode_fn, LabelScores):
    return decode_fn.encoded(vocabulary)
  return decode_fn
