"""Span corruption against its definition."""

import ast
import collections
import re

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import builtin_tasks
from t5x_lite.data.batches import philox
from t5x_lite.data.batches import span_corruption
from t5x_lite.errors import ConfigError

# --- Span corruption ---------------------------------------------------------------------


@pytest.mark.parametrize(
  'inputs_length, density, mean_length',
  [(512, 0.15, 3.0), (64, 0.15, 3.0), (100, 0.5, 10.0), (7, 0.15, 3.0), (256, 0.3, 1.5)],
)
def test_lengths_fill_the_inputs(inputs_length, density, mean_length):
  tokens, targets = span_corruption.random_spans_lengths(inputs_length, density, mean_length)

  def lengths(num_tokens):
    noise = round(num_tokens * density)
    spans = round(noise / mean_length)
    return num_tokens - noise + spans + 1, noise + spans + 1

  assert lengths(tokens)[0] <= inputs_length < lengths(tokens + 1)[0] or density == 0.5
  assert targets == lengths(tokens)[1] or density == 0.5


@pytest.mark.parametrize(
  'length, noise', [(1, None), (2, 1), (3, 1), (5, 1), (20, 3), (73, 11), (200, 30), (190, 29)]
)  # 28.5 in double precision, which is rounded to 28
def test_noise_masks(length, noise):
  """The numbers of noise tokens and spans are fixed, every mask begins with a kept token, and masks differ."""
  seeds = philox.split(philox.as_seeds(np.arange(300), 5), 2)
  masks = span_corruption.random_spans_noise_mask(length, 0.15, 3.0, seeds)
  assert masks.shape == (300, length) and not masks[:, 0].any()
  if length > 1:
    spans = max(round(noise / 3.0), 1)
    assert (masks.sum(axis=1) == noise).all()
    assert ((masks & ~np.pad(masks, ((0, 0), (1, 0)))[:, :-1]).sum(axis=1) == spans).all()
  if length >= 73:
    assert len(np.unique(masks, axis=0)) > 250


def test_segmentations_are_equally_likely():
  """Two spans of noise in five tokens can be cut in four ways."""
  seeds = philox.as_seeds(np.arange(8000), 1)
  lengths = span_corruption.random_segmentation(5, 2, seeds)
  assert (lengths.sum(axis=1) == 5).all() and lengths.min() == 1
  counts = collections.Counter(lengths[:, 0].tolist())
  assert set(counts) == {1, 2, 3, 4} and max(abs(count - 2000) for count in counts.values()) < 200


def test_inputs_and_targets_restore_the_text():
  rng = np.random.default_rng(0)
  segments = [rng.integers(3, 259, length).astype(np.int32) for length in [73] * 5 + [20, 9, 1]]
  pairs = span_corruption.corrupt(
    segments,
    philox.as_seeds(np.arange(8), 9),
    first_sentinel=383,
    noise_density=0.15,
    mean_noise_span_length=3.0,
  )
  for segment, (inputs, targets) in zip(segments, pairs, strict=True):
    spans, kept = {}, []
    for token in targets:
      if token > 258:
        assert token == 383 - len(spans)
        spans[token] = current = []
      else:
        current.append(token)
    for token in inputs:
      kept.extend(spans.pop(token) if token in spans else [token])
    np.testing.assert_array_equal(kept, segment)
  alone = span_corruption.corrupt(
    segments[5:6],
    philox.as_seeds(np.array([5]), 9),
    first_sentinel=383,
    noise_density=0.15,
    mean_noise_span_length=3.0,
  )
  np.testing.assert_array_equal(alone[0][0], pairs[5][0])


def test_segments():
  segments = span_corruption.segment([[5] * 10, [6] * 5, [7] * 4], 6, documents_per_group=2)
  assert [s.tolist() for s in segments] == [[5] * 6, [5] * 4 + [6] * 2, [6] * 3, [7] * 4]


def test_too_short_targets_are_rejected():
  assert span_corruption.check_lengths({'inputs': 512, 'targets': 114}, 0.15, 3.0) == 568
  with pytest.raises(ConfigError, match='targets` must be a number >= 114, got 113'):
    span_corruption.check_lengths({'inputs': 512, 'targets': 113}, 0.15, 3.0)


@pytest.mark.parametrize(
  'vocabulary, length, needed',
  [
    (data.ByteVocabulary(125), 2500, None),
    (data.ByteVocabulary(125), 4550, 227),
    (data.ByteVocabulary(27), 568, 28),
    (data.ByteVocabulary(28), 568, None),
    (data.ByteVocabulary(0), 5, 1),
    (data.PassThroughVocabulary(300, eos_id=1), 4550, None),  # its ids may be sentinels
  ],
)
def test_each_span_has_a_sentinel(vocabulary, length, needed):
  if needed is None:
    span_corruption.check_sentinels(vocabulary, length, 0.15, 3.0)
    return
  with pytest.raises(
    ConfigError, match=f'each of its {needed} spans, got .*{vocabulary.extra_ids} sentinels'
  ) as error:
    span_corruption.check_sentinels(vocabulary, length, 0.15, 3.0)
  # Both remedies work.
  span_corruption.check_sentinels(data.ByteVocabulary(needed), length, 0.15, 3.0)
  shorter = re.search(r'TASK_FEATURE_LENGTHS to (\{.*?\}) or shorter', str(error.value))
  assert (shorter is None) == (vocabulary.extra_ids == 0)
  if shorter is not None:
    lengths = ast.literal_eval(shorter[1])
    segment_length = span_corruption.check_lengths(lengths, 0.15, 3.0)
    span_corruption.check_sentinels(vocabulary, segment_length, 0.15, 3.0)
    longer = span_corruption.random_spans_lengths(lengths['inputs'] + 20, 0.15, 3.0)[0]
    with pytest.raises(ConfigError):
      span_corruption.check_sentinels(vocabulary, longer, 0.15, 3.0)


def test_documents_with_too_many_spans_are_rejected():
  lengths = {'inputs': 4096, 'targets': 910}
  for vocabulary in (data.ByteVocabulary(125), data.ByteVocabulary()):
    task = builtin_tasks.docs_span_corruption_task(vocabulary=vocabulary)
    with pytest.raises(ConfigError, match='must have a sentinel for each'):
      task.table('validation', lengths)


def test_each_epoch_has_new_noise():
  table = data.get_builtin('python_docs_span_corruption').table(
    'validation', {'inputs': 64, 'targets': 32}
  )
  first, second = (table.examples(0, np.arange(3) + epoch * len(table)) for epoch in range(2))
  assert any(
    len(a['inputs']) != len(b['inputs']) or (a['inputs'] != b['inputs']).any()
    for a, b in zip(first, second, strict=True)
  )
  other_seed = table.examples(1, np.arange(3))
  assert (first[0]['inputs'] != other_seed[0]['inputs']).any()
