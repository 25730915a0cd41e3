"""Folders of Hugging Face as a whole: what old and new ones hold, what is refused, and folders that we write."""

import dataclasses
import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.core import hugging_face_cases as cases
from t5x_lite import files
from t5x_lite.checkpoints.hugging_face import (
    FAMILIES, Architecture, HuggingFaceFolder, is_hugging_face_folder, write_folder)
from t5x_lite.checkpoints.hugging_face import model_card
from t5x_lite.checkpoints.hugging_face.folder import CONFIG_FILE
from t5x_lite.checkpoints.hugging_face.network import network_config
from t5x_lite.errors import CheckpointError
from t5x_lite.networks.t5_config import T5Config

_SURPLUS = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
_TABLES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
_EMBEDDING, _LOGITS = 'token_embedder/embedding', 'decoder/logits_dense/kernel'


def _make(tmp_path, family='t5_1_1', arch=None, change=None, dtype='float32', **config):
  """Returns (path, our arrays) of a folder; `change` edits its tensors."""
  arch = arch or cases.BY_FAMILY[family]
  ours = cases.values(arch, dtype)
  theirs = cases.tensors(arch, ours)
  if change is not None:
    change(theirs)
  cases.make_folder(tmp_path / 'hf', theirs, cases.config_of(arch, family, **config))
  return tmp_path / 'hf', ours


def _check(path, ours, arch):
  folder = HuggingFaceFolder(path)
  assert folder.architecture == arch
  assert {name: (leaf.shape, leaf.dtype) for name, leaf in folder.shapes().items()} == {
      name: (array.shape, array.dtype) for name, array in ours.items()}
  for name, array in ours.items():
    np.testing.assert_array_equal(folder.read_array(name).view(np.uint8), array.view(np.uint8))
  return folder


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('family', FAMILIES)
def test_each_family_is_read(tmp_path, family, dtype):
  path, ours = _make(tmp_path, family, dtype=dtype)
  folder = _check(path, ours, cases.BY_FAMILY[family])
  assert folder.family.name == family and is_hugging_face_folder(path)


@pytest.mark.parametrize('family', ['t5_1_0', 't5_1_1', 'switch'])
def test_what_old_folders_hold_twice_or_in_vain_is_accepted(tmp_path, family):
  def change(tensors):
    tensors[_SURPLUS] = np.ones([32, 3], np.float32)
    tensors.update({name: tensors['shared.weight'] for name in _TABLES})
    if family != 't5_1_1':
      tensors['lm_head.weight'] = tensors['shared.weight']

  path, ours = _make(tmp_path, family, change=change)
  _check(path, ours, cases.BY_FAMILY[family])


@pytest.mark.parametrize('name', ['encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight'])
def test_the_embedding_is_read_under_any_of_its_names(tmp_path, name):
  path, ours = _make(tmp_path, 't5_1_0', change=lambda tensors: tensors.update({name: tensors.pop('shared.weight')}))
  _check(path, ours, cases.TIED)


@pytest.mark.parametrize('family, name', [
    ('t5_1_0', 'lm_head.weight'), ('t5_1_0', 'encoder.embed_tokens.weight'), ('mt5', 'decoder.embed_tokens.weight')])
def test_duplicates_that_differ_are_refused_by_both_names(tmp_path, family, name):
  def change(tensors):
    tensors[name] = tensors['shared.weight'].copy()
    tensors[name][-1, -1] = -tensors[name][-1, -1]

  path, ours = _make(tmp_path, family, change=change)
  folder = HuggingFaceFolder(path)
  np.testing.assert_array_equal(folder.read_array('decoder/decoder_norm/scale'), ours['decoder/decoder_norm/scale'])
  with pytest.raises(CheckpointError, match=f'shared.weight and {name} differ.*{_EMBEDDING}'):
    folder.read_array(_EMBEDDING)


@pytest.mark.parametrize('version', ['4.30.0', '5.23.0'])
def test_a_umt5_that_is_said_to_be_tied_is_so_if_its_tables_are_equal(tmp_path, version):
  path, ours = _make(tmp_path, 'umt5', tie_word_embeddings=True, transformers_version=version)
  _check(path, ours, cases.UMT5)
  tied = dataclasses.replace(cases.UMT5, logits_via_embedding=True)
  (tmp_path / 'tied').mkdir()
  path, ours = _make(tmp_path / 'tied', 'umt5', tied, transformers_version=version,
                     change=lambda tensors: tensors.update({'lm_head.weight': tensors['shared.weight']}))
  _check(path, ours, tied)


@pytest.mark.parametrize('family, config', [
    ('t5_1_1', dict(scale_decoder_outputs=False, tie_word_embeddings=True)),
    ('mt5', dict(tie_word_embeddings=True, transformers_version='5.23.0'))])
def test_shared_weights_without_a_scale_are_one_array(tmp_path, family, config):
  path, ours = _make(tmp_path, family, change=lambda tensors: tensors.pop('lm_head.weight'), **config)
  ours.pop(_LOGITS)
  folder = _check(path, ours, cases.UNSCALED)
  assert network_config(path) == T5Config(**cases.UNSCALED.network_config_kwargs(), dtype='bfloat16')
  write_folder(tmp_path / 'again', folder.architecture, folder.family, folder.read_array)
  again = HuggingFaceFolder(tmp_path / 'again')
  assert set(again.tensors.entries) == set(folder.tensors.entries)
  for name in folder.tensors.entries:
    np.testing.assert_array_equal(again.tensors.read(name), folder.tensors.read(name))


@pytest.mark.parametrize('family', ['t5_1_1', 'mt5', 'umt5', 'switch'])
def test_tied_logits_without_a_scale_are_written_and_read(tmp_path, family):
  arch = dataclasses.replace(cases.BY_FAMILY[family], logits_via_embedding=True, scale_tied_logits=False)
  ours = cases.values(arch)
  write_folder(tmp_path / 'out', arch, FAMILIES[family], ours.__getitem__)
  folder = _check(tmp_path / 'out', ours, arch)
  assert folder.config['tie_word_embeddings'] is True and 'lm_head.weight' not in folder.tensors.entries
  card = (tmp_path / 'out' / 'README.md').read_text()
  assert 'model.config.tie_word_embeddings = False' in card and 'not scaled' in card
  assert ('before version 5' in card) == (family in ('t5_1_1', 'mt5'))
  # Their tied logits that are scaled need nothing said.
  assert 'not scaled' not in model_card.text(cases.TIED, FAMILIES['t5_1_0'], 'float32')


def test_an_untied_switch_transformer_may_lack_the_copies_of_its_embedding(tmp_path):
  arch = dataclasses.replace(cases.SWITCH, logits_via_embedding=False)
  path, ours = _make(tmp_path, 'switch', arch, change=lambda tensors: [tensors.pop(name) for name in _TABLES])
  _check(path, ours, arch)
  write_folder(tmp_path / 'out', arch, FAMILIES['switch'], ours.__getitem__)
  assert {'shared.weight', *_TABLES} < set(_check(tmp_path / 'out', ours, arch).tensors.entries)


def test_a_logits_kernel_that_is_missing_is_no_tied_one(tmp_path):
  path, _ = _make(tmp_path, 't5_1_1', change=lambda tensors: tensors.pop('lm_head.weight'))
  with pytest.raises(CheckpointError, match=re.escape(f'missing {_LOGITS} (6, 13) <-> lm_head.weight (13, 6)')):
    HuggingFaceFolder(path)


def test_problems_name_both_sides(tmp_path):
  wo, q = 'encoder.block.0.layer.1.DenseReluDense.wo.weight', 'decoder.block.1.layer.1.EncDecAttention.q.weight'

  def change(tensors):
    tensors[wo] = np.ones([6, 11], np.float32)
    tensors['classifier.weight'] = np.ones([2, 6], np.float32)
    tensors['encoder.final_layer_norm.weight'] = np.ones([6], np.int8)
    del tensors[q]

  path, _ = _make(tmp_path, change=change)
  with pytest.raises(CheckpointError) as error:
    HuggingFaceFolder(path)
  text = str(error.value)
  assert f'missing decoder/layers_1/encoder_decoder_attention/query/kernel (6, 6) <-> {q} (6, 6)' in text
  assert f'misshapen encoder/layers_0/mlp/wo/kernel (10, 6) <-> {wo}: expected (6, 10), found (6, 11)' in text
  assert 'surplus classifier.weight (2, 6)' in text
  assert 'dtype of encoder/encoder_norm/scale <-> encoder.final_layer_norm.weight' in text and 'int8' in text
  assert str(path) in text


def test_an_expert_that_is_missing_is_named(tmp_path):
  name = 'encoder.block.1.layer.1.mlp.experts.expert_0.wi.weight'
  path, _ = _make(tmp_path, 'switch', change=lambda tensors: tensors.pop(name))
  with pytest.raises(CheckpointError, match=re.escape(
      f'missing encoder/layers_1/mlp/expert/wi/kernel (3, 6, 10) <-> {name} (10, 6)')):
    HuggingFaceFolder(path)


def test_experts_of_several_dtypes_are_refused(tmp_path):
  name = 'encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight'
  path, _ = _make(tmp_path, 'switch', change=lambda tensors: tensors.update({name: tensors[name].astype('f2')}))
  with pytest.raises(CheckpointError, match='one kind in an array, found float'):
    HuggingFaceFolder(path)


@pytest.mark.parametrize('family, config, match', [
    ('t5_1_1', dict(num_layers=10**4), '10002 layers'), ('switch', dict(num_experts=10**9), '1000000000 experts'),
    ('t5_1_1', dict(model_type='longt5'), 'longt5'), ('t5_1_1', dict(num_layers=4), 'missing encoder/layers_3'),
    ('t5_1_1', dict(vocab_size=14), r'token_embedder/embedding \(14, 6\).*expected \(14, 6\), found \(13, 6\)'),
])
def test_a_config_json_of_another_model_is_refused(tmp_path, family, config, match):
  path, _ = _make(tmp_path, family, **config)
  with pytest.raises(CheckpointError, match=match):
    HuggingFaceFolder(path)


def test_folders_without_what_they_need_are_refused(tmp_path):
  path, _ = _make(tmp_path)
  config = (path / CONFIG_FILE).read_text()
  for content, match in (('{', 'no JSON'), ('[]', 'holds a list'), ('[' * 100_000, 'no JSON')):
    (path / CONFIG_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=match):
      HuggingFaceFolder(path)
  (path / CONFIG_FILE).unlink()
  assert not is_hugging_face_folder(path)
  with pytest.raises(CheckpointError, match='has no config.json'):
    HuggingFaceFolder(path)
  (path / 'adapter_config.json').write_text('{}')
  with pytest.raises(CheckpointError, match='adapter alone'):
    HuggingFaceFolder(path)
  (path / CONFIG_FILE).write_text(config)
  (path / 'model.safetensors').rename(path / 'pytorch_model.bin')
  assert is_hugging_face_folder(path)
  with pytest.raises(CheckpointError, match='pytorch_model.bin alone'):
    HuggingFaceFolder(path)


def test_unknown_arrays_are_refused(tmp_path):
  path, _ = _make(tmp_path)
  with pytest.raises(CheckpointError, match='Did you mean'):
    HuggingFaceFolder(path).read_array('encoder/encoder_norm/scal')


# ----------------------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize('max_shard_bytes', [10**9, 1000])
@pytest.mark.parametrize('family', FAMILIES)
def test_what_is_written_is_read_bitwise(tmp_path, family, max_shard_bytes):
  arch = cases.BY_FAMILY[family]
  ours = cases.values(arch, 'bfloat16' if family == 'mt5' else 'float32')
  seen = []
  write_folder(tmp_path / 'out', arch, FAMILIES[family], ours.__getitem__, max_shard_bytes=max_shard_bytes,
               source_note='From a test.', progress=lambda *args: seen.append(args))
  _check(tmp_path / 'out', ours, arch)
  assert seen[-1][:2] == (len(ours), len(ours)) and [name for _, _, name in seen] == list(ours)
  config = json.loads((tmp_path / 'out' / CONFIG_FILE).read_text())
  assert config['torch_dtype'] == ('bfloat16' if family == 'mt5' else 'float32')
  generation = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
  assert generation == {'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0}
  card = (tmp_path / 'out' / 'README.md').read_text()
  assert card.startswith('---\nlibrary_name: transformers\n') and 'From a test.' in card
  assert ('model.config.tie_word_embeddings = False' in card) == (family == 'umt5')
  assert ('AutoTokenizer' in card) == (family == 'byt5') == (tmp_path / 'out' / 'tokenizer_config.json').exists()
  assert ('expert_capacity' in card) == (family == 'switch')
  assert (tmp_path / 'out' / 'model.safetensors.index.json').exists() == (max_shard_bytes == 1000)
  assert [path.name for path in tmp_path.iterdir()] == ['out']


def test_folders_pass_through_unchanged(tmp_path):
  path, _ = _make(tmp_path, 'switch')
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
  cast = {name: array.astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype) for name, array in ours.items()}
  _check(tmp_path / 'out', cast, cases.SMALL)
  assert json.loads((tmp_path / 'out' / CONFIG_FILE).read_text())['torch_dtype'] == dtype


def test_a_byt5_of_other_ids_gets_no_tokenizer(tmp_path):
  write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['byt5'], cases.values(cases.SMALL).__getitem__)
  assert not (tmp_path / 'out' / 'tokenizer_config.json').exists()
  assert HuggingFaceFolder(tmp_path / 'out').family.name == 'byt5'


def test_arrays_are_read_in_the_order_that_is_asked_for(tmp_path):
  ours, seen = cases.values(cases.SWITCH), []
  order = sorted(ours, key=lambda name: name[::-1])

  def read(name):
    seen.append(name)
    return ours[name]

  write_folder(tmp_path / 'out', cases.SWITCH, FAMILIES['switch'], read, order=order, max_shard_bytes=1000)
  assert seen == order
  _check(tmp_path / 'out', ours, cases.SWITCH)
  for bad, match in ((order[1:], 'Look at ' + order[0]), (order + order[:1], 'twice')):
    with pytest.raises(CheckpointError, match=match):
      write_folder(tmp_path / 'other', cases.SWITCH, FAMILIES['switch'], read, order=bad)


def test_jax_arrays_are_written_too(tmp_path):
  ours = cases.values(cases.TIED)
  write_folder(tmp_path / 'out', cases.TIED, FAMILIES['t5_1_0'], lambda name: jax.numpy.asarray(ours[name]))
  _check(tmp_path / 'out', ours, cases.TIED)


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


def test_a_disk_that_refuses_and_a_source_that_does_are_told_apart(tmp_path, monkeypatch):
  ours = cases.values(cases.SMALL)

  def gone(name):
    raise FileNotFoundError(2, 'No such file', '/where/the/source/was')

  with pytest.raises(FileNotFoundError):
    write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], gone)

  def full(root):
    assert is_hugging_face_folder(root)
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(files, 'fsync_tree', full)
  with pytest.raises(CheckpointError, match="out' could not be written: No space left"):
    write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], ours.__getitem__)
  (tmp_path / 'file').write_text('x')
  with pytest.raises(CheckpointError, match='could not be written'):
    write_folder(tmp_path / 'file' / 'out', cases.SMALL, FAMILIES['t5_1_1'], ours.__getitem__)
  assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_a_tokenizer_that_is_refused_leaves_nothing(tmp_path):
  with pytest.raises(CheckpointError, match='no tokenizer at'):
    write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], cases.values(cases.SMALL).__getitem__,
                 tokenizer=str(tmp_path / 'none'))
  assert not list(tmp_path.iterdir())


def test_nothing_that_looks_whole_is_there_before_the_end(tmp_path):
  ours = cases.values(cases.SMALL)

  def read(name):
    found = list(tmp_path.iterdir())
    assert [path.name.startswith('out.tmp-') for path in found] == [True]
    assert not is_hugging_face_folder(found[0])
    return ours[name]

  write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], read, max_shard_bytes=1000)


@pytest.mark.parametrize('kwargs, match', [
    (dict(dtype='float64'), "dtype='float64'"), (dict(max_shard_bytes=0), 'max_shard_bytes=0'),
    (dict(family='umt5'), 'per layer'), (dict(arrays={_EMBEDDING: np.ones([2, 6], 'f4')}), r'\(2, 6\); expected'),
    (dict(arrays={_EMBEDDING: np.ones([13, 6], int)}), 'dtype int64'),
    (dict(arrays={_EMBEDDING: np.full([13, 6], 1e5, 'f4')}, dtype='float16'), 'beyond 65504.*bfloat16'),
])
def test_what_cannot_be_written_is_refused(tmp_path, kwargs, match):
  arrays = cases.values(cases.SMALL) | kwargs.pop('arrays', {})
  family = FAMILIES[kwargs.pop('family', 't5_1_1')]
  with pytest.raises(CheckpointError, match=match):
    write_folder(tmp_path / 'out', cases.SMALL, family, arrays.__getitem__, **kwargs)
  assert not list(tmp_path.iterdir())


def test_an_output_that_exists_is_left_alone(tmp_path):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'out' / 'mine').write_text('x')
  with pytest.raises(CheckpointError, match='exists already'):
    write_folder(tmp_path / 'out', cases.SMALL, FAMILIES['t5_1_1'], cases.values(cases.SMALL).__getitem__)
  assert (tmp_path / 'out' / 'mine').read_text() == 'x' and len(list(tmp_path.iterdir())) == 1


def test_the_architecture_of_our_parameters_and_of_their_folder_is_one(tmp_path):
  path, ours = _make(tmp_path, 'switch')
  assert Architecture.from_shapes(ours) == HuggingFaceFolder(path).architecture
