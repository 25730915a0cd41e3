"""The dropless expert MLP: rows sorted by expert, experts with as many rows as were sent to them."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from moe.dispatch import accelerators
from moe.dispatch import tiles
from moe.dispatch.types import MlpParams, MlpSpec, check_params
from moe.routing import plan as plans
from moe.routing.plan import RowPlan
from t5x_lite import layers
from t5x_lite.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class GroupedKernel:
  """One implementation of the dropless expert MLP.

  Attributes:
    mlp_fn: `(params, rows [N, D], group_sizes [E], spec, keep [N, F] | None) -> [N, D]`, as `grouped_mlp`.
    tokens_fn: `(params, tokens [S, D], gates [S, K], plan, group_sizes, spec, keep) -> [S, D]`, the same with the ways
      to the rows and back, for kernels that read tokens where they lie. None: they are moved by `plan`.
    refusal_fn: `(params, spec) -> why the device at hand cannot run this MLP, or None`. None: it runs all.
  """

  mlp_fn: Callable[..., jax.Array]
  tokens_fn: Callable[..., jax.Array] | None = None
  refusal_fn: Callable[[MlpParams, MlpSpec], str | None] | None = None


# Kernels by name, and those that a backend runs at a cost that does not grow with the number of experts, best first.
KERNELS: Mapping[str, GroupedKernel] = {
    'tiles': GroupedKernel(tiles.tiled_mlp, tiles.tiled_tokens),
    'mosaic_gpu': GroupedKernel(accelerators.mosaic_gpu_mlp, refusal_fn=accelerators.mosaic_gpu_refusal),
    'megablox': GroupedKernel(accelerators.megablox_mlp, refusal_fn=accelerators.megablox_refusal),
    'padded': GroupedKernel(accelerators.padded_mlp),
}
KERNELS_OF_BACKEND: Mapping[str, tuple[str, ...]] = {
    'cpu': ('tiles', 'padded'), 'gpu': ('mosaic_gpu', 'padded'), 'tpu': ('megablox', 'padded'),
    layers.PORTABLE: ('padded',)}


def select_kernel(method: str, backend: str, params: MlpParams | None = None, spec: MlpSpec | None = None) -> str:
  """Return the name of the grouped kernel that `method` means on `backend`.

  Args:
    method: a kernel's name, or 'auto'.
    backend: 'cpu', 'gpu', 'tpu', or `layers.PORTABLE` for a program that runs on all.
    params: of the MLP that it is for; None: what any MLP could have there.
    spec: what an expert computes.

  Raises:
    ConfigError: an unknown kernel, one that would compute densely there or cannot run this MLP, or a backend without a
      kernel.
  """
  if method == 'ragged_dot':
    raise ConfigError(
        f"grouped kernel 'ragged_dot' on {backend}: jax.lax.ragged_dot multiplies every row with every expert there, "
        "so its cost and memory grow with the number of experts. Use 'auto', or dispatch='capacity'.")
  if method != 'auto' and method not in KERNELS:
    raise ConfigError(f'unknown grouped kernel {method!r}.{did_you_mean(str(method), ["auto", *KERNELS])}')
  kernels = KERNELS_OF_BACKEND.get(backend, ())
  if not kernels:
    raise ConfigError(
        f'no grouped kernel for backend {backend!r}; expected one of {", ".join(KERNELS_OF_BACKEND)}. Use '
        "dispatch='capacity' with a capacity factor.")

  def refusal(name):
    fn = KERNELS[name].refusal_fn
    return None if fn is None or params is None else fn(params, spec)

  if method == 'auto':
    return next(name for name in kernels if refusal(name) is None)
  if method not in kernels:
    raise ConfigError(f'the grouped kernel {method!r} is not made for backend {backend!r}; expected '
                      f"{', '.join(kernels)}. Use 'auto'.")
  if refusal(method) is not None:
    raise ConfigError(f"the grouped kernel {method!r} {refusal(method)}. Use 'auto', or change that.")
  return method


def grouped_mlp(params: MlpParams, rows: jax.Array, group_sizes: jax.Array, spec: MlpSpec,
                keep: jax.Array | None = None, method: str = 'auto') -> jax.Array:
  """Let every expert transform its rows, which lie side by side.

  Args:
    params: the experts' parameters.
    rows: <float>[N, D] sorted by expert, cast to `spec.dtype`.
    group_sizes: int32 [E], how many rows each expert has. Rows past their sum give 0 and get a gradient of 0.
    spec: what an expert computes.
    keep: bool [N, F], hidden units that stay in dropout (`dropout_keep`); None for all.
    method: name of a kernel, or 'auto' for the backend's best.

  Returns:
    <spec.dtype>[N, D].

  Raises:
    ConfigError: shapes that do not fit each other, or a kernel that this backend cannot run well.
  """
  check_params(params, spec, rows.shape[-1])
  kernel = KERNELS[select_kernel(method, layers.traced_platform(), params, spec)]
  return kernel.mlp_fn(params, rows, group_sizes, spec, keep)


def grouped_tokens(params: MlpParams, tokens: jax.Array, gates: jax.Array, plan: RowPlan, group_sizes: jax.Array,
                   spec: MlpSpec, keep: jax.Array | None = None, method: str = 'auto') -> jax.Array:
  """Return for every token the sum of what its experts make of it, weighted by the gates.

  Args:
    params: the experts' parameters.
    tokens: <float>[S, D], cast to `spec.dtype`.
    gates: float32 [S, K].
    plan: of S * K choices, sorted by expert.
    group_sizes: int32 [E], how many rows each expert has.
    spec: what an expert computes.
    keep: bool [S * K, F], hidden units that stay in dropout, in the order of the rows; None for all.
    method: name of a kernel, or 'auto' for the backend's best.

  Returns:
    <spec.dtype>[S, D].

  Raises:
    ConfigError: a kernel that this backend cannot run well.
  """
  kernel = KERNELS[select_kernel(method, layers.traced_platform(), params, spec)]
  if kernel.tokens_fn is not None:
    return kernel.tokens_fn(params, tokens, gates, plan, group_sizes, spec, keep)
  rows = kernel.mlp_fn(params, plans.dispatch(tokens.astype(spec.dtype), plan), group_sizes, spec, keep)
  return plans.combine(rows, gates, plan)
