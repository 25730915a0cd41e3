"""Feed-forward block of a layer."""

from collections.abc import Callable, Mapping, Sequence
import functools
import operator
from typing import Any

import flax.linen as nn
from flax.linen.spmd import with_logical_constraint
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.layers.dense import DenseGeneral
from t5x_lite.layers.dense import Initializer
from t5x_lite.layers.dense import default_kernel_init

# Activations by their names in T5 configurations. `gelu` is the tanh approximation, as in T5 1.1.
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


def activation_fn(
  activation: str | Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
  """Return the function named `activation`, elementwise on any shape; a callable is returned unchanged.

  Raises:
    ConfigError: unknown name.

  >>> activation_fn('linear')(3)
  3
  """
  if callable(activation):
    return activation
  checks.check('', {'activation': activation}, activation=checks.one_of(ACTIVATIONS))
  return ACTIVATIONS[activation]


class MlpBlock(nn.Module):
  """Feed-forward block: the product of activated projections `wi`, dropout, projection `wo`.

  One activation is T5 1.0's block (kernel `wi`), `('gelu', 'linear')` T5 1.1's gated block (kernels `wi_0`, `wi_1`).
  Shazeer 2020, https://arxiv.org/abs/2002.05202, section 2.

  Attributes:
    intermediate_dim: size of the hidden dim.
    activations: names (`ACTIVATIONS`) or callables, one per projection.
    kernel_init: initializer of all kernels.
    intermediate_dropout_rate: dropout of the hidden dim; one mask for all positions of a sequence.
    dtype: compute dtype.
  """

  intermediate_dim: int = 2048
  activations: Sequence[str | Callable[[jax.Array], jax.Array]] = ('relu',)
  kernel_init: Initializer = default_kernel_init
  intermediate_dropout_rate: float = 0.1
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, inputs: jax.Array, decode: bool = False, deterministic: bool = False
  ) -> jax.Array:
    """Transform every position.

    Args:
      inputs: <float>[batch, length, embed].
      decode: True for a decoding step; ignored here, for blocks that mix positions.
      deterministic: True for no dropout.

    Returns:
      <dtype>[batch, length, embed].
    """
    del decode
    branches = []
    for i, activation in enumerate(self.activations):
      name = f'wi_{i}'
      if len(self.activations) == 1:
        name = 'wi'
      # [batch, length, mlp]
      branch = DenseGeneral(
        self.intermediate_dim,
        dtype=self.dtype,
        kernel_init=self.kernel_init,
        kernel_axes=('embed', 'mlp'),
        name=name,
      )(inputs)
      branch = checkpoint_name(branch, 'mlp_hidden')
      branches.append(activation_fn(activation)(branch))
    # Several branches gate each other, as in the gated units of T5 1.1.
    hidden = functools.reduce(operator.mul, branches)
    hidden = nn.Dropout(rate=self.intermediate_dropout_rate, broadcast_dims=(-2,))(
      hidden, deterministic=deterministic
    )
    hidden = with_logical_constraint(hidden, ('batch', 'length', 'mlp'))
    out = DenseGeneral(
      inputs.shape[-1],
      dtype=self.dtype,
      kernel_init=self.kernel_init,
      kernel_axes=('mlp', 'embed'),
      name='wo',
    )(hidden)
    return checkpoint_name(out, 'mlp_output')
