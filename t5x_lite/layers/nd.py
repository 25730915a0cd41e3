"""Layers whose kernels have a dim per head and per size of a head, as in T5X's `examples/scalable_t5`.

The parameters have the same values as those of the layers with matrices, for the same seed.
"""

import dataclasses
from typing import Literal

import flax.linen as nn
import jax

from t5x_lite.layers import attention
from t5x_lite.layers import dense
from t5x_lite.layers.dense import Initializer


def nd_dense_init(
  scale: float,
  mode: Literal['fan_in', 'fan_out', 'fan_avg'],
  distribution: Literal['normal', 'truncated_normal', 'uniform'],
) -> Initializer:
  """Return a variance-scaling initializer whose input and output dims are arguments of the call.

  Args:
    scale: see `jax.nn.initializers.variance_scaling`.
    mode: 'fan_in', 'fan_out' or 'fan_avg'.
    distribution: 'normal', 'truncated_normal' or 'uniform'.

  Returns:
    Function of (key, shape, dtype, in_axis, out_axis); by default the last two dims. The layers of this package call it
    with the shape of a matrix and without axes.
  """

  def init_fn(key, shape, dtype, in_axis=-2, out_axis=-1) -> jax.Array:
    init = nn.initializers.variance_scaling(scale, mode, distribution, in_axis, out_axis)
    return init(key, shape, dtype)

  return init_fn


class DenseGeneral(dense.DenseGeneral):
  """`layers.DenseGeneral` with the kernel [*in, *features] by default; for its attributes see there."""

  flat_kernel: bool = dataclasses.field(default=False, kw_only=True)


class MultiHeadDotProductAttention(attention.MultiHeadDotProductAttention):
  """`layers.MultiHeadDotProductAttention` with kernels by head by default; for its attributes see there."""

  flat_kernels: bool = dataclasses.field(default=False, kw_only=True)
