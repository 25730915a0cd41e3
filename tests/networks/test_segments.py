"""Layers that differ: division into segments that run as loops; inputs of their feed-forward blocks."""

import dataclasses
import functools
import itertools
import re

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from t5x_lite.networks.segments import find_segments
from t5x_lite.networks.segments import kinds_of
from tests.networks import network_cases as cases

# ---- Segments -------------------------------------------------------------------------------------------------------


def _fewest_compiled(kinds):
  """Return the lowest cost of all divisions of `kinds`, by brute force."""
  if not kinds:
    return 0
  costs = [1 + _fewest_compiled(kinds[1:])]
  for period, repeats in itertools.product(range(1, len(kinds) + 1), range(2, len(kinds) + 1)):
    if kinds[:period] * repeats == kinds[: period * repeats]:
      costs.append(period + _fewest_compiled(kinds[period * repeats :]))
  return min(costs)


def test_segments_cover_all_layers_and_compile_as_few_as_possible():
  sequences = [kinds for n in range(1, 8) for kinds in itertools.product('ds', repeat=n)]
  rng = np.random.default_rng(0)
  sequences += [tuple(rng.choice(['a', 'b', 'c'], 9)) for _ in range(20)]
  for kinds in sequences:
    segments = find_segments(kinds)
    order = [
      i
      for s in segments
      for r in range(s.repeats)
      for i in range(s.start + r * s.period, s.start + (r + 1) * s.period)
    ]
    assert order == list(range(len(kinds)))
    for segment in segments:
      for offset in range(segment.period):
        assert len({kinds[i] for i in segment.layers_at(offset)}) == 1
    assert sum(segment.period for segment in segments) == _fewest_compiled(kinds), kinds


@pytest.mark.parametrize(
  'kinds, expected',
  [
    ('d' * 12, [(0, 1, 12)]),
    ('ds' * 6, [(0, 2, 6)]),
    ('ddds' * 3, [(0, 4, 3)]),
    ('s' * 4 + 'd' * 8, [(0, 1, 4), (4, 1, 8)]),
    ('dddssddd', [(0, 1, 3), (3, 1, 2), (5, 1, 3)]),
    ('dsdsd', [(0, 2, 2), (4, 1, 1)]),
    ('abc', [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
  ],
)
def test_segments_of_the_usual_layouts(kinds, expected):
  assert find_segments(kinds_of(kinds)) == tuple(expected)


# ---- Loops over unlike layers ---------------------------------------------------------------------------------------


class _Noisy(nn.Module):
  """Feed-forward block with random numbers, sown values and state."""

  @nn.compact
  def __call__(self, x, decode=False, deterministic=False):
    del decode
    factor = nn_partitioning.param_with_axes(
      'factor', nn.initializers.normal(1.0), (x.shape[-1],), axes=('embed',)
    )
    calls = self.variable('counters', 'calls', lambda: jnp.zeros((), jnp.int32))
    if self.is_mutable_collection('counters') and not self.is_initializing():
      calls.value += 1
    if not deterministic:
      x = x * jax.random.uniform(self.make_rng('dropout'), x.shape, x.dtype)
    self.sow('intermediates', 'mean', jnp.mean(x))
    return jnp.sin(x * factor)


def _noisy_block(config, name):
  del config
  return _Noisy(name=name)


@dataclasses.dataclass(frozen=True)
class _Layout:
  """Return a `feed_forward_fn` with the block of the test in layers 's' of the layout."""

  encoder: str
  decoder: str

  def __call__(self, stack, layer):
    return _noisy_block if getattr(self, stack)[layer] == 's' else t5.dense_feed_forward


def _module(layout, **fields):
  config = cases.tiny_config(
    num_encoder_layers=len(layout.encoder),
    num_decoder_layers=len(layout.decoder),
    dropout_rate=0.1,
    **fields,
  )
  return t5.Transformer(config, feed_forward_fn=layout)


def _step(module, **batch):
  """Return a function of (parameters, counters, key): loss, updated collections and gradients."""
  batch = batch or cases.tiny_batch()

  def loss_fn(params, rest, key):
    outputs, updates = module.apply(
      {'params': params, **rest},
      **batch,
      rngs={'dropout': key},
      mutable=['counters', 'intermediates'],
    )
    return jnp.mean(jnp.square(outputs)), updates

  return lambda params, rest, key: jax.value_and_grad(loss_fn, has_aux=True)(params, rest, key)


@pytest.mark.parametrize(
  'remat_policy',
  [
    'full',
    *(
      pytest.param(policy, marks=pytest.mark.full)
      for policy in ('none', 'minimal', 'save_attention', 'save_dots_except_mlp')
    ),
  ],
)
def test_unlike_layers_are_the_same_in_loops_unrolled_and_rematerialized(remat_policy):
  layout = _Layout('dsdss', 'd')
  plain, looped = _module(layout), _module(layout, scan_layers=True)
  batch = dict(encoder_input_tokens=cases.tiny_batch()['encoder_input_tokens'], method='encode')

  def init(module):
    return cases.jit(lambda key: module.init(key, **batch, enable_dropout=False))(jax.random.key(0))

  variables, again = init(plain), init(looped)
  cases.assert_trees_close(again['params'], variables['params'], 1e-6)

  def axes(variables):
    return tree_utils.flatten_dict(nn_partitioning.get_axis_names(variables['params_axes']))

  assert axes(variables) == axes(again)
  assert tuple(axes(again)['encoder/layers_4/mlp/factor']) == ('embed',)
  assert set(again['params']['encoder']['layers_2']['mlp']) == {'wi_0', 'wi_1', 'wo'}
  # The initialization is not a step.
  assert jax.tree.leaves(variables['counters']) == jax.tree.leaves(again['counters']) == [0] * 3

  rest = {'counters': variables['counters']}
  (loss, updates), grads = cases.jit(_step(plain, **batch))(
    variables['params'], rest, jax.random.key(1)
  )
  assert jax.tree.leaves(updates['counters']) == [1] * 3
  means = np.array(jax.tree.leaves(updates['intermediates']))
  assert means.shape == (3,) and len(np.unique(means)) == 3
  module = _module(layout, scan_layers=True, remat_policy=remat_policy)
  (got_loss, got_updates), got_grads = cases.jit(_step(module, **batch))(
    variables['params'], rest, jax.random.key(1)
  )
  np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
  cases.assert_trees_close(got_grads, grads, 1e-5)
  cases.assert_trees_close(got_updates['intermediates'], updates['intermediates'], 1e-5)
  jax.tree.map(np.testing.assert_array_equal, got_updates['counters'], updates['counters'])


@pytest.mark.parametrize('remat_policy', ['full', pytest.param('none', marks=pytest.mark.full)])
def test_a_looped_program_of_unlike_layers_does_not_grow_with_depth(remat_policy):
  texts = []
  for repeats in (2, 6):
    module = _module(
      _Layout('ddds' * repeats, 'd' * 2 * repeats + 's' * repeats),
      scan_layers=True,
      remat_policy=remat_policy,
    )
    variables = jax.eval_shape(
      lambda key, module=module: module.init(key, **cases.tiny_batch(), enable_dropout=False),
      jax.random.key(0),
    )
    texts.append(
      jax.jit(_step(module))
      .lower(variables['params'], {'counters': variables['counters']}, jax.random.key(0))
      .as_text()
    )
  shallow, deep = texts
  for operation in ('dot_general', 'while', 'sine'):
    assert shallow.count(f'stablehlo.{operation}') == deep.count(f'stablehlo.{operation}') > 0
  assert not set(re.findall(r'stablehlo\.\w+', deep)) - set(re.findall(r'stablehlo\.\w+', shallow))


@pytest.mark.parametrize('scan_layers', [False, True])
def test_stacked_parameters_of_unlike_layers_raise(scan_layers):
  module = _module(_Layout('ds', 'dd'), param_layout='scalable_t5', scan_layers=scan_layers)
  with pytest.raises(ConfigError, match="Set param_layout='t5'.*equal objects"):
    jax.eval_shape(
      lambda key: module.init(key, **cases.tiny_batch(), enable_dropout=False), jax.random.key(0)
    )


def test_variables_for_some_layers_of_a_loop_raise():
  module = _module(_Layout('ss', 'd'), scan_layers=True)
  variables = jax.eval_shape(
    lambda key: module.init(key, **cases.tiny_batch(), enable_dropout=False), jax.random.key(0)
  )
  counters = {'encoder': {'layers_1': variables['counters']['encoder']['layers_1']}}
  with pytest.raises(
    ConfigError, match=r"'counters' or none, got them in \[1\] of \[0, 1\].*scan_layers=False"
  ):
    jax.eval_shape(_step(module), variables['params'], {'counters': counters}, jax.random.key(0))


# ---- What blocks are told -------------------------------------------------------------------------------------------


class _Listener(nn.Module):
  """Feed-forward block that sows its arguments."""

  @nn.compact
  def __call__(self, x, token_mask, token_ids, decode, deterministic):
    del deterministic
    self.sow('intermediates', 'mask', token_mask)
    self.sow('intermediates', 'ids', token_ids)
    assert token_mask.dtype == bool and token_ids.dtype == jnp.int32
    assert x.shape[:2] == token_mask.shape == token_ids.shape
    return jnp.zeros_like(x) if decode else x


class _ListenerFactory(t5.TokenFeedForwardFactory):
  def __call__(self, config, name):
    return _Listener(name=name)


def _listen_on_top(stack, layer):
  return _LISTENER if layer or stack == 'encoder' else t5.dense_feed_forward


_LISTENER = _ListenerFactory()


def _told(updates, stack):
  (layer,) = updates['intermediates'][stack].values()
  told = layer['mlp']
  return np.asarray(told['mask'][0]), np.asarray(told['ids'][0])


def test_blocks_of_the_encoder_decoder_are_told_tokens_in_every_pass():
  module = t5.Transformer(
    cases.tiny_config(num_encoder_layers=1, num_decoder_layers=2), _listen_on_top
  )
  batch = cases.tiny_batch()
  params = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0)
  )
  params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)

  def apply(variables, *args, **options):
    run = functools.partial(
      module.apply, mutable=['intermediates', 'cache', 'cross_cache'], **options
    )
    return cases.jit(run)(variables, *args)[1]

  inputs, prompts, targets = (
    batch[f'{name}_tokens'] for name in ('encoder_input', 'decoder_input', 'decoder_target')
  )
  updates = apply({'params': params}, inputs, prompts, targets, enable_dropout=False)
  for stack, ids, real in (('encoder', inputs, inputs), ('decoder', prompts, targets)):
    mask, told = _told(updates, stack)
    np.testing.assert_array_equal(told, ids)
    np.testing.assert_array_equal(mask, np.asarray(real) > 0)

  encoded = jnp.zeros((*inputs.shape, 16))
  lengths = jnp.array([1, 5, 3, 0])
  updates = apply(
    {'params': params},
    encoded,
    inputs,
    prompts,
    prompts,
    prefill=True,
    prefill_lengths=lengths,
    max_decode_length=7,
    enable_dropout=False,
    method='decode',
  )
  mask, told = _told(updates, 'decoder')
  np.testing.assert_array_equal(told, prompts)
  np.testing.assert_array_equal(mask, np.arange(5) < np.asarray(lengths)[:, None])
  updates = apply(
    {'params': params, 'cache': updates['cache']},
    encoded,
    inputs,
    prompts[:, :1],
    prompts[:, :1],
    decode=True,
    enable_dropout=False,
    method='decode',
  )
  mask, told = _told(updates, 'decoder')
  np.testing.assert_array_equal(told, prompts[:, :1])
  assert mask.all()


def test_blocks_of_the_decoder_only_network_are_told_tokens_in_every_pass():
  config = decoder_only.TransformerConfig(
    vocab_size=40, emb_dim=16, num_heads=2, num_layers=2, head_dim=8, mlp_dim=24, dropout_rate=0.0
  )
  module = decoder_only.DecoderWrapper(config, _listen_on_top)
  tokens, targets = (
    cases.tiny_batch()['decoder_input_tokens'],
    cases.tiny_batch()['decoder_target_tokens'],
  )
  params = jax.eval_shape(
    lambda key: module.init(key, tokens, targets, enable_dropout=False)['params'], jax.random.key(0)
  )
  params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)

  def apply(variables, *args, **options):
    run = functools.partial(
      module.apply, mutable=['intermediates', 'cache'], enable_dropout=False, **options
    )
    return cases.jit(run)(variables, *args)

  _, updates = apply({'params': params}, tokens, targets)
  mask, told = _told(updates, 'decoder')
  np.testing.assert_array_equal(told, tokens)
  np.testing.assert_array_equal(mask, np.asarray(targets) > 0)
  lengths = jnp.array([2, 5, 3, 1])
  _, updates = apply(
    {'params': params}, tokens, tokens, prefill=True, prefill_lengths=lengths, max_decode_length=6
  )
  mask, _ = _told(updates, 'decoder')
  np.testing.assert_array_equal(mask, np.arange(5) < np.asarray(lengths)[:, None])
  _, updates = apply(
    {'params': params, 'cache': updates['cache']}, tokens[:, :1], tokens[:, :1], decode=True
  )
  mask, told = _told(updates, 'decoder')
  assert mask.shape == (4, 1) and mask.all()
  np.testing.assert_array_equal(told, tokens[:, :1])


# ---- Two feed-forward sub-layers ------------------------------------------------------------------------------------


def _two_blocks(stack, layer):
  return (
    (t5.dense_feed_forward, t5.dense_feed_forward)
    if stack == 'encoder' and layer
    else t5.dense_feed_forward
  )


def test_a_layer_may_have_two_feed_forward_blocks():
  """The second block is a separate sub-layer: with zero outputs of the others the layer is x + extra_mlp(norm(x))."""
  config = cases.tiny_config()
  module = t5.Transformer(config, _two_blocks)
  tokens = cases.tiny_batch()['encoder_input_tokens']
  encode = cases.jit(functools.partial(module.apply, method='encode', enable_dropout=False))
  init = functools.partial(module.init, method='encode', enable_dropout=False)
  shapes = jax.eval_shape(lambda key: init(key, tokens)['params'], jax.random.key(0))
  assert 'extra_mlp' not in shapes['encoder']['layers_0']
  assert {'mlp', 'pre_mlp_layer_norm', 'extra_mlp', 'pre_extra_mlp_layer_norm'} < set(
    shapes['encoder']['layers_1']
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)
  layer = params['encoder']['layers_1']
  for silent in (layer['mlp']['wo'], layer['attention']['out']):
    silent['kernel'] = np.zeros_like(silent['kernel'])
  got = encode({'params': params}, tokens)
  layer['mlp'], layer['extra_mlp'] = layer['extra_mlp'], layer['mlp']
  layer['pre_mlp_layer_norm'], layer['pre_extra_mlp_layer_norm'] = (
    layer['pre_extra_mlp_layer_norm'],
    layer['pre_mlp_layer_norm'],
  )
  np.testing.assert_allclose(encode({'params': params}, tokens), got, rtol=1e-5, atol=1e-5)
  layer['mlp']['wo']['kernel'] = layer['extra_mlp']['wo']['kernel']
  assert not np.allclose(encode({'params': params}, tokens), got, atol=1e-2)


def test_other_numbers_of_feed_forward_blocks_raise():
  module = t5.Transformer(cases.tiny_config(), lambda stack, layer: (t5.dense_feed_forward,) * 3)
  with pytest.raises(
    ConfigError, match='`feed_forward_fn` must be a function that returns .* tuple of 1 or 2'
  ):
    jax.eval_shape(lambda key: module.init(key, **cases.tiny_batch()), jax.random.key(0))
