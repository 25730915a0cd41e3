"""Tasks that several tests of data read."""

import dataclasses

import pytest

from t5x_lite import data
from t5x_lite.data import corpora
from tests.data import builtin_cases
from tests.data import registries


@pytest.fixture
def mixture(monkeypatch):
  registries.isolate(monkeypatch)
  for name, num in (('test_few', 5), ('test_many', 1000)):
    data.register_builtin_task(dataclasses.replace(builtin_cases.make_task(num=num), name=name))
  return data.register_builtin_mixture(
    data.BuiltinMixture(name='test_mix', rates={'test_few': 1, 'test_many': 3})
  )


@pytest.fixture(scope='module')
def cloze(tmp_path_factory):
  """The embedded task's validation split as a task of the same name from three files, by format."""
  from tests.data import grain_cases as cases  # imports grain, which some machines lack

  folder = tmp_path_factory.mktemp('cloze')
  examples = [
    {'question': line, 'answer': keyword, 'number': i}
    for i, (line, keyword) in enumerate(corpora.python_keyword_cloze('validation'))
  ]
  tasks = {}
  for format in cases.FORMATS:
    for part, (start, end) in enumerate([(0, 300), (300, 301), (301, 1000)]):
      cases.write(folder / f'part-{part}.{format}', examples[start:end], format)
    tasks[format] = cases.make_task(
      str(folder / f'part-*.{format}'),
      format,
      'python_keyword_cloze',
      keys={'inputs': 'question', 'targets': 'answer'},
      metric_fns=[data.exact_match],
    )
  return tasks
