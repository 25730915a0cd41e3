"""The validator of options: intervals, choices, wording."""

import math

import numpy as np
import pytest

from t5x_lite import checks
from t5x_lite.errors import CheckpointError, ConfigError


def test_a_condition_that_raises_does_not_hold():
  with pytest.raises(ConfigError, match=r'`A.b` must be a list, got 5. For example .1.'):
    checks.check(
      'A',
      {'b': 5},
      b=checks.Expectation('a list', lambda value: len(value) > 0, 'For example [1].'),
    )


@pytest.mark.parametrize(
  'interval, text, valid, invalid',
  [
    ({'above': 0, 'at_most': 1}, 'a number in (0, 1]', [1, 0.5, np.float32(0.25)], [0, 1.5, -1]),
    ({'at_least': 0, 'below': 1}, 'a number in [0, 1)', [0, 0.9], [1, -0.1]),
    ({'at_least': 2}, 'a number >= 2', [2, 3.5], [1.9]),
    ({'above': 2}, 'a number > 2', [2.1], [2]),
    ({'at_most': 2}, 'a number <= 2', [2, -5], [2.1]),
    ({'below': 2}, 'a number < 2', [1.9], [2]),
    ({}, 'a number', [-1, 0, 1e30], [math.inf, -math.inf]),
    ({'finite': False}, 'a number', [math.inf], []),
    (
      {'integer': True, 'at_least': 1},
      'an integer >= 1',
      [1, np.int64(3)],
      [0, 1.0, np.float32(2)],
    ),
  ],
)
def test_number(interval, text, valid, invalid):
  expectation = checks.number(**interval)
  assert expectation.text == text
  assert all(map(expectation.holds, valid))
  assert not any(map(expectation.holds, [*invalid, True, math.nan, 'a', None, [1]]))
  assert expectation.or_none().holds(None) and expectation.or_none().text == f'{text} or None'
  assert not any(map(expectation.or_none().holds, invalid))


def test_one_of():
  expectation = checks.one_of(['sum', 'mean', None])
  assert expectation.holds('sum') and expectation.holds(None)
  assert not any(map(expectation.holds, ['max', True, ['sum'], np.arange(3)]))
  with pytest.raises(
    ConfigError,
    match=r"^`loss.by` must be one of 'sum', 'mean', None, got 'maen'\. "
    r"Did you mean 'mean'\?$",
  ):
    checks.check('loss', {'by': 'maen'}, by=expectation)
  with pytest.raises(ConfigError, match=r"^`by` must be one of 'sum', 'mean', None, got 7\.$"):
    checks.check('', {'by': 7}, by=expectation)
  assert not checks.one_of([1]).holds(True)  # equal in Python


def test_instance():
  expectation = checks.instance((str, bytes), 'a string', remedy='Quote it.')
  assert expectation.holds('a') and expectation.holds(b'a')
  with pytest.raises(ConfigError, match=r'^`task.name` must be a string, got 7\. Quote it\.$'):
    checks.check('task', {'name': 7}, name=expectation)


def test_the_first_invalid_option_is_named():
  values = {'a': 1, 'b': -1, 'c': -1}
  positive = checks.number(above=0)
  checks.check('me', values, a=positive)
  with pytest.raises(CheckpointError, match='^`me.b` must be a number > 0, got -1.$'):
    checks.check('me', values, CheckpointError, a=positive, b=positive, c=positive)


def test_long_values_are_cut():
  message = str(checks.invalid('', 'x', 'short', 'y' * 1000))
  assert message.endswith('yyy....') and len(message) < 300


def test_a_call_of_a_custom_function_with_other_parameters_names_the_option():
  def inside(logits, batch):
    return len(logits, batch)

  def call(fn):
    return checks.call_custom('Model', 'metric_fns', 'logits, batch', fn, 1, 2)

  assert call(lambda logits, batch: logits + batch) == 3
  for fn, got in (
    (lambda logits: 0, r'lambda>.* takes 1 positional argument'),
    (dict, None),
    (lambda logits, batch, k: 0, r"missing 1 required positional argument: 'k'"),
    (3, 'got 3. In gin'),
  ):
    if got is None:
      with pytest.raises(TypeError, match='dict'):  # no Python code: the error as it is
        call(fn)
    else:
      with pytest.raises(
        ConfigError, match=rf'^`Model.metric_fns` must be a function of \(logits, batch\), .*{got}'
      ):
        call(fn)
  with pytest.raises(TypeError, match='len'):
    call(inside)
