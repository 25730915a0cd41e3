"""Plans of runs against every single step."""

import itertools
import math
import types

import pytest

from t5x_lite import checkpoints
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.errors import ConfigError


@pytest.mark.parametrize(
  'periods',
  [
    {},
    {'pause': {'period': 3}},
    {'pause': {'steps': [3, 7]}, 'save': {'steps': [7], 'at_end': True}},
    {'a': {'period': 4, 'at_end': True}, 'save': {'period': 6, 'at_end': True}},
    {
      'save': {'steps': [0, 5, 5, 19, 30]},
      'collect_garbage': {'period': 7},
      'b': {'period': 8, 'steps': [9]},
    },
    {'a': {'period': 3, 'from_step': 9}, 'b': {'steps': [2, 11], 'from_step': 6, 'at_end': True}},
    {'pause': {'period': 100}, 'a': {'period': 100}, 'save': {'period': 100}},
  ],
)
@pytest.mark.parametrize('first', [0, 4, 5, 18, 20])
def test_plan_against_every_single_step(first, periods):
  last = 20
  made = {name: plan_lib.When(**when) for name, when in periods.items()}
  evaluations = {name: made.pop(name) for name in ('a', 'b') if name in made}
  stretches = list(plan_lib.plan_steps(first, last, evaluations=evaluations, **made))
  whens = {'save': {'at_end': True}, **periods}
  expected = []
  for step in range(first + 1, last + 1):
    due = {
      name
      for name, when in whens.items()
      if step >= when.get('from_step', 0)
      and (step in when.get('steps', ()) or (when.get('period') and step % when['period'] == 0))
      or (step == last and when.get('at_end'))
    }
    if due or step == last:
      expected.append((step, due - {'pause'}))
  names = ('save', 'collect_garbage')
  assert [
    (s.last, {name for name in names if getattr(s, name)} | set(s.evaluations)) for s in stretches
  ] == expected
  assert [s.first for s in stretches] == [first, *(s.last for s in stretches)][: len(stretches)]


def test_a_condition_alone_is_asked_at_every_pause():
  plan = plan_lib.plan_steps(
    0,
    9,
    evaluations={'a': plan_lib.When(condition=lambda step, metrics: True)},
    pause=plan_lib.When(period=4),
  )
  assert [(s.last, s.evaluations) for s in plan] == [(4, ('a',)), (8, ('a',)), (9, ('a',))]


def test_a_policy_of_unknown_steps_adds_no_pause():
  policy = checkpoints.AnySavePolicy(
    (checkpoints.EveryNSteps(3, from_step=5), checkpoints.WhenBest('x'))
  )
  plan = plan_lib.plan_steps(0, 10, save=plan_lib.SaveTimes(policy))
  assert [(s.last, s.save) for s in plan] == [(6, True), (9, True), (10, True)]


def test_a_plan_without_an_end_has_the_pauses_of_a_longer_one():
  whens = {
    'evaluations': {'training_eval': plan_lib.When(period=10, at_end=True)},
    'save': plan_lib.When(steps=(7,), at_end=True),
    'pause': plan_lib.When(period=4),
  }
  endless, long = plan_lib.plan_steps(3, math.inf, **whens), plan_lib.plan_steps(3, 1000, **whens)
  assert list(itertools.islice(endless, 50)) == list(itertools.islice(long, 50))
  shown = plan_lib.list_stretches(plan_lib.plan_steps(3, math.inf, **whens), math.inf, 10)
  assert shown[-1].last == 80
  assert plan_lib.describe_plan(shown, math.inf, 2).splitlines() == [
    'steps        4 to the end of the data (num_epochs = 2)',
    'summaries    4, 7, 8, 10, 12, 16, ...',
    'evaluations  10, 20, 30, 40, 50, 60, ...',
    'checkpoints  7, ...',
  ]
  assert plan_lib.describe_plan(shown, math.inf).startswith(
    'steps        4, until the run is stopped\n'
  )
  few = list(plan_lib.plan_steps(0, 10))
  assert plan_lib.describe_plan(few, 10, 2).startswith(
    'steps        1 to 10 or the end of the data (num_epochs = 2)\n'
  )


def test_the_last_step():
  assert (
    plan_lib.last_step_of_run(10, None, 4) == 10 and plan_lib.last_step_of_run(None, 10, 4) == 14
  )
  assert plan_lib.last_step_of_run(None, None, 4) == math.inf


def test_a_long_plan_is_made_lazily():
  plan = plan_lib.plan_steps(0, 10**12, pause=plan_lib.When(period=1))
  assert [s.last for s in itertools.islice(plan, 3)] == [1, 2, 3]


def test_a_policy_that_does_not_advance_is_an_error():
  policy = types.SimpleNamespace(
    next_step=lambda step: step, should_save=lambda step, point=None: False
  )
  with pytest.raises(
    ConfigError, match=r'next_step\(4\)` of a policy must be a later step or None, got 4'
  ):
    list(plan_lib.plan_steps(4, 10, save=plan_lib.SaveTimes(policy)))


def test_steps_after_the_end_of_the_run_are_warned_of(caplog):
  whens = {
    'late': plan_lib.When(steps=[2000, 1001]),
    'early': plan_lib.When(steps=[1000, 2000]),
    'other': plan_lib.When(period=3),
  }
  plan_lib.warn_of_late_steps(whens, math.inf)
  assert not caplog.records
  plan_lib.warn_of_late_steps(whens, 1000)
  assert [record.getMessage() for record in caplog.records] == [
    "No step of `When.steps` of the evaluation 'late' is within the run, which ends at step 1,000: the first one is "
    '1,001.'
  ]
