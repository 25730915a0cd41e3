"""Linear projections without bias, over one or several dims at once."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import dataclasses
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning
from jax import lax

Initializer = Callable[..., jax.Array]

# T5's initialiser for feed-forward and output kernels; attention kernels use the untruncated normal.
default_kernel_init = nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
  return (value,) if isinstance(value, int) else tuple(value)


class DenseGeneral(nn.Module):
  """A linear map of the dims `axis` of its input to the new trailing dims `features`, without bias.

  The kernel is one float32 parameter `kernel`. T5X has two forms of it, whose checkpoints differ: a matrix
  [prod(in), prod(features)] (`flat_kernel`, the `t5` layout) and the unflattened [*in, *features] (the `scalable_t5`
  layout). The two hold the same numbers for the same seed.

  Attributes:
    features: size or sizes of the output dims.
    axis: input dim or dims that are contracted.
    dtype: compute dtype; kernel and input are cast to it.
    kernel_init: initialiser, called as `kernel_init(rng, [prod(in), prod(features)], float32)`.
    kernel_axes: logical axis names of the kernel as it is stored.
    flat_kernel: store the kernel as a matrix.
  """

  features: int | Sequence[int]
  axis: int | Sequence[int] = -1
  dtype: Any = jnp.float32
  kernel_init: Initializer = default_kernel_init
  kernel_axes: tuple[str, ...] = ()
  flat_kernel: bool = dataclasses.field(default=True, kw_only=True)

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Projects `inputs`.

    Args:
      inputs: <float>[..., *in, ...].

    Returns:
      <dtype>[..., *features]: the dims that are not contracted, in their order, then the new ones.
    """
    features = _as_tuple(self.features)
    axis = tuple(a % inputs.ndim for a in _as_tuple(self.axis))
    in_shape = tuple(inputs.shape[a] for a in axis)
    matrix_shape = (math.prod(in_shape), math.prod(features))
    full_shape = in_shape + features

    def init(rng, shape, dtype):
      return self.kernel_init(rng, matrix_shape, dtype).reshape(shape)

    kernel = nn_partitioning.param_with_axes(
        'kernel', init, matrix_shape if self.flat_kernel else full_shape, jnp.float32, axes=self.kernel_axes)
    inputs, kernel = inputs.astype(self.dtype), kernel.astype(self.dtype)
    if axis == tuple(range(inputs.ndim - len(axis), inputs.ndim)):
      # One matrix product of rows: the kernel's gradient then contracts one dim. Over batch and length separately, the
      # CPU compiler writes out transposed copies of the operands, which costs as much as the products. Batch comes
      # first, so rows stay sharded over it; sharding `length` as well would move data here.
      rows = inputs.reshape(-1, matrix_shape[0])
      return (rows @ kernel.reshape(matrix_shape)).reshape(*inputs.shape[:axis[0]], *features)
    return lax.dot_general(inputs, kernel.reshape(full_shape), ((axis, tuple(range(len(axis)))), ((), ())))
