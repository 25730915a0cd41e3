"""Custom schedule, feed-forward block and optimizer: the examples of docs/custom.md, with the gin files of the page."""

import pathlib
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import gin_utils
from t5x_lite import trainer
from t5x_lite import tree_utils
from t5x_lite.configuration import syntax as gin_syntax
from tests.examples import clipped_adamw
from tests.examples import squared_relu
from tests.examples import warmup_stable_decay
from tests.networks import network_cases as cases

_FOLDER = pathlib.Path(__file__).parent


@pytest.fixture
def load(monkeypatch):
  """Returns a function that loads the gin file of the page, as `train` does."""
  monkeypatch.syspath_prepend(str(_FOLDER))
  page = (_FOLDER.parents[1] / 'docs' / 'custom.md').read_text(encoding='utf-8')

  def load(name):
    (shown,) = re.findall(rf'`{name}.gin`:\n\n```gin\n(.*?)```', page, re.DOTALL)
    texts = gin_utils.read(
      ['recipes/keyword_cloze.gin'],
      [gin_syntax.read_text(shown + "MODEL_DIR = 'runs/x'\n", 'own.gin', is_flag=False)],
    )
    return gin_utils.load('t5x_lite.apps.train.train', texts)

  yield load
  gin.clear_config()


def test_schedule_has_three_parts():
  rate = warmup_stable_decay.warmup_stable_decay(2.0, 4, 100, 500)
  rates = [float(jax.jit(rate)(jnp.int32(step))) for step in (0, 3, 399, 400, 425, 500)]
  np.testing.assert_allclose(rates, [0.5, 2.0, 2.0, 2.0, 1.0, 0.0], rtol=1e-6)


def test_gin_file_of_the_schedule(load):
  configuration = load('warmup_stable_decay')
  rate = configuration.bound_in_scopes(trainer.Trainer, [''])['learning_rate_fn']
  np.testing.assert_allclose([rate(49), rate(425)], [0.004, 0.002], rtol=1e-6)


def test_feed_forward_block_is_that_of_the_formula():
  config = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=1)
  block = squared_relu.squared_relu('encoder', 0)(config, name='mlp')
  x = jax.random.normal(jax.random.key(0), (2, 3, config.emb_dim))
  variables = block.init(jax.random.key(1), x, deterministic=True)
  wi, wo = (np.asarray(variables['params'][name]['kernel']) for name in ('wi', 'wo'))
  want = np.maximum(np.asarray(x) @ wi, 0) ** 2 @ wo
  got = block.apply(variables, x, deterministic=True)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_gin_file_of_the_block(load):
  module = load('squared_relu').argument('model').module
  assert module.custom_blocks == ('feed_forward_fn',)
  shapes = jax.eval_shape(
    lambda: module.init(jax.random.key(0), **cases.tiny_batch(), enable_dropout=False)
  )
  names = [name for name, _ in tree_utils.named_leaves(shapes['params']) if '/mlp/' in name]
  assert len(names) == 2 * 4 and {name.split('/mlp/')[1] for name in names} == {
    'wi/kernel',
    'wo/kernel',
  }


def test_optimizer_clips_each_array():
  params = {'a': jnp.ones([3, 2]), 'b': jnp.ones([2])}
  grads = jax.tree.map(lambda p: 5 * p, params)
  got = (
    clipped_adamw.clipped_adamw(threshold=0.5)
    .create(params)
    .apply_gradient(grads, learning_rate=0.1)
  )
  # The first update of Adam has the root mean square 1.
  jax.tree.map(lambda new: np.testing.assert_allclose(new, 1 - 0.1 * 0.5, rtol=1e-5), got.target)
  reference = optax.adamw(0.1, weight_decay=0.01)
  updates, _ = reference.update(grads, reference.init(params), params)
  unclipped = (
    clipped_adamw.clipped_adamw(threshold=10.0, weight_decay=0.01)
    .create(params)
    .apply_gradient(grads, learning_rate=0.1)
  )
  want = optax.apply_updates(params, updates)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), unclipped.target, want)


def test_gin_file_of_the_optimizer(load):
  optimizer_def = load('clipped_adamw').argument('model').optimizer_def
  assert optimizer_def.uses_learning_rate
