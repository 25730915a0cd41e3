"""Fused kernels: their conditions, what they are given, and the splash kernel's numbers in interpret mode."""

import functools
import re

from flax.linen.partitioning import axis_rules
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite import partitioning
from t5x_lite.errors import ConfigError
from t5x_lite.layers import fused_attention
from tests.layers.test_attention_kernels import H100
from tests.layers.test_attention_kernels import FakeGpu
from tests.layers.test_attention_kernels import use_gpu


def _random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _packed_bias(ids, causal=False, key_ids=None):
  ids = jnp.asarray(ids, jnp.int32)
  key_ids = ids if key_ids is None else jnp.asarray(key_ids, jnp.int32)
  return layers.make_attention_bias(
    ids > 0,
    key_ids > 0,
    query_segment_ids=ids,
    key_segment_ids=key_ids,
    causal=causal,
    arrays=False,
  )


@pytest.mark.parametrize(
  'change,reason',
  [
    ({}, None),
    ({'bias': None}, None),
    ({'platform': 'gpu'}, 'needs a TPU'),
    ({'q_len': 200}, 'multiples of 128'),
    ({'bias': _packed_bias(np.ones((2, 256)))}, None),
    ({'bias': layers.AttentionBias().with_position(jnp.zeros((1, 2, 256, 256)))}, 'adds no biases'),
    ({'bias': layers.AttentionBias.from_array(jnp.zeros((2, 1, 256, 256)))}, 'adds no biases'),
    (
      {
        'bias': layers.make_attention_bias(
          jnp.ones((2, 256), bool),
          jnp.ones((2, 256), bool),
          causal=True,
          prefix=jnp.ones((2, 256), bool),
        )
      },
      'bidirectional',
    ),
  ],
)
def test_splash_is_for_tpus_without_position_biases(monkeypatch, change, reason):
  found = layers.splash_unsupported_reason(
    **{'platform': 'tpu', 'q_len': 256, 'k_len': 256, 'bias': None, **change}
  )
  assert (found is None) == (reason is None) and (reason or '') in (found or '')


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('causal', [False, True])
def test_splash_equals_the_plain_form(packed, causal):
  ids = np.repeat([[1, 1, 2, 2], [1, 2, 3, 0]], 32, axis=1)
  valid = jnp.asarray(ids > 0)
  bias = (
    _packed_bias(ids, causal)
    if packed
    else layers.make_attention_bias(valid, valid, causal=causal, arrays=False)
  )
  arrays = [_random(2, 128, 2, 64, seed=i) * 0.3 for i in range(3)]
  cotangent = _random(2, 128, 2, 64, seed=3) * (valid[:, :, None, None] if packed else 1.0)

  def gradients(attend):
    return jax.value_and_grad(lambda *args: jnp.sum(cotangent * attend(*args, bias)), (0, 1, 2))(
      *arrays
    )

  got = gradients(functools.partial(fused_attention.splash_attention, interpret=True))
  want = gradients(layers.dot_product_attention)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize(
  'bias',
  [
    _packed_bias(
      np.repeat([[1, 2, 3, 0]], 32, axis=1), key_ids=np.repeat([[1, 1, 3, 0]], 32, axis=1)
    ),
    layers.make_attention_bias(jnp.ones((1, 128), bool), jnp.zeros((1, 128), bool), arrays=False),
    layers.make_attention_bias(
      jnp.ones((1, 128), bool), jnp.arange(128)[None] > 40, causal=True, arrays=False
    ),
  ],
)
def test_queries_without_a_key_get_zeros_from_splash(bias):
  """Targets without inputs, empty inputs, padding before tokens: the kernel's own gradients would be far too large."""
  arrays = [_random(1, 128, 2, 64, seed=i) * 0.3 for i in range(4)]

  def gradients(attend):
    return jax.value_and_grad(
      lambda q, k, v: jnp.sum(arrays[3] * attend(q, k, v, bias)), (0, 1, 2)
    )(*arrays[:3])

  got = gradients(functools.partial(fused_attention.splash_attention, interpret=True))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
    got,
    gradients(layers.blockwise_attention),
  )


@pytest.mark.parametrize('batch,heads,rules', [(8, 4, True), (3, 3, True), (8, 4, False)])
def test_splash_lowers_on_meshes(batch, heads, rules):
  """Also where no dim is divided: XLA cannot partition the kernel."""
  x = jax.ShapeDtypeStruct((batch, 128, heads, 64), jnp.float32)
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  with axis_rules(partitioner.logical_axis_rules if rules else ()), jax.set_mesh(partitioner.mesh):
    traced = jax.jit(lambda x: fused_attention.splash_attention(x, x, x, None)).trace(x)
  assert 'tpu_custom_call' in traced.lower(lowering_platforms=('tpu',)).as_text()


def test_splash_is_taken_and_lowers_for_tpus(monkeypatch):
  monkeypatch.setattr(layers.platforms, 'traced_platform', lambda: 'tpu')
  bias = _packed_bias(np.ones((2, 256)), causal=True)
  x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)

  def loss(x):
    return jnp.sum(
      layers.dot_product_attention(x, x, x, bias, dtype=jnp.bfloat16, kernel='auto').astype(
        jnp.float32
      )
    )

  with layers.kernel_choices() as choices:
    text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=('tpu',)).as_text()
  assert [choice.kernel for choice in choices] == ['splash']
  assert text.count('tpu_custom_call') >= 3  # forward, and two of the backward pass


def test_blockwise_lowers_for_every_platform():
  x = jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.bfloat16)

  def loss(x):
    return jnp.sum(
      layers.blockwise_attention(x, x, x, _packed_bias(np.ones((2, 1024)))).astype(jnp.float32)
    )

  for platform in ('cuda', 'tpu', 'rocm'):
    assert (
      'while' in jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=(platform,)).as_text()
    )


@pytest.mark.parametrize('packed,target', [(False, 'ScaleBiasSoftmax'), (True, 'Softmax')])
def test_cudnn_lowers_for_cuda(monkeypatch, packed, target):
  from jax._src.cudnn import fused_attention_stablehlo

  use_gpu(monkeypatch, H100, 90800)
  for name, supported in (
    ('check_compute_capability', True),
    ('is_cuda_compute_capability_equal', False),
  ):
    monkeypatch.setattr(
      fused_attention_stablehlo, name, lambda capability, supported=supported: supported
    )

  def loss(x, values, ids):
    options = (
      dict(query_segment_ids=ids, key_segment_ids=ids)
      if packed
      else dict(position=layers.DistanceBias(values, 64))
    )
    bias = layers.make_attention_bias(ids > 0, ids > 0, causal=True, arrays=False, **options)
    return jnp.sum(
      layers.dot_product_attention(x, x, x, bias, dtype=jnp.bfloat16, kernel='auto').astype(
        jnp.float32
      )
    )

  arrays = (
    jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((2, 127), jnp.float32),
    jax.ShapeDtypeStruct((2, 64), jnp.int32),
  )
  text = (
    jax.jit(jax.grad(loss, (0, 1))).trace(*arrays).lower(lowering_platforms=('cuda',)).as_text()
  )
  assert set(re.findall(r'__cudnn\$\w+', text)) == {
    f'__cudnn$fmha{target}',
    f'__cudnn$fmha{target}Backward',
  }
  assert text.count('PADDING_CAUSAL') == 2


def test_the_layout_of_packed_rows_is_cudnns():
  """Segments that a row does not have are -1; a segment without keys has length 0."""
  queries = jnp.array([[1, 1, 2, 3, 3, -2], [1, 1, 1, 1, 1, 1]])
  keys = jnp.array([[1, 2, 2, 3, -1, -1], [1, 1, -1, -1, -1, -1]])
  q_lengths, k_lengths, q_offsets, k_offsets = (
    np.asarray(x) for x in fused_attention.packed_layout(queries, keys)
  )
  assert q_lengths.shape == (2, 32) and q_offsets.shape == (2, 33)
  np.testing.assert_array_equal(q_lengths[:, :4], [[2, 1, 2, -1], [6, -1, -1, -1]])
  np.testing.assert_array_equal(k_lengths[:, :4], [[1, 2, 1, -1], [2, -1, -1, -1]])
  np.testing.assert_array_equal(q_offsets[:, :4], [[0, 2, 3, -1], [0, -1, -1, -1]])
  np.testing.assert_array_equal(k_offsets[:, :4], [[0, 1, 3, -1], [0, -1, -1, -1]])
  assert (
    np.all(q_lengths[:, 4:] == -1)
    and np.all(q_offsets[:, 4:] == -1)
    and np.all(k_offsets[:, 4:] == -1)
  )


def _fake_cudnn(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
  """cuDNN's packed attention by its documented contract, with NaN where it leaves memory as it was."""

  def ids(lengths, offsets, size):
    start, positions = offsets[:, None, :-1], jnp.arange(size)[None, :, None]
    inside = (start >= 0) & (positions >= start) & (positions < start + lengths[:, None])
    return jnp.where(inside.any(-1), jnp.argmax(inside, -1), -1)

  q_ids, k_ids = ids(q_seqlen, q_offsets, query.shape[1]), ids(kv_seqlen, kv_offsets, key.shape[1])
  visible = (q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None]
  if mask_type.name == 'PADDING_CAUSAL':
    visible &= jnp.tril(jnp.ones(visible.shape[1:], bool))
  out = layers.dot_product_attention(
    query * scale, key, value, layers.mask_to_bias(visible)[:, None], dtype=query.dtype
  )
  return jnp.where((q_ids >= 0)[:, :, None, None], out, jnp.nan)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize(
  'ids,key_ids,is_cudnn',
  [
    ([[1, 1, 2, 2, 2, 0], [1, 2, 3, 4, 4, 4]], None, True),
    ([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 0, 0]], [[1, 2, 2, 0, 0, 0], [1, 1, 2, 3, 3, 3]], True),
    (
      [[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 0, 0]],
      [[2, 2, 2, 0, 0, 0], [1, 1, 2, 3, 3, 3]],
      False,
    ),  # no keys of 1
    ([[1, 1, 0, 2, 2, 0], [1, 2, 2, 3, 0, 0]], None, False),
    ([[2, 2, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], None, False),
    ([[1, 1, 40, 40, 0, 0], [1, 1, 1, 1, 1, 1]], None, False),
  ],
)
def test_packed_rows_are_cudnns_where_it_computes_the_same(
  monkeypatch, ids, key_ids, is_cudnn, causal
):
  """Without NaN from what the kernel leaves for padding, in outputs and gradients."""
  if causal and key_ids is not None:
    pytest.skip('causal attention is among the same positions')
  from jax._src.cudnn import fused_attention_stablehlo

  use_gpu(monkeypatch, H100, 90800)
  monkeypatch.setattr(fused_attention_stablehlo, 'dot_product_attention', _fake_cudnn)
  bias = _packed_bias(ids, causal, key_ids)
  query, key, value, cotangent = (
    _random(2, 6, 2, 8, seed=i).astype(jnp.bfloat16) for i in range(4)
  )
  with layers.kernel_choices() as choices:

    def gradients(kernel):
      attend = functools.partial(
        layers.dot_product_attention, bias=bias, dtype=jnp.bfloat16, kernel=kernel
      )
      masked = cotangent * (bias.query_segments >= 0)[:, :, None, None]
      return jax.value_and_grad(
        lambda *args: jnp.sum((masked * attend(*args)).astype(jnp.float32)), (0, 1, 2)
      )(query, key, value)

    got = gradients('auto')
  assert [choice.kernel for choice in choices] == ['cudnn']
  want = gradients('blockwise')
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.all(np.isfinite(a)) and np.allclose(
      np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.1
    )
  assert bool(fused_attention._is_in_order(bias.query_segments, bias.key_segments)) == is_cudnn


def test_queries_without_a_key_get_zeros_from_cudnn(monkeypatch):
  """Empty inputs and padding before tokens: cuDNN needs a key, so it is given one that is padding."""
  use_gpu(monkeypatch, H100, 90800)
  attend = jax.nn.dot_product_attention
  monkeypatch.setattr(
    jax.nn, 'dot_product_attention', lambda *args, implementation, **kwargs: attend(*args, **kwargs)
  )
  key_valid = jnp.array([[False] * 6, [False, True, True, True, True, False]])
  arrays = [_random(2, 6, 2, 8, seed=i).astype(jnp.bfloat16) for i in range(4)]
  for causal, zeros in (
    (False, [[True] * 6, [False] * 6]),
    (True, [[True] * 6, [True] + [False] * 5]),
  ):
    bias = layers.make_attention_bias(
      jnp.ones((2, 6), bool), key_valid, causal=causal, arrays=False
    )

    def loss(query, key, value, bias=bias):
      out = layers.dot_product_attention(
        query, key, value, bias, dtype=jnp.bfloat16, kernel='cudnn'
      )
      return jnp.sum((arrays[3] * out).astype(jnp.float32)), out

    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays[:3])
    np.testing.assert_array_equal(~np.any(np.asarray(out), axis=(2, 3)), zeros)
    for gradient in gradients:
      assert not np.any(np.asarray(gradient)[0])


def test_packed_rows_need_hopper_and_no_position_biases():
  gpu = functools.partial(layers.gpu_unsupported_reason, cudnn_version=90800, packed=True)
  assert gpu(H100) is None
  assert 'packed rows need 9.0' in gpu(FakeGpu('NVIDIA A100-SXM4-40GB', '8.0'))
  conditions = dict(platform='gpu', dtype=jnp.bfloat16, head_dim=64, q_len=6, k_len=6)
  bias = _packed_bias([[1, 1, 2, 2, 0, 0]])
  assert layers.cudnn_unsupported_reason(**conditions, bias=bias) is None
  with_position = bias.with_position(layers.DistanceBias(jnp.zeros((2, 11)), 6))
  assert 'no position biases within packed rows' in layers.cudnn_unsupported_reason(
    **conditions, bias=with_position
  )


def test_a_fused_kernel_where_it_is_not_supported_is_an_error():
  x = _random(2, 4, 2, 8)
  with pytest.raises(
    ConfigError, match="attention_kernel='splash' is not supported: the backend is 'cpu'"
  ):
    layers.dot_product_attention(x, x, x, kernel='splash')
