"""Records of tab-separated files: values, and the line of an error."""

import pytest

from t5x_lite import data
from t5x_lite import errors
from t5x_lite.data.files import records
from t5x_lite.storage import files


@pytest.mark.parametrize(
  'content, message',
  [
    (b'a\tb\nc\td\te\n', r'a\.tsv, line 2 must have 2 fields separated by tabs, got 3'),
    (b'a\tb\n\xff\tb\n', r'a\.tsv, line 2 must be UTF-8, got invalid start byte at byte 1'),
  ],
)
def test_read_tsv_names_the_line(tmp_path, content, message):
  path = tmp_path / 'a.tsv'
  path.write_bytes(content)
  with pytest.raises(errors.DataError, match=message):
    data.read_tsv(path)


def test_read_tsv(tmp_path):
  path = tmp_path / 'a.tsv'
  path.write_bytes('\ufeffé\tb\r\n\n"c\td\u2028\n'.encode())
  assert data.read_tsv(path) == [('é', 'b'), ('"c', 'd\u2028')]
  assert data.read_tsv(path, num_fields=2) == data.read_tsv(str(path))
  with pytest.raises(errors.DataError, match="Cannot read '.*none'"):
    data.read_tsv(tmp_path / 'none')


@pytest.mark.parametrize(
  'pattern, found',
  [
    ('run[1]/train.jsonl', ['run[1]/train.jsonl']),
    ('run[1]/*.jsonl', ['run[1]/train.jsonl', 'run[1]/x-1.jsonl']),
    ('run[1]/x-[0-4].jsonl', ['run[1]/x-1.jsonl']),
    ('*/x-[0-4].jsonl', ['run1/x-1.jsonl', 'run[1]/x-1.jsonl']),
    ('run[[]1]/train.jsonl', ['run[1]/train.jsonl']),
    ('[a-z]un1/t[r]ain.jsonl', ['run1/train.jsonl']),
    ('**/part[2].jsonl', ['a\\b/part[2].jsonl']),
    ('a\\b/part[[]2].jsonl', ['a\\b/part[2].jsonl']),
    ('{x}/%20#.jsonl', ['{x}/%20#.jsonl']),
    ('-y/[!a].jsonl', ['-y/[!a].jsonl']),
  ],
)
def test_brackets_are_characters_of_names_that_exist(pattern, found, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in (
    *('run[1]/train.jsonl', 'run1/train.jsonl', 'run[1]/x-1.jsonl', 'run1/x-1.jsonl'),
    *('a\\b/part[2].jsonl', 'a\\b/part2.jsonl', '{x}/%20#.jsonl', '-y/[!a].jsonl', '-y/b.jsonl'),
  ):
    files.make_writable(tmp_path / name.partition('/')[0])
    files.write(tmp_path / name, '{"inputs": "a"}')
  assert records.find_files(pattern, 'x') == found
  assert records.find_files(f'{tmp_path}/{pattern}', 'x') == [
    f'{tmp_path}/{name}' for name in found
  ]
  assert records.JsonLines(records.find_files(pattern, 'x')).read([0]) == [b'{"inputs": "a"}']


def test_files_in_stores(store):
  for name in ('a/train-1.jsonl', 'a/train-0.jsonl', 'a/b/c/train-2.jsonl', 'a/other.jsonl'):
    files.write(f'{store.root}/{name}', f'\n{{"inputs": "{name}"}}\n')
  found = [f'{store.root}/a/train-{number}.jsonl' for number in range(2)]
  assert records.find_files(f'{store.root}/a/train-*.jsonl', 'x') == found
  assert records.find_files(f'{store.root}/?/train-[1].jsonl', 'x') == found[1:]
  assert records.find_files(f'{store.root}/**/train-*.jsonl', 'x') == [
    f'{store.root}/a/b/c/train-2.jsonl',
    *found,
  ]
  files.write(f'{store.root}/a/train-[1].jsonl', '{}')  # Exists by this name.
  assert records.find_files(f'{store.root}/?/train-[1].jsonl', 'x') == [
    f'{store.root}/a/train-[1].jsonl'
  ]
  with pytest.raises(
    errors.DataError, match=f'no file matches .{store.root}/a/train.jsonl.. Write'
  ):
    records.find_files(f'{store.root}/a/train.jsonl', 'x')
  lines = records.JsonLines(found)
  assert (
    lines.read([1]) == [b'{"inputs": "a/train-1.jsonl"}']
    and lines.where(1) == f'{found[1]}, line 2'
  )
  files.write(f'{store.root}/bad.jsonl', '{"inputs": 1}\nx\n')
  with pytest.raises(
    errors.DataError, match=f'{store.root}/bad.jsonl, line 2 must be one JSON object'
  ):
    records.JsonLines([f'{store.root}/bad.jsonl'])
  files.write(f'{store.root}/a.tsv', 'a\tb\r\n')
  assert data.read_tsv(f'{store.root}/a.tsv') == [('a', 'b')]
