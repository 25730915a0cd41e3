"""What routers have in common: options, padding, noise, and the router's weights."""

import abc
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning as nn_partitioning

from moe.routing.result import Routing
from moe.routing.types import RecordedChoice
from t5x_lite.errors import ConfigError
from t5x_lite.layers.dense import Initializer
from t5x_lite import checks

# T5X's: wider than the variance-scaled initialisers of other kernels.
default_router_init = nn.initializers.normal(stddev=2e-2)
default_bias_init = nn.initializers.zeros


class _Dense(nn.Module):
  """The router's linear map, with T5X's parameter names `kernel` and `bias`."""

  num_experts: int
  use_bias: bool
  kernel_init: Initializer
  bias_init: Initializer

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = nn_partitioning.param_with_axes(
        'kernel', self.kernel_init, (x.shape[-1], self.num_experts), jnp.float32, axes=('embed', 'unmodeled'))
    rows = _undivided(x.astype(jnp.float32)).reshape(-1, x.shape[-1])
    # Full float32, also where the backend multiplies float32 with less: choices hang on the last bits.
    logits = jnp.matmul(rows, _undivided(kernel.astype(jnp.float32), num_dims=2), precision=jax.lax.Precision.HIGHEST)
    if self.use_bias:
      bias = nn_partitioning.param_with_axes(
          'bias', self.bias_init, (self.num_experts,), jnp.float32, axes=('unmodeled',))
      logits += bias.astype(jnp.float32)
    return logits.reshape(*x.shape[:-1], self.num_experts)


class RouterWeights(nn.Module):
  """Maps tokens to the logits of experts, in float32.

  Parameters: `w/kernel` float32 [D, E] and, with `use_bias`, `w/bias` float32 [E].

  Attributes:
    num_experts: E.
    use_bias: add a bias.
    kernel_init: initialiser of the kernel.
    bias_init: initialiser of the bias.
  """

  num_experts: int
  use_bias: bool = False
  kernel_init: Initializer = default_router_init
  bias_init: Initializer = default_bias_init

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Return float32 [..., E] for `x` <float>[..., D]."""
    return _Dense(self.num_experts, self.use_bias, self.kernel_init, self.bias_init, name='w')(x)


class Router(nn.Module):
  """Abstract: assigns tokens to experts.

  Everything is in the global view and in float32 whatever the dtype of the tokens: results depend on neither mesh nor
  number of devices. A group is routed by itself.

  Attributes:
    num_experts: number of experts of the layer, E.
    jitter_noise: in training, tokens as the router sees them are multiplied by numbers drawn uniformly from
      [1 - jitter_noise, 1 + jitter_noise], with the key stream 'jitter'.
      https://arxiv.org/abs/2101.03961, appendix C.
    ignore_padding_tokens: padding is not routed. Padding is what `token_mask` says; without a mask, tokens that are
      all zero.
    padding_in_losses: the means of the losses are over padding too, as in T5X: ignored padding adds log(E)^2 to the
      z-loss, and the losses shrink as it grows. False: over the tokens that are routed.
    use_bias: the router's linear map has a bias.
    kernel_init: initialiser of its kernel.
    bias_init: initialiser of its bias.
  """

  num_experts: int
  jitter_noise: float = 0.0
  ignore_padding_tokens: bool = True
  padding_in_losses: bool = True
  use_bias: bool = False
  kernel_init: Initializer = default_router_init
  bias_init: Initializer = default_bias_init

  def __post_init__(self):
    self._check()
    super().__post_init__()

  def _check(self) -> None:
    """Refuses options; raises ConfigError."""
    owner = type(self).__name__
    checks.check_number(owner, 'num_experts', self.num_experts, at_least=1, integer=True)
    checks.check_number(owner, 'jitter_noise', self.jitter_noise, at_least=0, below=1)
    if not self.padding_in_losses and not self.ignore_padding_tokens:
      raise ConfigError(f'{owner}: padding_in_losses is False, but ignore_padding_tokens is False too, so that no '
                        'token counts as padding. Set ignore_padding_tokens=True, or leave padding_in_losses alone.')
    if self.bias_init is not default_bias_init and not self.use_bias:
      raise ConfigError(f'{owner}: bias_init is set, but use_bias is False: there is no bias. Set use_bias=True, or '
                        'leave bias_init alone.')

  @property
  def capacity_options(self) -> tuple[str, ...]:
    """Names of the options set that act only under a capacity: without one in any mode they have no effect."""
    return ()

  @property
  def losses(self) -> tuple[str, ...]:
    """Names of the losses that the router has; the others are 0 always."""
    return ('auxiliary_loss', 'router_z_loss')

  @property
  def shares_capacity(self) -> bool:
    """True if all groups share one buffer per expert, so that a group's drops depend on the other groups."""
    return False

  @property
  def needs_capacity(self) -> bool:
    """True if the router has no dropless form: how many tokens an expert gets is decided by its capacity alone."""
    return False

  @property
  def record_name(self) -> str:
    """Name of the decisions that the router can repeat, see `Routing.record`."""
    return 'expert_index'

  @property
  def uses_later_tokens(self) -> str:
    """When the routing of a token depends on later ones: 'never', in 'training', or 'always'. Decoders warn of it."""
    return 'never'

  @property
  def needs_token_ids(self) -> bool:
    """True if the router routes by token ids."""
    return False

  @nn.compact
  def __call__(
      self, x: jax.Array, *, capacity: int | None, token_mask: jax.Array | None = None,
      token_ids: jax.Array | None = None, deterministic: bool = False,
      recorded: RecordedChoice | None = None) -> Routing:
    """Route tokens.

    Args:
      x: <float>[G, T, D].
      capacity: places that each expert has for a group; None: as many as it takes (dropless).
      token_mask: bool [G, T], False for padding; see `ignore_padding_tokens`.
      token_ids: int32 [G, T], for routers that go by them.
      deterministic: no noise, no change of the router's state, and what a router else does in training only.
      recorded: choices to repeat instead of choosing.

    Returns:
      The routing.

    Raises:
      ConfigError: arguments that do not fit each other or the router.
    """
    self._check_inputs(x, capacity, token_mask, token_ids)
    token_mask = self._routed_tokens(x, token_mask)
    return self.route(x, capacity, token_mask, token_ids, deterministic, recorded)

  @abc.abstractmethod
  def route(
      self, x: jax.Array, capacity: int | None, token_mask: jax.Array | None, token_ids: jax.Array | None,
      deterministic: bool, recorded: RecordedChoice | None) -> Routing:
    """Route tokens after checks; `token_mask` is None where no token is ignored."""

  def _check_inputs(self, x, capacity, token_mask, token_ids):
    owner = type(self).__name__
    if x.ndim != 3:
      raise ConfigError(f'{owner} got tokens of shape {x.shape}; expected [groups, tokens of a group, width].')
    checks.check_number(owner, 'capacity', capacity, at_least=1, integer=True, optional=True)
    for name, array in (('token_mask', token_mask), ('token_ids', token_ids)):
      if array is not None and array.shape != x.shape[:2]:
        raise ConfigError(f'{owner} got {name} of shape {array.shape} for tokens of shape {x.shape}; expected '
                          f'{x.shape[:2]}. Divide it into groups as the tokens are.')

  def _routed_tokens(self, x, token_mask):
    """Return bool [G, T], the tokens that are routed; None for all."""
    if not self.ignore_padding_tokens:
      return None
    return jnp.any(x != 0, axis=-1) if token_mask is None else token_mask.astype(bool)

  def logits(self, x: jax.Array, deterministic: bool) -> jax.Array:
    """Return float32 [G, T, E], with noise in training."""
    x = x.astype(jnp.float32)
    if self.jitter_noise > 0 and not deterministic and not self.is_initializing():
      x *= self._jitter(x.shape)
    return RouterWeights(
        self.num_experts, self.use_bias, self.kernel_init, self.bias_init, name='router_weights')(x)

  def _jitter(self, shape: tuple[int, ...]) -> jax.Array:
    if not self.has_rng('jitter'):
      raise ConfigError(f"{type(self).__name__}: jitter_noise is {self.jitter_noise}, but the call has no keys for it. "
                        "Pass rngs={'jitter': key} to the network, or set jitter_noise=0.")
    return jax.random.uniform(
        self.make_rng('jitter'), shape, jnp.float32, 1.0 - self.jitter_noise, 1.0 + self.jitter_noise)


def _undivided(x: jax.Array, num_dims: int = 1) -> jax.Array:
  """Keep the last `num_dims` dims of `x` whole on every device, and the rest as it is.

  Sums over the width in one order everywhere, so that choices do not hang on the mesh.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return x
  free = jax.sharding.PartitionSpec.UNCONSTRAINED
  return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(
      *[free] * (x.ndim - num_dims), *[None] * num_dims))
