"""Networks written with T5X's arguments (masks as arrays, a shared table of positions) equal T5X's and ours."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks import decoder_only
from t5x_lite.networks import scalable_t5
from t5x_lite.networks import t5
from t5x_lite.networks import t5_blocks
from t5x_lite.networks import t5_config
from tests.networks import network_cases as cases


class _StackNetwork(nn.Module):
  """Encoder-decoder of `Encoder` and `Decoder`, which makes the masks itself."""

  config: t5_config.T5Config

  def setup(self):
    self.embedding = t5_blocks.token_embedding(self.config, name='token_embedder')
    self.encoder = t5.Encoder(config=self.config, shared_embedding=self.embedding)
    self.decoder = t5.Decoder(config=self.config, shared_embedding=self.embedding)

  def encode(self, tokens, segments=None):
    mask = layers.make_attention_mask(tokens > 0, tokens > 0)
    if segments is not None:
      mask = layers.combine_masks(mask, layers.make_attention_mask(segments, segments, jnp.equal))
    return self.encoder(tokens, mask, True)

  def decode(
    self, encoded, encoder_tokens, tokens, targets, segments=(None, None), decode=False, length=None
  ):
    mask, valid = None, jnp.ones_like(tokens)
    if not decode:
      mask, valid = (
        layers.make_decoder_mask(targets, jnp.float32, decoder_segment_ids=segments[1]),
        targets > 0,
      )
    cross = layers.make_attention_mask(valid, encoder_tokens > 0)
    if segments[0] is not None:
      cross = layers.combine_masks(
        cross, layers.make_attention_mask(*reversed(segments), jnp.equal)
      )
    return self.decoder(
      encoded,
      tokens,
      None,
      mask,
      cross,
      deterministic=True,
      decode=decode,
      max_decode_length=length,
    )

  def __call__(
    self,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
    **_,
  ):
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids)
    return self.decode(
      encoded,
      encoder_input_tokens,
      decoder_input_tokens,
      decoder_target_tokens,
      (encoder_segment_ids, decoder_segment_ids),
    )


class _LayerStack(nn.Module):
  """Layers of one stack that share a table of positions; T5X's encoder and decoder without embedding and logits."""

  config: t5_config.StackConfig
  layer_cls: type[nn.Module]
  num_layers: int
  table_cls: type[nn.Module] = layers.RelativePositionBiases

  @nn.compact
  def __call__(self, x, *inputs, **options):
    table = self.table_cls(
      32,
      128,
      self.config.num_heads,
      'float32',
      embedding_init=t5_blocks.relpos_bias_init,
      name='relpos_bias',
    )
    for i in range(self.num_layers):
      x = self.layer_cls(config=self.config, relative_embedding=table, name=f'layers_{i}')(
        x, *inputs, **options
      )
    return x


@pytest.mark.parametrize(
  'name', ['net_t5_1_1_packed', pytest.param('net_scalable_t5_1_1_tiny', marks=pytest.mark.full)]
)
def test_golden_logits_of_a_network_with_masks(name):
  description, arrays = cases.golden(name)
  batch, _ = cases.golden_batch(name)
  network = _StackNetwork(cases.golden_config(name))
  logits = cases.jit(functools.partial(network.apply, **batch))(
    {'params': cases.golden_params(name)}
  )
  real = np.asarray(batch['decoder_target_tokens']) > 0
  np.testing.assert_allclose(
    np.asarray(logits)[real], arrays['out/logits'][real], **description['tol']
  )


def _steps(apply, params, tokens):
  """Return the logits or activations of a pass that makes the cache, and of one step after the other."""
  _, variables = apply({'params': params}, tokens)
  step = cases.jit(lambda variables, token: apply({'params': params, **variables}, token))
  outputs = []
  for i in range(tokens.shape[1]):
    out, variables = step(variables, tokens[:, i : i + 1])
    outputs.append(out)
  return np.concatenate(outputs, axis=1)


def test_cached_steps_equal_a_pass_over_all_positions():
  config, batch = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=2), cases.tiny_batch()
  network, params = _StackNetwork(config), cases.random_params(config)
  inputs, tokens = batch['encoder_input_tokens'], batch['decoder_input_tokens']
  expected = cases.jit(t5.Transformer(config).apply)({'params': params}, **batch)
  encoded = network.apply({'params': params}, inputs, method='encode')
  logits = _steps(
    lambda variables, token: network.apply(
      variables, encoded, inputs, token, token, decode=True, mutable=['cache'], method='decode'
    ),
    params,
    tokens,
  )
  real = np.asarray(batch['decoder_target_tokens']) > 0
  np.testing.assert_allclose(logits[real], np.asarray(expected)[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'layer_cls, table_cls',
  [
    (t5.DecoderLayer, layers.RelativePositionBiases),
    (decoder_only.DecoderLayer, layers.CachedRelativePositionBiases),
  ],
)
def test_layers_with_a_shared_table_and_cached_steps(layer_cls, table_cls):
  rng = np.random.default_rng(0)
  x, encoded = (jnp.asarray(rng.standard_normal((2, length, 16)), jnp.float32) for length in (5, 4))
  if layer_cls is t5.DecoderLayer:
    config, inputs = cases.tiny_config(), (encoded,)
  else:
    config, inputs = (
      decoder_only.TransformerConfig(
        vocab_size=40, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=24, dropout_rate=0.0
      ),
      (),
    )
  stack = _LayerStack(config, layer_cls, 2, table_cls)
  params = stack.init(jax.random.key(0), x, *inputs, deterministic=True)['params']
  assert set(params) == {'relpos_bias', 'layers_0', 'layers_1'}
  mask = layers.make_causal_mask(x[..., 0])
  expected = stack.apply({'params': params}, x, *inputs, decoder_mask=mask, deterministic=True)
  unbiased = stack.apply(
    {'params': params | {'relpos_bias': {'rel_embedding': jnp.zeros((2, 32))}}},
    x,
    *inputs,
    decoder_mask=mask,
    deterministic=True,
  )
  assert np.max(np.abs(unbiased - expected)) > 1e-3
  found = _steps(
    lambda variables, token: stack.apply(
      variables, token, *inputs, deterministic=True, decode=True, mutable=['cache']
    ),
    params,
    x,
  )
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_read_at_once_and_then_continued():
  x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 16)), jnp.float32)
  config = decoder_only.TransformerConfig(
    vocab_size=40, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=24, dropout_rate=0.0
  )
  stack = _LayerStack(config, decoder_only.DecoderLayer, 1)
  mask = layers.make_causal_mask(x[..., 0])
  params = stack.init(jax.random.key(0), x, deterministic=True)['params']
  expected = stack.apply({'params': params}, x, mask, True)
  prompt = dict(
    decoder_mask=mask[:, :, :3, :3], deterministic=True, prefill=True, max_decode_length=5
  )
  _, variables = stack.apply(
    {'params': params}, x[:, :3], prefill_lengths=jnp.full((2,), 3), mutable=['cache'], **prompt
  )
  out, _ = stack.apply(
    {'params': params, **variables}, x[:, 3:4], deterministic=True, decode=True, mutable=['cache']
  )
  np.testing.assert_allclose(out[:, 0], expected[:, 3], rtol=1e-4, atol=1e-5)
  with pytest.raises(ConfigError, match='decode. must be False with prefill=True'):
    stack.apply({'params': params}, x, decode=True, prefill=True)


def test_an_encoder_layer_with_its_own_table_takes_no_shared_one():
  x = jnp.ones((1, 3, 16))
  config = scalable_t5.T5Config(40, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=24)
  params = scalable_t5.EncoderLayer(config).init(jax.random.key(0), x, deterministic=True)['params']
  assert 'relpos_bias' in params and params['attention']['query']['kernel'].shape == (16, 2, 8)
  with pytest.raises(
    ConfigError, match='relative_embedding. must be None with relpos_bias_tables of each layer'
  ):
    _LayerStack(config, t5.EncoderLayer, 1).init(jax.random.key(0), x, deterministic=True)
  with pytest.raises(ConfigError, match='relative_embedding. must be a module'):
    t5.EncoderLayer(cases.tiny_config()).init(jax.random.key(0), x, deterministic=True)
