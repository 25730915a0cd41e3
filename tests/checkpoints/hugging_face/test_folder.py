"""Hugging Face folders of old and new versions, invalid folders, and folders written by t5x_lite."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
import safetensors.numpy

from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import Architecture
from t5x_lite.checkpoints.hugging_face import HuggingFaceFolder
from t5x_lite.checkpoints.hugging_face import SafetensorsFolder
from t5x_lite.checkpoints.hugging_face import is_hugging_face_folder
from t5x_lite.checkpoints.hugging_face import tensor_files
from t5x_lite.checkpoints.hugging_face import write_folder
from t5x_lite.checkpoints.hugging_face.folder import CONFIG_FILE
from t5x_lite.checkpoints.hugging_face.network import network_config
from t5x_lite.errors import CheckpointError
from t5x_lite.networks.t5_config import T5Config
from t5x_lite.storage import files
from tests import hub_cache
from tests.checkpoints.hugging_face import folder_cases as folders
from tests.checkpoints.hugging_face import hugging_face_cases as cases

_SURPLUS = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
_TABLES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
_EMBEDDING, _LOGITS = 'token_embedder/embedding', 'decoder/logits_dense/kernel'


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('family', FAMILIES)
def test_each_family_is_read(tmp_path, family, dtype):
  path, ours = folders.make(tmp_path, family, dtype=dtype)
  folder = folders.check(path, ours, cases.BY_FAMILY[family])
  assert folder.family.name == family and is_hugging_face_folder(path)


@pytest.mark.parametrize('family', ['t5_1_0', 't5_1_1', 'switch'])
def test_duplicate_and_unused_tensors_of_old_folders_are_accepted(tmp_path, family):
  def change(tensors):
    tensors[_SURPLUS] = np.ones([32, 3], np.float32)
    tensors.update(dict.fromkeys(_TABLES, tensors['shared.weight']))
    if family != 't5_1_1':
      tensors['lm_head.weight'] = tensors['shared.weight']

  path, ours = folders.make(tmp_path, family, change=change)
  folders.check(path, ours, cases.BY_FAMILY[family])


@pytest.mark.parametrize(
  'name', ['encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight']
)
def test_the_embedding_is_read_under_any_of_its_names(tmp_path, name):
  path, ours = folders.make(
    tmp_path, 't5_1_0', change=lambda tensors: tensors.update({name: tensors.pop('shared.weight')})
  )
  folders.check(path, ours, cases.TIED)


@pytest.mark.parametrize(
  'family, name',
  [
    ('t5_1_0', 'lm_head.weight'),
    ('t5_1_0', 'encoder.embed_tokens.weight'),
    ('mt5', 'decoder.embed_tokens.weight'),
  ],
)
def test_duplicates_that_differ_are_rejected_by_both_names(tmp_path, family, name):
  def change(tensors):
    tensors[name] = tensors['shared.weight'].copy()
    tensors[name][-1, -1] = -tensors[name][-1, -1]

  path, ours = folders.make(tmp_path, family, change=change)
  folder = HuggingFaceFolder(path)
  np.testing.assert_array_equal(
    folder.read_array('decoder/decoder_norm/scale'), ours['decoder/decoder_norm/scale']
  )
  with pytest.raises(CheckpointError, match=f'{_EMBEDDING} <-> shared.weight and {name} differ'):
    folder.read_array(_EMBEDDING)


@pytest.mark.parametrize('version', ['4.30.0', '5.23.0'])
def test_a_umt5_that_is_said_to_be_tied_is_so_if_its_tables_are_equal(tmp_path, version):
  path, ours = folders.make(
    tmp_path, 'umt5', tie_word_embeddings=True, transformers_version=version
  )
  folders.check(path, ours, cases.UMT5)
  tied = dataclasses.replace(cases.UMT5, logits_via_embedding=True)
  (tmp_path / 'tied').mkdir()
  path, ours = folders.make(
    tmp_path / 'tied',
    'umt5',
    tied,
    transformers_version=version,
    change=lambda tensors: tensors.update({'lm_head.weight': tensors['shared.weight']}),
  )
  folders.check(path, ours, tied)


@pytest.mark.parametrize(
  'family, config',
  [
    ('t5_1_1', dict(scale_decoder_outputs=False, tie_word_embeddings=True)),
    ('mt5', dict(tie_word_embeddings=True, transformers_version='5.23.0')),
  ],
)
def test_shared_weights_without_a_scale_are_one_array(tmp_path, family, config):
  path, ours = folders.make(
    tmp_path, family, change=lambda tensors: tensors.pop('lm_head.weight'), **config
  )
  ours.pop(_LOGITS)
  folder = folders.check(path, ours, cases.UNSCALED)
  assert network_config(path) == T5Config(
    **cases.UNSCALED.network_config_kwargs(), dtype='bfloat16'
  )
  write_folder(tmp_path / 'again', folder.architecture, folder.family, folder.read_array)
  again = HuggingFaceFolder(tmp_path / 'again')
  assert set(again.tensors.entries) == set(folder.tensors.entries)
  for name in folder.tensors.entries:
    np.testing.assert_array_equal(again.tensors.read(name), folder.tensors.read(name))


def test_an_untied_switch_transformer_may_lack_the_copies_of_its_embedding(tmp_path):
  arch = dataclasses.replace(cases.SWITCH, logits_via_embedding=False)
  path, ours = folders.make(
    tmp_path, 'switch', arch, change=lambda tensors: [tensors.pop(name) for name in _TABLES]
  )
  folders.check(path, ours, arch)
  write_folder(tmp_path / 'out', arch, FAMILIES['switch'], ours.__getitem__)
  assert {'shared.weight', *_TABLES} < set(
    folders.check(tmp_path / 'out', ours, arch).tensors.entries
  )


def test_a_missing_logits_kernel_is_not_a_tied_one(tmp_path):
  path, _ = folders.make(tmp_path, 't5_1_1', change=lambda tensors: tensors.pop('lm_head.weight'))
  with pytest.raises(
    CheckpointError, match=re.escape(f'missing {_LOGITS} (6, 13) <-> lm_head.weight (13, 6)')
  ):
    HuggingFaceFolder(path)


def test_problems_name_both_sides(tmp_path):
  wo, q = (
    'encoder.block.0.layer.1.DenseReluDense.wo.weight',
    'decoder.block.1.layer.1.EncDecAttention.q.weight',
  )

  def change(tensors):
    tensors[wo] = np.ones([6, 11], np.float32)
    tensors['classifier.weight'] = np.ones([2, 6], np.float32)
    tensors['encoder.final_layer_norm.weight'] = np.ones([6], np.int8)
    del tensors[q]

  path, _ = folders.make(tmp_path, change=change)
  with pytest.raises(CheckpointError) as error:
    HuggingFaceFolder(path)
  text = str(error.value)
  assert (
    f'missing decoder/layers_1/encoder_decoder_attention/query/kernel (6, 6) <-> {q} (6, 6)' in text
  )
  assert (
    f'encoder/layers_0/mlp/wo/kernel (10, 6) <-> {wo} must have shape (6, 10), got (6, 11)' in text
  )
  assert 'surplus classifier.weight (2, 6)' in text
  assert (
    'encoder/encoder_norm/scale <-> encoder.final_layer_norm.weight must have one' in text
    and 'int8' in text
  )
  assert str(path) in text


def test_an_expert_that_is_missing_is_named(tmp_path):
  name = 'encoder.block.1.layer.1.mlp.experts.expert_0.wi.weight'
  path, _ = folders.make(tmp_path, 'switch', change=lambda tensors: tensors.pop(name))
  with pytest.raises(
    CheckpointError,
    match=re.escape(f'missing encoder/layers_1/mlp/expert/wi/kernel (3, 6, 10) <-> {name} (10, 6)'),
  ):
    HuggingFaceFolder(path)


def test_experts_of_several_dtypes_are_rejected(tmp_path):
  name = 'encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight'
  path, _ = folders.make(
    tmp_path, 'switch', change=lambda tensors: tensors.update({name: tensors[name].astype('f2')})
  )
  with pytest.raises(CheckpointError, match='one floating-point dtype in an array, got float'):
    HuggingFaceFolder(path)


@pytest.mark.parametrize(
  'family, config, match',
  [
    ('t5_1_1', dict(num_layers=10**4), '10002 layers'),
    ('switch', dict(num_experts=10**9), '1000000000 experts'),
    ('t5_1_1', dict(model_type='longt5'), 'longt5'),
    ('t5_1_1', dict(num_layers=4), 'missing encoder/layers_3'),
    (
      't5_1_1',
      dict(vocab_size=14),
      r'token_embedder/embedding \(14, 6\).*must have shape \(14, 6\), got \(13, 6\)',
    ),
  ],
)
def test_a_config_json_of_another_model_is_rejected(tmp_path, family, config, match):
  path, _ = folders.make(tmp_path, family, **config)
  with pytest.raises(CheckpointError, match=match):
    HuggingFaceFolder(path)


def test_incomplete_folders_are_rejected(tmp_path):
  path, _ = folders.make(tmp_path)
  config = (path / CONFIG_FILE).read_text()
  for content, match in (
    ('{', 'invalid JSON'),
    ('[]', 'got a list'),
    ('[' * 100_000, 'invalid JSON'),
  ):
    (path / CONFIG_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=match):
      HuggingFaceFolder(path)
  (path / CONFIG_FILE).unlink()
  assert not is_hugging_face_folder(path)
  with pytest.raises(CheckpointError, match='got one without config.json'):
    HuggingFaceFolder(path)
  (path / 'adapter_config.json').write_text('{}')
  with pytest.raises(CheckpointError, match='only an adapter'):
    HuggingFaceFolder(path)
  (path / CONFIG_FILE).write_text(config)
  (path / 'model.safetensors').rename(path / 'pytorch_model.bin')
  assert is_hugging_face_folder(path)
  with pytest.raises(CheckpointError, match='got only pytorch_model.bin'):
    HuggingFaceFolder(path)


@pytest.mark.parametrize('opened', [HuggingFaceFolder, network_config])
def test_an_epsilon_that_is_null_is_logged_once_a_folder(tmp_path, caplog, opened):
  caplog.set_level('INFO')
  path, _ = folders.make(tmp_path)
  config = json.loads((path / CONFIG_FILE).read_text())
  for value in (1e-6, None, None):
    (path / CONFIG_FILE).write_text(json.dumps({**config, 'layer_norm_epsilon': value}))
    opened(path)
  assert [record.message for record in caplog.records] == [
    f'{path}: layer_norm_epsilon of config.json is null: the norms add 1e-06.'
  ]


def _sharded(tmp_path, family, metadata=None, held='shared.weight', **unheld):
  """Return (path, our arrays) of a folder in two shards, with further names in its index."""
  path, ours = folders.make(tmp_path, family)
  tensors = SafetensorsFolder(path)
  named = {name: tensors.read(name) for name in tensors.entries}
  named[held] = named.pop('shared.weight')
  (path / 'model.safetensors').unlink()
  weight_map = {}
  for i, file in enumerate(('a.safetensors', 'b.safetensors')):
    part = dict(list(named.items())[i::2])
    cases.write_safetensors(
      path / file, part, **(metadata or {} if file == 'b.safetensors' else {})
    )
    weight_map |= dict.fromkeys(part, file)
  (path / 'model.safetensors.index.json').write_text(
    json.dumps({'weight_map': weight_map | unheld})
  )
  return path, ours


@pytest.mark.parametrize(
  'family, held, metadata, unheld',
  [
    # As the conversion of the hub wrote google/flan-t5-xl.
    ('t5_1_1', 'shared.weight', dict.fromkeys(_TABLES, 'shared.weight'), _TABLES),
    ('t5_1_1', 'shared.weight', None, _TABLES),
    ('t5_1_0', 'shared.weight', None, (*_TABLES, 'lm_head.weight')),
    ('t5_1_0', 'lm_head.weight', None, ('shared.weight',)),
    # A name that is not of the table shares the values that the metadata of another shard say.
    ('t5_1_1', 'shared.weight', {'some.buffer': 'shared.weight'}, ('some.buffer',)),
  ],
)
def test_names_of_an_index_that_no_shard_holds_may_be_tied(
  tmp_path, family, held, metadata, unheld
):
  path, ours = _sharded(tmp_path, family, metadata, held, **dict.fromkeys(unheld, 'a.safetensors'))
  folders.check(path, ours, cases.BY_FAMILY[family])
  copy = convert.convert(str(path), str(tmp_path / 'copy'), to='hugging_face')
  folders.check(pathlib.Path(copy.path), ours, cases.BY_FAMILY[family])


def test_a_model_of_the_hub_may_have_such_an_index(tmp_path, monkeypatch):
  path, ours = _sharded(tmp_path, 't5_1_1', **dict.fromkeys(_TABLES, 'a.safetensors'))
  (path / 'tokenizer_config.json').write_text('{}')
  hub_cache.add(hub_cache.use(tmp_path / 'cache', monkeypatch), 'google/flan', path)
  folders.check('hf://google/flan', ours, cases.SMALL)


def test_tied_norms_are_read_by_the_metadata(tmp_path):
  norms = ('encoder.final_layer_norm.weight', 'decoder.final_layer_norm.weight')

  def change(tensors):
    del tensors[norms[1]]

  path, ours = folders.make(tmp_path, change=change)
  tensors = SafetensorsFolder(path)
  named = {name: tensors.read(name) for name in tensors.entries}
  (path / 'model.safetensors').unlink()
  cases.write_safetensors(path / 'a.safetensors', named, **{norms[1]: norms[0]})
  index = {'weight_map': dict.fromkeys([*named, norms[1]], 'a.safetensors')}
  (path / 'model.safetensors.index.json').write_text(json.dumps(index))
  ours['decoder/decoder_norm/scale'] = ours['encoder/encoder_norm/scale']
  folders.check(path, ours, cases.SMALL)


@pytest.mark.parametrize('name', ['lm_head.weight', 'encoder.final_layer_norm.weight'])
def test_other_names_of_an_index_that_no_shard_holds_are_missing(tmp_path, name):
  path, _ = _sharded(tmp_path, 't5_1_1')
  index = json.loads((path / 'model.safetensors.index.json').read_text())
  file = path / index['weight_map'][name]
  part = safetensors.numpy.load_file(file)
  del part[name]
  cases.write_safetensors(file, part)
  with pytest.raises(CheckpointError, match=rf'(missing .*|lacks the tensors.*){name}'):
    HuggingFaceFolder(path)


def test_the_architecture_of_our_parameters_and_of_their_folder_is_one(tmp_path):
  path, ours = folders.make(tmp_path, 'switch')
  assert Architecture.from_shapes(ours) == HuggingFaceFolder(path).architecture


def test_large_tensors_in_a_store_are_read_in_parts(tmp_path, store, monkeypatch):
  path, ours = folders.make(tmp_path)
  for file in path.iterdir():
    files.write(f'{store.root}/{file.name}', file.read_bytes())
  monkeypatch.setattr(tensor_files, '_PART_BYTES', 1000)
  arch = cases.BY_FAMILY['t5_1_1']
  folders.check(store.root, ours, arch)
  with files.path(f'{store.root}/model.safetensors').open('rb') as file:
    content = file.read()
  folder = HuggingFaceFolder(store.root)
  files.write(
    f'{store.root}/model.safetensors', content[:-100]
  )  # it was replaced while it was open
  with pytest.raises(CheckpointError, match='became shorter'):
    for name in ours:
      folder.read_array(name)
