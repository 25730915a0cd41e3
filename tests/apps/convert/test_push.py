"""`t5x_lite convert --push`: one commit on a hub on the loopback, or none."""

import sys

import pytest

from t5x_lite.apps.convert import run as convert
from t5x_lite.command_line import cli
from t5x_lite.errors import CheckpointError, ConfigError
from tests import hub_uploads
from tests.apps.convert import convert_cases as cases

_NAME = 'me/my-t5'
# huggingface_hub gives its HTTP client the files of weights by an old argument.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(name='hub')
def fixture_hub(monkeypatch):
  with hub_uploads.serving(monkeypatch) as hub:
    yield hub


@pytest.fixture(name='source')
def fixture_source(tmp_path):
  return cases.folder(tmp_path / 'source')[0]


def _push(source, output, name=_NAME):
  return convert.convert(source, str(output), to='hugging_face', push=name)


def test_the_folder_is_pushed_in_one_commit_to_a_private_repository(
  hub, source, tmp_path, capfd, caplog
):
  caplog.set_level('DEBUG')
  status = cli.main(
    ['convert', source, str(tmp_path / 'out'), '--to=hugging_face', f'--push={_NAME}']
  )
  captured = capfd.readouterr()
  assert status == 0 and f'Pushed to {hub.url}/{_NAME}/commit/' in captured.out
  files = {path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()}
  assert hub.repositories[_NAME] == {'.gitattributes': b'', **files}
  assert hub.private == {_NAME}
  assert sum('/commit/' in each for each in hub.requests) == 1
  assert hub_uploads.TOKEN not in captured.out + captured.err + caplog.text


# The request for the repository, for its weights, and for the commit.
@pytest.mark.parametrize('fails_at', ['repos/create', 'preupload', 'objects/', '/commit/'])
def test_an_upload_that_fails_is_no_push(hub, source, tmp_path, fails_at):
  hub.fails_at = fails_at
  with pytest.raises(CheckpointError, match=f'hf upload --private {_NAME} ') as error:
    _push(source, tmp_path / 'out')
  assert hub_uploads.TOKEN not in str(error.value)
  assert (tmp_path / 'out' / 'config.json').exists()
  assert hub.repositories.get(_NAME, {'.gitattributes': b''}) == {'.gitattributes': b''}
  # The repository is empty, so that the command succeeds with another output.
  hub.fails_at = ''
  assert 'Pushed to' in _push(source, tmp_path / 'again').notes[-1]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ('token', '`--push` needs a token'),
    ('wrong_token', 'does not accept --push=me/my-t5'),
    ('package', '--push needs huggingface_hub'),
    ('files', 'a new or empty repository, got me/my-t5 with 1 files such as config.json'),
  ],
)
def test_what_is_missing_is_reported_before_anything_is_read(
  hub, tmp_path, monkeypatch, change, message
):
  match change:
    case 'token':
      monkeypatch.delenv('HF_TOKEN')
      monkeypatch.setattr('huggingface_hub.constants.HF_TOKEN_PATH', str(tmp_path / 'none'))
    case 'wrong_token':
      monkeypatch.setenv('HF_TOKEN', 'hf_another')
    case 'package':
      monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    case 'files':
      hub.repositories[_NAME] = {'config.json': b'{}'}
  # The source does not exist: an error about it would come later.
  with pytest.raises(ConfigError, match=message) as error:
    _push(str(tmp_path / 'missing'), tmp_path / 'out')
  assert 'hf_another' not in str(error.value)
  assert not any('create' in each for each in hub.requests) and not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', ['short', hub_uploads.TOKEN, f'{hub_uploads.TOKEN}/x', 'a/b/c'])
def test_a_name_that_may_be_a_token_is_not_shown(source, tmp_path, name):
  with pytest.raises(ConfigError, match='`--push` must be OWNER/NAME') as error:
    _push(source, tmp_path / 'out', name)
  assert name not in str(error.value)


def test_outputs_in_stores_are_not_pushed(hub, source):
  with pytest.raises(ConfigError, match='a folder on a disk with --push'):
    _push(source, 'gs://bucket/out')
  assert not hub.requests


def test_other_formats_are_not_pushed(source, tmp_path):
  with pytest.raises(ConfigError, match=r'`--push` must be absent with --to=t5x'):
    convert.convert(source, str(tmp_path / 'out'), to='t5x', push=_NAME)
