"""Base class of routers: options, padding, noise, and the router's weights."""

import abc
import dataclasses

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp

from moe.routing.result import Routing
from moe.routing.types import RecordedChoice
from t5x_lite import checks
from t5x_lite.layers.dense import Initializer

# T5X's initializer, with a larger variance than the initializers of other kernels.
default_router_init = nn.initializers.normal(stddev=2e-2)
default_bias_init = nn.initializers.zeros


class _Dense(nn.Module):
  """Linear projection of the router, with T5X's parameter names `kernel` and `bias`."""

  num_experts: int
  use_bias: bool
  kernel_init: Initializer
  bias_init: Initializer

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = nn_partitioning.param_with_axes(
      'kernel',
      self.kernel_init,
      (x.shape[-1], self.num_experts),
      jnp.float32,
      axes=('embed', 'unmodeled'),
    )
    # [groups * tokens, width] and [width, experts]: float32 for any dtype of the tokens.
    rows = _replicate_last_dims(x.astype(jnp.float32)).reshape(-1, x.shape[-1])
    kernel = _replicate_last_dims(kernel.astype(jnp.float32), num_dims=2)
    # Highest precision on all backends, since choices depend on the last bits.
    logits = jnp.matmul(rows, kernel, precision=jax.lax.Precision.HIGHEST)
    if self.use_bias:
      bias = nn_partitioning.param_with_axes(
        'bias', self.bias_init, (self.num_experts,), jnp.float32, axes=('unmodeled',)
      )
      logits += bias.astype(jnp.float32)
    return logits.reshape(*x.shape[:-1], self.num_experts)


class RouterWeights(nn.Module):
  """Projection of tokens to the logits of experts, in float32.

  Parameters: `w/kernel` float32 [D, E] and, with `use_bias`, `w/bias` float32 [E].

  Attributes:
    num_experts: number of experts, E.
    use_bias: True to add a bias.
    kernel_init: initializer of the kernel.
    bias_init: initializer of the bias.
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
  """Abstract base class of modules that assign tokens to experts.

  Routers compute on global arrays and in float32 for any dtype of the tokens, so results do not depend on the mesh or
  the number of devices. Groups are routed independently.

  Attributes:
    num_experts: number of experts of the layer, E.
    jitter_noise: half-width of the noise factor. In training the router's input is multiplied by numbers drawn
      uniformly from [1 - jitter_noise, 1 + jitter_noise], with the key stream 'jitter'.
      https://arxiv.org/abs/2101.03961, appendix C.
    ignore_padding_tokens: True to exclude padding from routing: tokens with a False `token_mask`, or without a mask,
      tokens that are all zero.
    padding_in_losses: True, as in T5X, for means of losses that include padding: ignored padding adds log(E)^2 to the
      z-loss, and more padding makes the losses smaller. False for means over routed tokens.
    use_bias: True for a bias in the router's projection.
    kernel_init: initializer of its kernel.
    bias_init: initializer of its bias.
  """

  num_experts: int
  jitter_noise: float = 0.0
  ignore_padding_tokens: bool = True
  padding_in_losses: bool = True
  use_bias: bool = False
  kernel_init: Initializer = default_router_init
  bias_init: Initializer = default_bias_init

  def __post_init__(self):
    values = {field.name: getattr(self, field.name, None) for field in dataclasses.fields(self)}
    checks.check(type(self).__name__, values, **self._expectations())
    super().__post_init__()

  def _expectations(self) -> dict[str, checks.Expectation]:
    """Return the expectations on options by name; subclasses add theirs."""
    return {
      'num_experts': checks.number(at_least=1, integer=True),
      'jitter_noise': checks.number(at_least=0, below=1),
      'padding_in_losses': checks.Expectation(
        'True with ignore_padding_tokens=False', lambda value: value or self.ignore_padding_tokens
      ),
      'bias_init': checks.Expectation(
        'the default with use_bias=False', lambda value: self.use_bias or value is default_bias_init
      ),
    }

  @property
  def capacity_options(self) -> tuple[str, ...]:
    """Names of options with other than default values that have an effect only with a capacity."""
    return ()

  @property
  def losses(self) -> tuple[str, ...]:
    """Names of the losses that the router has; all others are always 0."""
    return ('auxiliary_loss', 'router_z_loss')

  @property
  def shares_capacity(self) -> bool:
    """True if all groups share one buffer per expert, so that a group's drops depend on the other groups."""
    return False

  @property
  def needs_capacity(self) -> bool:
    """True if the router has no dropless form: the capacity determines the number of tokens of an expert."""
    return False

  @property
  def record_name(self) -> str:
    """Name of the recorded choices that the router can repeat, see `Routing.record`."""
    return 'expert_index'

  @property
  def uses_later_tokens(self) -> str:
    """When routing depends on later tokens: 'never', in 'training', or 'always'. Decoders log a warning."""
    return 'never'

  @property
  def needs_token_ids(self) -> bool:
    """True if the router routes by token ids."""
    return False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *,
    capacity: int | None,
    token_mask: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    deterministic: bool = False,
    recorded: RecordedChoice | None = None,
  ) -> Routing:
    """Route tokens.

    Args:
      x: <float>[G, T, D].
      capacity: number of slots of an expert for a group; None for no limit (dropless).
      token_mask: bool [G, T], False for padding; see `ignore_padding_tokens`.
      token_ids: int32 [G, T], for routers that use them.
      deterministic: True for no noise, no update of the router's state, and no other computation of training.
      recorded: choices to repeat.

    Returns:
      The routing.

    Raises:
      ConfigError: an argument of a wrong shape, or one that the router needs is missing.
    """
    self._check_inputs(x, capacity, token_mask, token_ids)
    token_mask = self._routed_tokens(x, token_mask)
    return self.route(x, capacity, token_mask, token_ids, deterministic, recorded)

  @abc.abstractmethod
  def route(
    self,
    x: jax.Array,
    capacity: int | None,
    token_mask: jax.Array | None,
    token_ids: jax.Array | None,
    deterministic: bool,
    recorded: RecordedChoice | None,
  ) -> Routing:
    """Route tokens after checks; see `__call__`. `token_mask` is None if no token is ignored."""

  def _check_inputs(self, x, capacity, token_mask, token_ids):
    shape = x.shape[:2]

    def is_per_token(array):
      return array is not None and array.shape == shape

    def are_ids(array):
      return is_per_token(array) and jnp.issubdtype(array.dtype, jnp.integer)

    per_token = checks.Expectation(f'an array of shape {shape}', is_per_token).or_none()
    capacities = checks.number(at_least=1, integer=True)
    if not self.needs_capacity:
      capacities = capacities.or_none()
    if self.needs_token_ids:
      ids = checks.Expectation(f'integers of shape {shape}', are_ids)
    else:
      ids = per_token
    checks.check(
      type(self).__name__,
      {'x': x, 'capacity': capacity, 'token_mask': token_mask, 'token_ids': token_ids},
      x=checks.Expectation('an array [groups, tokens of a group, width]', lambda x: x.ndim == 3),
      capacity=capacities,
      token_mask=per_token,
      token_ids=ids,
    )

  def _routed_tokens(self, x, token_mask):
    """Return bool [G, T], the tokens that are routed; None for all."""
    if not self.ignore_padding_tokens:
      return None
    if token_mask is None:
      return jnp.any(x != 0, axis=-1)
    return token_mask.astype(bool)

  def logits(self, x: jax.Array, deterministic: bool) -> jax.Array:
    """Return the logits, float32 [G, T, E].

    Args:
      x: tokens, [G, T, D].
      deterministic: True for logits without the jitter of training.
    """
    x = x.astype(jnp.float32)
    if self.jitter_noise > 0 and not deterministic and not self.is_initializing():
      x *= self._jitter(x.shape)
    project = RouterWeights(
      self.num_experts, self.use_bias, self.kernel_init, self.bias_init, name='router_weights'
    )
    return project(x)

  def _jitter(self, shape: tuple[int, ...]) -> jax.Array:
    rng = self.make_rng('jitter')
    low = 1.0 - self.jitter_noise
    high = 1.0 + self.jitter_noise
    return jax.random.uniform(rng, shape, jnp.float32, low, high)


def _replicate_last_dims(x: jax.Array, num_dims: int = 1) -> jax.Array:
  """Return `x` with its last `num_dims` dims replicated, and the others sharded as before.

  Sums over the width then have the same order on all meshes, so that choices do not depend on the mesh.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return x
  free = [jax.sharding.PartitionSpec.UNCONSTRAINED] * (x.ndim - num_dims)
  replicated = [None] * num_dims
  spec = jax.sharding.PartitionSpec(*free, *replicated)
  return jax.lax.with_sharding_constraint(x, spec)
