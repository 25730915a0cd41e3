"""Dropless expert MLP on rows sorted by expert, with any number of rows per expert."""

from collections.abc import Callable, Mapping
import dataclasses
import logging

import jax

from moe.dispatch import accelerators
from moe.dispatch import tiles
from moe.dispatch.mlp import DropoutMask
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.dispatch.types import check_params
from moe.routing import plan as plans
from moe.routing.plan import RowPlan
from t5x_lite import checks
from t5x_lite import layers
from t5x_lite.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class GroupedKernel:
  """Implementation of the dropless expert MLP.

  Attributes:
    mlp_fn: `(params, rows [N, D], group_sizes [E], spec, keep | None, balanced_rows) -> [N, D]`, see `grouped_mlp`.
    tokens_fn: `(params, tokens [S, D], gates [S, K], plan, group_sizes, spec, keep, balanced_rows) -> [S, D]`,
      including dispatch and combination. None if `mlp_fn` has another argument `plan`, with which its rows are tokens.
    unsupported_reason_fn: `(params, spec) -> reason why the current device does not support this MLP, or None`. None if
      it supports all.
  """

  mlp_fn: Callable[..., jax.Array]
  tokens_fn: Callable[..., jax.Array] | None = None
  unsupported_reason_fn: Callable[[MlpParams, MlpSpec], str | None] | None = None


_logger = logging.getLogger(__name__)
# True after 'auto' has logged its first choice in this process.
_has_logged_choice = False

# Kernels by name, and for each backend the kernels whose cost does not grow with the number of experts, best first.
KERNELS: Mapping[str, GroupedKernel] = {
  'tiles': GroupedKernel(tiles.tiled_mlp, tiles.tiled_tokens),
  'mosaic_gpu': GroupedKernel(
    accelerators.mosaic_gpu_mlp, unsupported_reason_fn=accelerators.mosaic_gpu_unsupported_reason
  ),
  'blackwell': GroupedKernel(
    accelerators.blackwell_mlp, unsupported_reason_fn=accelerators.blackwell_unsupported_reason
  ),
  'megablox': GroupedKernel(
    accelerators.megablox_mlp, unsupported_reason_fn=accelerators.megablox_unsupported_reason
  ),
  'padded': GroupedKernel(accelerators.padded_mlp),
}
KERNELS_OF_BACKEND: Mapping[str, tuple[str, ...]] = {
  'cpu': ('tiles', 'padded'),
  'gpu': ('mosaic_gpu', 'blackwell', 'padded'),
  'tpu': ('megablox', 'padded'),
  layers.PORTABLE: ('padded',),
}


def select_kernel(
  method: str, backend: str, params: MlpParams | None = None, spec: MlpSpec | None = None
) -> str:
  """Return the name of the grouped kernel for `method` on `backend`.

  Args:
    method: a kernel's name, or 'auto'.
    backend: 'cpu', 'gpu', 'tpu', or `layers.PORTABLE` for a program that runs on all.
    params: parameters of the MLP; None to select independently of the MLP.
    spec: computation of an expert.

  Raises:
    ConfigError: an unknown kernel, a kernel that the backend or the MLP does not support, or a backend without
      kernels.
  """
  kernels = KERNELS_OF_BACKEND.get(backend, ())
  if method == 'ragged_dot':
    remedy = f'On {backend!r} jax.lax.ragged_dot would multiply every row with every expert.'
  elif method in KERNELS:
    remedy = f'It is for another backend than {backend!r}.'
  else:
    remedy = ''
  expectations = {
    'backend': checks.one_of(KERNELS_OF_BACKEND, "Use dispatch='capacity' with a capacity factor."),
    'grouped kernel': checks.one_of(('auto', *kernels), remedy),
  }
  checks.check('', {'backend': backend, 'grouped kernel': method}, **expectations)

  def unsupported_reason(name):
    fn = KERNELS[name].unsupported_reason_fn
    if fn is None or params is None or spec is None:
      return None
    return fn(params, spec)

  if method == 'auto':
    reasons = []
    for name in kernels:
      reason = unsupported_reason(name)
      if reason is None:
        break
      reasons.append(f'{name!r} {reason}')
    else:
      raise AssertionError(f'No kernel of {backend!r} supports all parameters.')
    if params is not None and backend in ('gpu', 'tpu'):
      _log_choice(name, '; '.join(reasons) or 'device, dtype and dims allow it')
    return name
  reason = unsupported_reason(method)
  if reason is not None:
    raise ConfigError(
      f"The grouped kernel {method!r} {reason}. Use 'auto', or meet this requirement."
    )
  return method


def _log_choice(name: str, reason: str) -> None:
  global _has_logged_choice
  if not _has_logged_choice:
    _has_logged_choice = True
    _logger.info(
      "Grouped kernel 'auto' takes %r for the first experts of this process: %s. Others may differ, "
      'depending on their dims and dtypes.',
      name,
      reason,
    )


def grouped_mlp(
  params: MlpParams,
  rows: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  method: str = 'auto',
  balanced_rows: int | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows.

  Args:
    params: parameters of the experts.
    rows: <float>[N, D] sorted by expert, cast to `spec.dtype`.
    group_sizes: int32 [E], number of rows of each expert. Rows past their sum have outputs and gradients of 0.
    spec: computation of an expert.
    keep: hidden units that dropout keeps in the N rows; None for all.
    method: name of a kernel, or 'auto' for the backend's best.
    balanced_rows: number of rows if loads are balanced, for tile sizes: any loads have the same result; None for N.

  Returns:
    <spec.dtype>[N, D].

  Raises:
    ConfigError: inconsistent shapes, or a kernel that the backend does not support.
  """
  check_params(params, spec, rows.shape[-1])
  kernel = KERNELS[select_kernel(method, layers.traced_platform(), params, spec)]
  return kernel.mlp_fn(params, rows, group_sizes, spec, keep, balanced_rows)


def grouped_tokens(
  params: MlpParams,
  tokens: jax.Array,
  gates: jax.Array,
  plan: RowPlan,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  method: str = 'auto',
  balanced_rows: int | None = None,
) -> jax.Array:
  """Return for every token the sum of what its experts make of it, weighted by the gates.

  Args:
    params: parameters of the experts.
    tokens: <float>[S, D], cast to `spec.dtype`.
    gates: float32 [S, K].
    plan: of S * K choices, sorted by expert.
    group_sizes: int32 [E], how many rows each expert has.
    spec: computation of an expert.
    keep: hidden units that dropout keeps in the S * K rows; None for all.
    method: name of a kernel, or 'auto' for the backend's best.
    balanced_rows: see `grouped_mlp`.

  Returns:
    <spec.dtype>[S, D].

  Raises:
    ConfigError: a kernel that this backend cannot run well.
  """
  kernel = KERNELS[select_kernel(method, layers.traced_platform(), params, spec)]
  if kernel.tokens_fn is not None:
    return kernel.tokens_fn(params, tokens, gates, plan, group_sizes, spec, keep, balanced_rows)
  return plans.combine(
    kernel.mlp_fn(params, tokens, group_sizes, spec, keep, balanced_rows, plan), gates, plan
  )
