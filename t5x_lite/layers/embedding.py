"""Token embeddings, and logits from the same table."""

import functools
from typing import Any

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
from jax import lax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.layers.dense import Initializer
from t5x_lite.layers.dense import operand_dtype

default_embedding_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal', out_axis=0)


class Embed(nn.Module):
  """Table of `num_embeddings` vectors, looked up by gather.

  Attributes:
    num_embeddings: number of rows (vocabulary size including padding for sharding).
    features: size of a vector.
    cast_input_dtype: dtype to which ids are cast first; without it ids must be integers.
    dtype: dtype of the vectors.
    attend_dtype: compute dtype of `attend`; None for `dtype`. See also `operand_dtype`.
    embedding_init: initializer of the float32 parameter `embedding` [num_embeddings, features].
    one_hot: True to look up by a product with one-hot vectors, with the same result at a cost that grows with
      `num_embeddings`. For hardware with slow gathers from sharded tables.
  """

  num_embeddings: int
  features: int
  cast_input_dtype: Any = None
  dtype: Any = jnp.float32
  attend_dtype: Any = None
  embedding_init: Initializer = default_embedding_init
  one_hot: bool = False

  def setup(self):
    self.embedding = nn_partitioning.param_with_axes(
      'embedding',
      self.embedding_init,
      (self.num_embeddings, self.features),
      jnp.float32,
      axes=('vocab', 'embed'),
      module=self,
    )

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Return the vectors of ids.

    Args:
      inputs: <int>[...] ids below `num_embeddings`; an id outside the table gives NaN, or zeros with `one_hot`.

    Returns:
      <dtype>[..., features].

    Raises:
      ConfigError: the ids are not integers and `cast_input_dtype` is not set.
    """
    if self.cast_input_dtype is not None:
      inputs = inputs.astype(self.cast_input_dtype)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
      raise checks.invalid(
        'Embed',
        'inputs',
        'integer ids',
        inputs.dtype,
        'Alternatively, set cast_input_dtype=jnp.int32.',
      )
    if self.one_hot:
      rows = lax.broadcasted_iota(inputs.dtype, (*inputs.shape, self.num_embeddings), inputs.ndim)
      return jnp.dot(
        (inputs[..., None] == rows).astype(self.dtype), self.embedding.astype(self.dtype)
      )
    # The gather precedes the cast, so that the table is not copied and its gradient is summed in the table's dtype.
    if self.embedding.dtype == jnp.bfloat16:
      take = _take_bits
    else:
      take = functools.partial(jnp.take, axis=0)
    return take(self.embedding, inputs).astype(self.dtype)

  def attend(self, query: jax.Array) -> jax.Array:
    """Return the products of `query` with all rows of the table.

    Args:
      query: <float>[..., features].

    Returns:
      <attend_dtype>[..., num_embeddings].
    """
    if self.attend_dtype is None:
      dtype = self.dtype
    else:
      dtype = self.attend_dtype
    # One matrix product of rows, for the reason in `DenseGeneral`.
    operands = operand_dtype(self.embedding, dtype)
    rows = query.astype(operands).reshape(-1, self.features)
    scores = lax.dot_general(
      rows, self.embedding.astype(operands), (((1,), (1,)), ((), ())), preferred_element_type=dtype
    )
    return scores.reshape(*query.shape[:-1], self.num_embeddings)


@jax.custom_jvp
def _take_bits(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Return the rows of a bfloat16 table, as `jnp.take` does, whose program on a CPU holds the table in float32."""
  rows = jnp.take(
    lax.bitcast_convert_type(table, jnp.uint16), ids, axis=0
  )  # outside the table all bits are 1: NaN
  return lax.bitcast_convert_type(rows, jnp.bfloat16)


@_take_bits.defjvp
def _take_bits_jvp(primals, tangents):
  table, ids = primals
  return _take_bits(table, ids), jnp.take(tangents[0], ids, axis=0)
