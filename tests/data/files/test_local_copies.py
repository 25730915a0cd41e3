"""Copies of objects on the local disk: one for each version and process, removed with it."""

import collections
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from t5x_lite import errors
from t5x_lite.data.files import local_copies
from t5x_lite.storage import files

_ROOT = pathlib.Path(__file__).parents[3]
_PROGRAM = """
import os, sys
from t5x_lite.data.files import local_copies
print(open(local_copies.local_paths(sys.argv[1:2])[0]).read(), flush=True)
if sys.argv[2] == 'die':
  os.kill(os.getpid(), 9)
"""


def test_a_version_is_copied_once(store, tmp_path):
  name, other = f'{store.root}/a.txt', str(tmp_path / 'local')
  files.write(name, 'one')
  local, unchanged, _ = local_copies.local_paths([name, other, name])
  assert pathlib.Path(local).read_text(encoding='utf-8') == 'one' and unchanged == other
  num_reads = store.proxy.count(operation='read')
  assert (
    local_copies.local_paths([name]) == [local] and store.proxy.count(operation='read') == num_reads
  )
  files.write(name, 'three')
  assert pathlib.Path(local_copies.local_paths([name])[0]).read_text(encoding='utf-8') == 'three'
  with pytest.raises(errors.DataError, match=f"Cannot read '{store.root}/none': No such file"):
    local_copies.local_paths([f'{store.root}/none'])


def test_too_little_space(gcs_store, monkeypatch):
  files.write(f'{gcs_store.root}/big.txt', 'x' * 100)
  monkeypatch.setattr(
    shutil, 'disk_usage', lambda path: collections.namedtuple('Usage', 'free')(99)
  )
  with pytest.raises(
    errors.DataError, match=r'requires a local copy of 100 B, and .* has 99 B left\. Set TMPDIR'
  ):
    local_copies.local_paths([f'{gcs_store.root}/big.txt'])


def test_copies_of_a_killed_process_are_removed(gcs_store, tmp_path):
  files.write(f'{gcs_store.root}/a.txt', 'text')

  def start(how):
    return subprocess.run(
      [sys.executable, '-c', _PROGRAM, f'{gcs_store.root}/a.txt', how],
      cwd=_ROOT,
      text=True,
      env={**os.environ, 'TMPDIR': str(tmp_path)},
      stdout=subprocess.PIPE,
      check=False,
    )

  assert start('die').stdout == 'text\n' and len(list(tmp_path.iterdir())) == 1
  assert start('end').stdout == 'text\n' and not list(tmp_path.iterdir())
