"""Dot-product attention, without scaling, and the choice of its kernel."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from t5x_lite import checks
from t5x_lite.errors import ConfigError
from t5x_lite.layers import platforms
from t5x_lite.layers.masks import AttentionBias

# 'dot' is two einsums around a softmax, for every backend; 'cudnn' is NVIDIA's fused kernel; 'auto' is 'cudnn' where it
# computes the same result, else 'dot'.
ATTENTION_KERNELS = ('auto', 'dot', 'cudnn')
# cuDNN's limit on all supported GPUs (Hopper's is higher).
_CUDNN_MAX_HEAD_DIM = 128
# Compute capability of the oldest GPUs with cuDNN's fused attention, Ampere.
_CUDNN_MIN_CAPABILITY = (8, 0)
# Smallest cuDNN version by compute capability, for those that need a later cuDNN than JAX does.
_CUDNN_MIN_VERSIONS = {(10, 3): 91100}
_USE_AUTO = ": use attention_kernel='auto'"

_logger = logging.getLogger(__name__)
# True after 'auto' has logged its first choice in this process.
_has_logged_choice = False


def _cudnn_version() -> int | None:
  """Return the version of JAX's cuDNN, such as 90800 for 9.8.0; None without cuDNN."""
  try:
    # JAX's fused attention uses the same module, which is None without the CUDA plugin.
    from jax._src.lib import cuda_versions
    return cuda_versions.cudnn_get_version()
  except (ImportError, AttributeError, RuntimeError):
    return None


def gpu_unsupported_reason(device: Any, cudnn_version: int | None) -> str | None:
  """Return the reason why a GPU does not support cuDNN's fused attention, or None if it does.

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


gpu_refusal = gpu_unsupported_reason  # former name


def cudnn_unsupported_reason(
    *, platform: str, dtype: Any, head_dim: int, q_len: int, k_len: int, bias: AttentionBias | None,
    dropout: bool, gpu: str | None = None) -> str | None:
  """Return the reason why cuDNN's fused attention does not support an attention, or None if it does.

  Args:
    platform: result of `platforms.traced_platform`.
    dtype: compute dtype.
    head_dim: size of a head.
    q_len: number of queries.
    k_len: number of keys.
    bias: bias of the scores.
    dropout: True if attention weights are dropped out.
    gpu: result of `gpu_unsupported_reason` for the GPU of the program.

  Returns:
    A clause with the reason and the remedy, or None.
  """
  if platform == platforms.PORTABLE:
    return 'it runs only on CUDA and JAX cannot serialize programs with it' + _USE_AUTO
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
    return ('the mask differs between examples by more than trailing padding (packed rows, or '
            'bidirectional attention among inputs), which needs a bias per example: train unpacked and causally')
  return None


cudnn_refusal = cudnn_unsupported_reason  # former name


def select_attention_kernel(kernel: str, **conditions: Any) -> str:
  """Return 'dot' or 'cudnn' for the requested `kernel`.

  On a GPU, the first choice of 'auto' in a process is logged with its reason.

  Args:
    kernel: one of `ATTENTION_KERNELS`.
    **conditions: arguments of `cudnn_unsupported_reason`.

  Raises:
    ConfigError: unknown kernel, or 'cudnn' where it is not supported.
  """
  checks.check('', {'attention_kernel': kernel}, attention_kernel=checks.one_of(ATTENTION_KERNELS))
  if kernel == 'dot':
    return 'dot'
  reason = cudnn_unsupported_reason(**conditions)
  if kernel == 'cudnn' and reason is not None:
    alternative = '' if reason.endswith(_USE_AUTO) else "; or use attention_kernel='auto'"
    raise ConfigError(f"attention_kernel='cudnn' is not supported: {reason}{alternative}.")
  if kernel == 'auto' and conditions['platform'] == 'gpu':
    _log_choice(reason)
  return 'cudnn' if reason is None else 'dot'


def _log_choice(unsupported_reason: str | None) -> None:
  global _has_logged_choice
  if not _has_logged_choice:
    _has_logged_choice = True
    kernel, reason = 'dot', unsupported_reason
    if reason is None:
      kernel, reason = 'cudnn', 'GPU, cuDNN, dtype, lengths and mask allow it'
    _logger.info("attention_kernel='auto' takes %r for the first attention of this process: %s. Others may differ, "
                 'depending on their lengths and masks.', kernel, reason.removesuffix(_USE_AUTO))


@jax.custom_vjp
def _add_shared(scores: jax.Array, shared: jax.Array) -> jax.Array:
  """Return float32 scores [batch, heads, q, k] + shared [1, heads, q, k].

  Its derivative (reverse mode only) sums over the batch by a product with ones: the CPU compiler's reduction over the
  leading dim is about forty times slower, nearly as slow as the rest of the derivative of an attention.
  """
  return scores + shared


def _add_shared_fwd(scores, shared):
  return scores + shared, None


def _add_shared_bwd(_, cotangent):
  ones = jnp.ones(cotangent.shape[:1], cotangent.dtype)
  return cotangent, jnp.einsum('b,bhqk->hqk', ones, cotangent, precision=lax.Precision.HIGHEST)[None]


_add_shared.defvjp(_add_shared_fwd, _add_shared_bwd)


def _add_bias(scores: jax.Array, bias: AttentionBias | None) -> jax.Array:
  """Add the parts of `bias` to float32 scores [batch, heads, q, k]."""
  if bias is None:
    return scores
  if bias.shared is not None:
    spread = bias.shared.shape == (1, *scores.shape[1:])
    scores = _add_shared(scores, bias.shared) if spread else scores + bias.shared
  return scores if bias.per_example is None else scores + bias.per_example


@jax.custom_jvp
def _exp(x: jax.Array) -> jax.Array:
  """Return exp(x), which its derivative reads by the name under which a policy of rematerialization can store it."""
  return jnp.exp(x)


@_exp.defjvp
def _exp_jvp(primals, tangents):
  y = checkpoint_name(jnp.exp(*primals), 'attention_weights')
  return y, tangents[0] * y


def _softmax(scores: jax.Array) -> jax.Array:
  """Return the softmax over keys."""
  unnormalized = _exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
  return unnormalized / jnp.sum(unnormalized, axis=-1, keepdims=True)


def attention_weights(
    scores: jax.Array, bias: AttentionBias | None, dropout_rng: jax.Array | None, dropout_rate: float, dtype: Any
) -> jax.Array:
  """Turn scores into weights: bias, softmax in float32, dropout.

  Args:
    scores: <float>[batch, heads, q, k].
    bias: bias of the scores, or None.
    dropout_rng: key of the dropout; None for no dropout.
    dropout_rate: probability that a key is dropped, for all queries of a head.
    dtype: dtype of the result.

  Returns:
    <dtype>[batch, heads, q, k].
  """
  scores = _add_bias(scores.astype(jnp.float32), bias)
  weights = _softmax(scores).astype(dtype)
  if dropout_rng is not None and dropout_rate > 0.0:
    batch, heads, _, k_len = scores.shape
    keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, (batch, heads, 1, k_len))
    weights = weights * (keep.astype(dtype) / jnp.asarray(1.0 - dropout_rate, dtype))
  return weights


def _dot(query, key, value, bias, dropout_rng, dropout_rate, dtype, float32_logits, heads_first):
  """Return the result of the einsum form; see `dot_product_attention`."""
  keys = 'bhkd' if heads_first else 'bkhd'
  if float32_logits:
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
  scores = jnp.einsum(f'bqhd,{keys}->bhqk', query, key)
  weights = attention_weights(scores, bias, dropout_rng, dropout_rate, dtype)
  if heads_first:
    # With the other order of dims in the einsum, the CPU compiler chooses a product that is several times slower.
    return jnp.swapaxes(jnp.einsum('bhqk,bhkd->bhqd', weights, value), 1, 2)
  return checkpoint_name(jnp.einsum('bhqk,bkhd->bqhd', weights, value), 'attention_context')


def _cudnn(query, key, value, bias, dtype):
  """Return the result of the fused form; see `dot_product_attention`."""
  bias = bias or AttentionBias()
  return jax.nn.dot_product_attention(
      query, key, value, bias=None if bias.position is None else bias.position.astype(dtype), scale=1.0,
      is_causal=bias.causal, query_seq_lengths=bias.query_lengths, key_value_seq_lengths=bias.key_lengths,
      implementation='cudnn')


def _platform() -> dict[str, str | None]:
  """Return `platform` and `gpu` of `cudnn_unsupported_reason`, for the platform of the traced program."""
  platform = platforms.traced_platform()
  gpu = gpu_unsupported_reason(jax.local_devices()[0], _cudnn_version()) if platform == 'gpu' else None
  return {'platform': platform, 'gpu': gpu}


def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | AttentionBias | None = None,
    dropout_rng: jax.Array | None = None, dropout_rate: float = 0.0, deterministic: bool = False,
    dtype: Any = jnp.float32, float32_logits: bool = False, *, kernel: str = 'dot', heads_first: bool = False
) -> jax.Array:
  """Attend: softmax(query . key + bias) . value, without 1/sqrt(head_dim), which is in T5's initializer of the query.

  All attention of this package is computed here. The softmax is float32 for any `dtype`. The kernels agree except for
  padding queries, which no loss depends on: 'cudnn' masks padding by lengths, so it treats zeros *between* tokens as
  tokens and returns zeros for padding queries.

  Args:
    query: <float>[batch, q, heads, head_dim].
    key: <float>[batch, k, heads, head_dim], or [batch, heads, k, head_dim] with `heads_first`.
    value: like `key`.
    bias: `AttentionBias` or <float>[batch or 1, heads or 1, q or 1, k], added to the scores.
    dropout_rng: key of the dropout; required for dropout.
    dropout_rate: probability that a key is dropped, for all queries of a head.
    deterministic: True for no dropout.
    dtype: compute dtype.
    float32_logits: True to compute the scores in float32, False to round them to `dtype` before the softmax.
    kernel: one of `ATTENTION_KERNELS`.
    heads_first: True if keys and values have the cache's dim order.

  Returns:
    <dtype>[batch, q, heads, head_dim].

  Raises:
    ConfigError: 'cudnn' is not supported, or dropout has no key.
  """
  dropout = not deterministic and dropout_rate > 0.0
  if dropout and dropout_rng is None:
    raise checks.invalid('dot_product_attention', 'dropout_rng', f'a key for dropout_rate={dropout_rate}', None,
                         'Alternatively, pass deterministic=True.')
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
