"""Parquet and Arrow files: types, dictionaries, damaged files, saved folders, and changes during a run."""

import datetime
from decimal import Decimal
import json
import os
import pickle

import pytest

from t5x_lite.data.files import opening
from t5x_lite.errors import DataError

pa = pytest.importorskip('pyarrow')
pq = pytest.importorskip('pyarrow.parquet')

_TABLE = {'q': ['a', 'b', 'c'], 'n': [1, 2, 3]}


def _stream(table=_TABLE):
  sink = pa.BufferOutputStream()
  table = pa.table(table)
  with pa.ipc.new_stream(sink, table.schema) as writer:
    writer.write_table(table, max_chunksize=2)
  return sink.getvalue().to_pybytes()


def _parquet(path, table=_TABLE, **options):
  pq.write_table(pa.table(table), path, **options)
  return str(path)


def _rows(path, tmp_path, file_format='auto', **options):
  records = opening.open_records(
    [str(path)], file_format, cache_dir=str(tmp_path / 'cache'), **options
  )
  return records.read(range(len(records)))


@pytest.mark.parametrize(
  'name, file_format', [('x.PARQUET', 'auto'), ('x.pq', 'parquet'), ('x', 'parquet')]
)
def test_the_format_does_not_depend_on_the_name_alone(tmp_path, name, file_format):
  path = _parquet(tmp_path / name)
  assert _rows(path, tmp_path, file_format)[2] == {'q': 'c', 'n': 3}


def test_each_group_of_rows_may_have_its_dictionary(tmp_path):
  chunks = [pa.array(texts).dictionary_encode() for texts in (['a', 'b'], ['c', 'a'])]
  path = _parquet(tmp_path / 'x.parquet', {'q': pa.chunked_array(chunks)}, row_group_size=2)
  assert [row['q'] for row in _rows(path, tmp_path)] == ['a', 'b', 'c', 'a']


def test_empty_groups_of_rows(tmp_path):
  table = pa.table(_TABLE)
  path = tmp_path / 'x.parquet'
  with pq.ParquetWriter(path, table.schema) as writer:
    for first, last in ((0, 0), (0, 2), (0, 0), (2, 3)):
      writer.write_table(table.slice(first, last - first))
  assert _rows(path, tmp_path) == table.to_pylist()


def test_columns_of_unneeded_types_and_names(tmp_path):
  table = pa.table([pa.array(['a']), pa.array(['x']), pa.array(['y'])], names=['q', 'x', 'x'])
  assert _rows(_parquet(tmp_path / 'x.parquet', table), tmp_path, needed={'q'}) == [{'q': 'a'}]
  with pytest.raises(DataError, match=r"the names of columns must differ, got 'x' twice\. Rename"):
    _rows(tmp_path / 'x.parquet', tmp_path)


def test_columns_of_other_types(tmp_path):
  rows = [{'q': 'a', 'more': {'n': [1, 2]}, 'when': datetime.date(2026, 1, 2), 'size': Decimal(1)}]
  path = _parquet(tmp_path / 'x.parquet', pa.Table.from_pylist(rows))
  # Results can have lists and structures, templates cannot.
  needed = {'needed': {'q', 'more'}}
  assert _rows(path, tmp_path, **needed) == [{'q': 'a', 'more': {'n': [1, 2]}}]
  with pytest.raises(DataError, match="column 'more' must have texts, .* got the type struct"):
    _rows(path, tmp_path, **needed, texts={'q', 'more'})
  # Not even the columns that nothing needs are left out of all.
  with pytest.raises(
    DataError, match=r"x\.parquet, column 'when' .*date32.*--keep_fields=q,more\)\."
  ):
    _rows(path, tmp_path)
  assert _rows(path, tmp_path, needed=set(), texts={'q', 'answer'}) == [{'q': 'a'}]


@pytest.mark.parametrize('kind', ['parquet', 'arrow'])
def test_files_with_their_columns_in_another_order(tmp_path, kind):
  paths = []
  for number, names in enumerate(('qn', 'nq')):
    table = {name: _TABLE[name] for name in names}
    path = tmp_path / f'{number}.{kind}'
    if kind == 'parquet':
      _parquet(path, table)
    else:
      path.write_bytes(_stream(table))
    paths.append(str(path))
  records = opening.open_records(paths, cache_dir=str(tmp_path / 'cache'))
  assert records.read([0, 3]) == [{'q': 'a', 'n': 1}] * 2


def test_converted_files_of_other_columns(tmp_path):
  path = _parquet(tmp_path / 'x.parquet', {'a b': ['1'], 'a': ['2'], 'b': ['3']})
  assert _rows(path, tmp_path, needed={'a', 'b'}) == [{'a': '2', 'b': '3'}]
  assert _rows(path, tmp_path, needed={'a b'}) == [{'a b': '1'}]


def test_types_of_texts_and_numbers(tmp_path):
  columns = {
    'large': pa.array(['x'], pa.large_string()),
    'coded': pa.array([7]).dictionary_encode(),
    'texts': pa.array(['y'], pa.large_string()).dictionary_encode(),
    'half': pa.array([0.5], pa.float32()),
    'none': pa.nulls(1),
    'list': pa.array([['a', 'b']], pa.large_list(pa.string())),
  }
  path = _parquet(tmp_path / 'x.parquet', columns)
  values = {'large': 'x', 'coded': 7, 'texts': 'y', 'half': 0.5, 'none': None, 'list': ['a', 'b']}
  assert _rows(path, tmp_path, needed=set(), texts=set(columns)) == [values]


def test_folders_by_format_and_in_another_process(tmp_path):
  (tmp_path / 'state.json').write_text(json.dumps({'_data_files': [{'filename': 'x.arrow'}]}))
  (tmp_path / 'x.arrow').write_bytes(_stream())
  records = opening.open_records([str(tmp_path)], 'arrow')
  other = pickle.loads(pickle.dumps(records))
  assert other.read([2, 0]) == [{'q': 'c', 'n': 3}, {'q': 'a', 'n': 1}]
  assert other.fingerprint == records.fingerprint


@pytest.mark.parametrize(
  'state, message',
  [
    ('{', 'JSONDecodeError'),
    ('[]', 'TypeError'),
    ('{}', "KeyError: '_data_files'"),
    ('{"_data_files": []}', 'got no files'),
    ('{"_data_files": [{"filename": 3}]}', 'TypeError'),
    (
      '{"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "y"}]}',
      'a choice of rows',
    ),
  ],
)
def test_damaged_folders(tmp_path, state, message):
  (tmp_path / 'state.json').write_text(state)
  with pytest.raises(DataError, match=rf'state\.json must name the Arrow files .*{message}.*Save'):
    opening.open_records([str(tmp_path)])


def test_damaged_files(tmp_path):
  content = _stream()
  damaged = content[: len(content) // 2] + b'\xff' * 16 + content[len(content) // 2 + 16 :]
  for number, bad in enumerate([b'', content[:-9], damaged]):
    path = tmp_path / f'{number}.arrow'
    path.write_bytes(bad)
    with pytest.raises(DataError, match=r'must be a complete Arrow file, got .*[^.]\. Write it'):
      _rows(path, tmp_path)
  path = tmp_path / 'x.parquet'
  content = bytearray((tmp_path / _parquet(path)).read_bytes())
  content[20:50] = b'\xff' * 30
  path.write_bytes(content)
  with pytest.raises(DataError, match=r'x\.parquet must be a complete Parquet file, got'):
    _rows(path, tmp_path)


def test_a_file_that_is_written_in_place_during_the_run(tmp_path):
  path = tmp_path / 'x.arrow'
  path.write_bytes(_stream())
  records = opening.open_records([str(path)])
  os.utime(path, (1, 1))  # the same content
  assert records.read([0]) == [{'q': 'a', 'n': 1}]
  path.write_bytes(_stream({'q': ['a', 'b', 'd'], 'n': [1, 2, 3]}))
  with pytest.raises(DataError, match=r'x\.arrow must not change during a run'):
    records.read([0])
