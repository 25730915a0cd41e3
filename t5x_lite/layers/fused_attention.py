"""Fused kernels of attention: cuDNN's for NVIDIA GPUs and splash attention for TPUs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite.layers import platforms
from t5x_lite.layers.masks import AttentionBias
from t5x_lite.layers.shards import on_each_device

# cuDNN's limit on all supported GPUs (Hopper's is higher).
_CUDNN_MAX_HEAD_DIM = 128
# Compute capability of the oldest GPUs with cuDNN's fused attention, Ampere, and with that of packed rows, Hopper.
_CUDNN_MIN_CAPABILITY = (8, 0)
_CUDNN_MIN_PACKED_CAPABILITY = (9, 0)
# Smallest cuDNN version by compute capability, for those that need a later cuDNN than JAX does.
_CUDNN_MIN_VERSIONS: dict[tuple[int, ...], int] = {(10, 3): 91100}
# Largest number of examples of a packed row for cuDNN, whose statistics of the softmax have a row for each.
_CUDNN_MAX_SEGMENTS = 32
# Largest tiles of splash attention. Lengths must be multiples of the smallest.
_SPLASH_TILES = (512, 256, 128)
USE_AUTO = ": use attention_kernel='auto'"


def installed_cudnn_version() -> int | None:
  """Return the version of JAX's cuDNN, such as 90800 for 9.8.0; None without cuDNN."""
  try:
    # JAX's fused attention uses the same module, which is None without the CUDA plugin.
    from jax._src.lib import cuda_versions

    if cuda_versions is None:
      return None
    return cuda_versions.cudnn_get_version()
  except (ImportError, AttributeError, RuntimeError):
    return None


def gpu_unsupported_reason(
  device: Any, cudnn_version: int | None, packed: bool = False
) -> str | None:
  """Return the reason why a GPU does not support cuDNN's fused attention, or None if it does.

  Args:
    device: a `jax.Device` of platform 'gpu'.
    cudnn_version: version number of cuDNN, None without it.
    packed: True for rows of several packed examples.

  Returns:
    A clause with the reason and the remedy.
  """
  if 'cuda' not in device.client.platform_version.lower():
    return f'cuDNN needs an NVIDIA GPU with CUDA and {device.device_kind} is not one' + USE_AUTO
  if cudnn_version is None:
    return "cuDNN is not installed: install JAX with its CUDA packages, pip install 'jax[cuda12]' or 'jax[cuda13]'"
  capability = tuple(int(part) for part in device.compute_capability.split('.'))
  if capability < _CUDNN_MIN_CAPABILITY:
    return (
      f'{device.device_kind} has compute capability {device.compute_capability} and the fused kernel needs '
      f'{".".join(map(str, _CUDNN_MIN_CAPABILITY))}{USE_AUTO}'
    )
  if packed and capability < _CUDNN_MIN_PACKED_CAPABILITY:
    return (
      f'{device.device_kind} has compute capability {device.compute_capability} and packed rows need '
      f'{".".join(map(str, _CUDNN_MIN_PACKED_CAPABILITY))}: set pack=False'
    )
  needed = _CUDNN_MIN_VERSIONS.get(capability, 0)
  if cudnn_version < needed:
    return (
      f'{device.device_kind} needs cuDNN {_format_version(needed)} and {_format_version(cudnn_version)} is '
      'installed: update nvidia-cudnn'
    )
  return None


def _format_version(version: int) -> str:
  return f'{version // 10000}.{version // 100 % 100}.{version % 100}'


def cudnn_unsupported_reason(
  *,
  platform: str,
  dtype: Any,
  head_dim: int,
  q_len: int,
  k_len: int,
  bias: AttentionBias | None,
  gpu: str | None = None,
) -> str | None:
  """Return the reason why cuDNN's fused attention does not support an attention, or None if it does.

  Args:
    platform: result of `platforms.traced_platform`.
    dtype: compute dtype.
    head_dim: size of a head.
    q_len: number of queries.
    k_len: number of keys.
    bias: bias of the scores.
    gpu: result of `gpu_unsupported_reason` for the GPU of the program.

  Returns:
    A clause with the reason and the remedy, or None.
  """
  if platform == platforms.PORTABLE:
    return 'it runs only on CUDA and JAX cannot serialize programs with it' + USE_AUTO
  if platform != 'gpu':
    return f'the backend is {platform!r} and cuDNN needs an NVIDIA GPU{USE_AUTO}'
  if gpu is not None:
    return gpu
  if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
    return f"dtype is {jnp.dtype(dtype).name} and cuDNN computes in half precision only: set dtype='bfloat16'"
  if head_dim % 8 or head_dim > _CUDNN_MAX_HEAD_DIM:
    return f'head_dim is {head_dim} and must be a multiple of 8 up to {_CUDNN_MAX_HEAD_DIM}: change head_dim'
  if q_len % 2 or k_len % 2:
    return f'lengths are {q_len} and {k_len} and must be even: change task_feature_lengths'
  if bias is None:
    return None
  if bias.extra is not None or bias.prefix is not None:
    return (
      'the mask or bias is a plain array, which may differ between examples, or has bidirectional attention '
      'among inputs' + USE_AUTO
    )
  if bias.is_packed and bias.has_position:
    return 'rows are packed and cuDNN adds no position biases within packed rows: set pack=False'
  if bias.position is not None and bias.position.shape[2:] != (q_len, k_len):
    return (
      f'position biases have the shape {bias.position.shape} and must have one for each query and key'
      + USE_AUTO
    )
  return None


def splash_unsupported_reason(
  *, platform: str, q_len: int, k_len: int, bias: AttentionBias | None
) -> str | None:
  """Return the reason why splash attention does not support an attention, or None if it does.

  For the arguments and the result see `cudnn_unsupported_reason`.
  """
  if platform != 'tpu':
    return f'the backend is {platform!r} and splash attention needs a TPU{USE_AUTO}'
  if q_len % _SPLASH_TILES[-1] or k_len % _SPLASH_TILES[-1]:
    return (
      f'lengths are {q_len} and {k_len} and must be multiples of {_SPLASH_TILES[-1]}: change '
      'task_feature_lengths'
    )
  if bias is None:
    return None
  if bias.has_position or bias.extra is not None:
    return 'it adds no biases' + USE_AUTO
  if bias.prefix is not None:
    return 'it has no bidirectional attention among inputs' + USE_AUTO
  return None


def cudnn_attention(
  query: jax.Array, key: jax.Array, value: jax.Array, bias: AttentionBias | None, fallback: Any
) -> jax.Array:
  """Attend by cuDNN's kernel, where `cudnn_unsupported_reason` is None.

  Args:
    query: <bfloat16 or float16>[batch, q, heads, head_dim].
    key: <dtype>[batch, k, heads, head_dim].
    value: like `key`.
    bias: bias of the scores.
    fallback: function of the same four arguments for packed rows that cuDNN does not take: with more than
      `_CUDNN_MAX_SEGMENTS` examples, with padding between tokens, or with targets without inputs.

  Returns:
    <dtype>[batch, q, heads, head_dim].
  """
  bias = bias or AttentionBias()
  # JAX's own partitioning of the kernel takes the parts of each array as they are, which may be of different heads.
  if bias.is_packed:

    def run_packed(query, key, value, query_segments, key_segments):
      local = dataclasses.replace(bias, query_segments=query_segments, key_segments=key_segments)
      return jax.lax.cond(
        _is_in_order(query_segments, key_segments),
        lambda query, key, value: _cudnn_packed(query, key, value, local),
        lambda query, key, value: fallback(query, key, value, local),
        query,
        key,
        value,
      )

    args = (query, key, value, bias.query_segments, bias.key_segments)
    return on_each_device(run_packed, args, (*['b.h.'] * 3, 'b.', 'b.'), 'b.h.')

  def run(query, key, value, position, query_lengths, key_lengths):
    return jax.nn.dot_product_attention(
      query,
      key,
      value,
      bias=position,
      scale=1.0,
      is_causal=bias.causal,
      query_seq_lengths=query_lengths,
      key_value_seq_lengths=key_lengths,
      implementation='cudnn',
    )

  # [1, heads or 1, q, k] in the dtype of the queries, as cuDNN requires.
  position = bias.position_array()
  position_dims = None
  if position is not None:
    position = position.astype(query.dtype)
    position_dims = '.h..' if position.shape[1] > 1 else '....'
  query_dims = None if bias.query_lengths is None else 'b'
  key_dims = None if bias.key_lengths is None else 'b'
  args = (query, key, value, position, bias.query_lengths, bias.key_lengths)
  output = on_each_device(run, args, (*['b.h.'] * 3, position_dims, query_dims, key_dims), 'b.h.')
  return _with_zeros(output, bias)


def _is_in_order(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
  """Return whether segments are consecutive from 1 and padding is last, with keys for all queries: bool []."""
  is_fine = jnp.array(True)
  for segments in (query_segments, key_segments):
    is_fine &= jnp.all(segments <= _CUDNN_MAX_SEGMENTS) & jnp.all(segments != 0)
    following = segments[:, 1:]
    is_fine &= jnp.all((following >= segments[:, :-1]) & (segments[:, :-1] > 0) | (following < 0))
  num_queries = _segment_lengths(query_segments)
  num_keys = _segment_lengths(key_segments)
  return is_fine & jnp.all((num_queries == 0) | (num_keys > 0))


def _segment_lengths(segments: jax.Array) -> jax.Array:
  """Return int32 [batch, _CUDNN_MAX_SEGMENTS], the number of tokens of the segments 1, 2, ..."""
  numbers = jnp.arange(1, _CUDNN_MAX_SEGMENTS + 1, dtype=jnp.int32)
  return jnp.sum(segments[:, :, None] == numbers, axis=1, dtype=jnp.int32)


def packed_layout(query_segments: jax.Array, key_segments: jax.Array) -> tuple[jax.Array, ...]:
  """Return cuDNN's description of packed rows, int32 with -1 for segments that a row does not have.

  Args:
    query_segments: int32 [batch, q], consecutive from 1, with negative padding at the end.
    key_segments: int32 [batch, k], like `query_segments`.

  Returns:
    (lengths of the segments of queries [batch, segments], of keys, offset of each segment of queries
    [batch, segments + 1], of keys).
  """
  q_lengths = _segment_lengths(query_segments)
  k_lengths = _segment_lengths(key_segments)
  exists = (q_lengths > 0) | (k_lengths > 0)

  def offsets(lengths: jax.Array) -> jax.Array:
    first = jnp.where(exists, jnp.cumsum(lengths, axis=1) - lengths, -1)
    return jnp.pad(first, ((0, 0), (0, 1)), constant_values=-1)

  return (
    jnp.where(exists, q_lengths, -1),
    jnp.where(exists, k_lengths, -1),
    offsets(q_lengths),
    offsets(k_lengths),
  )


def _cudnn_packed(query, key, value, bias):
  # JAX has no public function with offsets. What the kernel leaves for padding may be anything, and so may the
  # derivatives, which `where` replaces by zeros.
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  query_segments, key_segments = bias.segments()
  # [batch, length, 1, 1]: True for tokens, False for padding.
  is_query = (query_segments > 0)[:, :, None, None]
  is_key = (key_segments > 0)[:, :, None, None]
  query = jnp.where(is_query, query, 0)
  key = jnp.where(is_key, key, 0)
  value = jnp.where(is_key, value, 0)
  q_lengths, k_lengths, q_offsets, k_offsets = packed_layout(query_segments, key_segments)
  if bias.causal:
    mask_type = cudnn.MaskType.PADDING_CAUSAL
  else:
    mask_type = cudnn.MaskType.PADDING
  output: Any = cudnn.dot_product_attention(
    query,
    key,
    value,
    q_seqlen=q_lengths,
    kv_seqlen=k_lengths,
    q_offsets=q_offsets,
    kv_offsets=k_offsets,
    scale=1.0,
    mask_type=mask_type,
  )
  return jnp.where(is_query, output, 0)


def splash_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: AttentionBias | None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Attend by the splash kernel, where `splash_unsupported_reason` is None.

  Args:
    query: <float>[batch, q, heads, head_dim].
    key: <float>[batch, k, heads, head_dim].
    value: like `key`.
    bias: bias of the scores.
    interpret: True to run the kernel on any platform, slowly.

  Returns:
    <dtype>[batch, q, heads, head_dim].
  """
  bias = bias or AttentionBias()
  if bias.key_segments is None:
    segments = ()
  else:
    segments = (bias.query_segments, bias.key_segments)
  fn = functools.partial(_splash, causal=bias.causal, interpret=interpret)
  # [batch, heads, length, head_dim] each: the kernel's order of dims.
  heads_first = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
  dims = (*['bh..'] * 3, *['b.'] * len(segments))
  output = on_each_device(fn, (*heads_first, *segments), dims, 'bh..', is_kernel=True)
  # The kernel's derivative is too large for queries without a key, whose log of a sum it rounds away.
  return _with_zeros(jnp.swapaxes(output, 1, 2), bias)


def _with_zeros(output: jax.Array, bias: AttentionBias) -> jax.Array:
  """Return the output <dtype>[batch, q, heads, head_dim] with zeros for queries without a visible key."""
  if bias.key_segments is not None:
    output = jnp.where(_has_key(bias)[:, :, None, None], output, 0)
  return output


def _has_key(bias: AttentionBias) -> jax.Array:
  """Return bool [batch, q], True for queries with a visible key."""
  query_segments, key_segments = bias.segments()
  if bias.causal and not bias.is_packed:
    # [batch, k]: True from the first key that is not padding on.
    seen = jax.lax.cummax((key_segments >= 0).astype(jnp.int32), axis=1) > 0
    positions = jnp.minimum(jnp.arange(query_segments.shape[1]), seen.shape[1] - 1)
    return jnp.take(seen, positions, axis=1)
  # In packed rows a query that is not padding sees itself, or the keys of its example.
  return jax.vmap(functools.partial(jnp.isin, method='sort'))(query_segments, key_segments)


def _largest_tile(length: int) -> int:
  return next(tile for tile in _SPLASH_TILES if length % tile == 0)


def _splash(query, key, value, *segments, causal, interpret):
  """Attend from [batch, heads, q, head_dim] to keys and values with the same order of dims."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  heads = query.shape[1]
  q_len = query.shape[2]
  k_len = key.shape[2]
  if causal:
    mask = masks.CausalMask((q_len, k_len))
  else:
    mask = masks.FullMask((q_len, k_len))
  q_tile = _largest_tile(q_len)
  k_tile = _largest_tile(k_len)
  sizes = kernels.BlockSizes(
    block_q=q_tile,
    block_kv=k_tile,
    block_q_dkv=q_tile,
    block_kv_dkv=k_tile,
    block_q_dq=q_tile,
    block_kv_dq=k_tile,
  )
  kernel = kernels.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name='attention_context',
    interpret=interpret,
  )
  if not segments:
    return jax.vmap(kernel)(query, key, value)
  return jax.vmap(lambda q, k, v, *ids: kernel(q, k, v, segment_ids=kernels.SegmentIds(*ids)))(
    query, key, value, *segments
  )
