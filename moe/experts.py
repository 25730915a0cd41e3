"""The experts of a layer: T5's feed-forward block with parameters for every expert, or any block of a user's own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from moe.dispatch import MlpParams, MlpSpec
from moe.dispatch.capacity import BUFFER_AXES
from moe.dispatch.sharding import constrain
from moe.routing import Routing
from t5x_lite.layers.dense import Initializer, default_kernel_init
from t5x_lite import checks
from t5x_lite import partitioning
from t5x_lite.errors import ConfigError

partitioning.register_axis_remedy(('expert', 'expert_mlp', 'unmodeled'), (
    'The model has experts, and these are rules for dense models. Use the partitioner for experts, on a single device '
    'too: --gin_file=partitioning/moe_expert_partitions.gin after the run file, or moe.MoePjitPartitioner.'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertMlp:
  """What an expert is: the product of activated projections, dropout, an output projection.

  Attributes:
    dim: hidden units of an expert.
    activations: names (`t5x_lite.layers.ACTIVATIONS`) or elementwise callables, one projection each.
    dropout_rate: of the hidden units; every token and choice has its own mask.
    use_bias: every projection has a bias.
    kernel_init: initialiser of an expert's kernels; each expert draws its own.
  """

  dim: int
  activations: Sequence[str | Callable[[jax.Array], jax.Array]] = ('relu',)
  dropout_rate: float = 0.0
  use_bias: bool = False
  kernel_init: Initializer = default_kernel_init

  def __post_init__(self):
    checks.check_number('ExpertMlp', 'dim', self.dim, at_least=1, integer=True)
    checks.check_number('ExpertMlp', 'dropout_rate', self.dropout_rate, at_least=0, below=1)
    self.spec('float32')

  def spec(self, dtype: Any) -> MlpSpec:
    """Return what dispatch is told of the experts, computing in `dtype`."""
    activations = self.activations if isinstance(self.activations, str) else tuple(self.activations)
    return MlpSpec(activations=activations, dropout_rate=float(self.dropout_rate), dtype=dtype)


class ExpertFactory(Protocol):
  """Builds an expert that is no `ExpertMlp`: any feed-forward block (`t5x_lite.networks.t5.FeedForwardFactory`).

  It is built once and mapped over the experts: called as `block(x, decode=..., deterministic=...)` on <float>[groups,
  places, embed], the places of its buffers. It may have parameters and sow; it must have no other variables.
  """

  def __call__(self, *, name: str) -> nn.Module:
    """Return a module called `name`, a child of the layer that is being built."""
    ...


class _Projections(nn.Module):
  """Kernel and bias of one projection, for every expert."""

  num_experts: int
  shape: tuple[int, int]
  axes: tuple[str, str]
  mlp: ExpertMlp

  @nn.compact
  def __call__(self) -> tuple[jax.Array, jax.Array | None]:
    """Return (float32 [E, *shape], float32 [E, shape[1]] or None)."""

    def init(rng, shape, dtype):
      one = lambda key: self.mlp.kernel_init(key, shape[1:], dtype)
      return jax.vmap(one)(jax.random.split(rng, shape[0]))

    kernel = nn_partitioning.param_with_axes(
        'kernel', init, (self.num_experts, *self.shape), jnp.float32, axes=('expert', *self.axes))
    if not self.mlp.use_bias:
      return kernel, None
    bias = nn_partitioning.param_with_axes(
        'bias', nn.initializers.zeros, (self.num_experts, self.shape[1]), jnp.float32, axes=('expert', self.axes[1]))
    return kernel, bias


class ExpertParams(nn.Module):
  """Holds the parameters of all experts: `wi` (or `wi_0`, `wi_1`, ...) and `wo`.

  Attributes:
    num_experts: E.
    mlp: what an expert is.
  """

  num_experts: int
  mlp: ExpertMlp

  @nn.compact
  def __call__(self, width: int) -> MlpParams:
    """Return the parameters for tokens of size `width`."""
    gated = len(self.mlp.activations) > 1
    names = [f'wi_{i}' if gated else 'wi' for i in range(len(self.mlp.activations))]

    def projection(name, shape, axes):
      return _Projections(self.num_experts, shape, axes, self.mlp, name=name)()

    wi = [projection(name, (width, self.mlp.dim), ('embed', 'expert_mlp')) for name in names]
    wo, wo_bias = projection('wo', (self.mlp.dim, width), ('expert_mlp', 'embed'))
    biases = tuple(bias for _, bias in wi) if self.mlp.use_bias else None
    return MlpParams(wi=tuple(kernel for kernel, _ in wi), wo=wo, wi_bias=biases, wo_bias=wo_bias)


def apply_blocks(
    block: nn.Module, x: jax.Array, routing: Routing, dtype: Any, *, decode: bool, deterministic: bool) -> jax.Array:
  """Apply experts of any kind, by buffers of equal size; see `ExpertFactory`.

  Args:
    block: one expert, to be mapped over all of them.
    x: <float>[G, T, D].
    routing: with a capacity.
    dtype: compute dtype.
    decode: see the protocol of feed-forward blocks.
    deterministic: no dropout.

  Returns:
    <dtype>[G, T, D].
  """
  if 'capacity' not in routing.forms:
    raise ConfigError('MoeLayer: got a factory of experts with a router that returns a '
                      f'{type(routing).__name__}, whose places hold no tokens of their own. Use an ExpertMlp.')
  (token, gates), tokens = routing.placed(), x.astype(dtype).reshape(-1, x.shape[-1])
  # A place without a token points past the end: it reads zeros, and what it makes of them goes nowhere.
  buffers = constrain(jnp.take(tokens, token, axis=0, mode='fill', fill_value=0), BUFFER_AXES)
  mapped = nn_partitioning.vmap_with_axes(
      lambda block, rows: block(rows, decode=decode, deterministic=deterministic),
      in_axes=(0,), variable_axes={'params': 0, 'intermediates': 0}, split_rngs={'params': True, 'dropout': True},
      partitioning_axis_names={'params': 'expert'})
  outputs = constrain(mapped(block, buffers), BUFFER_AXES).astype(jnp.float32) * gates[..., None]
  total = jnp.zeros(tokens.shape, jnp.float32).at[token].add(outputs, mode='drop')
  return total.astype(dtype).reshape(x.shape)
