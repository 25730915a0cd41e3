"""Tasks from a user's own files: equal batches from all formats, chosen and skipped records, bad input."""

import dataclasses
import gzip
import json
import logging
import os
import pathlib

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.batches import feature_lengths
from t5x_lite.data.files import records
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.storage import files
from tests.data import grain_cases as cases
from tests.data.builtin_cases import assert_equal

_ROWS = [
  {'id': i, 'question': f'what,\n"is" {i}?', 'answer': f'a{i}', 'ok': bool(i % 2), 'x': i / 3}
  for i in range(40)
]
_FORMATS = ('jsonl', 'csv', 'tsv', 'parquet', 'arrow', 'folder', 'csv.gz', 'jsonl.gz')


def _csv(rows, separator):
  lines = [separator.join(rows[0])]
  for row in rows:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
    lines.append(separator.join('"' + text.replace('"', '""') + '"' for text in texts))
  return '\r\n'.join(lines).encode()


def _write(folder, kind, rows=_ROWS, name='train'):
  """Writes the rows in a format, and returns the path."""
  path = folder / f'{name}.{kind}'
  plain = kind.removesuffix('.gz')
  if plain == 'jsonl':
    content = ''.join(json.dumps(row) + '\n' for row in rows).encode()
  elif plain in ('csv', 'tsv'):
    content = _csv(rows, {'csv': ',', 'tsv': '\t'}[plain])
  else:
    return _write_columns(path, kind, rows)
  path.write_bytes(gzip.compress(content) if kind.endswith('.gz') else content)
  return str(path)


def _write_columns(path, kind, rows):
  pa = pytest.importorskip('pyarrow')
  import pyarrow.parquet as pq

  table = pa.Table.from_pylist(rows)
  if kind == 'parquet':
    pq.write_table(table, path, row_group_size=7)
    return str(path)
  file = path
  if kind == 'folder':  # as the library datasets saves it
    path.mkdir()
    (path / 'state.json').write_text(json.dumps({'_data_files': [{'filename': 'data.arrow'}]}))
    file = path / 'data.arrow'
  with pa.OSFile(str(file), 'wb') as sink, pa.ipc.new_stream(sink, table.schema) as writer:
    writer.write_table(table, max_chunksize=9)
  return str(path)


def _task(path, tmp_path, **options):
  defaults = dict(
    vocabulary=cases.VOCABULARY, inputs='{question} {ok} {x}', targets='answer', train_file=path
  )
  return data.FileTask(**{**defaults, 'cache_dir': str(tmp_path / 'cache'), **options})


def _cfg(task, **options):
  return cases.make_cfg(
    task, **{'split': 'train', 'batch_size': 8, 'source': 'builtin', 'shuffle': True, **options}
  )


def _texts(task, split):
  table = task.builtin_task().table(split, cases.LENGTHS)
  return [table.texts(i)['targets_pretokenized'] for i in range(len(table))]


@pytest.mark.parametrize('kind', _FORMATS)
def test_all_formats_give_the_same_batches(tmp_path, kind):
  (tmp_path / 'other').mkdir()
  options = {'validation_fraction': 0.3}
  path = _write(tmp_path, kind)
  json_lines = _task(_write(tmp_path / 'other', 'jsonl'), tmp_path, **options)
  task = dataclasses.replace(json_lines, train_file=path, name=None)
  for split in ('train', 'validation'):
    expected = cases.take(cases.open(_cfg(json_lines, split=split, pack=True)), 6)
    found = cases.open(_cfg(task, split=split, pack=True))
    for batch in expected:
      assert_equal(next(found), batch)
  assert task.name == 'train'


def test_a_part_of_the_records_is_for_validation(tmp_path):
  task = _task(_write(tmp_path, 'csv', _ROWS + _ROWS[:9]), tmp_path, validation_fraction=0.25)
  train, validation = _texts(task, 'train'), _texts(task, 'validation')
  assert len(train) + len(validation) == 49 and 4 < len(validation) < 20
  assert not set(train) & set(validation)  # equal records are on one side
  assert _texts(task, 'validation') == validation


def test_bad_records_are_skipped_and_counted(tmp_path, caplog):
  rows = [dict(row) for row in _ROWS]
  for number in (3, 30):
    rows[number]['answer'] = None
  path = _write(tmp_path, 'jsonl', rows)
  task = _task(path, tmp_path, bad_records='skip')
  with caplog.at_level(logging.INFO):
    assert _texts(task, 'train') == [row['answer'] for row in rows if row['answer']]
  assert f"{path}, line 4: the column 'answer' has no value (null)" in caplog.text
  assert '38 records, skipped 2 bad' in caplog.text
  iterator = cases.open(_cfg(task))
  assert iterator.sample_truncation().metrics['data/skipped_records'] == 2
  batches = cases.take(iterator, 2)
  state = iterator.get_state()
  expected = cases.take(iterator, 2)
  again = cases.open(_cfg(dataclasses.replace(task)))
  again.set_state(state)
  for batch in expected:
    assert_equal(next(again), batch)
  assert len(batches) == 2
  with open(path, 'a', encoding='utf-8') as stream:  # also a line that is no object
    stream.write('{"question": "q", "ans\n')
  assert len(_texts(dataclasses.replace(task), 'train')) == 38
  assert 'line 41 must be one JSON object' in caplog.text
  rows[3]['answer'] = 'a3'  # the data of a resumed run must be the same
  _write(tmp_path, 'jsonl', rows)
  with pytest.raises((DataError, ConfigError), match='content'):
    cases.open(_cfg(dataclasses.replace(task))).set_state(state)


def test_metrics_compare_with_all_texts_of_a_list(tmp_path):
  rows = [{'question': 'a', 'answer': ['x', 'y']}, {'question': 'b', 'answer': 'z'}]
  seen = []
  task = _task(
    _write(tmp_path, 'jsonl', rows),
    tmp_path,
    inputs='question',
    metrics=[lambda targets, predictions: seen.append(targets) or {'seen': 1.0}],
  )
  cfg = _cfg(task, shuffle=False)
  (found,) = data.open_eval_tasks(cfg, cases.layout(batch_size=8))
  assert found.targets() == [['x', 'y'], 'z']
  assert _texts(task, 'train') == ['x', 'z']


def test_language_models_have_targets_only(tmp_path):
  task = _task(_write(tmp_path, 'csv'), tmp_path, inputs=None, targets='Q: {question} A: {answer}')
  cfg = _cfg(task, task_feature_lengths={'targets': 64})
  batch = next(
    data.open_train_iterator(cfg, cases.layout(batch_size=8), feature_converter='decoder_only')
  )
  assert cases.VOCABULARY.decode(batch['decoder_target_tokens'][0].tolist()).startswith('Q: what,')


def test_lengths_are_those_of_the_longest_record(tmp_path, caplog):
  rows = [{'question': 'x' * size, 'answer': 'y' * 9} for size in (3, 17, 1030, 1023)]
  task = _task(_write(tmp_path, 'jsonl', rows), tmp_path, inputs='question')
  cfg = _cfg(task, task_feature_lengths=None)
  with caplog.at_level(logging.INFO):
    lengths = feature_lengths.lengths_for_training(cfg)
  assert lengths == {'inputs': 1024, 'targets': 16}  # with the id of the end
  assert (
    'Lengths  inputs 1024 (longest 1031), targets 16 (longest 10); 1 of 4 records are cut'
    in caplog.text
  )


def test_files_in_stores(tmp_path, store):
  expected = _texts(_task(_write(tmp_path, 'jsonl'), tmp_path), 'train')
  for kind in _FORMATS:
    path = pathlib.Path(_write(tmp_path, kind, name='sent'))
    sent = [path]
    if path.is_dir():
      sent = sorted(path.iterdir())
    for file in sent:
      target = f'{store.root}/{file.relative_to(tmp_path)}'
      files.write(files.path(target), file.read_bytes())
    task = _task(f'{store.root}/{path.name}', tmp_path)
    assert _texts(task, 'train') == expected, kind
  with pytest.raises(DataError, match=r'sent\.csv must be the file of one split'):
    _texts(
      _task(f'{store.root}/sent.c*', tmp_path, validation_file=f'{store.root}/sent.csv'), 'train'
    )


# --- Bad input --------------------------------------------------------------------------------------------------------


def _file(name, content):
  """Returns a function that writes a file and returns the options of the task."""

  def write(folder):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return {'train_file': str(path)}

  return write


def _folder(folder):
  (folder / 'x.csv').mkdir()
  return {'train_file': str(folder / 'x.csv')}


def _twice(folder):
  (folder / 'link.csv').symlink_to(folder / 'a.csv')
  (folder / 'a.csv').write_text('question,answer\nq,a\n')
  return {'train_file': str(folder / 'a.csv'), 'validation_file': str(folder / 'link.csv')}


def _pipe(folder):
  os.mkfifo(folder / 'x.csv')
  return {'train_file': str(folder / 'x.csv')}


def _broken_link(folder):
  (folder / 'link.csv').symlink_to(folder / 'none.csv')
  return {'train_file': str(folder / '*.csv')}


def _two_names(folder):
  (folder / 'a.csv').write_text('question,answer\nq,a\n')
  (folder / 'link.csv').symlink_to(folder / 'a.csv')
  return {'train_file': str(folder / '*.csv')}


def _two_forms(folder):
  (folder / 'a.csv').write_text('question,answer\nq,a\n')
  (folder / 'a.jsonl').write_text('{}\n')
  return {'train_file': str(folder / 'a.*')}


def _nested(folder):
  pa = pytest.importorskip('pyarrow')
  import pyarrow.parquet as pq

  table = pa.Table.from_pylist([{'question': 'q', 'answer': {'text': 'a'}}])
  pq.write_table(table, folder / 'a.parquet')
  return {'train_file': str(folder / 'a.parquet')}


_GOOD = 'question,answer\nq,a\n'


@pytest.mark.parametrize(
  'write_fn, options, message',
  [
    (_file('a.csv', 'question,anwser\nq,a\n'), {}, r"a\.csv has no column 'answer'.*mean 'anwser'"),
    (_file('a.csv', 'q,a\nb,c\n'), {}, "no column 'answer'.*name its columns with --columns"),
    (_file('a.csv', ''), {}, 'must begin with the names of its columns, got an empty file'),
    (_file('a.csv', 'question,answer\n'), {}, r'a\.csv must have records, got none'),
    (_file('a.jsonl', '\n'), {}, r'a\.jsonl must have records, got none'),
    (
      _file('a.csv', _GOOD + 'only\n'),
      {},
      r'a\.csv, line 3 must have 2 fields.*--bad_records=skip',
    ),
    (_file('a.csv', _GOOD + 'q,"a\n\n'), {}, 'line 3: the quoted field'),
    (
      _file('a.csv', _GOOD + 'q,\0\n'),
      {},
      r'a\.csv, line 3 must be text, got a NUL byte\. Remove it',
    ),
    (
      _file('a.jsonl', '{"question": "q", "answer": "\0"}\n'),
      {},
      'line 1 must be one JSON object.*Invalid control character',
    ),
    (_file('a.csv', _GOOD.encode('utf-16-le')), {}, 'binary file or text in another encoding'),
    (
      _file('a.csv', 'question,answer\né,a\n'.encode('latin-1')),
      {},
      'line 2 must be UTF-8, .*iconv -f WINDOWS-1252 -t UTF-8.*--bad_records=skip',
    ),
    (_file('a.csv', _GOOD.encode('utf-16')), {}, 'UTF-16'),
    (
      _file('a.jsonl', '{"question": "q", "answer": null}\n'),
      {},
      "line 1: the column 'answer' has no",
    ),
    (
      _file('a.jsonl', '{"question": "q", "answers": "a"}\n'),
      {},
      "no column 'answer'. Did you mean",
    ),
    (_file('a.csv.gz', gzip.compress(_GOOD.encode() * 99)[:-9]), {}, 'complete file of gzip'),
    (_file('a.csv.gz', _GOOD), {}, 'complete file of gzip.*if it is not compressed, remove .gz'),
    (_file('a.csv.gz', b''), {}, 'must begin with the names of its columns, got an empty file'),
    (_file('a.jsonl.gz', b''), {}, r'a\.jsonl\.gz must have records, got none'),
    (_file('a.parquet', b'PAR1 nothing'), {}, 'complete Parquet file'),
    (_file('a.parquet.gz', b''), {}, 'must not be compressed.*gunzip'),
    (_file('a.csv', 'question;answer\nq;a\n'), {}, '--separator is the text between two columns'),
    (_file('a.csv', 'question,answer\rq,a\r'), {}, r"line feed, got only carriage.*tr '\\r' '\\n'"),
    (
      _file('a.csv', 'q,a\rb,c\r'),
      {'inputs': 'x', 'targets': 'y', 'columns': ['x', 'y']},
      'line feed, got only carriage returns',
    ),
    (_file('a.csv', _GOOD.encode('utf-16')), {}, r'-t UTF-8 \S+ > \S+/a\.converted\.csv'),
    (_file('a.json', '[{"question": "q"}]'), {}, 'is a JSON array. Convert it'),
    (
      _file('a.jsonl', '{"question": "q",\n'),
      {},
      'line 1 must be one JSON object.*To leave out such records, set --bad_records=skip',
    ),
    (
      _file('a.csv', 'q,a\nb,c\n'),
      {'inputs': 'q', 'targets': 'a', 'columns': ['q', 'a']},
      'line 1 has the names of the columns, so the file has a header. Remove --columns',
    ),
    (
      _file('a.jsonl', '{"question": 1}\n'),
      {'bad_records': 'skip'},
      r"a\.jsonl must have good records, but all records are bad.*line 1: .*no column 'answer'",
    ),
    (_file('a.csv', _GOOD), {'validation_fraction': 0.999}, 'leaves none. Choose another'),
    (_file('a.dat', _GOOD), {}, 'does not say its format. Set --file_format'),
    (
      _file('a.csv', _GOOD),
      {'inputs': 'say question'},
      'has the columns in braces, e.g. {question}',
    ),
    (
      _file('a.csv', '{question},answer\nq,a\n'),
      {},
      'A template cannot name the column {question}: rename it without braces',
    ),
    (
      _file('a.jsonl', '{"question": ["q", "r"], "answer": "a"}\n'),
      {},
      "line 1: the column 'question' must have a text",
    ),
    (
      _file('a.jsonl', '{"question": "q", "answer": [1, 2]}\n'),
      {},
      "line 1: the column 'answer' must have a list of texts, got 1 in it",
    ),
    (_folder, {}, 'must be a file, or a folder that the library datasets has saved'),
    (
      _folder,
      {'file_format': 'csv'},
      r'x\.csv must be a file of the format csv, got a folder. Name',
    ),
    (_pipe, {}, r'x\.csv must be a file on a disk.*got a pipe.*Write its content to a file'),
    (_broken_link, {}, r"link\.csv' is a link to .*, which does not exist\. Replace the link"),
    (_two_names, {}, r"a\.csv' and .*link\.csv' are one file, so its records would be read twice"),
    (_twice, {}, r'a\.csv must be the file of one split.*--validation_fraction'),
    (_two_forms, {}, 'must have one format, got csv and jsonl'),
    (_nested, {}, "column 'answer' must have texts, numbers.*got the type struct"),
    (lambda folder: {'train_file': str(folder / 'x-*.csv')}, {}, r'no file matches .*x-\*\.csv'),
  ],
)
def test_bad_files(tmp_path, write_fn, options, message):
  options = {'inputs': 'question', **write_fn(tmp_path), **options}
  task = _task(tmp_path=tmp_path, path='', **options)
  with pytest.raises(DataError, match=f'(?s){message}'):
    task.builtin_task().table('train', cases.LENGTHS)


@pytest.mark.parametrize(
  'options, message',
  [
    ({'train_file': None}, 'train_file. must be a file if there is no validation_file'),
    ({'targets': '{answer'}, 'the brace at character 1'),
    ({'inputs': '{{question}}'}, 'must be a text with the name of a column in braces'),
    ({'validation_fraction': 1.5}, 'validation_fraction. must be'),
    ({'validation_fraction': 0.5, 'validation_file': 'b.csv'}, 'None with a validation_file'),
    ({'bad_records': 'ignore'}, 'bad_records. must be one of'),
    ({'file_format': 'xlsx'}, 'file_format. must be one of'),
    ({'columns': ['a', 'a']}, 'different names'),
    ({'cache_dir': 'gs://bucket/cache'}, 'cache_dir. must be a folder of this machine or None'),
    ({'targets': None}, 'targets. must be the name of a column, .* --targets=answer'),
  ],
)
def test_bad_options(tmp_path, options, message):
  with pytest.raises(ConfigError, match=message):
    _task('a.csv', tmp_path, **options)


@pytest.mark.parametrize('separator', ['"', '\n', '§', ',,'])
def test_texts_that_cannot_separate_quoted_fields(tmp_path, separator):
  task = _task(_write(tmp_path, 'csv'), tmp_path, separator=separator)
  with pytest.raises(ConfigError, match='one ASCII character that is no quote'):
    _texts(task, 'train')


@pytest.mark.parametrize('name', ['a b/c d.csv', 'x,y.csv', '[1]/z[2].csv', '{a}.csv', "it's.csv"])
def test_names_of_files(tmp_path, name):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  (tmp_path / name).write_text('question,answer\nq,a\n')
  assert _texts(_task(str(tmp_path / name), tmp_path, inputs='question'), 'train') == ['a']


def test_characters_that_other_programs_take_for_line_breaks(tmp_path):
  text = 'a\u2028b\x85c\x0bd'
  (tmp_path / 'a.csv').write_text(f'question,answer\nq,{text}\n')
  (tmp_path / 'a.jsonl').write_text(
    json.dumps({'question': 'q', 'answer': text}, ensure_ascii=False)
  )
  for name in ('a.csv', 'a.jsonl'):
    assert _texts(_task(str(tmp_path / name), tmp_path, inputs='question'), 'train') == [text]


def test_long_fields(tmp_path):
  text = 'x' * 3_000_000
  (tmp_path / 'a.csv').write_text(f'question,answer\nq,"{text}"\n')
  assert _texts(_task(str(tmp_path / 'a.csv'), tmp_path, inputs='question'), 'train') == [text]


def test_a_start_reads_a_file_once(tmp_path, monkeypatch):
  num_parsed = 0
  parse = records.JsonLines.parse

  def counting(*arguments):
    nonlocal num_parsed
    num_parsed += 1
    return parse(*arguments)

  monkeypatch.setattr(records.JsonLines, 'parse', counting)
  path = _write(tmp_path, 'jsonl')
  options = {'validation_fraction': 0.3, 'bad_records': 'skip'}
  for split in ('train', 'validation', 'train'):
    task = _task(path, tmp_path, **options)  # as gin makes it, once for each dataset
    task.builtin_task().table(split, cases.LENGTHS)
    assert num_parsed == len(_ROWS)
  _write(tmp_path, 'jsonl', _ROWS[:-1])
  assert len(_texts(_task(path, tmp_path, **options), 'train')) < len(_ROWS)
  assert num_parsed > 2 * len(_ROWS) - 2
  # Other options choose other records.
  assert len(_texts(_task(path, tmp_path), 'train')) == len(_ROWS) - 1


def test_a_file_that_changes_during_the_run(tmp_path):
  path = _write(tmp_path, 'csv')
  iterator = cases.open(_cfg(_task(path, tmp_path), pack=False))
  next(iterator)
  content = (tmp_path / 'train.csv').read_bytes()
  (tmp_path / 'train.csv').write_bytes(content.replace(b'a1', b'b1'))
  with pytest.raises(DataError, match='must not change during a run'):
    cases.take(iterator, 5)


def test_a_large_file_is_checked_when_it_is_read(tmp_path, monkeypatch):
  # No option: a file of the real size would make the test slow.
  monkeypatch.setattr('t5x_lite.data.own_files._CHECKED_BYTES', 10)
  rows = [*_ROWS[:30], {**_ROWS[30], 'answer': None}]
  iterator = cases.open(_cfg(_task(_write(tmp_path, 'jsonl', rows), tmp_path), shuffle=False))
  assert len(cases.take(iterator, 3)) == 3
  with pytest.raises(DataError, match="line 31: the column 'answer' has no value"):
    next(iterator)
  assert np.all(iterator.element_spec['decoder_target_tokens'].shape == (8, 12))
