"""The table of bindings: which row applies, what it replaces, and where a value comes from."""

import copy

import gin
import pytest

from t5x_lite.configuration import syntax
from t5x_lite.configuration import table as table_lib
from t5x_lite.configuration.table import Row

_MODEL = 'mine.Model'


def _row(text, key, value=None):
  read = syntax.read_text(text, 'a.gin', is_flag=False)
  return Row(key, value, read.statements[0], read)


@pytest.fixture
def table():
  return table_lib.Table()


def test_the_last_row_of_a_key_applies_and_knows_the_former_one(table):
  first = _row('mine.Model.width = %WIDTH', ('', _MODEL, 'width'))
  other = _row('mine.Model.rate = 1', ('', _MODEL, 'rate'))
  last = _row('mine.Model.width = 3', ('', _MODEL, 'width'))
  for row in (first, other, last):
    table.add(row)
  assert [row.statement for row in table.values()] == [last.statement, other.statement]
  assert table['', _MODEL, 'width'].former is first
  assert list(table.groups['', _MODEL]) == ['width', 'rate']
  assert table.replaced == {'WIDTH': last.location}


def test_inner_scopes_have_priority(table):
  table.add(Row(('', _MODEL, 'width'), 1))
  table.add(Row(('eval', _MODEL, 'width'), 2))
  table.add(Row(('eval/long', _MODEL, 'rate'), 3))
  found = {}
  for scope in ((), ('eval',), ('eval', 'long'), ('train',)):
    found[scope] = {name: row.value for name, row in table.in_scope(scope, _MODEL).items()}
  assert found == {
    (): {'width': 1},
    ('eval',): {'width': 2},
    ('eval', 'long'): {'width': 2, 'rate': 3},
    ('train',): {'width': 1},
  }


def test_locations_tell_files_flags_and_code_apart():
  flag = syntax.read_text('A = 1', '--gin.A=1')
  of_flag = Row(('A', table_lib.MACRO, 'value'), 1, flag.statements[0], flag)
  of_command = _row('A = 1', ('A', table_lib.MACRO, 'value'))
  of_code = Row(('A', table_lib.MACRO, 'value'), 1)
  assert [row.is_flag for row in (of_flag, of_command, of_code)] == [True, False, False]
  assert [row.where for row in (of_flag, of_command, of_code)] == [
    '--gin.A=1',
    'a.gin:1',
    'set in code',
  ]
  assert of_flag.path is of_command.path is of_code.path is None


def test_an_inherited_value_is_that_of_the_base_when_it_is_used():
  gin.clear_config()
  gin.parse_config('scope/gin.macro.value = [1]')
  inherited = table_lib.Inherited(('scope', table_lib.MACRO, 'value'))
  gin.bind_parameter('scope/gin.macro.value', [2])
  assert copy.deepcopy(inherited) == [2]
  gin.clear_config()
