"""Dense, norm, embedding, feed-forward, masks and relative positions, each against plain NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning as nn_partitioning

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from tests import golden_data

_KEY = jax.random.key(0)


def _random(*shape, seed=0, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- Dense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('flat', [True, False])
@pytest.mark.parametrize('features, axis, shape, equation', [
    (5, -1, (2, 3, 4), 'abc,cd->abd'),
    ((2, 5), -1, (2, 3, 4), 'abc,cde->abde'),
    (5, (-2, -1), (2, 3, 4, 6), 'abcd,cde->abe'),
    (5, 1, (2, 3, 4), 'abc,bd->acd'),
])
def test_dense_contracts_the_named_dims(features, axis, shape, equation, flat):
  x = _random(*shape)
  module = layers.DenseGeneral(features, axis=axis, flat_kernel=flat)
  variables = module.init(_KEY, x)
  kernel = np.asarray(variables['params']['kernel'])
  axes = (axis,) if isinstance(axis, int) else axis
  sizes = tuple(shape[a] for a in axes)
  sizes += (features,) if isinstance(features, int) else features
  if flat:
    assert kernel.ndim == 2
  np.testing.assert_allclose(
      module.apply(variables, x), np.einsum(equation, x, kernel.reshape(sizes)), rtol=1e-5, atol=1e-5)


def test_dense_kernel_forms_hold_the_same_numbers_and_name_their_axes():
  x = _random(2, 3, 4)
  flat = layers.DenseGeneral((2, 5), kernel_axes=('embed', 'joined_kv')).init(_KEY, x)
  full = layers.DenseGeneral((2, 5), kernel_axes=('embed', 'heads', 'kv'), flat_kernel=False).init(_KEY, x)
  np.testing.assert_array_equal(flat['params']['kernel'].reshape(4, 2, 5), full['params']['kernel'])
  names = nn_partitioning.get_axis_names(full['params_axes'])
  assert tuple(names['kernel']) == ('embed', 'heads', 'kv')


def test_dense_computes_in_its_dtype_with_float32_parameters():
  module = layers.DenseGeneral(5, dtype=jnp.bfloat16)
  variables = module.init(_KEY, _random(2, 4))
  assert variables['params']['kernel'].dtype == jnp.float32
  assert module.apply(variables, _random(2, 4)).dtype == jnp.bfloat16


# ---- Norm -----------------------------------------------------------------------------------------------------------


def test_layer_norm_divides_by_the_root_mean_square():
  x = _random(3, 8) * 5 + 2
  module = layers.LayerNorm()
  scale = _random(8, seed=1)
  expected = x / np.sqrt(np.mean(x.astype(np.float64)**2, -1, keepdims=True) + 1e-6) * scale
  np.testing.assert_allclose(module.apply({'params': {'scale': scale}}, x), expected, rtol=1e-5)


def test_layer_norm_statistics_are_float32():
  # The squares sum to more than float16 holds.
  x = jnp.full((1, 64), 60000.0, jnp.float16)
  module = layers.LayerNorm(dtype=jnp.float16)
  y = module.apply({'params': {'scale': jnp.ones(64)}}, x)
  assert y.dtype == jnp.float16
  np.testing.assert_allclose(np.asarray(y, np.float32), 1.0, rtol=1e-3)


# ---- Embedding ------------------------------------------------------------------------------------------------------


def test_embedding_gathers_and_scores_its_rows():
  module = layers.Embed(num_embeddings=7, features=4, attend_dtype=jnp.float32, dtype=jnp.bfloat16)
  ids = np.array([[0, 6, 3]], np.int32)
  variables = module.init(_KEY, ids)
  table = np.asarray(variables['params']['embedding'])
  looked_up = module.apply(variables, ids)
  assert looked_up.dtype == jnp.bfloat16
  np.testing.assert_array_equal(looked_up, table[ids].astype(jnp.bfloat16))
  query = _random(2, 3, 4)
  scores = module.apply(variables, query, method='attend')
  assert scores.dtype == jnp.float32
  np.testing.assert_allclose(scores, query @ table.T, rtol=1e-5, atol=1e-5)


def test_embedding_by_one_hot_is_the_same_function():
  ids = np.array([[0, 6, 3, 3]], np.int32)
  table = {'params': {'embedding': _random(7, 4)}}

  def loss(variables, one_hot):
    return jnp.sum(layers.Embed(7, 4, one_hot=one_hot).apply(variables, ids)**3)

  gather, one_hot = (jax.value_and_grad(loss)(table, flag) for flag in (False, True))
  np.testing.assert_allclose(gather[0], one_hot[0], rtol=1e-6)
  np.testing.assert_allclose(
      gather[1]['params']['embedding'], one_hot[1]['params']['embedding'], rtol=1e-6, atol=1e-6)


def test_embedding_refuses_ids_that_are_not_integers():
  table = {'params': {'embedding': _random(7, 4)}}
  with pytest.raises(ConfigError, match='cast_input_dtype'):
    layers.Embed(7, 4).apply(table, np.array([1.0]))
  np.testing.assert_array_equal(
      layers.Embed(7, 4, cast_input_dtype=jnp.int32).apply(table, np.array([1.0])), table['params']['embedding'][[1]])


# ---- Feed-forward ---------------------------------------------------------------------------------------------------


def test_mlp_multiplies_activated_projections():
  x = _random(2, 3, 4)
  module = layers.MlpBlock(intermediate_dim=6, activations=('gelu', 'linear'), intermediate_dropout_rate=0.0)
  variables = module.init(_KEY, x)
  wi_0, wi_1, wo = (np.asarray(variables['params'][name]['kernel'], np.float64) for name in ('wi_0', 'wi_1', 'wo'))
  gate = x @ wi_0
  gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
  np.testing.assert_allclose(module.apply(variables, x), (gate * (x @ wi_1)) @ wo, rtol=1e-4, atol=1e-5)


def test_mlp_with_one_activation_has_one_input_kernel():
  x = _random(2, 3, 4)
  module = layers.MlpBlock(intermediate_dim=6, activations=('relu',), intermediate_dropout_rate=0.0)
  variables = module.init(_KEY, x)
  assert set(variables['params']) == {'wi', 'wo'}
  wi, wo = (np.asarray(variables['params'][name]['kernel']) for name in ('wi', 'wo'))
  np.testing.assert_allclose(module.apply(variables, x), np.maximum(x @ wi, 0) @ wo, rtol=1e-4, atol=1e-5)


def test_mlp_drops_hidden_units_of_a_sequence_at_all_positions():
  x = np.broadcast_to(_random(2, 1, 4), (2, 5, 4))
  module = layers.MlpBlock(intermediate_dim=64, activations=('linear',), intermediate_dropout_rate=0.5)
  variables = module.init(_KEY, x, deterministic=True)
  y = np.asarray(module.apply(variables, x, rngs={'dropout': _KEY}))
  np.testing.assert_allclose(y, np.broadcast_to(y[:, :1], y.shape), rtol=1e-5, atol=1e-6)
  assert not np.allclose(y[0] / x[0], y[1] / x[1])
  assert not np.allclose(y, module.apply(variables, x, deterministic=True))


def test_unknown_activation_gets_a_proposal():
  with pytest.raises(ConfigError, match="Did you mean 'gelu'"):
    layers.activation_fn('gellu')
  assert layers.activation_fn(np.sin) is np.sin


# ---- Masks ----------------------------------------------------------------------------------------------------------


def test_decoder_mask_by_brute_force():
  targets = np.array([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
  segments = np.array([[1, 1, 2, 2, 0, 0], [1, 1, 1, 2, 2, 2]])
  prefix = np.array([[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
  for use_prefix, use_segments in itertools.product((False, True), repeat=2):
    mask = layers.make_decoder_mask(
        jnp.asarray(targets), jnp.float32, jnp.asarray(prefix) if use_prefix else None,
        jnp.asarray(segments) if use_segments else None)
    assert mask.shape == (2, 1, 6, 6) and mask.dtype == jnp.float32
    for b, q, k in itertools.product(range(2), range(6), range(6)):
      seen = k <= q or (use_prefix and prefix[b, q] and prefix[b, k])
      seen = seen and targets[b, q] > 0 and targets[b, k] > 0
      seen = seen and (not use_segments or segments[b, q] == segments[b, k])
      assert mask[b, 0, q, k] == seen, (b, q, k)


def test_masks_combine_by_and_biases_by_sum():
  a, b = jnp.array([[1.0, 0.0, 1.0]]), jnp.array([[1.0, 1.0, 0.0]])
  np.testing.assert_array_equal(layers.combine_masks(a, None, b), [[1.0, 0.0, 0.0]])
  np.testing.assert_array_equal(layers.combine_biases(a, None, b), [[2.0, 1.0, 1.0]])
  assert layers.combine_masks(None) is None and layers.combine_biases(None, None) is None
  with pytest.raises(ConfigError, match='rank'):
    layers.combine_masks(a, b[0])
  assert layers.make_attention_mask(a, b, extra_batch_dims=2).shape == (1, 1, 1, 1, 3, 3)
  np.testing.assert_array_equal(layers.make_causal_mask(a)[0, 0], np.tril(np.ones((3, 3))))


def test_attention_bias_says_what_the_masks_say():
  """The parts of a bias add up to the mask of T5X, except in the rows of padding queries."""
  targets = jnp.array([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
  segments = jnp.array([[1, 1, 2, 2, 0, 0], [1, 1, 1, 2, 2, 2]])
  valid = targets > 0
  position = jnp.asarray(_random(1, 3, 6, 6))
  for packed in (False, True):
    ids = segments if packed else None
    mask = layers.make_decoder_mask(targets, jnp.float32, decoder_segment_ids=ids)
    expected = np.broadcast_to(layers.mask_to_bias(mask) + position, (2, 3, 6, 6))
    bias = layers.make_attention_bias(
        valid, valid, query_segment_ids=ids, key_segment_ids=ids, causal=True, position=position)
    got = np.broadcast_to(bias.shared + bias.per_example, expected.shape)
    rows = np.broadcast_to(np.asarray(valid)[:, None, :], (2, 3, 6))
    # Masked twice is as masked as once.
    np.testing.assert_allclose(np.maximum(got[rows], -1e9), np.maximum(expected[rows], -1e9))
    assert bias.causal
    if packed:
      assert bias.key_lengths is None
    else:
      assert bias.per_example.shape == (2, 1, 1, 6)
      np.testing.assert_array_equal(bias.key_lengths, [4, 6])
  with pytest.raises(ConfigError, match='both or neither'):
    layers.make_attention_bias(valid, valid, query_segment_ids=segments)


def test_lengths_of_rows_without_tokens_leave_one_key():
  valid = jnp.array([[False, False, False], [True, False, True]])
  np.testing.assert_array_equal(layers.make_attention_bias(valid, valid).key_lengths, [1, 3])


# ---- Relative positions ---------------------------------------------------------------------------------------------


def test_buckets_are_those_of_t5x():
  description, arrays = golden_data.load('t5x/relpos_buckets')
  for i, setting in enumerate(description['settings']):
    got = layers.relative_position_bucket(arrays['relative_position'], **setting)
    np.testing.assert_array_equal(got, arrays[f'bucket/{i}'])


@pytest.mark.parametrize('bidirectional', [True, False])
@pytest.mark.parametrize('qlen, klen', [(4, 4), (3, 7), (7, 3), (1, 5)])
def test_biases_are_the_table_at_the_buckets(qlen, klen, bidirectional):
  module = layers.RelativePositionBiases(num_buckets=8, max_distance=6, num_heads=2, dtype=jnp.float32)
  table = _random(2, 8)
  variables = {'params': {'rel_embedding': table}}

  def expected(table, offset):
    relative = np.arange(klen)[None, :] - (np.arange(qlen)[:, None] + offset)
    return table[:, layers.relative_position_bucket(relative, bidirectional, 8, 6)][None]

  # Few programs in place of one for each operation.
  expected = jax.jit(expected, static_argnums=1)
  apply = jax.jit(lambda: module.apply(variables, qlen, klen, bidirectional))
  np.testing.assert_array_equal(apply(), expected(table, 0))
  rows = jax.jit(lambda offset: module.apply(variables, qlen, klen, bidirectional, query_offset=offset))
  offsets = list(range(klen - qlen + 1))  # a step's queries are at positions of the cache
  for offset in offsets:
    np.testing.assert_array_equal(rows(jnp.int32(offset)), expected(table, offset))
  if offsets:
    np.testing.assert_array_equal(
        rows(jnp.array(offsets, jnp.int32)), np.concatenate([expected(table, offset) for offset in offsets]))
  # The derivative sums over all pairs of a bucket.
  cotangent = _random(1, 2, qlen, klen, seed=1)
  got = jax.jit(jax.grad(lambda v: jnp.sum(module.apply(v, qlen, klen, bidirectional) * cotangent)))(variables)
  want = jax.jit(jax.grad(lambda t: jnp.sum(expected(t, 0) * cotangent)))(table)
  np.testing.assert_allclose(got['params']['rel_embedding'], want, rtol=1e-5, atol=1e-6)


def test_biases_need_no_one_hot():
  """Looking up and spreading costs no matrix product."""
  module = layers.RelativePositionBiases(num_buckets=32, max_distance=128, num_heads=2, dtype=jnp.float32)
  variables = {'params': {'rel_embedding': _random(2, 32)}}
  fn = jax.value_and_grad(lambda v: jnp.sum(module.apply(v, 16, 16)**2))
  assert 'dot_general' not in jax.jit(fn).lower(variables).as_text()
