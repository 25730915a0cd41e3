"""Multi-head attention with T5's parameters, and its caches for decoding."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jax import lax

from t5x_lite.errors import ConfigError
from t5x_lite.layers.attention_kernels import dot_product_attention
from t5x_lite.layers.dense import DenseGeneral, Initializer
from t5x_lite.layers.masks import AttentionBias, causal_bias, combine_biases, mask_to_bias

default_attention_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


class MultiHeadDotProductAttention(nn.Module):
  """Multi-head attention without biases in its projections.

  Scores are not divided by sqrt(head_dim): the query's initialiser is. Parameters are `query`, `key`, `value`, `out`.

  Collection `cache`, for decoding:
    - self-attention: `cached_key`, `cached_value` <dtype>[batch, heads, max length, head_dim] and `cache_index` int32
      [], the number of positions filled; written in place by each `decode=True` call.
    - cross-attention: `cached_key`, `cached_value` alone, computed once by `cache_keys_values`.

  Attributes:
    num_heads: number of heads.
    head_dim: size of a head.
    dtype: compute dtype.
    dropout_rate: dropout of the attention weights.
    kernel_init: initialiser of the kernels.
    float32_logits: compute the scores in float32.
    flat_kernels: store kernels as matrices (`t5` layout), otherwise with a dim each for heads and head_dim
      (`scalable_t5`).
    attention_kernel: kernel for attention over full sequences, one of `ATTENTION_KERNELS`; steps with a cache always
      use 'dot'.
  """

  num_heads: int
  head_dim: int
  dtype: Any = jnp.float32
  dropout_rate: float = 0.0
  kernel_init: Initializer = default_attention_init
  float32_logits: bool = False
  flat_kernels: bool = dataclasses.field(default=True, kw_only=True)
  attention_kernel: str = dataclasses.field(default='dot', kw_only=True)

  def setup(self):
    heads_axes = ('joined_kv',) if self.flat_kernels else ('heads', 'kv')
    project = functools.partial(
        DenseGeneral, (self.num_heads, self.head_dim), dtype=self.dtype, kernel_axes=('embed', *heads_axes),
        flat_kernel=self.flat_kernels)

    def query_init(*args):
      return self.kernel_init(*args) / jnp.sqrt(self.head_dim).astype(jnp.float32)

    self.query = project(kernel_init=query_init)
    self.key = project(kernel_init=self.kernel_init)
    self.value = project(kernel_init=self.kernel_init)
    self._out_axes = (*heads_axes, 'embed')

  @nn.compact
  def _project_out(self, x: jax.Array, features: int) -> jax.Array:
    """Projects <dtype>[batch, q, heads, head_dim] to [batch, q, features]."""
    return DenseGeneral(
        features, axis=(-2, -1), dtype=self.dtype, kernel_init=self.kernel_init, kernel_axes=self._out_axes,
        flat_kernel=self.flat_kernels, name='out')(x)

  def _project_query(self, inputs_q: jax.Array) -> jax.Array:
    return nn_partitioning.with_sharding_constraint(self.query(inputs_q), ('batch', 'length', 'heads', 'kv'))

  def _project_key_value(self, inputs_kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    constrain = functools.partial(
        nn_partitioning.with_sharding_constraint, logical_axis_resources=('batch', 'length', 'heads', 'kv'))
    return constrain(self.key(inputs_kv)), constrain(self.value(inputs_kv))

  def _attend(self, query, key, value, bias, deterministic, heads_first=False):
    """Attends and projects back to [batch, q, embed]."""
    dropout = not deterministic and self.dropout_rate > 0.0
    return dot_product_attention(
        query, key, value, bias, self.make_rng('dropout') if dropout else None, self.dropout_rate, deterministic,
        self.dtype, self.float32_logits, kernel=self.attention_kernel, heads_first=heads_first)

  def __call__(
      self, inputs_q: jax.Array, inputs_kv: jax.Array, mask: jax.Array | None = None,
      bias: jax.Array | AttentionBias | None = None, *, decode: bool = False, deterministic: bool = False) -> jax.Array:
    """Attends from `inputs_q` to `inputs_kv`.

    With `decode`, self-attention goes through the cache: where there is none yet, an empty one of `inputs_kv`'s length
    is made and the call attends as without `decode`; afterwards a call takes the next positions, usually one, appends
    their keys and values, and attends to all so far. `bias` then has the rows of these positions and the cache's length
    of columns.

    Args:
      inputs_q: <float>[batch, q, embed].
      inputs_kv: <float>[batch, k, embed].
      mask: [batch or 1, 1, q, k], positive where attention is allowed.
      bias: added to the scores: an `AttentionBias`, or a plain array [batch or 1, heads or 1, q, k].
      decode: use the cache.
      deterministic: no dropout.

    Returns:
      <dtype>[batch, q, embed].
    """
    query = self._project_query(inputs_q)
    key, value = self._project_key_value(inputs_kv)
    bias = _merge(mask, bias)
    cached = decode and self.has_variable('cache', 'cached_key')
    if cached:
      key, value, bias = self._append_to_cache(key, value, bias)
    elif decode:
      self.init_cache(*inputs_kv.shape[:2])
    x = self._attend(query, key, value, bias, deterministic, heads_first=cached)
    return self._project_out(x, inputs_q.shape[-1])

  def attend_to_cache(
      self, inputs_q: jax.Array, mask: jax.Array | None = None, bias: jax.Array | AttentionBias | None = None, *,
      deterministic: bool = False) -> jax.Array:
    """Attends to the keys and values that `cache_keys_values` stored; arguments and result as in `__call__`."""
    x = self._attend(
        self._project_query(inputs_q), self.get_variable('cache', 'cached_key'),
        self.get_variable('cache', 'cached_value'), _merge(mask, bias), deterministic, heads_first=True)
    return self._project_out(x, inputs_q.shape[-1])

  def init_cache(self, batch_size: int, max_length: int) -> None:
    """Makes an empty self-attention cache for `batch_size` sequences of up to `max_length` positions."""
    shape = (batch_size, self.num_heads, max_length, self.head_dim)
    self._put_keys_values(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))
    self.put_variable('cache', 'cache_index', jnp.zeros((), jnp.int32))

  def cache_keys_values(self, inputs_kv: jax.Array) -> None:
    """Stores the keys and values of `inputs_kv` <float>[batch, k, embed] for `attend_to_cache`."""
    key, value = self._project_key_value(inputs_kv)
    self._put_keys_values(jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))

  def _put_keys_values(self, key: jax.Array, value: jax.Array) -> None:
    for name, array in (('cached_key', key), ('cached_value', value)):
      self.put_variable('cache', name, nn_partitioning.with_sharding_constraint(
          array, ('batch', 'heads', 'length', 'kv')))

  def _append_to_cache(self, key, value, bias):
    """Writes keys and values [batch, new, heads, head_dim] behind those cached; returns all of them and their bias."""
    cached_key, cached_value = (self.get_variable('cache', name) for name in ('cached_key', 'cached_value'))
    index = self.get_variable('cache', 'cache_index')
    batch, num_new = key.shape[:2]
    if batch != cached_key.shape[0]:
      raise ConfigError(f'got {batch} sequences for a cache of {cached_key.shape[0]}; expected equal numbers. Make the '
                        'cache from inputs of the same batch (and number of decodes).')
    key, value = (
        lax.dynamic_update_slice_in_dim(cached, jnp.swapaxes(new, 1, 2).astype(cached.dtype), index, axis=2)
        for cached, new in ((cached_key, key), (cached_value, value)))
    self._put_keys_values(key, value)
    self.put_variable('cache', 'cache_index', index + num_new)
    # Also masks the part of the cache that is not filled yet.
    visible = causal_bias(num_new, cached_key.shape[2], query_offset=index)
    bias = AttentionBias() if bias is None else bias
    return key, value, bias.replace(shared=combine_biases(bias.shared, visible))


def _merge(mask: jax.Array | None, bias: jax.Array | AttentionBias | None) -> AttentionBias | None:
  """Returns one bias for a T5X-style mask and a bias of either form."""
  if bias is not None and not isinstance(bias, AttentionBias):
    bias = AttentionBias.from_array(bias)
  if mask is None:
    return bias
  masked = AttentionBias.from_array(mask_to_bias(mask))
  if bias is None:
    return masked
  # What the mask hides is not known to be padding, so nothing can be told to a kernel that masks by lengths.
  return bias.replace(
      shared=combine_biases(bias.shared, masked.shared), position=combine_biases(bias.position, masked.position),
      per_example=combine_biases(bias.per_example, masked.per_example), query_lengths=None, key_lengths=None)
