"""A subclass that changes only the loss: the example of docs/custom.md."""

import pathlib
import re
import types

import gin
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import gin_utils
from t5x_lite import models
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.networks import t5
from tests.examples import focal_model
from tests.networks import network_cases as cases

_CONFIG = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=1)
_VOCABULARY = types.SimpleNamespace(vocab_size=40, eos_id=1, pad_id=0)
_FOLDER = pathlib.Path(__file__).parent


def _model(model_cls, **options):
  return model_cls(t5.Transformer(_CONFIG), _VOCABULARY, _VOCABULARY, None, **options)


def test_the_loss_and_nothing_else_is_the_focal_loss():
  batch = cases.tiny_batch(batch=2, decoder_length=5)
  params = cases.random_params(_CONFIG)
  logits = np.asarray(cases.forward(_CONFIG, params, batch), np.float64)
  targets = np.asarray(batch['decoder_target_tokens'])
  log_probs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
  log_prob = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  weights = np.asarray(batch.get('decoder_loss_weights', np.ones(targets.shape)))
  want = -np.sum(weights * (1 - np.exp(log_prob)) ** 2 * log_prob)

  model = _model(focal_model.FocalModel, z_loss=0.0)
  loss, metrics = cases.jit(model.eval_fn)(params, batch)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  plain_loss, plain_metrics = cases.jit(_model(models.EncoderDecoderModel, z_loss=0.0).eval_fn)(
    params, batch
  )
  assert loss < 0.99 * plain_loss
  assert metrics['accuracy'].compute() == plain_metrics['accuracy'].compute()

  # The weights have gradients, too: along the gradient, the loss changes by its squared norm.
  def loss_of(scale):
    gradient = jax.grad(lambda params: model.eval_fn(params, batch)[0])(params)
    moved = jax.tree.map(lambda p, g: p + scale * g, params, gradient)
    norm = sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient))
    return model.eval_fn(moved, batch)[0], norm

  up, norm = cases.jit(loss_of)(1e-4)
  down, _ = cases.jit(loss_of)(-1e-4)
  np.testing.assert_allclose((up - down) / 2e-4, norm, rtol=0.02)


def test_the_gin_file_needs_only_the_name(monkeypatch):
  monkeypatch.syspath_prepend(str(_FOLDER))
  page = (_FOLDER.parents[1] / 'docs' / 'custom.md').read_text(encoding='utf-8')
  (shown,) = re.findall(r'`focal.gin`:\n\n```gin\n(.*?)```', page, re.DOTALL)
  text = shown + "MODEL_DIR = 'runs/x'\nZ_LOSS = 0.25\n"
  texts = gin_utils.read(
    ['recipes/keyword_cloze.gin'], [gin_syntax.read_text(text, 'own.gin', is_flag=False)]
  )
  configuration = gin_utils.load('t5x_lite.apps.train.train', texts)
  model = configuration.argument('model')
  assert model.gamma == 1.0 and model.module.config.emb_dim == 64
  assert model.decode_fn.__name__ == 'greedy_search'
  # Uniform logits of 384 tokens have the z-loss 0.25 * log(384)**2 per token.
  z_loss = model.weighted_loss(jnp.zeros((1, 1, 384)), jnp.ones((1, 1), int), None, None)[1]
  np.testing.assert_allclose(z_loss, 0.25 * np.log(384) ** 2 * (1 - 1 / 384), rtol=1e-5)
  gin.clear_config()
