"""Inputs and results of dispatch: parameters and computation of experts, and statistics of drops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.layers import activation_fn

# Dims: G groups, T tokens of a group, K choices of a token, E experts, C slots of an expert's buffer, D width, F hidden
# units, N rows (one per choice of a token).


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
    """Number of experts, E."""
    return self.wo.shape[0]

  @classmethod
  def from_tree(cls, tree: Mapping[str, Mapping[str, jax.Array]]) -> MlpParams:
    """Return the parameters of a layer's subtree `expert/`.

    Args:
      tree: `wi`, or `wi_0`, `wi_1`, ..., and `wo`, each with a `kernel` and optionally a `bias`, of the attributes'
        shapes.
    """
    if 'wi' in tree:
      names = ['wi']
    else:
      names = sorted(name for name in tree if name.startswith('wi_'))
    has_bias = 'bias' in tree['wo']
    wi_bias = None
    wo_bias = None
    if has_bias:
      wi_bias = tuple(tree[name]['bias'] for name in names)
      wo_bias = tree['wo']['bias']
    return cls(
      wi=tuple(tree[name]['kernel'] for name in names),
      wo=tree['wo']['kernel'],
      wi_bias=wi_bias,
      wo_bias=wo_bias,
    )


@dataclasses.dataclass(frozen=True)
class MlpSpec:
  """Computation of an expert: product of activated projections, dropout, output projection.

  Attributes:
    activations: names (`t5x_lite.layers.ACTIVATIONS`) or elementwise callables, one per kernel of `MlpParams.wi`.
    dropout_rate: share of the hidden units that dropout sets to 0 in training.
    dtype: compute dtype. Gradients of parameters have the parameters' dtype.
  """

  activations: tuple[str | Callable[[jax.Array], jax.Array], ...] = ('relu',)
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  def __post_init__(self):
    checks.check(
      'MlpSpec',
      vars(self),
      activations=checks.Expectation(
        "a tuple of names or functions, such as ('gelu', 'linear')",
        lambda names: isinstance(names, tuple) and len(names) > 0,
      ),
      dropout_rate=checks.number(at_least=0, below=1),
      dtype=checks.Expectation(
        'a floating-point dtype', lambda dtype: jnp.issubdtype(dtype, jnp.floating)
      ),
    )
    for activation in self.activations:
      activation_fn(activation)

  @property
  def activation_fns(self) -> tuple[Callable[[jax.Array], jax.Array], ...]:
    """The activations as functions."""
    return tuple(activation_fn(activation) for activation in self.activations)


@flax.struct.dataclass
class DispatchStats:
  """Statistics of dispatch.

  Attributes:
    receive_drops: float32 [], share of the routed choices that exceeded the receive buffers of an expert shard
      (`receive_factor`), without choices that the router dropped. 0 on a single device, which has no such buffers.
  """

  receive_drops: jax.Array


def check_params(params: MlpParams, spec: MlpSpec, width: int) -> None:
  """Raise ConfigError unless the shapes of `params` are consistent with `spec` and inputs of size `width`.

  Args:
    params: parameters of the experts.
    spec: computation of an expert.
    width: size of the inputs, D.
  """
  num_experts, hidden, out_width = params.wo.shape
  count = len(spec.activations)
  expected: dict[str, Any] = {
    'wi': [(num_experts, width, hidden)] * count,
    'wo': (num_experts, hidden, width),
    'wi_bias': None,
    'wo_bias': None,
  }
  if params.wi_bias is not None:
    expected['wi_bias'] = [(num_experts, hidden)] * count
  if params.wo_bias is not None:
    expected['wo_bias'] = (num_experts, out_width)
  shapes = {}
  expectations = {}
  for name, shape in expected.items():
    value = getattr(params, name)
    if isinstance(value, (tuple, list)):
      shapes[name] = [array.shape for array in value]
    else:
      shapes[name] = getattr(value, 'shape', None)
    expectations[name] = checks.Expectation(
      f'of shape {shape} for inputs of size {width} and activations {spec.activations}',
      lambda got, shape=shape: got == shape,
    )
  checks.check('MlpParams', shapes, **expectations)
