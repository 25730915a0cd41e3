"""Weights that go over and come back are the same bits; and what T5X computed, PyTorch computes from its checkpoint."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.apps.convert import run as convert
from tests import golden_data
from tests.checkpoints.sources import t5x_samples
from tests.interop import hf_models
from tests.interop import reference


@pytest.mark.parametrize(
  'name, dtype, shards',
  [
    *(
      pytest.param(
        name,
        'bfloat16',
        3,
        marks=[] if name in ('tied_unscaled', 'mt5', 'umt5', 'switch') else [pytest.mark.full],
      )
      for name in reference.FAMILIES
    ),
    *(
      pytest.param(name, 'float32', 1, marks=[] if name == 't5_1_0' else [pytest.mark.full])
      for name in reference.FAMILIES
    ),
  ],
)
def test_theirs_to_ours_and_back(name, dtype, shards, tmp_path):
  family = reference.FAMILIES[name]
  if family.sparse:
    model = reference.hf_model(family, router_jitter_noise=0.01, expert_capacity=5)
  else:
    model = reference.hf_model(family)
  if dtype != 'float32':
    model = model.cast(dtype)
  num_bytes = model.num_bytes
  there = model.save(tmp_path / 'theirs', shards)
  here = convert.convert(there, str(tmp_path / 'ours'), to='t5x_lite')
  assert here.dtypes == {dtype: here.num_arrays - 1}
  back = convert.convert(
    here.path,
    str(tmp_path / 'back'),
    to='hugging_face',
    max_shard_size=num_bytes // shards,
    family='mt5' if name == 'mt5' else None,
  )
  assert len(list(pathlib.Path(there).glob('*.safetensors'))) >= shards
  assert len(list(pathlib.Path(back.path).glob('*.safetensors'))) >= shards
  assert reference.tensor_bits(back.path) == reference.tensor_bits(there)
  assert reference.config_of(f'{model.name}/back', back.path) == reference.config_of(
    model.name, there
  )
  # A run has float32 parameters whatever the folder has.
  reference.assert_same_bits(
    reference.restore(there, family),
    reference.our_tree(
      {key: value.astype(np.float32) for key, value in model.tensors.items()}, family
    ),
  )


@pytest.mark.parametrize(
  'layers',
  [
    # Every layer; layer 1 of 4; a number of 0 with 2 layers, and with 3.
    dict(
      num_layers=2, num_sparse_encoder_layers=2, num_decoder_layers=4, num_sparse_decoder_layers=1
    ),
    pytest.param(
      dict(
        num_layers=2, num_sparse_encoder_layers=0, num_decoder_layers=3, num_sparse_decoder_layers=0
      ),
      marks=pytest.mark.full,
    ),
  ],
)
def test_which_layers_are_sparse(layers, tmp_path):
  theirs = reference.hf_model(reference.FAMILIES['switch'], **layers)
  there = theirs.save(tmp_path / 'theirs')
  here = convert.convert(there, str(tmp_path / 'ours'), to='t5x_lite')
  back = convert.convert(here.path, str(tmp_path / 'back'), to='hugging_face')
  assert reference.tensor_bits(back.path) == reference.tensor_bits(there)
  model = reference.load_theirs(f'{theirs.name}/back', back.path, reference.FAMILIES['switch'])
  assert (
    model.config['encoder_sparse_step']
    == reference.config_of(theirs.name, there)['encoder_sparse_step']
  )


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_rounding_is_that_of_pytorch(dtype, tmp_path):
  model = reference.hf_model(reference.FAMILIES['t5_1_0'])
  there = model.save(tmp_path / 'theirs')
  cast = convert.convert(there, str(tmp_path / 'cast'), to='hugging_face', dtype=dtype).path
  assert reference.tensor_bits(cast) == reference.tensor_bits(
    model.cast(dtype).save(tmp_path / 'want')
  )
  loaded = reference.load_theirs(f't5_1_0/cast_{dtype}', cast, reference.FAMILIES['t5_1_0'])
  assert loaded.notes['dtype'] == dtype


@pytest.mark.parametrize(
  'name',
  [
    pytest.param('t5_1_0', marks=pytest.mark.full),
    'umt5',
    pytest.param('byt5', marks=pytest.mark.full),
  ],
)
@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
def test_theirs_to_t5x_and_back(name, layout, tmp_path):
  """In T5X's form only names and shapes describe the network; stacked, all layers have a table."""
  model = reference.hf_model(reference.FAMILIES[name])
  there = model.save(tmp_path / 'theirs')
  here = convert.convert(there, str(tmp_path / 'ours'), to='t5x', param_layout=layout)
  assert (here.format, here.param_layout) == ('t5x', layout)
  back = convert.convert(here.path, str(tmp_path / 'back'), to='hugging_face')
  assert reference.tensor_bits(back.path) == reference.tensor_bits(there)
  assert reference.config_of(f'{model.name}/back_from_t5x', back.path) == reference.config_of(
    model.name, there
  )


def test_a_folder_as_they_were_published_first(tmp_path):
  """With copies of the embedding table, positions of the attention to the encoder, and the flag of untied models."""
  family = reference.FAMILIES['t5_1_1']
  tensors = reference.hf_model(family).tensors
  tensors['decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'] = np.ones(
    (32, 4), np.float32
  )
  config = dict(reference.hf_model(family).config)
  del config['scale_decoder_outputs'], config['dense_act_fn'], config['is_gated_act']
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors')
  (tmp_path / 'config.json').write_text(json.dumps({**config, 'tie_word_embeddings': False}))
  params = reference.restore(str(tmp_path), family)
  del tensors['decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight']
  reference.assert_same_bits(params, reference.our_tree(tensors, family))


@pytest.fixture(scope='module')
def samples(tmp_path_factory):
  """Directories of the checkpoints that T5X wrote, by form."""
  return t5x_samples.unpack(tmp_path_factory.mktemp('t5x'))


@pytest.mark.parametrize('form', ['t5x', pytest.param('t5x_orbax', marks=pytest.mark.full)])
def test_of_t5x_to_theirs_and_back(samples, form, tmp_path):
  there = convert.convert(str(samples[form]), str(tmp_path / 'theirs'), to='hugging_face')
  back = convert.convert(there.path, str(tmp_path / 'back'), to='t5x', step=t5x_samples.STEP)
  want = checkpoints.load(str(samples[form] / f'checkpoint_{t5x_samples.STEP}'))
  got = checkpoints.load(back.path)
  reference.assert_same_bits(
    got, {'target': want['target'], 'state': {'step': want['state']['step']}}
  )
  if form == 't5x':
    # Array by array the files are those that T5X wrote, too.
    chunks = t5x_samples.read_chunks(samples[form] / f'checkpoint_{t5x_samples.STEP}')
    written = t5x_samples.read_chunks(pathlib.Path(back.path))
    assert written.keys() == {name for name in chunks if name.startswith('target/')}
    for name, array in written.items():
      np.testing.assert_array_equal(array, chunks[name])


def test_pytorch_gives_the_results_of_t5x_from_its_checkpoint(samples, tmp_path):
  description, arrays = golden_data.load(f't5x/{t5x_samples.NAME}')
  folder = convert.convert(str(samples['t5x']), str(tmp_path / 'theirs'), to='hugging_face').path
  model = reference.load_theirs('t5x_sample', folder, reference.FAMILIES['t5_1_1'])
  assert model.config['num_layers'] == description['config']['num_encoder_layers']
  batch = hf_models.Batch('t5x', golden_data.subtree(arrays, 'batch'))
  logits = model.logits(batch)
  assert reference.max_error(logits, arrays['out/logits'], batch) < 1e-5
  params = golden_data.subtree(arrays, 'params')
  assert sum(leaf.size for _, leaf in tree_utils.named_leaves(params)) == model.num_parameters
