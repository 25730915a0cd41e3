"""Folders and files that are written locally appear in a store completely or not at all."""

import errno

import pytest

from t5x_lite.storage import files
from t5x_lite.storage import uploads


def _write(local, text):
  (local / 'sub').mkdir()
  (local / 'sub/a').write_text(text)
  (local / 'last').write_text(text)


def test_a_folder_replaces_another(store):
  target = files.path(store.root) / 'folder'
  with uploads.uploaded_folder(target, last='last') as local:
    _write(local, '1')
    (local / 'old').write_text('1')
  with uploads.uploaded_folder(target, last='last') as local:
    _write(local, '2')
  assert store.names() == ['folder/last', 'folder/sub/a'] and (target / 'sub/a').read_text() == '2'


def test_the_file_that_makes_a_folder_valid_comes_last(s3_store):
  target = files.path(s3_store.root) / 'folder'
  with s3_store.proxy.fault(operation='write', name='sub/a', status=403):
    with pytest.raises(PermissionError), uploads.uploaded_folder(target, last='last') as local:
      _write(local, '1')
  assert s3_store.names() == [] and s3_store.proxy.count(operation='write', name='folder/last') == 0


def test_a_full_disk_names_the_temporary_file():
  with pytest.raises(OSError) as error, uploads.local_file() as path:
    raise OSError(errno.ENOSPC, 'No space left on device')
  assert error.value.filename == str(path) and not path.exists()
