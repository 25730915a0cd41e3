"""Similarities of all pairs, against sacrebleu if it is installed, and against counting n-grams one pair at a time."""

import collections
import random

import numpy as np
import pytest

from t5x_lite.decoding import text_similarity

_WORDS = (
  'the',
  'a',
  'cat',
  'sat',
  'on',
  'mat.',
  'é,',
  '中文',
  'Hello',
  'world!',
  'aaa',
  'aaaa',
  'foo-bar',
  '3.14',
)


def _texts(seed):
  rng = random.Random(seed)
  texts = [' '.join(rng.choice(_WORDS) for _ in range(rng.randint(0, 9))) for _ in range(6)]
  return [*texts, '', ' \n', 'aaaaaaaaaa', 'a']


def _chrf(candidate, reference):
  """Return chrF2 in percent, by its definition."""
  candidate = ''.join(candidate.split())
  reference = ''.join(reference.split())
  precisions = []
  recalls = []
  for order in range(1, 7):
    counts = [
      collections.Counter(text[i : i + order] for i in range(len(text) - order + 1))
      for text in (candidate, reference)
    ]
    if all(counts):
      common = (counts[0] & counts[1]).total()
      precisions.append(common / counts[0].total())
      recalls.append(common / counts[1].total())
  if not sum(precisions):
    return 0.0
  precision = np.mean(precisions)
  recall = np.mean(recalls)
  return 100 * 5 * precision * recall / (4 * precision + recall)


@pytest.mark.parametrize('seed', range(5))
def test_chrf_equals_counting_each_pair(seed):
  texts = _texts(seed)
  expected = [[_chrf(candidate, reference) for reference in texts] for candidate in texts]
  np.testing.assert_allclose(text_similarity.pairwise_chrf(texts), expected, atol=1e-9)


@pytest.mark.parametrize('seed', range(5))
def test_scores_equal_those_of_sacrebleu(seed):
  metrics = pytest.importorskip('sacrebleu.metrics')
  texts = _texts(seed)
  for metric, found in (
    (metrics.CHRF(), text_similarity.pairwise_chrf(texts)),
    (metrics.BLEU(effective_order=True), text_similarity.pairwise_bleu(texts)),
  ):
    expected = [[metric.sentence_score(a, [b]).score for b in texts] for a in texts]
    np.testing.assert_allclose(found, expected, atol=1e-9)
