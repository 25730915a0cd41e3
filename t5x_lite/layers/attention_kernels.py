"""Scaled-outside dot-product attention behind one function, and the choice of the kernel that computes it."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.layers import platforms
from t5x_lite.layers.masks import AttentionBias

# 'dot' is two einsums around a softmax, for every backend; 'cudnn' NVIDIA's fused kernel; 'auto' takes the latter
# wherever it computes the same.
ATTENTION_KERNELS = ('auto', 'dot', 'cudnn')
# cuDNN's limit on all supported GPUs (Hopper alone goes further).
_CUDNN_MAX_HEAD_DIM = 128
# Of a GPU with cuDNN's fused attention: Ampere or later.
_CUDNN_MIN_CAPABILITY = (8, 0)
# Compute capabilities that need a later cuDNN than JAX itself, as (major, minor) to its version number.
_CUDNN_MIN_VERSIONS = {(10, 3): 91100}
_USE_AUTO = ": use attention_kernel='auto'"

_logger = logging.getLogger(__name__)
# 'auto' has said in this process which kernel it takes.
_has_logged_choice = False


def _cudnn_version() -> int | None:
  """Returns the version of cuDNN that JAX has, such as 90800 for 9.8.0; None without cuDNN."""
  try:
    # JAX's fused attention asks the same module, which is None without the CUDA plugin.
    from jax._src.lib import cuda_versions
    return cuda_versions.cudnn_get_version()
  except (ImportError, AttributeError, RuntimeError):
    return None


def gpu_refusal(device: Any, cudnn_version: int | None) -> str | None:
  """Returns why a GPU has no fused attention of cuDNN, or None if it has.

  Args:
    device: a `jax.Device` of platform 'gpu'.
    cudnn_version: version number of cuDNN, None without it.

  Returns:
    A clause with the reason and the remedy.
  """
  if 'cuda' not in device.client.platform_version.lower():
    return f'cuDNN needs an NVIDIA GPU with CUDA and {device.device_kind} is not one' + _USE_AUTO
  if cudnn_version is None:
    return "cuDNN is not installed: install JAX with its CUDA packages, pip install 'jax[cuda12]' or 'jax[cuda13]'"
  capability = tuple(int(part) for part in device.compute_capability.split('.'))
  if capability < _CUDNN_MIN_CAPABILITY:
    return (f'{device.device_kind} has compute capability {device.compute_capability} and the fused kernel needs '
            f'{".".join(map(str, _CUDNN_MIN_CAPABILITY))}{_USE_AUTO}')
  needed = _CUDNN_MIN_VERSIONS.get(capability, 0)
  if cudnn_version < needed:
    return (f'{device.device_kind} needs cuDNN {_format_version(needed)} and {_format_version(cudnn_version)} is '
            'installed: update nvidia-cudnn')
  return None


def _format_version(version: int) -> str:
  return f'{version // 10000}.{version // 100 % 100}.{version % 100}'


def cudnn_refusal(
    *, platform: str, dtype: Any, head_dim: int, q_len: int, k_len: int, bias: AttentionBias | None,
    dropout: bool, gpu: str | None = None) -> str | None:
  """Says why cuDNN's fused attention cannot compute an attention.

  Args:
    platform: what will run it, as in `platforms.traced_platform`.
    dtype: compute dtype.
    head_dim: size of a head.
    q_len: number of queries.
    k_len: number of keys.
    bias: what is added to the scores.
    dropout: attention weights are dropped out.
    gpu: result of `gpu_refusal` for the GPU that will run it.

  Returns:
    A clause with the reason and the remedy, or None if cuDNN can.
  """
  if platform == platforms.PORTABLE:
    return 'it runs on CUDA alone and JAX serializes no program with it' + _USE_AUTO
  if platform != 'gpu':
    return f'the backend is {platform!r} and cuDNN needs an NVIDIA GPU{_USE_AUTO}'
  if gpu is not None:
    return gpu
  if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
    return f"dtype is {jnp.dtype(dtype).name} and cuDNN computes in half precision only: set dtype='bfloat16'"
  if dropout:
    return 'attention dropout is active and the fused kernel has none: set dropout_rate=0.0'
  if head_dim % 8 or head_dim > _CUDNN_MAX_HEAD_DIM:
    return f'head_dim is {head_dim} and must be a multiple of 8 up to {_CUDNN_MAX_HEAD_DIM}: change head_dim'
  if q_len % 2 or k_len % 2:
    return f'lengths are {q_len} and {k_len} and must be even: change task_feature_lengths'
  if bias is not None and bias.per_example is not None and bias.key_lengths is None:
    return ('the mask differs between examples by more than trailing padding (packed rows, or inputs that are read both '
            'ways), which would be written out as a bias per example: train unpacked and causally')
  return None


def select_attention_kernel(kernel: str, **conditions: Any) -> str:
  """Returns 'dot' or 'cudnn' for the requested `kernel`.

  On a GPU, the first choice of 'auto' in a process is logged with its reason.

  Args:
    kernel: one of `ATTENTION_KERNELS`.
    **conditions: the arguments of `cudnn_refusal`.

  Raises:
    ConfigError: unknown kernel, or 'cudnn' where it is impossible.
  """
  if kernel not in ATTENTION_KERNELS:
    raise ConfigError(f'unknown attention kernel {kernel!r}.{did_you_mean(str(kernel), ATTENTION_KERNELS)}')
  if kernel == 'dot':
    return 'dot'
  refusal = cudnn_refusal(**conditions)
  if kernel == 'cudnn' and refusal is not None:
    raise ConfigError(f"attention_kernel='cudnn' cannot be used: {refusal}; or let attention_kernel='auto' choose.")
  if kernel == 'auto' and conditions['platform'] == 'gpu':
    _log_choice(refusal)
  return 'cudnn' if refusal is None else 'dot'


def _log_choice(refusal: str | None) -> None:
  global _has_logged_choice
  if not _has_logged_choice:
    _has_logged_choice = True
    kernel, reason = 'dot', refusal
    if refusal is None:
      kernel, reason = 'cudnn', 'GPU, cuDNN, dtype, lengths and mask allow it'
    _logger.info("attention_kernel='auto' takes %r for the first attention of this process: %s. Others may differ by "
                 'their lengths and masks.', kernel, reason.removesuffix(_USE_AUTO))


@jax.custom_vjp
def _add_shared(scores: jax.Array, shared: jax.Array) -> jax.Array:
  """Returns float32 scores [batch, heads, q, k] + shared [1, heads, q, k].

  Its derivative (reverse mode only) sums over the batch by a product with ones: the CPU compiler's reduction over the
  leading dim is some forty times slower, nearly as slow as the rest of the derivative of an attention.
  """
  return scores + shared


def _add_shared_fwd(scores, shared):
  return scores + shared, None


def _add_shared_bwd(_, cotangent):
  ones = jnp.ones(cotangent.shape[:1], cotangent.dtype)
  return cotangent, jnp.einsum('b,bhqk->hqk', ones, cotangent, precision=lax.Precision.HIGHEST)[None]


_add_shared.defvjp(_add_shared_fwd, _add_shared_bwd)


def _add_bias(scores: jax.Array, bias: AttentionBias | None) -> jax.Array:
  """Adds the parts of `bias` to float32 scores [batch, heads, q, k]."""
  if bias is None:
    return scores
  if bias.shared is not None:
    spread = bias.shared.shape == (1, *scores.shape[1:])
    scores = _add_shared(scores, bias.shared) if spread else scores + bias.shared
  return scores if bias.per_example is None else scores + bias.per_example


def attention_weights(
    scores: jax.Array, bias: AttentionBias | None, dropout_rng: jax.Array | None, dropout_rate: float, dtype: Any
) -> jax.Array:
  """Turns scores into weights: bias, softmax in float32, dropout.

  Args:
    scores: <float>[batch, heads, q, k].
    bias: added to the scores.
    dropout_rng: key of the dropout; None for no dropout.
    dropout_rate: probability with which a key is dropped, for all queries of a head alike.
    dtype: dtype of the result.

  Returns:
    <dtype>[batch, heads, q, k].
  """
  scores = _add_bias(scores.astype(jnp.float32), bias)
  weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
  if dropout_rng is not None and dropout_rate > 0.0:
    batch, heads, _, k_len = scores.shape
    keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, (batch, heads, 1, k_len))
    weights = weights * (keep.astype(dtype) / jnp.asarray(1.0 - dropout_rate, dtype))
  return weights


def _dot(query, key, value, bias, dropout_rng, dropout_rate, dtype, float32_logits, heads_first):
  """The einsum form; see `dot_product_attention`."""
  keys = 'bhkd' if heads_first else 'bkhd'
  if float32_logits:
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
  scores = jnp.einsum(f'bqhd,{keys}->bhqk', query, key)
  weights = attention_weights(scores, bias, dropout_rng, dropout_rate, dtype)
  if heads_first:
    # Asked for the other order of dims at once, the CPU compiler takes a product that is several times slower.
    return jnp.swapaxes(jnp.einsum('bhqk,bhkd->bhqd', weights, value), 1, 2)
  return jnp.einsum('bhqk,bkhd->bqhd', weights, value)


def _cudnn(query, key, value, bias, dtype):
  """The fused form; see `dot_product_attention`."""
  bias = bias or AttentionBias()
  return jax.nn.dot_product_attention(
      query, key, value, bias=None if bias.position is None else bias.position.astype(dtype), scale=1.0,
      is_causal=bias.causal, query_seq_lengths=bias.query_lengths, key_value_seq_lengths=bias.key_lengths,
      implementation='cudnn')


def _platform() -> dict[str, str | None]:
  """Returns what `cudnn_refusal` asks of the platform that the traced program will run on."""
  platform = platforms.traced_platform()
  gpu = gpu_refusal(jax.local_devices()[0], _cudnn_version()) if platform == 'gpu' else None
  return {'platform': platform, 'gpu': gpu}


def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | AttentionBias | None = None,
    dropout_rng: jax.Array | None = None, dropout_rate: float = 0.0, deterministic: bool = False,
    dtype: Any = jnp.float32, float32_logits: bool = False, *, kernel: str = 'dot', heads_first: bool = False
) -> jax.Array:
  """Attends: softmax(query . key + bias) . value. There is no 1/sqrt(head_dim): T5 has it in the query's initialiser.

  All attention of this package goes through here. The softmax is float32 whatever `dtype` is. The kernels agree except
  on rows of padding queries, which no loss sees: 'cudnn' reads padding as lengths, so it takes zeros *between* tokens
  for tokens, and returns zeros for padding queries.

  Args:
    query: <float>[batch, q, heads, head_dim].
    key: <float>[batch, k, heads, head_dim], or [batch, heads, k, head_dim] with `heads_first`.
    value: like `key`.
    bias: added to the scores: an `AttentionBias`, or a plain array [batch or 1, heads or 1, q or 1, k].
    dropout_rng: key of the dropout; needed if there is dropout.
    dropout_rate: probability with which a key is dropped, for all queries of a head alike.
    deterministic: no dropout.
    dtype: compute dtype.
    float32_logits: compute the scores in float32; otherwise they are rounded to `dtype` before the softmax.
    kernel: one of `ATTENTION_KERNELS`.
    heads_first: keys and values have the cache's dim order.

  Returns:
    <dtype>[batch, q, heads, head_dim].

  Raises:
    ConfigError: 'cudnn' was asked for where it cannot be used, or dropout without a key.
  """
  dropout = not deterministic and dropout_rate > 0.0
  if dropout and dropout_rng is None:
    raise ConfigError(f'attention dropout has rate {dropout_rate} but no rng: pass dropout_rng, or deterministic=True.')
  if bias is not None and not isinstance(bias, AttentionBias):
    bias = AttentionBias.from_array(bias)
  query, key, value = query.astype(dtype), key.astype(dtype), value.astype(dtype)
  chosen = 'dot' if heads_first or kernel == 'dot' else select_attention_kernel(
      kernel, **_platform(), dtype=dtype, head_dim=query.shape[-1], q_len=query.shape[1], k_len=key.shape[1], bias=bias,
      dropout=dropout)
  if chosen == 'cudnn':
    return _cudnn(query, key, value, bias, dtype)
  return _dot(query, key, value, bias, dropout_rng if dropout else None, dropout_rate, dtype, float32_logits,
              heads_first)
