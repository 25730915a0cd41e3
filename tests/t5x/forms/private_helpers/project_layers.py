"""Layers of a project that uses private helpers of T5X's modules, as copies of T5X's layers do.

In T5X all these names exist: a dense layer over any dims, a bias per row, and a state of another optimizer.
"""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import jax.numpy as jnp
from t5x import adafactor
from t5x import checkpoints
from t5x import decoding
from t5x import optimizers
from t5x import utils
from t5x.examples.t5 import layers
from t5x.infer import _Inferences
from t5x.partitioning import OtherMesh
from t5x.partitioning import TpuMesh

_is_tracer = decoding._is_tracer
Mesh = TpuMesh | OtherMesh
FactorRules = dict[str, adafactor.FactorRule]
Results = Sequence[_Inferences]


class Projection(nn.Module):
  """`activation(inputs @ kernel)` over the dims `axis`."""

  features: int
  axis: Any = -1
  activation: str = 'gelu'

  @nn.compact
  def __call__(self, inputs):
    axes = layers._normalize_axes(layers._canonicalize_tuple(self.axis), inputs.ndim)
    sizes = tuple(inputs.shape[axis] for axis in axes)
    kernel = self.param('kernel', layers.default_embed_init, (*sizes, self.features))
    outputs = jnp.tensordot(inputs, kernel, (axes, tuple(range(len(axes)))))
    return layers._convert_to_activation_function(self.activation)(outputs)


def rows_of_bias(bias, index):
  """Return the rows [batch, heads, 1, length] of a bias [1, heads, length, length] at the indices of a batch."""
  return layers.dynamic_vector_slice_in_dim(jnp.squeeze(bias, 0), index, 1, -2)


def number_of_beams(num_decodes):
  """Return the number of a static argument."""
  assert not _is_tracer(num_decodes)
  return int(utils.get_local_data(jnp.asarray(num_decodes)))


def momentum_of(state):
  """Return the momentum of all parameters, which a transformation of checkpoints reads."""
  flat = optimizers.unfreeze(optimizers.freeze(state))
  arrays = {
    name: value for name, value in flat.items() if not isinstance(value, checkpoints.LazyArray)
  }
  return {
    name: adafactor._AdafactorParamState(None, None, None, each).m for name, each in arrays.items()
  }
