"""A custom metric of models: the example of docs/extending.md."""

import pathlib
import re
import types

from clu import metrics as clu_metrics
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import models as moe_models
from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite import models
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.networks import t5
from t5x_lite.trainer import train_step
from tests.examples.top_5_accuracy import top_5_accuracy
from tests.networks import network_cases as cases

# The metric sees logits alone.
_CONFIG = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=1)
_VOCABULARY = types.SimpleNamespace(vocab_size=40, eos_id=1, pad_id=0)


def _model(model_cls=models.EncoderDecoderModel, **options):
  return model_cls(t5.Transformer(_CONFIG), _VOCABULARY, _VOCABULARY, None, **options)


def _expected(params, batch):
  logits = np.asarray(cases.forward(_CONFIG, params, batch))
  best = np.argsort(-logits, axis=-1)[..., :5]
  targets = np.asarray(batch['decoder_target_tokens'])
  return np.mean(
    [target in row for target, row in zip(targets[targets > 0], best[targets > 0], strict=True)]
  )


@pytest.mark.parametrize(
  'model_cls',
  [
    models.EncoderDecoderModel,
    pytest.param(moe_models.MoeEncoderDecoderModel, marks=pytest.mark.full),
  ],
)
def test_measured_in_training_and_evaluation_and_over_micro_batches(model_cls):
  model = _model(model_cls, metric_fns=[top_5_accuracy])
  batch = cases.tiny_batch(batch=4, decoder_length=9)
  params = cases.random_params(_CONFIG)
  want = _expected(params, batch)
  assert 0 < want < 1
  _, metrics = cases.jit(model.eval_fn)(params, batch)
  np.testing.assert_allclose(metrics['accuracy_top_5'].compute(), want, rtol=1e-6)
  for num_microbatches in (None, 2):
    _, metrics, _ = cases.jit(
      lambda params, num=num_microbatches: train_step.accumulate_grads_microbatched(
        model, types.SimpleNamespace(params=params, flax_mutables={}), batch, None, num
      )
    )(params)
    np.testing.assert_allclose(metrics['accuracy_top_5'].compute(), want, rtol=1e-6)


@pytest.mark.parametrize(
  'metric_fns, message',
  [
    (top_5_accuracy, 'metric_fns` must be a list of functions of'),
    (['top_5_accuracy'], 'metric_fns` must be a list of functions of'),
    ([lambda logits, batch: jnp.mean(logits)], 'must return a dict of clu.metrics.Metric'),
    (
      [lambda logits, batch: {'mean': jnp.mean(logits)}],
      'must return a dict of clu.metrics.Metric',
    ),
    (
      [lambda logits, batch: {'loss': clu_metrics.Average.from_model_output(logits)}],
      r'names that no other metric has, got \[.loss.\]',
    ),
    ([top_5_accuracy, top_5_accuracy], r'names that no other metric has, got \[.accuracy_top_5.\]'),
  ],
)
def test_invalid_metrics_are_rejected(metric_fns, message):
  batch = cases.tiny_batch()
  with pytest.raises(errors.ConfigError, match=message):
    model = _model(metric_fns=metric_fns)
    jax.eval_shape(model.eval_fn, cases.random_params(_CONFIG), batch)


def test_one_gin_binding_is_enough(monkeypatch):
  monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
  page = (pathlib.Path(__file__).parents[2] / 'docs' / 'extending.md').read_text(encoding='utf-8')
  (shown,) = re.findall(r'`top_5_accuracy.gin`:\n\n```gin\n(.*?)```', page, re.DOTALL)
  shown = gin_syntax.read_text(shown + "MODEL_DIR = 'runs/x'\n", 'own.gin', is_flag=False)
  configuration = gin_utils.load('t5x_lite.apps.train.train', [shown])
  model = configuration.argument('model')
  tokens = {name: jax.ShapeDtypeStruct((1, 4), jnp.int32) for name in cases.tiny_batch()}
  params = jax.eval_shape(
    lambda: model.get_initial_variables(
      jax.random.key(0), {name: array.shape for name, array in tokens.items()}
    )
  )['params']
  assert 'accuracy_top_5' in jax.eval_shape(model.eval_fn, params, tokens)[1]
  gin.clear_config()
