"""Attention kernels: their choice, its log line, and their agreement."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.layers import attention_kernels

_KEY = jax.random.key(0)


def _random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _inputs(batch=2, q_len=4, k_len=6, heads=3, head_dim=8):
  return (
    _random(batch, q_len, heads, head_dim),
    _random(batch, k_len, heads, head_dim, seed=1),
    _random(batch, k_len, heads, head_dim, seed=2),
  )


_PADDING = layers.make_attention_bias(jnp.ones((2, 64), bool), jnp.ones((2, 64), bool), causal=True)
_PACKED = layers.make_attention_bias(
  jnp.ones((2, 64), bool),
  jnp.ones((2, 64), bool),
  query_segment_ids=jnp.ones((2, 64)),
  key_segment_ids=jnp.ones((2, 64)),
)
_LEGAL = dict(platform='gpu', dtype=jnp.bfloat16, head_dim=64, q_len=64, k_len=64, bias=_PADDING)


@pytest.mark.parametrize(
  'change, reason, remedy',
  [
    ({}, None, None),
    ({'dtype': 'float16'}, None, None),
    ({'bias': None}, None, None),
    ({'bias': layers.AttentionBias().with_position(jnp.zeros((1, 3, 64, 64)))}, None, None),
    (
      {'bias': layers.AttentionBias().with_position(jnp.zeros((1, 3, 1, 64)))},
      'for each query and key',
      'auto',
    ),
    ({'bias': layers.AttentionBias.from_array(jnp.zeros((1, 3, 64, 64)))}, 'plain array', 'auto'),
    ({'platform': 'cpu'}, 'backend', 'auto'),
    ({'platform': 'tpu'}, 'backend', 'auto'),
    ({'dtype': jnp.float32}, 'half precision', 'bfloat16'),
    ({'head_dim': 60}, 'multiple of 8', 'head_dim'),
    ({'head_dim': 256}, 'up to 128', 'head_dim'),
    ({'q_len': 63}, 'even', 'task_feature_lengths'),
    ({'k_len': 1}, 'even', 'task_feature_lengths'),
    ({'bias': _PACKED}, None, None),
    ({'bias': _PACKED.with_position(jnp.zeros((1, 3, 64, 64)))}, 'packed', 'pack=False'),
    ({'bias': layers.AttentionBias.from_array(jnp.zeros((2, 3, 64, 64)))}, 'plain array', 'auto'),
    ({'bias': _PADDING.plus(jnp.zeros((1, 1, 64, 64)))}, 'plain array', 'auto'),
  ],
)
def test_fused_attention_is_taken_where_it_computes_the_same(change, reason, remedy):
  conditions = {**_LEGAL, **change}
  assert layers.select_attention_kernel('dot', **conditions) == 'dot'
  if reason is None:
    assert layers.select_attention_kernel('auto', **conditions) == 'cudnn'
    assert layers.select_attention_kernel('cudnn', **conditions) == 'cudnn'
    return
  assert layers.select_attention_kernel('auto', **conditions) == 'dot'
  with pytest.raises(ConfigError, match=reason) as error:
    layers.select_attention_kernel('cudnn', **conditions)
  assert remedy in str(error.value)


def test_unknown_kernel_gets_a_proposal():
  with pytest.raises(ConfigError, match="Did you mean 'cudnn'"):
    layers.select_attention_kernel('cuddn', **_LEGAL)


@dataclasses.dataclass(frozen=True)
class FakeGpu:
  """Fake GPU with the attributes of a `jax.Device`."""

  device_kind: str
  compute_capability: str
  platform_version: str = 'PJRT C API\ncuda 12090'
  platform: str = 'gpu'

  @property
  def client(self):
    return types.SimpleNamespace(platform_version=self.platform_version)


H100 = FakeGpu('NVIDIA H100 80GB HBM3', '9.0')
_GPUS = [
  (H100, 90800, None),
  (FakeGpu('NVIDIA A100-SXM4-40GB', '8.0'), 90800, None),
  (FakeGpu('NVIDIA GB200', '10.0'), 90800, None),
  (FakeGpu('NVIDIA GB300', '10.3'), 91100, None),
  (
    FakeGpu('NVIDIA GB300', '10.3'),
    91002,
    'NVIDIA GB300 needs cuDNN 9.11.0 and 9.10.2 is installed',
  ),
  (
    FakeGpu('Tesla V100-SXM2-16GB', '7.0'),
    90800,
    'compute capability 7.0 and the fused kernel needs 8.0',
  ),
  (H100, None, 'cuDNN is not installed'),
  (FakeGpu('AMD Instinct MI300X', 'gfx942', 'PJRT C API\nrocm 60300'), None, 'MI300X is not one'),
]


def use_gpu(monkeypatch, device, cudnn_version):
  """Make JAX and this package report a GPU with cuDNN."""
  from jax._src import lib
  from jax._src.cudnn import fused_attention_stablehlo

  versions = (
    None
    if cudnn_version is None
    else types.SimpleNamespace(cudnn_get_version=lambda: cudnn_version)
  )
  for module in (lib, fused_attention_stablehlo):
    monkeypatch.setattr(module, 'cuda_versions', versions)
  monkeypatch.setattr(jax, 'default_backend', lambda: device.platform)
  monkeypatch.setattr(jax, 'local_devices', lambda: [device])
  # A choice is logged once per process: no public function makes it the first again.
  monkeypatch.setattr(attention_kernels, '_logged_choices', set())


@pytest.mark.parametrize('device,cudnn_version,reason', _GPUS)
def test_auto_asks_the_gpu_and_says_so_once(monkeypatch, caplog, device, cudnn_version, reason):
  use_gpu(monkeypatch, device, cudnn_version)
  taken = []
  monkeypatch.setattr(
    jax.nn,
    'dot_product_attention',
    lambda query, *args, implementation, **kwargs: taken.append(implementation) or query,
  )
  x = jax.ShapeDtypeStruct((2, 64, 3, 64), jnp.bfloat16)

  def attend(kernel):
    return jax.eval_shape(
      lambda x: layers.dot_product_attention(x, x, x, dtype=jnp.bfloat16, kernel=kernel), x
    )

  with caplog.at_level(logging.INFO):
    attend('dot')
    assert not caplog.messages
    for _ in range(3):
      attend('auto')
  assert taken == ['cudnn'] * 3 * (reason is None)
  (line,) = caplog.messages
  assert line.startswith(
    f'Attention kernel: {"dot" if reason else "cudnn"!r} for 64 queries and 64 keys, since '
  )
  assert (reason or 'allow it') in line
  assert 'use attention_kernel' not in line
  if reason is None:
    attend('cudnn')
  else:
    with pytest.raises(ConfigError, match=f"attention_kernel='cudnn' is not supported: .*{reason}"):
      attend('cudnn')


def test_the_logged_choice_is_that_of_training(monkeypatch, caplog):
  """Not that of the first call, which initializes the parameters with a short input."""
  use_gpu(monkeypatch, H100, 90800)
  module = layers.MultiHeadDotProductAttention(
    2, 64, dtype=jnp.bfloat16, dropout_rate=0.1, attention_kernel='auto'
  )
  x = jnp.zeros((2, 4, 128))
  with caplog.at_level(logging.INFO):
    variables = jax.eval_shape(lambda: module.init(_KEY, x, x, deterministic=True))
    assert not caplog.messages
    for _ in range(2):
      jax.eval_shape(lambda v: module.apply(v, x, x, rngs={'dropout': _KEY}), variables)
  assert caplog.messages == [
    "Attention kernel: 'cudnn' for 4 queries and 4 keys, since device, dtype, lengths and "
    'mask allow it.'
  ]


@pytest.mark.parametrize(
  'platform,q_len,k_len,kernel',
  [
    ('cpu', 512, 512, 'dot'),
    ('cpu', 1023, 1024, 'dot'),
    ('cpu', 512, 2048, 'blockwise'),
    ('gpu', 511, 512, 'dot'),
    ('gpu', 512, 512, 'blockwise'),
    ('tpu', 512, 512, 'blockwise'),
  ],
)
def test_long_rows_take_blocks(monkeypatch, caplog, platform, q_len, k_len, kernel):
  """The choice and its reason are one line of the log, or of `kernel_choices`, except for 'dot' on a CPU."""
  monkeypatch.setattr(attention_kernels, '_logged_choices', set())
  conditions = dict(
    platform=platform,
    dtype=jnp.float32,
    head_dim=64,
    q_len=q_len,
    k_len=k_len,
    bias=layers.AttentionBias.from_array(jnp.zeros((2, 3, 1, 1))),
  )
  with caplog.at_level(logging.INFO):
    for _ in range(2):
      assert layers.select_attention_kernel('auto', **conditions) == kernel
    with layers.kernel_choices() as choices:
      layers.select_attention_kernel('auto', **conditions)
  assert len(caplog.messages) == (platform != 'cpu' or kernel != 'dot')
  (choice,) = choices
  assert choice.kernel == kernel and f'{q_len * k_len:,} scores per head are' in choice.reason
  monkeypatch.setattr(layers.platforms, 'traced_platform', lambda: platform)
  assert layers.uses_arrays('auto', q_len, k_len) == (kernel == 'dot')
  assert layers.uses_arrays('dot', q_len, k_len) and not layers.uses_arrays(
    'blockwise', q_len, k_len
  )


def test_the_mesh_decides_for_which_platform(monkeypatch, caplog):
  """The kernel depends on the devices of the partitioner, CPUs on a machine with a GPU."""
  use_gpu(monkeypatch, H100, 90800)
  x = jnp.zeros((2, 64, 3, 64), jnp.bfloat16)
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  assert layers.traced_platform() == 'gpu'
  with jax.set_mesh(mesh), caplog.at_level(logging.INFO):
    assert layers.traced_platform() == 'cpu'
    out = layers.dot_product_attention(x, x, x, dtype=jnp.bfloat16, kernel='auto')
  assert out.shape == x.shape and not caplog.messages


def test_the_seam_applies_the_choice():
  query, key, value = _inputs()
  with pytest.raises(ConfigError, match='half precision|backend'):
    layers.dot_product_attention(query, key, value, kernel='cudnn')
  np.testing.assert_array_equal(
    layers.dot_product_attention(query, key, value, kernel='auto'),
    layers.dot_product_attention(query, key, value),
  )


@pytest.mark.skipif(jax.default_backend() != 'gpu', reason='the fused kernel needs an NVIDIA GPU')
@pytest.mark.parametrize('causal', [False, True])
def test_fused_attention_agrees_with_the_einsum_form(causal):
  """Outputs and all gradients, including position biases, agree except for padding queries."""
  batch, length, heads, head_dim = 3, 64, 4, 64
  query, key, value = (_random(batch, length, heads, head_dim, seed=i) * 0.3 for i in range(3))
  position = _random(1, heads, length, length, seed=3)
  valid = jnp.arange(length)[None, :] < jnp.array([[64], [40], [10]])
  cotangent = _random(batch, length, heads, head_dim, seed=4) * valid[:, :, None, None]

  def run(kernel, dtype):
    def loss(position, query, key, value):
      bias = layers.make_attention_bias(valid, valid, causal=causal, position=position)
      out = layers.dot_product_attention(
        query, key, value, bias, dtype=dtype, kernel=kernel
      ).astype(jnp.float32)
      return jnp.sum(out * cotangent), out * valid[:, :, None, None]

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(
      position, query, key, value
    )
    return (out, *grads)

  exact = run('dot', jnp.float32)
  found = run('cudnn', jnp.bfloat16)
  for name, got, want in zip(
    ('output', 'position', 'query', 'key', 'value'), found, exact, strict=True
  ):
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < 0.02, (name, error)


@pytest.mark.parametrize('kernel', ['dot', 'blockwise'])
@pytest.mark.parametrize('form', ['padded', 'packed', 'prefix'])
def test_largest_scores_are_those_of_tokens(kernel, form):
  """Rows have lengths 4 and 6; masked keys, later keys and padding queries have the largest scores."""
  query, key, _ = _inputs(q_len=6)
  is_token = np.arange(6) < np.array([[4], [6]])
  segments = np.where(is_token, 1 + (np.arange(6) >= 2), 0)
  prefix = np.arange(6) < np.array([[2], [3]])
  query = jnp.where(is_token[..., None, None], query, 100.0)
  key = jnp.where(is_token[..., None, None], key, 100.0).at[:, 5].set(50.0)
  visible = np.tril(np.ones((6, 6), bool)) & is_token[:, None] & is_token[:, :, None]
  options = {}
  if form == 'packed':
    visible &= segments[:, None] == segments[:, :, None]
    options = dict(query_segment_ids=jnp.array(segments), key_segment_ids=jnp.array(segments))
  elif form == 'prefix':
    visible |= prefix[:, None] & prefix[:, :, None] & is_token[:, None]
    options = dict(prefix=jnp.array(prefix))
  bias = layers.make_attention_bias(
    jnp.array(is_token), jnp.array(is_token), causal=True, arrays=kernel == 'dot', **options
  )
  bias = bias.with_position(30 * _random(1, 3, 6, 6, seed=5))
  scores = np.einsum('bqhd,bkhd->bhqk', query, key)
  expected = np.max(np.where(visible[:, None], scores, 0), axis=(0, 2, 3))
  found = attention_kernels.largest_scores(query, key, bias, jnp.float32, kernel)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  negative = attention_kernels.largest_scores(
    jnp.abs(query), -jnp.abs(key), None, 'float32', kernel
  )
  np.testing.assert_array_equal(negative, np.zeros(3))


@pytest.mark.parametrize('float32_logits', [False, True])
def test_largest_scores_share_the_product_of_attention(float32_logits):
  """Both together have one product of queries and keys after compilation."""
  query, key, value = (x.astype(jnp.bfloat16) for x in _inputs())
  dtype = jnp.float32 if float32_logits else jnp.bfloat16

  def attend(query, key, value):
    return layers.dot_product_attention(
      query, key, value, dtype=jnp.bfloat16, float32_logits=float32_logits
    )

  def attend_and_read(query, key, value):
    largest = attention_kernels.largest_scores(query, key, None, dtype, 'dot')
    return attend(query, key, value), largest

  numbers = [
    jax.jit(fn).lower(query, key, value).compile().as_text().count(' dot(')
    for fn in (attend, attend_and_read)
  ]
  assert numbers == [2, 2]
