"""Names of the hub: in the cache, downloaded from a hub on the loopback, and without a network."""

import http.server
import json
import threading
import urllib.parse

import pytest

from t5x_lite import errors
from t5x_lite.storage import files
from t5x_lite.storage import hub
from tests import hub_cache
from tests import hub_uploads

pytest.importorskip('huggingface_hub')

_NAME = 'google/tiny'
_FILES = {'config.json': b'{}', 'model.safetensors': b'weights', 'spiece.model': b'pieces'}
_SHARDED = {
  'config.json': b'{}',
  'tokenizer_config.json': b'{}',
  'model-a.safetensors': b'a',
  'model-b.safetensors': b'b',
  'model.safetensors.index.json': b'{"weight_map": {"x": "model-a.safetensors", "y": "model-b.safetensors"}}',
}


@pytest.fixture(name='cache')
def fixture_cache(tmp_path, monkeypatch):
  return hub_cache.use(tmp_path / 'cache', monkeypatch)


class _Server(http.server.ThreadingHTTPServer):
  """A hub with one model; `requested` has the paths of the requests for files."""

  def __init__(self, contents: dict[str, bytes]):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.contents = contents
    self.requested: list[str] = []


class _Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *_):
    pass

  def do_HEAD(self):  # pylint: disable=invalid-name
    self.do_GET()

  def do_GET(self):  # pylint: disable=invalid-name
    path = urllib.parse.unquote(self.path.partition('?')[0])
    contents = self.server.contents
    if path.startswith(f'/api/models/{_NAME}/revision/'):
      found = json.dumps({'id': _NAME, 'sha': hub_cache.COMMIT, 'siblings': []}).encode()
    elif path.startswith(f'/api/models/{_NAME}/tree/'):
      found = json.dumps(
        [
          {'type': 'file', 'path': file, 'size': len(content), 'oid': f'{i:040}'}
          for i, (file, content) in enumerate(contents.items())
        ]
      ).encode()
    else:
      file = path.removeprefix(f'/{_NAME}/resolve/{hub_cache.COMMIT}/')
      found = contents.get(file)
      if found is not None and self.command == 'GET':
        self.server.requested.append(file)
    self.send_response(404 if found is None else 200)
    if found is None:
      self.send_header('X-Error-Code', 'RepoNotFound')
    self.send_header('ETag', f'"{path.rpartition("/")[2]}"')
    self.send_header('X-Repo-Commit', hub_cache.COMMIT)
    self.send_header('Content-Length', str(len(found or b'')))
    self.end_headers()
    if self.command == 'GET':
      self.wfile.write(found or b'')


@pytest.fixture(name='server')
def fixture_server(cache, monkeypatch):
  """A hub on the loopback, whose model the test chooses."""
  del cache
  server = _Server({})
  threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
  monkeypatch.setattr(
    'huggingface_hub.constants.ENDPOINT', f'http://127.0.0.1:{server.server_port}'
  )
  monkeypatch.setattr(
    'huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE',
    f'http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}',
  )
  yield server
  server.shutdown()
  server.server_close()


@pytest.mark.parametrize(
  'name', [_NAME, f'{_NAME}@main', f'{_NAME}@{hub_cache.COMMIT}', f'{_NAME}/']
)
def test_a_name_is_the_folder_in_the_cache(cache, name):
  folder = hub_cache.add(cache, _NAME, _FILES)
  path = files.path(f'hf://{name}')
  assert path == folder and (path / 'model.safetensors').read_bytes() == b'weights'
  assert not files.is_remote(f'hf://{name}') and files.real_path(f'hf://{name}') == str(folder)


def test_old_names_have_no_owner(cache):
  folder = hub_cache.add(cache, 't5-small', _SHARDED)
  assert files.path('hf://t5-small') == folder


@pytest.mark.parametrize('contents', [_FILES, _SHARDED])
def test_only_the_needed_files_are_downloaded_once(server, cache, contents):
  server.contents = contents | dict.fromkeys(
    ('pytorch_model.bin', 'tf_model.h5', 'model.fp16.safetensors'), b''
  )
  folder = files.path(f'hf://{_NAME}')
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
  assert sorted(server.requested) == sorted(contents) and folder.is_relative_to(cache)
  hub.local_folder.cache_clear()
  server.shutdown()
  assert files.path(f'hf://{_NAME}') == folder


def test_an_interrupted_download_is_completed(server, cache):
  hub_cache.add(cache, _NAME, {'config.json': b'{}', 'spiece.model': b'pieces'})
  server.contents = _FILES
  assert (files.path(f'hf://{_NAME}') / 'model.safetensors').read_bytes() == b'weights'


def test_weights_without_a_tokenizer_are_used_without_a_network(cache):
  contents = {name: _FILES[name] for name in ('config.json', 'model.safetensors')}
  folder = hub_cache.add(cache, _NAME, contents)
  assert files.path(f'hf://{_NAME}') == folder


@pytest.mark.parametrize('cached', [{}, {'config.json': b'{}'}])
def test_a_missing_model_is_explained_without_a_network(cache, cached):
  if cached:
    hub_cache.add(cache, _NAME, cached)
  with pytest.raises(
    errors.CheckpointError, match='hf download google/tiny --revision v1 --local-dir tiny'
  ) as error:
    files.path(f'hf://{_NAME}@v1')
  assert 'not in the cache' in str(error.value) and '\n' not in str(error.value)


def test_a_model_without_safetensors_is_explained(server):
  server.contents = {'config.json': b'{}', 'pytorch_model.bin': b'code'}
  with pytest.raises(errors.CheckpointError, match='must have config.json and model.safetensors'):
    files.path(f'hf://{_NAME}')
  assert 'pytorch_model.bin' not in server.requested


def test_an_unknown_model_is_explained(server):
  del server
  with pytest.raises(errors.CheckpointError, match='hf://google/other.*Correct the name'):
    files.path('hf://google/other')


@pytest.mark.parametrize('name', ['hf://', 'hf://a/b/c', 'hf://a/../b', 'hf://a/b@', 'hf://.a'])
def test_an_invalid_name_is_rejected(name):
  with pytest.raises(errors.ConfigError, match='hf://OWNER/NAME'):
    files.path(name)


def test_errors_do_not_show_the_token(monkeypatch, tmp_path):
  with hub_uploads.serving(monkeypatch) as server:
    # A hub, or a proxy before it, that repeats the header of a request in its answer.
    server.fails_at, server.error = '/commit/', f'{hub_uploads.TOKEN} may not write'
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(errors.CheckpointError, match=r'\(token\) may not write') as error:
      hub.push(tmp_path, _NAME)
  assert hub_uploads.TOKEN not in str(error.value) and error.value.__cause__ is None


def test_a_folder_is_shown_by_the_name_of_its_model():
  assert hub.shown_name('/cache/models--google--t5/snapshots/0a1b') == 'google/t5'
  assert hub.shown_name('/models/t5/') == 't5'
