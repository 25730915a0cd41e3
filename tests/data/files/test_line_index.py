"""Places of lines, chunk by chunk, and the index that is kept next to decompressed files."""

import gzip
import os
import pathlib
import pickle

import numpy as np
import pytest

from t5x_lite.data.files import line_index
from t5x_lite.data.files import opening
from t5x_lite.errors import DataError

_LINES = [b'{"a": "%d"}' % number for number in range(9)]


def _bytes(text):
  return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize('chunk', [1, 2, 5, 1 << 22])
@pytest.mark.parametrize(
  'content', [b'', b'\n', b'a', b'a\r', b'\r\n', b'a\n\nb\r\n', b'ab\r\r\ncd', b'\na\r\n\r\n\n']
)
def test_spans_are_those_of_the_lines(monkeypatch, content, chunk):
  # No option: a file of the real size would make the test slow.
  monkeypatch.setattr(line_index, 'CHUNK', chunk)
  expected = [line.removesuffix(b'\r') for line in content.removesuffix(b'\n').split(b'\n')]
  if not content:
    expected = []
  found = []
  for starts, ends in line_index.line_spans(_bytes(content)):
    found += [content[start:end] for start, end in zip(starts, ends, strict=True)]
  assert found == expected


@pytest.mark.parametrize(
  'content, record',
  [
    (b'a\r\r\n', b'a\r'),
    (b'a\r', b'a'),
    (b'a\n\n\r\n', b'a'),
    (b'\n', b''),
    (b'a \n', b'a '),
    (b'a\rb\n', b'a\rb'),
  ],
)
def test_line_ends_are_no_part_of_a_record(content, record):
  assert line_index.without_line_ends(content) == record


def test_an_index_has_8_bytes_a_record(monkeypatch):
  starts = line_index.joined([np.array([0, 5]), np.array([9])], 20)
  assert starts.tolist() == [0, 5, 9, 20] and starts.nbytes == 8 * 4
  assert line_index.longest(starts) == (2, 11)
  assert line_index.longest(line_index.joined([], 0)) == (0, 0)
  monkeypatch.setattr(line_index, 'CHUNK', 1)
  assert line_index.longest(line_index.joined([np.array([0, 7, 8])], 9)) == (0, 7)


def _write(tmp_path, lines, name='x.jsonl.gz'):
  path = tmp_path / name
  path.write_bytes(gzip.compress(b'\n'.join(lines)))
  return path


def _open(path, tmp_path, **options):
  return opening.open_records([str(path)], cache_dir=str(tmp_path / 'cache'), **options)


def _index(tmp_path):
  (path,) = (tmp_path / 'cache').glob('*.index')
  return path


def test_an_index_is_used_again(tmp_path):
  path = _write(tmp_path, _LINES)
  first = _open(path, tmp_path)
  second = _open(path, tmp_path)
  numbers = range(len(_LINES))
  assert first.read(numbers) == second.read(numbers) == _LINES
  assert first.fingerprint == second.fingerprint
  assert pickle.loads(pickle.dumps(second)).read(numbers) == _LINES
  kept = _index(tmp_path)
  # The third opening reads the index, not the lines.
  index = line_index.load(kept, len(b'\n'.join(_LINES)))
  line_index.keep(kept, index._replace(starts=np.delete(index.starts, 1)))
  assert len(_open(path, tmp_path)) == len(_LINES) - 1
  # One of another form is replaced.
  kept.write_bytes(b'x' * 39)
  assert _open(path, tmp_path).read(numbers) == _LINES and os.path.getsize(kept) > 40
  line_index.keep(kept, index._replace(starts=index.starts[:-1]))
  assert _open(path, tmp_path).read(numbers) == _LINES


def test_openings_with_other_options_have_other_indices(tmp_path):
  table = _write(tmp_path, [b'a;b', b'"x;";y', b'"x,",'], 'x.csv.gz')
  assert len(_open(table, tmp_path, separator=';')) == 2
  assert _open(table, tmp_path).columns == ['a;b']
  lines = _write(tmp_path, [b'{"a": 1}', b'{"a'])
  assert len(_open(lines, tmp_path, checks_lines=False)) == 2
  with pytest.raises(DataError, match='line 2 must be one JSON object'):
    _open(lines, tmp_path)


def test_a_folder_that_cannot_be_written_keeps_no_index(tmp_path):
  path = tmp_path / 'missing' / 'x.index'
  index = line_index.LineIndex(line_index.joined([], 0), b'h' * 32)
  line_index.keep(path, index)
  assert line_index.load(path, 0) is None
  path.parent.mkdir()
  left = pathlib.Path(f'{path}.tmp-0')
  left.write_text('of a killed process', encoding='utf-8')
  line_index.keep(path, index)
  assert line_index.load(path, 0).content_hash == b'h' * 32 and not left.exists()


def test_a_decompressed_file_that_changes_during_the_run(tmp_path):
  path = _write(tmp_path, _LINES)
  records = _open(path, tmp_path)
  (copy,) = (tmp_path / 'cache').glob('*.jsonl')
  content = copy.read_bytes()
  copy.unlink()
  copy.write_bytes(content)  # another process has converted it again
  assert records.read([1]) == _LINES[1:2]
  copy.write_bytes(content.replace(b'1', b'7'))
  with pytest.raises(DataError, match='must not change during a run'):
    records.read([1])
