"""The whole way by commands: a folder of `transformers`, fine-tuned, converted, loaded and used by `transformers`."""

import json
import math

import gin
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.command_line import cli
from tests.interop import hf_models
from tests.interop import reference

_FAMILY = reference.FAMILIES['byt5']


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
def test_fine_tune_convert_and_generate(tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')
  theirs, run, back = tmp_path / 'theirs', tmp_path / 'run', tmp_path / 'back'
  model = reference.hf_model(_FAMILY)
  model.save(theirs)
  hf_models.HFTokenizer('published_byt5', 'ByT5Tokenizer').save(theirs)
  _main(
    'train',
    '--gin_file=recipes/finetune_from_hf.gin',
    f'--gin.INITIAL_CHECKPOINT_PATH={theirs}',
    f'--gin.MODEL_DIR={run}',
    '--gin.TRAIN_STEPS=2',
    '--gin.BATCH_SIZE=8',
    '--gin.DROPOUT_RATE=0.0',
    '--gin.train_script.train.infer_eval_dataset_cfg=None',
    '--gin.train_script.train.train_eval_dataset_cfg=None',
    '--gin.train_script.train.stats_period=1',
  )
  losses = [
    json.loads(line)['loss'] for line in (run / 'train' / 'metrics.jsonl').read_text().splitlines()
  ]
  assert len(losses) == 2 and all(0 < loss < 2 * math.log(384) for loss in losses)
  _main('convert', run, back, '--to=hugging_face', f'--tokenizer={theirs}')
  # The weights differ between machines: recorded is that transformers loads a folder of these files and arrays.
  trained = reference.load_theirs('fine_tuned', back, _FAMILY, weights_vary=True)
  params = checkpoints.load(str(run / 'checkpoint_2'))['target']
  reference.assert_same_bits(reference.our_tree(trained.tensors, _FAMILY), params)
  start = reference.our_tree(model.tensors, _FAMILY)
  # Every parameter has moved a little, from where it was over there.
  moved = jax.tree.map(
    lambda new, old: np.linalg.norm(new - old) / np.linalg.norm(old), params, start
  )
  assert min(jax.tree.leaves(moved)) > 0 and max(jax.tree.leaves(moved)) < 0.1
  tokenizer = hf_models.HFTokenizer('fine_tuned', 'AutoTokenizer', back)
  found = tokenizer.generate_texts(trained, ['to be or not <extra_id_0> be', 'a'])
  assert found['ids'][0, :3].tolist() == [ord(letter) + 3 for letter in 'to ']
  assert found['num_texts'] == 2
