"""Cached decoding: the same logits as without a cache, and what a step costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import t5
from tests.core import network_cases as cases

_VARIANTS = {
    't5': dict(),
    't5-looped': dict(scan_layers=True),
    'scalable': dict(param_layout='scalable_t5'),
    'scalable-looped': dict(param_layout='scalable_t5', scan_layers=True, remat_policy='minimal'),
}


def _init_cache(module, params, encoded, batch, length):
  result, variables = module.apply(
      {'params': params}, encoded, batch['encoder_input_tokens'], length, method=module.init_cache, mutable=['cache'])
  assert result is None
  return variables['cache']


def _step_fn(module, batch, length):
  """Returns fn(params, cache, encoded, tokens [b, 1]) -> (logits [b, 1, vocab], cache)."""

  def step(params, cache, encoded, tokens):
    logits, variables = module.apply(
        {'params': params, 'cache': cache}, encoded, batch['encoder_input_tokens'], tokens, tokens,
        enable_dropout=False, decode=True, max_decode_length=length, mutable=['cache'], method=module.decode)
    return logits, variables['cache']

  return step


def _decode(module, params, cache, encoded, batch):
  """Returns the logits of one step after the other, teacher-forced."""
  tokens = batch['decoder_input_tokens']
  step = cases.jit(_step_fn(module, batch, tokens.shape[1]))
  logits = []
  for i in range(tokens.shape[1]):
    out, cache = step(params, cache, encoded, tokens[:, i:i + 1])
    assert out.shape[1] == 1 and out.dtype == jnp.float32
    logits.append(out)
  return np.concatenate(logits, axis=1), cache


@pytest.mark.parametrize('variant', _VARIANTS)
def test_cached_logits_equal_uncached_ones(variant):
  config = cases.tiny_config(**_VARIANTS[variant])
  module = t5.Transformer(config)
  batch = cases.tiny_batch()
  params = cases.random_params(config)

  def teacher_forced(params):
    encoded = module.apply({'params': params}, batch['encoder_input_tokens'], enable_dropout=False, method='encode')
    logits = module.apply({'params': params}, encoded, **batch, enable_dropout=False, method='decode')
    return encoded, logits, _init_cache(module, params, encoded, batch, 5)

  encoded, expected, cache = cases.jit(teacher_forced)(params)
  # The encoder's output is not projected again: a step does not look at it.
  logits, cache = _decode(module, params, cache, jnp.full_like(encoded, jnp.nan), batch)
  real = np.asarray(batch['decoder_target_tokens']) > 0
  np.testing.assert_allclose(logits[real], np.asarray(expected)[real], rtol=1e-5, atol=1e-5)
  indices = [leaf for name, leaf in tree_utils.named_leaves(cache) if name.endswith('cache_index')]
  assert all(np.all(np.asarray(index) == 5) for index in indices)


@pytest.mark.parametrize('layout, prefix, batch_dim', [('t5', 'layers_0', 0), ('scalable_t5', 'decoder', 1)])
def test_cache_has_t5xs_leaves_and_says_where_its_batch_is(layout, prefix, batch_dim):
  module = t5.Transformer(cases.tiny_config(param_layout=layout))
  batch = cases.tiny_batch()
  params = jax.eval_shape(
      lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0))
  cache = jax.eval_shape(
      lambda params: _init_cache(module, params, jnp.zeros((4, 6, 16)), batch, 9), params)
  layer = tree_utils.flatten_dict(cache['decoder'][prefix])
  lead = (3,) if batch_dim else ()
  assert {name: leaf.shape for name, leaf in layer.items()} == {
      'self_attention/cached_key': (*lead, 4, 2, 9, 8), 'self_attention/cached_value': (*lead, 4, 2, 9, 8),
      'self_attention/cache_index': lead, 'encoder_decoder_attention/cached_key': (*lead, 4, 2, 6, 8),
      'encoder_decoder_attention/cached_value': (*lead, 4, 2, 6, 8)}
  assert module.cache_offset == batch_dim


def test_cache_made_in_t5xs_way_works_too():
  """A pass over dummies makes the self-attention cache; the encoder's output is projected in each step then."""
  config = cases.tiny_config()
  module = t5.Transformer(config)
  batch = cases.tiny_batch()
  params = cases.random_params(config)
  dummies = {name: jnp.ones_like(value) for name, value in batch.items()}
  make = cases.jit(functools.partial(module.apply, enable_dropout=False, decode=True, mutable=['cache']))
  _, variables = make({'params': params}, **dummies)
  assert 'encoder_decoder_attention' not in variables['cache']['decoder']['layers_0']
  encode = cases.jit(functools.partial(module.apply, enable_dropout=False, method='encode'))
  encoded = encode({'params': params}, batch['encoder_input_tokens'])
  logits, _ = _decode(module, params, variables['cache'], encoded, batch)
  real = np.asarray(batch['decoder_target_tokens']) > 0
  expected = np.asarray(cases.forward(config, params, batch))
  np.testing.assert_allclose(logits[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('variant', ['t5', 't5-looped', 'scalable', 'scalable-looped'])
def test_a_step_works_in_place_and_computes_one_row_of_biases(variant):
  config = cases.tiny_config(**_VARIANTS[variant])
  module = t5.Transformer(config)
  batch = cases.tiny_batch()
  length = 2048
  params = jax.eval_shape(lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0))
  encoded = jax.ShapeDtypeStruct((4, 6, 16), jnp.float32)
  cache = jax.eval_shape(lambda params: _init_cache(module, params, jnp.zeros((4, 6, 16)), batch, length), params)
  tokens = jax.ShapeDtypeStruct((4, 1), jnp.int32)
  lowered = jax.jit(_step_fn(module, batch, length), donate_argnums=1).lower(params, cache, encoded, tokens)
  assert f'{length}x{length}' not in lowered.as_text()
  memory = lowered.compile(compiler_options={'xla_backend_optimization_level': 0}).memory_analysis()
  cache_bytes = tree_utils.num_bytes(cache)
  assert memory.alias_size_in_bytes >= cache_bytes
  # One layer's keys and values may be copied out of an array with all layers; a whole cache may not.
  assert memory.temp_size_in_bytes < 0.8 * cache_bytes


def test_what_does_not_fit_is_refused():
  config = cases.tiny_config()
  module = t5.Transformer(config)
  batch = cases.tiny_batch()
  params = jax.eval_shape(lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0))
  encoded, tokens = jnp.zeros((4, 6, 16)), batch['decoder_input_tokens'][:, :1]
  cache = jax.eval_shape(lambda params: _init_cache(module, params, encoded, batch, 9), params)
  with pytest.raises(ConfigError, match='max_decode_length=8 and a cache of length 9'):
    jax.eval_shape(_step_fn(module, batch, 8), params, cache, encoded, tokens)
  with pytest.raises(ConfigError, match='not packed'):
    jax.eval_shape(lambda params: module.apply(
        {'params': params}, encoded, batch['encoder_input_tokens'], tokens, tokens, decoder_segment_ids=tokens,
        decode=True, method='decode'), params)
