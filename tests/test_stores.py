"""Object stores for tests behave as the real ones do, and each fault of their proxies is seen by clients."""

from concurrent import futures
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import processes
from tests import stores

_OTHER_PROCESS = """
import json, sys, tensorstore
kv = tensorstore.KvStore.open(json.loads(sys.argv[1])).result()
absent = kv.read('missing').result().stamp.generation
print('created' if kv.write('lease', b'other', if_equal=absent).result().generation else 'exists')
"""
_BODY = bytes(range(256)) * 64 + b'\r\n--\r\n\x85\x0b'


def _filesystem(store):
  """Returns fsspec's file system of the store, which keeps no listings."""
  import fsspec

  return fsspec.filesystem(store.root.partition(':')[0], use_listings_cache=False)


def _kvstore(store, path=''):
  """Returns TensorStore's view of the store."""
  import tensorstore

  return tensorstore.KvStore.open(store.spec(path)).result()


def _absent(kv):
  """Returns the generation of a missing object."""
  return kv.read('missing').result().stamp.generation


def _target(store, name):
  """Returns the path of an object's download."""
  return f'/{store.bucket}/{store.prefix}{name}'


def _request(store, method, path, body=None):
  """Returns status and body of the answer to one request, without retries."""
  connection = http.client.HTTPConnection(store.proxy.url.removeprefix('http://'), timeout=30)
  try:
    connection.request(
      method, path, body, stores.SIGNED | {'Content-Type': 'application/octet-stream'}
    )
    answer = connection.getresponse()
    return answer.status, answer.read()
  finally:
    connection.close()


def _get(store, name):
  """Returns status and body of a download."""
  return _request(store, 'GET', _target(store, name))


# ----------------------------------------------------------------------------------------------------------------------
# As real stores


def test_fsspec(store):
  fs = _filesystem(store)
  for size in (0, 5, len(_BODY), 20_000_000):
    body = (_BODY * (size // len(_BODY) + 1))[:size]
    fs.pipe_file(f'{store.root}/a b/{size}', body)
    assert fs.cat_file(f'{store.root}/a b/{size}') == body
  assert fs.cat_file(f'{store.root}/a b/{len(_BODY)}', start=-7) == _BODY[-7:]
  assert store.names() == ['a b/0', f'a b/{len(_BODY)}', 'a b/20000000', 'a b/5']
  assert [entry.rpartition('/')[2] for entry in fs.ls(store.root)] == ['a b']
  fs.mv(f'{store.root}/a b/5', f'{store.root}/c')
  fs.rm(f'{store.root}/a b', recursive=True)
  assert store.names() == ['c'] and not fs.exists(f'{store.root}/a b')
  with pytest.raises(FileNotFoundError):
    fs.cat_file(f'{store.root}/a b/5')


def test_epath(store):
  from etils import epath

  path = epath.Path(store.root) / 'folder' / 'file.txt'
  path.write_text('text')
  assert path.read_text() == 'text' and path.parent.is_dir() and [*path.parent.iterdir()] == [path]
  path.unlink()
  assert not path.exists()


def test_a_new_store_is_empty(store):
  assert not store.names() and not store.proxy.requests and not store.proxy.faults


def test_tensorstore(store):
  kv = _kvstore(store, 'folder/')
  for key, body in {'a': _BODY, 'empty': b'', 'b/c d': b'x' * 10_000_000}.items():
    kv.write(key, body).result()
    assert kv.read(key).result().value == body
  assert sorted(kv.list().result()) == [b'a', b'b/c d', b'empty']
  assert store.names() == ['folder/a', 'folder/b/c d', 'folder/empty']
  kv.delete_range(type(kv).KeyRange('b', 'c')).result()
  assert sorted(kv.list().result()) == [b'a', b'empty']


def test_tensorstore_arrays(store):
  import tensorstore

  array = np.arange(600_000, dtype=np.float32).reshape(600, 1000)
  for kvstore in (
    store.spec('zarr/'),
    {'driver': 'ocdbt', 'base': store.spec('ocdbt/'), 'path': 'array/'},
  ):
    spec = {
      'driver': 'zarr3',
      'kvstore': kvstore,
      'metadata': {'shape': array.shape, 'data_type': 'float32'},
    }
    tensorstore.open(spec, create=True).result().write(array).result()
    read = tensorstore.open({'driver': 'zarr3', 'kvstore': kvstore}).result()
    np.testing.assert_array_equal(read.read().result(), array)
    np.testing.assert_array_equal(read[7:9, 995:].read().result(), array[7:9, -5:])


def test_conditions(store):
  kv = _kvstore(store)
  absent = _absent(kv)
  first = kv.write('lease', b'1', if_equal=absent).result()
  second = kv.write('lease', b'2', if_equal=absent).result()
  assert first.generation != second.generation and kv.read('lease').result().value == b'1'
  third = kv.write('lease', b'3', if_equal=first.generation).result()
  assert kv.read('lease').result().stamp.generation == third.generation
  kv.write('lease', b'4', if_equal=first.generation).result()
  assert kv.write('lease', None, if_equal=first.generation).result() != third
  assert kv.read('lease').result().value == b'3'
  kv.write('lease', None, if_equal=third.generation).result()
  assert kv.read('lease').result().state == 'missing'
  # S3 is asked by a HEAD first.
  assert store.proxy.count(operation='write|delete|stat', status=412) == 3
  stale = subprocess.run(
    [sys.executable, '-c', _OTHER_PROCESS, json.dumps(store.spec())],
    env=os.environ | store.env,
    capture_output=True,
    text=True,
    check=True,
    timeout=60,
  ).stdout
  assert stale == 'created\n' and kv.read('lease').result().value == b'other'


def test_read_of_an_unchanged_object_is_answered_304(store):
  kv = _kvstore(store)
  generation = kv.write('a', b'1').result().generation
  assert kv.read('a', if_not_equal=generation).result().state == 'unspecified'
  assert store.proxy.count(operation='read', status=304) == 1


def test_one_of_many_wins(store):
  """Conditional writes at the same time: one succeeds."""
  kv, fs = _kvstore(store), _filesystem(store)

  def _write(condition):
    return lambda value: kv.write('lease', b'%d' % value, if_equal=condition).result().generation

  def _create(value):
    try:
      fs.pipe_file(f'{store.root}/created', b'%d' % value, mode='create')
    except FileExistsError:
      return None
    return kv.read('created').result().stamp.generation

  with futures.ThreadPoolExecutor(8) as pool:
    for _ in range(5):
      kv.write('lease', None).result()
      kv.write('created', None).result()
      absent = kv.read('lease').result().stamp.generation
      for name, write in (('lease', _write(absent)), ('lease', None), ('created', _create)):
        write = write or _write(kv.read('lease').result().stamp.generation)
        stamps = [*pool.map(write, range(10, 18))]
        read = kv.read(name).result()
        assert [10 + i for i, stamp in enumerate(stamps) if stamp == read.stamp.generation] == [
          int(read.value)
        ]


def test_listing_of_many(store):
  fs = _filesystem(store)
  fs.pipe({f'{store.root}/{i:04}': b'' for i in range(1100)})
  assert (
    store.names()
    == [f'{i:04}' for i in range(1100)]
    == [name[-4:] for name in fs.ls(store.root, detail=False)]
  )


# ----------------------------------------------------------------------------------------------------------------------
# Faults


def _put(store, name, body=_BODY):
  """Writes an object by one request without retries and returns the status."""
  path, method = _target(store, name), 'PUT'
  if store.kind == 'gcs':
    path = f'/upload/storage/v1/b/{store.bucket}/o?uploadType=media&name={store.prefix}{name}'
    method = 'POST'
  return _request(store, method, path, body)[0]


def test_status(store):
  kv = _kvstore(store)
  with store.proxy.fault(status=503, operation='write', name='/a$', times=2) as unavailable:
    kv.write('a', b'1').result()
    kv.write('b', b'2').result()
    assert unavailable.hits == 2
  assert store.names() == ['a', 'b']
  assert store.proxy.count(operation='write', name='a', status=503) == 2
  assert store.proxy.count(operation='write', name='a', status=200) == 1
  with store.proxy.fault(status=429, method='GET', skip=1):
    assert [_get(store, 'a')[0] for _ in range(3)] == [200, 429, 429]
  assert _get(store, 'a') == (200, b'1')


def test_fsspec_repeats(store):
  fs = _filesystem(store)
  with store.proxy.fault(status=503, operation='write', times=1) as unavailable:
    fs.pipe_file(f'{store.root}/a', _BODY)
  assert unavailable.hits == 1 and fs.cat_file(f'{store.root}/a') == _BODY


def test_delay(store):
  start = time.monotonic()
  with store.proxy.fault(delay=0.3, path=f'{store.prefix}a'):
    assert _put(store, 'b') == 200 and time.monotonic() - start < 0.3
    assert _put(store, 'a') == 200
  assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize('size', [1_000, 100_000_000])
def test_cut_upload(store, size):
  body = b'x' * size
  with store.proxy.fault(cut_upload=size // 2, operation='write', times=1) as cut:
    with pytest.raises((http.client.HTTPException, ConnectionError)):
      _put(store, 'a', body)
    assert cut.hits == 1 and not store.names()
    assert _put(store, 'a', body) == 200
  assert store.names() == ['a']
  assert [request.status for request in store.proxy.requests] == [None, 200]


def test_client_that_dies_in_an_upload(store):
  """Part of a body is never stored."""
  client = socket.create_connection(('127.0.0.1', int(store.proxy.url.rpartition(':')[2])))
  target = f'/upload/storage/v1/b/{store.bucket}/o?uploadType=media&name={store.prefix}a'
  line = f'POST {target}' if store.kind == 'gcs' else f'PUT {_target(store, "a")}'
  client.sendall(f'{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\npart'.encode())
  client.close()
  assert _put(store, 'b') == 200 and store.names() == ['b']


def test_cut_download(store):
  assert _put(store, 'a') == 200
  with store.proxy.fault(cut_download=100, operation='read', times=1):
    with pytest.raises(http.client.IncompleteRead) as error:
      _get(store, 'a')
  assert error.value.partial == _BODY[:100]
  with store.proxy.fault(cut_download=100, operation='read', times=1) as cut:
    assert _kvstore(store).read('a').result().value == _BODY
  assert cut.hits == 1


def test_lose_answer(store):
  with store.proxy.fault(lose_answer=True, operation='write', times=1):
    with pytest.raises((http.client.HTTPException, ConnectionError)):
      _put(store, 'a')
  assert store.names() == ['a']


def test_lost_answer_of_a_conditional_write(store):
  """TensorStore repeats the request, finds its own object, and reports that the condition was not met."""
  kv = _kvstore(store)
  with store.proxy.fault(lose_answer=True, operation='write', times=1):
    assert not kv.write('lease', b'mine', if_equal=_absent(kv)).result().generation
  assert kv.read('lease').result().value == b'mine'


def test_unreachable(store):
  with store.proxy.fault(unreachable=True) as unreachable:
    for _ in range(3):
      with pytest.raises((http.client.HTTPException, ConnectionError)):
        _put(store, 'a')
    assert unreachable.hits == 3
  assert not store.names() and _put(store, 'a') == 200


def test_listing_lag(store):
  fs, kv = _filesystem(store), _kvstore(store)
  with store.proxy.fault(listing_lag=2.0):
    fs.pipe_file(f'{store.root}/old/a', b'')
    assert not kv.list().result() and not fs.exists(f'{store.root}/old')
    time.sleep(2.0)
    fs.pipe_file(f'{store.root}/old/b c', b'')
    fs.pipe_file(f'{store.root}/new/c', b'')
    assert kv.list().result() == [b'old/a'] and kv.read('old/b c').result().state == 'value'
    assert [path.rpartition('/')[2] for path in fs.ls(store.root)] == ['old']
    assert store.names() == ['new/c', 'old/a', 'old/b c']
  assert len(kv.list().result()) == 3


def test_faults_end_with_the_store(monkeypatch):
  for _ in range(2):
    with stores.opened('gcs', monkeypatch) as store:
      assert _put(store, 'a') == 200
      store.proxy.fault(status=500)
      assert _put(store, 'a') == 500


@pytest.mark.parametrize('kind', stores.KINDS)
def test_skipped_only_without_the_packages(kind, monkeypatch):
  monkeypatch.setitem(stores._PACKAGES, kind, (*stores._PACKAGES[kind], 'no_such_package'))
  with pytest.raises(pytest.skip.Exception, match='not installed, see .*: no_such_package$'):
    with stores.opened(kind, monkeypatch):
      pass


def test_emulators_end_when_the_tests_are_killed(gcs_store, s3_store):
  del gcs_store, s3_store  # their packages are installed
  started = processes.start(
    """
      import pytest
      from tests import stores
      proxies = [stores._proxy(kind) for kind in stores.KINDS]
      print(*(proxy._port for proxy in proxies), flush=True)
      input()
      """,
    stdin=subprocess.PIPE,
  )
  ports = [int(port) for port in started.stdout.readline().split()]
  started.kill()
  started.communicate()
  assert len(ports) == 2
  deadline = time.monotonic() + 20
  while ports and time.monotonic() < deadline:
    time.sleep(0.05)
    with contextlib.suppress(ConnectionError):
      socket.create_connection(('127.0.0.1', ports[0])).close()
      continue
    del ports[0]
  assert not ports
