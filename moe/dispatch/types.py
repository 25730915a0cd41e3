"""What dispatch takes and returns: the experts' parameters, what an expert computes, and what was lost on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_lite.errors import ConfigError
from t5x_lite.layers import activation_fn

# Letters of shapes: G groups, T tokens of a group, K choices of a token, E experts, C places in an expert's buffer,
# D width, F hidden, N rows (one per choice of a token).


@flax.struct.dataclass
class MlpParams:
  """Parameters of E feed-forward blocks, stacked over experts.

  Attributes:
    wi: one kernel <float>[E, D, F] per activation.
    wo: <float>[E, F, D].
    wi_bias: one bias <float>[E, F] per activation, or None.
    wo_bias: <float>[E, D], or None.
  """

  wi: tuple[jax.Array, ...]
  wo: jax.Array
  wi_bias: tuple[jax.Array, ...] | None = None
  wo_bias: jax.Array | None = None

  @property
  def num_experts(self) -> int:
    """E."""
    return self.wo.shape[0]

  @classmethod
  def from_tree(cls, tree: Mapping[str, Mapping[str, jax.Array]]) -> MlpParams:
    """Return the parameters that a layer holds under `expert/`: `wi` or `wi_0`, `wi_1`, ..., and `wo`, each with a
    `kernel` and perhaps a `bias`."""
    names = ['wi'] if 'wi' in tree else sorted(name for name in tree if name.startswith('wi_'))
    has_bias = 'bias' in tree['wo']
    return cls(
        wi=tuple(tree[name]['kernel'] for name in names), wo=tree['wo']['kernel'],
        wi_bias=tuple(tree[name]['bias'] for name in names) if has_bias else None,
        wo_bias=tree['wo']['bias'] if has_bias else None)


@dataclasses.dataclass(frozen=True)
class MlpSpec:
  """What an expert computes: the product of its activated projections, dropout, an output projection.

  Attributes:
    activations: names (`t5x_lite.layers.ACTIVATIONS`) or elementwise callables, one per kernel of `MlpParams.wi`.
    dropout_rate: share of the hidden units that dropout sets to zero in training.
    dtype: compute dtype. Gradients of parameters are in the parameters' dtype.
  """

  activations: tuple[str | Callable[[jax.Array], jax.Array], ...] = ('relu',)
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    if isinstance(self.activations, str) or not isinstance(self.activations, Sequence) or not self.activations:
      raise ConfigError(f'activations is {self.activations!r}; expected a tuple of at least one name or function, '
                        "such as ('gelu', 'linear').")
    if not isinstance(self.activations, tuple):
      raise ConfigError(f'activations is a {type(self.activations).__name__}; expected a tuple, which can be hashed.')
    for activation in self.activations:
      activation_fn(activation)
    if not 0.0 <= self.dropout_rate < 1.0:
      raise ConfigError(f'dropout_rate is {self.dropout_rate!r}; expected 0 <= rate < 1.')
    if not jnp.issubdtype(self.dtype, jnp.floating):
      raise ConfigError(f'dtype is {self.dtype!r}; expected a floating-point dtype such as float32 or bfloat16.')

  @property
  def activation_fns(self) -> tuple[Callable[[jax.Array], jax.Array], ...]:
    """The activations as functions."""
    return tuple(activation_fn(activation) for activation in self.activations)


@flax.struct.dataclass
class DispatchStats:
  """What became of the choices between routing and experts.

  Attributes:
    receive_drops: float32 []; share of the choices that were to be computed and found no place in the receive buffers
      of an expert shard (`receive_factor`). Choices that the router dropped are not among them: the routing counts
      those. 0 on a single device, which has no such buffers.
  """

  receive_drops: jax.Array


def check_params(params: MlpParams, spec: MlpSpec, width: int) -> None:
  """Raise ConfigError unless `params` have the shapes that `spec` and inputs of size `width` ask for."""
  num_experts, hidden, out_width = params.wo.shape
  if len(params.wi) != len(spec.activations):
    raise ConfigError(f'{len(params.wi)} input kernels for {len(spec.activations)} activations {spec.activations!r}; '
                      'expected one kernel per activation.')
  expected = {f'wi[{i}]': (kernel, (num_experts, width, hidden)) for i, kernel in enumerate(params.wi)}
  expected['wo'] = (params.wo, (num_experts, hidden, width))
  if params.wi_bias is not None:
    if len(params.wi_bias) != len(params.wi):
      raise ConfigError(f'{len(params.wi_bias)} biases for {len(params.wi)} input kernels; expected one each, or None.')
    expected |= {f'wi_bias[{i}]': (bias, (num_experts, hidden)) for i, bias in enumerate(params.wi_bias)}
  if params.wo_bias is not None:
    expected['wo_bias'] = (params.wo_bias, (num_experts, out_width))
  for name, (array, shape) in expected.items():
    if array.shape != shape:
      raise ConfigError(f'{name} has shape {array.shape}; expected {shape} for {num_experts} experts, inputs of size '
                        f'{width} and {hidden} hidden units.')
