"""The decoder-only network: numbers recorded from T5X, prefixes, packing, cached decoding, layouts, options."""

import dataclasses
import functools

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import losses
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layers import blockwise
from t5x_lite.networks import decoder_only
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from tests import golden_data
from tests.networks import network_cases as cases

_GOLDEN = ('net_decoder_only_causal', 'net_decoder_only_prefixlm')


def _golden_config(description, **overrides):
  fields = description['config'] | {
    'mlp_activations': tuple(description['config']['mlp_activations'])
  }
  return decoder_only.TransformerConfig(**fields, **overrides)


def _config(**overrides):
  fields = dict(
    vocab_size=40,
    emb_dim=16,
    num_heads=2,
    num_layers=3,
    head_dim=8,
    mlp_dim=24,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
  )
  return decoder_only.TransformerConfig(**{**fields, **overrides})


def _batch(num_inputs=(0, 2, 5, 8), length=9):
  """Return a batch of unpacked rows with the given numbers of inputs; None gives a padding row."""
  rng = np.random.default_rng(0)
  targets = rng.integers(1, 40, (len(num_inputs), length))
  prefix = np.zeros_like(targets)
  for row, num in enumerate(num_inputs):
    if num is None:
      targets[row] = 0
    else:
      prefix[row, : num + 1] = 1
  shifted = np.concatenate([np.zeros((len(num_inputs), 1), targets.dtype), targets[:, :-1]], axis=1)
  arrays = dict(
    decoder_input_tokens=shifted, decoder_target_tokens=targets, decoder_causal_attention=prefix
  )
  return {key: jnp.asarray(value, jnp.int32) for key, value in arrays.items()}


def _random_params(config, seed=0, **fields):
  batch = _batch()
  init = functools.partial(
    decoder_only.DecoderWrapper(config, **fields).init, **batch, enable_dropout=False
  )
  shapes = jax.eval_shape(init, jax.random.key(0))['params']
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, shapes)


def _apply(config, **options):
  return cases.jit(
    functools.partial(decoder_only.DecoderWrapper(config).apply, enable_dropout=False, **options)
  )


# ---- Numbers of T5X -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name, options',
  [
    (_GOLDEN[0], dict(scan_layers=True)),
    (_GOLDEN[1], dict(remat_policy='full')),
    (_GOLDEN[1], dict(attention_kernel='blockwise')),
  ],
)
def test_golden_networks(monkeypatch, name, options):
  monkeypatch.setattr(blockwise, '_CPU_BLOCK', 8)
  description, arrays = golden_data.load(f't5x/{name}')
  module = decoder_only.DecoderWrapper(_golden_config(description, **options))
  batch = golden_data.subtree(arrays, 'batch')
  weights = batch.pop('decoder_loss_weights')

  def loss_fn(params):
    logits = module.apply({'params': params}, **batch, enable_dropout=False)
    loss, _, _ = losses.compute_weighted_cross_entropy(
      logits,
      batch['decoder_target_tokens'],
      weights,
      label_smoothing=description['label_smoothing'],
      z_loss=description['z_loss'],
    )
    return loss, logits

  (loss, logits), grads = cases.jit(jax.value_and_grad(loss_fn, has_aux=True))(
    golden_data.subtree(arrays, 'params')
  )
  real = batch['decoder_target_tokens'] > 0
  np.testing.assert_allclose(
    np.asarray(logits)[real], arrays['out/logits'][real], **description['tol']
  )
  np.testing.assert_allclose(
    loss, description['losses_by_normalizing_factor']['none']['loss'], rtol=1e-5
  )
  for path, grad in tree_utils.named_leaves(grads):
    np.testing.assert_allclose(grad, arrays[f'grad/{path}'], err_msg=path, **description['tol'])
  assert len(jax.tree.leaves(grads)) == sum(key.startswith('grad/') for key in arrays)


def test_parameter_tree_and_logical_axes_are_t5xs():
  description, arrays = golden_data.load(f't5x/{_GOLDEN[0]}')
  module = decoder_only.DecoderWrapper(_golden_config(description))
  variables = jax.eval_shape(
    lambda key: module.init(key, **_batch(), enable_dropout=False), jax.random.key(0)
  )
  shapes = {
    path: (leaf.shape, leaf.dtype) for path, leaf in tree_utils.named_leaves(variables['params'])
  }
  expected = tree_utils.named_leaves(golden_data.subtree(arrays, 'params'))
  assert shapes == {path: (leaf.shape, leaf.dtype) for path, leaf in expected}
  axes = tree_utils.flatten_dict(nn_partitioning.get_axis_names(variables['params_axes']))
  assert {path: str(spec).replace('PartitionSpec', 'P') for path, spec in axes.items()} == (
    description['param_logical_axes']
  )


def test_tied_logits_are_scaled_unless_it_is_said():
  scaled = _config(num_layers=1, logits_via_embedding=True)
  unscaled = dataclasses.replace(scaled, scale_tied_logits=False)
  variables, batch = {'params': _random_params(scaled)}, _batch(num_inputs=(2,))
  logits, want = cases.jit(
    lambda: tuple(
      decoder_only.DecoderWrapper(config).apply(variables, **batch, enable_dropout=False)
      for config in (unscaled, scaled)
    )
  )()
  np.testing.assert_allclose(logits, 4 * want, rtol=1e-5, atol=1e-5)


# ---- Who sees whom --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('bidirectional', [False, True])
def test_dependences_of_a_position(bidirectional):
  config = _config(num_layers=1)
  params, batch = _random_params(config), _batch(num_inputs=(4,), length=7)
  prefix = batch['decoder_causal_attention'] if bidirectional else None
  apply = _apply(config, decoder_causal_attention=prefix)
  targets = jnp.ones((1, 7), jnp.int32)
  logits = np.asarray(apply({'params': params}, batch['decoder_input_tokens'], targets))
  sees = np.zeros((7, 7), bool)
  for i in range(7):
    changed = batch['decoder_input_tokens'].at[0, i].set(39)
    sees[:, i] = np.any(np.asarray(apply({'params': params}, changed, targets)) != logits, axis=-1)[
      0
    ]
  expected = np.tril(np.ones((7, 7), bool))
  if bidirectional:
    expected[:5, :5] = True  # the start and four inputs
  np.testing.assert_array_equal(sees, expected)


def test_padding_and_packing_change_nothing():
  config = _config(num_layers=1, relpos_bias_tables='per_layer')
  params, batch = _random_params(config), _batch(num_inputs=(2, 5))
  apply = _apply(config)
  logits = np.asarray(apply({'params': params}, **batch))
  longer = {key: jnp.pad(value, ((0, 0), (0, 3))) for key, value in batch.items()}
  np.testing.assert_allclose(
    np.asarray(apply({'params': params}, **longer))[:, :-3], logits, rtol=1e-4, atol=1e-5
  )
  packed = {key: jnp.pad(value.reshape(1, -1), ((0, 0), (0, 2))) for key, value in batch.items()}
  packed['decoder_segment_ids'] = jnp.asarray([[1] * 9 + [2] * 9 + [0] * 2], jnp.int32)
  packed['decoder_positions'] = jnp.asarray([[*range(9), *range(9), 0, 0]], jnp.int32)
  got = np.asarray(apply({'params': params}, **packed))[0, :18].reshape(2, 9, -1)
  np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-5)


# ---- Cached decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'options, bidirectional',
  [({}, False), (dict(param_layout='scalable_t5', scan_layers=True), True)],
)
def test_prompts_of_uneven_length_then_steps_give_the_uncached_logits(options, bidirectional):
  config = _config(num_layers=2, **options)
  params = _random_params(config)
  num_inputs, length = np.array([0, 2, 5, 7]), 9
  batch = _batch(num_inputs, length)
  prefix = batch['decoder_causal_attention']
  tokens = np.asarray(batch['decoder_input_tokens'])
  module = decoder_only.DecoderWrapper(config)

  def read(params):
    full = module.apply(
      {'params': params},
      **(batch if bidirectional else {**batch, 'decoder_causal_attention': None}),
      enable_dropout=False,
    )
    # Only the inputs are read: tokens after them have no effect.
    prompts = jnp.where(prefix > 0, batch['decoder_input_tokens'], 0)
    _, variables = module.apply(
      {'params': params},
      prompts,
      prefix,
      decoder_causal_attention=prefix if bidirectional else None,
      enable_dropout=False,
      decode=True,
      prefill=True,
      prefill_lengths=jnp.asarray(num_inputs, jnp.int32),
      max_decode_length=length,
      mutable=['cache'],
    )
    return full, variables['cache']

  full, cache = cases.jit(read)(params)
  step = cases.jit(
    lambda params, cache, token: module.apply(
      {'params': params, 'cache': cache},
      token,
      token,
      enable_dropout=False,
      decode=True,
      max_decode_length=length,
      mutable=['cache'],
    )
  )
  rows = np.arange(4)
  for i in range(length - num_inputs.max()):
    logits, variables = step(params, cache, jnp.asarray(tokens[rows, num_inputs + i][:, None]))
    cache = variables['cache']
    assert logits.shape == (4, 1, 40) and logits.dtype == jnp.float32
    np.testing.assert_allclose(
      logits[:, 0], np.asarray(full)[rows, num_inputs + i], rtol=1e-5, atol=1e-5
    )
  indices = [leaf for name, leaf in tree_utils.named_leaves(cache) if name.endswith('cache_index')]
  assert indices and all(np.all(np.asarray(index) == num_inputs + 2) for index in indices)


def test_an_empty_cache_made_in_t5xs_way():
  config = _config(num_layers=1)
  params, batch = _random_params(config), _batch(num_inputs=(0, 0), length=5)
  tokens = batch['decoder_input_tokens']
  make = jax.eval_shape(
    _apply(config, decode=True, mutable=['cache']), {'params': params}, tokens, tokens
  )[1]['cache']
  cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), make)
  step = _apply(config, decode=True, mutable=['cache'])
  expected = np.asarray(_apply(config)({'params': params}, tokens, jnp.ones_like(tokens)))
  for i in range(5):
    logits, variables = step(
      {'params': params, 'cache': cache}, tokens[:, i : i + 1], tokens[:, i : i + 1]
    )
    cache = variables['cache']
    np.testing.assert_allclose(logits[:, 0], expected[:, i], rtol=1e-5, atol=1e-5)


def test_errors_of_decoding():
  config = _config(num_layers=1)
  params, batch = _random_params(config), _batch()
  tokens, prefix = batch['decoder_input_tokens'], batch['decoder_causal_attention']
  apply = functools.partial(
    decoder_only.DecoderWrapper(config).apply, decode=True, enable_dropout=False, mutable=['cache']
  )
  cache = jax.eval_shape(apply, {'params': params}, tokens, tokens)[1]['cache']
  shape = functools.partial(jax.eval_shape, apply)
  with pytest.raises(ConfigError, match='`max_decode_length` must be 9, .* got 8'):
    jax.eval_shape(
      lambda v: apply(v, tokens[:, :1], tokens[:, :1], max_decode_length=8),
      {'params': params, 'cache': cache},
    )
  with pytest.raises(ConfigError, match='unpacked rows'):
    shape({'params': params}, tokens, tokens, tokens)
  with pytest.raises(ConfigError, match='prefill=True'):
    shape(
      {'params': params, 'cache': cache},
      tokens[:, :1],
      tokens[:, :1],
      decoder_causal_attention=prefix[:, :1],
    )


# ---- Layouts and options --------------------------------------------------------------------------------------------


def test_parameters_convert_between_layouts():
  batch = _batch()
  flat, stacked = (
    _config(num_layers=2, **fields)
    for fields in (
      {'relpos_bias_tables': 'per_layer'},
      {'param_layout': 'scalable_t5', 'scan_layers': True},
    )
  )
  params = _random_params(stacked)
  converted = param_layouts.convert(params, 'scalable_t5', 't5', flat)
  assert {'layers_0', 'layers_1', 'token_embedder', 'logits_dense', 'decoder_norm'} <= converted[
    'decoder'
  ].keys()
  np.testing.assert_allclose(
    _apply(flat)({'params': converted}, **batch),
    _apply(stacked)({'params': params}, **batch),
    rtol=1e-5,
    atol=1e-5,
  )
  back = param_layouts.convert(converted, 't5', 'scalable_t5', stacked)
  jax.tree.map(np.testing.assert_array_equal, back, params)
  with pytest.raises(ConfigError, match='Set num_layers'):
    param_layouts.convert(
      converted, 't5', 'scalable_t5', _config(param_layout='scalable_t5', num_layers=4)
    )
  encoder_decoder = cases.random_params(cases.tiny_config())
  with pytest.raises(ConfigError, match="The model has no 'encoder'"):
    param_layouts.convert(encoder_decoder, 't5', 'scalable_t5', stacked)


def test_config():
  config = decoder_only.TransformerConfig(
    32128, 'bfloat16', 64, 2, 3, 32, 128, ('gelu', 'linear'), 0.0, True
  )
  assert (config.num_layers, config.head_dim, config.mlp_dim, config.logits_via_embedding) == (
    3,
    32,
    128,
    True,
  )
  with pytest.raises(TypeError, match='positional'):
    decoder_only.TransformerConfig(32128, 'bfloat16', 64, 2, 3, 32, 128, ('relu',), 0.0, True, True)
  for fields, message in (
    ({'num_layers': 0}, '`TransformerConfig.num_layers` must be an integer in .*got 0'),
    ({'remat_policy': 'minimum'}, "mean 'minimal'"),
    ({'mlp_activations': ('gelu', 'liner')}, "mean 'linear'"),
    ({'dropout_rate': 1.0}, 'dropout_rate` .*got 1.0'),
    ({'attention_kernel': 'cudnn'}, "set dtype='bfloat16'"),
    ({'layer_norm_epsilon': 1.0}, 'layer_norm_epsilon` must be .*got 1.0'),
    ({'scale_tied_logits': False}, 'scale_tied_logits` must be one of True, got False'),
  ):
    with pytest.raises(ConfigError, match=message):
      _config(**fields)


class _Factor(nn.Module):
  """Feed-forward block that multiplies its input."""

  @nn.compact
  def __call__(self, x, decode=False, deterministic=False):
    return x * self.param('factor', nn.initializers.ones, (x.shape[-1],))


def _factor_in_layer_1(stack, layer):
  assert stack == 'decoder'
  return (lambda config, name: _Factor(name=name)) if layer == 1 else t5.dense_feed_forward


def test_every_norm_adds_the_epsilon_of_the_network():
  config = _config(layer_norm_epsilon=1e-3)
  found = cases.norm_epsilons(decoder_only.DecoderWrapper(config), _batch())
  assert len(found) == 2 + 1 and set(found) == {1e-3}


def test_the_feed_forward_block_is_an_argument():
  module = decoder_only.DecoderWrapper(_config(num_layers=2), _factor_in_layer_1)
  variables = jax.eval_shape(
    lambda key: module.init(key, **_batch(), enable_dropout=False), jax.random.key(0)
  )
  layers = variables['params']['decoder']
  assert set(layers['layers_0']['mlp']) == {'wi_0', 'wi_1', 'wo'} and set(
    layers['layers_1']['mlp']
  ) == {'factor'}
