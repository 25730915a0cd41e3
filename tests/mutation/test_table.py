"""The table of mutants fits the code, and the runner detects killed mutants; `make mutants` runs the table."""

import collections
import pathlib

import pytest

from tests.mutation import __main__ as runner
from tests.mutation import table
from tests.mutation.mutant import Mutant

_ROOT = pathlib.Path(__file__).parents[2]


def test_mutants_fit_the_code():
  problems = {mutant.name: mutant.problems(_ROOT) for mutant in table.MUTANTS}
  assert not {name: found for name, found in problems.items() if found}


def test_names_are_unique_and_no_change_comes_twice():
  for key in (lambda mutant: mutant.name, lambda mutant: (mutant.file, mutant.old, mutant.new)):
    assert not [
      item for item, count in collections.Counter(map(key, table.MUTANTS)).items() if count > 1
    ]


def test_there_are_enough():
  assert len(table.MUTANTS) >= 60


@pytest.mark.parametrize(
  'old, new, outcome',
  [('x = 1', 'x = 2', 'killed'), ('y = 1', 'y = 2', 'SURVIVED'), ('= 1', '= 2', 'TEXT NOT FOUND')],
)
def test_outcomes(tmp_path, old, new, outcome):
  (tmp_path / 'module.py').write_text('x = 1\ny = 1\n')
  (tmp_path / 'test_module.py').write_text(
    'import module\n\ndef test_x():\n  assert module.x == 1\n'
  )
  mutant = Mutant('name', 'module.py', old, new, 'test_module.py::test_x')
  assert runner.outcome(tmp_path, mutant, str(tmp_path / 'compiled'), seconds=60) == outcome
  assert (tmp_path / 'module.py').read_text() == 'x = 1\ny = 1\n'


def test_a_test_that_does_not_exist_kills_nothing(tmp_path):
  (tmp_path / 'module.py').write_text('x = 1\n')
  mutant = Mutant('name', 'module.py', 'x = 1', 'x = 2', 'test_module.py::test_x')
  assert mutant.problems(tmp_path) == ['test_module.py::test_x does not exist']
  with pytest.raises(RuntimeError, match='name: pytest ended with status 4'):
    runner.outcome(tmp_path, mutant, str(tmp_path / 'compiled'), seconds=60)
