"""T5's span corruption in NumPy: the pretraining objective of the source without TensorFlow.

Documents are joined in groups, cut into segments of equal length, and of each segment 15 % of the tokens, in spans of
three on average, are replaced by one sentinel each in the inputs; the targets are the spans behind their sentinels
(Raffel et al., "Exploring the limits of transfer learning", 2020, section 3.1.4). Given the same seeds, `corrupt`
gives what `t5.data.preprocessors.span_corruption` gives inside a seqio Task, token for token.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from t5x_lite.data import philox
from t5x_lite.errors import ConfigError


def random_spans_lengths(inputs_length: int, noise_density: float, mean_noise_span_length: float) -> tuple[int, int]:
  """Returns (length of a raw segment, length of its targets) that fill `inputs_length` without padding.

  Both results count the sentinels and one end-of-sequence id per sequence.

  Args:
    inputs_length: length of the encoder's input, end-of-sequence id included.
    noise_density: fraction of tokens that go to the targets.
    mean_noise_span_length: tokens per replaced span, on average.

  >>> random_spans_lengths(512, 0.15, 3.0)
  (568, 114)
  """

  def corrupted_lengths(tokens_length: int) -> tuple[int, int]:
    num_noise_tokens = int(round(tokens_length * noise_density))
    num_noise_spans = int(round(num_noise_tokens / mean_noise_span_length))
    return (tokens_length - num_noise_tokens + num_noise_spans + 1, num_noise_tokens + num_noise_spans + 1)

  tokens_length = inputs_length - 1
  while corrupted_lengths(tokens_length + 1)[0] <= inputs_length:
    tokens_length += 1
  targets_length = corrupted_lengths(tokens_length)[1]
  # T5 keeps targets no longer than inputs when half of the tokens are noise.
  if noise_density == 0.5 and targets_length > inputs_length:
    return tokens_length - 1, targets_length - 1
  return tokens_length, targets_length


def segment(documents: Sequence[Sequence[int]], length: int, documents_per_group: int = 128) -> list[np.ndarray]:
  """Joins each group of documents and cuts it into segments of `length` tokens; a group's last one may be shorter.

  Args:
    documents: token ids per document.
    length: tokens per segment.
    documents_per_group: how many documents are joined.

  Returns:
    int32[<= length] segments, none empty.
  """
  segments = []
  for start in range(0, len(documents), documents_per_group):
    tokens = np.concatenate([np.asarray(d, np.int32) for d in documents[start:start + documents_per_group]])
    segments.extend(tokens[first:first + length] for first in range(0, len(tokens), length))
  return segments


def random_segmentation(num_items: int, num_segments: int, seeds: np.ndarray) -> np.ndarray:
  """Splits `num_items` items into `num_segments` non-empty runs, every split equally likely.

  Args:
    num_items: how many items, at least 1.
    num_segments: how many runs, in [1, num_items].
    seeds: uint64[batch, 2].

  Returns:
    int64[batch, num_segments] run lengths, each row adding up to `num_items`.
  """
  starts = np.arange(num_items - 1) < num_segments - 1
  order = np.argsort(philox.uniform(seeds, num_items - 1), axis=-1, kind='stable')
  batch = len(seeds)
  first_in_run = np.concatenate([np.zeros((batch, 1), bool), starts[order]], axis=-1)
  run = np.cumsum(first_in_run, axis=-1)
  return (run[..., None] == np.arange(num_segments)).sum(axis=1)


def random_spans_noise_mask(length: int, noise_density: float, mean_noise_span_length: float,
                            seeds: np.ndarray) -> np.ndarray:
  """Returns masks of random spans, which alternate between kept and noise and begin with kept.

  The numbers of noise tokens and spans depend on `length` alone; where the spans fall is random.

  Args:
    length: tokens per segment.
    noise_density: fraction of noise tokens.
    mean_noise_span_length: tokens per noise span, on average.
    seeds: uint64[batch, 2, 2], one seed for the noise spans and one for the kept ones.

  Returns:
    bool[batch, length], true where a token is noise.
  """
  # At least one token of each kind, in single precision as T5 computes it.
  padded_length = max(length, 2)
  num_noise = int(np.round(np.float32(padded_length) * np.float32(noise_density)))
  num_noise = min(max(num_noise, 1), padded_length - 1)
  num_spans = max(int(np.round(np.float32(num_noise) / np.float32(mean_noise_span_length))), 1)
  noise_lengths = random_segmentation(num_noise, num_spans, seeds[:, 0])
  kept_lengths = random_segmentation(padded_length - num_noise, num_spans, seeds[:, 1])
  ends = np.cumsum(np.stack([kept_lengths, noise_lengths], axis=-1).reshape(len(seeds), 2 * num_spans), axis=-1)
  spans_before = (ends[:, :-1, None] <= np.arange(padded_length)).sum(axis=1)
  return (spans_before % 2 == 1)[:, :length]


def spans_to_sentinels(tokens: np.ndarray, mask: np.ndarray, first_sentinel: int) -> np.ndarray:
  """Replaces each run of masked tokens by one sentinel: `first_sentinel`, then one less for each further run.

  Args:
    tokens: int32[length].
    mask: bool[length].
    first_sentinel: the id of the first run.

  Returns:
    int32[<= length].
  """
  previous = np.concatenate([[False], mask[:-1]])
  first = mask & ~previous
  sentinels = first_sentinel + 1 - np.cumsum(first)
  return np.where(first, sentinels, tokens)[~(mask & previous)].astype(np.int32)


def corrupt(segments: Sequence[np.ndarray], seeds: np.ndarray, *, first_sentinel: int, noise_density: float,
            mean_noise_span_length: float) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns (inputs, targets), without end-of-sequence ids, of each segment.

  Args:
    segments: int32[length_i] token ids, none empty.
    seeds: uint64[len(segments), 2]; a segment's masks depend on its own seed alone.
    first_sentinel: id of the first sentinel, T5's `sentinel_id`.
    noise_density: fraction of tokens that go to the targets.
    mean_noise_span_length: tokens per replaced span, on average.
  """
  # Of the six seeds that T5 splits off, the first two make the mask; the sentinels need none.
  mask_seeds = philox.split(seeds, 6)[:, :2]
  lengths = np.array([len(tokens) for tokens in segments])
  results: list[tuple[np.ndarray, np.ndarray]] = [None] * len(segments)  # type: ignore[list-item]
  for length in np.unique(lengths):
    rows = np.flatnonzero(lengths == length)
    masks = random_spans_noise_mask(int(length), noise_density, mean_noise_span_length, mask_seeds[rows])
    for row, mask in zip(rows, masks, strict=True):
      tokens = segments[row]
      results[row] = (spans_to_sentinels(tokens, mask, first_sentinel),
                      spans_to_sentinels(tokens, ~mask, first_sentinel))
  return results


def check_feature_lengths(lengths: Mapping[str, int]) -> None:
  """Refuses lengths of one feature only, as a plain language model of targets has.

  Raises:
    ConfigError: naming the feature that is missing.
  """
  for feature in ('inputs', 'targets'):
    if feature not in lengths:
      raise ConfigError(f'task_feature_lengths has no length for {feature!r}, got {dict(lengths)}: span corruption '
                        'makes inputs and targets of a text. Give lengths for both.')


def check_lengths(lengths: dict[str, int], noise_density: float, mean_noise_span_length: float) -> int:
  """Returns the segment length for `lengths`; refuses a targets length that would cut the spans off.

  Raises:
    ConfigError: naming the targets length that these inputs need, or the length that is missing.
  """
  check_feature_lengths(lengths)
  if lengths['inputs'] < 4:
    raise ConfigError(f"task_feature_lengths['inputs'] is {lengths['inputs']}, expected at least 4 for span "
                      'corruption.')
  tokens_length, needed = random_spans_lengths(lengths['inputs'], noise_density, mean_noise_span_length)
  if lengths['targets'] < needed:
    raise ConfigError(
        f"task_feature_lengths['targets'] is {lengths['targets']}, expected at least {needed}: span corruption of "
        f"{lengths['inputs']} input ids makes {needed} target ids. Raise 'targets' or lower 'inputs'.")
  return tokens_length
