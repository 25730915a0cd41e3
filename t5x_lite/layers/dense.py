"""Linear projections without bias, over one or several dims at once."""

from collections.abc import Callable, Sequence
import dataclasses
import inspect
import math
from typing import Any

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
from jax import ad_checkpoint
from jax import lax
import jax.numpy as jnp

from t5x_lite.layers import low_rank

Initializer = Callable[..., jax.Array]

# T5's initializer for feed-forward and output kernels; attention kernels use the untruncated normal.
default_kernel_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')


def operand_dtype(weights: jax.Array, dtype: Any) -> jnp.dtype:
  """Return the dtype of the operands of a product with `weights` whose result has the compute dtype `dtype`.

  It is `dtype`, except for bfloat16 weights and float32 results: hardware has products with bfloat16 operands and
  float32 sums, which read half the bytes, while weights converted for a product are written out first. (float16 has too
  small a range for T5's activations.)
  """
  is_mixed = weights.dtype == jnp.bfloat16 and jnp.dtype(dtype) == jnp.float32
  return jnp.dtype(jnp.bfloat16 if is_mixed else dtype)


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
  if isinstance(value, int):
    return (value,)
  return tuple(value)


def _needs_dims(initializer: Initializer) -> bool:
  parameters = inspect.signature(initializer).parameters.values()
  return (
    sum(
      each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters
    )
    == 5
  )


class DenseGeneral(nn.Module):
  """Linear projection of the dims `axis` of the input to new trailing dims `features`, without bias.

  The kernel is one parameter `kernel`, float32 when initialised. T5X has two forms, with different checkpoints: a
  matrix [prod(in), prod(features)] (`flat_kernel`, the `t5` layout) and [*in, *features] (the `scalable_t5` layout).
  Both have the same values for the same seed. The output of a low-rank adapter of the kernel (`low_rank`) is added.

  Attributes:
    features: size or sizes of the output dims.
    axis: input dim or dims that are contracted.
    dtype: compute dtype; kernel and input are cast to it, or to bfloat16 if the kernel is (`operand_dtype`).
    kernel_init: initializer, called as `kernel_init(rng, [prod(in), prod(features)], float32)`. One that requires five
      arguments, as in T5X's `scalable_t5`, is called with [*in, *features] and the input and output dims.
    kernel_axes: logical axis names of the stored kernel.
    flat_kernel: True to store the kernel as a matrix.
  """

  features: int | Sequence[int]
  axis: int | Sequence[int] = -1
  dtype: Any = jnp.float32
  kernel_init: Initializer = default_kernel_init
  kernel_axes: tuple[str, ...] = ()
  flat_kernel: bool = dataclasses.field(default=True, kw_only=True)

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Project `inputs`.

    Args:
      inputs: <float>[..., *in, ...].

    Returns:
      <dtype>[..., *features]: the dims that are not contracted, in order, then the new dims.
    """
    features = _as_tuple(self.features)
    axis = tuple(a % inputs.ndim for a in _as_tuple(self.axis))
    in_shape = tuple(inputs.shape[a] for a in axis)
    matrix_shape = (math.prod(in_shape), math.prod(features))
    full_shape = in_shape + features

    def init(rng, shape, dtype):
      if _needs_dims(self.kernel_init):
        dims = tuple(range(len(full_shape)))
        return self.kernel_init(
          rng, full_shape, dtype, dims[: len(axis)], dims[len(axis) :]
        ).reshape(shape)
      return self.kernel_init(rng, matrix_shape, dtype).reshape(shape)

    kernel = nn_partitioning.param_with_axes(
      'kernel',
      init,
      matrix_shape if self.flat_kernel else full_shape,
      jnp.float32,
      axes=self.kernel_axes,
    )
    low_rank.declare_site(self)
    outputs = _contract(inputs, kernel.reshape(full_shape), axis, self.dtype)
    adapter = low_rank.find(self)
    if adapter is None:
      return outputs
    # [..., rank]: next to the product with the kernel, so that a frozen kernel needs no product for its gradient.
    hidden = _contract(
      adapter.dropout(self, inputs), adapter.a.reshape(*in_shape, -1), axis, self.dtype
    )
    added = _contract(hidden, adapter.b.reshape(-1, *features), (hidden.ndim - 1,), self.dtype)
    # The name lets rematerialization store the sum in place of both products.
    return ad_checkpoint.checkpoint_name(outputs + added, 'adapted')


def _contract(inputs: jax.Array, kernel: jax.Array, axis: tuple[int, ...], dtype: Any) -> jax.Array:
  """Return <dtype>[..., *features], the product of dims `axis` of the inputs with a kernel [*in, *features]."""
  operands = operand_dtype(kernel, dtype)
  inputs = inputs.astype(operands)
  kernel = kernel.astype(operands)
  features = kernel.shape[len(axis) :]
  if axis == tuple(range(inputs.ndim - len(axis), inputs.ndim)):
    # One matrix product of rows, so that the kernel's gradient contracts one dim. With separate dims for batch and
    # length the CPU compiler makes transposed copies of the operands, which cost as much as the products. Batch comes
    # first, so rows stay sharded over it; with a sharded `length` the reshape would move data.
    num_inputs = math.prod(kernel.shape[: len(axis)])
    rows = jnp.dot(
      inputs.reshape(-1, num_inputs),
      kernel.reshape(num_inputs, -1),
      preferred_element_type=dtype,
    )
    return rows.reshape(*inputs.shape[: axis[0]], *features)
  return lax.dot_general(
    inputs, kernel, ((axis, tuple(range(len(axis)))), ((), ())), preferred_element_type=dtype
  )
