"""The T5 network: values recorded from T5X, initial distributions, options, custom feed-forward blocks."""

import functools

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layers import blockwise
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from tests.networks import network_cases as cases

# ---- Numbers of T5X -------------------------------------------------------------------------------------------------


# Each kind of network once, with the ways to compile it spread over them.
@pytest.mark.parametrize(
  'name, scan_layers, remat_policy, kernel',
  [
    ('net_t5_1_0_tiny', False, 'none', 'dot'),
    pytest.param('net_t5_1_1_tiny', False, 'full', 'dot', marks=pytest.mark.full),
    pytest.param('net_t5_1_1_packed', False, 'minimal', 'dot', marks=pytest.mark.full),
    pytest.param(
      'net_t5_1_1_packed', True, 'none', 'dot', marks=pytest.mark.full
    ),  # by default, tests/models has it
    ('net_t5_1_1_packed', False, 'none', 'blockwise'),
    pytest.param('net_scalable_t5_1_1_tiny', False, 'none', 'dot', marks=pytest.mark.full),
    pytest.param(
      'net_scalable_t5_1_1_tiny', False, 'save_attention', 'dot', marks=pytest.mark.full
    ),
    pytest.param(
      'net_scalable_t5_1_1_tiny', True, 'save_dots_except_mlp', 'blockwise', marks=pytest.mark.full
    ),
    ('net_scalable_t5_1_1_tiny', True, 'minimal', 'blockwise'),
  ],
)
def test_golden_networks(monkeypatch, name, scan_layers, remat_policy, kernel):
  monkeypatch.setattr(blockwise, '_CPU_BLOCK', 8)
  description, arrays = cases.golden(name)
  config = cases.golden_config(
    name, scan_layers=scan_layers, remat_policy=remat_policy, attention_kernel=kernel
  )
  batch, weights = cases.golden_batch(name)
  params = cases.golden_params(name)
  loss, grads, logits, encoded = cases.loss_and_grads(
    config,
    params,
    batch,
    weights,
    label_smoothing=description['label_smoothing'],
    z_loss=description['z_loss'],
  )
  # Padding rows are not part of the contract: T5X lets them attend uniformly to everything.
  tolerance = description['tol']
  real = np.asarray(batch['encoder_input_tokens']) > 0
  np.testing.assert_allclose(
    np.asarray(encoded)[real], arrays['out/encoder_output'][real], **tolerance
  )
  real = np.asarray(batch['decoder_target_tokens']) > 0
  np.testing.assert_allclose(np.asarray(logits)[real], arrays['out/logits'][real], **tolerance)
  np.testing.assert_allclose(
    loss, description['losses_by_normalizing_factor']['none']['loss'], rtol=1e-5
  )
  for path, grad in tree_utils.named_leaves(grads):
    np.testing.assert_allclose(grad, arrays[f'grad/{path}'], err_msg=path, **tolerance)
  assert len(jax.tree.leaves(grads)) == sum(key.startswith('grad/') for key in arrays)


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('name', cases.GOLDEN_NETWORKS)
def test_parameter_tree_and_logical_axes_are_t5xs(name, scan_layers):
  description, _ = cases.golden(name)
  batch, _ = cases.golden_batch(name)
  module = t5.Transformer(cases.golden_config(name, scan_layers=scan_layers))
  variables = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )
  shapes = {path: leaf.shape for path, leaf in tree_utils.named_leaves(variables['params'])}
  assert shapes == {
    path: leaf.shape for path, leaf in tree_utils.named_leaves(cases.golden_params(name))
  }
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables['params']))
  axes = tree_utils.flatten_dict(nn_partitioning.get_axis_names(variables['params_axes']))
  expected = description['param_logical_axes']
  assert {path: str(spec).replace('PartitionSpec', 'P') for path, spec in axes.items()} == expected


# ---- Initial values -------------------------------------------------------------------------------------------------


def test_initial_distributions_are_t5xs():
  config = cases.tiny_config(
    vocab_size=300,
    emb_dim=64,
    num_heads=4,
    head_dim=32,
    mlp_dim=96,
    num_relpos_buckets=64,
    num_encoder_layers=1,
    num_decoder_layers=1,
  )
  params = cases.init_params(config, cases.tiny_batch())
  truncation = {
    'mlp': 2.3,
    'logits_dense': 2.3,
  }  # a normal cut at two standard deviations, rescaled to unit variance
  for path, leaf in tree_utils.named_leaves(params):
    leaf = np.asarray(leaf)
    parts = path.split('/')
    if parts[-1] == 'scale':
      np.testing.assert_array_equal(leaf, 1.0)
      continue
    if parts[-1] == 'embedding':
      std = 1.0
    elif parts[-1] == 'rel_embedding':
      std = (2 / (4 + 64)) ** 0.5  # fan average of [heads, buckets]
      assert np.abs(leaf).max() <= std * 3**0.5  # uniform
    else:
      fan_in = {'wo': 96, 'out': 128}.get(parts[-2], 64)
      std = fan_in**-0.5 / (32**0.5 if parts[-2] == 'query' else 1.0)
      limit = next((factor for part, factor in truncation.items() if part in parts), None)
      assert (np.abs(leaf).max() < limit * std) if limit else (np.abs(leaf).max() > 2.5 * std), path
    assert abs(leaf.std() / std - 1) < 4 / leaf.size**0.5, path
    assert abs(leaf.mean()) < 4 * std / leaf.size**0.5, path


def test_layers_start_different_and_the_layout_does_not_change_the_start():
  batch = cases.tiny_batch()
  params = cases.init_params(
    cases.tiny_config(relpos_bias_tables='per_layer', num_decoder_layers=2), batch
  )
  stacked = cases.init_params(
    cases.tiny_config(param_layout='scalable_t5', num_decoder_layers=2), batch
  )
  first, second = (params['decoder'][f'layers_{i}']['mlp']['wo']['kernel'] for i in (0, 1))
  assert not np.allclose(first, second)
  np.testing.assert_allclose(
    stacked['decoder']['decoder']['mlp']['wo']['kernel'][:, 1], second, rtol=1e-6
  )
  np.testing.assert_allclose(
    stacked['encoder']['encoder']['attention']['query']['kernel'][:, 1].reshape(16, 16),
    params['encoder']['layers_1']['attention']['query']['kernel'],
    rtol=1e-6,
  )


# ---- Options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'remat_policy': 'minimum'}, "remat_policy` must be .* got 'minimum'. Did you mean 'minimal'"),
    (
      {'remat_policy': 'full', 'remat_offload': ('query',)},
      r'remat_offload` must be \(\), got .* need remat_policy=',
    ),
    (
      {'remat_policy': 'offload'},
      r"remat_offload` must be a sequence of names .*'layer_input'.*, got \(\)",
    ),
    (
      {'remat_policy': 'offload', 'remat_offload': ('keys',)},
      "remat_offload` must be .* got .*'keys'",
    ),
    (
      {'param_layout': 'scalable-t5'},
      "param_layout` .* got 'scalable-t5'. Did you mean 'scalable_t5'",
    ),
    (
      {'attention_kernel': 'flash'},
      "attention_kernel` must be one of 'auto', 'dot', 'blockwise', 'splash', got 'flash'",
    ),
    (
      {'attention_kernel': 'cudnn'},
      "got 'cudnn'. 'cudnn' needs half precision: set dtype='bfloat16'",
    ),
    (
      {'relpos_bias_tables': 'per_head'},
      "relpos_bias_tables` .* 'per_stack', 'per_layer' or None, got 'per_head'",
    ),
    (
      {'relpos_bias_tables': 'per_stack', 'param_layout': 'scalable_t5'},
      "'per_stack' needs param_layout='t5'",
    ),
    (
      {'mlp_activations': ('gelu', 'liner')},
      "`activation` must be .*got 'liner'. Did you mean 'linear'",
    ),
    ({'mlp_activations': 'relu'}, 'sequence of names'),
    ({'mlp_activations': ()}, 'sequence of names'),
    ({'dtype': 'bfloat'}, "dtype` .* got 'bfloat'. Did you mean 'bfloat16'"),
    ({'dtype': 'int32'}, "dtype` must be one of 'float32', .*got 'int32'"),
    ({'dropout_rate': 1.0}, r'dropout_rate` must be a number in \[0, 1\), got 1.0'),
    ({'num_heads': 0}, r'num_heads` must be an integer in \[1, 2147483648\), got 0'),
    ({'emb_dim': 16.0}, 'emb_dim` must be an integer .*, got 16.0'),
    ({'num_relpos_buckets': 30}, 'multiple of 4'),
    ({'max_relpos_distance': 16}, 'an integer above num_relpos_buckets / 2, got 16'),
    (
      {'scale_tied_logits': False},
      '`T5Config.scale_tied_logits` must be .*False needs logits_via_embedding',
    ),
    ({'layer_norm_epsilon': 0.0}, r'layer_norm_epsilon` must be a number in \[1e-12, 1\), got 0.0'),
  ],
)
def test_unsupported_options_raise(fields, message):
  with pytest.raises(ConfigError, match=message):
    cases.tiny_config(**fields)


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
def test_every_norm_adds_the_epsilon_of_the_network(layout):
  config = cases.tiny_config(param_layout=layout, layer_norm_epsilon=1e-3)
  found = cases.norm_epsilons(t5.Transformer(config), cases.tiny_batch())
  # Equal layers are traced once.
  assert len(found) == 2 + 3 + 2 and set(found) == {1e-3}


@pytest.mark.parametrize(
  'fields',
  [{'num_relpos_buckets': 16}, {'max_relpos_distance': 256}, {'relpos_bias_tables': 'per_layer'}],
)
def test_options_of_position_biases_have_an_effect_or_raise(fields):
  ((name, value),) = fields.items()
  for network_cls, config in (
    (t5.Transformer, t5.T5Config(vocab_size=8, **fields)),
    (decoder_only.DecoderWrapper, decoder_only.TransformerConfig(vocab_size=8, **fields)),
  ):
    with pytest.raises(
      ConfigError,
      match=rf'`{type(config).__name__}.{name}` must be .* `{network_cls.__name__}.'
      rf'position_encoding` without biases, got {value!r}',
    ):
      network_cls(
        config, position_encoding=t5.PositionEncoding(encode_positions_fn=lambda x, positions: x)
      )
    assert not network_cls(
      type(config)(vocab_size=8), position_encoding=t5.PositionEncoding()
    ).has_position_biases
    assert network_cls(
      config, position_encoding=t5.PositionEncoding(biases_fn=lambda config, name: None)
    ).custom_blocks
    assert network_cls(config).custom_blocks == ()


def test_invalid_position_encodings_raise():
  def encode(x, positions):
    return x[..., :4]

  with pytest.raises(
    ConfigError, match=r'`Transformer.position_encoding` must be a `PositionEncoding`, .*@name\(\)'
  ):
    t5.Transformer(
      cases.tiny_config(), position_encoding=lambda: t5.PositionEncoding(encode_positions_fn=encode)
    )
  block = layers.MultiHeadDotProductAttention(num_heads=2, head_dim=8, encode_positions_fn=encode)
  x = jnp.ones((2, 3, 16))
  with pytest.raises(
    ConfigError,
    match=r'encode_positions_fn` must return .* \(2, 3, 2, 8\), got shape \(2, 3, 2, 4\)',
  ):
    jax.eval_shape(block.init, jax.random.key(0), x, x)


def test_config_fields_are_positional_as_in_t5x():
  config = t5.T5Config(32128, 'bfloat16', 64, 2, 3, 4, 32, 128, ('gelu', 'linear'), 0.0, True, True)
  assert (
    config.dtype,
    config.num_decoder_layers,
    config.mlp_dim,
    config.float32_attention_logits,
  ) == ('bfloat16', 4, 128, True)
  with pytest.raises(TypeError, match='positional'):
    t5.T5Config(32128, 'bfloat16', 64, 2, 3, 4, 32, 128, ('relu',), 0.0, True, True, 'none')


def test_half_precision_computes_near_float32_and_returns_float32_logits():
  batch = cases.tiny_batch()
  params = cases.random_params(cases.tiny_config())
  logits = cases.forward(cases.tiny_config(), params, batch)
  half = cases.tiny_config(dtype='bfloat16', scan_layers=True)
  half_logits = cases.forward(half, params, batch)
  assert half_logits.dtype == jnp.float32
  assert 1e-5 < np.abs(half_logits - logits).max() < 0.1 * np.abs(logits).max()
  exact_scores = cases.tiny_config(dtype='bfloat16', float32_attention_logits=True)
  assert not np.array_equal(cases.forward(exact_scores, params, batch), half_logits)
  module = t5.Transformer(half)
  encode = functools.partial(module.apply, method='encode', enable_dropout=False)
  assert (
    jax.eval_shape(encode, {'params': params}, batch['encoder_input_tokens']).dtype == jnp.bfloat16
  )

  def loss(params):
    return jnp.sum(module.apply({'params': params}, **batch, enable_dropout=False))

  assert all(
    leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(jax.eval_shape(jax.grad(loss), params))
  )


def _largest_conversion(jaxpr):
  """Return the size of the largest bfloat16 array that is converted to float32, also in nested programs."""
  sizes = [0]
  for equation in jaxpr.eqns:
    if (
      equation.primitive.name == 'convert_element_type'
      and equation.params['new_dtype'] == jnp.float32
    ):
      sizes += [var.aval.size for var in equation.invars if var.aval.dtype == jnp.bfloat16]
    sizes += map(_largest_conversion, jax_core.jaxprs_in_params(equation.params))
  return max(sizes)


@pytest.mark.parametrize(
  'fields', [{}, {'param_layout': 'scalable_t5', 'scan_layers': True, 'logits_via_embedding': True}]
)
def test_bfloat16_weights_are_multiplied_as_they_are_stored(fields):
  config, batch = cases.tiny_config(**fields), cases.tiny_batch(batch=2)
  params = cases.random_params(config)
  half = jax.tree.map(lambda param: jnp.asarray(param, jnp.bfloat16), params)
  logits, half_logits = (cases.forward(config, tree, batch) for tree in (params, half))
  assert half_logits.dtype == jnp.float32
  assert 1e-5 < np.abs(half_logits - logits).max() < 0.1 * np.abs(logits).max()

  def forward(params):
    return t5.Transformer(config).apply({'params': params}, **batch, enable_dropout=False)

  with jax.numpy_dtype_promotion('strict'):
    program = jax.make_jaxpr(forward)(half)
  # Vectors of the table are smaller than kernels; so are the scales of norms and position biases.
  assert 0 < _largest_conversion(program.jaxpr) < config.emb_dim**2


@pytest.mark.parametrize(
  'fields',
  [
    pytest.param({}, marks=pytest.mark.full),
    {'dtype': 'bfloat16', 'dropout_rate': 0.1},
    {'dtype': 'bfloat16', 'param_layout': 'scalable_t5'},
  ],
)
def test_no_dtype_is_promoted_by_chance(fields):
  config = cases.tiny_config(**fields)
  module = t5.Transformer(config)
  batch = cases.tiny_batch()

  def loss(params):
    return jnp.sum(module.apply({'params': params}, **batch, rngs={'dropout': jax.random.key(0)}))

  def step(params, encoded):
    inputs, tokens = batch['encoder_input_tokens'], batch['decoder_input_tokens']
    options = dict(enable_dropout=False, decode=True, mutable=['cache'], method='decode')
    _, collections = module.apply(
      {'params': params}, encoded, inputs, 9, method='init_cache', mutable=['cache', 'cross_cache']
    )
    _, prefilled = module.apply(
      {'params': params, **collections},
      encoded,
      inputs,
      tokens,
      None,
      prefill=True,
      prefill_lengths=jnp.ones(4, jnp.int32),
      **options,
    )
    for variables in (collections, {**collections, **prefilled}):
      module.apply({'params': params, **variables}, encoded, inputs, tokens[:, :1], None, **options)

  with jax.numpy_dtype_promotion('strict'):
    params = cases.random_params(config)
    jax.eval_shape(jax.grad(loss), params)
    jax.eval_shape(step, params, jax.ShapeDtypeStruct((4, 6, 16), config.dtype))


def test_tied_logits_are_scaled_and_untied_have_a_kernel():
  batch = cases.tiny_batch()
  params = cases.random_params(cases.tiny_config())
  assert params['decoder']['logits_dense']['kernel'].shape == (16, 40)
  # The same computation with the table for a kernel, up to sqrt(emb_dim) = 4.
  params['decoder']['logits_dense'] = {'kernel': params['token_embedder']['embedding'].T}
  untied = cases.forward(cases.tiny_config(), params, batch)
  del params['decoder']['logits_dense']
  tied, unscaled = cases.jit(
    lambda params: [
      t5.Transformer(cases.tiny_config(logits_via_embedding=True, **fields)).apply(
        {'params': params}, **batch, enable_dropout=False
      )
      for fields in ({}, {'scale_tied_logits': False})
    ]
  )(params)
  np.testing.assert_allclose(tied, untied / 4, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(unscaled, untied, rtol=1e-5, atol=1e-5)


def test_tables_per_layer_matter_in_their_layer():
  batch = cases.tiny_batch()
  config = cases.tiny_config(relpos_bias_tables='per_layer')
  params = cases.random_params(config)
  _, grads, _, _ = cases.loss_and_grads(config, params, batch)
  tables = {path: grad for path, grad in tree_utils.named_leaves(grads) if 'rel_embedding' in path}
  assert list(tables) == (
    [f'decoder/layers_{i}/relpos_bias/rel_embedding' for i in range(3)]
    + [f'encoder/layers_{i}/relpos_bias/rel_embedding' for i in range(2)]
  )
  assert all(np.abs(grad).max() > 1e-4 for grad in tables.values())


# ---- Dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.full  # by default, test_segments.py has dropout in loops and unrolled
@pytest.mark.parametrize('layout', [pytest.param('t5', marks=pytest.mark.full), 'scalable_t5'])
def test_dropout_draws_the_same_masks_however_layers_are_compiled(layout):
  batch = cases.tiny_batch()
  config = functools.partial(
    cases.tiny_config,
    param_layout=layout,
    dropout_rate=0.3,
    num_encoder_layers=1,
    num_decoder_layers=2,
  )
  params = cases.random_params(config())
  module = t5.Transformer(config())
  apply = cases.jit(lambda key: module.apply({'params': params}, **batch, rngs={'dropout': key}))
  logits = apply(jax.random.key(1))
  looped = cases.forward(
    config(scan_layers=True, remat_policy='full'), params, batch, jax.random.key(1)
  )
  np.testing.assert_allclose(looped, logits, rtol=1e-5, atol=1e-5)
  assert not np.allclose(apply(jax.random.key(2)), logits)


def test_dropout_is_shared_over_positions():
  """Except the dropout of the encoder's output; rows have different masks."""

  def sow_mask(method, args, kwargs, context):
    if not isinstance(context.module, nn.Dropout) or context.method_name != '__call__':
      return method(*args, **kwargs)
    mask = method(jnp.ones_like(args[0]), *args[1:], **kwargs)
    context.module.sow('intermediates', 'mask', mask)
    return mask * args[0]

  module = t5.Transformer(
    cases.tiny_config(dropout_rate=0.3, num_encoder_layers=1, num_decoder_layers=1)
  )

  def apply(params):
    with nn.intercept_methods(sow_mask):
      return module.apply(
        {'params': params},
        **cases.tiny_batch(),
        rngs={'dropout': jax.random.key(0)},
        mutable=['intermediates'],
      )[1]['intermediates']

  masks = dict(tree_utils.named_leaves(cases.jit(apply)(cases.random_params(module.config))))
  assert len(masks) == 11
  for name, mask_BLD in masks.items():
    shared = (np.asarray(mask_BLD) == np.asarray(mask_BLD)[:, :1]).all()
    assert shared == (not name.startswith('encoder/Dropout_1/')), name
    assert (np.asarray(mask_BLD)[0, 0] != np.asarray(mask_BLD)[1, 0]).any(), name


class _Mask(nn.Module):
  """Module that sows the mask of a dropout."""

  @nn.compact
  def __call__(self, x, decode=False, deterministic=False):
    del decode
    self.sow(
      'intermediates', 'mask', nn.Dropout(0.5)(jnp.ones_like(x), deterministic=deterministic)
    )
    return jnp.zeros_like(x)


def _mask_block(config, name):
  del config
  return _Mask(name=name)


def _all_masks(stack, layer):
  del stack, layer
  return _mask_block


def test_layers_drop_out_differently():
  module = t5.Transformer(
    cases.tiny_config(dropout_rate=0.3, num_encoder_layers=3), feed_forward_fn=_all_masks
  )
  tokens = cases.tiny_batch()['encoder_input_tokens']
  params = cases.random_params(cases.tiny_config(num_encoder_layers=3))
  _, updates = cases.jit(
    lambda params: module.apply(
      {'params': params},
      tokens,
      method='encode',
      rngs={'dropout': jax.random.key(0)},
      mutable=['intermediates'],
    )
  )(params)
  masks = np.stack(jax.tree.leaves(updates['intermediates'])).reshape(3, -1)
  assert np.all(np.any(masks[:, None] != masks[None, :], axis=-1) == ~np.eye(3, dtype=bool))


# ---- Padding and packing --------------------------------------------------------------------------------------------


def test_padding_changes_nothing():
  """Rows with more padding give the same logits, and packed rows those of their separate examples."""
  config = cases.tiny_config(
    relpos_bias_tables='per_layer', num_encoder_layers=1, num_decoder_layers=1
  )
  short = cases.tiny_batch()
  params = cases.random_params(config)
  apply = cases.jit(functools.partial(t5.Transformer(config).apply, enable_dropout=False))
  logits = apply({'params': params}, **short)
  longer = {key: jnp.pad(value, ((0, 0), (0, 3))) for key, value in short.items()}
  real = np.asarray(short['decoder_target_tokens']) > 0
  np.testing.assert_allclose(
    apply({'params': params}, **longer)[:, :-3][real], logits[real], rtol=1e-4, atol=1e-5
  )

  packed = {key: jnp.concatenate([value[2], value[3]])[None] for key, value in short.items()}
  lengths = {'encoder': 6, 'decoder': 5}
  for side, length in lengths.items():
    packed[f'{side}_segment_ids'] = jnp.repeat(jnp.array([1, 2]), length)[None]
    packed[f'{side}_positions'] = jnp.tile(jnp.arange(length), 2)[None]
  got = np.asarray(apply({'params': params}, **packed)).reshape(2, 5, -1)
  np.testing.assert_allclose(got, logits[2:], rtol=1e-4, atol=1e-5)


# ---- The injectable feed-forward block ------------------------------------------------------------------------------


class _Scaled(nn.Module):
  """Feed-forward block with sown values and state."""

  name_of_stack: str = ''

  @nn.compact
  def __call__(self, x, decode=False, deterministic=False):
    del decode, deterministic
    factor = nn_partitioning.param_with_axes(
      'factor', nn.initializers.ones, (x.shape[-1],), axes=('embed',)
    )
    calls = self.variable('counters', 'calls', lambda: jnp.zeros((), jnp.int32))
    if self.is_mutable_collection('counters'):
      calls.value += 1
    self.sow('intermediates', 'mean', jnp.mean(x))
    return x * factor


def _scaled_block(config, name):
  del config
  return _Scaled(name=name)


def _all_scaled(stack, layer):
  del stack, layer
  return _scaled_block


def _every_other_scaled(stack, layer):
  return _scaled_block if stack == 'encoder' and layer % 2 else t5.dense_feed_forward


@pytest.mark.parametrize(
  'layout, scan_layers',
  [
    ('t5', False),
    ('scalable_t5', True),
    pytest.param('t5', True, marks=pytest.mark.full),
    pytest.param('scalable_t5', False, marks=pytest.mark.full),
  ],
)
def test_another_feed_forward_block_keeps_its_collections_per_layer(layout, scan_layers):
  batch = cases.tiny_batch()
  config = cases.tiny_config(param_layout=layout, scan_layers=scan_layers, num_encoder_layers=1)
  module = t5.Transformer(config, feed_forward_fn=_all_scaled)
  variables = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )
  axes = tree_utils.flatten_dict(nn_partitioning.get_axis_names(variables['params_axes']))
  rng = np.random.default_rng(0)
  state = {
    'params': jax.tree.map(
      lambda leaf: rng.standard_normal(leaf.shape, np.float32), variables['params']
    ),
    'counters': jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), variables['counters']),
  }
  apply = cases.jit(
    functools.partial(module.apply, enable_dropout=False, mutable=['counters', 'intermediates'])
  )
  _, updates = apply(state, **batch)
  _, updates = apply({**state, 'counters': updates['counters']}, **batch)
  if layout == 't5':
    assert tuple(axes['decoder/layers_2/mlp/factor']) == ('embed',)
    means = [updates['intermediates']['decoder'][f'layers_{i}']['mlp']['mean'][0] for i in range(3)]
    calls = [updates['counters']['decoder'][f'layers_{i}']['mlp']['calls'] for i in range(3)]
  else:
    assert tuple(axes['decoder/decoder/mlp/factor']) == ('embed', 'layers')
    means = updates['intermediates']['decoder']['decoder']['mlp']['mean'][0]
    calls = updates['counters']['decoder']['decoder']['mlp']['calls']
  assert np.shape(means) == (3,) and len(np.unique(np.asarray(means))) == 3
  np.testing.assert_array_equal(calls, [3, 3, 3])  # one before, two now


@pytest.mark.full  # by default, test_segments.py has unlike blocks in loops and unrolled
def test_blocks_may_differ_between_layers_of_an_unrolled_stack():
  batch = cases.tiny_batch()
  config = cases.tiny_config(num_decoder_layers=1)
  module = t5.Transformer(config, feed_forward_fn=_every_other_scaled)
  variables = cases.jit(lambda key: module.init(key, **batch, enable_dropout=False))(
    jax.random.key(0)
  )
  layers = variables['params']['encoder']
  # Made one by one here, in a loop otherwise: from the same keys.
  usual = cases.init_params(config, batch)['encoder']['layers_0']
  cases.assert_trees_close({**layers['layers_0']}, usual, 1e-6)
  assert set(layers['layers_0']['mlp']) == {'wi_0', 'wi_1', 'wo'} and set(
    layers['layers_1']['mlp']
  ) == {'factor'}
  logits = jax.eval_shape(
    lambda variables: module.apply(variables, **batch, enable_dropout=False), variables
  )
  assert logits.shape == (4, 5, 40)


@pytest.mark.parametrize(
  ('attention_fn', 'message'),
  [
    (
      lambda layer: t5.t5_attention,
      r'`Transformer.attention_fn` must be a .* of \(stack, layer\), .*2 were given',
    ),
    (
      lambda stack, layer: None,
      r'`Transformer.attention_fn\(stack, layer\)` must be a factory .*got None',
    ),
    (
      lambda stack, layer: lambda config: None,
      r'`attention_fn\(stack, layer\)` must be a function of \(config, name, encode_positions_fn\), got',
    ),
  ],
)
def test_invalid_attention_functions_raise(attention_fn, message):
  tokens = jnp.ones((2, 3), jnp.int32)
  with pytest.raises(ConfigError, match=message):
    jax.eval_shape(
      lambda key: t5.Transformer(cases.tiny_config(), attention_fn=attention_fn).init(
        key, tokens, tokens, tokens
      ),
      jax.random.key(0),
    )


@pytest.mark.parametrize(
  ('biases_fn', 'message'),
  [
    (lambda config: None, r'`PositionEncoding.biases_fn` must be a function of \(config, name=\)'),
    (
      lambda config, name: lambda q, k, *args: jnp.zeros((q, k)),
      r'`PositionEncoding.biases_fn` must return a module of biases of shape \[1 or batch, heads, q, k\], got \(3, 3\)',
    ),
  ],
)
def test_invalid_position_biases_raise(biases_fn, message):
  tokens = jnp.ones((2, 3), jnp.int32)
  network = t5.Transformer(
    cases.tiny_config(), position_encoding=t5.PositionEncoding(biases_fn=biases_fn)
  )
  with pytest.raises(ConfigError, match=message):
    jax.eval_shape(lambda key: network.init(key, tokens, tokens, tokens), jax.random.key(0))


def test_half_precision_without_loss_scaling_is_warned_of():
  for dtype in ('float16', jnp.float16):
    with pytest.warns(UserWarning, match="T5Config.dtype`='float16' .* 65,504, .* Set 'bfloat16'"):
      config = t5.T5Config(vocab_size=8, dtype=dtype)
    assert config.dtype == dtype
  t5.T5Config(vocab_size=8, dtype='bfloat16')  # Warnings are errors in tests.
