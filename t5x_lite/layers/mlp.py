"""The feed-forward block of a layer."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.layers.dense import DenseGeneral, Initializer, default_kernel_init

# Activations by the names that T5 configurations use. `gelu` is the tanh approximation, as in T5 1.1.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    'linear': lambda x: x,
    'relu': nn.relu,
    'gelu': functools.partial(nn.gelu, approximate=True),
    'gelu_exact': functools.partial(nn.gelu, approximate=False),
    'silu': nn.silu,
    'swish': nn.silu,
    'sigmoid': nn.sigmoid,
    'tanh': nn.tanh,
    'elu': nn.elu,
    'selu': nn.selu,
    'softplus': nn.softplus,
}


def activation_fn(activation: str | Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
  """Returns the elementwise function called `activation`; a callable is returned as it is.

  Raises:
    ConfigError: unknown name.

  >>> activation_fn('linear')(3)
  3
  """
  if callable(activation):
    return activation
  if activation not in ACTIVATIONS:
    raise ConfigError(f'unknown activation {activation!r}.{did_you_mean(str(activation), ACTIVATIONS)}')
  return ACTIVATIONS[activation]


class MlpBlock(nn.Module):
  """Feed-forward block: the product of activated projections `wi`, dropout, projection `wo`.

  One activation is T5 1.0's block (kernel `wi`), `('gelu', 'linear')` the gated one of T5 1.1 (kernels `wi_0`, `wi_1`).
  Shazeer 2020, https://arxiv.org/abs/2002.05202, section 2.

  Attributes:
    intermediate_dim: size of the hidden dim.
    activations: names (`ACTIVATIONS`) or callables, one projection each.
    kernel_init: initialiser of all kernels.
    intermediate_dropout_rate: dropout of the hidden dim; one mask for all positions of a sequence.
    dtype: compute dtype.
  """

  intermediate_dim: int = 2048
  activations: Sequence[str | Callable[[jax.Array], jax.Array]] = ('relu',)
  kernel_init: Initializer = default_kernel_init
  intermediate_dropout_rate: float = 0.1
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array, decode: bool = False, deterministic: bool = False) -> jax.Array:
    """Transforms every position.

    Args:
      inputs: <float>[batch, length, embed].
      decode: a cached decoding step; this block treats positions alone, so it makes no difference here. Part of the
        feed-forward protocol because blocks that mix positions need it.
      deterministic: no dropout.

    Returns:
      <dtype>[batch, length, embed].
    """
    del decode
    branches = []
    for i, activation in enumerate(self.activations):
      branch = DenseGeneral(
          self.intermediate_dim, dtype=self.dtype, kernel_init=self.kernel_init, kernel_axes=('embed', 'mlp'),
          name='wi' if len(self.activations) == 1 else f'wi_{i}')(inputs)
      branches.append(activation_fn(activation)(branch))
    hidden = functools.reduce(operator.mul, branches)
    hidden = nn.Dropout(rate=self.intermediate_dropout_rate, broadcast_dims=(-2,))(hidden, deterministic=deterministic)
    hidden = nn_partitioning.with_sharding_constraint(hidden, ('batch', 'length', 'mlp'))
    return DenseGeneral(
        inputs.shape[-1], dtype=self.dtype, kernel_init=self.kernel_init, kernel_axes=('mlp', 'embed'),
        name='wo')(hidden)
