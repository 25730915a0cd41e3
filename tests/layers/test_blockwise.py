"""Blockwise attention equals the plain form in outputs and gradients, skips empty blocks, and has linear memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite import partitioning
from t5x_lite.layers import blockwise
from t5x_lite.networks import t5


def _random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Case:
  """An attention of rows with and without padding.

  Attributes:
    q_len: number of queries.
    k_len: number of keys.
    causal: True for causal attention.
    packed: True for rows of several examples.
    prefix: True with bidirectional attention among the first positions of each row.
    position: 'distance' or 'array' biases of positions, or 'mask' for a plain bias per example; '' for none.
  """

  q_len: int
  k_len: int
  causal: bool = False
  packed: bool = False
  prefix: bool = False
  position: str = ''

  def bias(self, position):
    """Return the bias of three rows, with the given biases of positions."""
    lengths = [np.array([n, n - 7, n // 2]) for n in (self.q_len, self.k_len)]
    valid = [
      jnp.arange(n) < length[:, None]
      for n, length in zip((self.q_len, self.k_len), lengths, strict=False)
    ]
    options = {}
    if self.packed:
      ids = [
        jnp.where(v, 1 + jnp.arange(n) * 3 // n, 0)
        for n, v in zip((self.q_len, self.k_len), valid, strict=False)
      ]
      options = dict(query_segment_ids=ids[0], key_segment_ids=ids[1])
    if self.prefix:
      options['prefix'] = jnp.arange(self.q_len) < jnp.array([[10], [20], [3]])
    if self.position == 'distance':
      options['position'] = layers.DistanceBias(position, self.q_len)
    elif self.position == 'array':
      options['position'] = position
    bias = layers.make_attention_bias(*valid, causal=self.causal, arrays=False, **options)
    return bias.plus(position) if self.position == 'mask' else bias

  def position_shape(self):
    """Return the shape of the biases of positions."""
    return {
      'distance': (2, self.q_len + self.k_len - 1),
      'array': (1, 2, self.q_len, self.k_len),
      'mask': (3, 2, self.q_len, self.k_len),
      '': (),
    }[self.position]


CASES = [
  Case(37, 53, position='distance'),
  Case(40, 40, causal=True, position='distance'),
  Case(33, 33, causal=True),
  Case(40, 40, causal=True, packed=True, position='distance'),
  Case(40, 24, packed=True),
  Case(40, 40, causal=True, packed=True, prefix=True, position='distance'),
  Case(64, 64, causal=True, prefix=True, position='array'),
  Case(40, 40, position='mask'),
  Case(8, 8, causal=True),
]


def _gradients(case, attend, dtype=jnp.float32):
  """Return (loss, gradients of queries, keys, values and biases), where padding queries of packed rows do not count."""
  query, key, value = (
    _random(3, n, 2, 8, seed=i).astype(dtype)
    for i, n in enumerate((case.q_len, case.k_len, case.k_len))
  )
  cotangent = _random(3, case.q_len, 2, 8, seed=3)
  if case.packed:
    cotangent *= (case.bias(jnp.zeros(case.position_shape())).query_segments >= 0)[:, :, None, None]

  def loss(query, key, value, position):
    return jnp.sum(cotangent * attend(query, key, value, case.bias(position)).astype(jnp.float32))

  return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(
    query, key, value, _random(*case.position_shape(), seed=4)
  )


@pytest.mark.parametrize('case', CASES, ids=str)
@pytest.mark.parametrize('by_row', [True, False])
def test_outputs_and_gradients_equal_the_plain_form(monkeypatch, case, by_row):
  if not by_row:
    monkeypatch.setattr(layers.platforms, 'traced_platform', lambda: 'gpu')
  attend = functools.partial(layers.blockwise_attention, max_block=16)
  got, want = _gradients(case, attend), _gradients(case, layers.dot_product_attention)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_largest_scores_are_those_of_visible_keys_without_biases(case):
  query, key = (_random(3, n, 2, 8, seed=i) for i, n in enumerate((case.q_len, case.k_len)))
  bias = case.bias(10 * _random(*case.position_shape(), seed=4))
  arrays = bias.with_arrays()
  added = sum(np.asarray(part) for part in (arrays.shared, arrays.per_example) if part is not None)
  scores = np.einsum('bqhd,bkhd->bhqk', query, key)
  expected = np.max(np.where(added > -1e9, scores, 0), axis=-1)
  found = jax.jit(functools.partial(blockwise.blockwise_largest_scores, max_block=16))(
    query, key, bias
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_dropout_drops_the_same_keys_with_every_kernel():
  case = Case(40, 40, causal=True, position='distance')
  attend = functools.partial(
    layers.dot_product_attention, dropout_rng=jax.random.key(5), dropout_rate=0.4
  )
  got, want = (
    _gradients(case, functools.partial(attend, kernel=kernel)) for kernel in ('blockwise', 'dot')
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)
  assert not np.allclose(got[0], _gradients(case, layers.dot_product_attention)[0])


def test_half_precision_sums_in_float32():
  case = Case(64, 64, causal=True, position='distance')
  exact = _gradients(case, layers.dot_product_attention)
  half = _gradients(case, functools.partial(layers.blockwise_attention, max_block=16), jnp.bfloat16)
  assert half[1][0].dtype == jnp.bfloat16
  for got, want in zip(half[1], exact[1], strict=True):
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 0.01 * np.linalg.norm(want)


def test_queries_without_a_key_get_zeros():
  """In packed rows padding queries; and in any row all queries, if all keys are padding."""
  case = Case(40, 40, causal=True, packed=True, position='distance')
  bias = case.bias(_random(*case.position_shape()))
  x = _random(3, 40, 2, 8)
  out = layers.blockwise_attention(x, x, x, bias, max_block=16)
  is_padding = np.asarray(bias.query_segments) < 0
  assert (
    is_padding.any()
    and not np.any(np.asarray(out)[is_padding])
    and np.all(np.asarray(out)[~is_padding])
  )
  empty = layers.make_attention_bias(jnp.ones((3, 40), bool), jnp.zeros((3, 40), bool))

  def attend(x):
    return layers.blockwise_attention(x, x, x, empty, max_block=16)

  assert not np.any(attend(x)) and not np.any(jax.grad(lambda x: jnp.sum(attend(x)))(x))


@pytest.mark.parametrize('masked', [-1e9, -1e10, -1e20])
def test_gradients_of_rows_that_a_plain_bias_masks(masked):
  """Such queries have no visible key, so their output is 0 and has no derivative."""
  bias = jnp.zeros((1, 1, 16, 16)).at[:, :, 3:5].set(masked)
  x, y, z, cotangent = (_random(1, 16, 2, 8, seed=i) for i in range(4))
  got, want = (
    jax.grad(
      lambda *args, kernel=kernel: jnp.sum(
        cotangent * layers.dot_product_attention(*args, bias, kernel=kernel)
      ),
      (0, 1, 2),
    )(x, y, z)
    for kernel in ('blockwise', 'dot')
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)
  assert not np.any(np.asarray(got[0])[:, 3:5])


@pytest.mark.parametrize(
  'case,computed',
  [
    (Case(64, 64, packed=True), None),
    (Case(64, 64, causal=True), 10 + 10 + 7),
    (Case(64, 64), 16 + 16 + 8),
  ],
)
def test_empty_blocks_are_skipped(monkeypatch, case, computed):
  """Blocks above the diagonal, between packed examples, and of padding keys are not computed."""
  calls = []
  scores = blockwise._Blocks.scores

  def counting(self, query, key, bias, i, j):
    jax.debug.callback(lambda *block: calls.append(tuple(map(int, block))), i, j)
    return scores(self, query, key, bias, i, j)

  monkeypatch.setattr(blockwise._Blocks, 'scores', counting)
  x = _random(3, 64, 2, 8)
  bias = case.bias(jnp.zeros(()))
  layers.blockwise_attention(x, x, x, bias, max_block=16).block_until_ready()
  jax.effects_barrier()
  if case.packed:
    # By brute force: blocks of 16 x 16 positions in which a query of any segment has a key of the same one.
    q, k = np.asarray(bias.query_segments), np.asarray(bias.key_segments)
    same = (q[:, :, None] == k[:, None]).reshape(3, 4, 16, 4, 16).any(axis=(2, 4))
    computed = int(same.sum())
    assert computed < 3 * 16
  assert len(calls) == computed


def _temporaries(fn, *args):
  return jax.jit(jax.grad(fn)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_an_attention_is_linear_in_the_length():
  def program_size(length):
    x = jax.ShapeDtypeStruct((2, length, 4, 16), jnp.float32)
    valid = jnp.ones((2, length), bool)

    def loss(x):
      values = jnp.mean(x) * jnp.ones((4, 2 * length - 1))
      bias = layers.make_attention_bias(
        valid, valid, causal=True, position=layers.DistanceBias(values, length), arrays=False
      )
      return jnp.sum(layers.blockwise_attention(x, x, x, bias))

    return _temporaries(loss, x)

  sizes = [program_size(length) for length in (512, 1024, 2048, 4096)]
  assert all(after < 2.1 * before for before, after in zip(sizes, sizes[1:], strict=False)), sizes
  assert sizes[-1] < 4 * 4096 * 4096  # of one head's scores


@pytest.mark.parametrize('layout', ['scalable_t5', pytest.param('t5', marks=pytest.mark.full)])
def test_memory_of_a_network_is_linear_in_the_length(layout):
  """Also in a loop over layers, where JAX would compute the biases of all blocks before the loop."""
  config = t5.T5Config(
    vocab_size=32,
    emb_dim=32,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=16,
    mlp_dim=32,
    dropout_rate=0.1,
    param_layout=layout,
    scan_layers=True,
    remat_policy='full',
  )
  network = t5.Transformer(config)

  def program_size(length):
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.eval_shape(network.init, jax.random.key(0), tokens, tokens, tokens)['params']
    return _temporaries(
      lambda params, x: jnp.sum(
        network.apply({'params': params}, x, x, x, rngs={'dropout': jax.random.key(1)}) ** 2
      ),
      params,
      tokens,
    )

  sizes = [program_size(length) for length in (1024, 4096)]
  assert sizes[1] < 4.4 * sizes[0], sizes


def test_devices_share_rows_and_heads():
  """On a mesh the result is the same, each device computes its part, and only bias gradients are summed."""
  case = Case(32, 32, causal=True, packed=True, position='distance')
  query, key, value, cotangent = (_random(4, 32, 2, 8, seed=i) for i in range(4))
  ids = jnp.broadcast_to(1 + jnp.arange(32) // 12, (4, 32))
  valid = jnp.ones((4, 32), bool)

  def loss(query, key, value, values):
    bias = layers.make_attention_bias(
      valid,
      valid,
      causal=True,
      query_segment_ids=ids,
      key_segment_ids=ids,
      position=layers.DistanceBias(values, 32),
      arrays=False,
    )
    return jnp.sum(cotangent * layers.blockwise_attention(query, key, value, bias, max_block=16))

  args = (query, key, value, _random(*case.position_shape(), seed=4))
  want = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*args)
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  by_row, by_head = (
    jax.sharding.PartitionSpec('data', None, 'model'),
    jax.sharding.PartitionSpec('model'),
  )
  fn = partitioner.partition(
    jax.value_and_grad(loss, (0, 1, 2, 3)),
    ((by_row,) * 3 + (by_head,)),
    (None, (by_row,) * 3 + (by_head,)),
  )
  program = partitioner.compile(fn, *args)
  got = program(*jax.tree.map(jax.device_put, args, tuple(program.input_shardings[0])))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
  text = program.as_text()
  assert 'all-gather' not in text and 'all-to-all' not in text
