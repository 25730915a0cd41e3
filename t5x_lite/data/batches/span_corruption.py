"""T5's span corruption in NumPy, the pretraining objective of sources without TensorFlow.

Documents are joined in groups and divided into segments of equal length. In the inputs, spans of three tokens on
average, 15 % of each segment, are replaced by one sentinel each; the targets are the sentinels with their spans (Raffel
et al., "Exploring the limits of transfer learning", 2020, section 3.1.4). With equal seeds, `corrupt` gives the same
tokens as `t5.data.preprocessors.span_corruption` in a seqio Task.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches import features
from t5x_lite.data.batches import philox
from t5x_lite.data.text import ids as text_ids
from t5x_lite.errors import ConfigError


def random_spans_lengths(
  inputs_length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int]:
  """Return (length of a raw segment, length of its targets) that fill `inputs_length` without padding.

  The lengths of inputs and targets include the sentinels and one end-of-sequence id.

  Args:
    inputs_length: length of the encoder's input, with the end-of-sequence id.
    noise_density: fraction of tokens that are moved to the targets.
    mean_noise_span_length: mean number of tokens per replaced span.

  >>> random_spans_lengths(512, 0.15, 3.0)
  (568, 114)
  """

  def corrupted_lengths(tokens_length: int) -> tuple[int, int]:
    num_noise_tokens = int(round(tokens_length * noise_density))
    num_noise_spans = int(round(num_noise_tokens / mean_noise_span_length))
    return (
      tokens_length - num_noise_tokens + num_noise_spans + 1,
      num_noise_tokens + num_noise_spans + 1,
    )

  tokens_length = inputs_length - 1
  while corrupted_lengths(tokens_length + 1)[0] <= inputs_length:
    tokens_length += 1
  targets_length = corrupted_lengths(tokens_length)[1]
  # As in T5, targets are not longer than inputs if half of the tokens are noise.
  if noise_density == 0.5 and targets_length > inputs_length:
    return tokens_length - 1, targets_length - 1
  return tokens_length, targets_length


def segment(
  documents: Sequence[Sequence[int]], length: int, documents_per_group: int = 128
) -> list[np.ndarray]:
  """Join each group of documents and divide it into segments of `length` tokens; the last of a group may be shorter.

  Args:
    documents: token ids of each document.
    length: tokens per segment.
    documents_per_group: number of documents that are joined.

  Returns:
    Non-empty segments, int32[<= length].
  """
  segments = []
  for start in range(0, len(documents), documents_per_group):
    tokens = np.concatenate(
      [np.asarray(d, np.int32) for d in documents[start : start + documents_per_group]]
    )
    segments.extend(tokens[first : first + length] for first in range(0, len(tokens), length))
  return segments


def random_segmentation(num_items: int, num_segments: int, seeds: np.ndarray) -> np.ndarray:
  """Divide `num_items` items into `num_segments` non-empty runs, all divisions equally likely.

  Args:
    num_items: number of items, at least 1.
    num_segments: number of runs, in [1, num_items].
    seeds: uint64[batch, 2].

  Returns:
    Lengths of the runs, int64[batch, num_segments]; each row sums to `num_items`.
  """
  starts = np.arange(num_items - 1) < num_segments - 1
  order = np.argsort(philox.uniform(seeds, num_items - 1), axis=-1, kind='stable')
  batch = len(seeds)
  first_in_run = np.concatenate([np.zeros((batch, 1), bool), starts[order]], axis=-1)
  run = np.cumsum(first_in_run, axis=-1)
  return (run[..., None] == np.arange(num_segments)).sum(axis=1)


def count_spans(
  length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int]:
  """Return (number of noise tokens, number of noise spans) of a segment of `length` tokens.

  Each span has a sentinel in the inputs, and each kept span one in the targets; their numbers are equal.

  >>> count_spans(568, 0.15, 3.0)
  (85, 28)
  """
  # At least one token of each kind, computed in single precision as in T5.
  padded_length = max(length, 2)
  num_noise = int(np.round(np.float32(padded_length) * np.float32(noise_density)))
  num_noise = min(max(num_noise, 1), padded_length - 1)
  num_spans = max(int(np.round(np.float32(num_noise) / np.float32(mean_noise_span_length))), 1)
  return num_noise, num_spans


def random_spans_noise_mask(
  length: int, noise_density: float, mean_noise_span_length: float, seeds: np.ndarray
) -> np.ndarray:
  """Return masks of random spans, alternately kept and noise, beginning with a kept span.

  The numbers of noise tokens and spans depend only on `length`; the positions of the spans are random.

  Args:
    length: tokens per segment.
    noise_density: fraction of noise tokens.
    mean_noise_span_length: mean number of tokens per noise span.
    seeds: uint64[batch, 2, 2], one seed for the noise spans and one for the kept spans.

  Returns:
    bool[batch, length], True for noise tokens.
  """
  padded_length = max(length, 2)
  num_noise, num_spans = count_spans(length, noise_density, mean_noise_span_length)
  noise_lengths = random_segmentation(num_noise, num_spans, seeds[:, 0])
  kept_lengths = random_segmentation(padded_length - num_noise, num_spans, seeds[:, 1])
  ends = np.cumsum(
    np.stack([kept_lengths, noise_lengths], axis=-1).reshape(len(seeds), 2 * num_spans), axis=-1
  )
  spans_before = (ends[:, :-1, None] <= np.arange(padded_length)).sum(axis=1)
  return (spans_before % 2 == 1)[:, :length]


def spans_to_sentinels(tokens: np.ndarray, mask: np.ndarray, first_sentinel: int) -> np.ndarray:
  """Replace each run of masked tokens by one sentinel, with descending ids from `first_sentinel`.

  Args:
    tokens: int32[length].
    mask: bool[length].
    first_sentinel: id for the first run.

  Returns:
    int32[<= length].
  """
  previous = np.concatenate([[False], mask[:-1]])
  first = mask & ~previous
  sentinels = first_sentinel + 1 - np.cumsum(first)
  return np.where(first, sentinels, tokens)[~(mask & previous)].astype(np.int32)


def corrupt(
  segments: Sequence[np.ndarray],
  seeds: np.ndarray,
  *,
  first_sentinel: int,
  noise_density: float,
  mean_noise_span_length: float,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Return (inputs, targets) of each segment, without end-of-sequence ids.

  Args:
    segments: non-empty token ids, int32[length_i].
    seeds: uint64[len(segments), 2]; the mask of a segment depends only on its seed.
    first_sentinel: id of the first sentinel, T5's `sentinel_id`.
    noise_density: fraction of tokens that are moved to the targets.
    mean_noise_span_length: mean number of tokens per replaced span.

  Returns:
    For each segment, int32[inputs length] and int32[targets length].
  """
  # T5 splits off six seeds; the first two are for the mask.
  mask_seeds = philox.split(seeds, 6)[:, :2]
  lengths = np.array([len(tokens) for tokens in segments])
  results: dict[int, tuple[np.ndarray, np.ndarray]] = {}
  for length in np.unique(lengths):
    rows = np.flatnonzero(lengths == length)
    masks = random_spans_noise_mask(
      int(length), noise_density, mean_noise_span_length, mask_seeds[rows]
    )
    for row, mask in zip(rows.tolist(), masks, strict=True):
      tokens = segments[row]
      results[row] = (
        spans_to_sentinels(tokens, mask, first_sentinel),
        spans_to_sentinels(tokens, ~mask, first_sentinel),
      )
  return [results[row] for row in range(len(segments))]


def check_sentinels(
  vocabulary: Any, length: int, noise_density: float, mean_noise_span_length: float
) -> None:
  """Raise if a segment has more spans than its vocabulary has sentinels.

  Further spans would be marked by ids of ordinary text.

  Args:
    vocabulary: vocabulary of the targets; a vocabulary of ids may have any sentinels.
    length: number of tokens of the segment.
    noise_density: fraction of tokens that are moved to the targets.
    mean_noise_span_length: mean number of tokens per replaced span.

  Raises:
    ConfigError: the message has the longest lengths for the sentinels.
  """
  number = text_ids.num_sentinels(vocabulary)
  _, needed = count_spans(length, noise_density, mean_noise_span_length)
  if number is None or needed <= number:
    return
  remedy = f'use a vocabulary with at least {needed} extra_ids in the task and the model'
  longest = _longest_lengths(length, number, noise_density, mean_noise_span_length)
  if longest is not None:
    remedy = f'set TASK_FEATURE_LENGTHS to {longest} or shorter, or {remedy}'
  raise ConfigError(
    f'Span corruption of a segment of {length} ids must have a sentinel for each of its {needed} spans, got '
    f'{vocabulary!r} with {number} sentinels. {remedy[0].upper()}{remedy[1:]}.'
  )


def _longest_lengths(
  length: int, number: int, noise_density: float, mean_noise_span_length: float
) -> dict[str, int] | None:
  """Return the longest feature lengths whose segments have at most `number` spans, or None.

  Args:
    length: number of tokens of a segment with more spans.
    number: number of sentinels.
    noise_density: see `check_sentinels`.
    mean_noise_span_length: see `check_sentinels`.
  """
  for inputs in range(length, 3, -1):
    tokens, targets = random_spans_lengths(inputs, noise_density, mean_noise_span_length)
    if count_spans(tokens, noise_density, mean_noise_span_length)[1] <= number:
      return {'inputs': inputs, 'targets': targets}
  return None


def check_feature_lengths(lengths: Mapping[str, int]) -> None:
  """Raise if the length of inputs or targets is missing, as for a language model of targets.

  Raises:
    ConfigError: the message has the missing feature.
  """
  both = ('inputs', 'targets')
  features.check_lengths(lengths, both, 'span corruption', both, tuple(lengths))


def check_lengths(
  lengths: dict[str, int], noise_density: float, mean_noise_span_length: float
) -> int:
  """Return the segment length for `lengths`, whose targets must be long enough for all spans.

  Raises:
    ConfigError: a length is missing or too small; the message has the required length.
  """
  if features.UNKNOWN_LENGTH in lengths.values():
    raise checks.invalid(
      'DatasetConfig',
      'task_feature_lengths',
      "a mapping such as {'inputs': 512, 'targets': 114} for span corruption",
      None,
      'It makes examples of these lengths. Set TASK_FEATURE_LENGTHS.',
    )
  check_feature_lengths(lengths)
  tokens_length, needed = random_spans_lengths(
    max(lengths['inputs'], 4), noise_density, mean_noise_span_length
  )
  checks.check(
    'task_feature_lengths',
    lengths,
    inputs=checks.number(at_least=4, remedy='Span corruption needs 4 ids.'),
    targets=checks.number(
      at_least=needed,
      remedy=(
        f"Span corruption of {lengths['inputs']} input ids makes {needed} target ids: raise 'targets' or lower "
        "'inputs'."
      ),
    ),
  )
  return tokens_length
