"""Minimum Bayes risk: the choice by brute force, its options, and sampling."""

import functools

import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite.decoding import text_similarity
from t5x_lite.errors import ConfigError


def _overlap(candidates, references):
  """Return the share of the candidate's letters that the reference has; it is not symmetric."""
  return [
    sum(letter in reference for letter in candidate) / max(1, len(candidate))
    for candidate, reference in zip(candidates, references, strict=True)
  ]


@pytest.mark.parametrize('utility', ['chrf', _overlap])
def test_the_choice_has_the_largest_mean_over_all_samples(utility):
  rng = np.random.default_rng(0)
  rule = decoding.MinimumBayesRisk(num_samples=8, utility=utility)
  for _ in range(20):
    samples = [''.join(rng.choice(list('abc'), rng.integers(1, 4))) for _ in range(8)]
    if utility == 'chrf':
      table = text_similarity.pairwise_chrf(samples)
    else:
      table = np.array([_overlap([each] * 8, samples) for each in samples])
    means = np.round(table.mean(axis=1), 9)
    index, found = rule.choose(samples)
    assert index == np.argmax(means) and found == pytest.approx(means.max())


def test_equal_texts_are_compared_once_and_count_by_their_number():
  calls = []

  def utility(candidates, references):
    calls.append(list(zip(candidates, references, strict=True)))
    return [float(a == b) for a, b in zip(candidates, references, strict=True)]

  rule = decoding.MinimumBayesRisk(num_samples=5, utility=utility)
  assert rule.choose(['a', 'b', 'c', 'b', 'a']) == (0, pytest.approx(0.4))  # 'a' and 'b' tie
  assert len(calls) == 1 and len(calls[0]) == 9
  assert rule.choose(['a', 'b', 'c', 'b', 'c', 'b']) == (1, pytest.approx(0.5))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_samples': 1}, 'num_samples` must be an integer >= 2, got 1'),
    ({'utility': 'chrF'}, "utility` must be one of 'chrf', 'bleu', or a function"),
    ({'utility': 'chr'}, "Did you mean 'chrf'"),
    ({'temperature': 0}, 'temperature` must be a number > 0'),
    ({'topk': 4, 'topp': 0.5}, 'Set topk=0'),
  ],
)
def test_options_out_of_range(options, message):
  with pytest.raises(ConfigError, match=message):
    decoding.MinimumBayesRisk(**options)


@pytest.mark.parametrize('result', [[1.0], [[1.0] * 4], [1.0, 0.5, float('nan'), 1.0]])
def test_a_utility_must_return_a_finite_number_for_each_pair(result):
  rule = decoding.MinimumBayesRisk(num_samples=2, utility=lambda candidates, references: result)
  with pytest.raises(ConfigError, match='must return a finite number for each of 4 pairs'):
    rule.choose(['a', 'b'])


def test_a_caller_that_does_not_choose_is_rejected():
  with pytest.raises(ConfigError, match='`num_decodes` must be 16, MinimumBayesRisk.num_samples'):
    decoding.MinimumBayesRisk()(np.zeros((1, 3), np.int32), num_decodes=1)


def test_it_is_found_inside_partials():
  rule = decoding.MinimumBayesRisk()
  assert decoding.minimum_bayes_risk_of(functools.partial(rule, max_decode_steps=3)) is rule
  assert decoding.minimum_bayes_risk_of(decoding.greedy_search) is None
  assert decoding.identity_of(rule)['minimum_bayes_risk']['utility'] == 'chrf'
  assert decoding.contract_of(rule).padding_mask
