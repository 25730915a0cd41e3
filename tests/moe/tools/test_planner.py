"""The capacity planner against simulation and against exact results."""

import math

import numpy as np
import pytest

from moe.tools import planner
from t5x_lite.errors import ConfigError


@pytest.mark.parametrize('exponent', [0.0, 1.0, 2.5])
@pytest.mark.parametrize('num_selected', [1, 2])
def test_drop_rate_is_that_of_a_simulation(exponent, num_selected):
  sizes = planner.Sizes(tokens_per_group=64, num_selected=num_selected)
  load = planner.zipf_load(8, exponent)
  probability = planner.choice_probabilities(load, num_selected)
  np.testing.assert_allclose(probability.sum(), num_selected)
  rng = np.random.default_rng(0)
  chosen = rng.random((4000, 64, 8)) < probability
  for places in (4, 10, 32):
    overflow = np.maximum(chosen.sum(axis=1) - places, 0).sum(axis=1) / (64 * num_selected)
    error = 4 * overflow.std() / math.sqrt(len(overflow)) + 1e-4
    assert abs(planner.drop_rate(load, sizes, places) - overflow.mean()) < error


def test_one_expert_with_everything():
  sizes = planner.Sizes(tokens_per_group=32, num_selected=2, min_capacity=1)
  # The first expert is chosen by every token, whatever its load beyond that; the others share the second choices.
  np.testing.assert_allclose(
    planner.choice_probabilities(np.array([0.98, 0.01, 0.01]), 2), [1.0, 0.5, 0.5]
  )
  assert planner.drop_rate(np.array([1.0, 1.0]), sizes, 16) == pytest.approx(0.5)
  assert planner.drop_rate(np.array([1.0, 1.0]), sizes, 32) == 0.0


def test_options_count_rows_and_bytes():
  sizes = planner.Sizes(
    tokens_per_group=64, width=8, hidden=16, num_inputs=2, bytes_per_number=2, min_capacity=1
  )
  option, whole = planner.capacity_options(planner.zipf_load(4, 0.0), sizes, (1.0, 100.0))
  assert (option.num_slots, option.rows_per_choice, option.bytes) == (
    16,
    1.0,
    64 * (2 * 8 + 3 * 16) * 2,
  )
  assert (whole.drop_rate, whole.rows_per_choice) == (
    0.0,
    4.0,
  )  # A buffer has no more places than there are tokens.


def test_suggestion_is_the_smallest_that_will_do():
  sizes = planner.Sizes(tokens_per_group=256, num_selected=2)
  for exponent in (0.0, 1.0):
    load = planner.zipf_load(16, exponent)
    factor = planner.suggest_factor(load, sizes, 0.01)
    chosen, smaller = planner.capacity_options(load, sizes, (factor, round(factor - 0.05, 2)))
    assert chosen.drop_rate <= 0.01 < smaller.drop_rate
  assert planner.suggest_factor(planner.zipf_load(16, 3.0), sizes, 0.0) == 16.0


def test_receive_buffers_of_shards():
  sizes = planner.Sizes(tokens_per_group=64, num_selected=1)
  even = planner.receive_options(planner.zipf_load(8, 0.0), sizes, 4, (1.0, 1.5, 4.0))
  assert even[0].drop_rate > even[1].drop_rate > even[2].drop_rate == 0.0
  skewed = planner.receive_options(np.array([1.0] + [0.0] * 7), sizes, 4, (1.0, 4.0))
  assert skewed[0].drop_rate == pytest.approx(0.75) and skewed[1].drop_rate == 0.0


def test_invalid_arguments():
  sizes = planner.Sizes(tokens_per_group=8)
  for call, match in (
    (lambda: planner.Sizes(tokens_per_group=0), 'tokens_per_group` must be an integer >= 1, got 0'),
    (
      lambda: planner.Sizes(tokens_per_group=8, routed_share=1.5),
      r'share` must be a number in \(0, 1\], got 1.5',
    ),
    (lambda: planner.zipf_load(0, 1.0), 'num_experts` must be .*, got 0'),
    (lambda: planner.zipf_load(4, -1.0), 'zipf` must be .*, got -1'),
    (lambda: planner.choice_probabilities(np.array([1.0, np.nan]), 1), 'load'),
    (lambda: planner.choice_probabilities(np.zeros(3), 1), 'load'),
    (
      lambda: planner.choice_probabilities(np.ones(2), 3),
      'num_selected` must be a number <= 2, got 3',
    ),
    (
      lambda: planner.receive_options(np.ones(6), sizes, 4, (1.0,)),
      'a divisor of the number of experts 6, got 4',
    ),
    (lambda: planner.suggest_factor(np.ones(6), sizes, 1.5), 'max_drop'),
  ):
    with pytest.raises(ConfigError, match=match):
      call()


def test_receive_buffers_of_the_worst_case_drop_nothing():
  # Two choices of a token are for different experts, of which a shard has one: half of the choices, at the most.
  sizes = planner.Sizes(tokens_per_group=64, num_selected=2)
  load = np.array([0.5, 0.5, 0.0, 0.0])
  worst, enough, less = planner.receive_options(load, sizes, 4, (None, 2.0, 1.5))
  assert (worst.num_slots, worst.factor, worst.drop_rate) == (256, 2.0, 0.0)
  assert enough.num_slots == 256 and enough.drop_rate == 0.0 < less.drop_rate
  assert planner.suggest_receive_factor(load, sizes, 4, 0.0) == 2.0
  small = planner.suggest_receive_factor(load, sizes, 4, 0.05)
  chosen, smaller = planner.receive_options(load, sizes, 4, (small, round(small - 0.05, 2)))
  assert chosen.drop_rate <= 0.05 < smaller.drop_rate
