"""Logits as a product of hidden states and an output kernel, which the loss may compute in chunks."""

import functools
from typing import Any

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
from flax.linen.spmd import with_logical_constraint
import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from t5x_lite.layers.dense import Initializer
from t5x_lite.layers.dense import default_kernel_init
from t5x_lite.layers.dense import operand_dtype


@flax.struct.dataclass
class OutputProjection:
  """Operands of the product that gives the logits.

  Attributes:
    hidden: <float>[batch, length, embed], hidden states.
    kernel: <float>[embed, vocab], or [vocab, embed] if `vocab_dim` is 0 (a table of embeddings).
    vocab_dim: dim of the vocabulary in the kernel.
    divisor: divisor of the products.
    chunk_size: see `networks.t5_config.StackConfig.loss_chunk_size`.
  """

  hidden: jax.Array
  kernel: jax.Array
  vocab_dim: int = flax.struct.field(pytree_node=False, default=1)
  divisor: float = flax.struct.field(pytree_node=False, default=1.0)
  chunk_size: int | None = flax.struct.field(pytree_node=False, default=None)

  @property
  def vocab_size(self) -> int:
    """Number of logits of a position."""
    return self.kernel.shape[self.vocab_dim]

  def logits(self) -> jax.Array:
    """Return all logits, float32 [batch, length, vocab]."""
    # [batch * length, embed]
    rows = self.hidden.reshape(-1, self.hidden.shape[-1])
    dtype = product_dtype(self.hidden, self.kernel)
    if dtype == jnp.float32:
      products: Any = multiply(rows, self.kernel, self.vocab_dim, dtype)
    else:
      products = _mixed_product(rows, self.kernel, self.vocab_dim)
    logits = products.reshape(*self.hidden.shape[:-1], self.vocab_size)
    if self.divisor != 1.0:
      logits = logits / jnp.float32(self.divisor)
    return with_logical_constraint(logits, ('batch', 'length', 'vocab'))


def product_dtype(hidden: jax.Array, kernel: jax.Array) -> jnp.dtype:
  """Return the dtype of the operands of the logits, whose sums are float32.

  It is bfloat16 if one of the arrays is. T5X converts both to float32, but on a TPU such a product has bfloat16
  operands by default. (float16 has too small a range for T5's activations.)
  """
  if hidden.dtype == jnp.bfloat16:
    return jnp.dtype(jnp.bfloat16)
  return operand_dtype(kernel, jnp.float32)


def multiply(rows: jax.Array, kernel: jax.Array, vocab_dim: int, dtype: Any) -> jax.Array:
  """Return the products of hidden states and kernel, float32 [rows, vocab].

  Args:
    rows: <float>[rows, embed].
    kernel: see `OutputProjection`.
    vocab_dim: see `OutputProjection`.
    dtype: see `product_dtype`.
  """
  dims = (((1,), (1 - vocab_dim,)), ((), ()))
  return lax.dot_general(
    rows.astype(dtype), kernel.astype(dtype), dims, preferred_element_type=jnp.float32
  )


def hidden_gradient(
  gradient: jax.Array, kernel: jax.Array, vocab_dim: int, dtype: Any
) -> jax.Array:
  """Return the gradient of `rows` in `multiply`, float32 [rows, embed].

  Args:
    gradient: float32 [rows, vocab], gradient of the products, converted to `dtype`.
    kernel: see `OutputProjection`.
    vocab_dim: see `OutputProjection`.
    dtype: see `product_dtype`.
  """
  dims = (((1,), (vocab_dim,)), ((), ()))
  return lax.dot_general(
    gradient.astype(dtype), kernel.astype(dtype), dims, preferred_element_type=jnp.float32
  )


def kernel_gradient(
  rows: jax.Array, gradient: jax.Array, vocab_dim: int, dtype: Any, num_parts: int | None = None
) -> jax.Array:
  """Return the gradient of `kernel` in `multiply`, float32 with its shape.

  Args:
    rows: <float>[rows, embed].
    gradient: float32 [rows, vocab], gradient of the products, converted to `dtype`.
    vocab_dim: see `OutputProjection`.
    dtype: see `product_dtype`.
    num_parts: number of parts of the rows whose gradients are separate, in a new first dim; None for their sum.
  """
  first = rows.astype(dtype)
  second = gradient.astype(dtype)
  if vocab_dim == 0:
    first, second = second, first
  dims = (((0,), (0,)), ((), ()))
  if num_parts is not None:
    # [num_parts, rows / num_parts, ...] each: a batch of products.
    first = first.reshape(num_parts, -1, first.shape[-1])
    second = second.reshape(num_parts, -1, second.shape[-1])
    dims = (((1,), (1,)), ((0,), (0,)))
  return lax.dot_general(first, second, dims, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mixed_product(rows: jax.Array, kernel: jax.Array, vocab_dim: int) -> jax.Array:
  """Return `multiply` with bfloat16 operands, in the backward pass too, where derivatives would have float32 ones."""
  return multiply(rows, kernel, vocab_dim, jnp.bfloat16)


def _mixed_forward(rows, kernel, vocab_dim):
  return _mixed_product(rows, kernel, vocab_dim), (rows, kernel)


def _mixed_backward(vocab_dim, residuals, gradient):
  rows, kernel = residuals
  return (
    hidden_gradient(gradient, kernel, vocab_dim, jnp.bfloat16).astype(rows.dtype),
    kernel_gradient(rows, gradient, vocab_dim, jnp.bfloat16).astype(kernel.dtype),
  )


_mixed_product.defvjp(_mixed_forward, _mixed_backward)


class LogitsDense(nn.Module):
  """Output kernel of a network, a parameter `kernel` [embed, vocab] like that of `DenseGeneral`.

  Attributes:
    vocab_size: number of logits.
    kernel_init: initializer of the float32 parameter.
  """

  vocab_size: int
  kernel_init: Initializer = default_kernel_init

  @nn.compact
  def __call__(self, hidden: jax.Array, **fields: Any) -> OutputProjection:
    """Return the projection of `hidden`, <float>[batch, length, embed], with more `fields`."""
    kernel = nn_partitioning.param_with_axes(
      'kernel',
      self.kernel_init,
      (hidden.shape[-1], self.vocab_size),
      jnp.float32,
      axes=('embed', 'vocab'),
    )
    return OutputProjection(hidden, kernel, **fields)
