"""Converted files: killed, concurrent and impossible conversions."""

import gzip
import os
import subprocess
import sys

import pytest

from t5x_lite.data.files import conversion
from t5x_lite.errors import DataError

_PROGRAM = """
import os, sys, time
from t5x_lite.data.files import conversion

def convert(old, new):
  new.write_text('part')
  print('begun', flush=True)
  time.sleep(float(sys.argv[3]))
  new.write_text('all')

print(open(conversion.converted(sys.argv[1], '.csv', convert, cache_dir=sys.argv[2])).read())
"""


def _start(path, cache, seconds):
  return subprocess.Popen(
    [sys.executable, '-c', _PROGRAM, str(path), str(cache), str(seconds)],
    stdout=subprocess.PIPE,
    text=True,
  )


def _results(cache):
  return [name for name in os.listdir(cache) if not name.endswith('.lock')]


def test_one_process_converts_and_others_wait(tmp_path):
  path, cache = tmp_path / 'x', tmp_path / 'cache'
  path.write_text('x')
  killed = _start(path, cache, 60)
  assert killed.stdout.readline() == 'begun\n'
  killed.kill()
  killed.communicate()
  assert len(_results(cache)) == 1  # a part
  first = _start(path, cache, 1)
  assert first.stdout.readline() == 'begun\n'
  assert _start(path, cache, 0).communicate()[0] == 'all\n'  # it has not begun a conversion
  assert first.communicate()[0] == 'all\n'
  (name,) = _results(cache)
  assert name.endswith('.csv')  # the part of the killed process is removed


@pytest.mark.parametrize(
  'content, message',
  [
    (gzip.compress(os.urandom(5000))[:-2000], 'ended before the end-of-stream'),
    (gzip.compress(b'a\n', mtime=0) + b'other', 'Not a gzipped file'),
    (b'plain', 'Not a gzipped file'),
  ],
)
def test_damaged_files_leave_nothing(tmp_path, content, message):
  path = tmp_path / 'x.csv.gz'
  path.write_bytes(content)
  with pytest.raises(DataError, match=rf'x\.csv\.gz must be a complete file of gzip.*{message}'):
    conversion.decompressed([str(path)], '.csv', str(tmp_path / 'cache'))
  assert not _results(tmp_path / 'cache')


def test_a_file_that_changes_while_it_is_converted(tmp_path):
  path = tmp_path / 'x.csv.gz'
  path.write_bytes(b'the first content')

  def convert(local, target):
    target.write_text('of the second content')
    path.write_bytes(b'the second')

  with pytest.raises(DataError, match=r'x\.csv\.gz must not change while it is converted\. Rerun'):
    conversion.converted(str(path), '.csv', convert, cache_dir=str(tmp_path / 'cache'))
  assert not _results(tmp_path / 'cache')


def test_several_members_and_names_in_capitals(tmp_path):
  path = tmp_path / 'X.CSV.GZ'
  path.write_bytes(gzip.compress(b'a\n') + gzip.compress(b'b\n') + b'\0' * 9)
  (copy,) = conversion.decompressed([str(path)], '.csv', str(tmp_path / 'cache'))
  with open(copy, 'rb') as stream:
    assert stream.read() == b'a\nb\n'


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
  path = tmp_path / 'x.csv.gz'
  path.write_bytes(gzip.compress(b'a\n'))
  with pytest.raises(DataError, match=r'cannot be converted in .*x\.csv\.gz: File exists.*--cache'):
    conversion.decompressed([str(path)], '.csv', str(path))
  monkeypatch.setattr(os.path, 'expanduser', str)  # for a user without a home folder
  with pytest.raises(DataError, match='the home folder is unknown. Choose .*--cache_dir'):
    conversion.decompressed([str(path)], '.csv', None)
  with pytest.raises(DataError, match='requires at least .* left. Choose a folder.*--cache_dir'):
    conversion.check_space(tmp_path, 1 << 60, 'x')
