"""Writing of folders: bitwise, in order, atomic."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import HuggingFaceFolder
from t5x_lite.checkpoints.hugging_face import is_hugging_face_folder
from t5x_lite.checkpoints.hugging_face import model_card
from t5x_lite.checkpoints.hugging_face import write_folder
from t5x_lite.checkpoints.hugging_face.folder import CONFIG_FILE
from t5x_lite.errors import CheckpointError
from t5x_lite.storage import files
from tests.checkpoints.hugging_face import folder_cases as folders
from tests.checkpoints.hugging_face import hugging_face_cases as cases

_EMBEDDING, _LOGITS = 'token_embedder/embedding', 'decoder/logits_dense/kernel'


@pytest.mark.parametrize('family', ['t5_1_1', 'mt5', 'umt5', 'switch'])
def test_tied_logits_without_a_scale_are_written_and_read(tmp_path, family):
  arch = dataclasses.replace(
    cases.BY_FAMILY[family], logits_via_embedding=True, scale_tied_logits=False
  )
  ours = cases.values(arch)
  write_folder(tmp_path / 'out', arch, FAMILIES[family], ours.__getitem__)
  folder = folders.check(tmp_path / 'out', ours, arch)
  assert (
    folder.config['tie_word_embeddings'] is True and 'lm_head.weight' not in folder.tensors.entries
  )
  card = (tmp_path / 'out' / 'README.md').read_text()
  assert 'model.config.tie_word_embeddings = False' in card and 'not scaled' in card
  assert ('before version 5' in card) == (family in ('t5_1_1', 'mt5'))
  # Their tied logits that are scaled need nothing said.
  assert 'not scaled' not in model_card.text_of(cases.TIED, FAMILIES['t5_1_0'], 'float32')


# Writing


@pytest.mark.parametrize('max_shard_bytes', [10**9, 1000])
@pytest.mark.parametrize('family', FAMILIES)
def test_written_weights_are_read_bitwise(tmp_path, family, max_shard_bytes):
  arch = cases.BY_FAMILY[family]
  ours = cases.values(arch, 'bfloat16' if family == 'mt5' else 'float32')
  seen = []
  write_folder(
    tmp_path / 'out',
    arch,
    FAMILIES[family],
    ours.__getitem__,
    max_shard_bytes=max_shard_bytes,
    source_note='Made by a test.',
    progress=lambda *args: seen.append(args),
  )
  folders.check(tmp_path / 'out', ours, arch)
  assert seen[-1][:2] == (len(ours), len(ours)) and [name for _, _, name in seen] == list(ours)
  config = json.loads((tmp_path / 'out' / CONFIG_FILE).read_text())
  assert config['torch_dtype'] == ('bfloat16' if family == 'mt5' else 'float32')
  generation = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
  assert generation == {'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0}
  card = (tmp_path / 'out' / 'README.md').read_text()
  assert card.startswith('---\nlibrary_name: transformers\n') and 'Made by a test.' in card
  assert ('model.config.tie_word_embeddings = False' in card) == (family == 'umt5')
  assert (
    ('AutoTokenizer' in card)
    == (family == 'byt5')
    == (tmp_path / 'out' / 'tokenizer_config.json').exists()
  )
  assert ('expert_capacity' in card) == (family == 'switch')
  assert (tmp_path / 'out' / 'model.safetensors.index.json').exists() == (max_shard_bytes == 1000)
  assert [path.name for path in tmp_path.iterdir()] == ['out']


def test_folders_pass_through_unchanged(tmp_path):
  path, _ = folders.make(tmp_path, 'switch')
  source = HuggingFaceFolder(path)
  write_folder(tmp_path / 'out', source.architecture, source.family, source.read_array)
  back = HuggingFaceFolder(tmp_path / 'out')
  assert set(back.tensors.entries) == set(source.tensors.entries)
  for name in source.tensors.entries:
    np.testing.assert_array_equal(back.tensors.read(name), source.tensors.read(name))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_the_dtype_is_cast_on_the_way(tmp_path, dtype):
  ours = cases.values(cases.SMALL, 'float32')
  write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], ours.__getitem__, dtype=dtype)
  cast = {
    name: array.astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
    for name, array in ours.items()
  }
  folders.check(tmp_path / 'out', cast, cases.SMALL)
  assert json.loads((tmp_path / 'out' / CONFIG_FILE).read_text())['torch_dtype'] == dtype


def test_arrays_are_read_in_the_order_that_is_asked_for(tmp_path):
  ours, seen = cases.values(cases.SWITCH), []
  order = sorted(ours, key=lambda name: name[::-1])

  def read(name):
    seen.append(name)
    return ours[name]

  write_folder(
    tmp_path / 'out', cases.SWITCH, FAMILIES['switch'], read, order=order, max_shard_bytes=1000
  )
  assert seen == order
  folders.check(tmp_path / 'out', ours, cases.SWITCH)
  for bad, match in ((order[1:], 'Correct ' + order[0]), (order + order[:1], 'twice')):
    with pytest.raises(CheckpointError, match=match):
      write_folder(tmp_path / 'other', cases.SWITCH, FAMILIES['switch'], read, order=bad)


def test_jax_arrays_are_written_too(tmp_path):
  ours = cases.values(cases.TIED)
  write_folder(
    tmp_path / 'out', cases.TIED, FAMILIES['t5_1_0'], lambda name: jax.numpy.asarray(ours[name])
  )
  folders.check(tmp_path / 'out', ours, cases.TIED)


class _Stop(BaseException):
  """Stands for an interrupt."""


def test_an_interrupted_write_leaves_nothing(tmp_path):
  ours = cases.values(cases.SMALL)

  def read(name):
    if name == _LOGITS:
      raise _Stop
    return ours[name]

  with pytest.raises(_Stop):
    write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], read, max_shard_bytes=1000)
  assert not list(tmp_path.iterdir())


def test_errors_of_the_disk_and_of_the_source_differ(tmp_path, monkeypatch):
  ours = cases.values(cases.SMALL)

  def gone(name):
    raise FileNotFoundError(2, 'No such file', '/where/the/source/was')

  with pytest.raises(FileNotFoundError, match='/where/the/source/was'):
    write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], gone)

  def full(root):
    assert is_hugging_face_folder(root)
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(files, 'fsync_tree', full)
  with pytest.raises(OSError, match='No space left'):
    write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], ours.__getitem__)
  (tmp_path / 'file').write_text('x')
  with pytest.raises(NotADirectoryError, match='Not a directory: .*file/out'):
    write_folder(tmp_path / 'file' / 'out', cases.SMALL, FAMILIES['t5_1_1'], ours.__getitem__)
  assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_no_complete_folder_exists_before_the_end(tmp_path):
  ours = cases.values(cases.SMALL)

  def read(name):
    found = list(tmp_path.iterdir())
    assert [path.name.startswith('out.tmp-') for path in found] == [True]
    assert not is_hugging_face_folder(found[0])
    return ours[name]

  write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], read, max_shard_bytes=1000)


@pytest.mark.parametrize(
  'kwargs, match',
  [
    (dict(dtype='float64'), "dtype.*got 'float64'"),
    (dict(max_shard_bytes=0), 'max_shard_bytes.*got 0'),
    (dict(family='umt5'), 'per layer'),
    (dict(arrays={_EMBEDDING: np.ones([2, 6], 'f4')}), r'got \(2, 6\)'),
    (dict(arrays={_EMBEDDING: np.ones([13, 6], int)}), 'got .* and int64'),
    (
      dict(arrays={_EMBEDDING: np.full([13, 6], 1e5, 'f4')}, dtype='float16'),
      'beyond 65504.*bfloat16',
    ),
  ],
)
def test_unsupported_weights_are_rejected(tmp_path, kwargs, match):
  arrays = cases.values(cases.SMALL) | kwargs.pop('arrays', {})
  family = FAMILIES[kwargs.pop('family', 't5_1_1')]
  with pytest.raises(CheckpointError, match=match):
    write_folder(tmp_path / 'out', cases.SMALL, family, arrays.__getitem__, **kwargs)
  assert not list(tmp_path.iterdir())


def test_an_existing_output_is_unchanged(tmp_path):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / 'mine').write_text('x')
  with pytest.raises(CheckpointError, match='must be a new folder'):
    write_folder(
      tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], cases.values(cases.SMALL).__getitem__
    )
  assert (tmp_path / 'out' / 'mine').read_text() == 'x' and len(list(tmp_path.iterdir())) == 1
