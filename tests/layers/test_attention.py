"""Attention: dtypes, the choice of kernels, dropout, caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.errors import ConfigError

_KEY = jax.random.key(0)


def _random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _reference(query, key, value, bias):
  """Return the result of attention in float64, one query at a time."""
  query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
  batch, q_len, heads, _ = query.shape
  bias = np.broadcast_to(np.asarray(bias, np.float64), (batch, heads, q_len, key.shape[1]))
  out = np.zeros((*query.shape[:3], value.shape[-1]))
  for b, q, h in np.ndindex(batch, q_len, heads):
    scores = key[b, :, h] @ query[b, q, h] + bias[b, h, q]
    weights = np.exp(scores - scores.max())
    out[b, q, h] = (weights / weights.sum()) @ value[b, :, h]
  return out


def _inputs(batch=2, q_len=4, k_len=6, heads=3, head_dim=8):
  return (
    _random(batch, q_len, heads, head_dim),
    _random(batch, k_len, heads, head_dim, seed=1),
    _random(batch, k_len, heads, head_dim, seed=2),
  )


@pytest.mark.parametrize(
  'bias_shape', [None, (1, 3, 4, 6), (2, 1, 1, 6), (2, 1, 4, 6), (1, 1, 4, 6), (2, 3, 4, 6)]
)
def test_attention_by_brute_force(bias_shape):
  query, key, value = _inputs()
  bias = None if bias_shape is None else _random(*bias_shape, seed=3)
  got = layers.dot_product_attention(query, key, value, bias)
  np.testing.assert_allclose(
    got, _reference(query, key, value, 0.0 if bias is None else bias), rtol=1e-5, atol=1e-5
  )


def test_bias_in_parts_is_their_sum_and_so_are_its_gradients():
  query, key, value = _inputs(q_len=6)
  position = _random(1, 3, 6, 6, seed=3)
  valid = jnp.array([[True] * 6, [True] * 4 + [False] * 2])
  hidden = layers.causal_bias(6, 6) + layers.mask_to_bias(valid)[:, None, None, :]
  cotangent = _random(2, 6, 3, 8, seed=4)

  def in_parts(position, query, key, value):
    bias = layers.make_attention_bias(valid, valid, causal=True, position=position)
    return jnp.sum(layers.dot_product_attention(query, key, value, bias) * cotangent)

  def in_one(position, query, key, value):
    return jnp.sum(layers.dot_product_attention(query, key, value, position + hidden) * cotangent)

  got, want = (
    jax.jit(jax.value_and_grad(fn, (0, 1, 2, 3)))(position, query, key, value)
    for fn in (in_parts, in_one)
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
  assert got[1][0].shape == position.shape


def test_there_is_no_scaling():
  query, key, value = _inputs(q_len=1, k_len=2, heads=1)
  scores = np.einsum('bqhd,bkhd->bqk', query, key)[:, 0]
  weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
  np.testing.assert_allclose(
    layers.dot_product_attention(query, key, value)[:, 0, 0],
    np.einsum('bk,bkd->bd', weights, value[:, :, 0]),
    rtol=1e-4,
    atol=1e-5,
  )


def test_rows_without_any_key_stay_finite():
  query, key, value = _inputs()
  valid = jnp.zeros((2, 6), bool)
  bias = layers.make_attention_bias(jnp.zeros((2, 4), bool), valid)
  assert np.isfinite(
    layers.dot_product_attention(query, key, value, bias, dtype=jnp.bfloat16)
  ).all()


_PACKED_WITHOUT_KEYS = [[1, 1, 2, 2, 3, 0], [2, 2, 3, 3, 0, 0]]


@pytest.mark.parametrize('kernel', ['dot', 'blockwise'])
@pytest.mark.parametrize('heads_first', [False, True])
@pytest.mark.parametrize(
  'kind',
  ['no key', 'packed', 'causal', 'prefix', 'one query', *(-1e9, -1e10, -3e38, -jnp.inf)],
)
def test_a_query_without_a_visible_key_gets_zeros(kernel, heads_first, kind):
  """In every kernel and for every form of a mask; all other queries have the result of a softmax in NumPy."""
  valid = jnp.asarray(np.array([[1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0]], bool))
  every = jnp.ones((2, 6), bool)
  position = _random(1, 2, 6, 6, seed=5)
  if kind == 'no key':
    bias = layers.make_attention_bias(
      every, valid & jnp.array([[True], [False]]), position=position
    )
  elif kind == 'packed':
    ids = jnp.array(_PACKED_WITHOUT_KEYS)
    key_ids = jnp.array([[2, 2, 2, 3, 0, 0], [2, 2, 4, 4, 0, 0]])
    bias = layers.make_attention_bias(
      ids > 0, key_ids > 0, query_segment_ids=ids, key_segment_ids=key_ids
    )
  elif kind == 'causal':
    bias = layers.make_attention_bias(valid, valid, causal=True, position=position)
  elif kind == 'prefix':
    bias = layers.make_attention_bias(
      valid, valid, causal=True, prefix=jnp.arange(6)[None] < jnp.array([[2], [1]])
    )
  elif kind == 'one query':
    bias = layers.AttentionBias.from_array(layers.mask_to_bias(every[:, None, None] * 0.0))
  else:
    # A mask as a plain bias on top of biases of positions.
    array = position + jnp.where(valid[:, None, None], 0.0, kind)
    bias = layers.AttentionBias.from_array(array.at[:, :, 2:4].set(kind))
  arrays = bias.with_arrays()
  total = np.zeros((2, 2, 6, 6), np.float64)
  for part in (arrays.shared, arrays.per_example):
    if part is not None:
      total = total + np.asarray(part, np.float64)
  query, key, value = (np.asarray(_random(2, 6, 2, 8, seed=i), np.float64) for i in range(3))
  scores = np.einsum('bqhd,bkhd->bhqk', query, key) + total
  weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e5))
  weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
  want = np.einsum('bhqk,bkhd->bqhd', weights, value)
  is_blind = (total < -1e8).all(axis=(1, 3))
  assert is_blind.any() and not want[is_blind].any()

  def attend(query, key, value):
    if heads_first:
      key, value = (jnp.swapaxes(x, 1, 2) for x in (key, value))
    return layers.dot_product_attention(
      query, key, value, bias, kernel=kernel, heads_first=heads_first
    )

  args = [jnp.asarray(x, jnp.float32) for x in (query, key, value)]
  got, derivatives_fn = jax.vjp(attend, *args)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  assert not np.any(np.asarray(got)[is_blind])
  # Outputs of these queries have no derivative, and none of the others is spoilt.
  blind = jnp.where(is_blind[:, :, None, None], 1.0, jnp.zeros_like(got))
  assert all(not np.any(bar) for bar in derivatives_fn(blind))
  assert all(np.all(np.isfinite(bar)) for bar in derivatives_fn(got))


def test_softmax_is_float32_and_the_option_keeps_scores_so():
  """The score of one key is larger than those of a hundred others by less than the resolution of bfloat16."""
  key = (
    jnp.concatenate([jnp.full((1, 100, 1, 1), 256.0), jnp.full((1, 1, 1, 1), 256.0)], axis=1)
    .at[0, 100]
    .set(258.0)
  )
  query = jnp.full((1, 1, 1, 1), 0.75)  # scores 192 and 193.5; bfloat16 has steps of 1 there
  value = (jnp.arange(101) == 100).astype(jnp.float32)[None, :, None, None]
  weight = {
    exact: layers.dot_product_attention(
      query, key, value, dtype=jnp.bfloat16, float32_logits=exact
    ).item()
    for exact in (False, True)
  }

  def softmax(gap):
    return np.exp(gap) / (np.exp(gap) + 100)

  assert abs(weight[True] - softmax(1.5)) < 1e-3
  assert min(abs(weight[False] - softmax(gap)) for gap in (1.0, 2.0)) < 1e-3


def test_dropout_drops_keys_for_all_queries_alike():
  batch, heads, k_len = 3, 2, 400
  query, key = jnp.zeros((batch, 4, heads, 8)), jnp.zeros((batch, k_len, heads, 8))
  value = jnp.ones((batch, k_len, heads, 8))
  out = layers.dot_product_attention(query, key, value, dropout_rng=_KEY, dropout_rate=0.25)
  # All weights are 1 / k_len: the output is the fraction of keys kept over the chance of being kept.
  np.testing.assert_allclose(out, jnp.broadcast_to(out[:, :1], out.shape))
  kept = np.asarray(out[:, 0, :, 0]) * 0.75
  assert np.all(np.abs(kept - 0.75) < 0.1) and len(np.unique(kept)) > 3
  same = layers.dot_product_attention(query, key, value, dropout_rate=0.25, deterministic=True)
  np.testing.assert_allclose(same, 1.0, rtol=1e-5)
  with pytest.raises(ConfigError, match='dropout_rng'):
    layers.dot_product_attention(query, key, value, dropout_rate=0.25)


def _attention(**fields):
  return layers.MultiHeadDotProductAttention(num_heads=2, head_dim=8, **fields)


@pytest.mark.parametrize('flat', [True, False])
def test_projections_have_t5s_names_shapes_and_scales(flat):
  x = _random(1, 3, 512)
  variables = layers.MultiHeadDotProductAttention(8, 64, flat_kernels=flat).init(_KEY, x, x)
  shapes = {name: sub['kernel'].shape for name, sub in variables['params'].items()}
  wide, back = ((512, 512), (512, 512)) if flat else ((512, 8, 64), (8, 64, 512))
  assert shapes == {'query': wide, 'key': wide, 'value': wide, 'out': back}
  for name, std in (
    ('query', 512**-0.5 / 8),
    ('key', 512**-0.5),
    ('value', 512**-0.5),
    ('out', 512**-0.5),
  ):
    kernel = np.asarray(variables['params'][name]['kernel'])
    assert abs(kernel.std() / std - 1) < 0.02, name
    # A normal distribution that is not truncated at two standard deviations.
    assert np.abs(kernel).max() > 3 * std, name


def test_mask_and_bias_arrays_are_t5xs_arguments():
  module = _attention()
  x, y = _random(2, 3, 16), _random(2, 5, 16, seed=1)
  variables = module.init(_KEY, x, y)
  mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 1, 3, 5))).at[..., 0].set(1)
  bias = _random(1, 2, 3, 5, seed=3)
  params = {
    name: sub['kernel'].reshape(16, 2, 8)
    for name, sub in variables['params'].items()
    if name != 'out'
  }
  query, key, value = (
    np.einsum('ble,ehd->blhd', a, params[n]) for a, n in ((x, 'query'), (y, 'key'), (y, 'value'))
  )
  total = np.where(np.asarray(mask) > 0, 0.0, -1e10) + bias
  out = np.einsum(
    'blhd,hde->ble',
    _reference(query, key, value, total),
    variables['params']['out']['kernel'].reshape(2, 8, 16),
  )
  np.testing.assert_allclose(module.apply(variables, x, y, mask, bias), out, rtol=1e-4, atol=1e-5)
  # The same mask for all examples, and a bias in the other form.
  shared = module.apply(variables, x, y, mask[:1], layers.AttentionBias.from_array(bias))
  np.testing.assert_allclose(shared[0], out[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('chunk', [1, 2])
def test_cached_steps_equal_causal_attention(chunk):
  module = _attention()
  x = _random(2, 6, 16)
  bias = _random(1, 2, 6, 6, seed=1)
  params = module.init(_KEY, x, x)['params']
  expected = module.apply({'params': params}, x, x, layers.make_causal_mask(x[..., 0]), bias)
  _, variables = module.apply({'params': params}, 2, 6, method='init_cache', mutable=['cache'])
  assert {name: leaf.shape for name, leaf in variables['cache'].items()} == {
    'cached_key': (2, 2, 6, 8),
    'cached_value': (2, 2, 6, 8),
    'cache_index': (),
  }
  cache = variables['cache']
  step = jax.jit(
    lambda cache, x, bias: module.apply(
      {'params': params, 'cache': cache}, x, x, bias=bias, decode=True, mutable=['cache']
    )
  )
  for i in range(0, 6, chunk):
    rows = slice(i, i + chunk)
    out, variables = step(cache, x[:, rows], bias[:, :, rows])
    cache = variables['cache']
    np.testing.assert_allclose(out, expected[:, rows], rtol=1e-5, atol=1e-5)
  assert cache['cache_index'] == 6


def test_a_full_row_of_a_cache_drops_new_tokens():
  module = _attention()
  x = _random(2, 4, 16)
  params = module.init(_KEY, x, x)['params']
  _, variables = module.apply(
    {'params': params}, x, x, prefill=True, prefill_lengths=jnp.array([4, 2]), mutable=['cache']
  )
  before = variables['cache']
  _, variables = module.apply(
    {'params': params, 'cache': before}, x[:, :1], x[:, :1], decode=True, mutable=['cache']
  )
  for name in ('cached_key', 'cached_value'):
    changed = np.any(np.asarray(variables['cache'][name] != before[name]), axis=(1, 3))
    np.testing.assert_array_equal(changed, [[False] * 4, [False, False, True, False]])


def test_cache_is_written_in_place():
  """A step updates a slice, without a product of the cache with one-hot vectors."""
  module = _attention()
  x = _random(2, 1, 16)
  params = module.init(_KEY, x, x)['params']
  _, variables = module.apply({'params': params}, 2, 512, method='init_cache', mutable=['cache'])

  def step(cache, x):
    out, variables = module.apply(
      {'params': params, 'cache': cache}, x, x, decode=True, mutable=['cache']
    )
    return variables['cache'], out

  compiled = jax.jit(step, donate_argnums=0).lower(variables['cache'], x).compile()
  cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(variables['cache']))
  assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
  assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes
  assert 'dynamic_update_slice' in jax.jit(step).lower(variables['cache'], x).as_text()


def test_cache_of_another_batch_raises():
  module = _attention()
  x = _random(2, 1, 16)
  params = module.init(_KEY, x, x)['params']
  _, variables = module.apply({'params': params}, 3, 4, method='init_cache', mutable=['cache'])
  with pytest.raises(ConfigError, match='number of sequences must be 3, that of the cache, got 2'):
    module.apply({'params': params, **variables}, x, x, decode=True, mutable=['cache'])


def test_cached_keys_and_values_serve_cross_attention():
  module = _attention()
  x, encoded = _random(2, 3, 16), _random(2, 5, 16, seed=1)
  params = module.init(_KEY, x, encoded)['params']
  bias = layers.make_attention_bias(
    jnp.ones((2, 3), bool), jnp.array([[True] * 5, [True] * 3 + [False] * 2])
  )
  _, variables = module.apply(
    {'params': params}, encoded, method='cache_keys_values', mutable=['cross_cache']
  )
  got = module.apply(
    {'params': params, **variables}, x, bias=bias, method='attend_to_cache', deterministic=True
  )
  np.testing.assert_allclose(
    got, module.apply({'params': params}, x, encoded, bias=bias), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize('lengths', [None, (3, 1)])
def test_a_bias_of_all_positions_serves_a_step(lengths):
  module = _attention()
  x, bias = _random(2, 6, 16), _random(1, 2, 6, 6, seed=1)
  params = module.init(_KEY, x, x)['params']
  expected = module.apply({'params': params}, x, x, layers.make_causal_mask(x[..., 0]), bias)
  lengths = jnp.array((3, 3) if lengths is None else lengths)
  _, variables = module.apply(
    {'params': params},
    x,
    x,
    prefill=True,
    prefill_lengths=lengths if lengths[0] != lengths[1] else 3,
    mutable=['cache'],
  )
  token = jnp.take_along_axis(jnp.asarray(x), lengths[:, None, None], axis=1)
  out, _ = module.apply(
    {'params': params, **variables},
    token,
    token,
    bias=jnp.asarray(bias),
    decode=True,
    mutable=['cache'],
  )
  np.testing.assert_allclose(
    out, jnp.take_along_axis(expected, lengths[:, None, None], axis=1), rtol=1e-5, atol=1e-5
  )
