"""Tables in text files against Python's csv module."""

import csv
import io
import random

import pytest

from t5x_lite.data.files import delimited
from t5x_lite.data.files import line_index
from t5x_lite.errors import DataError

_HEADER = b'a,b,c\n'


def _rows(path, **options):
  table = delimited.Table([str(path)], **options)
  contents = table.read(range(len(table)))
  return table, [table.parse(content, table.where(i)) for i, content in enumerate(contents)]


@pytest.mark.parametrize(
  'content, rows',
  [
    (b'1,2,3\n', [['1', '2', '3']]),
    (b'1,2,3', [['1', '2', '3']]),
    (b'1,2,3\r\n4,5,6\r\n', [['1', '2', '3'], ['4', '5', '6']]),
    (b'\n\r\n1,2,3\n\n', [['1', '2', '3']]),
    (b'"1","a, b","say ""x"""\n', [['1', 'a, b', 'say "x"']]),
    (b'1,"two\nlines\r\n",3\n4,5,6', [['1', 'two\nlines\r\n', '3'], ['4', '5', '6']]),
    (b'"",,""\n', [['', '', '']]),
    (b'5" wide,it\'s "so",3\n4,5,6\n', [['5" wide', 'it\'s "so"', '3'], ['4', '5', '6']]),
    (b'5" wide,"a\nb",3\n', [['5" wide', 'a\nb', '3']]),
    (b'"a"b,"c""\nd",3\n', [['ab', 'c"\nd', '3']]),
    ('é,ü,日本\n'.encode(), [['é', 'ü', '日本']]),
  ],
)
@pytest.mark.parametrize('chunk', [3, 1 << 24])
def test_rows_are_those_of_csv(tmp_path, monkeypatch, content, rows, chunk):
  # No option: files of the real size would make the test slow.
  monkeypatch.setattr(line_index, 'CHUNK', chunk)
  path = tmp_path / 'x.csv'
  path.write_bytes(b'\xef\xbb\xbf' + _HEADER + content)
  table, found = _rows(path)
  assert table.columns == ['a', 'b', 'c']
  assert [list(row.values()) for row in found] == rows
  expected = [row for row in csv.reader(io.StringIO(content.decode(), newline='')) if row]
  assert rows == expected


@pytest.mark.parametrize('chunk, piece', [(1 << 24, 1 << 16), (7, 1 << 16), (11, 1), (13, 3)])
def test_random_tables_are_those_of_csv(tmp_path, monkeypatch, chunk, piece):
  monkeypatch.setattr(line_index, 'CHUNK', chunk)  # The state goes from chunk to chunk.
  monkeypatch.setattr(delimited, '_PIECE', piece)
  draw = random.Random(0)
  path = tmp_path / 'x.csv'
  for _ in range(300):
    text = ''.join(draw.choice('ab,"\n"') for _ in range(40)) + '"' * draw.randrange(2) + '\n'
    try:
      expected = [row for row in csv.reader(io.StringIO(text, newline=''), strict=False) if row]
    except csv.Error:
      continue
    path.write_bytes(text.encode())
    names = [str(i) for i in range(len(expected[0]))] if expected else ['a']
    try:
      table = delimited.Table([str(path)], columns=names)
    except DataError as error:  # Python's csv ends an open field at the end of the file.
      assert 'must end with a quote' in str(error)
      continue
    contents = table.read(range(len(table)))
    assert [table._fields(content, '') for content, _ in contents] == expected, text


def test_locations_and_several_files(tmp_path):
  first, second = tmp_path / 'a.csv', tmp_path / 'b.csv'
  first.write_bytes(b'a,b\n1,"x\ny"\n3,4\n')
  second.write_bytes(b'b,a\n\n5,6\n')
  table = delimited.Table([str(first), str(second)])
  found = [table.parse(content, table.where(i)) for i, content in enumerate(table.read([2, 1, 0]))]
  assert found == [{'b': '5', 'a': '6'}, {'a': '3', 'b': '4'}, {'a': '1', 'b': 'x\ny'}]
  assert [table.where(i).rpartition('/')[2] for i in range(3)] == [
    'a.csv, line 2',
    'a.csv, line 4',
    'b.csv, line 3',
  ]


def test_lines_with_other_separators(tmp_path):
  path = tmp_path / 'x.txt'
  path.write_text('one ||| "two\nthree ||| four"\n')
  options = {'separator': ' ||| ', 'has_quotes': False, 'columns': ['a', 'b']}
  _, found = _rows(path, **options)
  assert found == [{'a': 'one', 'b': '"two'}, {'a': 'three', 'b': 'four"'}]
  _, found = _rows(path, separator='', has_quotes=False, columns=['text'])
  assert [row['text'] for row in found] == ['one ||| "two', 'three ||| four"']


@pytest.mark.parametrize(
  'content, message',
  [
    (b'', r'x\.csv must begin with the names of its columns, got an empty file'),
    (b'a,b,a\n', "the names of columns must differ, got 'a' twice"),
    (b'a,b\n1,2\n3,"4\n5,6\n', r'x\.csv, line 3: the quoted field that begins here must end with'),
    (b'a,b\n1,"x ""y"" z\n\n', 'line 2: the quoted field that begins here'),
    (b'a,b\n1,2\x00\n', 'must be lines|must be text'),
    (b'a,b\n' + b'1,2\n' * 3000 + b'3,\x00\n', r'x\.csv, line 3002 must be text, got a NUL byte'),
    ('a,b\n1,2\n'.encode('utf-16'), 'is UTF-16 text. Convert it'),
  ],
)
def test_files_that_are_no_tables(tmp_path, content, message):
  path = tmp_path / 'x.csv'
  path.write_bytes(content)
  with pytest.raises(DataError, match=message):
    delimited.Table([str(path)])


@pytest.mark.parametrize(
  'row, message',
  [
    (b'1,2', r'x\.csv, line 2 must have 3 fields, as the columns a, b, c, got 2: .1,2'),
    (b'1,2,3,4', 'got 4'),
    (b'1,\xff,3', 'line 2 must be UTF-8, got invalid start byte at byte 3 of the row'),
  ],
)
def test_bad_rows(tmp_path, row, message):
  path = tmp_path / 'x.csv'
  path.write_bytes(_HEADER + row + b'\n')
  with pytest.raises(DataError, match=message):
    _rows(path)


def test_files_with_other_columns(tmp_path):
  (tmp_path / 'a.csv').write_text('a,b\n1,2\n')
  (tmp_path / 'b.csv').write_text('a,c\n1,2\n')
  with pytest.raises(DataError, match=r"got \['a', 'b'\] in .*a\.csv and \['a', 'c'\] in .*b\.csv"):
    delimited.Table([str(tmp_path / 'a.csv'), str(tmp_path / 'b.csv')])
