"""Weights as people name them by mistake, and folders with something wrong in them: one message says what to do."""

import json
import re
import shutil
import subprocess
import sys
import textwrap

import flax.serialization
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.apps.convert import command as convert_command
from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints.hugging_face import network
from tests.checkpoints.hugging_face import hugging_face_cases as cases
from tests.checkpoints.sources import t5x_samples as samples


@pytest.fixture(scope='module')
def forms(tmp_path_factory):
  """T5X's samples: name of the form -> folder of the checkpoint."""
  return {
    name: folder / 'checkpoint_7'
    for name, folder in samples.unpack(tmp_path_factory.mktemp('forms')).items()
  }


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / 'published'
  arch = cases.BY_FAMILY['t5_1_1']
  cases.make_folder(path, cases.tensors(arch, cases.values(arch)), cases.config_of(arch, 't5_1_1'))
  return path


@pytest.mark.parametrize(
  'name, message',
  [
    (
      'google/flan-t5-small',
      "run `hf download google/flan-t5-small --local-dir flan-t5-small` .*give the path 'flan-t5-small'",
    ),
    ('t5-small', 'hf download t5-small'),
    (
      'https://huggingface.co/google/flan-t5-small/tree/main',
      'must be a path on a disk.*hf download google/flan-t5-small',
    ),
    (
      'ftp://t5-data/checkpoint_1',
      'must be a path on a disk or in an object store.*gs:// and s3://',
    ),
    ('~/models/flan', r"got '~/models/flan'.*write '.*/models/flan'"),
  ],
)
def test_names_that_are_not_paths(name, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(errors.T5xLiteError, match=message):
    checkpoints.open_source(name)
  with pytest.raises(errors.T5xLiteError, match=message):
    network.network_config(name)
  with pytest.raises(errors.T5xLiteError, match=message):
    convert.convert(name, 'converted', to='t5x')
  assert not list(tmp_path.iterdir())


def test_paths_that_are_not_taken_for_names(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'runs').mkdir()
  for path in ('runs/nothing', 'elsewhere/checkpoint_3', str(tmp_path / 'a/b'), './a'):
    with pytest.raises(errors.CheckpointError, match='got a missing path') as raised:
      checkpoints.open_source(path)
    assert 'download' not in str(raised.value)


def test_the_cache_of_a_hub(folder, tmp_path):
  snapshot = tmp_path / 'hub/models--google--t5/snapshots/abc'
  blobs = tmp_path / 'hub/models--google--t5/blobs'
  snapshot.mkdir(parents=True)
  blobs.mkdir()
  for path in folder.iterdir():
    shutil.copy(path, blobs / path.name)
    (snapshot / path.name).symlink_to(f'../../blobs/{path.name}')
  for named in (snapshot.parent, snapshot.parents[1]):
    with pytest.raises(errors.CheckpointError, match=f'cache of the Hugging Face hub.*{snapshot}'):
      checkpoints.open_source(named)
    with pytest.raises(errors.ConfigError, match=f'cache of the Hugging Face hub.*{snapshot}'):
      network.network_config(named)
  assert checkpoints.open_source(snapshot).format == 'hugging_face'


def test_a_missing_folder(tmp_path):
  with pytest.raises(
    errors.ConfigError, match='folder with config.json, got .*gone.* Restore config.json'
  ):
    network.network_config(tmp_path / 'gone')


@pytest.mark.parametrize(
  'change, message',
  [
    ({'pad_token_id': -1}, '`config.json.pad_token_id` must be .*got -1'),
    ({'eos_token_id': 0}, '`config.json.eos_token_id` must be an id above 0.*got 0'),
    ({'decoder_start_token_id': -2}, '`config.json.decoder_start_token_id` must be .*got -2'),
    ({'model_type': 'bert'}, "`config.json.model_type` must be one of .*got 'bert'"),
    ({'relative_attention_max_distance': 8}, 'max_relpos_distance` must be .*, got 8'),
  ],
)
def test_errors_of_config_json_name_the_folder(folder, change, message):
  said = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(said | change))
  with pytest.raises(errors.T5xLiteError, match=f'{folder}: .*{message}'):
    hugging_face.HuggingFaceFolder(folder)
  (folder / 'config.json').write_text(json.dumps(said | {'pad_token_id': None}))
  hugging_face.HuggingFaceFolder(folder)


@pytest.mark.parametrize('step', [-3, np.asarray([1, 2], np.int32), np.asarray(0.5, np.float32)])
def test_a_step_that_is_not_a_number_of_steps(forms, tmp_path, step):
  copy = shutil.copytree(forms['t5x'], tmp_path / 'copy')
  index = flax.serialization.msgpack_restore((copy / 'checkpoint').read_bytes())
  index['optimizer']['state']['step'] = step
  (copy / 'checkpoint').write_bytes(flax.serialization.msgpack_serialize(index))
  with pytest.raises(
    errors.CheckpointDamagedError, match='state/step must be an integer >= 0, got '
  ):
    convert.convert(str(copy), str(tmp_path / 'converted'), to='t5x_lite')
  assert [path.name for path in tmp_path.iterdir()] == ['copy']


@pytest.mark.parametrize('content', [b'{"tree', b'{}'])
def test_a_damaged_index_of_orbax_says_what_to_do(forms, tmp_path, content):
  copy = shutil.copytree(forms['t5x_orbax'], tmp_path / 'copy')
  (copy / 'state/_METADATA').write_bytes(content)
  with pytest.raises(
    errors.CheckpointError, match='index of .*_METADATA.*Copy the checkpoint again'
  ):
    checkpoints.open_source(copy).shapes()


_READ_ALL = """
    import sys
    from t5x_lite import checkpoints, errors
    for path in sys.argv[1:]:
      try:
        checkpoints.load(path)
      except errors.CheckpointError as error:
        print(error)
    """


def test_a_lost_file_of_orbax_says_what_to_do(forms, tmp_path):
  copies = [shutil.copytree(forms['t5x_orbax'], tmp_path / name) for name in ('data', 'manifest')]
  for data in copies[0].glob('state/ocdbt.process_*'):
    shutil.rmtree(data)
  (copies[1] / 'state/manifest.ocdbt').unlink()
  # In a separate process: TensorStore's threads log errors about Orbax's closed event loop later.
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_READ_ALL), *map(str, copies)],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  found = re.findall(
    r'The (?:index|data) of .*(data|manifest).*cannot be read.*Copy the checkpoint again',
    done.stdout,
  )
  assert found == ['data', 'manifest'], done.stdout


def test_the_newest_that_can_be_read_is_converted(forms, tmp_path):
  shutil.copytree(forms['t5x'], tmp_path / 'runs/checkpoint_7')
  (tmp_path / 'runs/checkpoint_30').mkdir()
  assert convert.open_newest(str(tmp_path / 'runs')).path.endswith('checkpoint_7')


def test_a_size_of_many_digits():
  assert convert_command.parse_num_bytes('9' * 400) > 10**399
  assert convert_command.parse_num_bytes('1.5KB') == 1500
