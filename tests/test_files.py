"""Files are whole or not there, whatever goes wrong while they are written."""

import errno
import os
import pathlib
import time

import pytest

from t5x_lite import errors
from t5x_lite import files


def _half_and_full(path):
  path.write_text('half')
  raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize(
  'content', ['grün\n', 'grün\n'.encode(), lambda path: path.write_text('grün\n', 'utf-8')]
)
@pytest.mark.parametrize('durable', [True, False])
def test_content(tmp_path, content, durable, monkeypatch):
  waited, fsync = [], os.fsync
  monkeypatch.setattr(
    os, 'fsync', lambda fd: (waited.append(os.readlink(f'/proc/self/fd/{fd}')), fsync(fd))
  )
  (tmp_path / 'a').write_text('former')
  files.write(tmp_path / 'a', content, durable=durable)
  assert (tmp_path / 'a').read_text('utf-8') == 'grün\n' and os.listdir(tmp_path) == ['a']
  # The content before the name, and the name in its folder after it.
  assert [path.partition('.tmp-')[0] for path in waited] == (
    [f'{tmp_path}/a', str(tmp_path)] if durable else []
  )
  umask = os.umask(0o022)
  os.umask(umask)
  assert (tmp_path / 'a').stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize('step', ['content', 'fsync', 'rename'])
def test_an_error_of_a_full_disk_names_the_file_and_changes_nothing(tmp_path, monkeypatch, step):
  (tmp_path / 'a').write_text('former')
  if step != 'content':

    def full(*args, **kwargs):
      raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(files, step, full)
  with pytest.raises(OSError, match="No space left on device: '[^']*/a'$"):
    files.write(tmp_path / 'a', _half_and_full if step == 'content' else 'new')
  assert (tmp_path / 'a').read_text() == 'former' and os.listdir(tmp_path) == ['a']


def test_names_that_cannot_be_written_and_other_errors(tmp_path):
  (tmp_path / 'folder').mkdir()
  for path in (tmp_path / 'folder', tmp_path / 'none/file'):
    with pytest.raises(OSError) as caught:
      files.write(path, 'text')
    assert caught.value.filename == str(path)
  with pytest.raises(OSError, match="'/elsewhere'"):
    files.write(tmp_path / 'a', lambda path: pathlib.Path('/elsewhere').read_text(encoding='utf-8'))
  with pytest.raises(KeyboardInterrupt):
    files.write(
      tmp_path / 'a',
      lambda path: (path.write_text('half'), (_ for _ in ()).throw(KeyboardInterrupt)),
    )
  with pytest.raises(UnicodeEncodeError, match='surrogates'):
    files.write(tmp_path / 'a', '\ud800')
  assert os.listdir(tmp_path) == ['folder']


def test_appending_does_not_wait_for_a_store_and_each_writer_has_its_own_parts(store, monkeypatch):
  monkeypatch.setattr(files, '_PART_BYTES', 8)
  monkeypatch.setattr(files, '_PART_SECONDS', 0.05)
  name, header = f'{store.root}/a/log.jsonl', b'# \n'
  first = files.appended(name, header=header)
  with store.proxy.fault(operation='write', delay=2) as slow:
    start = time.monotonic()
    first.append(b'1234\n', at_once=True)
    while not slow.hits:
      time.sleep(0.01)
    first.append(b'5678\n', at_once=True)  # during the request
    assert time.monotonic() - start < 2
  files.write(f'{store.root}/a/manifest', b'')  # comes after all that was appended
  first.append(b'abcdefgh\n', at_once=True)
  while files.parts(name)[-1].read_bytes() != header + b'abcdefgh\n':  # without a flush
    time.sleep(0.05)
  first.append(b'left', at_once=False)
  first.close()
  # A listing that is behind shows neither of the parts, and nothing may be written over.
  with store.proxy.fault(operation='list', listing_lag=600):
    second = files.appended(name)
    second.append(b'second', at_once=False)
    second.close()
  content = b''.join(part.read_bytes() for part in files.parts(name))
  assert (
    content.replace(header, b'') == b'1234\n5678\nabcdefgh\nleftsecond'
    and content.count(header) == 3
  )


def test_parts_of_a_file_with_brackets(s3_store):
  name = f'{s3_store.root}/a[1].jsonl'
  for content in (b'1', b'2'):
    part = files.appended(name)
    part.append(content, at_once=True)
    part.close()
  assert b''.join(part.read_bytes() for part in files.parts(name)) == b'12'


@pytest.mark.parametrize(
  'name', ['s3://', 'gs://', 's3:/bucket/a', 'gs:/bucket', 'gs://bucket/a/../b']
)
def test_names_that_are_neither_local_nor_in_a_store(name):
  with pytest.raises(errors.ConfigError, match=r'(s3|gs)://'):
    files.path(name)


def test_a_full_disk_for_temporary_files_is_named(s3_store):
  def full(path):
    raise OSError(errno.ENOSPC, 'No space left on device')

  with pytest.raises(OSError, match="No space left on device: '.*t5x_lite-"):
    files.write(f'{s3_store.root}/a', full)
  assert s3_store.names() == []


def test_a_run_without_its_lease_appends_nothing(s3_store):
  def check():
    raise errors.DirectoryInUseError('lost')

  files.fence(s3_store.root, check)
  lines = files.appended(f'{s3_store.root}/train/metrics.jsonl')
  lines.append(b'1\n', at_once=True)
  files.write(f'{s3_store.root}/predictions', b'2', behind=True)
  for _ in range(2):
    with pytest.raises(errors.DirectoryInUseError, match='lost'):
      files.flush(s3_store.root)
  assert s3_store.names() == []
  files.fence(s3_store.root, None)
  files.flush(s3_store.root)
  assert s3_store.names() == ['predictions', 'train/metrics.jsonl']
  lines.close()


def test_a_broken_link_is_described(tmp_path):
  (tmp_path / 'dangling').symlink_to('missing')
  (tmp_path / 'chain').symlink_to('dangling')
  (tmp_path / 'loop').symlink_to('loop')
  (tmp_path / 'sound').symlink_to(tmp_path)
  target = f'{str(tmp_path / "missing")!r}, which does not exist'
  for name in ('dangling', 'chain'):
    for path in (tmp_path / name, tmp_path / name / 'below'):
      assert files.broken_link(path) == f'{str(tmp_path / name)!r} is a link to {target}'
  assert 'leads back to itself' in files.broken_link(tmp_path / 'loop/below')
  for path in ('sound', 'sound/missing', 'missing'):
    assert files.broken_link(tmp_path / path) is None
  assert files.broken_link('gs://bucket/x') is None and files.broken_link('a\0b') is None
