"""Files are whole or not there, whatever goes wrong while they are written."""

import errno
import os
import pathlib
import re
import shutil
import sys
import threading
import time

import pytest

from t5x_lite import errors
from t5x_lite.storage import files


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
  with store.proxy.fault(operation='write', delay=60) as slow:
    first.append(b'1234\n', at_once=True)
    while not slow.hits:
      time.sleep(0.01)
    first.append(b'5678\n', at_once=True)  # during the request
    assert not store.proxy.count(operation='write', status=200)
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


# What happens to the file between the records -> why records are missing, and the lines of the file afterwards.
_LOSSES = {
  'deleted': (
    lambda path: path.unlink(),
    'was deleted or renamed',
    ['missing one', 'two', 'three'],
  ),
  'folder deleted': (
    lambda path: shutil.rmtree(path.parent),
    'was deleted or renamed',
    ['missing one', 'two', 'three'],
  ),
  'folder renamed': (
    lambda path: path.parent.rename(path.parents[2] / 'old'),
    'was deleted or renamed',
    ['missing one', 'two', 'three'],
  ),
  'renamed': (
    lambda path: path.rename(f'{path}.old'),
    'was deleted or renamed',
    ['missing one', 'two', 'three'],
  ),
  'replaced': (
    lambda path: files.write(path, 'edited\n'),
    'was replaced',
    ['edited', 'missing one', 'two', 'three'],
  ),
  'emptied': (lambda path: path.write_text(''), 'was truncated', ['missing one', 'two', 'three']),
  'cut': (
    lambda path: os.truncate(path, 2),
    'was truncated',
    ['on', 'missing one', 'two', 'three'],
  ),
  'longer': (
    lambda path: path.write_text('one\nof another program\n'),
    '',
    ['one', 'of another program', 'two', 'three'],
  ),
}


def _missing(cause, last):
  assert cause
  return b'missing ' + (last or b'nothing\n')


@pytest.mark.parametrize('name', _LOSSES)
def test_a_new_file_continues_after_a_loss_and_says_what_is_missing(tmp_path, name):
  change, cause, lines = _LOSSES[name]
  path = tmp_path / 'run/train/lines'
  file = files.appended(path, root=tmp_path / 'run', missing_fn=_missing)
  file.append(b'one\n', at_once=True)
  change(path)
  file.append(b'two\n', at_once=True)
  assert (file.take_loss(), file.take_loss()) == (cause, '')
  file.append(b'three\n', at_once=False)
  file.flush()
  file.close()
  assert path.read_text().splitlines() == lines and not file.take_loss()


def test_a_file_with_a_header_continues_in_another_one(tmp_path):
  path = tmp_path / 'events'
  file = files.appended(path, header=b'header ', missing_fn=_missing)
  file.append(b'one ', at_once=True)
  os.truncate(path, 9)
  file.append(b'two ', at_once=True)
  path.with_name('events.1').unlink()
  file.append(b'three ', at_once=True)
  file.close()
  texts = {found.name: found.read_text() for found in tmp_path.iterdir()}
  assert texts == {'events': 'header on', 'events.2': 'header missing two three '}


def test_records_stay_with_a_folder_that_moves(tmp_path):
  root = tmp_path / 'run'
  file = files.appended(root / 'train/lines', root=root, missing_fn=_missing)
  file.append(b'one\n', at_once=True)
  root.rename(tmp_path / 'away')
  file.append(b'two\n', at_once=True)
  (root / 'train').mkdir(parents=True)  # Of another run.
  file.flush()
  assert not list((root / 'train').iterdir())
  assert (tmp_path / 'away/train/lines').read_text() == 'one\ntwo\n'
  (tmp_path / 'away/train/lines').unlink()
  file.append(b'three\n', at_once=True)
  with pytest.raises(FileNotFoundError, match='run'):  # Neither in a new folder nor in another one.
    file.flush()
  shutil.rmtree(root)
  with pytest.raises(FileNotFoundError, match='run'):
    file.flush()
  (tmp_path / 'away').rename(root)
  file.close()
  assert (root / 'train/lines').read_text() == 'missing two\nthree\n'


def test_nothing_is_written_to_another_file_system_with_the_inode_of_the_folder(
  tmp_path, monkeypatch
):
  root = tmp_path / 'run'
  file = files.appended(root / 'lines', root=root, missing_fn=_missing)
  file.append(b'one\n', at_once=True)
  (root / 'lines').unlink()
  stat = os.stat

  def on_another_disk(path, **options):
    found = stat(path, **options)
    if path != root:
      return found
    return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))

  monkeypatch.setattr(os, 'stat', on_another_disk)
  file.append(b'two\n', at_once=True)
  with pytest.raises(FileNotFoundError, match='run'):
    file.flush()
  monkeypatch.undo()
  assert not list(root.iterdir())
  file.close()
  assert (root / 'lines').read_text() == 'missing one\ntwo\n'


def test_files_are_listed_while_another_thread_opens_some(tmp_path):
  opened = []
  stopped = threading.Event()

  def open_files():
    while not stopped.is_set():
      opened.append(files.appended(tmp_path / 'file'))
      del opened[:-200]

  thread = threading.Thread(target=open_files)
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  thread.start()
  try:
    for _ in range(3000):
      assert files.unwritten(tmp_path) == {}
  finally:
    stopped.set()
    thread.join()
    sys.setswitchinterval(interval)


def test_what_is_not_yet_written_is_known_while_another_thread_writes(tmp_path, monkeypatch):
  path = tmp_path / 'lines'
  file = files.appended(path)
  num_bytes = 0
  for number in range(300):
    file.append(b'%099d\n' % number, at_once=False)
    num_bytes += 100
  write = os.write
  monkeypatch.setattr(os, 'write', lambda fd, content: write(fd, content[:4]))
  thread = threading.Thread(target=file.flush)
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    thread.start()
    while thread.is_alive():
      size = path.stat().st_size if path.exists() else 0
      # One piece may be written and still be in the buffer; no record may be written twice.
      assert num_bytes - len(file.unwritten()) >= size - 4
  finally:
    sys.setswitchinterval(interval)
    thread.join()
  file.close()
  assert path.stat().st_size == num_bytes and not file.unwritten()


def test_a_record_that_was_half_written_is_complete_in_the_new_file(tmp_path, monkeypatch):
  write, sizes = os.write, [2, 0]

  def full(fd, content):
    if not sizes:
      return write(fd, content)
    if size := sizes.pop(0):
      return write(fd, content[:size])
    raise OSError(errno.ENOSPC, 'No space left on device')

  path = tmp_path / 'lines'
  file = files.appended(path, missing_fn=_missing)
  file.append(b'one\n', at_once=True)
  monkeypatch.setattr(os, 'write', full)
  file.append(b'two\n', at_once=True)
  assert path.read_text() == 'one\ntw'
  path.unlink()
  file.append(b'three\n', at_once=True)
  assert path.read_text() == 'missing one\ntwo\nthree\n'
  file.close()


@pytest.mark.parametrize('kind', ['link', 'dangling link', 'FIFO', 'device', 'folder'])
def test_only_regular_files_are_opened_for_writing(tmp_path, kind):
  path, other = tmp_path / 'linked/file', tmp_path / 'other'
  (tmp_path / 'folder').mkdir()
  (tmp_path / 'linked').symlink_to('folder')  # A link to a folder is no problem.
  os.close(files.open_regular(path))
  path.unlink()
  other.write_text('of the user')
  make = {
    'link': lambda: path.symlink_to(other),
    'dangling link': lambda: path.symlink_to('nothing'),
    'FIFO': lambda: os.mkfifo(path),
    'device': lambda: path.symlink_to('/dev/null'),
    'folder': path.mkdir,
  }
  make[kind]()
  for write in (
    lambda: files.open_regular(path),
    lambda: files.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC),
    files.appended(path).flush,
  ):
    with pytest.raises((errors.LinkedFileError, IsADirectoryError)) as caught:
      write()
    assert "/file'" in str(caught.value)
  if 'link' in kind:
    assert re.search(
      "must be a regular file, got a link to '.*(other|nothing)'.*Delete the link",
      str(caught.value),
    )
    path.unlink()  # The remedy.
    files.appended(path).flush()
  assert other.read_text() == 'of the user'
