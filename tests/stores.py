"""Object stores for tests: emulators of Google Cloud Storage and S3 in processes, each behind a proxy with faults.

Tests use the fixtures `store` (both kinds), `gcs_store` and `s3_store`; `opened(kind, monkeypatch)` gives the same
elsewhere. Each process of tests starts its own emulators once. They end with it, even if it is killed.
"""

import atexit
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import http.client
import http.server
import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any
import urllib.parse
from xml.etree import ElementTree

import pytest

KINDS = ('gcs', 's3')


def mostly(kind: str) -> pytest.MarkDecorator:
  """Return a mark for tests of commands with the fixture `store`: the other kind only in `make test-full`.

  What differs between the kinds is tested by the tests of files, checkpoints and the stores themselves.
  """
  return pytest.mark.parametrize(
    'store',
    [each if each == kind else pytest.param(each, marks=pytest.mark.full) for each in KINDS],
    indirect=True,
  )


_BUCKET = 'bucket'
_PACKAGES = {
  'gcs': ('gcsfs', 'gcp_storage_emulator'),
  's3': ('s3fs', 'moto', 'flask', 'flask_cors'),
}
_PROGRAMS = {
  # At each write the emulator would write the metadata of all objects, which takes 10 ms for 1,000 objects.
  'gcs': 'from gcp_storage_emulator import storage\n'
  'from gcp_storage_emulator.__main__ import main\n'
  'storage.Storage._write_config_to_file = lambda self: None\n'
  'main(["start", "--quiet", "--in-memory", "--host=127.0.0.1", f"--port={port}"])',
  's3': 'from moto.server import main\nmain(["-H", "127.0.0.1", "-p", port])',
}
# An emulator ends when its standard input does, thus also when the tests are killed.
_START = """
import os, sys, threading
port = sys.argv[1]
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
"""
_START_SECONDS = 60
# Part of a body that is read before faults are chosen: a multipart upload to GCS begins with the object's name.
_HEAD_BYTES = 8192
_HOP_BY_HOP = {'connection', 'content-length', 'expect', 'keep-alive', 'transfer-encoding'}
# moto wants a signature and does not check it.
SIGNED = {
  'Authorization': 'AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, '
  'Signature=0'
}
_S3_NAMESPACE = 'http://s3.amazonaws.com/doc/2006-03-01/'


@dataclasses.dataclass
class Request:
  """A request to a store.

  Attributes:
    method: of HTTP.
    path: unquoted, with the query.
    operation: 'read', 'write' (also each part of an upload), 'copy', 'delete', 'list', 'stat' or 'other'.
    name: of the object, the destination of a copy, the prefix of a listing, or the lines of names of a batch.
    query: the query's parameters.
    status: of the answer; None without one.
  """

  method: str
  path: str
  operation: str
  name: str
  query: dict[str, str]
  status: int | None = None


@dataclasses.dataclass(eq=False)
class Fault:
  """A rule of a proxy. As a context manager it ends with its block; `hits` counts the requests that it has changed."""

  proxy: 'Proxy'
  effects: dict[str, Any]
  patterns: dict[str, str]
  times: int | None
  skip: int
  hits: int = 0
  removed: threading.Event = dataclasses.field(default_factory=threading.Event)

  def remove(self) -> None:
    """Removes the rule and ends its delays."""
    self.removed.set()
    with self.proxy.state:
      self.proxy.faults = [fault for fault in self.proxy.faults if fault is not self]

  def applies(self, request: Request) -> bool:
    """Returns whether `request` gets the fault, and counts it."""
    if not all(
      re.search(pattern, getattr(request, name)) for name, pattern in self.patterns.items()
    ):
      return False
    if self.skip:
      self.skip -= 1
      return False
    if self.times is not None and self.hits >= self.times:
      return False
    self.hits += 1
    return True

  def __enter__(self) -> 'Fault':
    return self

  def __exit__(self, *_: object) -> None:
    self.remove()


@dataclasses.dataclass
class _Answer:
  """An answer of a store."""

  status: int
  headers: dict[str, str] = dataclasses.field(default_factory=dict)
  body: bytes = b''


class Proxy:
  """HTTP proxy in front of an emulator, which it gives one request at a time.

  Attributes:
    url: where it listens.
    requests: all requests since the store was opened.
    faults: the current rules.
    state: the lock of both lists.
  """

  def __init__(self, port: int):
    self._port = port
    self._emulator = threading.Lock()
    self._written: dict[str, float] = {}
    self.state = threading.Lock()
    self.requests: list[Request] = []
    self.faults: list[Fault] = []
    proxy = self

    class Handler(http.server.BaseHTTPRequestHandler):
      """Passes each request on."""

      protocol_version = 'HTTP/1.1'
      disable_nagle_algorithm = True

      def _serve(self):
        # Clients that are killed or that give up close connections.
        with contextlib.suppress(ConnectionError):
          proxy._serve(self)

      do_DELETE = do_GET = do_HEAD = do_PATCH = do_POST = do_PUT = _serve

      def handle(self):
        with contextlib.suppress(ConnectionError):
          super().handle()

      def log_message(self, *_):
        pass

    class Server(http.server.ThreadingHTTPServer):
      """Takes as many connections at once as clients have threads."""

      request_queue_size = 128

    server = Server(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{server.server_address[1]}'
    threading.Thread(target=server.serve_forever, daemon=True, name='store proxy').start()

  def fault(
    self,
    *,
    times: int | None = None,
    skip: int = 0,
    method: str = '',
    path: str = '',
    operation: str = '',
    name: str = '',
    **effects: Any,
  ) -> Fault:
    """Adds a rule that stays until it is removed, or used up.

    Args:
      times: number of requests that it changes; None for all.
      skip: number of matching requests that pass before.
      method: regular expression searched in the request's method; `path`, `operation` and `name` likewise.
      path: see `method`.
      operation: see `method`.
      name: see `method`.
      **effects: one or more of `status=503` (answered without asking the store), `delay=seconds` (before the request is
        passed on), `cut_upload=bytes` (connection closed after that many bytes of the request's body),
        `cut_download=bytes` (the same for the answer's body), `lose_answer=True` (connection closed when the store has
        executed the request), `unreachable=True` (connection closed at once), `silent=True` (the request is read and
        never answered; the connection is closed when the rule is removed), and `listing_lag=seconds` (listings lack
        objects written within the last `seconds`).

    Returns:
      The rule.
    """
    unknown = effects.keys() - {
      'status',
      'delay',
      'cut_upload',
      'cut_download',
      'lose_answer',
      'unreachable',
      'silent',
      'listing_lag',
    }
    assert effects and not unknown, unknown
    patterns = {'method': method, 'path': path, 'operation': operation, 'name': name}
    fault = Fault(
      self, effects, {key: pattern for key, pattern in patterns.items() if pattern}, times, skip
    )
    with self.state:
      self.faults = [*self.faults, fault]
    return fault

  def clear(self) -> None:
    """Removes all faults and forgets all requests."""
    for fault in self.faults:
      fault.remove()
    self.requests.clear()
    self._written.clear()

  def count(self, *, status: int | None = None, **patterns: str) -> int:
    """Returns the number of requests whose attributes have matches of `patterns`, and that got `status`, if given."""
    return sum(
      all(re.search(pattern, getattr(request, name)) for name, pattern in patterns.items())
      and status in (None, request.status)
      for request in list(self.requests)
    )

  def _serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
    """Answers one request."""
    headers = handler.headers
    if headers.get('Transfer-Encoding', '').lower() == 'chunked':
      body, length = _read_chunks(handler.rfile), 0
    else:
      length = int(headers.get('Content-Length') or 0)
      body = handler.rfile.read(min(length, _HEAD_BYTES))
      length -= len(body)
    url = urllib.parse.urlsplit(handler.path)
    query = {
      name: values[-1]
      for name, values in urllib.parse.parse_qs(url.query, keep_blank_values=True).items()
    }
    request = Request(handler.command, urllib.parse.unquote(handler.path), 'other', '', query)
    request.operation, request.name = self._classify(request, url.path, headers, body)
    with self.state:
      self.requests.append(request)
      faults = [fault for fault in self.faults if fault.applies(request)]
    effects = {name: value for fault in faults for name, value in fault.effects.items()}
    for fault in faults:
      fault.removed.wait(fault.effects.get('delay', 0))
    if 'unreachable' in effects or 'cut_upload' in effects:
      # Closing with bytes that were not read resets the connection.
      handler.rfile.read(min(length, max(effects.get('cut_upload', 0) - len(body), 0)))
      handler.close_connection = True
      return
    body += handler.rfile.read(length)
    if length and len(body) != int(headers['Content-Length']):
      handler.close_connection = True
      return
    if 'silent' in effects:
      for fault in faults:
        if 'silent' in fault.effects:
          fault.removed.wait()
      handler.close_connection = True
      return
    if 'status' in effects:
      answer = _Answer(effects['status'])
    else:
      with self._emulator:
        sent = {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
        try:
          answer = self._execute(request, handler.path, sent, body)
        except (OSError, http.client.HTTPException) as error:
          answer = _Answer(502, body=f'emulator: {error!r}'.encode())
        if answer.status < 300 and request.operation in ('write', 'copy'):
          self._written[request.name] = time.monotonic()
        if 'listing_lag' in effects and answer.status == 200 and request.operation == 'list':
          answer.body = self._hide(request.name, answer.body, effects['listing_lag'])
    if 'lose_answer' in effects:
      handler.close_connection = True
      return
    request.status = answer.status
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
      if name.lower() not in _HOP_BY_HOP:
        handler.send_header(name, value)
    if answer.status not in (204, 304):
      length = (
        answer.headers.get('Content-Length', 0) if handler.command == 'HEAD' else len(answer.body)
      )
      handler.send_header('Content-Length', str(length))
    handler.end_headers()
    handler.wfile.write(answer.body[: effects.get('cut_download')])
    if 'cut_download' in effects:
      handler.close_connection = True

  def _hide(self, prefix: str, listing: bytes, seconds: float) -> bytes:
    """Returns a listing without the objects written within the last `seconds`, and the folders that have no others."""
    start = time.monotonic() - seconds
    visible = {name for name in self.all_names(prefix) if self._written.get(name, 0) < start}
    return self._filter(
      listing,
      lambda name: any(
        known == name or name.endswith('/') and known.startswith(name) for known in visible
      ),
    )

  def send(
    self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b''
  ) -> _Answer:
    """Returns the emulator's answer, without faults."""
    connection = http.client.HTTPConnection('127.0.0.1', self._port, timeout=_START_SECONDS)
    try:
      connection.request(method, target, body or None, headers or {})
      answer = connection.getresponse()
      return _Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
      connection.close()

  # What differs between stores.

  def reset(self) -> None:
    """Empties the store."""
    raise NotImplementedError

  def all_names(self, prefix: str) -> list[str]:
    """Returns the names of all objects that begin with `prefix`, without faults."""
    raise NotImplementedError

  def _classify(self, request, path, headers, head) -> tuple[str, str]:
    """Returns the operation and the name of a request. `path` is quoted and without query; `head` begins the body."""
    raise NotImplementedError

  def _execute(self, request, target, headers, body) -> _Answer:
    """Returns the answer to a request."""
    return self.send(request.method, target, headers, body)

  def _filter(self, listing, is_visible) -> bytes:
    """Returns a listing with the objects and folders whose names are visible."""
    raise NotImplementedError


class _GcsProxy(Proxy):
  """Adds what the emulator lacks: preconditions, generations of downloads, limits of listings, moves, empty uploads."""

  _OBJECTS = re.compile(
    r'(?:/(?:upload|download))?(?:/storage/v1)?/b/[^/]+/o(?:/(?P<name>[^/]+))?/?'
  )
  _COPY = re.compile(r'/(?:(?:copyTo|rewriteTo)/b/[^/]+|(?P<move>moveTo))/o/(?P<destination>[^/]+)')
  _DOWNLOAD = re.compile(rf'/{_BUCKET}/(?P<name>.+)')

  def __init__(self, port: int):
    super().__init__(port)
    self._uploads: dict[str, str] = {}

  def reset(self):
    self.send('GET', '/wipe')
    self.send(
      'POST',
      '/storage/v1/b',
      {'Content-Type': 'application/json'},
      json.dumps({'name': _BUCKET}).encode(),
    )
    # Deleted objects would be kept for a week.
    answer = self.send(
      'PATCH',
      f'/storage/v1/b/{_BUCKET}',
      {'Content-Type': 'application/json'},
      b'{"softDeletePolicy": {"retentionDurationSeconds": "0"}}',
    )
    assert answer.status == 200, answer

  def all_names(self, prefix):
    listing = self.send(
      'GET', f'/storage/v1/b/{_BUCKET}/o?{urllib.parse.urlencode({"prefix": prefix})}'
    ).body
    return [item['name'] for item in json.loads(listing).get('items', ())]

  def _filter(self, listing, is_visible):
    content = json.loads(listing)
    content['items'] = [item for item in content.get('items', ()) if is_visible(item['name'])]
    content['prefixes'] = [prefix for prefix in content.get('prefixes', ()) if is_visible(prefix)]
    return json.dumps(content).encode()

  def _classify(self, request, path, headers, head):
    if path.startswith('/batch/'):
      names = re.findall(rb'^(\w+) \S*/o/([^\s?]+)', head, re.MULTILINE)
      operation = 'delete' if any(method == b'DELETE' for method, _ in names) else 'other'
      return operation, '\n'.join(urllib.parse.unquote(name.decode()) for _, name in names)
    found = self._OBJECTS.match(path)
    if not found:
      download = self._DOWNLOAD.fullmatch(path)
      return ('read', urllib.parse.unquote(download['name'])) if download else ('other', '')
    name = urllib.parse.unquote(found['name'] or '')
    if copy := self._COPY.search(path):
      return 'copy', urllib.parse.unquote(copy['destination'])
    if path.endswith('/compose'):
      return 'copy', name
    if name:
      is_media = request.query.get('alt') == 'media' or path.startswith('/download/')
      operations = {'GET': 'read' if is_media else 'stat', 'DELETE': 'delete'}
      return operations.get(request.method, 'other'), name
    if request.method == 'GET':
      return 'list', request.query.get('prefix', '')
    name = request.query.get('name') or self._uploads.get(request.query.get('upload_id', ''), '')
    if not name and (in_metadata := re.search(rb'"name":\s*("(?:[^"\\]|\\.)*")', head)):
      name = json.loads(in_metadata[1])
    return 'write', name

  def _metadata(self, name):
    """Returns the metadata of an object; empty if it is missing."""
    answer = self.send('GET', f'/storage/v1/b/{_BUCKET}/o/{urllib.parse.quote(name, safe="")}')
    return json.loads(answer.body) if answer.status == 200 else {}

  def _execute(self, request, target, headers, body):
    query, operation = request.query, request.operation
    is_read = operation == 'read'
    conditions = {'ifGenerationMatch', 'ifGenerationNotMatch'} & query.keys()
    metadata = self._metadata(request.name) if is_read or conditions else {}
    generation = metadata.get('generation', '0')
    if metadata or not is_read:
      if query.get('ifGenerationMatch', generation) != generation:
        return _Answer(412)
      if query.get('ifGenerationNotMatch') == generation:
        return _Answer(304 if is_read else 412)
      if is_read and query.get('generation', generation) != generation:
        return _Answer(404)
    range_name = next((name for name in headers if name.lower() == 'range'), None)
    if is_read and metadata and range_name:
      size = int(metadata['size'])
      first, last = re.fullmatch(r'bytes=(\d*)-(\d*)', headers[range_name]).groups()
      start = int(first) if first else max(size - int(last), 0)
      if start >= size:
        return _Answer(416, {'Content-Range': f'bytes */{size}', 'x-goog-generation': generation})
      end = min(int(last), size - 1) if first and last else size - 1
      headers = {**headers, range_name: f'bytes={start}-{end}'}
    if operation == 'write' and query.get('uploadType') == 'media' and not body:
      # Of an empty body the emulator takes no length.
      target = target.replace('uploadType=media', 'uploadType=multipart')
      headers = {'Content-Type': 'multipart/related; boundary=part'}
      body = b'--part\r\nContent-Type: application/json\r\n\r\n{}\r\n--part\r\n\r\n\r\n--part--\r\n'
    if operation == 'copy' and (move := self._COPY.search(target)) and move['move']:
      answer = self.send('POST', target.replace('/moveTo/', f'/rewriteTo/b/{_BUCKET}/'))
      if answer.status == 200:
        self.send('DELETE', target[: move.start()])
        answer.body = json.dumps(json.loads(answer.body)['resource']).encode()
      return answer
    answer = self.send(request.method, target, headers, body)
    if operation == 'list' and answer.status == 200 and {'startOffset', 'endOffset'} & query.keys():
      answer.body = self._filter(
        answer.body,
        lambda name: (
          query.get('startOffset', '') <= name
          and (name < query['endOffset'] if query.get('endOffset') else True)
        ),
      )
    if is_read and metadata:
      answer.headers |= {'x-goog-generation': generation}
    if location := answer.headers.get('Location'):
      self._uploads[
        urllib.parse.parse_qs(urllib.parse.urlsplit(location).query)['upload_id'][0]
      ] = request.name
    return answer


class _S3Proxy(Proxy):
  """Knows the paths and listings of S3. moto has the preconditions, which need one request at a time to be atomic."""

  def send(self, method, target, headers=None, body=b''):
    return super().send(method, target, SIGNED if headers is None else headers, body)

  def reset(self):
    self.send('POST', '/moto-api/reset')
    assert self.send('PUT', f'/{_BUCKET}').status == 200

  def all_names(self, prefix):
    names, page = [], None
    while page is None or len(page) == 1000:
      query = urllib.parse.urlencode(
        {'list-type': 2, 'prefix': prefix, 'start-after': names[-1] if names else ''}
      )
      root = ElementTree.fromstring(self.send('GET', f'/{_BUCKET}?{query}').body)
      page = [key.text or '' for key in root.iter(f'{{{_S3_NAMESPACE}}}Key')]
      names += page
    return names

  def _filter(self, listing, is_visible):
    ElementTree.register_namespace('', _S3_NAMESPACE)
    root = ElementTree.fromstring(listing)
    tag = f'{{{_S3_NAMESPACE}}}'.__add__
    decode = urllib.parse.unquote_plus if root.findtext(tag('EncodingType')) == 'url' else str
    for entry in [*root.findall(tag('Contents')), *root.findall(tag('CommonPrefixes'))]:
      if not is_visible(decode(entry.findtext(tag('Key')) or entry.findtext(tag('Prefix')) or '')):
        root.remove(entry)
    if (count := root.find(tag('KeyCount'))) is not None:
      count.text = str(
        len(root.findall(tag('Contents'))) + len(root.findall(tag('CommonPrefixes')))
      )
    return ElementTree.tostring(root, encoding='utf-8', xml_declaration=True)

  def _classify(self, request, path, headers, head):
    _, _, name = urllib.parse.unquote(path).lstrip('/').partition('/')
    query, method = request.query, request.method
    if not name:
      if method == 'POST' and 'delete' in query:
        return 'delete', '\n'.join(re.findall('<Key>(.*?)</Key>', head.decode(errors='replace')))
      is_listing = method == 'GET' and not {'location', 'versioning', 'uploads'} & query.keys()
      return ('list', query.get('prefix', '')) if is_listing else ('other', '')
    if method == 'PUT':
      return 'copy' if 'x-amz-copy-source' in headers else 'write', name
    if method == 'DELETE' and 'uploadId' in query:
      return 'other', name
    return {'GET': 'read', 'HEAD': 'stat', 'POST': 'write', 'DELETE': 'delete'}.get(
      method, 'other'
    ), name


def _read_chunks(stream: Any) -> bytes:
  """Returns a body that is sent in chunks."""
  parts = []
  while size := int(stream.readline().split(b';')[0], 16):
    parts.append(stream.read(size))
    stream.readline()
  while stream.readline().strip():  # trailers
    pass
  return b''.join(parts)


@dataclasses.dataclass
class Store:
  """An empty folder of an object store.

  Attributes:
    kind: 'gcs' or 's3'.
    bucket: its name.
    prefix: of the names of the folder's objects; ends with '/'.
    proxy: takes faults, has the requests.
    env: environment variables with which this process and others reach the store.
  """

  kind: str
  bucket: str
  prefix: str
  proxy: Proxy
  env: dict[str, str]

  @property
  def root(self) -> str:
    """The folder's path: 'gs://...' or 's3://...', without a slash at its end."""
    return f'{"gs" if self.kind == "gcs" else "s3"}://{self.bucket}/{self.prefix.rstrip("/")}'

  def spec(self, path: str = '') -> dict[str, str]:
    """Returns TensorStore's specification of a key-value store at `path`, relative to the folder."""
    spec = {'driver': self.kind, 'bucket': self.bucket, 'path': self.prefix + path}
    return (
      spec
      if self.kind == 'gcs'
      else spec | {'endpoint': self.proxy.url, 'aws_region': self.env['AWS_REGION']}
    )

  def names(self) -> list[str]:
    """Returns the names of all objects, relative to the folder, asked without the proxy and its faults."""
    return sorted(name.removeprefix(self.prefix) for name in self.proxy.all_names(self.prefix))


@functools.cache
def _proxy(kind: str) -> Proxy:
  """Starts an emulator and the proxy in front of it."""
  for _ in range(5):  # another process may take the port before the emulator does
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      port = free.getsockname()[1]
    log = tempfile.TemporaryFile(encoding='utf-8', mode='w+')  # noqa: SIM115 (open as long as the emulator runs)
    process = subprocess.Popen(
      [sys.executable, '-c', _START + _PROGRAMS[kind], str(port)],
      stdin=subprocess.PIPE,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
      try:
        socket.create_connection(('127.0.0.1', port), timeout=1).close()
      except OSError:
        time.sleep(0.05)
        continue
      atexit.register(_end, process, log)
      return {'gcs': _GcsProxy, 's3': _S3Proxy}[kind](port)
    _end(process, log)
  log.seek(0)
  raise RuntimeError(f'The emulator of {kind} does not start: {log.read()[-2000:]}')


def _end(process: subprocess.Popen, log: Any) -> None:
  """Ends an emulator."""
  process.kill()
  process.wait()
  process.stdin.close()
  log.close()


def _environment(kind: str, url: str) -> dict[str, str]:
  """Returns the environment in which clients reach a store at `url`."""
  common = {'EPATH_USE_TF': '0', 'no_proxy': '127.0.0.1', 'NO_PROXY': '127.0.0.1'}
  if kind == 'gcs':
    return common | {
      'STORAGE_EMULATOR_HOST': url,
      'TENSORSTORE_GCS_HTTP_URL': url,
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'test',
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
    }
  return common | {
    'AWS_ENDPOINT_URL': url,
    'AWS_ACCESS_KEY_ID': 'test',
    'AWS_SECRET_ACCESS_KEY': 'test',
    'AWS_REGION': 'us-east-1',
    'AWS_DEFAULT_REGION': 'us-east-1',
    'AWS_CONFIG_FILE': os.devnull,
    'AWS_SHARED_CREDENTIALS_FILE': os.devnull,
    'AWS_EC2_METADATA_DISABLED': 'true',
  }


def clear_client_caches() -> None:
  """Makes fsspec and epath forget their connections and listings, and epath the choice of its backend."""
  from etils import epath
  import fsspec

  epath.gpath._is_tf_installed.cache_clear()
  epath.backend.fsspec_backend._get_filesystem.cache_clear()
  for protocol, filesystem in fsspec.registry.items():
    if protocol in ('gcs', 'gs', 's3'):
      filesystem.clear_instance_cache()
  if 't5x_lite.storage.object_store' in sys.modules:
    from t5x_lite.storage import object_store
    from t5x_lite.storage import open_folders

    object_store.connection.cache_clear()
    open_folders.clear()


_numbers = itertools.count()
_open: dict[str, int] = dict.fromkeys(KINDS, 0)


@contextlib.contextmanager
def opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
  """Opens an empty folder of a store, with the environment that reaches it. Skips where a package is not installed."""
  missing = [name for name in _PACKAGES[kind] if importlib.util.find_spec(name) is None]
  if missing:
    pytest.skip(f'not installed, see requirements/lock-stores.txt: {", ".join(missing)}')
  proxy = _proxy(kind)
  if not _open[kind]:
    proxy.clear()
    proxy.reset()
  _open[kind] += 1
  store = Store(kind, _BUCKET, f'test_{next(_numbers)}/', proxy, _environment(kind, proxy.url))
  for name, value in store.env.items():
    monkeypatch.setenv(name, value)
  clear_client_caches()
  try:
    yield store
  finally:
    _open[kind] -= 1
    for fault in proxy.faults:
      fault.remove()
    clear_client_caches()
    assert not os.path.lexists('gs:') and not os.path.lexists('s3:'), (
      'a path of a store was taken for a local one'
    )
