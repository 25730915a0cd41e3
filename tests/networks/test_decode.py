"""Cached decoding: the same logits as without a cache, and the cost of a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import t5
from tests.networks import network_cases as cases

_VARIANTS = {
  't5': {},
  't5-looped': dict(scan_layers=True),
  't5-unscaled-logits': dict(logits_via_embedding=True, scale_tied_logits=False),
  't5-relpos-per-layer': dict(relpos_bias_tables='per_layer'),
  'scalable': dict(param_layout='scalable_t5'),
  'scalable-looped': dict(param_layout='scalable_t5', scan_layers=True, remat_policy='minimal'),
}


def _some(*names):
  """Return the variants as parameters; all except the named ones run with the long tests."""
  return [
    name if name in names else pytest.param(name, marks=pytest.mark.full) for name in _VARIANTS
  ]


def _model(**options):
  """Return (config, module, batch) of a small network."""
  config = cases.tiny_config(**options)
  return config, t5.Transformer(config), cases.tiny_batch()


def _random_model(variant):
  """Return (module, params, batch) of a variant."""
  config, module, batch = _model(num_encoder_layers=1, num_decoder_layers=2, **_VARIANTS[variant])
  return module, cases.random_params(config), batch


def _shape_model(**options):
  """Return (module, shapes of the parameters, batch) of a small network."""
  _, module, batch = _model(**options)
  params = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0)
  )
  return module, params, batch


def _init_cache(module, params, encoded, batch, length):
  """Return the collections of decoding."""
  result, variables = module.apply(
    {'params': params},
    encoded,
    batch['encoder_input_tokens'],
    length,
    method=module.init_cache,
    mutable=['cache', 'cross_cache'],
  )
  assert result is None
  return variables


def _step_fn(module, batch, length, **options):
  """Return fn(params, collections, encoded, tokens [b, q]) -> (logits [b, q, vocab], collections)."""

  def step(params, collections, encoded, tokens, *lengths):
    prefilled = dict(prefill_lengths=lengths[0]) if lengths else {}
    logits, variables = module.apply(
      {'params': params, **collections},
      encoded,
      batch['encoder_input_tokens'],
      tokens,
      tokens,
      enable_dropout=False,
      decode=True,
      max_decode_length=length,
      mutable=['cache'],
      method=module.decode,
      **options,
      **prefilled,
    )
    return logits, {**collections, **variables}

  return step


def _teacher_forced(module, params, batch, length):
  """Return (encoder output, logits of a pass without a cache, collections of decoding)."""

  def run(params):
    encoded = module.apply(
      {'params': params}, batch['encoder_input_tokens'], enable_dropout=False, method='encode'
    )
    logits = module.apply(
      {'params': params}, encoded, **batch, enable_dropout=False, method='decode'
    )
    return encoded, logits, _init_cache(module, params, encoded, batch, length)

  return cases.jit(run)(params)


def _decode(module, params, collections, encoded, batch):
  """Return the logits of one step after the other, teacher-forced."""
  tokens = batch['decoder_input_tokens']
  step = cases.jit(_step_fn(module, batch, tokens.shape[1]))
  logits = []
  for i in range(tokens.shape[1]):
    out, collections = step(params, collections, encoded, tokens[:, i : i + 1])
    assert out.shape[1] == 1 and out.dtype == jnp.float32
    logits.append(out)
  return np.concatenate(logits, axis=1), collections['cache']


def _cache_indices(cache):
  return [
    np.asarray(leaf)
    for name, leaf in tree_utils.named_leaves(cache)
    if name.endswith('cache_index')
  ]


@pytest.mark.parametrize('variant', _some('t5', 'scalable-looped'))
def test_cached_logits_equal_uncached_ones(variant):
  """Token by token, and after prompts of uneven length that are read in one pass."""
  module, params, batch = _random_model(variant)
  encoded, expected, collections = _teacher_forced(module, params, batch, 5)
  expected, real = np.asarray(expected), np.asarray(batch['decoder_target_tokens']) > 0
  # The encoder's output is not projected again: a step does not look at it.
  unread = jnp.full_like(encoded, jnp.nan)
  logits, cache = _decode(module, params, collections, unread, batch)
  np.testing.assert_allclose(logits[real], expected[real], rtol=1e-5, atol=1e-5)
  assert all(np.all(index == 5) for index in _cache_indices(cache))

  lengths = np.array([2, 0, 4, 1])
  tokens = np.asarray(batch['decoder_input_tokens'])
  # Tokens after a prompt have no effect.
  prompt = np.where(np.arange(5) < lengths[:, None], tokens, 7)
  prefill = cases.jit(_step_fn(module, batch, 5, prefill=True))
  logits, collections = prefill(params, collections, unread, prompt, lengths)
  given = (np.arange(5) < lengths[:, None]) & real
  np.testing.assert_allclose(np.asarray(logits)[given], expected[given], rtol=1e-5, atol=1e-5)
  step = cases.jit(_step_fn(module, batch, 5))
  for i in range(5):
    # Full rows take further steps, as in a loop; their cache must not change.
    position = np.minimum(lengths + i, 4)
    out, collections = step(
      params, collections, unread, np.take_along_axis(tokens, position[:, None], axis=1)
    )
    checked = (lengths + i < 5) & real[np.arange(4), position]
    np.testing.assert_allclose(
      np.asarray(out)[checked, 0], expected[np.arange(4), position][checked], rtol=1e-5, atol=1e-5
    )
  assert all(np.all(index == lengths + 5) for index in _cache_indices(collections['cache']))


@pytest.mark.parametrize('kernel', ['dot', 'blockwise'])
def test_an_example_without_inputs_has_one_result(kernel):
  """Alone, next to other examples in a packed row, with more padding, and in steps of decoding."""
  config, module, _ = _model(num_encoder_layers=1, num_decoder_layers=1, attention_kernel=kernel)
  params = cases.random_params(config)
  targets = np.array([[5, 6, 7]])
  shifted = np.array([[0, 5, 6]])

  def batch_of(length):
    return {
      'encoder_input_tokens': np.zeros((1, length), int),
      'decoder_input_tokens': shifted,
      'decoder_target_tokens': targets,
    }

  encoded, want, collections = _teacher_forced(module, params, batch_of(6), 3)
  longer = _teacher_forced(module, params, batch_of(9), 3)[1]
  np.testing.assert_allclose(longer, want, rtol=1e-5, atol=1e-5)
  steps, _ = _decode(module, params, collections, encoded, batch_of(6))
  np.testing.assert_allclose(steps, want, rtol=1e-5, atol=1e-5)
  for neighbour in ([9, 8, 7, 0, 0, 0], [3, 3, 3, 3, 0, 0]):
    packed = {
      'encoder_input_tokens': np.array([neighbour]),
      'encoder_segment_ids': (np.array([neighbour]) > 0).astype(int),
      'decoder_input_tokens': np.concatenate([[[0, 11]], shifted], 1),
      'decoder_target_tokens': np.concatenate([[[11, 1]], targets], 1),
      'decoder_segment_ids': np.array([[1, 1, 2, 2, 2]]),
    }
    logits = module.apply({'params': params}, **packed, enable_dropout=False)
    np.testing.assert_allclose(logits[:, 2:], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('variant', _some('scalable-looped'))
def test_prompts_of_one_length_keep_one_index(variant):
  """Without lengths, prompts fill their rows; the following tokens come in chunks of any size."""
  module, params, batch = _random_model(variant)
  encoded, expected, _ = _teacher_forced(module, params, batch, 5)
  real = np.asarray(batch['decoder_target_tokens']) > 0
  tokens = batch['decoder_input_tokens']
  # Without `init_cache` the cache is made of the prompt, and the encoder's output is projected in each call.
  first, collections = cases.jit(_step_fn(module, batch, 5, prefill=True))(
    params, {}, encoded, tokens[:, :2]
  )
  second, collections = cases.jit(_step_fn(module, batch, 5))(
    params, collections, encoded, tokens[:, 2:]
  )
  logits = np.concatenate([first, second], axis=1)
  np.testing.assert_allclose(logits[real], np.asarray(expected)[real], rtol=1e-5, atol=1e-5)
  assert all(index.shape == () and index == 5 for index in _cache_indices(collections['cache']))


@pytest.mark.parametrize('variant', _some('t5'))
def test_decodes_of_an_example_attend_to_one_copy_of_its_encoding(variant):
  module, params, batch = _random_model(variant)
  encoded, _, collections = _teacher_forced(module, params, batch, 5)
  expand = functools.partial(jnp.repeat, repeats=3, axis=0)
  cache = {
    'cache': jax.tree.map(lambda leaf: expand(leaf) if leaf.ndim else leaf, collections['cache'])
  }
  cross = {'cross_cache': collections['cross_cache']}
  expanded = {'cross_cache': jax.tree.map(expand, collections['cross_cache'])}
  rows = {name: jnp.repeat(value, 3, axis=0) for name, value in batch.items()}
  shared_step, expanded_step = (cases.jit(_step_fn(module, b, 5)) for b in (batch, rows))
  shared, other = {**cache, **cross}, {**cache, **expanded}
  rng = np.random.default_rng(0)
  for _ in range(3):
    tokens = rng.integers(1, 40, (12, 1))
    got, shared = shared_step(params, shared, encoded, tokens)
    want, other = expanded_step(params, other, None, tokens)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  assert tree_utils.num_bytes(shared['cross_cache']) * 3 == tree_utils.num_bytes(
    other['cross_cache']
  )


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
def test_cache_has_t5xs_leaves_for_each_layer(layout):
  module, params, batch = _shape_model(param_layout=layout)
  collections = jax.eval_shape(
    lambda params: _init_cache(module, params, jnp.zeros((4, 6, 16)), batch, 9), params
  )
  shapes = {name: leaf.shape for name, leaf in tree_utils.flatten_dict(collections).items()}
  layer = {
    'cache': {
      'self_attention/cached_key': (4, 2, 9, 8),
      'self_attention/cached_value': (4, 2, 9, 8),
      'self_attention/cache_index': (),
    },
    'cross_cache': {
      'encoder_decoder_attention/cached_key': (4, 2, 6, 8),
      'encoder_decoder_attention/cached_value': (4, 2, 6, 8),
    },
  }
  assert shapes == {
    f'{collection}/decoder/layers_{i}/{name}': shape
    for collection, leaves in layer.items()
    for name, shape in leaves.items()
    for i in range(3)
  }


def test_cache_made_in_t5xs_way_works_too():
  """A pass over dummy inputs makes the self-attention cache; each step projects the encoder's output."""
  config, module, batch = _model()
  params = cases.random_params(config)
  dummies = {name: jnp.ones_like(value) for name, value in batch.items()}
  make = cases.jit(
    functools.partial(module.apply, enable_dropout=False, decode=True, mutable=['cache'])
  )
  _, variables = make({'params': params}, **dummies)
  encode = cases.jit(functools.partial(module.apply, enable_dropout=False, method='encode'))
  encoded = encode({'params': params}, batch['encoder_input_tokens'])
  logits, _ = _decode(module, params, variables, encoded, batch)
  real = np.asarray(batch['decoder_target_tokens']) > 0
  expected = np.asarray(cases.forward(config, params, batch))
  np.testing.assert_allclose(logits[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  'variant, per_row',
  [
    ('t5', True),
    ('scalable-looped', False),
    *(
      pytest.param(variant, per_row, marks=pytest.mark.full)
      for variant in _VARIANTS
      for per_row in (False, True)
      if (variant, per_row) not in (('t5', True), ('scalable-looped', False))
    ),
  ],
)
def test_a_step_works_in_place_and_computes_one_row_of_biases(variant, per_row):
  module, params, batch = _shape_model(**_VARIANTS[variant])
  length = 2048
  encoded = jax.ShapeDtypeStruct((4, 6, 16), jnp.float32)
  collections = jax.eval_shape(
    lambda params: _init_cache(module, params, jnp.zeros((4, 6, 16)), batch, length), params
  )
  if per_row:
    prompts = jax.ShapeDtypeStruct((4, 5), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    prefill = _step_fn(module, batch, length, prefill=True)
    _, collections = jax.eval_shape(prefill, params, collections, encoded, *prompts)
  tokens = jax.ShapeDtypeStruct((4, 1), jnp.int32)
  lowered = jax.jit(_step_fn(module, batch, length), donate_argnums=1).lower(
    params, collections, encoded, tokens
  )
  assert f'{length}x{length}' not in lowered.as_text()
  memory = lowered.compile(compiler_options={'xla_backend_optimization_level': 0}).memory_analysis()
  cache_bytes = tree_utils.num_bytes(collections['cache'])
  assert memory.alias_size_in_bytes >= cache_bytes
  # Not even the keys of one layer are copied.
  assert memory.temp_size_in_bytes < cache_bytes / 6


def test_errors_of_decoding():
  module, params, batch = _shape_model()
  encoded, tokens = jnp.zeros((4, 6, 16)), batch['decoder_input_tokens'][:, :1]
  collections = jax.eval_shape(
    lambda params: _init_cache(module, params, encoded, batch, 9), params
  )
  run = functools.partial(jax.eval_shape, _step_fn(module, batch, 8), params)
  with pytest.raises(
    ConfigError, match='`max_decode_length` must be 9, the length of the cache, got 8'
  ):
    run(collections, encoded, tokens)
  with pytest.raises(ConfigError, match='at most 8 positions, the length of the cache, got 10'):
    jax.eval_shape(
      _step_fn(module, batch, 8, prefill=True), params, {}, encoded, jnp.zeros((4, 10), jnp.int32)
    )
  rows = {
    'cache': jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct((6, *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype),
      collections['cache'],
    )
  }
  with pytest.raises(ConfigError, match='multiple of the 4 examples of the cache, got 6'):
    jax.eval_shape(
      _step_fn(module, batch, 9),
      params,
      {**collections, **rows},
      encoded,
      jnp.zeros((6, 1), jnp.int32),
    )
  with pytest.raises(ConfigError, match='unpacked rows'):
    jax.eval_shape(
      lambda params: module.apply(
        {'params': params},
        encoded,
        batch['encoder_input_tokens'],
        tokens,
        tokens,
        decoder_segment_ids=tokens,
        decode=True,
        method='decode',
      ),
      params,
    )
