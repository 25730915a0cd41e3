"""The whole way by commands: a folder of `transformers`, fine-tuned, converted, loaded and used by `transformers`."""

import json
import math

import gin
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.command_line import cli
from t5x_lite.data import tokenizer_folders
from tests.interop import folder_cases
from tests.interop import hf_models
from tests.interop import reference

_LENGTH = 16


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


@pytest.fixture
def few_optimizations():
  """Programs are compiled fast, and run slowly."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


def _main(*arguments):
  assert cli.main([str(argument) for argument in arguments]) == 0


@pytest.mark.full  # by default, tests/repository/test_finetune_recipes.py fine-tunes and converts
@pytest.mark.usefixtures('few_optimizations')
@pytest.mark.parametrize('name', ['published_bytes', 'byte_level_bpe'])
def test_fine_tune_convert_and_generate(name, request, tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')
  theirs, run, back = tmp_path / 'theirs', tmp_path / 'run', tmp_path / 'back'
  tokenizer, family = request.getfixturevalue(name), folder_cases.FORMS[name]
  model, batch = folder_cases.model_and_batch(name, tokenizer)
  model.save(theirs)
  folder_cases.copy_tokenizer(tokenizer, theirs)
  _main(
    'train',
    '--gin_file=recipes/finetune_from_hf.gin',
    f'--gin.INITIAL_CHECKPOINT_PATH={theirs}',
    f'--gin.MODEL_DIR={run}',
    '--gin.TRAIN_STEPS=3',
    '--gin.BATCH_SIZE=8',
    '--gin.DROPOUT_RATE=0.0',
    '--gin.train_script.train.infer_eval_dataset_cfg=None',
    '--gin.train_script.train.train_eval_dataset_cfg=None',
    '--gin.train_script.train.stats_period=1',
  )
  losses = [
    json.loads(line)['loss'] for line in (run / 'train' / 'metrics.jsonl').read_text().splitlines()
  ]
  bound = 2 * math.log(model.config['vocab_size'])
  assert len(losses) == 3 and all(0 < loss < bound for loss in losses)
  _main('convert', run, back, '--to=hugging_face', f'--tokenizer={theirs}')
  # The weights differ between machines: recorded is that transformers loads a folder of these files and arrays.
  trained = reference.load_theirs(f'{name}/fine_tuned', back, family, weights_vary=True)
  params = checkpoints.load(str(run / 'checkpoint_3'))['target']
  reference.assert_same_bits(reference.our_tree(trained.tensors, family), params)
  start = reference.our_tree(model.tensors, family)
  # Every parameter has moved a little, from where it was over there.
  moved = jax.tree.map(
    lambda new, old: np.linalg.norm(new - old) / np.linalg.norm(old), params, start
  )
  assert min(jax.tree.leaves(moved)) > 0 and max(jax.tree.leaves(moved)) < 0.1
  assert trained.config['eos_token_id'] == model.config['eos_token_id']
  module = reference.our_module(family)

  def ours():
    logits = module.apply({'params': params}, **batch, enable_dropout=False)
    inputs, end = batch['encoder_input_tokens'], model.config['eos_token_id']
    return logits, reference.greedy_tokens(module, params, inputs, _LENGTH, end)

  assert trained.agrees(batch, _LENGTH, ours) == {'logits': True, 'tokens': True}
  found = hf_models.HFTokenizer(f'{name}/fine_tuned', 'AutoTokenizer', back).generate_texts(
    trained, ['to be or not <extra_id_0> be', 'a']
  )
  vocabulary = tokenizer_folders.hugging_face_vocabulary(str(theirs))
  ids = [*vocabulary.encode('a'), vocabulary.eos_id]
  assert found['ids'][1, : len(ids)].tolist() == ids
  assert found['num_texts'] == 2
