"""Experts of a layer: T5's feed-forward block with parameters for every expert, or a custom block."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol, cast

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp

from moe.dispatch import MlpParams
from moe.dispatch import MlpSpec
from moe.dispatch.capacity import BUFFER_AXES
from moe.dispatch.sharding import constrain
from moe.routing.result import Routing
from moe.routing.types import ChoiceRouting
from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.layers import low_rank
from t5x_lite.layers.dense import Initializer
from t5x_lite.layers.dense import default_kernel_init

partitioning.register_axis_remedy(
  ('expert', 'expert_mlp', 'unmodeled'),
  (
    'The rules are for dense models, but the model has experts. Use the partitioner for experts, also on one device: '
    '--gin_file=partitioning/moe_expert_partitions.gin after the run file, or moe.MoePjitPartitioner.'
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertMlp:
  """Hyper-parameters of an expert: product of activated projections, dropout, output projection.

  Attributes:
    dim: number of hidden units of an expert.
    activations: names (`t5x_lite.layers.ACTIVATIONS`) or elementwise callables, one per projection.
    dropout_rate: dropout rate of the hidden units; every choice of every token has a separate mask.
    use_bias: True for biases in all projections.
    kernel_init: initializer of the kernels of one expert; experts have different random keys.
  """

  dim: int
  activations: Sequence[str | Callable[[jax.Array], jax.Array]] = ('relu',)
  dropout_rate: float = 0.0
  use_bias: bool = False
  kernel_init: Initializer = default_kernel_init

  def __post_init__(self):
    checks.check(
      'ExpertMlp',
      vars(self),
      dim=checks.number(at_least=1, integer=True),
      dropout_rate=checks.number(at_least=0, below=1),
    )
    self.spec('float32')

  def spec(self, dtype: Any) -> MlpSpec:
    """Return the computation of an expert for dispatch, in the compute dtype `dtype`."""
    activations = self.activations
    if not isinstance(activations, str):
      activations = tuple(activations)
    activations = cast(Any, activations)  # `MlpSpec` rejects a string.
    return MlpSpec(activations=activations, dropout_rate=float(self.dropout_rate), dtype=dtype)


class ExpertFactory(Protocol):
  """Factory of custom experts: any feed-forward block (`t5x_lite.networks.t5.FeedForwardFactory`).

  The block is mapped over the experts and called as `block(x, decode=..., deterministic=...)` on <float>[groups, slots,
  embed], the slots of a buffer. It may have parameters and sow, but no other variables.
  """

  def __call__(self, *, name: str) -> nn.Module:
    """Return a module named `name`, a child of the current layer."""
    ...


class _Projections(nn.Module):
  """Kernels and biases of one projection, for all experts."""

  num_experts: int
  shape: tuple[int, int]
  axes: tuple[str, str]
  mlp: ExpertMlp

  @nn.compact
  def __call__(self) -> tuple[jax.Array, jax.Array | None]:
    """Return (float32 [E, *shape], float32 [E, shape[1]] or None)."""

    def init(rng, shape, dtype):
      def one(key):
        return self.mlp.kernel_init(key, shape[1:], dtype)

      return jax.vmap(one)(jax.random.split(rng, shape[0]))

    kernel = nn_partitioning.param_with_axes(
      'kernel', init, (self.num_experts, *self.shape), jnp.float32, axes=('expert', *self.axes)
    )
    low_rank.declare_site(self)
    adapter = low_rank.find(self)
    if adapter is not None:
      kernel = _with_adapter(kernel, adapter)
    if not self.mlp.use_bias:
      return kernel, None
    bias = nn_partitioning.param_with_axes(
      'bias',
      nn.initializers.zeros,
      (self.num_experts, self.shape[1]),
      jnp.float32,
      axes=('expert', self.axes[1]),
    )
    return kernel, bias


def _with_adapter(kernel: jax.Array, adapter: low_rank.LowRank) -> jax.Array:
  """Return float32 [E, in, out], the sum of W and A B, so that all forms of dispatch compute one product.

  Args:
    kernel: <float>[E, in, out].
    adapter: adapter of each expert.

  Raises:
    ConfigError: the adapter has dropout, which would be different for each token.
  """
  if adapter.dropout_rate is not None:
    raise errors.ConfigError(
      "`Lora.dropout_rate` must be 0 with experts' kernels among the targets, since the product of an adapter is added "
      'to the kernel. Set it to 0, or narrow `Lora.targets`.'
    )
  update = jnp.einsum('eir,ero->eio', adapter.a, adapter.b)
  return kernel.astype(jnp.float32) + update


class ExpertParams(nn.Module):
  """Parameters of all experts: `wi` (or `wi_0`, `wi_1`, ...) and `wo`.

  Attributes:
    num_experts: number of experts, E.
    mlp: hyper-parameters of an expert.
  """

  num_experts: int
  mlp: ExpertMlp

  @nn.compact
  def __call__(self, width: int) -> MlpParams:
    """Return the parameters for tokens of size `width`."""
    names = ['wi']
    if len(self.mlp.activations) > 1:  # gated
      names = [f'wi_{i}' for i in range(len(self.mlp.activations))]

    def projection(name, shape, axes):
      return _Projections(self.num_experts, shape, axes, self.mlp, name=name)()

    kernels = []
    biases = []
    for name in names:
      kernel, bias = projection(name, (width, self.mlp.dim), ('embed', 'expert_mlp'))
      kernels.append(kernel)
      biases.append(bias)
    wo, wo_bias = projection('wo', (self.mlp.dim, width), ('expert_mlp', 'embed'))
    wi_bias = None
    if self.mlp.use_bias:
      wi_bias = tuple(biases)
    return MlpParams(wi=tuple(kernels), wo=wo, wi_bias=wi_bias, wo_bias=wo_bias)


def apply_blocks(
  block: nn.Module, x: jax.Array, routing: Routing, dtype: Any, *, decode: bool, deterministic: bool
) -> jax.Array:
  """Apply custom experts to buffers of equal size; see `ExpertFactory`.

  Args:
    block: module of one expert, mapped over all experts.
    x: <float>[G, T, D].
    routing: routing with a capacity.
    dtype: compute dtype.
    decode: argument of feed-forward blocks.
    deterministic: True for no dropout.

  Returns:
    <dtype>[G, T, D].
  """
  if 'capacity' not in routing.forms:
    raise checks.invalid(
      'MoeLayer',
      'expert',
      f'an ExpertMlp with a router that returns a {type(routing).__name__}',
      type(block).__name__,
    )
  token, gates = cast(ChoiceRouting, routing).slots()
  tokens = x.astype(dtype).reshape(-1, x.shape[-1])
  # [experts, groups, slots, width]: empty slots point past the end: they read zeros, and their outputs are dropped.
  buffers = constrain(jnp.take(tokens, token, axis=0, mode='fill', fill_value=0), BUFFER_AXES)

  def apply_block(block, rows):
    return block(rows, decode=decode, deterministic=deterministic)

  mapped = nn_partitioning.vmap_with_axes(
    apply_block,
    in_axes=(0,),  # pyright: ignore[reportArgumentType]  # Flax passes it to jax.vmap, which takes tuples.
    variable_axes={'params': 0, 'intermediates': 0},
    split_rngs={'params': True, 'dropout': True},
    partitioning_axis_names={'params': 'expert'},
  )
  outputs = constrain(mapped(block, buffers), BUFFER_AXES).astype(jnp.float32)
  weighted = outputs * gates[..., None]
  # [groups * tokens, width]: float32, since a token sums outputs of several experts.
  total = jnp.zeros(tokens.shape, jnp.float32).at[token].add(weighted, mode='drop')
  return total.astype(dtype).reshape(x.shape)
