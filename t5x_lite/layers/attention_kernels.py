"""Dot-product attention, without scaling, and the choice of its kernel."""

from collections.abc import Iterator
import contextlib
import contextvars
import logging
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.errors import ConfigError
from t5x_lite.layers import fused_attention
from t5x_lite.layers import platforms
from t5x_lite.layers.blockwise import blockwise_attention
from t5x_lite.layers.blockwise import blockwise_largest_scores
from t5x_lite.layers.masks import LEAST_VISIBLE_SCORE
from t5x_lite.layers.masks import AttentionBias
from t5x_lite.layers.masks import sum_over_batch

# 'dot' is two einsums around a softmax and 'blockwise' the same in blocks, for every backend; 'cudnn' is NVIDIA's fused
# kernel and 'splash' JAX's for TPUs. 'auto' is a fused kernel where it computes the same result, else 'blockwise' for
# long rows, else 'dot'.
ATTENTION_KERNELS = ('auto', 'dot', 'blockwise', 'cudnn', 'splash')
# Least number of scores per row and head for which 'auto' takes 'blockwise'. On a CPU 'dot' is as fast below; on
# accelerators it costs memory for scores, which blocks of this size hold once.
_MIN_BLOCKWISE_SCORES_CPU = 1024 * 1024
_MIN_BLOCKWISE_SCORES = 512 * 512

_logger = logging.getLogger(__name__)


class KernelChoice(NamedTuple):
  """Choice of 'auto' for an attention.

  Attributes:
    q_len: number of queries.
    k_len: number of keys.
    kernel: the chosen kernel.
    reason: a clause.
  """

  q_len: int
  k_len: int
  kernel: str
  reason: str

  def __str__(self) -> str:
    return (
      f'{self.kernel!r} for {self.q_len:,} queries and {self.k_len:,} keys, since {self.reason}'
    )


# Choices that this process has logged, and those of the programs traced in a `kernel_choices` context.
_logged_choices: set[KernelChoice] = set()
_choices: contextvars.ContextVar[list[KernelChoice] | None] = contextvars.ContextVar(
  'kernel_choices', default=None
)


@contextlib.contextmanager
def kernel_choices() -> Iterator[list[KernelChoice]]:
  """Context with the list of the different choices of 'auto' in the programs traced in it, which are not logged."""
  choices = []
  token = _choices.set(choices)
  try:
    yield choices
  finally:
    _choices.reset(token)


def select_attention_kernel(kernel: str, **conditions: Any) -> str:
  """Return 'dot', 'blockwise', 'cudnn' or 'splash' for the requested `kernel`.

  A choice of 'auto' is logged once per process with its reason, except for 'dot' on a CPU.

  Args:
    kernel: one of `ATTENTION_KERNELS`.
    **conditions: arguments of `cudnn_unsupported_reason`.

  Raises:
    ConfigError: unknown kernel, or a fused kernel where it is not supported.
  """
  checks.check('', {'attention_kernel': kernel}, attention_kernel=checks.one_of(ATTENTION_KERNELS))
  if kernel in ('dot', 'blockwise'):
    return kernel
  platform = conditions['platform']
  q_len = conditions['q_len']
  k_len = conditions['k_len']
  reasons = {
    'cudnn': fused_attention.cudnn_unsupported_reason(**conditions),
    'splash': fused_attention.splash_unsupported_reason(
      platform=platform, q_len=q_len, k_len=k_len, bias=conditions['bias']
    ),
  }
  if kernel != 'auto':
    reason = reasons[kernel]
    if reason is not None:
      if reason.endswith(fused_attention.USE_AUTO):
        alternative = ''
      else:
        alternative = "; or use attention_kernel='auto'"
      raise ConfigError(f'attention_kernel={kernel!r} is not supported: {reason}{alternative}.')
    return kernel
  choice = KernelChoice(q_len, k_len, *_choose(platform, q_len * k_len, reasons))
  _report(choice, is_logged=platform in ('gpu', 'tpu') or choice.kernel != 'dot')
  return choice.kernel


def _choose(platform: str, num_scores: int, reasons: dict[str, str | None]) -> tuple[str, str]:
  """Return (kernel, reason) of 'auto'."""
  fused = {'gpu': 'cudnn', 'tpu': 'splash'}.get(platform)
  if fused is not None and reasons[fused] is None:
    return fused, 'device, dtype, lengths and mask allow it'
  least = _min_blockwise_scores(platform)
  if num_scores >= least:
    kernel = 'blockwise'
    size = 'at least'
  else:
    kernel = 'dot'
    size = 'fewer than'
  reason = f'{num_scores:,} scores per head are {size} {least:,}'
  if fused is None:
    return kernel, reason
  obstacle = (reasons[fused] or '').removesuffix(fused_attention.USE_AUTO)
  return kernel, f'{fused!r} is not possible ({obstacle}) and {reason}'


def _min_blockwise_scores(platform: str) -> int:
  if platform == 'cpu':
    return _MIN_BLOCKWISE_SCORES_CPU
  return _MIN_BLOCKWISE_SCORES


def uses_arrays(kernel: str, q_len: int, k_len: int) -> bool:
  """Return whether an attention may add its bias as arrays, which a stack then makes once for all of its layers.

  Args:
    kernel: one of `ATTENTION_KERNELS`.
    q_len: number of queries.
    k_len: number of keys.
  """
  is_short = q_len * k_len < _min_blockwise_scores(platforms.traced_platform())
  return kernel == 'dot' or kernel == 'auto' and is_short


def _report(choice: KernelChoice, is_logged: bool) -> None:
  choices = _choices.get()
  if choices is not None:
    if choice not in choices:
      choices.append(choice)
  elif is_logged and choice not in _logged_choices:
    _logged_choices.add(choice)
    _logger.info('Attention kernel: %s.', choice)


@jax.custom_vjp
def _add_shared(scores: jax.Array, shared: jax.Array) -> jax.Array:
  """Return float32 scores [batch, heads, q, k] + shared [1, heads, q, k].

  Its derivative (reverse mode only) is `sum_over_batch`.
  """
  return scores + shared


def _add_shared_fwd(scores, shared):
  return scores + shared, None


def _add_shared_bwd(_, cotangent):
  return cotangent, sum_over_batch(cotangent)[None]


_add_shared.defvjp(_add_shared_fwd, _add_shared_bwd)


def _add_bias(scores: jax.Array, bias: AttentionBias | None) -> jax.Array:
  """Add the parts of `bias` to float32 scores [batch, heads, q, k]."""
  if bias is None:
    return scores
  bias = bias.with_arrays()
  if bias.shared is not None:
    spread = bias.shared.shape == (1, *scores.shape[1:])
    if spread:
      scores = _add_shared(scores, bias.shared)
    else:
      scores = scores + bias.shared
  if bias.per_example is None:
    return scores
  return scores + bias.per_example


@jax.custom_jvp
def _exp(x: jax.Array) -> jax.Array:
  """Return exp(x), which its derivative reads by the name under which a policy of rematerialization can store it."""
  return jnp.exp(x)


@_exp.defjvp
def _exp_jvp(primals, tangents):
  y = checkpoint_name(jnp.exp(*primals), 'attention_weights')
  return y, tangents[0] * y


def _softmax(scores: jax.Array) -> jax.Array:
  """Return the softmax over keys; zeros for queries without a visible key."""
  # [batch, heads, q, 1]: without its gradient, since the result does not depend on it. If all keys are masked, the
  # difference of each score has exp = 0.
  largest = jnp.max(scores, axis=-1, keepdims=True, initial=LEAST_VISIBLE_SCORE)
  unnormalized = _exp(scores - lax.stop_gradient(largest))
  # At least 1 with a visible key, that of the largest score, and then unchanged by this small number. (XLA's CPU
  # compiler computes the softmax without arrays of scores in between, but not with a condition here.)
  total = jnp.sum(unnormalized, axis=-1, keepdims=True) + 1e-9
  return unnormalized / total


def drop_keys(
  value: jax.Array, dropout_rng: jax.Array | None, dropout_rate: float, heads_first: bool = False
) -> jax.Array:
  """Return the values of attention with dropout: a dropped key has weight 0 in all queries of a head, as in T5X.

  That is the same as a value of zeros, so all kernels have the same dropout.

  Args:
    value: <dtype>[batch, k, heads, head_dim], or [batch, heads, k, head_dim] with `heads_first`.
    dropout_rng: key of the dropout; None for no dropout.
    dropout_rate: probability that a key is dropped.
    heads_first: True if the heads come before the keys.
  """
  if dropout_rng is None or dropout_rate == 0.0:
    return value
  batch, *dims, _ = value.shape
  if heads_first:
    heads, k_len = dims
  else:
    k_len, heads = dims
  probability = 1.0 - dropout_rate
  # [batch, heads, 1, k]: one draw for all queries, with the shape of T5X's weights, for the same random numbers.
  keep = jax.random.bernoulli(dropout_rng, probability, (batch, heads, 1, k_len))
  # [batch, heads, k, 1]
  keep = keep[:, :, 0, :, None]
  if not heads_first:
    keep = jnp.swapaxes(keep, 1, 2)
  # Kept values are larger, so that the expectation is that without dropout.
  return value * (keep.astype(value.dtype) / jnp.asarray(probability, value.dtype))


def _dot(query, key, value, bias, heads_first=False):
  """Return the result of the einsum form; see `dot_product_attention`."""
  keys = 'bkhd'
  if heads_first:
    keys = 'bhkd'
  # [batch, heads, q, k]: the product in the dtype of the query, its softmax in float32 because bfloat16 would round the
  # differences between large scores.
  scores = jnp.einsum(f'bqhd,{keys}->bhqk', query, key).astype(jnp.float32)
  scores = _add_bias(scores, bias)
  weights = _softmax(scores).astype(value.dtype)
  # [batch, q, heads, head_dim]
  if heads_first:
    # With the other order of dims in the einsum, the CPU compiler chooses a product that is several times slower.
    return jnp.swapaxes(jnp.einsum('bhqk,bhkd->bhqd', weights, value), 1, 2)
  return checkpoint_name(jnp.einsum('bhqk,bkhd->bqhd', weights, value), 'attention_context')


def _platform(bias: AttentionBias | None) -> dict[str, str | None]:
  """Return `platform` and `gpu` of `cudnn_unsupported_reason`, for the platform of the traced program."""
  platform = platforms.traced_platform()
  gpu = None
  if platform == 'gpu':
    gpu = fused_attention.gpu_unsupported_reason(
      jax.local_devices()[0],
      fused_attention.installed_cudnn_version(),
      bias is not None and bias.is_packed,
    )
  return {'platform': platform, 'gpu': gpu}


def dot_product_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: jax.Array | AttentionBias | None = None,
  dropout_rng: jax.Array | None = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: Any = jnp.float32,
  float32_logits: bool = False,
  *,
  kernel: str = 'dot',
  heads_first: bool = False,
) -> jax.Array:
  """Attend: softmax(query . key + bias) . value, without 1/sqrt(head_dim), which is in T5's initializer of the query.

  All attention of this package is computed here. The softmax is float32 for any `dtype`. A query without a visible key,
  such as a target without inputs, gets zeros with every kernel; a key with a score below `LEAST_VISIBLE_SCORE` is
  masked. In rows that are not packed, 'cudnn' masks padding by lengths, so it treats zeros *between* tokens as tokens
  and returns zeros for padding queries, which no loss depends on.

  Args:
    query: <float>[batch, q, heads, head_dim].
    key: <float>[batch, k, heads, head_dim], or [batch, heads, k, head_dim] with `heads_first`.
    value: like `key`.
    bias: `AttentionBias` or <float>[batch or 1, heads or 1, q or 1, k], added to the scores.
    dropout_rng: key of the dropout; required for dropout.
    dropout_rate: probability that a key is dropped, for all queries of a head.
    deterministic: True for no dropout.
    dtype: compute dtype.
    float32_logits: True to compute the scores in float32, False to round them to `dtype` before the softmax; only 'dot'
      rounds.
    kernel: one of `ATTENTION_KERNELS`.
    heads_first: True if keys and values have the cache's dim order.

  Returns:
    <dtype>[batch, q, heads, head_dim].

  Raises:
    ConfigError: a fused kernel is not supported, or dropout has no key.
  """
  dropout = not deterministic and dropout_rate > 0.0
  if dropout and dropout_rng is None:
    raise checks.invalid(
      'dot_product_attention',
      'dropout_rng',
      f'a key for dropout_rate={dropout_rate}',
      None,
      'Alternatively, pass deterministic=True.',
    )
  if bias is not None and not isinstance(bias, AttentionBias):
    bias = AttentionBias.from_array(bias)
  query = query.astype(dtype)
  key = key.astype(dtype)
  value = value.astype(dtype)
  if dropout:
    value = drop_keys(value, dropout_rng, dropout_rate, heads_first)
  if heads_first or kernel == 'dot' or platforms.counts_products():
    chosen = 'dot'
  else:
    chosen = select_attention_kernel(
      kernel,
      **_platform(bias),
      dtype=dtype,
      head_dim=query.shape[-1],
      q_len=query.shape[1],
      k_len=key.shape[1],
      bias=bias,
    )
  if chosen == 'cudnn':
    return fused_attention.cudnn_attention(query, key, value, bias, fallback=blockwise_attention)
  if chosen == 'splash':
    return fused_attention.splash_attention(query, key, value, bias)
  if chosen == 'blockwise':
    return blockwise_attention(query, key, value, bias)
  if float32_logits:
    query = query.astype(jnp.float32)
    key = key.astype(jnp.float32)
  return _dot(query, key, value, bias, heads_first)


def largest_scores(
  query: jax.Array, key: jax.Array, bias: AttentionBias | None, dtype: Any, kernel: str
) -> jax.Array:
  """Return float32 [heads], the largest score query . key before biases, or 0 if all are negative; without derivatives.

  Masked keys do not count, nor do queries of padding at the end of a row. Where attention may have all scores at once
  (`uses_arrays`), the product is that of 'dot', which the compiler computes once for both; else it is computed in
  blocks.

  Args:
    query: <float>[batch, q, heads, head_dim].
    key: <float>[batch, k, heads, head_dim].
    bias: bias of the scores, for its mask.
    dtype: dtype of the product.
    kernel: kernel of the attention, one of `ATTENTION_KERNELS`.
  """
  query, key, bias = lax.stop_gradient((query.astype(dtype), key.astype(dtype), bias))
  q_len = query.shape[1]
  if uses_arrays(kernel, q_len, key.shape[1]):
    scores = jnp.einsum('bqhd,bkhd->bhqk', query, key).astype(jnp.float32)
    is_visible = _add_bias(scores, bias) >= LEAST_VISIBLE_SCORE
    largest = jnp.max(scores, axis=-1, initial=0.0, where=is_visible)
  else:
    largest = blockwise_largest_scores(query, key, bias)
  if bias is not None and bias.query_lengths is not None:
    is_real = jnp.arange(q_len) < bias.query_lengths[:, None]
    largest = jnp.where(is_real[:, None], largest, 0.0)
  return jnp.max(largest, axis=(0, 2))
