"""T5's relative position biases: a learned number per head and bucket of distances, added to attention scores.

Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1.
"""

import math
from typing import Any

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from t5x_lite.layers.dense import Initializer
from t5x_lite.layers.embedding import default_embedding_init
from t5x_lite.layers.masks import DistanceBias
from t5x_lite.layers.masks import expand_diagonals


def _distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
  """Return int32 [max_distance + 1], the bucket of each distance; larger distances share the last bucket.

  Distances below num_buckets / 2 have a bucket each; the rest is spaced logarithmically up to `max_distance`.
  """
  num_exact = num_buckets // 2
  distance = np.arange(max_distance + 1)
  # float32 as in T5X: its rounding decides the bucket at exact powers.
  ratio = np.maximum(distance, 1).astype(np.float32) / num_exact + np.finfo(np.float32).eps
  spaced = np.log(ratio) / math.log(max_distance / num_exact) * (num_buckets - num_exact)
  buckets = np.where(distance < num_exact, distance, num_exact + spaced.astype(np.int32))
  return np.minimum(buckets, num_buckets - 1).astype(np.int32)


def relative_position_bucket(
  relative_position: jax.Array | np.ndarray,
  bidirectional: bool = True,
  num_buckets: int = 32,
  max_distance: int = 128,
) -> jax.Array:
  """Map relative positions to buckets.

  Args:
    relative_position: <int>[...], position of the key minus position of the query.
    bidirectional: True to use half of the buckets for keys after the query, False to put such keys into bucket 0.
    num_buckets: total number of buckets.
    max_distance: smallest distance of the last bucket.

  Returns:
    int32 [...], in [0, num_buckets).

  >>> [int(b) for b in relative_position_bucket(np.array([-200, -9, -1, 0, 1, 9, 200]))]
  [15, 8, 1, 0, 17, 24, 31]
  """
  relative_position = jnp.asarray(relative_position, jnp.int32)
  if not bidirectional:
    table = jnp.asarray(_distance_buckets(num_buckets, max_distance))
    return table[jnp.clip(-relative_position, 0, max_distance)]
  table = jnp.asarray(_distance_buckets(num_buckets // 2, max_distance))
  bucket = table[jnp.minimum(jnp.abs(relative_position), max_distance)]
  return jnp.where(relative_position > 0, bucket + num_buckets // 2, bucket)


class RelativePositionBiases(nn.Module):
  """Table of biases per head and distance bucket, for query and key positions.

  Attributes:
    num_buckets: number of buckets of distances.
    max_distance: smallest distance of the last bucket.
    num_heads: number of attention heads.
    dtype: dtype of the biases.
    embedding_init: initializer of the float32 parameter `rel_embedding` [num_heads, num_buckets].
  """

  num_buckets: int
  max_distance: int
  num_heads: int
  dtype: Any
  embedding_init: Initializer = default_embedding_init

  def setup(self):
    self.rel_embedding = nn_partitioning.param_with_axes(
      'rel_embedding',
      self.embedding_init,
      (self.num_heads, self.num_buckets),
      jnp.float32,
      axes=('heads', 'relpos_buckets'),
      module=self,
    )

  def _values(self, first: int, klen: int, bidirectional: bool) -> jax.Array:
    """Return <dtype>[num_heads, first + klen], the biases of the distances -first to klen - 1."""
    relative_position = jnp.arange(-first, klen, dtype=jnp.int32)
    bucket = relative_position_bucket(
      relative_position, bidirectional, self.num_buckets, self.max_distance
    )
    return jnp.take(self.rel_embedding.astype(self.dtype), bucket, axis=1)

  def by_distance(self, qlen: int, klen: int, bidirectional: bool = True) -> DistanceBias:
    """Compute the biases of a call without `query_offset`, float32 by distance."""
    return DistanceBias(self._values(qlen - 1, klen, bidirectional).astype(jnp.float32), qlen)

  def __call__(
    self, qlen: int, klen: int, bidirectional: bool = True, query_offset: jax.Array | None = None
  ) -> jax.Array:
    """Compute biases for queries at consecutive positions and keys at positions 0 to klen - 1.

    Args:
      qlen: number of queries.
      klen: number of keys.
      bidirectional: True for separate buckets of keys after the query (encoder), False for bucket 0 (decoder).
      query_offset: position of the first query, int32 [] or, if rows of the batch differ, [batch]; None for 0. For a
        decoding step, whose queries are at positions below klen.

    Returns:
      <dtype>[1, num_heads, qlen, klen], or [batch, num_heads, qlen, klen] with a `query_offset` per row.
    """
    # All (query, key) pairs on a diagonal have the same distance: look up one value per distance, then expand.
    if query_offset is None:
      return expand_diagonals(self._values(qlen - 1, klen, bidirectional), qlen, klen)[None]
    # The values of all distances are the same in every step; a step uses a window of them.
    values = self._values(klen - 1, klen, bidirectional)

    def window(offset):
      visible = lax.dynamic_slice_in_dim(values, klen - qlen - offset, qlen + klen - 1, axis=1)
      return expand_diagonals(visible, qlen, klen)

    if jnp.ndim(query_offset) == 0:
      return window(query_offset)[None]
    return jax.vmap(window)(query_offset)


class CachedRelativePositionBiases(RelativePositionBiases):
  """`RelativePositionBiases`, with its attributes, that keeps the biases in the collection `cache`.

  For layers written for T5X.
  """

  def __call__(
    self, qlen: int, klen: int, bidirectional: bool = True, decode: bool = False
  ) -> jax.Array:
    """Compute biases for queries and keys at positions from 0 on.

    Args:
      qlen: number of queries.
      klen: number of keys.
      bidirectional: see `RelativePositionBiases`.
      decode: True to keep the biases of the first call as `cached_bias`, and to return them in later calls.

    Returns:
      <dtype>[1, num_heads, qlen, klen], of the first call if they are kept.
    """
    if decode and self.has_variable('cache', 'cached_bias'):
      return self.get_variable('cache', 'cached_bias')
    biases = super().__call__(qlen, klen, bidirectional)
    if decode:
      self.put_variable('cache', 'cached_bias', biases)
    return biases
