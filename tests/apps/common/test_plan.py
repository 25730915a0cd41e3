"""Plans of runs against every single step."""

import itertools

import pytest

from t5x_lite.apps.common import plan as plan_lib


@pytest.mark.parametrize('periods', [
    {}, {'pause': {'period': 3}}, {'pause': {'steps': [3, 7]}, 'save': {'steps': [7], 'at_end': True}},
    {'evaluate': {'period': 4, 'at_end': True}, 'save': {'period': 6, 'at_end': True}},
    {'save': {'steps': [0, 5, 5, 19, 30]}, 'collect_garbage': {'period': 7}, 'infer': {'period': 8, 'steps': [9]}},
    {'pause': {'period': 100}, 'evaluate': {'period': 100}, 'save': {'period': 100}}])
@pytest.mark.parametrize('first', [0, 4, 5, 18, 20])
def test_plan_against_every_single_step(first, periods):
  last = 20
  stretches = list(plan_lib.plan_steps(first, last, **{name: plan_lib.When(**when) for name, when in periods.items()}))
  whens = {'evaluate': {'at_end': True}, 'save': {'at_end': True}, **periods}
  expected = []
  for step in range(first + 1, last + 1):
    due = {name for name, when in whens.items() if step in when.get('steps', ()) or (
        when.get('period') and step % when['period'] == 0) or (step == last and when.get('at_end'))}
    if due or step == last:
      expected.append((step, due - {'pause'}))
  names = ('evaluate', 'infer', 'save', 'collect_garbage')
  assert [(s.last, {name for name in names if getattr(s, name)}) for s in stretches] == expected
  assert [s.first for s in stretches] == [first, *(s.last for s in stretches)][:len(stretches)]


def test_a_long_plan_is_made_lazily():
  plan = plan_lib.plan_steps(0, 10**12, pause=plan_lib.When(period=1))
  assert [s.last for s in itertools.islice(plan, 3)] == [1, 2, 3]
