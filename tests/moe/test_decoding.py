"""Predictions of sparse networks: dependence of a row on other rows with a capacity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import models
from moe import networks
from moe import routing
from t5x_lite import decoding
from t5x_lite.data import vocabularies
from t5x_lite.networks import decoder_only
from tests.networks import network_cases as cases

_VOCABULARY = vocabularies.PassThroughVocabulary(40, eos_id=39)


def _block(**fields):
  router = routing.TokensChooseRouter(4, num_selected=2, normalize_gates=True)
  return networks.SparseBlock(
    **dict(
      num_experts=4,
      router=router,
      expert_dim=12,
      train_capacity_factor=0.5,
      eval_capacity_factor=0.5,
      min_expert_capacity=1,
    )
    | fields
  )


def _params(module, **inputs):
  shapes = jax.eval_shape(
    lambda key: module.init(key, **inputs, enable_dropout=False), jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, shapes['params']
  )


def _decoder_only(**fields):
  config = decoder_only.TransformerConfig(
    vocab_size=40, emb_dim=16, num_heads=2, num_layers=1, head_dim=8, mlp_dim=24, dropout_rate=0.0
  )
  module = networks.sparse_decoder_only(config, _block(**fields), num_decoder_sparse_layers=1)
  return models.MoeDecoderOnlyModel(
    module, _VOCABULARY, None, decode_fn=decoding.temperature_sample
  )


@pytest.mark.parametrize('dispatch', ['auto', pytest.param('einsum', marks=pytest.mark.full)])
def test_prompts_and_steps_do_not_depend_on_other_rows_though_there_is_a_capacity(dispatch):
  model = _decoder_only(dispatch=dispatch)
  tokens = np.random.default_rng(1).integers(1, 39, (6, 10)).astype(np.int32)
  batch = {
    'decoder_input_tokens': jnp.asarray(tokens).at[:, 0].set(0),
    'decoder_causal_attention': jnp.broadcast_to(jnp.arange(10) < 6, (6, 10)).astype(jnp.int32),
  }
  params = _params(
    model.module,
    decoder_input_tokens=jnp.asarray(tokens),
    decoder_target_tokens=jnp.asarray(tokens),
  )
  predict = cases.jit(
    functools.partial(
      model.predict_batch_with_aux,
      rng=jax.random.key(0),
      decoder_params=dict(temperature=0.0, topk=0),
    )
  )
  together, scores = predict(params, batch)
  alone, alone_scores = predict(params, jax.tree.map(lambda x: x[2:3], batch))
  np.testing.assert_array_equal(together[2:3], alone)
  np.testing.assert_allclose(scores['scores'][2:3], alone_scores['scores'], rtol=1e-5)

  # The prompt alone, also without `decode`; teacher forcing uses the capacity of evaluation.
  def logits(rows, **options):
    def run(params, tokens):
      return model.module.apply(
        {'params': params}, tokens, tokens, enable_dropout=False, mutable=['cache'], **options
      )[0]

    return np.asarray(cases.jit(run)(params, tokens[:rows])[:1])

  def prompts(rows):
    return logits(rows, prefill=True, prefill_lengths=jnp.full([rows], 10), max_decode_length=10)

  np.testing.assert_allclose(prompts(6), prompts(1), rtol=1e-4, atol=1e-5)
  assert np.abs(logits(6) - logits(1)).max() > 1e-3


def test_inputs_of_an_encoder_are_under_the_capacity_of_evaluation_and_free_without():
  inputs = jnp.asarray(np.random.default_rng(1).integers(1, 39, (6, 10)), jnp.int32)
  for factor, is_free in ((0.5, False), (None, True)):
    module = networks.sparse_transformer(
      cases.tiny_config(num_encoder_layers=1, num_decoder_layers=1),
      _block(eval_capacity_factor=factor),
      num_encoder_sparse_layers=1,
    )
    params = _params(
      module, encoder_input_tokens=inputs, decoder_input_tokens=inputs, decoder_target_tokens=inputs
    )
    encode = cases.jit(
      lambda params, inputs: module.apply(
        {'params': params}, inputs, enable_dropout=False, method=module.encode
      )
    )
    difference = np.abs(encode(params, inputs)[:1] - encode(params, inputs[:1])).max()
    assert difference < 1e-5 if is_free else difference > 1e-3
