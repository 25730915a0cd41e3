"""Files that are not lines of text are errors, whose remedies work."""

import bz2
import gzip
import importlib.util
import json
import lzma
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from t5x_lite import data
from t5x_lite import errors
from t5x_lite.data.files import records
from t5x_lite.data.text import sources as text_sources

_ROWS = [{'inputs': 'a', 'targets': 'b', 'id': 1}, {'inputs': 'ö, d', 'targets': 'e', 'id': 2}]
_LINES = ''.join(json.dumps(row) + '\n' for row in _ROWS).encode()
_TEXT = 'a\nö, d\n'


def _file(tmp_path, content, name):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return path


def _open(path, **options):
  cfg = data.TextFileConfig(
    path=str(path), task_feature_lengths={'inputs': 12, 'targets': 8}, batch_size=4, **options
  )
  vocabulary = data.ByteVocabulary(extra_ids=9)
  return text_sources.TextSource(
    cfg, 'encoder_decoder', vocabulary, vocabulary, needs_targets=False
  )


def _inputs(source):
  return [source.prepare(record).fields['inputs_pretokenized'] for record in source.records()]


def _follow(command, folder):
  """Run the command of a message in a folder, by this Python."""
  program = command.replace('python -c', f'{sys.executable} -c')
  subprocess.run(program, shell=True, check=True, cwd=folder, stdin=subprocess.DEVNULL)


_CONTENTS = {
  'in.jsonl.gz': gzip.compress(_LINES),
  'wrong_suffix.jsonl': gzip.compress(_LINES),
  'in.txt.gz': gzip.compress(_TEXT.encode()),
  'in.gz': gzip.compress(_TEXT.encode()),
  'in.jsonl.bz2': bz2.compress(_LINES),
  'in.jsonl.xz': lzma.compress(_LINES),
  'utf16.txt': _TEXT.encode('utf-16'),
  'utf16be.txt': b'\xfe\xff' + _TEXT.encode('utf-16-be'),
  'utf32.txt': _TEXT.encode('utf-32'),
  'in.csv': b'\xef\xbb\xbfinputs,targets\r\na,b\r\n"\xc3\xb6, d",e\r\n',
  'IN.TSV': 'inputs\ttargets\na\tb\nö, d\te\n'.encode(),
  'in.psv': 'inputs|targets\na|b\nö, d|e\n'.encode(),
  'array.json': json.dumps(_ROWS, indent=1).encode(),
  'one_line.jsonl': json.dumps(_ROWS).encode(),
  'array.jsonl': ('[' + ',\n'.join(map(json.dumps, _ROWS)) + ']\n').encode(),
}


@pytest.mark.parametrize('name', _CONTENTS)
def test_the_remedy_gives_the_inputs(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_bytes(_CONTENTS[name])
  with pytest.raises((errors.DataError, errors.ConfigError), match='Convert it: `') as caught:
    _open(name)
  (command,) = re.findall('`(.*)`', str(caught.value))
  tool = command.split()[0]
  if tool != 'python' and shutil.which(tool) is None:
    pytest.skip(f'{tool} is not installed')
  _follow(command, tmp_path)
  (written,) = [path for path in tmp_path.iterdir() if path.name != name]
  file_format = 'jsonl' if name == 'wrong_suffix.jsonl' else 'auto'
  assert _inputs(_open(written.name, file_format=file_format)) == ['a', 'ö, d']


@pytest.mark.skipif(importlib.util.find_spec('pyarrow') is None, reason='needs pyarrow')
@pytest.mark.parametrize('kind', ['parquet', 'feather'])
def test_tables_of_pandas(tmp_path, monkeypatch, kind):
  pandas = pytest.importorskip('pandas')
  monkeypatch.chdir(tmp_path)
  getattr(pandas.DataFrame(_ROWS), f'to_{kind}')(f'in.{kind}')
  for options in ({}, {'file_format': 'text'}, {'file_format': 'jsonl'}):
    with pytest.raises(errors.DataError, match='table. Convert it: `') as caught:
      _open(f'in.{kind}', **options)
  (command,) = re.findall('`(.*)`', str(caught.value))
  _follow(command, tmp_path)
  assert _inputs(_open('in.jsonl')) == ['a', 'ö, d']


def _zip(path):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('a', 'b')
  return path.read_bytes()


@pytest.mark.parametrize(
  'name, content, what',
  [
    ('in.jsonl.zst', b'\x28\xb5\x2f\xfdxx', 'compressed by Zstandard'),
    ('in.arrow', b'ARROW1\0\0', 'an Arrow or Feather table'),
    ('in.stream', b'\xff\xff\xff\xff\x10\0\0\0', 'a binary file'),
    ('in.tfrecord', b'\x10\0\0\0\0\0\0\0abcd', 'a binary file'),
    ('in.txt', 'plain\n'.encode('utf-16-le'), 'text in another encoding'),
    ('in.txt', b'text\n\0\0\0\n', 'a binary file'),
    ('in.html', b'<p>a</p>\n', 'an HTML or XML document'),
    ('in.txt', b'\n<!DOCTYPE html>\n<p>a', 'an HTML or XML document'),
    ('in.pdf', b'%PDF-1.7\n%\xe2\xe3\xcf\xd3\n', 'a PDF document'),
  ],
)
def test_other_formats_are_errors(tmp_path, name, content, what):
  path = _file(tmp_path, content, name)
  with pytest.raises((errors.DataError, errors.ConfigError), match=f'but it is .*{what}') as caught:
    _open(path)
  assert 'UTF-8' in str(caught.value) or '`' in str(caught.value)


@pytest.mark.parametrize('word', ['ORC', 'PAR1', 'BZh9', 'ARROW1', '%PDF-1.7', 'PK', 'ORC ö'])
def test_a_text_may_begin_like_another_format(tmp_path, word):
  path = _file(tmp_path, f'{word}\nö\n' * 2000, 'in.txt')
  assert _inputs(_open(path))[:2] == [word, 'ö']


def test_an_archive_and_a_spreadsheet_are_errors(tmp_path):
  path = tmp_path / 'in.xlsx'
  _zip(path)
  with pytest.raises(errors.DataError, match='ZIP archive, such as a spreadsheet'):
    _open(path)


@pytest.mark.parametrize('name', ['in.csv', 'in.html'])
def test_lines_of_a_table_are_inputs_if_they_are_asked_for(tmp_path, name):
  path = _file(tmp_path, 'x,y\n1,2\n', name)
  with pytest.raises(errors.ConfigError, match='or pass --input_format=text to use each line'):
    _open(path)
  assert _inputs(_open(path, file_format='text')) == ['x,y', '1,2']


def test_files_of_records_have_the_same_message(tmp_path):
  path = _file(tmp_path, _CONTENTS['utf16.txt'], 'utf16.txt')
  with pytest.raises(errors.DataError, match='must be JSON lines in UTF-8, but it is '):
    records.JsonLines([str(path)])
  task = data.file_task(
    name='packed', splits={'test': str(path)}, format='jsonl', vocabulary=data.ByteVocabulary(9)
  )
  with pytest.raises(errors.DataError, match='Convert it: `'):
    task.table('test', {'inputs': 8, 'targets': 8})
