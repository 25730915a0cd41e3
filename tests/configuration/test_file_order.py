"""The order of files: what a later file takes away is logged, and the choice of parameters stays."""

import json
import logging

import gin
import jax
import jax.numpy as jnp
import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax

_FLAGS = ("MODEL_DIR = 'runs/x'", "INITIAL_CHECKPOINT_PATH = 'folder'")


@pytest.fixture(autouse=True)
def clean():
  yield
  gin.clear_config()


def _load(*files, flags=_FLAGS[:1]):
  texts = [gin_syntax.read_text(flag, flag) for flag in flags]
  return gin_utils.load('t5x_lite.apps.train.train', gin_utils.read(files, texts))


@pytest.mark.parametrize(
  'files, unused',
  [
    (['recipes/keyword_cloze.gin'], ''),
    (['recipes/keyword_cloze.gin', 'optimizers/lion.gin'], ''),
    (
      ['recipes/keyword_cloze.gin', 'optimizers/sgd.gin', 'optimizers/lion.gin'],
      'optimizers.sgd.momentum',
    ),
    (
      ['recipes/keyword_cloze.gin', 'optimizers/multi_optimizer.gin', 'optimizers/lion.gin'],
      'optimizers.MultiOptimizer.traversals_and_optimizers (optimizers/multi_optimizer.gin:14)',
    ),
  ],
)
def test_bindings_that_a_later_file_takes_away_are_logged(caplog, files, unused):
  with caplog.at_level(logging.INFO, 't5x_lite'):
    _load(*files)
  lines = [each for each in caplog.messages if each.startswith('Not used for training')]
  if unused:
    (line,) = lines
    assert unused in line
  else:
    assert not lines


def test_bindings_that_a_subclass_inherits_are_not_logged(tmp_path, monkeypatch, caplog):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'models_of_test_file_order.py').write_text(
    'from t5x_lite import models\n'
    'class Middle(models.EncoderDecoderModel):\n'
    '  pass\n'
    'class Mine(Middle):\n'
    '  def __init__(self, *args, **kwargs):\n'
    '    super().__init__(*args, **kwargs)\n'
  )
  (tmp_path / 'mine.gin').write_text(
    'from __gin__ import dynamic_registration\n'
    'import models_of_test_file_order as mine\n'
    'MODEL = @mine.Mine()\n'
  )
  with caplog.at_level(logging.INFO, 't5x_lite'):
    _load('recipes/keyword_cloze.gin', str(tmp_path / 'mine.gin'))
  assert 'Bindings of models.EncoderDecoderModel apply to' in caplog.text
  assert 'Not used for training' not in caplog.text


@pytest.mark.parametrize('more', [[], ['optimizers/lion.gin'], ['optimizers/sgd.gin']])
def test_the_choice_of_parameters_survives_another_optimizer(tmp_path, monkeypatch, more):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'folder').mkdir()
  config = {
    'model_type': 't5',
    'vocab_size': 384,
    'd_model': 8,
    'num_heads': 2,
    'd_kv': 4,
    'd_ff': 16,
    'num_layers': 1,
    'feed_forward_proj': 'gated-gelu',
    'tokenizer_class': 'ByT5Tokenizer',
  }
  (tmp_path / 'folder' / 'config.json').write_text(json.dumps(config))
  model = _load('recipes/finetune_chosen_params.gin', *more, flags=_FLAGS).argument('model')
  params = {
    'encoder': {
      'layers_0': {'mlp': {'wi_0': {'kernel': jnp.ones((3, 5))}}},
      'encoder_norm': {'scale': jnp.ones(2)},
      'relpos_bias': {'rel_embedding': jnp.ones((2, 2))},
    },
    'decoder': {'layers_0': {'encoder_decoder_attention': {'query': {'kernel': jnp.ones((2, 7))}}}},
  }
  state = jax.eval_shape(model.optimizer_def.init_state, params)
  shapes = {array.shape for array in jax.tree.leaves(state) if array.ndim}
  assert shapes == {(2,), (2, 2), (2, 7)}
