"""Low-rank adapter of a kernel, as the layers that support adapters find it next to the kernel.

The parameters `lora_a` and `lora_b` are in the scope of the kernel. `t5x_lite.adapters` adds them to the parameters of
a model, and before each pass of the network also what only the configuration knows: `lora_scale` and, in training,
`lora_dropout`. So neither networks nor layers pass an option on.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_lite.errors import ConfigError

# Names of the adapter's parameters: kernel dims of the input to the rank, and the rank to those of the output.
LORA_A = 'lora_a'
LORA_B = 'lora_b'
# Arrays of one pass, which broadcast against `lora_a`, so that loops over layers slice them like parameters.
LORA_SCALE = 'lora_scale'
LORA_DROPOUT = 'lora_dropout'
# Sown where a kernel supports an adapter, when the network is initialized.
SITE = 'adapter_site'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
  """Adapter of one kernel, y = x W + dropout(x) A B, whose scale is part of A.

  Attributes:
    a: <float32>[*kernel dims except the output's, rank], multiplied by the scale.
    b: <float32>[rank in place of the input dims, *output dims].
    dropout_rate: float32 scalar; None without dropout.
  """

  a: jax.Array
  b: jax.Array
  dropout_rate: jax.Array | None = None

  def dropout(self, module: nn.Module, x: jax.Array) -> jax.Array:
    """Return the inputs of the adapter, with dropout in training; the module gives the key."""
    if self.dropout_rate is None:
      return x
    keep = 1 - self.dropout_rate
    mask = jax.random.bernoulli(module.make_rng('dropout'), keep, x.shape)
    return jnp.where(mask, x / keep.astype(x.dtype), 0)


def declare_site(module: nn.Module) -> None:
  """Declare that the parameter `kernel` of a module supports an adapter: `find` is called where it is used."""
  if module.is_initializing():
    module.sow('intermediates', SITE, jnp.zeros(()))


def find(module: nn.Module) -> LowRank | None:
  """Return the adapter of the kernel in the scope of a bound module, or None if it has none.

  Raises:
    ConfigError: the scale is missing, so the parameters did not pass `Lora.prepare`.
  """
  if not module.has_variable('params', LORA_A):
    return None

  def read(name: str) -> Any:
    return module.get_variable('params', name)

  if not module.has_variable('params', LORA_SCALE):
    path = '/'.join(module.path)
    raise ConfigError(
      f'The parameters have an adapter ({path}/{LORA_A}), but not its scale, which the model adds. Set '
      '`adapter` of the model, and in a custom model apply the network to `self.network_params(params)`.'
    )
  rate = None
  if module.has_variable('params', LORA_DROPOUT):
    rate = read(LORA_DROPOUT).reshape(-1)[0]
  return LowRank(a=read(LORA_A) * read(LORA_SCALE), b=read(LORA_B), dropout_rate=rate)
