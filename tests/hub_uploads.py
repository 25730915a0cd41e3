"""A hub on the loopback that takes uploads as huggingface_hub sends them, and keeps them in memory."""

import base64
import contextlib
import hashlib
import http.server
import json
import threading

import pytest

TOKEN = 'hf_secretsecretsecretsecretsecretsecr'
_COMMIT = '89abcdef' * 5


class Hub(http.server.ThreadingHTTPServer):
  """The hub.

  Attributes:
    repositories: files by name, of each repository.
    private: names of the private repositories.
    fails_at: text in the path of requests that fail; empty for none.
    error: their message.
    requests: methods and paths of all requests.
  """

  def __init__(self):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.repositories: dict[str, dict[str, bytes]] = {}
    self.private: set[str] = set()
    self.fails_at = ''
    self.error = 'no space left'
    self.requests: list[str] = []
    self.objects: dict[str, bytes] = {}

  @property
  def url(self) -> str:
    """Address of the hub."""
    return f'http://127.0.0.1:{self.server_port}'


class _Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *_):
    pass

  def _answer(self, value, status=200, **headers):
    body = json.dumps(value).encode()
    self.send_response(status)
    for name, text in headers.items():
      self.send_header(name.replace('_', '-'), text)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def _read(self):
    """Returns the content of a request, which may be sent in chunks."""
    if self.headers.get('Transfer-Encoding') != 'chunked':
      return self.rfile.read(int(self.headers.get('Content-Length') or 0))
    content = b''
    while size := int(self.rfile.readline(), 16):
      content += self.rfile.read(size)
      self.rfile.readline()
    self.rfile.readline()
    return content

  def _handle(self):
    hub: Hub = self.server
    path = self.path.partition('?')[0]
    body = self._read()
    hub.requests.append(f'{self.command} {path}')
    if hub.fails_at and hub.fails_at in path:
      return self._answer({'error': hub.error}, 403, X_Error_Message=hub.error)
    if self.command == 'PUT':  # The address of an upload has no token.
      oid = path.rpartition('/')[2]
      assert hashlib.sha256(body).hexdigest() == oid
      hub.objects[oid] = body
      return self._answer({})
    if self.headers.get('Authorization') != f'Bearer {TOKEN}':
      return self._answer({'error': f'Invalid token {self.headers.get("Authorization")}'}, 401)
    if path == '/api/whoami-v2':
      return self._answer({'type': 'user', 'name': 'me', 'orgs': []})
    if path == '/api/validate-yaml':
      return self._answer({'errors': [], 'warnings': []})
    if path == '/api/repos/create':
      asked = json.loads(body)
      name = f'{asked["organization"]}/{asked["name"]}'
      if name in hub.repositories:
        return self._answer({'error': 'exists', 'url': f'{hub.url}/{name}'}, 409)
      hub.repositories[name] = {'.gitattributes': b''}
      if asked.get('private') or asked.get('visibility') == 'private':
        hub.private.add(name)
      return self._answer({'url': f'{hub.url}/{name}'})
    parts = path.removeprefix('/api/models/').strip('/').split('/')
    name = '/'.join(parts[:2]).removesuffix('.git')
    files = hub.repositories.get(name)
    if files is None:
      return self._answer({}, 404, X_Error_Code='RepoNotFound')
    action = parts[2] if len(parts) > 2 else ''
    if action == 'preupload':
      wanted = json.loads(body)['files']
      modes = [
        {
          'path': each['path'],
          'uploadMode': 'lfs' if each['path'].endswith('.safetensors') else 'regular',
          'shouldIgnore': False,
        }
        for each in wanted
      ]
      return self._answer({'files': modes})
    if action == 'info':  # large files
      objects = [
        {**each, 'actions': {'upload': {'href': f'{hub.url}/objects/{each["oid"]}'}}}
        for each in json.loads(body)['objects']
      ]
      return self._answer({'objects': objects, 'transfer': 'basic'})
    if action == 'commit':
      new = {}
      for line in map(json.loads, body.splitlines()):
        value = line['value']
        if line['key'] == 'file':
          new[value['path']] = base64.b64decode(value['content'])
        elif line['key'] == 'lfsFile':
          new[value['path']] = hub.objects[value['oid']]
      files.update(new)
      return self._answer({'commitUrl': f'{hub.url}/{name}/commit/{_COMMIT}', 'commitOid': _COMMIT})
    if action == 'tree':
      return self._answer(
        [
          {'type': 'file', 'path': file, 'size': len(content), 'oid': _COMMIT}
          for file, content in files.items()
        ]
      )
    return self._answer({'id': name, 'sha': _COMMIT, 'siblings': [{'rfilename': f} for f in files]})

  do_GET = do_POST = do_PUT = _handle


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch):
  """Yields a hub that this process uses, with its token."""
  pytest.importorskip('huggingface_hub')
  hub = Hub()
  threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
  for name, value in (
    ('HF_HUB_OFFLINE', False),
    ('HF_HUB_DISABLE_XET', True),
    ('HF_HUB_DISABLE_PROGRESS_BARS', True),
    ('ENDPOINT', hub.url),
  ):
    monkeypatch.setattr(f'huggingface_hub.constants.{name}', value)
  monkeypatch.setenv('HF_TOKEN', TOKEN)
  yield hub
  hub.shutdown()
  hub.server_close()
