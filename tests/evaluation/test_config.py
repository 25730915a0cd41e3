"""When a run does something: bounds, beginnings and ends."""

import pytest

from t5x_lite import evaluation
from t5x_lite.errors import ConfigError

When = evaluation.When


@pytest.mark.parametrize(
  'when, due',
  [
    (When(), []),
    (When(period=4), [4, 8]),
    (When(period=4, from_step=5), [8]),
    (When(steps=[2, 9], period=4), [2, 4, 8, 9]),
    (When(at_end=True), [10]),
    (When(steps=[3, 5], from_step=4, at_end=True), [5, 10]),
    (When(condition=lambda step, metrics: True, from_step=8), [8, 9, 10]),
    (When(condition=lambda step, metrics: True, period=5), [5, 10]),
  ],
)
def test_due(when, due):
  assert [step for step in range(1, 11) if when.is_due(step, 10)] == due


def test_next_step():
  when = When(period=4, from_step=9, steps=[3, 10, 13])
  assert [when.next_step(step) for step in (0, 8, 10, 12, 13)] == [10, 10, 12, 13, 16]
  assert When(at_end=True).next_step(3) is None and When(steps=[3]).next_step(3) is None
  assert When(period=4, from_step=8).next_step(0) == 8


@pytest.mark.parametrize(
  'options',
  [
    {'period': -1},
    {'steps': [1.5]},
    {'from_step': -1},
    {'condition': 3},
    {'steps': 5},
    {'steps': None},
    {'at_end': 'False'},
    {'at_start': None},
  ],
)
def test_errors(options):
  with pytest.raises(ConfigError, match=f'When.{next(iter(options))}` must be'):
    When(**options)


@pytest.mark.parametrize(
  'bounds, holds',
  [
    ({'below': 2.0}, True),
    ({'below': 1.5}, False),
    ({'above': 1.0}, True),
    ({'above': 1.0, 'below': 1.2}, False),
  ],
)
def test_threshold(bounds, holds):
  assert evaluation.Threshold(metric='loss', **bounds)(3, {'loss': 1.5}) is holds
  assert not evaluation.Threshold(metric='accuracy', **bounds)(3, {'loss': 1.5})


def test_a_threshold_needs_a_bound():
  with pytest.raises(
    ConfigError, match='Threshold.below` must be a number if `above` is None, got None. Set one'
  ):
    evaluation.Threshold(metric='loss')


def test_a_threshold_that_no_number_satisfies():
  with pytest.raises(ConfigError, match='Threshold.above` must be'):
    evaluation.Threshold(metric='loss', below=1.0, above=2.0)
