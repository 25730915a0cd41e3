"""Paths in object stores behave as `pathlib.Path`, and requests that fail are repeated or explained."""

import logging
import os
import pathlib
import subprocess
import sys
import time

import pytest

from t5x_lite import errors
from t5x_lite.storage import files
from t5x_lite.storage import object_store


def _write_tree(root):
  for name in ('a/b.txt', 'a/c/d.txt', 'a/c/e.json', 'f.txt'):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f'text of {name}\nline 2\n')


def _facts(root):
  """Return what the methods of a path say of a tree of files."""
  with (root / 'f.txt').open(encoding='utf-8', errors='replace', newline='\n') as f:
    lines = list(f)

  def relative(paths):
    return sorted(str(path.relative_to(root)) for path in paths)

  return {
    'iterdir': relative(root.iterdir()),
    'glob': relative(root.glob('a/*')),
    'star': relative(root.glob('*/*.txt')),
    'rglob': relative(path for path in root.rglob('*.txt')),
    'kinds': [
      (path.exists(), path.is_file(), path.is_dir(), path.is_symlink())
      for path in (root, root / 'a', root / 'f.txt', root / 'none', root / 'a/b.txt', root / 'a/b')
    ],
    'text': (root / 'f.txt').read_text(),
    'size': (root / 'f.txt').stat().st_size,
    'lines': lines,
    'name': (root / 'a/c/e.json').suffix,
    'parent': relative([(root / 'a/c/e.json').parent]),
  }


def test_methods_are_those_of_pathlib(store, tmp_path):
  root = files.path(store.root)
  _write_tree(root)
  _write_tree(tmp_path)
  assert _facts(root) == _facts(tmp_path)
  assert str(root / 'a') == f'{store.root}/a' and os.fspath(root.parent / 'x').startswith(
    store.root.rpartition('/')[0]
  )
  assert root.absolute() == root == files.path(str(root)) and files.path(root) is root
  with (root / 'f.txt').open('rb') as f:
    assert f.seek(-7, os.SEEK_END) and f.read() == b'line 2\n'
  for missing in (
    (root / 'none').read_bytes,
    (root / 'none').stat,
    (root / 'none').unlink,
    lambda: list((root / 'none').iterdir()),
  ):
    with pytest.raises(FileNotFoundError, match='none'):
      missing()
  (root / 'none').unlink(missing_ok=True)
  with pytest.raises(ValueError, match='`files.write` writes objects'):
    (root / 'f.txt').open('w')
  version = (root / 'f.txt').version()
  (root / 'f.txt').write_text('other')
  assert (root / 'f.txt').version() != version
  files.remove_tree(root / 'a')
  assert store.names() == ['f.txt']


@pytest.mark.parametrize(
  'path, message',
  [
    ('s3://', "must be s3://BUCKET/NAME without '..'"),
    ('az://bucket/x', 'gs:// or s3://, got'),
    ('foo://bucket/x', 'gs:// or s3://, got'),
  ],
)
def test_invalid_paths(path, message):
  with pytest.raises(errors.ConfigError, match=message):
    files.path(path).read_bytes()


def test_a_missing_bucket_and_missing_rights(s3_store):
  with pytest.raises(FileNotFoundError, match='there is no bucket'):
    files.path('s3://no-such-bucket/x').read_bytes()
  with (
    s3_store.proxy.fault(status=403),
    pytest.raises(PermissionError, match='S3 denies the access'),
  ):
    files.path(s3_store.root + '/x').read_bytes()


def test_missing_credentials(s3_store, monkeypatch, tmp_path):
  for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
    monkeypatch.delenv(name)
  monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
  monkeypatch.setenv('HOME', str(tmp_path))
  with pytest.raises(errors.ConfigError, match='S3 needs credentials for .*AWS_ACCESS_KEY_ID'):
    files.path(s3_store.root + '/x').read_bytes()


@pytest.mark.parametrize('scheme, package', [('gs', 'gcsfs'), ('s3', 's3fs')])
def test_a_missing_extra(monkeypatch, scheme, package):
  object_store.connection.cache_clear()
  monkeypatch.setattr(object_store.fsspec, 'filesystem', _missing(package))
  monkeypatch.setattr(logging.getLogger('gcsfs'), 'level', logging.DEBUG)  # as by --logger_levels
  with pytest.raises(
    errors.ConfigError, match=rf'begins with {scheme}:// needs {package}, .*(\[|{package}>=2025)'
  ):
    files.path(f'{scheme}://bucket/x').read_bytes()
  assert logging.getLogger('gcsfs').level == logging.DEBUG


def _missing(package):
  def filesystem(*args, **kwargs):
    raise ImportError(f'Install {package}')

  return filesystem


def test_requests_are_repeated_for_a_limited_time(s3_store, monkeypatch, caplog):
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.02)
  path = files.path(s3_store.root) / 'x'
  with s3_store.proxy.fault(method='PUT', status=503, times=4):
    path.write_bytes(b'1')
  assert path.read_bytes() == b'1' and caplog.text.count('Trying again for up to') == 1
  monkeypatch.setattr(object_store, '_LEAST_SECONDS', 0.2)
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 1.0)
  start = time.monotonic()
  with (
    s3_store.proxy.fault(status=500),
    pytest.raises(object_store.StoreUnavailableError, match='did not answer for 1 s'),
  ):
    path.read_bytes()
  assert time.monotonic() - start < 4
  assert path.read_bytes() == b'1'


def test_a_full_local_disk_is_not_a_fault_of_the_store(s3_store):
  path = files.path(s3_store.root) / 'x'

  def full(filesystem, name):
    raise OSError(28, 'No space left on device', '/tmp/x')

  start = time.monotonic()
  with pytest.raises(OSError, match='No space left'):
    path._call(full)
  assert time.monotonic() - start < 1


def test_local_paths_need_no_library_of_stores(tmp_path):
  program = (
    f'import sys; from t5x_lite import files, checkpoints, summaries; '
    f"files.write({str(tmp_path / 'x')!r}, 'a'); "
    'from t5x_lite.apps import train; train.train; from t5x_lite.checkpoints import array_io; '
    'from t5x_lite.checkpoints.locks import lock; from t5x_lite.checkpoints.saving import manager; '
    "print({'fsspec', 'gcsfs', 's3fs', 't5x_lite.storage.object_store', 'huggingface_hub'} & set(sys.modules))"
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    check=True,
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[2],
  )
  assert done.stdout == 'set()\n'
